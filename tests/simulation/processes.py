"""A simulated process: what belongs together, has clocks and a disk of its own, and dies together."""

from __future__ import annotations

import contextvars
import errno
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from loader.snapshot.store import HeldSnapshot, Store
from tests.simulation.loop import PROCESS, SimulatedLoop

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
EPOCH_S = 1_750_000_000.0


class Clocks:
    """The clocks of one machine: `wall` may be off and be set, `monotonic` only goes on."""

    def __init__(self, loop: SimulatedLoop, skew_s: float = 0.0) -> None:
        self._loop, self.skew_s = loop, skew_s

    def wall(self) -> float:
        """Return seconds since the epoch, as this machine believes."""
        return EPOCH_S + self._loop.now + self.skew_s

    def monotonic(self) -> float:
        """Return seconds that pass."""
        return self._loop.now


class Process:
    """One life of a process; a restarted one is another. Code that `run` starts belongs to it."""

    def __init__(self, loop: SimulatedLoop, name: str, clocks: Clocks) -> None:
        self.loop, self.name, self.clocks = loop, name, clocks
        self.is_running = True
        self._context = contextvars.copy_context()
        self._context.run(PROCESS.set, self)

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function as this process."""
        return self._context.copy().run(function, *args)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine as this process."""
        return self.run(self.loop.create_task, work)


class FaultyStore(Store):
    """A store as one process sees it, dense steps in memory. While `error` is set, what reads or writes raises it."""

    def __init__(self, path: Path, files: dict[str, bytes]) -> None:
        super().__init__(path)
        self._files = files
        self.error: Callable[[], OSError] | None = None

    def _check(self) -> None:
        if self.error is not None:
            raise self.error()

    def hold(self, *args: Any, **kwargs: Any) -> HeldSnapshot:
        self._check()
        return super().hold(*args, **kwargs)

    def read_file(self, path: str, max_bytes: int) -> bytes:
        self._check()
        return self._files[path] if path in self._files else super().read_file(path, max_bytes)

    def write_file(self, path: str, content: bytes) -> None:
        self._check()
        self._files[path] = content

    def list_files(self, folder: str) -> dict[str, float]:
        return {path: 0.0 for path in self._files if path.startswith(folder)}

    def delete_files(self, paths: Any) -> None:
        for path in paths:
            self._files.pop(path, None)


DISK_ERRORS: dict[str, Callable[[], OSError]] = {
    "EIO": lambda: OSError(errno.EIO, "Input/output error"),
    "ESTALE": lambda: OSError(errno.ESTALE, "Stale file handle"),
    "ENOENT": lambda: FileNotFoundError(errno.ENOENT, "No such file or directory"),
}
