"""What one process records of its requests, in HDR histograms of microseconds, and the sum of all processes."""

from __future__ import annotations

import datetime
import itertools
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from hdrh.histogram import HdrHistogram
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from loadtest.load.config import OfferedLoad, RunConfig
from loadtest.load.result import (
    EncodedHistogram,
    Generator,
    GeneratorProcess,
    LoadResult,
    Percentiles,
    Second,
    this_machine,
    versions,
)

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

MAX_CPU_SHARE = 0.9
"""A process that was busy for more of the time had requests waiting for itself."""
# The generator's lateness is part of the latency that it measures: p99 may be too high by a tenth, never too low.
MAX_LAG_SHARE = 0.1
MIN_MAX_LAG_MS = 2.0
MAX_EXAMPLES = 20
_AS_ASKED = {"target", "ids", "candidates", "varied", "arrivals", "seed", "timeout_ms", "slo_ms"}

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
        self.digits = digits
        self.min_us: int | None = None
        self.max_us: int | None = None
        self.sum_us = 0
        self._hdr = HdrHistogram(1, HIGHEST_US, digits)
        # A view of the counters where the library keeps them.
        self._counts: npt.NDArray[np.uint64] = np.ctypeslib.as_array(self._hdr.counts)
        self._half_magnitude: int = self._hdr.sub_bucket_half_count_magnitude

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(cls._dump)
        return core_schema.no_info_plain_validator_function(cls._load, serialization=written)

    def _dump(self) -> list[Any]:
        # Most counters are 0.
        places = np.flatnonzero(self._counts)
        counts = self._counts[places]
        return [self.digits, places.tolist(), counts.tolist(), self.min_us, self.max_us, self.sum_us]

    @classmethod
    def _load(cls, dumped: list[Any]) -> LatencyHistogram:
        digits, places, counts, low, high, total = dumped
        histogram = cls(digits)
        histogram._add(np.array(places, np.int64), np.array(counts, np.uint64), low, high, total)
        return histogram

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
        counts = np.bincount(places, minlength=len(self._counts)).astype(np.uint64)
        self._add(slice(None), counts, int(times.min()), int(times.max()), int(times.sum()))

    def add(self, other: LatencyHistogram) -> None:
        """Add another one of as many digits."""
        self._add(slice(None), other._counts, other.min_us, other.max_us, other.sum_us)

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

    def _add(
        self,
        places: slice | Int64Array,
        counts: npt.NDArray[np.uint64],
        low: int | None,
        high: int | None,
        total: int,
    ) -> None:
        if low is None or high is None:
            return
        self._counts[places] += counts
        self._hdr.total_count += int(counts.sum())
        self._hdr.min_value, self._hdr.max_value = min(self._hdr.min_value, low), max(self._hdr.max_value, high)
        self.min_us = low if self.min_us is None else min(self.min_us, low)
        self.max_us = high if self.max_us is None else max(self.max_us, high)
        self.sum_us += total


def rank_of(share: float, total: int) -> int:
    """Find the rank, from 1, of the value that `share` of `total` values are not above."""
    # 0.99 * 1000 is 990.0000000000001 for some shares: what is whole but for rounding must stay so.
    return max(1, math.ceil(round(share * total, 6)))


def merged(parts: Iterable[LatencyHistogram], *, digits: int = DIGITS) -> LatencyHistogram:
    """Add histograms of as many digits up."""
    total = LatencyHistogram(digits)
    for part in parts:
        total.add(part)
    return total


@dataclass(slots=True)
class Records:
    """All that one process recorded.

    Attributes:
        by_second: [4, seconds]: requests that were due in each second of the run, those of them answered right,
            how many it came to, and how many were over.
        latency, service: of right answers to requests that were due after the warm-up.
        lag: how late the process came to each request that was due after the warm-up.
        sent, within_slo, errors: of requests that were due after the warm-up.
        examples: messages of failed requests.
        latency_by_second: of those answered right, by the second in which they were due.
    """

    by_second: list[list[int]] = field(default_factory=list)
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    service: LatencyHistogram = field(default_factory=LatencyHistogram)
    lag: LatencyHistogram = field(default_factory=LatencyHistogram)
    sent: int = 0
    within_slo: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    examples: tuple[str, ...] = ()
    latency_by_second: dict[int, LatencyHistogram] = field(default_factory=dict)


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
        self._recent = LatencyHistogram(DIGITS_OF_A_SECOND)
        self._by_second = np.zeros((4, int(np.ceil(until_s))), np.int64)
        self._found = Records()

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
        found = self._found
        # What came after the last second of the run is in none.
        seconds = self._by_second.shape[1]
        for row, times in enumerate((intended, intended[ok], turn, ended)):
            self._by_second[row] += np.bincount(times[times < seconds].astype(np.int64), minlength=seconds)
        # Requests that are over at about the same time were due in a few seconds.
        second = intended.astype(np.int64)
        for one in np.unique(second[ok]).tolist():
            histogram = found.latency_by_second.setdefault(one, LatencyHistogram(DIGITS_OF_A_SECOND))
            histogram.record(latency_us[ok & (second == one)])

        measured = intended >= self._warmup_s
        answered = measured & ok
        self._counts += np.bincount(codes[measured].astype(np.int64), minlength=MAX_KINDS + 1)
        found.sent += int((measured & (sent != NEVER)).sum())
        found.within_slo += int((answered & (ended - intended <= self._slo_s)).sum())
        found.latency.record(latency_us[answered])
        found.service.record(_us(ended - sent)[answered])
        found.lag.record(_us(turn - intended)[measured])

    def take_recent(self) -> LatencyHistogram:
        """Give the latency of the right answers since it was last called."""
        self.flush()
        taken, self._recent = self._recent, LatencyHistogram(DIGITS_OF_A_SECOND)
        return taken

    def records(self) -> Records:
        """Give all so far."""
        self.flush()
        counted = zip(self._codes, self._counts.tolist(), strict=False)
        self._found.by_second = self._by_second.tolist()
        self._found.errors = {kind: count for kind, count in counted if count and kind != "ok"}
        self._found.examples = tuple(one for kept in self._examples.values() for one in kept)
        return self._found


def _us(times_s: Float64Array) -> Int64Array:
    return np.rint(times_s * 1e6).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Ready:
    """How many requests a generator has made, the model that they ask for, and the workload's whole name."""

    requests: int
    model: str
    workload: str


@dataclass(frozen=True, slots=True)
class Done:
    """What one process did in a run.

    Attributes:
        records: all of it.
        cpu_s: CPU seconds that the generator used from the end of the warm-up to the end of sending.
        connections: opened in this run.
    """

    records: Records
    cpu_s: float
    connections: int


def make_result(
    config: OfferedLoad,
    run: RunConfig,
    ready: Sequence[Ready],
    began: float,
    done: Sequence[Done],
) -> LoadResult:
    """Add up what the processes of one run measured, which began at `began`, wall clock in seconds since 1970."""
    records = [one.records for one in done]
    latency = merged(one.latency for one in records)
    service = merged(one.service for one in records)
    errors: Counter[str] = Counter()
    for one in records:
        errors.update(one.errors)
    due = latency.count + errors.total()
    within_slo = sum(one.within_slo for one in records)
    generator = _generator(config, run, done, latency)
    reasons = invalid_because(generator, due)
    return LoadResult(
        api=config.spoken,
        model=ready[0].model,
        workload=ready[0].workload,
        requests=sum(one.requests for one in ready),
        **config.model_dump(include=_AS_ASKED),
        **run.model_dump(exclude={"seed"}),
        started_at=datetime.datetime.fromtimestamp(began, datetime.UTC).isoformat(),
        due=due,
        sent=sum(one.sent for one in records),
        answered=latency.count,
        within_slo=within_slo,
        errors=dict(sorted(errors.items())),
        error_examples=tuple(itertools.chain.from_iterable(one.examples for one in records))[:MAX_EXAMPLES],
        goodput=within_slo / run.duration_s,
        throughput=latency.count / run.duration_s,
        latency=latency.percentiles(),
        latency_of_due=latency.percentiles(out_of=due),
        service=service.percentiles(),
        latency_histogram=latency.encode(),
        service_histogram=service.encode(),
        time_line=_time_line(run, done),
        generator=generator,
        valid=not reasons,
        invalid_because=reasons,
        machine=this_machine(),
        versions=versions(),
    )


def invalid_because(generator: Generator, due: int) -> tuple[str, ...]:
    """Say why a run's numbers would be the generator's rather than the server's; nothing if they are the server's."""
    reasons = [
        f"process {number} that sends used {process.cpu_share:.0%} of a core; at most {generator.max_cpu_share:.0%} is "
        "allowed. More --processes may help, or a machine of its own."
        for number, process in enumerate(generator.processes)
        if process.cpu_share > generator.max_cpu_share
    ]
    lag = generator.lag_p99_ms
    if lag is not None and lag > generator.max_lag_p99_ms:
        reasons.append(
            f"the generator came to one of 100 requests {lag:.2f} ms late or more; at most "
            f"{generator.max_lag_p99_ms:.2f} ms is allowed: {MAX_LAG_SHARE:.0%} of the latency's p99, or "
            f"{MIN_MAX_LAG_MS:g} ms."
        )
    if due == 0:
        reasons.append("no request was due: the rate is too low for so short a run.")
    return tuple(reasons)


def _generator(config: OfferedLoad, run: RunConfig, done: Sequence[Done], latency: LatencyHistogram) -> Generator:
    processes = []
    for one in done:
        lag = merged([one.records.lag]).percentiles()
        processes.append(
            GeneratorProcess(
                cpu_share=one.cpu_s / run.duration_s,
                due=one.records.lag.count,
                connections=one.connections,
                lag_p99_ms=lag.p99_ms,
                lag_max_ms=lag.max_ms,
            )
        )
    p99_ms = latency.percentiles().p99_ms
    return Generator(
        processes=tuple(processes),
        lag_p99_ms=merged(one.records.lag for one in done).percentiles().p99_ms,
        max_lag_p99_ms=max(MIN_MAX_LAG_MS, MAX_LAG_SHARE * (p99_ms or 0.0)),
        max_cpu_share=MAX_CPU_SHARE,
        max_in_flight=config.max_in_flight,
        max_connections=config.max_connections if config.at.scheme == "http" else config.grpc_channels,
    )


def _time_line(run: RunConfig, done: Sequence[Done]) -> tuple[Second, ...]:
    records = [one.records for one in done]
    due, ok, turns, ends = np.sum([one.by_second for one in records], axis=0)
    in_flight = np.cumsum(turns - ends)
    line = []
    for second in range(len(due)):
        parts = [one.latency_by_second[second] for one in records if second in one.latency_by_second]
        latency = merged(parts, digits=DIGITS_OF_A_SECOND).percentiles()
        line.append(
            Second(
                at_s=second,
                warmup=second < run.warmup_s,
                due=int(due[second]),
                ok=int(ok[second]),
                errors=int(due[second] - ok[second]),
                p50_ms=latency.p50_ms,
                p99_ms=latency.p99_ms,
                in_flight=int(in_flight[second]),
            )
        )
    return tuple(line)
