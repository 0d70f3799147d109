"""A result's HDR histograms as arrays: what its percentile curve and its bars are drawn from."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hdrh.codec import HdrCookieException, HdrLengthException
from hdrh.histogram import HdrHistogram

from loadtest.load.result import EncodedHistogram
from loadtest.report.errors import HistogramError
from loadtest.report.scales import Nines

Floats = npt.NDArray[np.float64]
US_PER_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of times, ascending.

    Attributes:
        low_ms, high_ms: float64 `[buckets]`, the first and last value that falls into each bucket.
        counts: int64 `[buckets]`, above 0.
    """

    low_ms: Floats
    high_ms: Floats
    counts: npt.NDArray[np.int64]

    @classmethod
    def decode(cls, encoded: EncodedHistogram) -> Histogram:
        """Reads it.

        Raises:
            HistogramError: if it is no HDR histogram, or has another count than is said beside it.
        """
        try:
            found = HdrHistogram.decode(encoded.encoded)
        except (TypeError, ValueError, OverflowError, HdrCookieException, HdrLengthException, zlib.error, struct.error,
                IndexError) as error:  # fmt: skip
            raise HistogramError(f"encoded: not an HDR histogram in V2 form: {error!r}") from error
        counts = np.array(found.counts, np.int64)
        if (total := int(counts.sum())) != encoded.count:
            raise HistogramError(f"encoded: holds {total} values, `count` says {encoded.count}")
        filled = np.flatnonzero(counts)
        low = [found.get_value_from_index(int(index)) for index in filled]
        high = [found.get_highest_equivalent_value(value) for value in low]
        return cls(np.array(low, np.float64) / US_PER_MS, np.array(high, np.float64) / US_PER_MS, counts[filled])

    @property
    def count(self) -> int:
        """Values in it."""
        return int(self.counts.sum())

    @property
    def middle_ms(self) -> Floats:
        """Of each bucket."""
        return (self.low_ms + self.high_ms) / 2

    def curve(self, scale: Nines, of: int | None = None, points: int = 400) -> tuple[Floats, Floats]:
        """Percentiles and the times at them, as far apart as the scale draws them.

        Args:
            scale: of the percentiles.
            of: how many values the percentiles are of; more than `count` if some have no time, which are later than
                all that have one. The curve ends where they begin.
            points: at most.

        Returns:
            float64 `[n]` each: percentiles from 0 to 1, and milliseconds.
        """
        total = of or self.count
        if not self.count:
            return np.empty(0), np.empty(0)
        # The largest value stands in the middle of its own share of the axis; at 1 it would stand at infinity.
        ends = 1 - 0.5 / total if total == self.count else self.count / total
        places = np.linspace(0.0, float(scale.place(ends)), points)
        quantiles = scale.at(places)
        # As a percentile's rank is reckoned in the result itself, see `rank_of`.
        wanted = np.clip(np.ceil(np.round(quantiles * total, 6)), 1, self.count)
        return quantiles, self.high_ms[np.searchsorted(np.cumsum(self.counts), wanted)]

    def bars(self, low_ms: float, high_ms: float, bars: int = 72) -> tuple[Floats, npt.NDArray[np.int64]]:
        """The counts in bars of equal ratio; all values must be within the ends.

        Returns:
            float64 `[n + 1]` edges in milliseconds, and int64 `[n]` counts; n is less than asked for where bars would
            be narrower than the histogram's own buckets.
        """
        edges = np.geomspace(low_ms, high_ms, bars + 1)
        # Between whole microseconds, so that no value stands on an edge.
        inner = np.unique(np.round(edges[1:-1] * US_PER_MS)) - 0.5
        edges = np.concatenate([[np.floor(low_ms * US_PER_MS) - 0.5], inner, [np.ceil(high_ms * US_PER_MS) + 0.5]])
        edges = np.unique(edges) / US_PER_MS
        counts, _ = np.histogram(self.middle_ms, edges, weights=self.counts)
        return edges, counts.astype(np.int64)


def merged(histograms: list[Histogram]) -> Histogram:
    """All values of several together."""
    low = np.concatenate([one.low_ms for one in histograms])
    high = np.concatenate([one.high_ms for one in histograms])
    counts = np.concatenate([one.counts for one in histograms])
    values, places = np.unique(low, return_inverse=True)
    highs = np.zeros_like(values)
    np.maximum.at(highs, places, high)
    return Histogram(values, highs, np.bincount(places, weights=counts, minlength=len(values)).astype(np.int64))
