"""Answers to lookups that are being made, or that no client has taken: how many floats of them there may be."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import NamedTuple

from serving.errors import OverloadedError
from serving.formats.requests import Encoded
from shard_node.errors import DeadlineExceededError

SHARE_OF_AN_OWNER = 4
"""One part in so many of the floats is for one owner at most."""
MAX_WAITING_OF_AN_OWNER = 64


class _Waiting(NamedTuple):
    owner: str
    num_floats: int
    future: asyncio.Future[None]


class UntakenAnswers:
    """Bounds what lookups may hold until their clients have taken it. Belongs to one event loop.

    A lookup that finds no room waits: behind others of its owner, and behind all once the whole is full. One that is
    larger than the bound runs alone.

    Args:
        max_floats: of all answers together.
    """

    def __init__(self, max_floats: int) -> None:
        self._max_floats = max_floats
        self._held: Counter[str] = Counter()
        self._waiting: deque[_Waiting] = deque()
        self._waits: Counter[str] = Counter()
        self._writing = asyncio.Lock()

    async def take(self, owner: str, num_floats: int, timeout_s: float) -> None:
        """Wait until there is room for an answer; `give` must follow.

        Args:
            owner: whose it is; "" for one that may have all the room.
            num_floats: that it holds.
            timeout_s: how long to wait at most.

        Raises:
            OverloadedError: at once, if too many of its owner wait.
            DeadlineExceededError: there was no room in time.
        """
        if self._waits[owner] >= MAX_WAITING_OF_AN_OWNER:
            says = f"{MAX_WAITING_OF_AN_OWNER} lookups of this client wait for earlier answers to be taken"
            raise OverloadedError(says)
        waiting = _Waiting(owner, num_floats, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._waits[owner] += 1
        self._let_in()
        try:
            async with asyncio.timeout(timeout_s):
                await waiting.future
        except BaseException as error:
            if not waiting.future.cancelled():
                # It was let in, at the same moment.
                self.give(owner, num_floats)
            else:
                # It may have stood before others.
                self._let_in()
            if not isinstance(error, TimeoutError):
                raise
            says = f"earlier answers were not taken in time; the limit is max_untaken_floats = {self._max_floats}"
            raise DeadlineExceededError(says) from None

    def give(self, owner: str, num_floats: int) -> None:
        """Make room: an answer was taken, or is given up."""
        self._uncount(self._held, owner, num_floats)
        self._let_in()

    async def write(self, encoded: Encoded) -> Encoded:
        """Write what an answer lacks, one answer at a time; others have their turn after each piece."""
        written = [encoded.body]
        async with self._writing:
            for piece in encoded.more:
                written.append(piece)
                await asyncio.sleep(0)
        return encoded._replace(body=b"".join(written), more=())

    def _let_in(self) -> None:
        """Let those in for whom there is room."""
        free, kept = self._max_floats - self._held.total(), deque[_Waiting]()
        while self._waiting:
            waiting = self._waiting.popleft()
            owner, num_floats, future = waiting
            held = self._held[owner]
            if future.cancelled():
                self._uncount(self._waits, owner, 1)
                continue
            if owner and held and held + num_floats > self._max_floats // SHARE_OF_AN_OWNER:
                kept.append(waiting)
                continue
            if num_floats > free and self._held.total():
                kept.append(waiting)
                break
            free -= num_floats
            self._held[owner] += num_floats
            self._uncount(self._waits, owner, 1)
            future.set_result(None)
        kept.extend(self._waiting)
        self._waiting = kept

    @staticmethod
    def _uncount(counts: Counter[str], owner: str, number: int) -> None:
        counts[owner] -= number
        if not counts[owner]:
            del counts[owner]
