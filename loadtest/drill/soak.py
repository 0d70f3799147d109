"""`drill soak`: a fleet at work for a while, with rollouts, row updates and bad requests; does anything grow?

Once a second the memory, descriptors and threads of every process are read. The first half is warm-up: pools fill,
allocators and caches reach their size. Of what follows, rollouts excluded, in which there are two versions, the medians
of `BLOCKS` equal times are taken, and a line is fitted by Theil and Sen: the median of the slopes between any two.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
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
from loadtest.drill.answers import TimeSpan, answer_problems, count_kinds
from loadtest.drill.config import SoakDrillConfig
from loadtest.drill.fleet import OracleFleet, oracle_fleet
from loadtest.drill.load import TIMEOUT_MS, OracleRequests, verdict_of
from loadtest.drill.oracle import FACTORS, Kind, letter_of, patterns
from loadtest.drill.report import Report
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
_STATUS = ("VmRSS:", "RssAnon:", "VmSwap:", "Threads:")
FRESH_QUESTIONS = 64
MAX_NOTED = 10
STRANGER_TIMEOUT_S = 5.0
# Some of what strangers send is never answered.
ANSWER_WAIT_S = 0.5

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
        lines = (line.split() for line in (folder / "status").read_text(encoding="utf-8").splitlines())
        values = {line[0]: int(line[1]) for line in lines if line[0] in _STATUS}
        rss, anonymous, swapped, threads = (values.get(name, 0) for name in _STATUS)
        descriptors = sum(1 for _ in (folder / "fd").iterdir())
        return cls(rss / KIB_PER_MB, (anonymous + swapped) / KIB_PER_MB, descriptors, threads)


@dataclass(slots=True)
class SoakCourse:
    """What happened, and what was read of each process.

    Attributes:
        times: of the samples, in seconds of CLOCK_MONOTONIC.
        samples: by process, as many as `times`.
        process_ids: of all that were seen under a name.
        excluded: rollouts, and the time in which they settle.
        counts: of what was done while it soaked, by the names of the report.
        problems: the first bad answers to strangers.
    """

    times: list[float] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    process_ids: dict[str, set[int]] = field(default_factory=dict)
    excluded: list[TimeSpan] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def sample(self, process_ids: Mapping[str, int]) -> None:
        """Read all processes once. Raises DrillError if one of them has ended."""
        now = time.monotonic()
        for name, process_id in process_ids.items():
            try:
                sample = Sample.from_process(process_id)
            except OSError as error:
                raise DrillError(f"{name} has ended: {error}") from error
            self.samples.setdefault(name, []).append(sample)
            self.process_ids.setdefault(name, set()).add(process_id)
        self.times.append(now)

    def note(self, problem: str) -> None:
        """Keep one of the first problems."""
        if len(self.problems) < MAX_NOTED:
            self.problems.append(problem)


class _Work:
    """What the fleet does in addition to the load, until the soak ends."""

    def __init__(self, config: SoakDrillConfig, fleet: OracleFleet, course: SoakCourse) -> None:
        self._config, self._fleet, self._course = config, fleet, course
        # A version that goes is not updated any more.
        self._swapping = asyncio.Lock()

    async def roll_out(self, ends: float) -> None:
        """Swap A for B and back; the last one begins in time to be done. Raises DrillError."""
        live = await self._fleet.live_version()
        while time.monotonic() + self._config.rollout_every_s < ends:
            await asyncio.sleep(self._config.rollout_every_s)
            async with self._swapping:
                begin = time.monotonic()
                live = await self._fleet.publish_next(differs_from=live)
                await self._fleet.swap_to(live)
                self._course.excluded.append(TimeSpan(begin, time.monotonic() + self._config.settle_s))
                self._course.counts["rollouts"] += 1

    async def update(self) -> None:
        """Publish rows of the live version again, as they are, so that its answers stay what they must be."""
        fleet, spec, publisher, live = self._fleet, self._fleet.writer.spec, None, 0
        rng = np.random.default_rng(self._config.seed)
        for number in itertools.count():
            await asyncio.sleep(1.0 / self._config.updates)
            async with self._swapping:
                version = await fleet.live_version()
                if publisher is None or version != live:
                    live, publisher = version, AsyncDeltaPublisher(fleet.registry.registry, fleet.model, version)
                table = spec.tables[number % len(spec.tables)]
                rows = rng.integers(0, table.num_embeddings, UPDATED_ROWS)
                await publisher.publish(table.name, rows, FACTORS[letter_of(live)] * patterns(table, rows))
                self._course.counts["updates"] += 1

    async def strangers(self) -> None:
        """Come over new connections, with a bad request and with a good one in turn."""
        local, course, draw = self._fleet.local, self._course, random.Random(self._config.seed)
        requests = OracleRequests(self._config, FRESH_QUESTIONS)
        addresses = (f"http://{local.host}:{local.http_port}", f"grpc://{local.host}:{local.grpc_port}")
        bad = bad_requests(self._fleet.model)
        for number in itertools.count():
            await asyncio.sleep(1.0 / self._config.strangers)
            is_grpc, request = bad[number % len(bad)]
            answer = await send_bytes(local.host, local.grpc_port if is_grpc else local.http_port, request)
            course.counts["bad_requests"] += 1
            if answer.startswith(b"HTTP/1.1 5"):
                course.note(f"a bad request was answered with {answer[:40]!r}: {request[:60]!r}")
            await self._ask_once(requests, addresses[number % 2], draw.randrange(1 << 20))
            course.counts["fresh_requests"] += 1

    async def _ask_once(self, requests: OracleRequests, address: str, number: int) -> None:
        sender, now = await requests.sender(address), time.monotonic()
        request = Outgoing(number, 0.0, now, now + TIMEOUT_MS / 1000, now)
        try:
            verdict = verdict_of(request, await sender.ask(request))
        finally:
            await sender.close()
        if verdict.kind is not Kind.OK:
            self._course.note(f"a request over a new connection: {verdict.detail}")


def bad_requests(model: str) -> list[tuple[bool, bytes]]:
    """Return (over gRPC, bytes on a connection): what strangers send, none of which is any fault of the server's."""

    def post(path: str, body: bytes, length: int | None = None) -> bytes:
        size = len(body) if length is None else length
        return f"POST {path} HTTP/1.1\r\nhost: soak\r\ncontent-length: {size}\r\n\r\n".encode() + body

    rank = f"/v1/models/{model}:rank"
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
    return [
        (False, b""),
        (False, b"\x16\x03\x01\x02\x00 no HTTP at all \r\n\r\n"),
        (False, post(rank, b'{"context": {')),
        (False, post(rank, json.dumps({"context": {"nosuch": [1]}, "candidates": {}}).encode())),
        (False, post(rank, b"{", length=1000)),
        (False, post(rank, b"x" * 1000, length=1 << 40)),
        (False, post("/v1/models/nosuch:rank", b"{}")),
        (False, b"GET /nosuch HTTP/1.1\r\nhost: soak\r\n\r\n"),
        (True, b""),
        (True, b"GET / HTTP/1.1\r\n\r\n"),
        (True, preface),
        # A frame of data on a stream that was never opened; one that is longer than allowed.
        (True, preface + b"\0\0\1\0\0\0\0\0\1x"),
        (True, preface + b"\xff\xff\xff\1\4\0\0\0\1"),
    ]


async def send_bytes(host: str, port: int, request: bytes) -> bytes:
    """Send bytes over a new connection, return the begin of what comes back, and close. Waits a second at most."""
    async with asyncio.timeout(STRANGER_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(host, port)
    answer = b""
    try:
        writer.write(request)
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(ANSWER_WAIT_S if request else 0):
                answer = await reader.read(1024)
    finally:
        writer.close()
    return answer


async def run_drill(config: SoakDrillConfig, folder: Path, progress: Progress) -> Report:
    """Run the drill; stores, logs and answers go into the folder.

    Raises DrillError if a rollout does not end as `done`, or a process ends. What grows is in the report.
    """
    course, total_s = SoakCourse(), 60 * config.minutes
    async with oracle_fleet(config, folder, progress) as fleet:
        begin = time.monotonic()
        work = _Work(config, fleet, course)
        running = [
            asyncio.create_task(task) for task in (work.roll_out(begin + total_s), work.update(), work.strangers())
        ]
        try:
            while (left_s := begin + total_s - time.monotonic()) > 0:
                progress("seconds", int(total_s - left_s), int(total_s))
                fleet.load.check()
                await asyncio.to_thread(course.sample, fleet.process_ids())
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
        return fleet.report(figures, [*soak_problems(figures), *course.problems])


class Slope(NamedTuple):
    """How much something changes in a minute, with its interval of 95%."""

    per_min: float
    low: float
    high: float

    @classmethod
    def from_values(cls, minutes: Float64Array, values: Float64Array) -> Slope | None:
        """Fit a line through values [n] by Theil and Sen; None for fewer than `MIN_BLOCKS`.

        The slope is the median of those between any two values. Its interval is Sen's (1968): the number of pairs that
        rise minus that of those that fall is, without a trend, about normal with variance n (n - 1) (2 n + 5) / 18.
        """
        count = len(values)
        if count < MIN_BLOCKS:
            return None
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
    return (
        np.array([np.median(times[block]) for block in blocks]),
        np.array([np.median(values[block], axis=0) for block in blocks]),
    )


def soak_figures(config: SoakDrillConfig, course: SoakCourse) -> dict[str, Any]:
    """Return what was done and read, by the names of the report.

    `high` of memory may not exceed `limit`. Descriptors and threads grow if `per_min` reaches it, which is one more
    over the measured time, and `low` is above 0: connections come and go with the load.
    """
    times = np.array(course.times)
    begin = times[0] + WARM_UP_SHARE * (times[-1] - times[0]) if times.size else 0.0
    is_measured = times >= begin
    for span in course.excluded:
        is_measured &= (times < span.begin) | (times > span.end)
    measured = times[is_measured]
    measured_min = float(measured[-1] - measured[0]) / 60 if measured.size else 0.0
    limits = {"rss_mb": config.max_mb_per_min, "anonymous_mb": config.max_mb_per_min}
    trends: list[dict[str, Any]] = []
    medians: dict[str, list[float]] = {}
    for process, samples in sorted(course.samples.items()):
        at, blocks = block_medians(measured, np.array(samples, np.float64)[is_measured])
        for what, values in zip(Sample._fields, blocks.T, strict=True):
            slope = Slope.from_values(at / 60, values)
            trend = {
                "process": process,
                "what": what,
                "first": float(values[0]) if values.size else None,
                "last": float(values[-1]) if values.size else None,
                **(slope._asdict() if slope else dict.fromkeys(Slope._fields)),
                "limit": limits.get(what, 1.0 / max(measured_min, 1e-9)),
            }
            trends.append(trend)
            medians[f"{process} {what}"] = values.round(2).tolist()
    return {
        "minutes": config.minutes,
        **{name: course.counts[name] for name in ("rollouts", "updates", "bad_requests", "fresh_requests")},
        "samples": int(measured.size),
        "measured_min": measured_min,
        "restarted": sorted(name for name, ids in course.process_ids.items() if len(ids) > 1),
        "trends": trends,
        "medians": medians,
    }


def soak_problems(figures: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with answers, and what grows."""
    problems = answer_problems(figures)
    rollouts, updates, trends = figures["rollouts"], figures["updates"], figures["trends"]
    if not rollouts or not updates:
        problems.append(f"{rollouts} rollouts and {updates} row updates came in this time; soak for longer")
    problems += [f"{name} was started again, so its memory can't be compared" for name in figures["restarted"]]
    if not trends or any(trend["per_min"] is None for trend in trends):
        problems.append(f"{figures['samples']} samples are too few to tell what grows; soak for longer")
    for trend in trends:
        name, per_min, low, high = f"{trend['process']} {trend['what']}", *(trend[key] for key in Slope._fields)
        if per_min is None:
            continue
        if name.endswith("_mb") and high > trend["limit"]:
            grows = f"grows by {per_min:.3f} MB a minute ({low:.3f} to {high:.3f})"
            problems.append(f"{name} {grows}, which is not surely less than the {trend['limit']:g} MB that are allowed")
        elif not name.endswith("_mb") and low > 0 and per_min >= trend["limit"]:
            problems.append(f"{name} grow from {trend['first']:g} to {trend['last']:g}")
    return problems
