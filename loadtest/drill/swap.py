"""`drill swap`: one version after the other, A and B in turn, under a load that checks every answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import psutil
from pydantic import Field

from loader.progress import Progress, no_progress
from loader.rollout.plan import Strategy
from loader.snapshot.publishing import rows_bytes_of
from loadtest.drill.fleet import FleetReport, OracleFleet, OracleFleetConfig, oracle_fleet
from loadtest.drill.load import APIS, Answers, TimeSpan, count_kinds, counted, latency_ms, overlaps, percentile
from loadtest.drill.oracle import Kind
from loadtest.errors import DrillError

MAX_RATIO_P99 = 1.5
MAX_GROWTH = 0.1
"""Of a fleet's memory from swap to swap, in rows of one copy of a version."""
BYTES_PER_MB = 1e6
MIN_SAMPLES = 20
# Swaps before memory is first read; they count in everything else.
WARMUP_SWAPS = 4
# Under load before the first swap; latencies of its answers count neither as steady nor as during.
WARMUP_S = 5.0


class SwapDrillConfig(OracleFleetConfig):
    """A swap drill.

    Attributes:
        pause_s: steady time between two swaps, after the publishing of the next version.
        max_ratio_p99: p99 during swaps to steady; more is a problem.
    """

    NAME: ClassVar[str] = "swap"
    swaps: int = Field(default=100, ge=1, le=100_000)
    strategy: Strategy = "beside"
    pause_s: float = Field(default=3.0, gt=0, le=600)
    max_ratio_p99: float = Field(default=MAX_RATIO_P99, ge=1)


class Swap(NamedTuple):
    """One rollout, from the moment in which it was asked for to when it was seen to be done."""

    span: TimeSpan
    from_version: int
    to_version: int


class MemorySample(NamedTuple):
    """What the processes of a fleet hold after some swaps, by name.

    Attributes:
        rss_mb: resident memory; pages that processes share count in each.
        uss_mb: what would be free if that process ended; shared pages do not count.
    """

    after_swaps: int
    rss_mb: Mapping[str, float]
    uss_mb: Mapping[str, float]


class SwapReport(FleetReport):
    """What `drill swap --json` writes.

    Attributes:
        p99_ms_steady: of the answers that neither a rollout nor a time set apart overlaps, from when a request was due.
        p99_ms_during_swap: of the answers that a rollout overlaps.
        rss_mb_before, rss_mb_after: sum over the fleet's processes, after the warm-up swaps and after the last swap;
            pages that processes share (libraries) count in each, but not in `uss_mb_*`.
        stale: right answers that name neither the version before nor the one after the swaps that they overlap.
        answers_apart: while the fleet was cold, or a version was exported and published on the same machine.
        load_lag_p99_ms: how late the load itself sent requests; it is part of every latency.
        rss_mb_per_swap: slope of the sum of RSS over the later half of the swaps, by least squares; None for few swaps.
        rss_mb_by_process: first and last sample of each process.
        rows_mb: of one copy of one version.
        retries: lookups that serving processes repeated on another replica, by kind.
        hot_lookups, hot_hits: rows that were looked up where hot rows are held, and those that were hot.
    """

    swaps: int
    p99_ms_steady: float | None
    p99_ms_during_swap: float | None
    ratio_p99: float | None
    rss_mb_before: float
    rss_mb_after: float
    stale: int
    answers_steady: int
    answers_during_swap: int
    answers_apart: int
    p50_ms_steady: float | None
    p50_ms_during_swap: float | None
    p99_ms_apart: float | None
    max_ms: float | None
    load_lag_p99_ms: float | None
    by_api: dict[str, dict[str, float | int | None]]
    uss_mb_before: float
    uss_mb_after: float
    rss_mb_per_swap: float | None
    rss_mb_by_swap: tuple[float, ...]
    rss_mb_by_process: dict[str, tuple[float, float]]
    swap_s_median: float | None
    swap_s_max: float | None
    rows_mb: float
    strategy: str
    retries: dict[str, int]
    hot_lookups: int = 0
    hot_hits: int = 0


@dataclass(slots=True)
class SwapCourse:
    """What happened when.

    Attributes:
        swaps: in order.
        apart: when latencies count for neither: while the fleet was cold, and while versions were published on the same
            machine.
        memory: after the warm-up and each later swap.
    """

    swaps: list[Swap] = field(default_factory=list)
    apart: list[TimeSpan] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)

    @contextmanager
    def set_apart(self) -> Iterator[None]:
        """Note a time in which the drill takes time of the cores that it shares with the fleet, as no swap would."""
        begin = time.monotonic()
        yield
        self.apart.append(TimeSpan(begin, time.monotonic()))


async def run_swap_drill(config: SwapDrillConfig, folder: Path, progress: Progress = no_progress) -> SwapReport:
    """Run the drill; stores, logs and answers go into the folder.

    Raises DrillError if a rollout does not end as `done`, or the load fails. What answers say is in the report.
    """
    course = SwapCourse()
    async with oracle_fleet(config, folder, progress) as fleet:
        await _swap_again_and_again(config, fleet, course, progress)
        facts = {
            **fleet.facts(),
            "rows_mb": rows_bytes_of(fleet.writer.spec) / BYTES_PER_MB,
            "strategy": config.strategy,
            "retries": await fleet.retries(),
            **await fleet.hot_counts(),
        }
        answers = await fleet.load.stop()
        return make_swap_report(answers, course, facts, max_ratio_p99=config.max_ratio_p99)


async def _swap_again_and_again(
    config: SwapDrillConfig, fleet: OracleFleet, course: SwapCourse, progress: Progress
) -> None:
    live = await fleet.live_version()
    warmup_swaps = min(WARMUP_SWAPS, config.swaps - 1)
    with course.set_apart():
        # The first requests of a process find everything cold; that is the fleet's start, not a swap.
        await asyncio.sleep(WARMUP_S)
    for number in range(config.swaps):
        progress("swaps", number, config.swaps)
        with course.set_apart():
            if number >= warmup_swaps:
                course.memory.append(await asyncio.to_thread(sample_memory, number, fleet.process_ids()))
            version = await fleet.publish_next(differs_from=live)
        await asyncio.sleep(config.pause_s)
        begin = time.monotonic()
        rollout = await fleet.roll_out(version, config.strategy)
        course.swaps.append(Swap(TimeSpan(begin, time.monotonic()), live, version))
        if rollout.state != "done":
            raise DrillError(f"the rollout of version {version} ended as {rollout.state}: {rollout.reason}")
        live = version
        fleet.load.check()
    with course.set_apart():
        course.memory.append(await asyncio.to_thread(sample_memory, config.swaps, fleet.process_ids()))
    progress("swaps", config.swaps, config.swaps)
    await asyncio.sleep(config.pause_s)


def make_swap_report(
    answers: Answers, course: SwapCourse, facts: Mapping[str, Any], *, max_ratio_p99: float = MAX_RATIO_P99
) -> SwapReport:
    """Draw up the report from all answers and what happened when; `facts` are the remaining fields."""
    swaps, memory = course.swaps, course.memory
    latency = latency_ms(answers)
    during = overlaps(answers, [swap.span for swap in swaps])
    kept_apart = overlaps(answers, course.apart) & ~during
    steady = ~during & ~kept_apart
    p99_steady, p99_during = percentile(latency[steady], 99), percentile(latency[during], 99)
    durations = [swap.span.end - swap.span.begin for swap in swaps]
    rss = [sum(one.rss_mb.values()) for one in memory]
    found: dict[str, Any] = {
        **count_kinds(answers),
        "swaps": len(swaps),
        "p99_ms_steady": p99_steady,
        "p99_ms_during_swap": p99_during,
        "ratio_p99": p99_during / p99_steady if p99_steady and p99_during else None,
        "rss_mb_before": rss[0],
        "rss_mb_after": rss[-1],
        "stale": int(is_stale(answers, swaps).sum()),
        "answers_steady": int(steady.sum()),
        "answers_during_swap": int(during.sum()),
        "answers_apart": int(kept_apart.sum()),
        "p50_ms_steady": percentile(latency[steady], 50),
        "p50_ms_during_swap": percentile(latency[during], 50),
        "p99_ms_apart": percentile(latency[kept_apart], 99),
        "max_ms": percentile(latency, 100),
        "load_lag_p99_ms": percentile(1e3 * (answers["sent"] - answers["intended"]), 99),
        "by_api": {
            name: _of_api(answers[own], latency[own], steady[own], during[own])
            for name, own in ((name, answers["api"] == number) for number, name in enumerate(APIS))
        },
        "uss_mb_before": sum(memory[0].uss_mb.values()),
        "uss_mb_after": sum(memory[-1].uss_mb.values()),
        "rss_mb_per_swap": slope_mb_per_swap(memory),
        "rss_mb_by_swap": tuple(round(one, 1) for one in rss),
        "rss_mb_by_process": {name: (mb, memory[-1].rss_mb[name]) for name, mb in memory[0].rss_mb.items()},
        "swap_s_median": percentile(durations, 50),
        "swap_s_max": percentile(durations, 100),
        **facts,
    }
    report = SwapReport.model_validate(found)
    return report.model_copy(update={"problems": tuple(_problems(report, max_ratio_p99))})


def is_stale(answers: Answers, swaps: Sequence[Swap]) -> npt.NDArray[np.bool_]:
    """Return which answers are right, but of a version that was not live while the request was out: bool [n].

    Versions ascend from swap to swap.
    """
    if not swaps:
        return np.zeros(len(answers), np.bool_)
    begins, ends = np.array([swap.span for swap in swaps]).T
    live = np.array([swaps[0].from_version, *(swap.to_version for swap in swaps)])
    # Live when it was due: what the last swap that was done by then left. When it ended: any that had begun by then.
    oldest = np.searchsorted(ends, answers["intended"], side="left")
    newest = np.searchsorted(begins, answers["ended"], side="right")
    place = np.searchsorted(live, answers["version"])
    known = live[np.minimum(place, len(live) - 1)] == answers["version"]
    result: npt.NDArray[np.bool_] = (answers["kind"] == Kind.OK) & ~(known & (oldest <= place) & (place <= newest))
    return result


def sample_memory(after_swaps: int, process_ids: Mapping[str, int]) -> MemorySample:
    """Read the memory of running processes. Raises psutil.NoSuchProcess if one of them has ended."""
    infos = {name: psutil.Process(pid).memory_full_info() for name, pid in process_ids.items()}
    return MemorySample(
        after_swaps,
        {name: info.rss / BYTES_PER_MB for name, info in infos.items()},
        {name: info.uss / BYTES_PER_MB for name, info in infos.items()},
    )


def slope_mb_per_swap(samples: Sequence[MemorySample]) -> float | None:
    """Return how much the sum of all processes' RSS grows from swap to swap, over the later half of the samples.

    In the first swaps of a process its allocator grows to what a swap needs. None for fewer than `MIN_SAMPLES`.
    """
    if len(samples) < MIN_SAMPLES:
        return None
    later = samples[len(samples) // 2 :]
    totals = [sum(one.rss_mb.values()) for one in later]
    return float(np.polyfit([one.after_swaps for one in later], totals, 1)[0])


def _of_api(
    answers: Answers, latency: npt.NDArray[np.floating], steady: npt.NDArray[np.bool_], during: npt.NDArray[np.bool_]
) -> dict[str, float | int | None]:
    return {
        "answers": len(answers),
        "not_ok": int((answers["kind"] != Kind.OK).sum()),
        "p99_ms_steady": percentile(latency[steady], 99),
        "p99_ms_during_swap": percentile(latency[during], 99),
    }


def _problems(report: SwapReport, max_ratio_p99: float) -> list[str]:
    found = counted(
        {
            "failed": report.failed,
            "are mixed": report.mixed,
            "are wrong": report.wrong,
            "name a version that was not live": report.stale,
        }
    )
    if report.ratio_p99 is None:
        found.append("too few answers to compare latencies")
    elif report.ratio_p99 > max_ratio_p99:
        found.append(f"p99 during swaps is {report.ratio_p99:.2f} times the steady one, allowed is {max_ratio_p99:g}")
    # A version that is not freed adds its rows, once for each replica, with every swap.
    if report.rss_mb_per_swap is not None and report.rss_mb_per_swap > MAX_GROWTH * report.rows_mb:
        found.append(
            f"memory grows by {report.rss_mb_per_swap:.2f} MB with every swap; one version has {report.rows_mb:.2f} MB"
        )
    return found
