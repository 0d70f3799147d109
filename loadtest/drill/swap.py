"""`drill swap`: one version after the other, A and B in turn, under a load that checks every answer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.progress import Progress
from loader.snapshot.publishing import rows_bytes_of
from loadtest.bench.deltas import training
from loadtest.drill.config import Judged, Limit, Report, SwapDrillConfig, answer_limits
from loadtest.drill.fleet import (
    BYTES_PER_MB,
    FIRST_VERSION,
    OracleFleet,
    Sample,
    TimeSpan,
    count_kinds,
    oracle_fleet,
    overlaps,
    read_processes,
)
from loadtest.drill.trainer import drawn_upserts
from loadtest.load.result import OK, Rows, percentiles
from loadtest.servers import summed

MEMORY = ("rss_mb", "uss_mb")
MIN_SAMPLES = 20
"""Fewer have no slope. In the first swaps of a process its allocator grows to what a swap needs."""
# Swaps before memory is first read; they count in everything else.
WARMUP_SWAPS = 4


@dataclass(slots=True)
class SwapCourse:
    """Versions that were live one after the other, and what happened when.

    `swaps` end when a rollout was seen to be done; in `excluded` latencies count for neither, as the fleet was cold or
    the drill used its cores; keys came and went in `upserting`. `memory` is of all processes by name; `counted` by
    serving processes.
    """

    versions: list[int] = field(default_factory=lambda: [FIRST_VERSION])
    swaps: list[TimeSpan] = field(default_factory=list)
    excluded: list[TimeSpan] = field(default_factory=list)
    memory: list[Mapping[str, Sample]] = field(default_factory=list)
    counted: dict[str, Any] = field(default_factory=dict)
    upserting: list[TimeSpan] = field(default_factory=list)


@contextmanager
def timed(spans: list[TimeSpan]) -> Iterator[None]:
    """Append the time that the block takes."""
    begin = time.monotonic()
    yield
    spans.append(TimeSpan(begin, time.monotonic()))


async def run_drill(config: SwapDrillConfig, folder: Path, progress: Progress) -> Report:
    """Run the drill with its files in the folder. Raises LoadError if a rollout does not end as `done`."""
    async with oracle_fleet(config, folder, progress) as fleet:
        course = SwapCourse(excluded=[TimeSpan(-math.inf, time.monotonic())])
        for number in range(config.swaps + 1):
            progress("swaps", number, config.swaps)
            # The drill uses the cores that it shares with the fleet, as no swap would.
            with timed(course.excluded):
                if number >= min(WARMUP_SWAPS, config.swaps - 1):
                    course.memory.append(await asyncio.to_thread(read_processes, fleet.process_ids()))
                if number < config.swaps:
                    course.versions.append(await fleet.publish_next(differs_from=course.versions[-1]))
            async with upserting(config, fleet, course) if number % 2 and config.upserts_per_s else nullcontext():
                await asyncio.sleep(config.pause_s)
            if number < config.swaps:
                with timed(course.swaps):
                    await fleet.swap_to(course.versions[-1], config.strategy)
        metrics = await asyncio.to_thread(fleet.server.metrics)
        retries = summed(metrics, "shardrank_shard_retries_total", "kind")
        course.counted["retries"] = {kind: int(count) for kind, count in retries.items()}
        for what in ("hot_lookups", "hot_hits"):
            course.counted[what] = int(sum(summed(metrics, f"shardrank_{what}_total").values()))
        return await fleet.report(partial(swap_figures, config, course, rows_bytes_of(fleet.spec) / BYTES_PER_MB))


@asynccontextmanager
async def upserting(config: SwapDrillConfig, fleet: OracleFleet, course: SwapCourse) -> AsyncIterator[None]:
    """Have keys of the largest table come and go while the block runs. Raises LoadError if they do not."""
    model, live = fleet.spec.model, await fleet.live_version()
    draw = partial(drawn_upserts, fleet.spec.tables[0], live, config.upserts_per_s)
    running = training(fleet.registry.registry.url, model, live, draw)
    with ExitStack() as stack:
        # Keys are drawn, and the process starts and ends, on cores that it shares with the fleet.
        with timed(course.excluded):
            await asyncio.to_thread(stack.enter_context, running)
        with timed(course.upserting):
            yield
            nodes = [node for node in await fleet.registry.nodes() if node.kind == "shard"]
        applied = min(of.delta_sequence for node in nodes for of in node.versions if of.version == live)
        course.counted["deltas_applied_per_s"] = applied / config.pause_s
        with timed(course.excluded):
            await asyncio.to_thread(stack.close)


def swap_figures(config: SwapDrillConfig, course: SwapCourse, rows_mb: float, answers: Rows) -> Judged:
    """Return what answers and memory say, by the names of the report, and the limits."""
    during = overlaps(answers, course.swaps)
    excluded = overlaps(answers, course.excluded) & ~during
    upserts = overlaps(answers, course.upserting) & ~during & ~excluded
    periods = {"steady": ~during & ~excluded & ~upserts, "during_swap": during, "apart": excluded}
    if course.upserting:
        periods["during_upserts"] = upserts
    memory = {what: [sum(each[what] for each in sample.values()) for sample in course.memory] for what in MEMORY}
    rss = memory["rss_mb"]
    latency_s = answers["ended"] - answers["due"]
    p99_ms = {when: percentiles(latency_s[which]).p99_ms for when, which in periods.items()}
    ratio_p99 = {
        f"ratio_p99{name}": p99 / steady if (p99 := p99_ms[when]) and (steady := p99_ms["steady"]) else None
        for when, name in (("during_swap", ""), ("during_upserts", "_upserts"))
        if when in periods
    }
    later = rss[len(rss) // 2 :]
    figures: dict[str, Any] = {
        **count_kinds(answers["code"]),
        **course.counted,
        "strategy": config.strategy,
        "swaps": len(course.swaps),
        **{f"answers_{when}": int(which.sum()) for when, which in periods.items()},
        **{f"p99_ms_{when}": value for when, value in p99_ms.items()},
        **ratio_p99,
        "stale": int(is_stale(answers, course).sum()),
        "load_lag_p99_ms": percentiles(answers["turn"] - answers["due"]).p99_ms,
        "rows_mb": rows_mb,
        **{f"{what}_before": total_mb[0] for what, total_mb in memory.items()},
        **{f"{what}_after": total_mb[-1] for what, total_mb in memory.items()},
        "rss_mb_per_swap": float(np.polyfit(range(len(later)), later, 1)[0]) if len(rss) >= MIN_SAMPLES else None,
    }
    limits = [*answer_limits(figures, "stale")]
    limits += [Limit(name, ratio, getattr(config, f"max_{name}")) for name, ratio in ratio_p99.items()]
    if course.upserting:
        limits.append(Limit("deltas_applied_per_s", figures["deltas_applied_per_s"], 1, "at least"))
    # A version that is not freed adds its rows, once for each replica, with every swap: a tenth of one copy is allowed.
    if len(rss) >= MIN_SAMPLES:
        limits.append(Limit("rss_mb_per_swap", figures["rss_mb_per_swap"], 0.1 * rows_mb))
    return figures, limits


def is_stale(answers: Rows, course: SwapCourse) -> npt.NDArray[np.bool_]:
    """Return which answers are right, but of a version that was not live while the request was in flight: bool [n].

    A version may be live from the begin of the swap to it until the end of the swap from it.
    """
    begins, ends = [-math.inf, *(swap.begin for swap in course.swaps)], [*(swap.end for swap in course.swaps), math.inf]
    stale: npt.NDArray[np.bool_] = answers["code"] == OK
    for version, begin, end in zip(course.versions, begins, ends, strict=True):
        stale &= (answers["version"] != version) | ~overlaps(answers, [TimeSpan(begin, end)])
    return stale
