"""A ranking replica: a thread with its own event loop and its own connections to the shards, one batch at a time.

One thread scores one batch with one intra-op thread; more replicas, not more threads each, use more cores. PyTorch and
the lookup engine release the interpreter's lock while they compute, so the event loop of the APIs goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

import torch
import uvloop

from serving.answering import answer_batch
from serving.batcher import Batcher
from serving.errors import NotReadyError, ServingError
from serving.metrics import ServingMetrics
from serving.ranking import Ranking, RankingParts

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
RankingFactory: TypeAlias = Callable[[], Ranking]

STOP_TIMEOUT_S = 10.0
# Of the time between two batches, while somebody calls.
CALL_TURN_S = 0.005


class Replica:
    """Takes batches from a batcher until that is closed.

    Args:
        name: of the thread, for logs and profiles.
        batcher: where the work comes from.
        ranking: makes what does the work; called on the replica's own loop, which the shards then belong to.
        metrics: told how long requests waited.
        clock: monotonic seconds.
        on_failure: called on the thread when it ends by anything but the batcher's closing.
    """

    def __init__(
        self,
        name: str,
        batcher: Batcher,
        ranking: RankingFactory,
        metrics: ServingMetrics,
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._batcher = batcher
        self._make_ranking = ranking
        self._metrics = metrics
        self._clock = clock
        self._on_failure = on_failure
        self._loop = uvloop.new_event_loop()
        self._ranking: Ranking | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._calls: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread, and returns when its router is made. Raises what making it raised."""
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def is_alive(self) -> bool:
        """Whether the thread still takes work."""
        return self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether it ended by anything but the batcher's closing."""
        return self._failure is not None

    @property
    def parts(self) -> RankingParts:
        """What it ranks with. Raises ServingError before it was started."""
        return self._made_ranking().parts

    def use(self, parts: RankingParts) -> None:
        """Replaces the dense model. Only before the first request."""
        if self._ranking is not None:
            self._ranking.use(parts)

    def call(self, function: Callable[[Ranking], Coroutine[Any, Any, Result]]) -> Future[Result]:
        """Runs a coroutine on the replica's loop, between its batches; for checks, not for requests.

        Raises:
            NotReadyError: if the replica has ended.
        """

        async def run() -> Result:
            return await function(self._made_ranking())

        running = run()
        try:
            called = asyncio.run_coroutine_threadsafe(running, self._loop)
        except RuntimeError as error:
            running.close()
            raise NotReadyError(f"ranking replica {self._thread.name} has ended") from error
        self._calls.add(called)
        called.add_done_callback(self._calls.discard)
        return called

    def join(self) -> None:
        """Waits for the thread to end, after the batcher was closed."""
        if self._thread.ident is None:
            self._loop.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(STOP_TIMEOUT_S)

    def _made_ranking(self) -> Ranking:
        if self._ranking is None:
            raise ServingError("the replica has no router")
        return self._ranking

    def _run(self) -> None:
        # Several intra-op threads collapse when the machine is busy; replicas are the unit of parallelism.
        torch.set_num_threads(1)
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failure = error
            logger.exception("ranking replica %s ended", self._thread.name)
            self._on_failure()
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        ranking = self._ranking = self._make_ranking()
        self._ready.set()
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(woken.set)

        try:
            while (batch := self._batcher.take(wake)) is not None:
                if not batch:
                    await woken.wait()
                    woken.clear()
                    continue
                await answer_batch(ranking, batch, self._metrics, self._clock)
                # With rows in this process nothing above gives way, and calls of others would wait for an empty queue.
                if self._calls:
                    await self._give_way()
                elif self._batcher.num_waiting:
                    await asyncio.sleep(0)
        finally:
            await ranking.close()

    async def _give_way(self) -> None:
        """Lets calls of others get on. One turn of the loop is not enough: to ask a shard takes several."""
        calls = [asyncio.wrap_future(call) for call in tuple(self._calls)]
        await asyncio.wait(calls, timeout=CALL_TURN_S)
