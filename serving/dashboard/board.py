"""Look at a fleet again and again, keep what has to be kept, and tell whoever watches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from loader.errors import RegistryError
from loader.rollout.fleet_state import FleetState
from serving.dashboard.changes import Changes
from serving.dashboard.history import History
from serving.dashboard.sources import Source
from serving.dashboard.told import told_state
from serving.errors import OverloadedError, ShuttingDownError

logger = logging.getLogger(__name__)

WATCHED_S = 0.5
"""Between two looks while somebody watches."""
UNWATCHED_S = 2.5
"""Else: often enough that no slot of the history is missed."""
LOOK_TIMEOUT_S = 4.0
MAX_WATCHERS = 16
MAX_WAITING = 8
"""Messages that a slow watcher may have waiting before it is ended."""
_encode = msgspec.json.Encoder().encode


class Watcher:
    """One page that is open: what its stream of events has still to be told."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._news = asyncio.Event()
        self.is_ended = False

    def tell(self, message: bytes) -> None:
        """Put a message in its queue; a watcher whose queue is full is ended."""
        if len(self._waiting) >= MAX_WAITING:
            self.end()
        else:
            self._waiting.append(message)
            self._news.set()

    def end(self) -> None:
        """End its stream, without what still waits."""
        self.is_ended = True
        self._waiting.clear()
        self._news.set()

    async def messages(self) -> AsyncIterator[bytes]:
        """Give the messages until it is ended."""
        while not self.is_ended:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                yield self._waiting.popleft()


class Board:
    """What the page shows of one source. Belongs to one event loop; `run_board` makes one that runs.

    `clock` gives seconds since the epoch.
    """

    def __init__(self, source: Source, clock: Callable[[], float] = time.time) -> None:
        self.source = source
        self.history = History()
        self._clock = clock
        self._changes = Changes()
        self._state = FleetState()
        self._read_at: float | None = None
        self._problem = "nothing was read yet"
        self._told = b""
        self._watchers: set[Watcher] = set()
        self._is_closed = False
        self._wake = asyncio.Event()
        # What is kept is read and written by one thread at a time, beside the event loop.
        self._keeping = asyncio.Lock()

    async def watch(self) -> Watcher:
        """Begin to watch; `leave` ends it. Raises OverloadedError if too many watch, ShuttingDownError."""
        watcher = Watcher()
        async with self._keeping:
            if len(self._watchers) >= MAX_WATCHERS:
                raise OverloadedError(f"{MAX_WATCHERS} pages are open already, which is the most: close one")
            history = await asyncio.to_thread(lambda: _event("history", self.history.document()))
            self._told = self._told or await asyncio.to_thread(self._state_event)
            if self._is_closed:
                raise ShuttingDownError("the process is shutting down")
            for message in (history, self._read_event(), self._told):
                watcher.tell(message)
            self._watchers.add(watcher)
        self._wake.set()
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Forget a watcher."""
        self._watchers.discard(watcher)
        watcher.end()

    def close(self) -> None:
        """End all streams, and let nobody watch any more."""
        self._is_closed = True
        for watcher in list(self._watchers):
            self.leave(watcher)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            try:
                async with asyncio.timeout(WATCHED_S if self._watchers else UNWATCHED_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def look(self) -> None:
        """Look once, and tell what is new."""
        state, problem = None, ""
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                state = await self.source.look()
        except TimeoutError:
            problem = f"{self.source.name} has not answered within {LOOK_TIMEOUT_S:g} s"
        except RegistryError as error:
            problem = str(error)
        except Exception as error:
            # A defect must not end the page for good.
            logger.exception("reading %s failed", self.source.name)
            problem = f"internal error: {type(error).__name__}"
        async with self._keeping:
            messages = await asyncio.to_thread(self._keep, state, problem)
            for watcher in list(self._watchers):
                for message in messages:
                    watcher.tell(message)
                if watcher.is_ended:
                    logger.info("a page that took nothing was ended")
                    self._watchers.discard(watcher)

    def _keep(self, state: FleetState | None, problem: str) -> list[bytes]:
        """Keep what a look found, or why it found nothing; returns what watchers are told."""
        now, has_closed = self._clock(), False
        if bool(problem) != bool(self._problem) and self._read_at is not None:
            self._changes.registry(problem or "the registry answers again", now)
        self._problem = problem
        if state is not None:
            self._read_at, self._state = now, state
            self._changes.look(state, now)
            has_closed = self.history.observe(state.nodes, now)
        if not self._watchers:
            self._told = b""
            return []
        before, self._told = self._told, self._state_event()
        slot = [_event("slot", self.history.document(last_only=True))] if has_closed else []
        return [self._read_event(), *([] if self._told == before else [self._told]), *slot]

    def _read_event(self) -> bytes:
        # It changes with every look, and all else seldom does.
        return _event("read", {"read_at": self._read_at})

    def _state_event(self) -> bytes:
        source = {"name": self.source.name, "note": self.source.note, "fixed": self.source.fixed}
        about = {"source": source, "problem": self._problem}
        return _event("state", about | told_state(self._state, self._changes, self.history))


@asynccontextmanager
async def run_board(open_source: Callable[[], Source], clock: Callable[[], float] = time.time) -> AsyncIterator[Board]:
    """Run a board while the block runs. Raises RegistryError if its source can't be opened."""
    source = open_source()
    board = Board(source, clock)
    running = asyncio.create_task(board.run(), name="look at the fleet")
    try:
        yield board
    finally:
        board.close()
        running.cancel()
        await asyncio.wait([running])
        await source.close()


def _event(name: str, document: dict[str, Any]) -> bytes:
    """Write one event (https://html.spec.whatwg.org/multipage/server-sent-events.html); JSON has no line end."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(document))
