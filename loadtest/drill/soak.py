"""`drill soak`: a fleet at work for a while, with rollouts, row updates and bad requests; does anything grow?

Once a second the memory, descriptors and threads of every process are read. The first half is warm-up: pools fill,
allocators and caches reach their size. Of what follows, rollouts apart, in which there are two versions, the medians of
`BLOCKS` equal times are taken, and a line is fitted by Theil and Sen: the median of the slopes between any two of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from loader.deltas.publisher import AsyncDeltaPublisher
from loader.progress import Progress, no_progress
from loader.snapshot.tables import Frozen
from loadtest.drill.fleet import FleetReport, OracleFleet, OracleFleetConfig, oracle_fleet
from loadtest.drill.load import TIMEOUT_MS, TimeSpan, count_kinds, counted, oracle_ask
from loadtest.drill.oracle import FACTORS, Kind, letter_of, make_questions, patterns
from loadtest.errors import DrillError
from serving.client import AsyncClient, RetryPolicy

WARM_UP_SHARE = 0.5
BLOCKS = 30
# Fewer tell no slope.
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

Seconds = npt.NDArray[np.float64]


class SoakDrillConfig(OracleFleetConfig):
    """A soak.

    Attributes:
        minutes: under load, warm-up included.
        rollout_every_s: from the end of one rollout to the start of the next one.
        updates: batches of changed rows that are published each second between rollouts.
        strangers: bad requests each second, and as many good ones over connections of their own.
        sample_s: between two readings.
        settle_s: after a rollout, for the old version's memory to be given back.
        max_mb_per_min: growth of a process's memory that is allowed. By default 42 bytes for each request at the
            default rate: a leak of one entry of a dictionary for each is more than twice that.
    """

    NAME: ClassVar[str] = "soak"
    rate: float = Field(default=100.0, gt=0, le=100_000)
    minutes: float = Field(default=20.0, gt=0, le=7 * 24 * 60)
    rollout_every_s: float = Field(default=45.0, gt=0, le=24 * 3600)
    updates: float = Field(default=2.0, gt=0, le=1000)
    strangers: float = Field(default=5.0, gt=0, le=1000)
    max_mb_per_min: float = Field(default=0.25, gt=0, le=1000)
    sample_s: float = Field(default=1.0, gt=0, le=60)
    settle_s: float = Field(default=5.0, ge=0, le=600)
    seed: int = 0


class Sample(NamedTuple):
    """One process at one moment: open descriptors, threads, and memory.

    `rss_mb` is all that is resident, `anonymous_mb` what no file has, swapped out or not: heaps and stacks. Neither
    depends on who else maps the same libraries, as proportional and private memory do.
    """

    rss_mb: float
    anonymous_mb: float
    descriptors: int
    threads: int


def read_process(process_id: int) -> Sample:
    """Read what a process has now. Raises OSError if it has ended."""
    folder = Path(f"/proc/{process_id}")
    lines = (line.split() for line in (folder / "status").read_text(encoding="utf-8").splitlines())
    told = {line[0]: int(line[1]) for line in lines if line[0] in _STATUS}
    rss, anonymous, swapped, threads = (told.get(name, 0) for name in _STATUS)
    descriptors = sum(1 for _ in (folder / "fd").iterdir())
    return Sample(rss / KIB_PER_MB, (anonymous + swapped) / KIB_PER_MB, descriptors, threads)


class Slope(NamedTuple):
    """How much something changes in a minute, with its interval of 95%."""

    per_min: float
    low: float
    high: float


class Trend(Frozen):
    """One measure of one process after the warm-up; in MB, or a number.

    Attributes:
        process: by its name in the fleet.
        what: a field of `Sample`.
        first, last: medians of the first and the last block.
        per_min, low, high: the slope and its interval; None for too short a time.
        limit: that `high` of memory may not exceed. Descriptors and threads grow if `per_min` reaches it, which is one
            more over the measured time, and `low` is above 0: connections come and go with the load.
    """

    process: str
    what: str
    first: float | None
    last: float | None
    per_min: float | None
    low: float | None
    high: float | None
    limit: float


class SoakReport(FleetReport):
    """What `drill soak --json` writes.

    Attributes:
        rollouts, updates, bad_requests, fresh_requests: that were done while it soaked.
        samples: of each process, after the warm-up and apart from rollouts.
        measured_min: from the first of these to the last.
        restarted: processes that were not the same from the first to the last sample.
        medians: of each block, by process and measure.
    """

    minutes: float
    rollouts: int
    updates: int
    bad_requests: int
    fresh_requests: int
    samples: int
    measured_min: float
    restarted: tuple[str, ...]
    trends: tuple[Trend, ...]
    medians: dict[str, tuple[float, ...]] = Field(repr=False)


@dataclass(slots=True)
class SoakCourse:
    """What happened, and what was read of each process.

    Attributes:
        times: of the samples, in seconds of CLOCK_MONOTONIC.
        samples: by process, as many as `times`.
        process_ids: of all that were seen under a name.
        apart: rollouts, and the time that they take to settle.
    """

    times: list[float] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    process_ids: dict[str, set[int]] = field(default_factory=dict)
    apart: list[TimeSpan] = field(default_factory=list)
    rollouts: int = 0
    updates: int = 0
    bad_requests: int = 0
    fresh_requests: int = 0
    problems: list[str] = field(default_factory=list)

    def sample(self, process_ids: Mapping[str, int]) -> None:
        """Read all processes once. Raises DrillError if one of them has ended."""
        now = time.monotonic()
        for name, process_id in process_ids.items():
            try:
                read = read_process(process_id)
            except OSError as error:
                raise DrillError(f"{name} has ended: {error}") from error
            self.samples.setdefault(name, []).append(read)
            self.process_ids.setdefault(name, set()).add(process_id)
        self.times.append(now)

    def note(self, problem: str) -> None:
        """Keep one of the first problems."""
        if len(self.problems) < MAX_NOTED:
            self.problems.append(problem)


class _Work:
    """What the fleet is given to do beside the load, until the soak ends."""

    def __init__(self, config: SoakDrillConfig, fleet: OracleFleet, course: SoakCourse) -> None:
        self._config, self._fleet, self._course = config, fleet, course
        self._draw = random.Random(config.seed)
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
                rollout = await self._fleet.roll_out(live)
                if rollout.state != "done":
                    raise DrillError(f"the rollout of version {live} ended as {rollout.state}: {rollout.reason}")
                self._course.apart.append(TimeSpan(begin, time.monotonic() + self._config.settle_s))
                self._course.rollouts += 1

    async def update(self) -> None:
        """Publish rows of the live version again, as they are, so that its answers stay what they must be."""
        fleet, spec, publisher, live = self._fleet, self._fleet.writer.spec, None, 0
        rng = np.random.default_rng(self._config.seed)
        while True:
            await asyncio.sleep(1.0 / self._config.updates)
            async with self._swapping:
                wanted = await fleet.live_version()
                if publisher is None or wanted != live:
                    live, publisher = wanted, AsyncDeltaPublisher(fleet.registry.registry, fleet.model, wanted)
                table = spec.tables[self._course.updates % len(spec.tables)]
                rows = rng.integers(0, table.num_embeddings, UPDATED_ROWS)
                await publisher.publish(table.name, rows, FACTORS[letter_of(live)] * patterns(table, rows))
                self._course.updates += 1

    async def strangers(self) -> None:
        """Come over new connections, with a bad request and with a good one in turn."""
        local, model, course = self._fleet.local, self._fleet.model, self._course
        questions = make_questions(self._config.shape.spec(), FRESH_QUESTIONS, self._config.seed)
        addresses = (f"http://{local.host}:{local.http_port}", f"grpc://{local.host}:{local.grpc_port}")
        bad = bad_requests(model)
        for number in itertools.count():
            await asyncio.sleep(1.0 / self._config.strangers)
            is_grpc, request = bad[number % len(bad)]
            port = local.grpc_port if is_grpc else local.http_port
            answer = await ask_badly(local.host, port, request)
            course.bad_requests += 1
            if answer.startswith(b"HTTP/1.1 5"):
                course.note(f"a bad request was answered with {answer[:40]!r}: {request[:60]!r}")
            client = AsyncClient(addresses[number % 2], timeout_ms=TIMEOUT_MS, retry=RetryPolicy(max_attempts=1))
            try:
                asked = oracle_ask(model, [client], questions["rank" if self._draw.random() < 0.5 else "lookup"])
                _, verdict = await asked(number)
            finally:
                await client.close()
            course.fresh_requests += 1
            if verdict().kind is not Kind.OK:
                course.note(f"a request over a new connection: {verdict().detail}")


def bad_requests(model: str) -> list[tuple[bool, bytes]]:
    """Return (over gRPC, bytes on a connection): what strangers send, none of which is any fault of the server's."""

    def post(path: str, body: bytes, length: int | None = None) -> bytes:
        size = len(body) if length is None else length
        return f"POST {path} HTTP/1.1\r\nhost: soak\r\ncontent-length: {size}\r\n\r\n".encode() + body

    rank = f"/v1/models/{model}:rank"
    settings = b"\0\0\0\4\0\0\0\0\0"
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings
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


async def ask_badly(host: str, port: int, request: bytes) -> bytes:
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


async def run_soak_drill(config: SoakDrillConfig, folder: Path, progress: Progress = no_progress) -> SoakReport:
    """Run the drill; stores, logs and answers go into the folder.

    Raises DrillError if a rollout does not end as `done`, or the load fails. What grows is in the report.
    """
    course, total_s = SoakCourse(), 60 * config.minutes
    async with oracle_fleet(config, folder, progress) as fleet:
        begin = time.monotonic()
        work = _Work(config, fleet, course)
        running = [
            asyncio.create_task(one) for one in (work.roll_out(begin + total_s), work.update(), work.strangers())
        ]
        try:
            while (left_s := begin + total_s - time.monotonic()) > 0:
                progress("seconds", int(total_s - left_s), int(total_s))
                fleet.load.check()
                await asyncio.to_thread(course.sample, fleet.process_ids())
                # Whatever fails ends the drill.
                done, _ = await asyncio.wait(running, timeout=config.sample_s, return_when=asyncio.FIRST_EXCEPTION)
                for one in done:
                    one.result()
        finally:
            for one in running:
                one.cancel()
            await asyncio.wait(running)
        progress("seconds", int(total_s), int(total_s))
        answers = await fleet.load.stop()
        return make_soak_report(config, course, {**count_kinds(answers), **fleet.facts()})


def slope_of(minutes: Seconds, values: npt.NDArray[np.float64]) -> Slope | None:
    """Fit a line through values [n] by Theil and Sen; None for fewer than `MIN_BLOCKS`.

    The slope is the median of those between any two values. Its interval is Sen's (1968): the number of pairs that rise
    minus that of those that fall is, without a trend, about normal with variance n (n - 1) (2 n + 5) / 18.
    """
    count = len(values)
    if count < MIN_BLOCKS:
        return None
    first, second = np.triu_indices(count, 1)
    slopes = np.sort((values[second] - values[first]) / (minutes[second] - minutes[first]))
    reach = Z_95 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, math.floor((slopes.size - reach) / 2))
    return Slope(float(np.median(slopes)), float(slopes[low]), float(slopes[slopes.size - 1 - low]))


def blocks_of(times: Seconds, values: npt.NDArray[np.float64]) -> tuple[Seconds, npt.NDArray[np.float64]]:
    """Divide values [n, m] into at most `BLOCKS` equal times; return the median of each that has any: [b], [b, m]."""
    count = min(BLOCKS, len(times))
    if not count:
        return times, values
    place = np.minimum(((times - times[0]) / max(times[-1] - times[0], 1e-9) * count).astype(int), count - 1)
    own = [place == number for number in np.unique(place)]
    return (
        np.array([np.median(times[one]) for one in own]),
        np.array([np.median(values[one], axis=0) for one in own]),
    )


def make_soak_report(config: SoakDrillConfig, course: SoakCourse, facts: Mapping[str, Any]) -> SoakReport:
    """Draw up the report from what was read; `facts` are counts of answers and what ran."""
    times = np.array(course.times)
    begin = times[0] + WARM_UP_SHARE * (times[-1] - times[0]) if times.size else 0.0
    counts = times >= begin
    for span in course.apart:
        counts &= (times < span.begin) | (times > span.end)
    measured = times[counts]
    measured_min = float(measured[-1] - measured[0]) / 60 if measured.size else 0.0
    trends: list[Trend] = []
    medians: dict[str, tuple[float, ...]] = {}
    for process, samples in sorted(course.samples.items()):
        at, values = blocks_of(measured, np.array(samples, np.float64)[counts])
        for number, what in enumerate(Sample._fields):
            own = values[:, number] if len(values) else np.empty(0)
            slope = slope_of(at / 60, own)
            limit = config.max_mb_per_min if what.endswith("_mb") else 1.0 / max(measured_min, 1e-9)
            first, last = (float(own[0]), float(own[-1])) if own.size else (None, None)
            per_min, low, high = slope or (None, None, None)
            trends.append(
                Trend(
                    process=process,
                    what=what,
                    first=first,
                    last=last,
                    per_min=per_min,
                    low=low,
                    high=high,
                    limit=limit,
                )
            )
            medians[f"{process} {what}"] = tuple(round(one, 2) for one in own.tolist())
    report = SoakReport(
        minutes=config.minutes,
        rollouts=course.rollouts,
        updates=course.updates,
        bad_requests=course.bad_requests,
        fresh_requests=course.fresh_requests,
        samples=int(measured.size),
        measured_min=measured_min,
        restarted=tuple(sorted(name for name, ids in course.process_ids.items() if len(ids) > 1)),
        trends=tuple(trends),
        medians=medians,
        **facts,
    )
    problems = [*soak_problems(report), *course.problems]
    return report.model_copy(update={"problems": tuple(problems)})


def soak_problems(report: SoakReport) -> list[str]:
    """Say what is wrong with answers, and what grows."""
    found = counted({"failed": report.failed, "are mixed": report.mixed, "are wrong": report.wrong})
    if not report.rollouts or not report.updates:
        found.append(f"{report.rollouts} rollouts and {report.updates} row updates came in this time; soak for longer")
    found += [f"{name} was started again, so what it held can't be compared" for name in report.restarted]
    if not report.trends or any(one.per_min is None for one in report.trends):
        found.append(f"{report.samples} samples are too few to tell what grows; soak for longer")
    for one in report.trends:
        if one.per_min is None or one.low is None or one.high is None:
            continue
        name = f"{one.process} {one.what}"
        if one.what.endswith("_mb") and one.high > one.limit:
            grows = f"grows by {one.per_min:.3f} MB a minute ({one.low:.3f} to {one.high:.3f})"
            found.append(f"{name} {grows}, which is not surely less than the {one.limit:g} MB that are allowed")
        elif one.what in ("descriptors", "threads") and one.low > 0 and one.per_min >= one.limit:
            found.append(f"{name} grow from {one.first:g} to {one.last:g}")
    return found
