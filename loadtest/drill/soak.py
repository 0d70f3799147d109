"""`drill soak`: a fleet at work for a while, with rollouts, row updates and bad requests; does anything grow?

Once a second the memory, descriptors and threads of every process are read. The first half is warm-up: pools fill,
allocators and caches reach their size. Of what follows, rollouts excluded, in which there are two versions, the medians
of `BLOCKS` equal times are taken, and a line is fitted by Theil and Sen: the median of the slopes between any two.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from loader.deltas.publisher import AsyncDeltaPublisher
from loader.progress import Progress
from loadtest.drill.answers import TimeSpan, answer_limits, count_kinds
from loadtest.drill.config import SoakDrillConfig
from loadtest.drill.fleet import OracleFleet, oracle_fleet
from loadtest.drill.load import TIMEOUT_MS, OracleRequests, verdict_of
from loadtest.drill.oracle import FACTORS, Kind, letter_of, patterns
from loadtest.drill.report import Limit, Report
from loadtest.errors import DrillError
from loadtest.load.senders import Outgoing

WARM_UP_SHARE = 0.5
BLOCKS = 30
# Fewer have no slope.
MIN_BLOCKS = 5
# Of the normal distribution: the interval has the true slope in 95 of 100 cases.
Z_95 = 1.96
UPDATED_ROWS = 64
KIB_PER_MB = 1e6 / 1024
FRESH_QUESTIONS = 64
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

Float64Array: TypeAlias = npt.NDArray[np.float64]


class Sample(NamedTuple):
    """One process at one moment: open descriptors, threads, and memory.

    `rss_mb` is all that is resident, `anonymous_mb` what no file has, swapped out or not: heaps and stacks. Neither
    depends on who else maps the same libraries, as proportional and private memory do.
    """

    rss_mb: float
    anonymous_mb: float
    descriptors: int
    threads: int

    @classmethod
    def from_process(cls, process_id: int) -> Sample:
        """Read what a process has now. Raises OSError if it has ended."""
        folder = Path(f"/proc/{process_id}")
        status = dict(line.split(":\t", 1) for line in (folder / "status").read_text(encoding="utf-8").splitlines())
        rss, anonymous, swapped = (
            int(status.get(name, "0").split()[0]) / KIB_PER_MB for name in ("VmRSS", "RssAnon", "VmSwap")
        )
        return cls(rss, anonymous + swapped, len(list((folder / "fd").iterdir())), int(status["Threads"]))


@dataclass(slots=True)
class SoakCourse:
    """What happened, and what was read of each process.

    Attributes:
        samples: by time, in seconds of CLOCK_MONOTONIC, and by process.
        restarted: processes that were seen with another id than at first.
        excluded: rollouts, and the time in which they settle.
        counts: of what was done while it soaked, by the names of the report.
        problems: the first bad answers to strangers.
    """

    samples: dict[float, dict[str, Sample]] = field(default_factory=dict)
    restarted: set[str] = field(default_factory=set)
    excluded: list[TimeSpan] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Work:
    """What the fleet does in addition to the load, until the soak ends; a version that goes is not updated any more."""

    config: SoakDrillConfig
    fleet: OracleFleet
    course: SoakCourse
    swapping: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def roll_out(self, ends: float) -> None:
        """Swap A for B and back; the last one begins in time to be done. Raises DrillError."""
        live = await self.fleet.live_version()
        while time.monotonic() + self.config.rollout_every_s < ends:
            await asyncio.sleep(self.config.rollout_every_s)
            async with self.swapping:
                begin = time.monotonic()
                live = await self.fleet.publish_next(differs_from=live)
                await self.fleet.swap_to(live)
                self.course.excluded.append(TimeSpan(begin, time.monotonic() + self.config.settle_s))
                self.course.counts["rollouts"] += 1

    async def update(self) -> None:
        """Publish rows of the live version again, as they are, so that its answers stay what they must be."""
        fleet, rng = self.fleet, np.random.default_rng(self.config.seed)
        publishers: dict[int, AsyncDeltaPublisher] = {}
        for table in itertools.cycle(fleet.spec.tables):
            await asyncio.sleep(1.0 / self.config.updates)
            async with self.swapping:
                live = await fleet.live_version()
                if live not in publishers:
                    publishers = {live: AsyncDeltaPublisher(fleet.registry.registry, fleet.spec.model, live)}
                rows = rng.integers(0, table.num_embeddings, UPDATED_ROWS)
                await publishers[live].publish(table.name, rows, FACTORS[letter_of(live)] * patterns(table, rows))
                self.course.counts["updates"] += 1

    async def strangers(self) -> None:
        """Come over new connections, with a bad request and with a good one in turn."""
        local, course, draw = self.fleet.local, self.course, random.Random(self.config.seed)
        requests, ports = (
            OracleRequests(self.config, FRESH_QUESTIONS),
            {"http": local.http_port, "grpc": local.grpc_port},
        )
        bad = itertools.cycle((scheme, request) for scheme, sent in BAD_REQUESTS.items() for request in sent)
        for (scheme, request), fresh in zip(bad, itertools.cycle(ports), strict=False):
            await asyncio.sleep(1.0 / self.config.strangers)
            answer = await send_bytes(local.host, ports[scheme], request)
            course.counts["bad_requests"] += 1
            if answer.startswith(b"HTTP/1.1 5"):
                course.problems.append(f"a bad request was answered with {answer[:40]!r}: {request[:60]!r}")
            sender, now = await requests.sender(f"{fresh}://{local.host}:{ports[fresh]}"), time.monotonic()
            good = Outgoing(draw.randrange(1 << 20), 0.0, now, now + TIMEOUT_MS / 1000, now)
            verdict = verdict_of(good, await sender.ask(good))
            await sender.close()
            course.counts["fresh_requests"] += 1
            if verdict.kind is not Kind.OK:
                course.problems.append(f"a request over a new connection: {verdict.detail}")
            del course.problems[MAX_PROBLEMS:]


async def send_bytes(host: str, port: int, request: bytes) -> bytes:
    """Send bytes over a new connection, return the begin of what comes back, and close."""
    reader, writer = await asyncio.open_connection(host, port)
    answer = b""
    with contextlib.suppress(TimeoutError, ConnectionError), contextlib.closing(writer):
        writer.write(request)
        async with asyncio.timeout(ANSWER_WAIT_S if request else 0):
            answer = await reader.read(1024)
    return answer


async def run_drill(config: SoakDrillConfig, folder: Path, progress: Progress) -> Report:
    """Run the drill; stores, logs and answers go into the folder.

    Raises DrillError if a rollout does not end as `done`, or a process ends. What grows is in the report.
    """
    course, total_s = SoakCourse(), 60 * config.minutes
    async with oracle_fleet(config, folder, progress) as fleet:
        begin, work, first_ids = time.monotonic(), _Work(config, fleet, course), fleet.process_ids()
        running = [
            asyncio.create_task(task) for task in (work.roll_out(begin + total_s), work.update(), work.strangers())
        ]
        try:
            while (left_s := begin + total_s - time.monotonic()) > 0:
                progress("seconds", int(total_s - left_s), int(total_s))
                fleet.load.check()
                process_ids = fleet.process_ids()
                course.samples[time.monotonic()] = await asyncio.to_thread(read_samples, process_ids)
                course.restarted |= {name for name, number in process_ids.items() if number != first_ids[name]}
                # Whatever fails ends the drill.
                done, _ = await asyncio.wait(running, timeout=config.sample_s, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running)
        progress("seconds", int(total_s), int(total_s))
        answers = await fleet.load.stop()
        figures = {**soak_figures(config, course), **count_kinds(answers["kind"])}
        return fleet.report(figures, soak_limits(figures), problems=course.problems)


def read_samples(process_ids: Mapping[str, int]) -> dict[str, Sample]:
    """Read all processes once. Raises DrillError if one of them has ended."""
    try:
        return {name: Sample.from_process(process_id) for name, process_id in process_ids.items()}
    except OSError as error:
        raise DrillError(f"a process has ended: {error}") from error


class Slope(NamedTuple):
    """How much something changes in a minute, with its interval of 95%; None of too few values."""

    per_min: float | None = None
    low: float | None = None
    high: float | None = None

    @classmethod
    def from_values(cls, minutes: Float64Array, values: Float64Array) -> Slope:
        """Fit a line through values [n] by Theil and Sen, from `MIN_BLOCKS` on.

        The slope is the median of those between any two values. Its interval is Sen's (1968): the number of pairs that
        rise minus that of those that fall is, without a trend, about normal with variance n (n - 1) (2 n + 5) / 18.
        """
        count = len(values)
        if count < MIN_BLOCKS:
            return cls()
        first, second = np.triu_indices(count, 1)
        slopes = np.sort((values[second] - values[first]) / (minutes[second] - minutes[first]))
        reach = Z_95 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
        low = max(0, math.floor((slopes.size - reach) / 2))
        return cls(float(np.median(slopes)), float(slopes[low]), float(slopes[slopes.size - 1 - low]))


def block_medians(times: Float64Array, values: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Divide values [n, m] into at most `BLOCKS` equal times; return the median of each that has any: [b], [b, m]."""
    count = min(BLOCKS, len(times))
    if not count:
        return times, values
    place = np.minimum(((times - times[0]) / max(times[-1] - times[0], 1e-9) * count).astype(int), count - 1)
    blocks = [place == number for number in np.unique(place)]
    medians = [np.median(values[block], axis=0) for block in blocks]
    return np.array([np.median(times[block]) for block in blocks]), np.array(medians)


def soak_figures(config: SoakDrillConfig, course: SoakCourse) -> dict[str, Any]:
    """Return what was done and read, by the names of the report.

    The limit of descriptors and threads is one more over the measured time.
    """
    times = np.array(list(course.samples))
    is_measured = times >= (times[0] + WARM_UP_SHARE * (times[-1] - times[0]) if times.size else 0.0)
    for span in course.excluded:
        is_measured &= (times < span.begin) | (times > span.end)
    measured = times[is_measured]
    measured_min = float(measured[-1] - measured[0]) / 60 if measured.size else 0.0
    trends: list[dict[str, Any]] = []
    medians: dict[str, list[float]] = {}
    for process in sorted(next(iter(course.samples.values()), {})):
        # One that has no process at the moment was started again, and does not pass.
        read = np.array([samples.get(process, (np.nan,) * 4) for samples in course.samples.values()], np.float64)
        at, blocks = block_medians(measured, read[is_measured])
        for what, values in zip(Sample._fields, blocks.T, strict=True):
            slope = Slope.from_values(at / 60, values)
            ends = (float(values[0]), float(values[-1])) if values.size else (None, None)
            limit = config.max_mb_per_min if what.endswith("_mb") else 1.0 / max(measured_min, 1e-9)
            trend = {"process": process, "what": what, "first": ends[0], "last": ends[1], **slope._asdict()}
            trends.append({**trend, "limit": limit})
            medians[f"{process} {what}"] = values.round(2).tolist()
    return {
        "minutes": config.minutes,
        **{name: course.counts[name] for name in ("rollouts", "updates", "bad_requests", "fresh_requests")},
        "samples": int(measured.size),
        "measured_min": measured_min,
        "restarted": sorted(course.restarted),
        "trends": trends,
        "medians": medians,
    }


def soak_limits(figures: Mapping[str, Any]) -> list[Limit]:
    """Return what decides the verdict: a soak that is too short does not pass."""
    done = [Limit(name, figures[name], 1, "at least") for name in ("rollouts", "updates", "samples")]
    limits = [*answer_limits(figures), *done, Limit("restarted", len(figures["restarted"]), 0)]
    for trend in figures["trends"]:
        grows = trend["high"]
        # That memory does not grow must be certain; connections, and so descriptors, come and go with the load.
        if grows is not None and not trend["what"].endswith("_mb"):
            grows = trend["per_min"] if trend["low"] > 0 else 0.0
        limits.append(Limit(f"{trend['process']} {trend['what']} a minute", grows, trend["limit"]))
    return limits
