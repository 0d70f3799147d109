"""`drill overload`: more requests than a server can answer, and how many of those that it admits it answers in time.

Capacity is what a closed loop gets answered, before and after; the larger one counts. An open loop goes on through
three phases without a pause: part of the capacity, several times the capacity, and the same part again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from loader.progress import Progress
from loadtest.drill.config import GIVE_UP_MS, Judged, Limit, OverloadDrillConfig, Report, make_report
from loadtest.errors import LoadError
from loadtest.load.config import OfferedLoad, bench_load
from loadtest.load.generator import ANSWER_SLACK_S, LEAD_S, Generators, event_loop, offer, open_payloads
from loadtest.load.loops import Weighed, arrival_times, cpu_by_role, not_busy_because
from loadtest.load.result import MAX_CPU_SHARE, OK, Done, Float64Array, Recorder, Rows, percentiles
from loadtest.load.senders import Failure, Outgoing
from loadtest.servers import Server, serving, summed
from loadtest.workloads.catalog import BenchShape, BenchWorkload, bench_spec
from loadtest.workloads.prepare import write_random_snapshot

NORMAL_SHARE = 0.5
WARMUP_S = 2.0
"""Of the closed loops, and at most half of the time before the overload."""
WINDOW_S = 0.25
STEADY_WINDOWS = 4
SHED = "shed"
"""Kind of an answer 503 that says when to come again."""
UNAVAILABLE = "http_503"
BATCH_STAGES = ("merge", "lookup", "rank", "answer")

Result = TypeVar("Result")
Phase: TypeAlias = tuple[float, float]
"""Requests a second, and for how many seconds."""


class ShedRecorder(Recorder):
    """Records an answer 503 that says when to come again as `SHED`."""

    def add(self, request: Outgoing, failure: Failure | None) -> None:
        """Record a request."""
        if failure is not None and failure.kind == UNAVAILABLE and failure.retry_after.isdigit():
            failure = failure._replace(kind=SHED)
        super().add(request, failure)


def phase_times(phases: Sequence[Phase], seed: int) -> Iterator[float]:
    """Draw the times of all phases, one after the other, as `arrival_times`: seconds, ascending."""
    begin = 0.0
    for number, (rate, seconds) in enumerate(phases):
        yield from (begin + time_s for time_s in arrival_times("poisson", rate, seconds, seed=seed + number))
        begin += seconds


def send_phases(load: OfferedLoad, phases: tuple[Phase, ...], seed: int, at: float) -> Done:
    """Send requests from CLOCK_MONOTONIC `at` on. Runs in the client; its CPU time is that of the second phase."""
    _, pool = open_payloads(load)
    begin, seconds = phases[0][1], phases[1][1]
    sent = offer(load, pool, phase_times(phases, seed), ShedRecorder(at), cpu_s=(begin, begin + seconds))
    return event_loop().run(sent)


def work_of(server: Server) -> Float64Array:
    """Return what a server has done so far: batches, the seconds that they took, its processor seconds."""
    metrics = server.metrics()
    seconds = summed(metrics, "shardrank_stage_seconds_sum", "stage")
    batches = sum(summed(metrics, "shardrank_batch_requests_count").values())
    cpu_s = sum(cpu_by_role(server.process_ids).values())
    return np.array([batches, sum(seconds.get(stage, 0) for stage in BATCH_STAGES), cpu_s])


async def run_drill(config: OverloadDrillConfig, folder: Path, progress: Progress) -> Report:
    """Do the drill. Raises LoadError without two cores, or if it can't be run to its end."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise LoadError("one core may be used; the server and the client need one each")
    # Most features and floats come once a request, as a product's user does.
    shape = BenchShape.of(config.rows, varied=True, side_split="product")
    workload = BenchWorkload(shape=shape.model_copy(update={"candidates": config.candidates}), head="dlrm", hotness=1)
    progress("phases", 0, 3)
    snapshot = await asyncio.to_thread(write_random_snapshot, bench_spec(workload.shape, "dlrm"), folder / "store")
    limits = {"default_timeout_ms": config.deadline_ms, "max_batch_candidates": config.batch_candidates}
    flags = (f"--limit={name}={value}" for name, value in limits.items())
    starting = serving(snapshot, ("--no-verify", "--dtype", "float32", *flags), folder / "server.log")
    with contextlib.ExitStack() as stack:
        server = await asyncio.to_thread(_on_core, cores[0], lambda: stack.enter_context(starting))
        generators = await asyncio.to_thread(_on_core, cores[1], lambda: stack.enter_context(Generators()))
        # Requests bring no deadline: the server's default is the one that they have.
        load = bench_load(server.target("json"), "json", workload)
        closed = (load, config.in_flight, WARMUP_S, config.capacity_s, server.process_ids)
        before = await asyncio.to_thread(generators.busy, *closed)
        progress("phases", 1, 3)
        done, worked = await _overload(config, server, generators, load, before.requests_per_s)
        progress("phases", 2, 3)
        weighed = before, await asyncio.to_thread(generators.busy, *closed)
        progress("phases", 3, 3)
    np.save(folder / "records.npy", done.records.rows)
    figures, judged = overload_figures(config, weighed, done, worked)
    problems = [f"capacity: {reason}" for closed_loop in weighed for reason in not_busy_because(closed_loop)]
    return make_report({"began_with": config, "cores": cores, **figures}, judged, (), problems)


def _on_core(core: int, start: Callable[[], Result]) -> Result:
    """Start processes that, with all that they start, run on one core: they inherit it from this thread."""
    may_use = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        return start()
    finally:
        os.sched_setaffinity(0, may_use)


async def _overload(
    config: OverloadDrillConfig, server: Server, generators: Generators, load: OfferedLoad, capacity: float
) -> tuple[Done, Float64Array]:
    """Do the three phases. Returns what the client did, and the server in the second one."""
    load = load.model_copy(update={"timeout_ms": GIVE_UP_MS})
    normal = (NORMAL_SHARE * capacity, config.normal_s)
    phases = (normal, (config.factor * capacity, config.seconds), normal)
    await asyncio.to_thread(generators.prepare, load)
    at = time.monotonic() + LEAD_S
    begin, limit_s = at + config.normal_s, sum(seconds for _, seconds in phases) + LEAD_S + ANSWER_SLACK_S
    arguments = [(load, phases, config.seed, at)]
    sending = asyncio.create_task(asyncio.to_thread(generators.call, send_phases, arguments, limit_s))
    worked = []
    # Asked just before: a server that is overloaded already may answer so late that nothing is left to measure.
    for when in (begin - WINDOW_S, begin + config.seconds):
        await asyncio.sleep(max(0.0, when - time.monotonic()))
        worked.append(await asyncio.to_thread(work_of, server))
    (done,) = await sending
    return done, worked[1] - worked[0]


def overload_figures(config: OverloadDrillConfig, weighed: Sequence[Weighed], done: Done, work: Float64Array) -> Judged:
    """Return all figures and their limits, from both closed loops, the three phases, and the `work_of` the second."""
    deadline_s, begin, end = config.deadline_ms / 1000, config.normal_s, config.normal_s + config.seconds
    rows, kinds = done.records.rows, done.records.kinds
    batches, batches_s, cpu_s = work.tolist()
    normal = rows[(rows["due"] >= min(WARMUP_S, begin / 2)) & (rows["due"] < begin) & (rows["code"] == OK)]
    before = percentiles(normal["ended"] - normal["due"])
    during = rows[(rows["due"] >= begin) & (rows["due"] < end)]
    seconds, is_ok = during["ended"] - during["due"], during["code"] == OK
    counts = {kind: int((during["code"] == code).sum()) for code, kind in enumerate(kinds)}
    is_refused = np.isin(during["code"], [code for code, kind in enumerate(kinds) if kind in (SHED, UNAVAILABLE)])
    requests, refused, in_time = during.size, int(is_refused.sum()), int((is_ok & (seconds <= deadline_s)).sum())
    figures: dict[str, Any] = {
        "capacities": [closed.requests_per_s for closed in weighed],
        "capacity": max(closed.requests_per_s for closed in weighed),
        "offered": requests / config.seconds,
        "goodput": in_time / config.seconds,
        "batch_ms": 1e3 * batches_s / max(batches, 1.0),
        "cpu_ms_at_capacity": min(closed.cpu_ms for closed in weighed),
        "cpu_ms_overloaded": 1e3 * cpu_s / in_time if in_time else None,
        "requests": requests,
        "admitted": requests - refused,
        "in_time": in_time,
        "refused": refused,
        # What has no answer is later than all.
        "p99_ms_admitted": percentiles(seconds[is_ok], requests - refused).p99_ms,
        "p99_ms_refused": percentiles(seconds[is_refused]).p99_ms,
        "p99_ms_before": before.p99_ms,
        "steady_after_s": steady_after(rows, end, deadline_s, (before.p99_ms or 0.0) / 1e3, config.normal_s),
        "client_cores": done.cpu_s / config.seconds,
        "lag_p99_ms": percentiles(during["turn"] - during["due"]).p99_ms,
        "failed": {kind: count for kind, count in counts.items() if count and kind not in ("ok", SHED)},
    }
    limits = [
        # 2.8 of 3.
        Limit("offered", figures["offered"] / weighed[0].requests_per_s, 0.93 * config.factor, "at least"),
        Limit("client cores", figures["client_cores"], MAX_CPU_SHARE),
        Limit("goodput", figures["goodput"] / figures["capacity"], 0.88, "at least"),
        Limit("p99 admitted, ms", figures["p99_ms_admitted"], config.deadline_ms),
        Limit("p99 refused, ms", figures["p99_ms_refused"], figures["batch_ms"] + 5.0),
        Limit("retry-after", counts.get(SHED, 0) / refused if refused else None, 1.0, "at least"),
        Limit("steady after, s", figures["steady_after_s"], 2.0),
    ]
    return figures, limits


def steady_after(rows: Rows, begin: float, deadline_s: float, usual_s: float, seconds: float) -> float | None:
    """Return how many seconds after `begin` a second begins in which nothing shows the overload; None if never.

    In each quarter of that second every request is answered within its deadline, and half of them within `usual_s`.
    """
    window, took_s = np.floor((rows["due"] - begin) / WINDOW_S), rows["ended"] - rows["due"]
    is_good = (rows["code"] == OK) & (took_s <= deadline_s)
    in_a_row = 0
    for number in range(int(seconds / WINDOW_S)):
        members = window == number
        is_usual = not members.any() or float(np.median(took_s[members])) <= usual_s
        in_a_row = in_a_row + 1 if is_usual and bool(is_good[members].all()) else 0
        if in_a_row == STEADY_WINDOWS:
            return (number + 1 - STEADY_WINDOWS) * WINDOW_S
    return None
