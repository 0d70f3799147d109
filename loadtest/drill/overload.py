"""`drill overload`: more requests than a server can answer, and how many of those that it takes it answers in time.

The server runs on one core, and what asks it on another. Capacity is what a closed loop gets answered on the same two
cores, before and after; the larger one counts. Then an open loop goes on through three phases without a pause: part of
the capacity, several times the capacity, and the same part again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import Field

from loader.progress import Progress, no_progress
from loader.snapshot.tables import Frozen
from loadtest.drill.running import Report
from loadtest.errors import DrillError
from loadtest.load.closed_loop import Weighed, cpu_seconds, not_busy_because
from loadtest.load.config import OfferedLoad, bench_load
from loadtest.load.generator import ANSWER_SLACK_S, LEAD_S, Generators, offer, open_payloads
from loadtest.load.open_loop import arrival_times
from loadtest.load.recorder import MAX_CPU_SHARE, OK, Done, Float64Array, Recorder
from loadtest.load.senders import Failure, Outgoing
from loadtest.load.workers import event_loop
from loadtest.servers import Server, serving, summed
from loadtest.workloads.catalog import BenchShape, BenchWorkload, bench_spec
from loadtest.workloads.prepare import write_random_snapshot

GIVE_UP_MS = 1000.0
"""After which nobody waits: requests bring no deadline, so that the server's own one is what they have."""
NORMAL_SHARE = 0.5
MIN_GOODPUT_SHARE = 0.9
MIN_OFFERED_SHARE = 0.93
"""Of what was to be offered: 2.8 of 3."""
BEYOND_BATCH_MS = 5.0
MAX_STEADY_S = 2.0
WARMUP_S = 2.0
"""Of the closed loops, and at most half of the time before the overload."""
WINDOW_S = 0.25
STEADY_WINDOWS = 4
SHED = "shed"
"""Kind of an answer 503 that says when to come again."""
SHED_UNTOLD = "http_503"
BATCH_STAGES = ("merge", "lookup", "rank", "answer")

Result = TypeVar("Result")


class OverloadDrillConfig(Frozen):
    """An overload drill.

    Attributes:
        seconds: of overload.
        factor: requests offered, in capacities.
        deadline_ms: that each request has, by the server's default.
        batch_candidates: of a batch, the server's limit: a refusal may wait for one.
        normal_s: of half the capacity, before and after.
        capacity_s: that each closed loop is counted for.
        in_flight: of the closed loop.
        candidates: of a request, as `parse_candidates` reads it.
        rows: of the one table.
    """

    seconds: float = Field(default=60.0, ge=1, le=3600)
    factor: float = Field(default=3.0, gt=1, le=20)
    deadline_ms: int = Field(default=200, ge=5, le=int(GIVE_UP_MS / 2))
    batch_candidates: int = Field(default=1024, ge=1, le=2**20)
    normal_s: float = Field(default=10.0, ge=1, le=600)
    capacity_s: float = Field(default=10.0, gt=0, le=600)
    in_flight: int = Field(default=32, ge=1, le=256)
    candidates: str = "200-400:300"
    rows: int = Field(default=100_000, ge=1000, le=2**31)
    seed: int = Field(default=0, ge=0, lt=2**31)

    @property
    def shape(self) -> BenchShape:
        """Of the model: most features and floats come once a request, as a product's user does."""
        split = BenchShape.of(self.rows, varied=True, side_split="product")
        return split.model_copy(update={"candidates": self.candidates})


class Check(Frozen):
    """One figure of the drill, what it must be, and whether it is."""

    value: float | None
    must: Literal["at least", "at most"]
    limit: float
    ok: bool


class OverloadReport(Report):
    """What `drill overload --json` writes.

    Attributes:
        cores: of the server, of the client.
        capacity: answers a second of the closed loop, the larger one of `capacities`.
        offered, goodput: requests a second under overload that were due, that were answered in time.
        batch_ms: mean time of a batch under overload.
        cpu_ms_at_capacity, cpu_ms_overloaded: processor time of the server for each answer; under overload for each in
            time, and what refusing takes is in it.
        admitted: requests that were not answered by 503, and how many of them in time.
        p99_ms_admitted, p99_ms_refused: from when a request was due; one without an answer is later than all.
        failed: answers of other kinds, by kind.
        client_cores: processor seconds a second of the client under overload.
        lag_p99_ms: how late the client came to its requests.
        checks: what must be, by name: offered in capacities of the first closed loop, goodput in parts of `capacity`,
            `retry-after` in parts of those refused.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = ("value", "must", "limit", "ok")
    began_with: OverloadDrillConfig
    cores: tuple[int, int]
    capacities: tuple[float, ...]
    capacity: float
    offered: float
    goodput: float
    batch_ms: float
    cpu_ms_at_capacity: float
    cpu_ms_overloaded: float | None
    requests: int
    admitted: int
    in_time: int
    refused: int
    refused_share: float
    p50_ms_admitted: float | None
    p99_ms_admitted: float | None
    p99_ms_refused: float | None
    p50_ms_before: float | None
    p99_ms_before: float | None
    steady_after_s: float | None
    client_cores: float
    lag_p99_ms: float | None
    failed: Mapping[str, int]
    checks: Mapping[str, Check]


class Phase(Frozen):
    """A time with requests at one rate a second."""

    rate: float
    seconds: float


def phase_times(phases: tuple[Phase, ...], seed: int) -> Iterator[Float64Array]:
    """Draw the times of all phases, one after the other, as `arrival_times`: seconds, ascending."""
    begin = 0.0
    for number, phase in enumerate(phases):
        for times in arrival_times("poisson", phase.rate, phase.seconds, seed=seed + number):
            yield begin + times
        begin += phase.seconds


class _Recorder(Recorder):
    """Records an answer 503 that says when to come again as `SHED`."""

    def add(self, request: Outgoing, failure: Failure | None) -> None:
        if failure is not None and failure.kind == SHED_UNTOLD and failure.retry_after.isdigit():
            failure = failure._replace(kind=SHED)
        super().add(request, failure)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the client did: the names of its codes, and processor seconds in the second phase."""

    kinds: dict[int, str]
    cpu_s: float


def ask(load: OfferedLoad, phases: tuple[Phase, ...], seed: int, at: float) -> Done:
    """Ask from CLOCK_MONOTONIC `at` on. Runs in the client."""
    _, pool = open_payloads(load)
    begin = phases[0].seconds
    times = phase_times(phases, seed)
    return event_loop().run(offer(load, pool, times, _Recorder(at), cpu_s=(begin, begin + phases[1].seconds)))


class Worked(NamedTuple):
    """What the server did: batches, the seconds that they took, its processor seconds."""

    batches: float
    batches_s: float
    cpu_s: float


async def run_overload_drill(
    config: OverloadDrillConfig, folder: Path, progress: Progress = no_progress
) -> OverloadReport:
    """Do the drill. Raises DrillError without two cores, LoadError if it can't be run to its end."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:  # one for each
        raise DrillError("one core may be used; the server and the client need one each")
    workload = BenchWorkload(shape=config.shape, head="dlrm", hotness=1)
    snapshot = await asyncio.to_thread(write_random_snapshot, bench_spec(config.shape, "dlrm"), folder / "store")
    limits = {"default_timeout_ms": config.deadline_ms, "max_batch_candidates": config.batch_candidates}
    flags = ("--no-verify", "--dtype", "float32", *(f"--limit={name}={value}" for name, value in limits.items()))
    with contextlib.ExitStack() as stack:
        starting = serving("local", snapshot, flags, folder / "server.log")
        server = await asyncio.to_thread(_on_core, cores[0], lambda: stack.enter_context(starting))
        generators = await asyncio.to_thread(_on_core, cores[1], lambda: stack.enter_context(Generators()))
        drill = _Drill(config, workload, server, generators, folder)
        before = await drill.weigh()
        capacity = before.requests_per_s
        records, asked, worked = await drill.overload(capacity)
        after = await drill.weigh()
    return judge(config, (cores[0], cores[1]), (before, after), records, asked, worked)


def _on_core(core: int, start: Callable[[], Result]) -> Result:
    """Start processes that, with all that they start, run on one core: they inherit it from this thread."""
    may_use = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        return start()
    finally:
        os.sched_setaffinity(0, may_use)


@dataclass(frozen=True, slots=True)
class _Drill:
    config: OverloadDrillConfig
    workload: BenchWorkload
    server: Server
    generators: Generators
    folder: Path

    async def weigh(self) -> Weighed:
        load = bench_load(self.server.target("json"), "json", self.workload)
        asked = (load, self.config.in_flight, WARMUP_S, self.config.capacity_s, self.server.process_ids)
        return await asyncio.to_thread(self.generators.busy, *asked)

    async def overload(self, capacity: float) -> tuple[Float64Array, Asked, Worked]:
        """Do the three phases. Returns the records, and what client and server did."""
        config = self.config
        normal = Phase(rate=NORMAL_SHARE * capacity, seconds=config.normal_s)
        phases = (normal, Phase(rate=config.factor * capacity, seconds=config.seconds), normal)
        changed = {"timeout_ms": GIVE_UP_MS, "slo_ms": config.deadline_ms}
        load = bench_load(self.server.target("json"), "json", self.workload, **changed)
        await asyncio.to_thread(self.generators.prepare, load)
        at = time.monotonic() + LEAD_S
        begins, ends = at + config.normal_s, at + config.normal_s + config.seconds
        limit_s = ends + config.normal_s - at + ANSWER_SLACK_S
        arguments = [(load, phases, config.seed, at)]
        asking = asyncio.create_task(asyncio.to_thread(self.generators.call, ask, arguments, limit_s))
        early, late = [await self._worked_by(when) for when in (begins, ends)]
        (done,) = await asking
        records = done.records.rows.view(np.float64).reshape(-1, 5)
        asked = Asked(dict(enumerate(done.records.kinds)), done.cpu_s)
        return records, asked, Worked(*(after - before for before, after in zip(early, late, strict=True)))

    async def _worked_by(self, when: float) -> Worked:
        """Wait, and tell what the server has done so far."""
        await asyncio.sleep(max(0.0, when - time.monotonic()))
        metrics = await asyncio.to_thread(self.server.metrics)
        seconds = summed(metrics, "shardrank_stage_seconds_sum", "stage")
        batches = sum(summed(metrics, "shardrank_batch_requests_count").values())
        batches_s = sum(seconds.get(stage, 0.0) for stage in BATCH_STAGES)
        return Worked(batches, batches_s, cpu_seconds(self.server.process_ids))


class _Phased(NamedTuple):
    """The records of one phase: when they were due and how long they took, and of what kind they are."""

    due: Float64Array
    seconds: Float64Array
    codes: Float64Array

    def of(self, chosen: np.ndarray) -> _Phased:
        return _Phased(*(one[chosen] for one in self))


def judge(
    config: OverloadDrillConfig,
    cores: tuple[int, int],
    weighed: tuple[Weighed, ...],
    records: Float64Array,
    asked: Asked,
    worked: Worked,
) -> OverloadReport:
    """Make the report.

    Args:
        config: of the drill.
        cores: of the server and the client.
        weighed: the closed loops; by the first one the rates were chosen.
        records: float64 [n, 5] of all three phases, in seconds since their begin: due, turn, sent, ended, code.
        asked: what the codes mean, and what the client took.
        worked: what the server did under overload.
    """
    capacity = max(one.requests_per_s for one in weighed)
    batch_ms = 1e3 * worked.batches_s / max(worked.batches, 1.0)
    found = _figures(config, records, asked)
    told, client_cores = found.pop("told_share"), asked.cpu_s / config.seconds
    checks = {
        "offered": _at_least(found["offered"] / weighed[0].requests_per_s, MIN_OFFERED_SHARE * config.factor),
        "client cores": _at_most(client_cores, MAX_CPU_SHARE),
        "goodput": _at_least(found["goodput"] / capacity, MIN_GOODPUT_SHARE),
        "p99 admitted, ms": _at_most(found["p99_ms_admitted"], config.deadline_ms),
        "p99 refused, ms": _at_most(found["p99_ms_refused"], batch_ms + BEYOND_BATCH_MS),
        "retry-after": _at_least(told, 1.0),
        "steady after, s": _at_most(found["steady_after_s"], MAX_STEADY_S),
    }
    limited = [f"capacity: {reason}" for one in weighed for reason in not_busy_because(one)]
    missed = [
        f"{name}: {'none' if one.value is None else format(one.value, '.4g')}; it must be {one.must} {one.limit:.4g}"
        for name, one in checks.items()
        if not one.ok
    ]
    return OverloadReport(
        problems=(*limited, *missed),
        began_with=config,
        cores=cores,
        capacities=tuple(one.requests_per_s for one in weighed),
        capacity=capacity,
        batch_ms=batch_ms,
        cpu_ms_at_capacity=min(one.cpu_ms for one in weighed),
        cpu_ms_overloaded=1e3 * worked.cpu_s / found["in_time"] if found["in_time"] else None,
        client_cores=client_cores,
        checks=checks,
        **found,
    )


def _figures(config: OverloadDrillConfig, records: Float64Array, asked: Asked) -> dict[str, Any]:
    """Return what the records say, by the names of the report, and `told_share`, of the refused that say when."""
    deadline_s, begins, ends = config.deadline_ms / 1000, config.normal_s, config.normal_s + config.seconds
    whole = _Phased(records[:, 0], records[:, 3] - records[:, 0], records[:, 4])
    under = (whole.due >= begins) & (whole.due < ends)
    during, before = whole.of(under), whole.of((whole.due >= min(WARMUP_S, begins / 2)) & (whole.due < begins))
    codes = {kind: code for code, kind in asked.kinds.items()}
    is_told, is_untold = during.codes == codes.get(SHED), during.codes == codes.get(SHED_UNTOLD)
    is_refused, is_right = is_told | is_untold, during.codes == OK
    in_time = int((is_right & (during.seconds <= deadline_s)).sum())
    admitted_ms = 1e3 * np.where(is_right, during.seconds, np.inf)[~is_refused]
    before_ms = 1e3 * before.seconds[before.codes == OK]
    p99_before = _percentile(before_ms, 99)
    others = {kind: int((during.codes == code).sum()) for kind, code in codes.items() if kind not in ("ok", SHED)}
    after = whole.of(whole.due >= ends)
    return {
        "offered": during.due.size / config.seconds,
        "goodput": in_time / config.seconds,
        "requests": during.due.size,
        "admitted": int((~is_refused).sum()),
        "in_time": in_time,
        "refused": int(is_refused.sum()),
        "refused_share": float(is_refused.mean()) if is_refused.size else 0.0,
        "told_share": float(is_told.sum() / is_refused.sum()) if is_refused.any() else None,
        "p50_ms_admitted": _percentile(admitted_ms, 50),
        "p99_ms_admitted": _percentile(admitted_ms, 99),
        "p99_ms_refused": _percentile(1e3 * during.seconds[is_refused], 99),
        "p50_ms_before": _percentile(before_ms, 50),
        "p99_ms_before": p99_before,
        "steady_after_s": steady_after(after, ends, deadline_s, (p99_before or 0.0) / 1e3, config.normal_s),
        "lag_p99_ms": _percentile(1e3 * (records[under, 1] - records[under, 0]), 99),
        "failed": {kind: count for kind, count in others.items() if count},
    }


def steady_after(after: _Phased, begin: float, deadline_s: float, usual_s: float, seconds: float) -> float | None:
    """Find how many seconds after `begin` a second begins in which nothing tells of the overload; None if never.

    In each quarter of that second every request is answered within its deadline, and half of them within `usual_s`.
    """
    window = ((after.due - begin) / WINDOW_S).astype(np.int64)
    is_good = (after.codes == OK) & (after.seconds <= deadline_s)
    in_a_row = 0
    for number in range(int(seconds / WINDOW_S)):
        own = window == number
        is_steady = bool(is_good[own].all()) and (not own.any() or float(np.median(after.seconds[own])) <= usual_s)
        in_a_row = in_a_row + 1 if is_steady else 0
        if in_a_row == STEADY_WINDOWS:
            return (number + 1 - STEADY_WINDOWS) * WINDOW_S
    return None


def _percentile(values: Float64Array, percent: float) -> float | None:
    """Return the value that so many percent are not above; None if that is none, or there is no value."""
    found = float(np.percentile(values, percent, method="higher")) if values.size else np.inf
    return found if np.isfinite(found) else None


def _at_least(value: float | None, limit: float) -> Check:
    return Check(value=value, must="at least", limit=limit, ok=value is not None and value >= limit)


def _at_most(value: float | None, limit: float) -> Check:
    return Check(value=value, must="at most", limit=limit, ok=value is not None and value <= limit)
