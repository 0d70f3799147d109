"""Frees of cards' memory and graphs, and captures of graphs, one after the other."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shard_node.errors import CardError

logger = logging.getLogger(__name__)


class DeferredFrees:
    """Keeps what frees memory and graphs apart from captures of graphs. Thread-safe.

    Freeing memory may wait for the device, and ending a graph changes what torch knows of all of them: either breaks a
    capture that is under way. But a free comes whenever a reference count falls to zero or garbage is collected: in the
    middle of a capture, or in a thread that holds what a capture waits for. So it is queued and never waits: frees are
    done, in order, by the next caller that finds no capture, or else by the thread whose capture ends.
    """

    def __init__(self) -> None:
        # Not re-entrant: no free may come into the middle of what its holder does, also not of its thread.
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._queue: deque[Callable[[], object]] = deque()

    def free(self, action: Callable[[], object]) -> None:
        """Run `action` now, or after the capture that is under way. Its errors are logged: no caller could help."""
        self._queue.append(action)
        self.flush()

    def flush(self) -> None:
        """Run all that is queued, unless a capture or another thread is going to."""
        # Again after the release: an action may have been queued by a thread that could not acquire the lock.
        while self._queue and self._lock.acquire(blocking=False):
            try:
                self._run_queue()
            finally:
                self._lock.release()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold frees back while the block runs, as a capture must. Waits for other threads that do.

        Raises CardError if this thread does already.
        """
        if self._thread == threading.get_ident():
            raise CardError("this can't be done while a graph is captured")
        self._lock.acquire()
        self._thread = threading.get_ident()
        try:
            self._run_queue()
            yield
        finally:
            self._thread = None
            self._lock.release()
            self.flush()

    def _run_queue(self) -> None:
        while self._queue:
            try:
                self._queue.popleft()()
            except Exception:
                logger.exception("unused memory could not be freed")
