"""`shardrank serve --profile FILE`: the account of a running process, written to a file again and again."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import psutil
from pydantic import Field

from loader.manifest import Frozen
from serving.errors import ProfileFileError
from serving.metrics import ServingMetrics
from serving.stage_account import Account, StageAccount

logger = logging.getLogger(__name__)

WRITE_EVERY_S = 5.0
OTHER_THREADS = "other"


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
    account = metrics.account = StageAccount()
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
        metrics.account = None
        _write_or_log(file)


def _write_or_log(file: ProfileFile) -> None:
    try:
        file.write()
    except ProfileFileError as error:
        # Serving goes on: an account that is missing harms nobody's requests.
        logger.error("%s", error)
