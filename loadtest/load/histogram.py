"""HDR histograms of microseconds: recorded many at a time, merged by addition, read as milliseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
from hdrh.histogram import HdrHistogram

from loadtest.load.result import EncodedHistogram, Percentiles

Int64Array = npt.NDArray[np.int64]

# Ten minutes; a timeout is far below.
HIGHEST_US = 600_000_000
DIGITS = 3
DIGITS_OF_A_SECOND = 2


class LatencyHistogram:
    """An `HdrHistogram` of 1 us to 10 min.

    Args:
        digits: significant decimal digits: 3 tells 1000 from 1001.

    Attributes:
        min_us, max_us: the smallest and the greatest time, exactly; None while empty.
        sum_us: of all times, exactly.
    """

    def __init__(self, digits: int = DIGITS) -> None:
        self.min_us: int | None = None
        self.max_us: int | None = None
        self.sum_us = 0
        self._digits = digits
        self._hdr = HdrHistogram(1, HIGHEST_US, digits)
        # A view of the counters where the library keeps them.
        self._counts: npt.NDArray[np.uint64] = np.ctypeslib.as_array(self._hdr.counts)
        self._half_magnitude: int = self._hdr.sub_bucket_half_count_magnitude

    @property
    def count(self) -> int:
        """Values in it."""
        return int(self._hdr.total_count)

    def record(self, times_us: Int64Array) -> None:
        """Adds times, int64 [n]; below 1 us they count as 1 us, above 10 min as 10 min."""
        if not len(times_us):
            return
        times = np.clip(times_us, 1, HIGHEST_US)
        # HdrHistogram's index: the position of the highest bit picks the bucket, the bits after it the place in it.
        mask = self._hdr.sub_bucket_mask
        bits = np.frexp((times | mask).astype(np.float64))[1].astype(np.int64)
        bucket = bits - (self._half_magnitude + 1)
        places = ((bucket + 1) << self._half_magnitude) + (times >> bucket) - self._hdr.sub_bucket_half_count
        self._counts += np.bincount(places, minlength=len(self._counts)).astype(np.uint64)
        low, high = int(times.min()), int(times.max())
        self._hdr.total_count += len(times)
        self._hdr.min_value, self._hdr.max_value = min(self._hdr.min_value, low), max(self._hdr.max_value, high)
        self._note(low, high, int(times.sum()))

    def add(self, encoded: EncodedHistogram, min_us: int | None, max_us: int | None, sum_us: int) -> None:
        """Adds another one, as `encode` gave it, with its exact numbers, which the encoding does not keep."""
        if min_us is None or max_us is None:
            return
        self._hdr.decode_and_add(encoded.encoded)
        self._note(min_us, max_us, sum_us)

    def encode(self) -> EncodedHistogram:
        """Its text."""
        return EncodedHistogram(encoded=cast(bytes, self._hdr.encode()).decode("ascii"), count=self.count)

    def at_ranks(self, ranks: Sequence[int]) -> list[float | None]:
        """The times, in ms, of ranks from 1, the smallest; None beyond the last.

        A time is the highest one of its counter, as HdrHistogram has it, but no more than the exact greatest one.
        """
        if self.max_us is None:
            return [None] * len(ranks)
        ends = np.cumsum(self._counts)
        found: list[float | None] = []
        for rank in ranks:
            if rank > self.count:
                found.append(None)
                continue
            value = self._hdr.get_value_from_index(int(np.searchsorted(ends, rank)))
            found.append(min(int(self._hdr.get_highest_equivalent_value(value)), self.max_us) / 1000)
        return found

    def percentiles(self, out_of: int | None = None) -> Percentiles:
        """Its percentiles; the q-th is the time that at least q% of all are not above.

        Args:
            out_of: how many there are with those that never came, which count as later than all others; None if
                there are no such.
        """
        total = self.count if out_of is None else out_of
        if total == 0:
            return Percentiles(**dict.fromkeys(Percentiles.model_fields))
        complete = total == self.count
        p50, p90, p99, p999 = self.at_ranks([rank_of(share, total) for share in (0.5, 0.9, 0.99, 0.999)])
        return Percentiles(
            min_ms=_ms(self.min_us),
            mean_ms=self.sum_us / self.count / 1000 if complete else None,
            p50_ms=p50,
            p90_ms=p90,
            p99_ms=p99,
            p999_ms=p999,
            max_ms=_ms(self.max_us) if complete else None,
        )

    def _note(self, low: int, high: int, total: int) -> None:
        self.min_us = low if self.min_us is None else min(self.min_us, low)
        self.max_us = high if self.max_us is None else max(self.max_us, high)
        self.sum_us += total


def rank_of(share: float, total: int) -> int:
    """The rank, from 1, of the value that `share` of `total` values are not above."""
    # 0.99 * 1000 is 990.0000000000001 for some shares: what is whole but for rounding must stay so.
    return max(1, math.ceil(round(share * total, 6)))


def _ms(time_us: int | None) -> float | None:
    return None if time_us is None else time_us / 1000
