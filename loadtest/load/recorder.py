"""What processes record of their requests, and the result that follows from all records of a run."""

from __future__ import annotations

import datetime
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from hdrh.histogram import HdrHistogram

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
from loadtest.load.senders import NEVER, Failure, Outgoing

# Ten minutes; a timeout is far below.
HIGHEST_US = 600_000_000
DIGITS = 3

OK = 0
"""The code of a right answer."""
COLUMNS = ("due", "turn", "sent", "ended", "code")
ROW = np.dtype([(name, "<f8") for name in COLUMNS])
"""Of a request: when it was due, when the process came to it, when it was written to a connection (or `NEVER`), when
its answer or failure was there, all in seconds since the run's begin; and the number of its kind."""
EXAMPLES_OF_A_KIND = 3
MAX_EXAMPLE_CHARS = 300
MAX_EXAMPLES = 20

MAX_CPU_SHARE = 0.9
"""A process that was busy for more of the time had requests waiting for itself."""
# The generator's lateness is part of the latency that it measures: p99 may be too high by a tenth, never too low.
MAX_LAG_SHARE = 0.1
MIN_MAX_LAG_MS = 2.0
_AS_OFFERED = {"target", "ids", "candidates", "varied", "arrivals", "seed", "timeout_ms", "slo_ms"}

Float64Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Records:
    """All requests of a process that are over, in the order in which they ended.

    Attributes:
        rows: `ROW` [n].
        kinds: of failures, by `code`; that of `OK` is "ok".
        examples: messages of failed requests.
    """

    rows: Rows
    kinds: tuple[str, ...]
    examples: tuple[str, ...] = ()

    @property
    def answered(self) -> Rows:
        """Requests that were answered right."""
        answered: Rows = self.rows[self.rows["code"] == OK]
        return answered

    @property
    def errors(self) -> dict[str, int]:
        """Count failed requests by kind."""
        counts = np.bincount(self.rows["code"].astype(np.int64), minlength=len(self.kinds)).tolist()
        return {kind: count for kind, count in sorted(zip(self.kinds, counts, strict=True)) if count and kind != "ok"}


class Recorder:
    """Keeps a row for each request that is over.

    Args:
        begin: of the run, CLOCK_MONOTONIC seconds.
    """

    def __init__(self, begin: float) -> None:
        self.begin = begin
        self._raw = array("d")
        self._codes = {"ok": OK}
        self._examples: dict[str, list[str]] = {}

    def __len__(self) -> int:
        return len(self._raw) // len(COLUMNS)

    def add(self, request: Outgoing, failure: Failure | None) -> None:
        """Record a request; what a loop calls."""
        code = OK
        if failure is not None:
            code = self._codes.setdefault(failure.kind, len(self._codes))
            examples = self._examples.setdefault(failure.kind, [])
            if failure.message and len(examples) < EXAMPLES_OF_A_KIND:
                examples.append(f"{failure.kind}: {failure.message[:MAX_EXAMPLE_CHARS]}")
        begin, sent = self.begin, request.sent if request.sent == NEVER else request.sent - self.begin
        # `offset_s` as it was drawn: `begin` plus it and minus `begin` again may be in the second before.
        self._raw.extend((request.offset_s, request.turn - begin, sent, request.ended - begin, code))

    def records(self) -> Records:
        """Return all so far."""
        examples = tuple(text for kind in self._examples.values() for text in kind)
        return Records(np.frombuffer(self._raw.tobytes(), ROW), tuple(self._codes), examples)


def percentiles(seconds: npt.ArrayLike, out_of: int | None = None) -> Percentiles:
    """Return the percentiles of times; the q-th is the time that at least q% of all are not above.

    Args:
        seconds: float64 [n].
        out_of: how many there are with those that never came, which count as later than all others; None for n.
    """
    times_ms = np.sort(np.round(np.asarray(seconds, np.float64) * 1e3, 3))
    count = times_ms.size
    total = count if out_of is None else out_of
    complete = 0 < count == total

    def at(share: float) -> float | None:
        # 0.99 * 1000 is 990.0000000000001 for some shares: what is whole but for rounding must stay so.
        rank = max(1, math.ceil(round(share * total, 6)))
        return float(times_ms[rank - 1]) if rank <= count else None

    return Percentiles(
        min_ms=float(times_ms[0]) if count else None,
        mean_ms=float(times_ms.mean()) if complete else None,
        p50_ms=at(0.5),
        p90_ms=at(0.9),
        p99_ms=at(0.99),
        p999_ms=at(0.999),
        max_ms=float(times_ms[-1]) if complete else None,
    )


def encode_histogram(seconds: npt.ArrayLike) -> EncodedHistogram:
    """Encode times, float64 [n], as an HDR histogram; below 1 us they count as 1 us, above 10 min as 10 min."""
    times_us = np.clip(np.rint(np.asarray(seconds, np.float64) * 1e6), 1, HIGHEST_US).astype(np.int64)
    histogram = HdrHistogram(1, HIGHEST_US, DIGITS)
    distinct, counts = np.unique(times_us, return_counts=True)
    for time_us, count in zip(distinct.tolist(), counts.tolist(), strict=True):
        histogram.record_value(time_us, count)
    return EncodedHistogram(encoded=histogram.encode().decode("ascii"), count=times_us.size)


class Ready(NamedTuple):
    """How many requests a process has made, the model that they ask for, and the workload's complete name."""

    requests: int
    model: str
    workload: str


class Done(NamedTuple):
    """What one process did in a run: its requests, CPU seconds in the time that counts, and connections opened."""

    records: Records
    cpu_s: float
    connections: int


def make_result(
    load: OfferedLoad, run: RunConfig, ready: Sequence[Ready], began: float, done: Sequence[Done]
) -> LoadResult:
    """Add up what the processes of one run measured, which began at `began`, wall clock in seconds since 1970."""
    parts = [
        replace(process.records, rows=process.records.rows[process.records.rows["due"] >= run.warmup_s])
        for process in done
    ]
    rows = np.concatenate([records.rows for records in parts])
    answered = rows[rows["code"] == OK]
    latency_s, service_s = answered["ended"] - answered["due"], answered["ended"] - answered["sent"]
    within_slo = int((latency_s <= load.slo_ms / 1000).sum())
    latency = percentiles(latency_s)
    lags = [percentiles(records.rows["turn"] - records.rows["due"]) for records in parts]
    generator = Generator(
        processes=tuple(
            GeneratorProcess(
                cpu_share=process.cpu_s / run.duration_s,
                due=records.rows.size,
                connections=process.connections,
                lag_p99_ms=lag.p99_ms,
                lag_max_ms=lag.max_ms,
            )
            for process, records, lag in zip(done, parts, lags, strict=True)
        ),
        lag_p99_ms=percentiles(rows["turn"] - rows["due"]).p99_ms,
        max_lag_p99_ms=max(MIN_MAX_LAG_MS, MAX_LAG_SHARE * (latency.p99_ms or 0.0)),
        max_cpu_share=MAX_CPU_SHARE,
        max_in_flight=load.max_in_flight,
        max_connections=load.max_connections if load.at.scheme == "http" else load.grpc_channels,
    )
    reasons = invalid_because(generator, rows.size)
    return LoadResult(
        api=load.spoken,
        model=ready[0].model,
        workload=ready[0].workload,
        requests=sum(process.requests for process in ready),
        **load.model_dump(include=_AS_OFFERED),
        **run.model_dump(exclude={"seed"}),
        started_at=datetime.datetime.fromtimestamp(began, datetime.UTC).isoformat(),
        due=rows.size,
        sent=int((rows["sent"] != NEVER).sum()),
        answered=answered.size,
        within_slo=within_slo,
        errors=dict(sorted(sum((Counter(records.errors) for records in parts), Counter()).items())),
        error_examples=tuple(text for process in done for text in process.records.examples)[:MAX_EXAMPLES],
        goodput=within_slo / run.duration_s,
        throughput=answered.size / run.duration_s,
        latency=latency,
        latency_of_due=percentiles(latency_s, out_of=rows.size),
        service=percentiles(service_s),
        latency_histogram=encode_histogram(latency_s),
        service_histogram=encode_histogram(service_s),
        time_line=_time_line(run, np.concatenate([process.records.rows for process in done])),
        generator=generator,
        valid=not reasons,
        invalid_because=reasons,
        machine=this_machine(),
        versions=versions(),
    )


def invalid_because(generator: Generator, due: int) -> tuple[str, ...]:
    """Return why a run's numbers would be the generator's rather than the server's; nothing if they are not."""
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


def _time_line(run: RunConfig, rows: Rows) -> tuple[Second, ...]:
    ends = np.arange(1, math.ceil(run.until_s) + 1)
    by_due = rows[np.argsort(rows["due"], kind="stable")]
    turns = np.searchsorted(np.sort(rows["turn"]), ends)
    over = np.searchsorted(np.sort(rows["ended"]), ends)
    line = []
    for second, of_second in enumerate(np.split(by_due, np.searchsorted(by_due["due"], ends))[:-1]):
        answered = of_second[of_second["code"] == OK]
        latency = percentiles(answered["ended"] - answered["due"])
        line.append(
            Second(
                at_s=second,
                warmup=second < run.warmup_s,
                due=of_second.size,
                ok=answered.size,
                errors=of_second.size - answered.size,
                **latency.model_dump(include={"p50_ms", "p99_ms"}),
                in_flight=int(turns[second] - over[second]),
            )
        )
    return tuple(line)
