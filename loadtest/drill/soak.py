"""`drill soak`: a fleet at work for a while, with rollouts and row updates; does anything grow?

The first half is warm-up: pools fill, allocators and caches reach their size. Of what follows, rollouts excluded, in
which there are two versions, the medians of `BLOCKS` blocks are taken, and a line is fitted to them.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from loader.progress import Progress
from loadtest.drill.config import Judged, Limit, Report, RollingDrillConfig, SoakDrillConfig, answer_limits
from loadtest.drill.fleet import FIRST_VERSION, OracleFleet, Sample, TimeSpan, count_kinds, oracle_fleet, read_processes
from loadtest.drill.trainer import running_trainer
from loadtest.load.result import Float64Array, Rows

WARM_UP_SHARE = 0.5
BLOCKS = 30
# Fewer have no slope.
MIN_BLOCKS = 5
# Of the normal distribution: the interval has the true slope in 95 of 100 cases.
Z_95 = 1.96
SAMPLE_S = 1.0
# After a rollout, for the old version's memory to be freed.
QUIET_S = 5.0
MEASURES = ("rss_mb", "anonymous_mb", "descriptors", "threads")
"""Of a `Sample`."""


@dataclass(slots=True)
class SoakCourse:
    """What was done, counted by the names of the report, and samples by CLOCK_MONOTONIC seconds and process."""

    samples: dict[float, dict[str, Sample]] = field(default_factory=dict)
    restarted: set[str] = field(default_factory=set)
    excluded: list[TimeSpan] = field(default_factory=list)
    """Rollouts, and the time in which they settle."""
    counts: Counter[str] = field(default_factory=Counter)


async def run_drill(config: SoakDrillConfig, folder: Path, progress: Progress) -> Report:
    """Run the drill with its files in the folder. Raises LoadError if a rollout or a process fails."""
    course, total_s = SoakCourse(), 60 * config.minutes
    async with oracle_fleet(config, folder, progress) as fleet, running_trainer(fleet, config, course.counts, {}):
        ends, first_ids = time.monotonic() + total_s, fleet.process_ids()
        rolling = fleet.load.tasks.create_task(run_rollouts(config, fleet, course, ends))
        while (left_s := ends - time.monotonic()) > 0:
            progress("seconds", int(total_s - left_s), int(total_s))
            process_ids = fleet.process_ids()
            course.samples[time.monotonic()] = await asyncio.to_thread(read_processes, process_ids)
            course.restarted |= {name for name, number in process_ids.items() if number != first_ids[name]}
            await asyncio.sleep(SAMPLE_S)
        rolling.cancel()
        progress("seconds", int(total_s), int(total_s))
        return await fleet.report(partial(soak_figures, config, course))


async def run_rollouts(config: RollingDrillConfig, fleet: OracleFleet, course: SoakCourse, ends: float) -> None:
    """Swap A for B and back; the last one begins in time to be done. Raises LoadError."""
    live = FIRST_VERSION
    while time.monotonic() + config.rollout_every_s < ends:
        await asyncio.sleep(config.rollout_every_s)
        begin = time.monotonic()
        live = await fleet.publish_next(differs_from=live)
        await fleet.swap_to(live)
        course.excluded.append(TimeSpan(begin, time.monotonic() + QUIET_S))
        course.counts["rollouts"] += 1


def fit_slope(minutes: Float64Array, values: Float64Array) -> dict[str, float | None]:
    """Return how much values [n] change in a minute, and the ends of its interval of 95%; None below `MIN_BLOCKS`.

    By Theil and Sen: the slope is the median of those between any two values. Its interval is Sen's (1968): the number
    of pairs that rise minus that of those that fall is, without a trend, about normal with variance
    n (n - 1) (2 n + 5) / 18.
    """
    count = len(values)
    if count < MIN_BLOCKS:
        return {"per_min": None, "low": None, "high": None}
    first, second = np.triu_indices(count, 1)
    slopes = np.sort((values[second] - values[first]) / (minutes[second] - minutes[first]))
    reach = Z_95 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, math.floor((slopes.size - reach) / 2))
    return {"per_min": float(np.median(slopes)), "low": float(slopes[low]), "high": float(slopes[-1 - low])}


def block_medians(values: Float64Array) -> Float64Array:
    """Divide values [n] into `BLOCKS` of as many samples, and return the medians of those that have any: [b]."""
    return np.array([np.median(block) for block in np.array_split(values, BLOCKS) if block.size])


def soak_figures(config: SoakDrillConfig, course: SoakCourse, answers: Rows) -> Judged:
    """Return what was done and read, by the names of the report, and the limits; a short soak does not pass."""
    times = np.array(list(course.samples))
    is_measured = times >= (times[0] + WARM_UP_SHARE * (times[-1] - times[0]) if times.size else 0.0)
    for span in course.excluded:
        is_measured &= (times < span.begin) | (times > span.end)
    measured = times[is_measured]
    measured_min = float(np.ptp(measured)) / 60 if measured.size else 0.0
    trends: list[dict[str, Any]] = []
    medians: dict[str, list[float]] = {}
    grown: list[Limit] = []
    for process, what in itertools.product(sorted(next(iter(course.samples.values()), {})), MEASURES):
        # One that has no process at the moment was started again, and does not pass.
        values = np.array([samples.get(process, {}).get(what, math.nan) for samples in course.samples.values()])
        blocks, is_memory = block_medians(values[is_measured]), what.endswith("_mb")
        slope, ends = fit_slope(block_medians(measured) / 60, blocks), blocks.tolist() or [None]
        # Of descriptors and threads there may be one more over the measured time.
        limit = config.max_mb_per_min if is_memory else 1.0 / max(measured_min, 1e-9)
        trends.append({"process": process, "what": what, "first": ends[0], "last": ends[-1], **slope, "limit": limit})
        medians[f"{process} {what}"] = blocks.round(2).tolist()
        grows = slope["high"]
        # That memory does not grow must be certain; connections, and so descriptors, come and go with the load.
        if slope["low"] is not None and not is_memory:
            grows = slope["per_min"] if slope["low"] > 0 else 0.0
        grown.append(Limit(f"{process} {what} a minute", grows, limit))
    figures: dict[str, Any] = {
        "minutes": config.minutes,
        "rollouts": course.counts["rollouts"],
        "updates": course.counts["updates"],
        "samples": int(measured.size),
        "measured_min": measured_min,
        "restarted": sorted(course.restarted),
        "trends": trends,
        "medians": medians,
        **count_kinds(answers["code"]),
    }
    done = [Limit(name, figures[name], 1, "at least") for name in ("rollouts", "updates", "samples")]
    return figures, [*answer_limits(figures), *done, Limit("restarted", len(course.restarted), 0), *grown]
