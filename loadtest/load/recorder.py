"""What one process records of its requests, in HDR histograms of microseconds that are merged by addition."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
from hdrh.histogram import HdrHistogram
from pydantic import Field

from loader.snapshot.manifest import Frozen
from loadtest.load.result import Count, EncodedHistogram, Percentiles

# Ten minutes; a timeout is far below.
HIGHEST_US = 600_000_000
DIGITS = 3
DIGITS_OF_A_SECOND = 2

OK = 0
NEVER = -1.0
"""The time at which a request was sent that was not."""
COLUMNS = 5
RECORDS_PER_FLUSH = 4096
MAX_KINDS = 64
EXAMPLES_OF_A_KIND = 3
MAX_EXAMPLE_CHARS = 300
OTHER = "other"

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


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
        self._hdr = HdrHistogram(1, HIGHEST_US, digits)
        # A view of the counters where the library keeps them.
        self._counts: npt.NDArray[np.uint64] = np.ctypeslib.as_array(self._hdr.counts)
        self._half_magnitude: int = self._hdr.sub_bucket_half_count_magnitude

    @property
    def count(self) -> int:
        """Count the values in it."""
        return int(self._hdr.total_count)

    def record(self, times_us: Int64Array) -> None:
        """Add times, int64 [n]; below 1 us they count as 1 us, above 10 min as 10 min."""
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
        """Add another one, as `encode` gave it, with its exact numbers, which the encoding does not keep."""
        if min_us is None or max_us is None:
            return
        self._hdr.decode_and_add(encoded.encoded)
        self._note(min_us, max_us, sum_us)

    def encode(self) -> EncodedHistogram:
        """Write it as text."""
        return EncodedHistogram(encoded=cast(bytes, self._hdr.encode()).decode("ascii"), count=self.count)

    def at_ranks(self, ranks: Sequence[int]) -> list[float | None]:
        """Find the times, in ms, of ranks from 1, the smallest; None beyond the last.

        A time is the highest one of its counter, as HdrHistogram has it, but no more than the exact greatest one.
        """
        ends = np.cumsum(self._counts)
        found: list[float | None] = []
        for rank in ranks:
            if self.max_us is None or rank > self.count:
                found.append(None)
                continue
            value = self._hdr.get_value_from_index(int(np.searchsorted(ends, rank)))
            found.append(min(int(self._hdr.get_highest_equivalent_value(value)), self.max_us) / 1000)
        return found

    def percentiles(self, out_of: int | None = None) -> Percentiles:
        """Give its percentiles; the q-th is the time that at least q% of all are not above.

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
            min_ms=None if self.min_us is None else self.min_us / 1000,
            mean_ms=self.sum_us / self.count / 1000 if complete else None,
            p50_ms=p50,
            p90_ms=p90,
            p99_ms=p99,
            p999_ms=p999,
            max_ms=self.max_us / 1000 if complete and self.max_us is not None else None,
        )

    def _note(self, low: int, high: int, total: int) -> None:
        self.min_us = low if self.min_us is None else min(self.min_us, low)
        self.max_us = high if self.max_us is None else max(self.max_us, high)
        self.sum_us += total


def rank_of(share: float, total: int) -> int:
    """Find the rank, from 1, of the value that `share` of `total` values are not above."""
    # 0.99 * 1000 is 990.0000000000001 for some shares: what is whole but for rounding must stay so.
    return max(1, math.ceil(round(share * total, 6)))


class RecordedTimes(Frozen):
    """A histogram on its way from one process to another."""

    histogram: EncodedHistogram
    min_us: Count | None
    max_us: Count | None
    sum_us: Count


def recorded(histogram: LatencyHistogram) -> RecordedTimes:
    """Make a histogram ready to be sent."""
    return RecordedTimes(
        histogram=histogram.encode(), min_us=histogram.min_us, max_us=histogram.max_us, sum_us=histogram.sum_us
    )


def merged(parts: Iterable[RecordedTimes], *, digits: int = DIGITS) -> LatencyHistogram:
    """Add histograms up."""
    total = LatencyHistogram(digits)
    for part in parts:
        total.add(part.histogram, part.min_us, part.max_us, part.sum_us)
    return total


class Records(Frozen):
    """All that one process recorded.

    Attributes:
        latency, service: of right answers to requests that were due after the warm-up.
        lag: how late the process came to each request that was due after the warm-up.
        sent, within_slo, errors: of requests that were due after the warm-up.
        examples: messages of failed requests.
        due_by_second, ok_by_second: requests that were due in each second of the run, and those of them answered right.
        turns_by_second, ends_by_second: how many requests it came to, and how many were over, in each second.
        latency_by_second: of those answered right, by the second in which they were due.
    """

    latency: RecordedTimes
    service: RecordedTimes
    lag: RecordedTimes
    sent: Count
    within_slo: Count
    errors: dict[str, Count]
    examples: tuple[str, ...]
    due_by_second: tuple[Count, ...]
    ok_by_second: tuple[Count, ...]
    turns_by_second: tuple[Count, ...]
    ends_by_second: tuple[Count, ...]
    latency_by_second: dict[int, RecordedTimes] = Field(max_length=100_000)


class Recorder:
    """Takes one record for each request when it is over. Cheap: a record is five numbers; they are sorted in thousands.

    Args:
        warmup_s: requests that were due before are left out of everything but the seconds.
        until_s: end of the run's sending.
        slo_s: a right answer within it is in time.

    Attributes:
        due, ok: requests that are over so far, and those of them answered right; warm-up included.
    """

    def __init__(self, warmup_s: float, until_s: float, slo_s: float) -> None:
        self.due = 0
        self.ok = 0
        self._warmup_s = warmup_s
        self._slo_s = slo_s
        self._raw = array("d")
        self._codes = {"ok": OK}
        self._counts = np.zeros(MAX_KINDS + 1, np.int64)
        self._examples: dict[int, list[str]] = {}
        self._latency, self._service, self._lag = LatencyHistogram(), LatencyHistogram(), LatencyHistogram()
        self._recent = LatencyHistogram(DIGITS_OF_A_SECOND)
        self._sent = 0
        self._within_slo = 0
        self._seconds = int(np.ceil(until_s))
        self._due_by_second, self._ok_by_second, self._turns, self._ends = np.zeros((4, self._seconds), np.int64)
        self._latency_by_second: dict[int, LatencyHistogram] = {}

    def failure(self, kind: str, message: str = "") -> int:
        """Give the code of a kind of error, and keep the first few messages. Beyond 63 kinds all are `other`."""
        code = self._codes.get(kind)
        if code is None:
            if len(self._codes) >= MAX_KINDS and kind != OTHER:
                return self.failure(OTHER, f"{kind}: {message}")
            code = self._codes[kind] = len(self._codes)
        kept = self._examples.setdefault(code, [])
        if message and len(kept) < EXAMPLES_OF_A_KIND:
            kept.append(f"{kind}: {message[:MAX_EXAMPLE_CHARS]}")
        return code

    def add(self, intended: float, turn: float, sent: float, ended: float, code: int) -> None:
        """Record a request that is over.

        Args:
            intended: when it was due; all times are in seconds since the run's begin.
            turn: when the process came to it.
            sent: when it was written to a connection, or `NEVER`.
            ended: when its answer, or its failure, was there.
            code: `OK`, or what `failure` gave.
        """
        self._raw.extend((intended, turn, sent, ended, code))
        if len(self._raw) >= COLUMNS * RECORDS_PER_FLUSH:
            self.flush()

    def flush(self) -> None:
        """Sort what was added since the last time into the histograms."""
        if not self._raw:
            return
        raw, self._raw = np.frombuffer(self._raw, np.float64).reshape(-1, COLUMNS), array("d")
        intended, turn, sent, ended, codes = raw.T
        ok = codes == OK
        latency_us = _us(ended - intended)
        self.due += len(raw)
        self.ok += int(ok.sum())
        self._recent.record(latency_us[ok])
        self._sort_into_seconds(intended, turn, ended, ok, latency_us)

        measured = intended >= self._warmup_s
        answered = measured & ok
        self._counts += np.bincount(codes[measured].astype(np.int64), minlength=MAX_KINDS + 1)
        self._sent += int((measured & (sent != NEVER)).sum())
        self._within_slo += int((answered & (ended - intended <= self._slo_s)).sum())
        self._latency.record(latency_us[answered])
        self._service.record(_us(ended - sent)[answered])
        self._lag.record(_us(turn - intended)[measured])

    def take_recent(self) -> RecordedTimes:
        """Give the latency of the right answers since it was last called."""
        self.flush()
        taken, self._recent = self._recent, LatencyHistogram(DIGITS_OF_A_SECOND)
        return recorded(taken)

    def records(self) -> Records:
        """Give all so far."""
        self.flush()
        counted = zip(self._codes, self._counts.tolist(), strict=False)
        return Records(
            latency=recorded(self._latency),
            service=recorded(self._service),
            lag=recorded(self._lag),
            sent=self._sent,
            within_slo=self._within_slo,
            errors={kind: count for kind, count in counted if count and kind != "ok"},
            examples=tuple(one for kept in self._examples.values() for one in kept),
            due_by_second=tuple(self._due_by_second.tolist()),
            ok_by_second=tuple(self._ok_by_second.tolist()),
            turns_by_second=tuple(self._turns.tolist()),
            ends_by_second=tuple(self._ends.tolist()),
            latency_by_second={second: recorded(one) for second, one in self._latency_by_second.items()},
        )

    def _sort_into_seconds(
        self,
        intended: Float64Array,
        turn: Float64Array,
        ended: Float64Array,
        ok: npt.NDArray[np.bool_],
        latency_us: Int64Array,
    ) -> None:
        second = intended.astype(np.int64)
        self._due_by_second += self._by_second(second)
        self._ok_by_second += self._by_second(second[ok])
        self._turns += self._by_second(turn.astype(np.int64))
        self._ends += self._by_second(ended.astype(np.int64))
        # Requests that are over at about the same time were due in a few seconds.
        for one in np.unique(second[ok]).tolist():
            histogram = self._latency_by_second.setdefault(one, LatencyHistogram(DIGITS_OF_A_SECOND))
            histogram.record(latency_us[ok & (second == one)])

    def _by_second(self, seconds: Int64Array) -> Int64Array:
        """Count those in each second of the run; what came after its last is in none."""
        return np.bincount(seconds[seconds < self._seconds], minlength=self._seconds)


def _us(times_s: Float64Array) -> Int64Array:
    return np.rint(times_s * 1e6).astype(np.int64)
