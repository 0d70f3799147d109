"""What a load test measured: rows of all requests, and the JSON document of `--json` that follows from them.

Times of a run (`at_s`) count from its begin, the first intended send time, so the first `warmup_s` of them are warm-up.
All counts and percentiles of a run are of the requests that were due after it; only the time line has all.

Latency counts from the intended send time to the answer, so whatever delayed the sending is in it. Service time counts
from when the request was written to a connection. Both are of answers that are right; what failed is in `errors`, and
in `latency_of_due`, where a failed request is later than any answer.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import platform
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import psutil
from pydantic import BaseModel, Field

from loader.snapshot.tables import Frozen
from loadtest.load.config import Arrivals, OfferedLoad, RunConfig
from loadtest.load.senders import NEVER, Failure, Outgoing
from loadtest.workloads.payloads import Encoding

Count: TypeAlias = Annotated[int, Field(ge=0)]
Amount: TypeAlias = Annotated[float, Field(ge=0)]

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

Float64Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.void]

LIBRARIES = ("shardrank", "uvloop", "httptools", "grpcio")


class Machine(Frozen):
    """Where it ran: host name, model of its processors, cores that the process may use, RAM, and kernel."""

    name: str
    cpu: str
    cores: int = Field(ge=0)
    memory_bytes: int = Field(ge=0)
    system: str


def this_machine() -> Machine:
    """Describe the machine that this process runs on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return Machine(
        name=platform.node() or "unnamed",
        cpu=next(names, platform.processor() or platform.machine()),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
    )


def versions() -> dict[str, str]:
    """List the versions of Python and of the libraries that the generator sends with."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in LIBRARIES}}


def write_document(document: BaseModel, file: Path | None) -> None:
    """Write a document as JSON, if there is a file for it. Raises OSError."""
    if file is not None:
        file.write_text(document.model_dump_json(indent=1) + "\n", encoding="utf-8")


class Percentiles(Frozen):
    """Of times, in milliseconds; None where nothing was recorded or, in `latency_of_due`, that request failed."""

    min_ms: Amount | None
    mean_ms: Amount | None
    p50_ms: Amount | None
    p90_ms: Amount | None
    p99_ms: Amount | None
    p999_ms: Amount | None
    max_ms: Amount | None


class Second(Frozen):
    """The requests that were due in one second of the run, which began at `at_s`.

    Attributes:
        warmup: whether it began in the warm-up, whose requests are left out of the run's numbers.
        due, ok, errors: requests, and how many of these were answered right and failed.
        p50_ms, p99_ms: latency of those answered right; None if there are none.
        in_flight: requests that were out, or waited for a connection, at its end.
    """

    at_s: Amount
    warmup: bool
    due: Count
    ok: Count
    errors: Count
    p50_ms: Amount | None
    p99_ms: Amount | None
    in_flight: Count


class GeneratorProcess(Frozen):
    """One process that sent requests: CPU seconds for each second after the warm-up, and connections opened in all.

    The lag is how late it came to its requests, not for how long these waited for a connection.
    """

    cpu_share: Amount
    due: Count
    connections: Count
    lag_p99_ms: Amount | None
    lag_max_ms: Amount | None


class Generator(Frozen):
    """What the generator itself did, and beyond which lag at p99 of all processes together the run is not valid."""

    processes: tuple[GeneratorProcess, ...]
    lag_p99_ms: Amount | None
    max_lag_p99_ms: Amount


class Measured(Frozen):
    """What the results of a run and of a replay both have.

    Attributes:
        model: requested.
        sent, answered: requests written to a connection, and those of them that were answered right.
        errors: how many failed, by kind: `too_many_in_flight` (not sent), `connect`, `connection`, `timeout`,
            `bad_answer`, `http_<status>`, `grpc_<status name>`.
        error_examples: messages of the first few.
        latency, service: of right answers, from the intended and from the actual send.
        latency_of_due: latency over all that were due, where a failed request is later than any answer.
        versions: of shardrank, Python and the libraries the generator sends with, by name.
    """

    target: str
    model: str
    sent: Count
    answered: Count
    errors: dict[str, Count]
    error_examples: tuple[str, ...] = ()
    latency: Percentiles
    latency_of_due: Percentiles
    service: Percentiles
    machine: Machine
    versions: dict[str, str]


class LoadResult(Measured, RunConfig):
    """One run at one rate.

    What is not listed is as in `Measured`, `OfferedLoad` and `RunConfig`.

    Attributes:
        workload: its complete name.
        ids, candidates: as they were given; None for the workload's own.
        requests: distinct ones, all processes together.
        started_at: wall clock of the run's begin, ISO 8601 with UTC offset.
        due: requests whose intended time was within the duration: `answered` and all `errors`.
        within_slo: of these, answered right and in time.
        goodput, throughput: answers in time, and right answers, for each second of the duration.
        time_line: second by second, warm-up included.
        valid: whether the numbers are the server's and not the generator's.
    """

    kind: Literal["run"] = "run"
    format_version: Literal[1] = 1
    api: Encoding
    workload: str
    ids: str | None = None
    candidates: str | None = None
    varied: bool
    requests: Count
    arrivals: Arrivals
    timeout_ms: Amount
    slo_ms: Amount
    started_at: str
    due: Count
    within_slo: Count
    goodput: Amount
    throughput: Amount
    time_line: tuple[Second, ...]
    generator: Generator
    valid: bool
    invalid_because: tuple[str, ...] = ()


class SweepResult(Frozen):
    """Runs at several rates, in the order in which they were made, and what they say together.

    Attributes:
        highest_rate: the highest at which p99 of `latency_of_due` was within `slo_ms` in a valid run; None for none.
        lowest_failed_rate: the lowest one above it that did not, in a valid run; None if none was found.
        limited_by: `server` when the rate is the server's; `generator` when a run above `highest_rate` was not valid,
            so that the server might do more; `max_rate` when the search was told to go no further.
    """

    kind: Literal["sweep"] = "sweep"
    format_version: Literal[1] = 1
    slo_ms: Amount
    steps: tuple[LoadResult, ...] = Field(min_length=1)
    highest_rate: Amount | None
    lowest_failed_rate: Amount | None
    limited_by: Literal["server", "generator", "max_rate"]


class Records(NamedTuple):
    """All requests of a process that are over, in the order in which they ended.

    Attributes:
        rows: `ROW` [n].
        kinds: of failures, by `code`; that of `OK` is "ok".
        examples: messages of failed requests.
    """

    rows: Rows
    kinds: tuple[str, ...]
    examples: tuple[str, ...] = ()


class Recorder:
    """Keeps a row for each request that is over; `begin` is of the run, CLOCK_MONOTONIC seconds."""

    def __init__(self, begin: float) -> None:
        self.begin = begin
        self._raw = array("d")
        self._codes = {"ok": OK}
        self._examples: dict[str, list[str]] = {}

    def __len__(self) -> int:
        return len(self._raw) // len(COLUMNS)

    def add(self, request: Outgoing, failure: Failure | None) -> None:
        """Record a request, with its failure if it has no right answer."""
        code = OK
        if failure is not None:
            code = self._codes.setdefault(failure.kind, len(self._codes))
            examples = self._examples.setdefault(failure.kind, [])
            if failure.message and len(examples) < EXAMPLES_OF_A_KIND:
                examples.append(f"{failure.kind}: {failure.message[:MAX_EXAMPLE_CHARS]}")
        begin, sent = self.begin, request.sent if request.sent == NEVER else request.sent - self.begin
        # `offset_s` as it was drawn: `begin` plus it and minus `begin` again may be in the second before.
        self._raw.extend((request.offset_s, request.reached_at - begin, sent, request.finished_at - begin, code))

    def records(self) -> Records:
        """Return all so far."""
        examples = tuple(text for kind in self._examples.values() for text in kind)
        return Records(np.frombuffer(self._raw.tobytes(), ROW), tuple(self._codes), examples)


def percentiles(seconds: npt.ArrayLike, total: int | None = None) -> Percentiles:
    """Return the percentiles of times, float64 [n]; the q-th is the time that at least q% of all are not above.

    `total` counts those that never came, too, which are later than all others; None for n.
    """
    times_ms = np.round(np.asarray(seconds, np.float64) * 1e3, 3)
    if total is not None:
        times_ms = np.append(times_ms, np.full(total - times_ms.size, np.inf))
    if not times_ms.size:
        return Percentiles.model_validate(dict.fromkeys(Percentiles.model_fields))
    least, *middle = np.quantile(times_ms, (0, 0.5, 0.9, 0.99, 0.999, 1), method="inverted_cdf").tolist()
    values = zip(Percentiles.model_fields, (least, float(times_ms.mean()), *middle), strict=True)
    return Percentiles.model_validate({name: value if value < math.inf else None for name, value in values})


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


def measured(parts: Sequence[Records]) -> dict[str, Any]:
    """Return the fields of `Measured`, but for target and model, that follow from what processes recorded."""
    rows, errors = np.concatenate([part.rows for part in parts]), Counter[str]()
    for part in parts:
        failed = part.rows["code"][part.rows["code"] != OK].astype(np.int64)
        errors.update(part.kinds[code] for code in failed.tolist())
    answered = rows[rows["code"] == OK]
    return {
        "sent": int((rows["sent"] != NEVER).sum()),
        "answered": answered.size,
        "errors": dict(sorted(errors.items())),
        "error_examples": tuple(text for part in parts for text in part.examples)[:MAX_EXAMPLES],
        "latency": percentiles(answered["ended"] - answered["due"]),
        "latency_of_due": percentiles(answered["ended"] - answered["due"], rows.size),
        "service": percentiles(answered["ended"] - answered["sent"]),
        "machine": this_machine(),
        "versions": versions(),
    }


def make_result(
    load: OfferedLoad, run: RunConfig, ready: Sequence[Ready], started_at: float, done: Sequence[Done]
) -> LoadResult:
    """Add up what the processes of one run measured; `started_at` is wall clock in seconds since 1970."""
    parts = [each.records._replace(rows=each.records.rows[each.records.rows["due"] >= run.warmup_s]) for each in done]
    shared, rows = measured(parts), np.concatenate([records.rows for records in parts])
    answered = rows[rows["code"] == OK]
    within_slo = int((answered["ended"] - answered["due"] <= load.slo_ms / 1000).sum())
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
        max_lag_p99_ms=max(MIN_MAX_LAG_MS, MAX_LAG_SHARE * (shared["latency"].p99_ms or 0.0)),
    )
    reasons = invalid_because(generator, rows.size)
    offered = {"target", "ids", "candidates", "varied", "arrivals", "seed", "timeout_ms", "slo_ms"}
    return LoadResult(
        **shared,
        **load.model_dump(include=offered),
        **run.model_dump(exclude={"seed"}),
        api=load.spoken,
        model=ready[0].model,
        workload=ready[0].workload,
        requests=sum(process.requests for process in ready),
        started_at=datetime.datetime.fromtimestamp(started_at, datetime.UTC).isoformat(),
        due=rows.size,
        within_slo=within_slo,
        goodput=within_slo / run.duration_s,
        throughput=answered.size / run.duration_s,
        time_line=_time_line(run, np.concatenate([process.records.rows for process in done])),
        generator=generator,
        valid=not reasons,
        invalid_because=reasons,
    )


def invalid_because(generator: Generator, due: int) -> tuple[str, ...]:
    """Return why a run's numbers would be the generator's rather than the server's; nothing if they are not."""
    reasons = [
        f"process {number} that sends used {process.cpu_share:.0%} of a core; at most {MAX_CPU_SHARE:.0%} is valid"
        for number, process in enumerate(generator.processes)
        if process.cpu_share > MAX_CPU_SHARE
    ]
    lag = generator.lag_p99_ms
    if lag is not None and lag > generator.max_lag_p99_ms:
        reasons.append(
            f"the generator was {lag:.2f} ms late at p99; at most {generator.max_lag_p99_ms:.2f} ms is valid: "
            f"{MAX_LAG_SHARE:.0%} of the latency's p99, or {MIN_MAX_LAG_MS:g} ms"
        )
    if due == 0:
        reasons.append("no request was due: give a higher --rate or a longer --duration")
    return tuple(reasons)


def _time_line(run: RunConfig, rows: Rows) -> tuple[Second, ...]:
    ends = np.arange(1, math.ceil(run.until_s) + 1)
    by_due = rows[np.argsort(rows["due"], kind="stable")]
    in_flight = np.searchsorted(np.sort(rows["turn"]), ends) - np.searchsorted(np.sort(rows["ended"]), ends)
    line = []
    for second, of_second in enumerate(np.split(by_due, np.searchsorted(by_due["due"], ends))[:-1]):
        answered = of_second[of_second["code"] == OK]
        latency = percentiles(answered["ended"] - answered["due"])
        counts = {"due": of_second.size, "ok": answered.size, "errors": of_second.size - answered.size}
        times = {"warmup": second < run.warmup_s, "p50_ms": latency.p50_ms, "p99_ms": latency.p99_ms}
        line.append(Second(at_s=second, in_flight=int(in_flight[second]), **counts, **times))
    return tuple(line)


Outcome: TypeAlias = Literal["kept", "failed", "invalid"]


def outcome_of(result: LoadResult, slo_ms: float) -> Outcome:
    """Return whether 99 of 100 requests that were due were answered in time; an invalid run does not tell."""
    if not result.valid:
        return "invalid"
    p99_ms = result.latency_of_due.p99_ms
    return "kept" if p99_ms is not None and p99_ms <= slo_ms else "failed"
