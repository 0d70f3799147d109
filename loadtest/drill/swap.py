"""`drill swap`: one version after the other, A and B in turn, under a load that checks every answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import psutil

from loader.progress import Progress
from loader.snapshot.publishing import rows_bytes_of
from loadtest.drill.answers import (
    APIS,
    Answers,
    Mask,
    TimeSpan,
    answer_limits,
    count_kinds,
    latency_ms,
    overlaps,
    percentile,
)
from loadtest.drill.config import SwapDrillConfig
from loadtest.drill.fleet import OracleFleet, oracle_fleet
from loadtest.drill.oracle import Kind
from loadtest.drill.report import Limit, Report
from loadtest.servers import summed

MAX_GROWTH = 0.1
"""Of a fleet's memory from swap to swap, in rows of one copy of a version."""
BYTES_PER_MB = 1e6
MIN_SAMPLES = 20
# Swaps before memory is first read; they count in everything else.
WARMUP_SWAPS = 4
# Under load before the first swap; latencies of its answers count neither as steady nor as during.
WARMUP_S = 5.0


class Swap(NamedTuple):
    """One rollout, from its request to when it was seen to be done."""

    span: TimeSpan
    from_version: int
    to_version: int


class ProcessMemory(NamedTuple):
    """Of a process: resident, shared pages included, and what would be free if it ended."""

    rss_mb: float
    uss_mb: float


MemorySample: TypeAlias = Mapping[str, ProcessMemory]
"""Of all processes of a fleet, by name."""


@dataclass(slots=True)
class SwapCourse:
    """What happened when.

    Attributes:
        swaps: in order.
        excluded: when latencies count for neither: while the fleet was cold, and while versions were published on the
            same machine.
        memory: after the warm-up and each later swap.
    """

    swaps: list[Swap] = field(default_factory=list)
    excluded: list[TimeSpan] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)

    @contextmanager
    def excluding(self) -> Iterator[None]:
        """Exclude a time in which the drill uses the cores that it shares with the fleet, as no swap would."""
        begin = time.monotonic()
        yield
        self.excluded.append(TimeSpan(begin, time.monotonic()))


async def run_drill(config: SwapDrillConfig, folder: Path, progress: Progress) -> Report:
    """Run the drill; stores, logs and answers go into the folder.

    Raises DrillError if a rollout does not end as `done`. What answers say is in the report.
    """
    course = SwapCourse()
    async with oracle_fleet(config, folder, progress) as fleet:
        await _swap_repeatedly(config, fleet, course, progress)
        metrics = await fleet.metrics()
        answers = await fleet.load.stop()
        figures = {
            **swap_figures(answers, course),
            "rows_mb": rows_bytes_of(fleet.spec) / BYTES_PER_MB,
            "strategy": config.strategy,
            "retries": {
                kind: int(count) for kind, count in summed(metrics, "shardrank_shard_retries_total", "kind").items()
            },
            "hot_lookups": int(sum(summed(metrics, "shardrank_hot_lookups_total").values())),
            "hot_hits": int(sum(summed(metrics, "shardrank_hot_hits_total").values())),
        }
        return fleet.report(figures, swap_limits(figures, config.max_ratio_p99))


async def _swap_repeatedly(config: SwapDrillConfig, fleet: OracleFleet, course: SwapCourse, progress: Progress) -> None:
    live = await fleet.live_version()
    warmup_swaps = min(WARMUP_SWAPS, config.swaps - 1)
    with course.excluding():
        # The first requests of a process find everything cold; that is the fleet's start, not a swap.
        await asyncio.sleep(WARMUP_S)
    for number in range(config.swaps):
        progress("swaps", number, config.swaps)
        with course.excluding():
            if number >= warmup_swaps:
                course.memory.append(await asyncio.to_thread(sample_memory, fleet.process_ids()))
            version = await fleet.publish_next(differs_from=live)
        await asyncio.sleep(config.pause_s)
        begin = time.monotonic()
        await fleet.swap_to(version, config.strategy)
        course.swaps.append(Swap(TimeSpan(begin, time.monotonic()), live, version))
        live = version
        fleet.load.check()
    with course.excluding():
        course.memory.append(await asyncio.to_thread(sample_memory, fleet.process_ids()))
    progress("swaps", config.swaps, config.swaps)
    await asyncio.sleep(config.pause_s)


def swap_figures(answers: Answers, course: SwapCourse) -> dict[str, Any]:
    """Return what answers and memory say, by the names of the report."""
    swaps, memory = course.swaps, course.memory
    latency = latency_ms(answers)
    during = overlaps(answers, [swap.span for swap in swaps])
    excluded = overlaps(answers, course.excluded) & ~during
    steady = ~during & ~excluded
    p99_steady, p99_during = percentile(latency[steady], 99), percentile(latency[during], 99)
    durations = [swap.span.end - swap.span.begin for swap in swaps]
    rss, uss = ([sum(process[place] for process in sample.values()) for sample in memory] for place in (0, 1))
    by_api = {}
    for number, name in enumerate(APIS):
        is_api = answers["api"] == number
        by_api[name] = {
            "answers": int(is_api.sum()),
            "not_ok": int((answers["kind"][is_api] != Kind.OK).sum()),
            "p99_ms_steady": percentile(latency[is_api & steady], 99),
            "p99_ms_during_swap": percentile(latency[is_api & during], 99),
        }
    return {
        **count_kinds(answers["kind"]),
        "swaps": len(swaps),
        "p99_ms_steady": p99_steady,
        "p99_ms_during_swap": p99_during,
        "ratio_p99": p99_during / p99_steady if p99_steady and p99_during else None,
        "rss_mb_before": rss[0],
        "rss_mb_after": rss[-1],
        "stale": int(is_stale(answers, swaps).sum()),
        "answers_steady": int(steady.sum()),
        "answers_during_swap": int(during.sum()),
        "answers_apart": int(excluded.sum()),
        "p50_ms_steady": percentile(latency[steady], 50),
        "p50_ms_during_swap": percentile(latency[during], 50),
        "p99_ms_apart": percentile(latency[excluded], 99),
        "max_ms": percentile(latency, 100),
        "load_lag_p99_ms": percentile(1e3 * (answers["turn"] - answers["intended"]), 99),
        "by_api": by_api,
        "uss_mb_before": uss[0],
        "uss_mb_after": uss[-1],
        "rss_mb_per_swap": slope_mb_per_swap(rss),
        "rss_mb_by_swap": [round(total_mb, 1) for total_mb in rss],
        "rss_mb_by_process": {name: (first.rss_mb, memory[-1][name].rss_mb) for name, first in memory[0].items()},
        "swap_s_median": percentile(durations, 50),
        "swap_s_max": percentile(durations, 100),
    }


def is_stale(answers: Answers, swaps: Sequence[Swap]) -> Mask:
    """Return which answers are right, but of a version that was not live while the request was in flight: bool [n].

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
    result: Mask = (answers["kind"] == Kind.OK) & ~(known & (oldest <= place) & (place <= newest))
    return result


def sample_memory(process_ids: Mapping[str, int]) -> MemorySample:
    """Read the memory of running processes. Raises psutil.NoSuchProcess if one of them has ended."""
    infos = {name: psutil.Process(process_id).memory_full_info() for name, process_id in process_ids.items()}
    return {name: ProcessMemory(info.rss / BYTES_PER_MB, info.uss / BYTES_PER_MB) for name, info in infos.items()}


def slope_mb_per_swap(rss_mb: Sequence[float]) -> float | None:
    """Return how much a fleet's RSS grows from swap to swap, over the later half of the samples, by least squares.

    In the first swaps of a process its allocator grows to what a swap needs. None for fewer than `MIN_SAMPLES`.
    """
    if len(rss_mb) < MIN_SAMPLES:
        return None
    later = rss_mb[len(rss_mb) // 2 :]
    return float(np.polyfit(range(len(later)), later, 1)[0])


def swap_limits(figures: Mapping[str, Any], max_ratio_p99: float) -> list[Limit]:
    """Return what decides the verdict."""
    limits = [*answer_limits(figures, "stale"), Limit("ratio_p99", figures["ratio_p99"], max_ratio_p99)]
    # A version that is not freed adds its rows, once for each replica, with every swap.
    if (growth := figures["rss_mb_per_swap"]) is not None:
        limits.append(Limit("rss_mb_per_swap", growth, MAX_GROWTH * figures["rows_mb"]))
    return limits
