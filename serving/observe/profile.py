"""Where the time of requests goes: every answered one's stages, added up, beside the whole that they should make up.

Parts and whole are measured each by themselves. What the parts lack is told as `unaccounted_s`, never spread over them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
from pydantic import Field

from loader.manifest import Frozen
from serving.errors import ProfileFileError
from serving.observe.metrics import ServingMetrics
from serving.observe.times import IN_BATCH, NUM_BEFORE_BATCH, NUM_UNTIL_BATCH_END, STAGES, Call

logger = logging.getLogger(__name__)


WRITE_EVERY_S = 5.0
OTHER_THREADS = "other"


class Served(NamedTuple):
    """What an account is kept of: the names that metrics use."""

    api: str
    method: str
    model: str


class StageTime(Frozen):
    """One stage of the requests of an account.

    Attributes:
        stage: its name.
        per: whether each request goes through it alone, or all of a batch together.
        seconds: that the requests spent in it, added up. A batch's time counts for each request in it, since each has
            waited for all of it.
        busy_s: the same with a batch's time counted once: for how long something was at work.
        share: of the whole.
        mean_ms: of one request.
    """

    stage: str
    per: Literal["request", "batch"]
    seconds: float
    busy_s: float
    share: float
    mean_ms: float


class Account(Frozen):
    """The answered requests of one API, method and model.

    Attributes:
        requests: how many; refused and failed ones are in none of these numbers.
        batches: that they were in. Of a batch with requests of other APIs, this API's share.
        whole_s: from a call's begin to its encoded answer, added up; measured by itself.
        mean_ms: of one request.
        stages: in order.
        unaccounted_s: what the stages lack of the whole.
        unaccounted_share: of the whole.
    """

    api: str
    method: str
    model: str
    requests: int = Field(ge=0)
    batches: float = Field(ge=0)
    whole_s: float
    mean_ms: float
    stages: tuple[StageTime, ...]
    unaccounted_s: float
    unaccounted_share: float


@dataclass(slots=True)
class _Sums:
    requests: int = 0
    batches: float = 0.0
    whole_s: float = 0.0
    stages_s: list[float] = field(default_factory=lambda: [0.0] * len(STAGES))
    busy_s: list[float] = field(default_factory=lambda: [0.0] * len(IN_BATCH))


class StageAccount:
    """Adds up the stages of requests, apart by API, method and model. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[Served, _Sums] = {}

    def add(self, call: Call, whole_s: float) -> None:
        """Add one answered call of a batch.

        Args:
            call: as it ended.
            whole_s: from its begin to its encoded answer.
        """
        batch = call.batch
        if batch is None:
            return
        inside, part, around = batch.seconds(), 1 / batch.num_requests, call.around_batch()
        served = Served(call.api, call.method, call.model)
        with self._lock:
            sums = self._sums.get(served)
            if sums is None:
                sums = self._sums[served] = _Sums()
            sums.requests += 1
            sums.batches += part
            sums.whole_s += whole_s
            stages = (*around[:NUM_BEFORE_BATCH], *inside, *around[NUM_BEFORE_BATCH:])
            for number, seconds in enumerate(stages):
                sums.stages_s[number] += seconds
            for number, seconds in enumerate(inside):
                sums.busy_s[number] += seconds * part

    def accounts(self) -> tuple[Account, ...]:
        """What was added so far, by API, method and model."""
        with self._lock:
            return tuple(_account(served, sums) for served, sums in sorted(self._sums.items()))


def _account(served: Served, sums: _Sums) -> Account:
    unaccounted_s = sums.whole_s - sum(sums.stages_s)
    stages = tuple(
        StageTime(
            stage=stage,
            per="batch" if stage in IN_BATCH else "request",
            seconds=seconds,
            busy_s=busy_s,
            share=seconds / sums.whole_s if sums.whole_s else 0.0,
            mean_ms=seconds / sums.requests * 1e3,
        )
        for stage, seconds, busy_s in zip(STAGES, sums.stages_s, _busy(sums), strict=True)
    )
    return Account(
        api=served.api,
        method=served.method,
        model=served.model,
        requests=sums.requests,
        batches=sums.batches,
        whole_s=sums.whole_s,
        mean_ms=sums.whole_s / sums.requests * 1e3,
        stages=stages,
        unaccounted_s=unaccounted_s,
        unaccounted_share=unaccounted_s / sums.whole_s if sums.whole_s else 0.0,
    )


def _busy(sums: _Sums) -> list[float]:
    alone = sums.stages_s
    return [*alone[:NUM_BEFORE_BATCH], *sums.busy_s, *alone[NUM_UNTIL_BATCH_END:]]


class ProfileDocument(Frozen):
    """What `--profile` writes: where the time of the requests, and of the processor, went since the process began.

    Attributes:
        pid: the process.
        began_at: wall clock, ISO 8601 with UTC offset.
        seconds: from then until this was written.
        cpu_s: processor time of all threads meanwhile, user and system.
        cpu_s_by_thread: the same by the thread's name, as it was last seen running; `other` is what is left: threads
            that have no Python name, gRPC's among them, and the last seconds of those that have ended.
        accounts: by API, method and model.
    """

    kind: Literal["profile"] = "profile"
    format_version: Literal[1] = 1
    pid: int
    began_at: str
    seconds: float = Field(ge=0)
    cpu_s: float = Field(ge=0)
    cpu_s_by_thread: dict[str, float]
    accounts: tuple[Account, ...]


class ProfileFile:
    """Writes one process' account to a file: whole or not at all, so that it can be read at any time.

    Args:
        path: is replaced.
        account: what is written.
        clock: monotonic seconds.
        wall_clock: seconds since the epoch.
    """

    def __init__(
        self,
        path: Path,
        account: StageAccount,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._account = account
        self._clock = clock
        self._process = psutil.Process()
        self._began = clock()
        self._began_at = datetime.fromtimestamp(wall_clock(), UTC).isoformat(timespec="seconds")
        self._threads = _ThreadTimes(self._process)
        self._cpu_at_begin = self._cpu_s()

    def document(self) -> ProfileDocument:
        """What would be written now."""
        by_thread = self._threads.seconds()
        cpu_s = self._cpu_s() - self._cpu_at_begin
        # Counted in ticks of the kernel, so the threads together can be ahead of their process by some.
        by_thread[OTHER_THREADS] = max(0.0, cpu_s - sum(by_thread.values()))
        return ProfileDocument(
            pid=self._process.pid,
            began_at=self._began_at,
            seconds=self._clock() - self._began,
            cpu_s=round(cpu_s, 6),
            cpu_s_by_thread={name: round(seconds, 6) for name, seconds in sorted(by_thread.items())},
            accounts=self._account.accounts(),
        )

    def write(self) -> None:
        """Replaces the file. Raises ProfileFileError if that can't be done."""
        text = self.document().model_dump_json(indent=1) + "\n"
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            try:
                beside.write_text(text, encoding="utf-8")
                beside.replace(self._path)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as error:
            raise ProfileFileError(f"--profile {self._path}: {error.strerror or error}") from error

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


class _ThreadTimes:
    """Processor time by the name of a thread, since this was made; of threads that have ended, as last seen."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._ended: dict[str, float] = {}
        self._running: dict[int, tuple[str, float]] = {}
        self._at_begin = {one.id: one.user_time + one.system_time for one in process.threads()}

    def seconds(self) -> dict[str, float]:
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        running = {
            one.id: (names[one.id], one.user_time + one.system_time - self._at_begin.get(one.id, 0.0))
            for one in self._process.threads()
            if one.id in names
        }
        for thread, (name, seconds) in self._running.items():
            if thread not in running:
                self._ended[name] = self._ended.get(name, 0.0) + seconds
                # Its number may be another one's some day.
                self._at_begin.pop(thread, None)
        self._running = running
        told = dict(self._ended)
        for name, seconds in running.values():
            told[name] = told.get(name, 0.0) + seconds
        return told


@contextlib.contextmanager
def profiled(path: Path | None, metrics: ServingMetrics) -> Iterator[None]:
    """Keeps an account while the block runs, and writes it every `WRITE_EVERY_S` and at the end.

    Args:
        path: of the file; None keeps no account.
        metrics: of the service whose requests are told.

    Raises:
        ProfileFileError: at the begin, if the file can't be written; later that is told in the log alone.
    """
    if path is None:
        yield
        return
    account = StageAccount()
    metrics.on_answered = account.add
    file = ProfileFile(path, account)
    file.write()
    ended = threading.Event()

    def write_again() -> None:
        while not ended.wait(WRITE_EVERY_S):
            _write_or_log(file)

    writer = threading.Thread(target=write_again, name="profile", daemon=True)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()
        metrics.on_answered = None
        _write_or_log(file)


def _write_or_log(file: ProfileFile) -> None:
    try:
        file.write()
    except ProfileFileError as error:
        # Serving goes on: an account that is missing harms nobody's requests.
        logger.error("%s", error)
