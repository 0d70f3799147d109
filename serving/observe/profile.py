"""Where the time of requests goes: every answered one's stages, added up, beside the whole that they should make up.

Parts and whole are measured each by themselves. What the parts lack is told as `unaccounted_s`, never spread over them.
docs/profiling.md describes the file that `--profile` writes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import psutil

from serving.errors import ProfileFileError
from serving.observe.calls import BEFORE_BATCH, IN_BATCH, STAGES, Call
from serving.observe.metrics import ServingMetrics

logger = logging.getLogger(__name__)

WRITE_EVERY_S = 5.0
OTHER_THREADS = "other"
Document: TypeAlias = dict[str, Any]
_IS_OF_BATCH = np.array([stage in IN_BATCH for stage in STAGES])


def _no_seconds() -> npt.NDArray[np.float64]:
    return np.zeros(len(STAGES))


@dataclass(slots=True)
class _Sums:
    requests: int = 0
    batches: float = 0.0
    whole_s: float = 0.0
    seconds: npt.NDArray[np.float64] = field(default_factory=_no_seconds)
    busy_s: npt.NDArray[np.float64] = field(default_factory=_no_seconds)


class StageAccount:
    """Adds up the stages of answered requests, apart by API, method and model. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: defaultdict[tuple[str, str, str], _Sums] = defaultdict(_Sums)

    def add(self, call: Call, whole_s: float) -> None:
        """Add one answered call of a batch.

        Args:
            call: as it ended.
            whole_s: from its begin to its encoded answer.
        """
        if call.batch is None:
            return
        around, of_batch = call.around_batch(), 1 / call.batch.num_requests
        before, after = around[: len(BEFORE_BATCH)], around[len(BEFORE_BATCH) :]
        seconds = np.array((*before, *call.batch.seconds(), *after))
        with self._lock:
            sums = self._sums[call.api, call.method, call.model]
            sums.requests += 1
            sums.batches += of_batch
            sums.whole_s += whole_s
            # Each request has waited for all of its batch's time, which was worked once for all of them.
            sums.seconds += seconds
            sums.busy_s += np.where(_IS_OF_BATCH, seconds * of_batch, seconds)

    def accounts(self) -> list[Document]:
        """What was added so far, by API, method and model."""
        with self._lock:
            return [_account(*names, sums) for names, sums in sorted(self._sums.items(), key=lambda one: one[0])]


def _account(api: str, method: str, model: str, sums: _Sums) -> Document:
    whole_s, unaccounted_s = sums.whole_s, sums.whole_s - float(sums.seconds.sum())
    stages = [
        {
            "stage": stage,
            "per": "batch" if stage in IN_BATCH else "request",
            "seconds": seconds,
            "busy_s": busy_s,
            "share": seconds / whole_s if whole_s else 0.0,
            "mean_ms": seconds / sums.requests * 1e3,
        }
        for stage, seconds, busy_s in zip(STAGES, sums.seconds.tolist(), sums.busy_s.tolist(), strict=True)
    ]
    return {
        "api": api,
        "method": method,
        "model": model,
        "requests": sums.requests,
        "batches": sums.batches,
        "whole_s": whole_s,
        "mean_ms": whole_s / sums.requests * 1e3,
        "stages": stages,
        "unaccounted_s": unaccounted_s,
        "unaccounted_share": unaccounted_s / whole_s if whole_s else 0.0,
    }


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
        self._cpu_at_begin = self._cpu_s()
        self._cpu_by_name: defaultdict[str, float] = defaultdict(float)
        self._cpu_by_thread = self._thread_times()

    def document(self) -> Document:
        """What would be written now: where the time of requests and of the processor went since this was made."""
        seen, names = self._thread_times(), {one.native_id: one.name for one in threading.enumerate()}
        for thread, seconds in seen.items():
            if thread in names:
                # A thread's number may have been another one's, which had more.
                self._cpu_by_name[names[thread]] += max(0.0, seconds - self._cpu_by_thread.get(thread, 0.0))
        self._cpu_by_thread = seen
        cpu_s = self._cpu_s() - self._cpu_at_begin
        # Counted in ticks of the kernel, so the threads together can be ahead of their process by some.
        other_s = max(0.0, cpu_s - sum(self._cpu_by_name.values()))
        by_thread = sorted({**self._cpu_by_name, OTHER_THREADS: other_s}.items())
        return {
            "kind": "profile",
            "format_version": 1,
            "pid": self._process.pid,
            "began_at": self._began_at,
            "seconds": self._clock() - self._began,
            "cpu_s": round(cpu_s, 6),
            "cpu_s_by_thread": {name: round(seconds, 6) for name, seconds in by_thread},
            "accounts": self._account.accounts(),
        }

    def write(self) -> None:
        """Replaces the file. Raises ProfileFileError if that can't be done."""
        text = json.dumps(self.document(), indent=1, ensure_ascii=False) + "\n"
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            try:
                beside.write_text(text, encoding="utf-8")
                beside.replace(self._path)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as error:
            raise ProfileFileError(f"--profile {self._path}: {error.strerror or error}") from error

    def write_or_log(self) -> None:
        """Replaces the file. Serving goes on without: an account that is missing harms nobody's requests."""
        try:
            self.write()
        except ProfileFileError as error:
            logger.error("%s", error)

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    def _thread_times(self) -> dict[int, float]:
        return {one.id: one.user_time + one.system_time for one in self._process.threads()}


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
    account, ended = StageAccount(), threading.Event()
    metrics.on_answered = account.add
    file = ProfileFile(path, account)
    file.write()

    def write_again() -> None:
        while not ended.wait(WRITE_EVERY_S):
            file.write_or_log()

    writer = threading.Thread(target=write_again, name="profile", daemon=True)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()
        metrics.on_answered = None
        file.write_or_log()
