"""Where the time of requests goes: every answered one's stages, added up, beside the whole that they should make up.

What the parts lack is told as `unaccounted_s`, never spread over them. docs/profiling.md describes the file that
`--profile` writes.
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
# Requests, batches and the whole, then the stages.
_IS_OF_BATCH = np.array([False] * 3 + [stage in IN_BATCH for stage in STAGES])


class StageAccount:
    """Adds up the stages of answered requests, apart by API, method and model. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # float64 [2, 3 + stages]: as requests have waited, and as it was worked, a batch's time once.
        self._sums: dict[tuple[str, str, str], npt.NDArray[np.float64]] = {}

    def add(self, call: Call, whole_s: float) -> None:
        """Add one answered call of a batch, and the seconds from its begin to its encoded answer."""
        if call.batch is None:
            return
        around, of_batch = call.around_batch(), 1 / call.batch.num_requests
        before, after = around[: len(BEFORE_BATCH)], around[len(BEFORE_BATCH) :]
        waited = np.array((1.0, of_batch, whole_s, *before, *call.batch.seconds(), *after))
        both = np.array((waited, np.where(_IS_OF_BATCH, waited * of_batch, waited)))
        names = (call.api, call.method, call.model)
        with self._lock:
            self._sums[names] = both + self._sums.get(names, 0.0)

    def accounts(self) -> list[Document]:
        """Tell what was added so far, by API, method and model."""
        with self._lock:
            return [_account(*names, self._sums[names]) for names in sorted(self._sums)]


def _account(api: str, method: str, model: str, sums: npt.NDArray[np.float64]) -> Document:
    (requests, batches, whole_s, *waited), (_, _, _, *worked) = sums.tolist()
    stages = [
        {
            "stage": stage,
            "per": "batch" if stage in IN_BATCH else "request",
            "seconds": seconds,
            "busy_s": busy_s,
            "share": seconds / whole_s if whole_s else 0.0,
            "mean_ms": seconds / requests * 1e3,
        }
        for stage, seconds, busy_s in zip(STAGES, waited, worked, strict=True)
    ]
    unaccounted_s = whole_s - sum(waited)
    return {
        "api": api,
        "method": method,
        "model": model,
        "requests": int(requests),
        "batches": batches,
        "whole_s": whole_s,
        "mean_ms": whole_s / requests * 1e3,
        "stages": stages,
        "unaccounted_s": unaccounted_s,
        "unaccounted_share": unaccounted_s / whole_s if whole_s else 0.0,
    }


class ProfileFile:
    """Writes one process' account to a file: whole or not at all, so that it can be read at any time."""

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
        """Tell where the time of requests and of the processor went since this was made."""
        seen, names = self._thread_times(), {one.native_id: one.name for one in threading.enumerate()}
        # After a fork CPython goes on naming the parent's.
        names[os.getpid()] = threading.main_thread().name
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
        """Replace the file. Raises ProfileFileError if that can't be done."""
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

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    def _thread_times(self) -> dict[int, float]:
        return {one.id: one.user_time + one.system_time for one in self._process.threads()}


@contextlib.contextmanager
def profiled(path: Path | None, metrics: ServingMetrics) -> Iterator[None]:
    """Keep an account of a service while the block runs, and write it every `WRITE_EVERY_S` and at the end.

    Without a path none is kept. Raises ProfileFileError at the begin if the file can't be written; later the log tells.
    """
    if path is None:
        yield
        return
    account, ended = StageAccount(), threading.Event()
    metrics.on_answered = account.add
    file = ProfileFile(path, account)
    file.write()

    def write_again() -> None:
        is_ended = False
        while not is_ended:
            is_ended = ended.wait(WRITE_EVERY_S)
            try:
                file.write()
            except ProfileFileError as error:
                # An account that is missing harms nobody's requests.
                logger.error("%s", error)

    writer = threading.Thread(target=write_again, name="profile", daemon=True)
    writer.start()
    try:
        yield
    finally:
        metrics.on_answered = None
        ended.set()
        writer.join()
