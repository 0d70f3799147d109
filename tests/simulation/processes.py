"""A simulated process: what belongs together, has clocks of its own, and dies together."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

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
