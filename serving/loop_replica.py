"""A ranking replica without a thread: batches are scored on the event loop of the APIs, between their requests.

A request then passes no thread on its way: nobody has to be woken, and nobody fights for the interpreter's lock. While
a batch is scored nothing else happens on the loop; what arrives meanwhile is read in one go, and is the next batch. For
rows in this process's memory only: nothing here may wait.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from serving.answering import answer_batch
from serving.batcher import Batcher
from serving.errors import NotReadyError, ServingError
from serving.metrics import ServingMetrics
from serving.ranking import Ranking

Result = TypeVar("Result")


class LoopReplica:
    """Takes batches from a batcher until that is closed, as `Replica` does.

    Args:
        ranking: does the work; none of its shards is behind a socket.
        batcher: where the work comes from.
        metrics: told how long requests waited.
        loop: runs in another thread than the caller's.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        ranking: Ranking,
        batcher: Batcher,
        metrics: ServingMetrics,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranking = ranking
        self._batcher = batcher
        self._metrics = metrics
        self._loop = loop
        self._clock = clock
        self._loop_thread = 0

    def start(self) -> None:
        """Takes the first batch as soon as the loop gets to it. From any thread but the loop's."""
        self._loop.call_soon_threadsafe(self._begin)

    @property
    def is_alive(self) -> bool:
        """Whether it still takes work."""
        return not self._loop.is_closed()

    @property
    def has_failed(self) -> bool:
        """Whether it ended by anything but the batcher's closing: never, since a batch that fails ends only itself."""
        return False

    def call(self, function: Callable[[Ranking], Coroutine[Any, Any, Result]]) -> Future[Result]:
        """Runs a coroutine on the loop, between batches; for checks, not for requests.

        Raises:
            NotReadyError: if the loop was closed.
        """
        running = function(self._ranking)
        try:
            return asyncio.run_coroutine_threadsafe(running, self._loop)
        except RuntimeError as error:
            running.close()
            raise NotReadyError("the event loop that ranks was closed") from error

    def join(self) -> None:
        """Nothing is left to wait for once the batcher was closed and no lease is out."""

    def _begin(self) -> None:
        self._loop_thread = threading.get_ident()
        # As in every replica: more intra-op threads than one collapse when the machine is busy.
        torch.set_num_threads(1)
        self._turn()

    def _wake(self) -> None:
        if threading.get_ident() == self._loop_thread:
            self._loop.call_soon(self._turn)
        else:
            self._loop.call_soon_threadsafe(self._turn)

    def _turn(self) -> None:
        batch = self._batcher.take(self._wake)
        if not batch:
            return
        _run(answer_batch(self._ranking, batch, self._metrics, self._clock))
        # Not before the sockets were read, and what they brought was parsed: one turn of the loop for each.
        self._loop.call_soon(self._loop.call_soon, self._turn)


def _run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine that never waits, to its end."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise ServingError("ranking waited for something on the event loop of the APIs")
