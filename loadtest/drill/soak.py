"""`drill soak`: a fleet at work for a while, with rollouts, row updates and bad requests; does anything grow?

The first half is warm-up: pools fill, allocators and caches reach their size. Of what follows, rollouts excluded, in
which there are two versions, the medians of `BLOCKS` blocks are taken, and a line is fitted to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
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
from loadtest.drill.oracle import TIMEOUT_MS, OracleRequests
from loadtest.drill.trainer import running_trainer
from loadtest.load.result import Float64Array, Rows
from loadtest.load.senders import Outgoing

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
MAX_PROBLEMS = 10
# Some of what strangers send is never answered.
ANSWER_WAIT_S = 0.5
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
POST = b"POST /v1/models/oracle:rank HTTP/1.1\r\nhost: soak\r\ncontent-length: "
BAD_REQUESTS = {
    "http": (
        b"\x16\x03\x01\x02\x00 no HTTP at all \r\n\r\n",
        POST + b'24\r\n\r\n{"context": {"nosuch": 1}',
        POST + b"1000\r\n\r\n{",
        POST + b"1099511627776\r\n\r\n" + b"x" * 1000,
        b"GET /nosuch HTTP/1.1\r\nhost: soak\r\n\r\n",
        b"",
    ),
    # A frame of data on a stream that was never opened; one that is longer than allowed.
    "grpc": (
        b"GET / HTTP/1.1\r\n\r\n",
        PREFACE,
        PREFACE + b"\0\0\1\0\0\0\0\0\1x",
        PREFACE + b"\xff\xff\xff\1\4\0\0\0\1",
    ),
}


@dataclass(slots=True)
class SoakCourse:
    """What was done, counted by the names of the report, and samples by CLOCK_MONOTONIC seconds and process."""

    samples: dict[float, dict[str, Sample]] = field(default_factory=dict)
    restarted: set[str] = field(default_factory=set)
    excluded: list[TimeSpan] = field(default_factory=list)
    """Rollouts, and the time in which they settle."""
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


async def run_drill(config: SoakDrillConfig, folder: Path, progress: Progress) -> Report:
    """Run the drill with its files in the folder. Raises LoadError if a rollout or a process fails."""
    course, total_s = SoakCourse(), 60 * config.minutes
    async with oracle_fleet(config, folder, progress) as fleet, running_trainer(fleet, config, course.counts, {}):
        ends, first_ids = time.monotonic() + total_s, fleet.process_ids()
        tasks = (
            run_rollouts(config, fleet, course, ends),
            _call_as_strangers(config, fleet, course),
        )
        running = [fleet.load.tasks.create_task(task) for task in tasks]
        while (left_s := ends - time.monotonic()) > 0:
            progress("seconds", int(total_s - left_s), int(total_s))
            process_ids = fleet.process_ids()
            course.samples[time.monotonic()] = await asyncio.to_thread(read_processes, process_ids)
            course.restarted |= {name for name, number in process_ids.items() if number != first_ids[name]}
            await asyncio.sleep(SAMPLE_S)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        progress("seconds", int(total_s), int(total_s))
        return await fleet.report(partial(soak_figures, config, course), course.problems)


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


async def _call_as_strangers(config: SoakDrillConfig, fleet: OracleFleet, course: SoakCourse) -> None:
    local, draw = fleet.local.ports, random.Random(config.seed)
    requests, ports = OracleRequests(config), {"http": local.http_port, "grpc": local.grpc_port}
    bad = itertools.cycle((scheme, request) for scheme, sent in BAD_REQUESTS.items() for request in sent)
    for (scheme, request), fresh in zip(bad, itertools.cycle(ports), strict=False):
        await asyncio.sleep(1.0 / config.strangers)
        reader, writer = await asyncio.open_connection(local.host, ports[scheme])
        answer = b""
        with contextlib.suppress(TimeoutError, ConnectionError), contextlib.closing(writer):
            writer.write(request)
            async with asyncio.timeout(ANSWER_WAIT_S if request else 0):
                answer = await reader.read(1024)
        course.counts["bad_requests"] += 1
        if answer.startswith(b"HTTP/1.1 5"):
            course.problems.append(f"a bad request was answered with {answer[:40]!r}: {request[:60]!r}")
        sender, now = await requests.sender(f"{fresh}://{local.host}:{ports[fresh]}", 1), time.monotonic()
        good = Outgoing(draw.randrange(1 << 20), 0.0, now, now + TIMEOUT_MS / 1000, now)
        failure = await sender.ask(good)
        await sender.aclose()
        course.counts["fresh_requests"] += 1
        if failure is not None:
            course.problems.append(f"a request over a new connection: {failure.kind}: {failure.message}")
        del course.problems[MAX_PROBLEMS:]


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
        **{name: course.counts[name] for name in ("rollouts", "updates", "bad_requests", "fresh_requests")},
        "samples": int(measured.size),
        "measured_min": measured_min,
        "restarted": sorted(course.restarted),
        "trends": trends,
        "medians": medians,
        **count_kinds(answers["code"]),
    }
    done = [Limit(name, figures[name], 1, "at least") for name in ("rollouts", "updates", "samples")]
    return figures, [*answer_limits(figures), *done, Limit("restarted", len(course.restarted), 0), *grown]
