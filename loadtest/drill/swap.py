"""`drill swap`: one version after the other, A and B in turn, under a load that checks every answer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from loader.progress import Progress
from loader.snapshot.publishing import rows_bytes_of
from loadtest.drill.config import SwapDrillConfig
from loadtest.drill.fleet import BYTES_PER_MB, FIRST_VERSION, OracleFleet, Sample, oracle_fleet, read_processes
from loadtest.drill.load import APIS, Answers, Mask, TimeSpan, count_kinds, latency_ms, overlaps, percentile
from loadtest.drill.oracle import Kind
from loadtest.drill.report import Limit, Report, answer_limits
from loadtest.servers import summed

MAX_GROWTH = 0.1
"""Of a fleet's memory from swap to swap, in rows of one copy of a version."""
MIN_SAMPLES = 20
# Swaps before memory is first read; they count in everything else.
WARMUP_SWAPS = 4
# Under load before the first swap; latencies of its answers count neither as steady nor as during.
WARMUP_S = 5.0


@dataclass(slots=True)
class SwapCourse:
    """What happened when.

    Attributes:
        versions: that were live one after the other.
        swaps: from the request of a rollout to when it was seen to be done, of each version but the first.
        excluded: when latencies count for neither: while the fleet was cold, and while versions were published on the
            same machine.
        memory: of all processes by name, after the warm-up and each later swap.
    """

    versions: list[int] = field(default_factory=lambda: [FIRST_VERSION])
    swaps: list[TimeSpan] = field(default_factory=list)
    excluded: list[TimeSpan] = field(default_factory=list)
    memory: list[Mapping[str, Sample]] = field(default_factory=list)


@contextmanager
def timed(spans: list[TimeSpan]) -> Iterator[None]:
    """Append the time that the block takes."""
    begin = time.monotonic()
    yield
    spans.append(TimeSpan(begin, time.monotonic()))


async def run_drill(config: SwapDrillConfig, folder: Path, progress: Progress) -> Report:
    """Run the drill; stores, logs and answers go into the folder.

    Raises DrillError if a rollout does not end as `done`. What answers say is in the report.
    """
    course = SwapCourse()
    async with oracle_fleet(config, folder, progress) as fleet:
        with timed(course.excluded):
            # The first requests of a process find everything cold; that is the fleet's start, not a swap.
            await asyncio.sleep(WARMUP_S)
        for number in range(config.swaps):
            progress("swaps", number, config.swaps)
            await _swap(config, fleet, course)
        with timed(course.excluded):
            course.memory.append(await asyncio.to_thread(read_processes, fleet.process_ids()))
        progress("swaps", config.swaps, config.swaps)
        await asyncio.sleep(config.pause_s)
        metrics = await asyncio.to_thread(fleet.server.metrics)
        figures = {
            **swap_figures(await fleet.load.stop(), course),
            "rows_mb": rows_bytes_of(fleet.spec) / BYTES_PER_MB,
            "strategy": config.strategy,
            "retries": {
                kind: int(count) for kind, count in summed(metrics, "shardrank_shard_retries_total", "kind").items()
            },
            "hot_lookups": int(sum(summed(metrics, "shardrank_hot_lookups_total").values())),
            "hot_hits": int(sum(summed(metrics, "shardrank_hot_hits_total").values())),
        }
        return fleet.report(figures, swap_limits(figures, config.max_ratio_p99))


async def _swap(config: SwapDrillConfig, fleet: OracleFleet, course: SwapCourse) -> None:
    # The drill uses the cores that it shares with the fleet, as no swap would.
    with timed(course.excluded):
        if len(course.swaps) >= min(WARMUP_SWAPS, config.swaps - 1):
            course.memory.append(await asyncio.to_thread(read_processes, fleet.process_ids()))
        version = await fleet.publish_next(differs_from=course.versions[-1])
    await asyncio.sleep(config.pause_s)
    with timed(course.swaps):
        await fleet.swap_to(version, config.strategy)
    course.versions.append(version)
    fleet.load.process.check()


def swap_figures(answers: Answers, course: SwapCourse) -> dict[str, Any]:
    """Return what answers and memory say, by the names of the report."""
    first, last = course.memory[0], course.memory[-1]
    during = overlaps(answers, course.swaps)
    excluded = overlaps(answers, course.excluded) & ~during
    steady = ~during & ~excluded
    p99_steady, p99_during = (latency_ms(answers[which], 99) for which in (steady, during))
    durations = [end - begin for begin, end in course.swaps]
    rss = [sum(process["rss_mb"] for process in sample.values()) for sample in course.memory]
    by_api = {}
    for number, name in enumerate(APIS):
        is_api = answers["api"] == number
        by_api[name] = {
            "answers": int(is_api.sum()),
            "not_ok": int((answers["kind"][is_api] != Kind.OK).sum()),
            "p99_ms_steady": latency_ms(answers[is_api & steady], 99),
            "p99_ms_during_swap": latency_ms(answers[is_api & during], 99),
        }
    return {
        **count_kinds(answers["kind"]),
        "swaps": len(course.swaps),
        "p99_ms_steady": p99_steady,
        "p99_ms_during_swap": p99_during,
        "ratio_p99": p99_during / p99_steady if p99_steady and p99_during else None,
        "rss_mb_before": rss[0],
        "rss_mb_after": rss[-1],
        "stale": int(is_stale(answers, course).sum()),
        "answers_steady": int(steady.sum()),
        "answers_during_swap": int(during.sum()),
        "answers_apart": int(excluded.sum()),
        "p50_ms_steady": latency_ms(answers[steady], 50),
        "p50_ms_during_swap": latency_ms(answers[during], 50),
        "p99_ms_apart": latency_ms(answers[excluded], 99),
        "max_ms": latency_ms(answers, 100),
        "load_lag_p99_ms": percentile(1e3 * (answers["turn"] - answers["intended"]), 99),
        "by_api": by_api,
        "uss_mb_before": sum(process["uss_mb"] for process in first.values()),
        "uss_mb_after": sum(process["uss_mb"] for process in last.values()),
        "rss_mb_per_swap": slope_mb_per_swap(rss),
        "rss_mb_by_swap": [round(total_mb, 1) for total_mb in rss],
        "rss_mb_by_process": {name: (before["rss_mb"], last[name]["rss_mb"]) for name, before in first.items()},
        "swap_s_median": percentile(durations, 50),
        "swap_s_max": percentile(durations, 100),
    }


def is_stale(answers: Answers, course: SwapCourse) -> Mask:
    """Return which answers are right, but of a version that was not live while the request was in flight: bool [n].

    A version may be live from the begin of the swap to it until the end of the swap from it.
    """
    begins, ends = [-math.inf, *(swap.begin for swap in course.swaps)], [*(swap.end for swap in course.swaps), math.inf]
    stale: Mask = answers["kind"] == Kind.OK
    for version, begin, end in zip(course.versions, begins, ends, strict=True):
        stale &= (answers["version"] != version) | ~overlaps(answers, [TimeSpan(begin, end)])
    return stale


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
