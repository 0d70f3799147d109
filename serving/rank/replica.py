"""Ranking replicas: each pops one batch at a time from a version's queue and hands out its answers.

A `Replica` is a thread with an event loop, connections to the shards, and one intra-op thread; more replicas use more
cores.

A `LoopReplica` has no thread: for rows in this process's memory or on shard nodes, batches are scored on the event loop
of the APIs. No thread has to be woken, and none competes for the interpreter's lock. What arrives while a batch is
scored is the next batch. While shards are waited for, the loop goes on, and one more batch is begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
import uvloop

from loader.errors import ShardrankError
from serving.errors import InternalError, not_ready
from serving.formats.requests import LookupRequest, Response
from serving.observe.calls import Call
from serving.rank.batcher import Batcher, finish, ranking_failed
from serving.rank.ranking import Ranking

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

STOP_TIMEOUT_S = 10.0
STOP_POLL_S = 0.1
# Of the time between two batches, while coroutines of `call` run.
CALL_TIME_S = 0.005
# Batches of a loop in flight: while two are, larger ones form.
MAX_IN_FLIGHT = 2
# Errors about the shards or the clock, for which another try with fewer requests would not help.
_STATUSES_OF_A_BATCH = (503, 504)


class _OnLoop:
    """A ranking on an event loop, for the batches of a batcher; `failure` is why it ended."""

    ranking: Ranking
    failure: BaseException | None = None

    def __init__(self, batcher: Batcher, loop: asyncio.AbstractEventLoop, clock: Callable[[], float]) -> None:
        self._batcher = batcher
        self._loop = loop
        self._clock = clock
        self._calls: set[Future[Any]] = set()

    @property
    def is_alive(self) -> bool:
        return self.failure is None and not self._loop.is_closed()

    def call(self, function: Callable[[Ranking], Coroutine[Any, Any, Result]]) -> Future[Result]:
        """Run a coroutine between batches, for checks. Raises UnavailableError if the loop was closed."""
        running = function(self.ranking)
        try:
            called = asyncio.run_coroutine_threadsafe(running, self._loop)
        except RuntimeError as error:
            running.close()
            raise not_ready("the ranking replica has ended: its event loop was closed") from error
        self._calls.add(called)
        called.add_done_callback(self._calls.discard)
        return called

    async def _answer(self, batch: list[Call]) -> None:
        """Rank or look up a batch, and give each request its answer or error once; bugs are logged."""
        broken_off = InternalError("ranking was broken off; the server's log says more")
        outcomes: list[Response | BaseException] = [broken_off] * len(batch)
        try:
            try:
                now = self._clock()
                for call in batch:
                    call.queue_s = now - call.parsed_at
                outcomes = await _outcomes(self.ranking, batch)
            finally:
                finish(zip(batch, outcomes, strict=True))
        except Exception:
            logger.exception("a batch of %d requests was broken off", len(batch))
        finally:
            self._batcher.ended(batch)


class Replica(_OnLoop):
    """Ranks batches of a batcher until that is closed, on a separate thread.

    `ranking` is called on its event loop, which the shards then belong to; `on_failure` on its thread, if it fails.
    """

    def __init__(
        self,
        name: str,
        batcher: Batcher,
        ranking: Callable[[], Ranking],
        clock: Callable[[], float],
        on_failure: Callable[[], None],
    ) -> None:
        super().__init__(batcher, uvloop.new_event_loop(), clock)
        self._make_ranking = ranking
        self._on_failure = on_failure
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, and return when its router is made. Raises what making it raised."""
        self._thread.start()
        self._ready.wait()
        if self.failure is not None:
            raise self.failure

    def join(self) -> None:
        """Wait for the thread to end, after the batcher was closed."""
        if self._thread.ident is None:
            self._loop.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        # Several intra-op threads collapse when the machine is busy; replicas are the unit of parallelism.
        torch.set_num_threads(1)
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self.failure = error
            logger.exception("ranking replica %s ended", self._thread.name)
            self._on_failure()
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        ranking = self.ranking = self._make_ranking()
        self._ready.set()
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(woken.set)

        try:
            while (batch := self._batcher.pop(wake)) is not None:
                if not batch:
                    await woken.wait()
                    woken.clear()
                    continue
                await self._answer(batch)
                # With rows in this process nothing above awaits, and other calls would wait for an empty queue. They
                # take several iterations of the loop.
                if self._calls:
                    await asyncio.wait([*map(asyncio.wrap_future, tuple(self._calls))], timeout=CALL_TIME_S)
                elif self._batcher.num_waiting:
                    await asyncio.sleep(0)
        finally:
            await ranking.close()


class LoopReplica(_OnLoop):
    """Ranks queued batches on the event loop of the APIs; at most two of them wait for shards.

    A request that is alone is ranked by its own task (`Batcher.rank_alone`).
    """

    def __init__(
        self, ranking: Ranking, batcher: Batcher, loop: asyncio.AbstractEventLoop, clock: Callable[[], float]
    ) -> None:
        super().__init__(batcher, loop, clock)
        self.ranking = ranking
        self._loop_thread = 0
        self._in_flight: set[asyncio.Task[None]] = set()
        self._will_be_woken = False

    def start(self) -> None:
        """Schedule the first batch. From any thread but the loop's."""
        self._loop.call_soon_threadsafe(self._begin)

    def join(self) -> None:
        """Close the connections to shards, after the batcher was closed; no batch may be in flight."""
        closing = self.ranking.close()
        try:
            closed = asyncio.run_coroutine_threadsafe(closing, self._loop)
        except RuntimeError:
            closing.close()
            return
        ends = self._clock() + STOP_TIMEOUT_S
        # A loop that has stopped closes nothing more.
        while self._loop.is_running() and threading.get_ident() != self._loop_thread and self._clock() < ends:
            with contextlib.suppress(TimeoutError):
                closed.result(STOP_POLL_S)
                return

    def _begin(self) -> None:
        self._loop_thread = threading.get_ident()
        torch.set_num_threads(1)
        self._batcher.rank_on_loop = self._loop, self.ranking.rank
        self._begin_batch()

    def _wake(self) -> None:
        if threading.get_ident() == self._loop_thread:
            self._loop.call_soon(self._woken)
        else:
            self._loop.call_soon_threadsafe(self._woken)

    def _woken(self) -> None:
        self._will_be_woken = False
        self._begin_batch()

    def _begin_batch(self) -> None:
        if self._will_be_woken or len(self._in_flight) == MAX_IN_FLIGHT:
            return
        try:
            batch = self._batcher.pop(self._wake)
        except BaseException as error:
            # It ends, as one on a thread would, and readiness shows it.
            self.failure = error
            self._batcher.close("all its ranking replicas have ended")
            raise
        if not batch:
            self._will_be_woken = True
            return
        try:
            answering = self._answer(batch)
            if self.ranking.router.waits:
                task = self._loop.create_task(answering)
                self._in_flight.add(task)
                task.add_done_callback(self._ended)
                return
            try:
                answering.send(None)
            except StopIteration:
                return
            # Its requests fail when it is closed.
            answering.close()
            raise InternalError("ranking waited for something on the event loop of the APIs")
        finally:
            self._go_on()

    def _go_on(self) -> None:
        # After answers are written, what the sockets had is read and parsed, or refused, in one iteration of the loop;
        # what came meanwhile, which would be refused after a batch, in a second one.
        self._loop.call_soon(self._loop.call_soon, self._loop.call_soon, self._begin_batch)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._go_on()


async def _outcomes(ranking: Ranking, batch: list[Call]) -> list[Response | BaseException]:
    try:
        if isinstance(batch[0].request, LookupRequest):
            return [await ranking.lookup(batch[0])]
        return list(await ranking.rank(batch))
    except ShardrankError as error:
        if len(batch) == 1 or error.http_status in _STATUSES_OF_A_BATCH:
            return [error] * len(batch)
    except Exception as error:
        failure = ranking_failed(error, len(batch))
        if len(batch) == 1:
            failure.__cause__ = error
            return [failure]
    # No checked request should fail a batch. If one did, only that one fails.
    return [(await _outcomes(ranking, [call]))[0] for call in batch]
