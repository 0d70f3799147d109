"""The deadlines of requests that wait on an event loop: one timer for all of them."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from shard_node.errors import DeadlineExceededError

# A loop may fire up to its clock's resolution early.
_RESOLUTION_S = 0.001


class Expiry:
    """Fails futures when their time has come. Belongs to one event loop.

    A timer of its own for each request would be made and cancelled thousands of times a second, and hardly ever fire.
    So the loop has one, for the deadline that comes first; one that is taken off leaves it where it is.

    Args:
        loop: that the futures belong to.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._due: dict[asyncio.Future[Any], float] = {}
        self._armed_until = math.inf
        self._handle: asyncio.TimerHandle | None = None

    def add(self, future: asyncio.Future[Any], delay_s: float) -> None:
        """Has a future fail with DeadlineExceededError after `delay_s` seconds, unless it is done by then."""
        due = self._due[future] = self.loop.time() + delay_s
        if due < self._armed_until:
            if self._handle is not None:
                self._handle.cancel()
            self._arm(due)

    def discard(self, future: asyncio.Future[Any]) -> None:
        """Forgets a future."""
        self._due.pop(future, None)

    def _arm(self, due: float) -> None:
        self._armed_until = due
        self._handle = self.loop.call_later(max(0.0, due - self.loop.time()), self._fire)

    def _fire(self) -> None:
        self._handle, self._armed_until = None, math.inf
        latest = self.loop.time() + _RESOLUTION_S
        for future in [one for one, due in self._due.items() if due <= latest]:
            del self._due[future]
            if not future.done():
                future.set_exception(DeadlineExceededError("the deadline passed before the answer was complete"))
        if self._due:
            self._arm(min(self._due.values()))
