"""A timeout for what is begun and done thousands of times a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class LazyTimer:
    """One timeout that is started and stopped again and again, mostly without telling the event loop.

    Stopping it leaves the loop's timer where it is. When that fires, it does nothing, or waits for what is left if the
    timeout was started again meanwhile. So a busy connection costs the loop one timer in a timeout's time, and not two
    for every request.

    Args:
        loop: whose clock counts.
    """

    __slots__ = ("_armed_until", "_callback", "_due", "_handle", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: float | None = None
        self._armed_until = 0.0
        self._handle: asyncio.TimerHandle | None = None
        self._callback: Callable[[], object] = _nothing

    @property
    def is_running(self) -> bool:
        """Whether it will call back."""
        return self._due is not None

    def start(self, delay_s: float, callback: Callable[[], object]) -> None:
        """Has `callback` called `delay_s` seconds from now, and what was to be called before not any more."""
        due = self._due = self._loop.time() + delay_s
        self._callback = callback
        if self._handle is None:
            self._arm(due, delay_s)
        elif due < self._armed_until:
            self._handle.cancel()
            self._arm(due, delay_s)

    def stop(self) -> None:
        """Calls nothing."""
        self._due = None

    def close(self) -> None:
        """Calls nothing, and lets go of what it would have called and of the loop's timer."""
        self._due = None
        self._callback = _nothing
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self, due: float, delay_s: float) -> None:
        self._armed_until = due
        self._handle = self._loop.call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self._handle = None
        if self._due is None:
            return
        left_s = self._due - self._loop.time()
        # A loop may fire up to its clock's resolution early.
        if left_s > 0.001:
            self._arm(self._due, left_s)
            return
        self._due = None
        self._callback()


def _nothing() -> None:
    pass
