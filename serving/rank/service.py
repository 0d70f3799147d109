"""The ranking service: versions, admission, and the wait for a replica.

A request is parsed under a lease on the version that will answer it (see docs/decisions/lease-at-admission.md). From
`wait` on, the lease is the service's: it ends when nothing uses the version for this request any more, which may be
after the caller was told that the deadline has passed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, cast

from loader.errors import ShardrankError
from serving.description import ModelDescription
from serving.errors import ClientGoneError, OverloadedError
from serving.formats.requests import Answer
from serving.limits import RequestLimits
from serving.observe.calls import Call, Outcome, outcome_of
from serving.observe.collectors import StateCollector
from serving.observe.metrics import ServingMetrics
from serving.observe.watch import NodeWatch
from serving.rank.batcher import Pending
from serving.rank.untaken import UntakenAnswers
from serving.versions.served_versions import ServedVersions
from shard_node.errors import DeadlineExceededError

logger = logging.getLogger(__name__)

WatchClient: TypeAlias = Callable[[Callable[[], None]], None]
CLOSE_GRACE_S = 5.0


class RankingService(ServedVersions):
    """Holds the served generations and answers requests. Belongs to no event loop; thread-safe.

    Args:
        limits: of requests, queues and connections.
        expected_models: models without which the process is not ready; None if `expect` will say.
        clock: monotonic seconds.
        max_staleness_s: by model, how old the newest change of a row may be that its shards lack before the model is
            called degraded; models that are left out never are.
        wall_clock: seconds since the epoch.
    """

    def __init__(
        self,
        limits: RequestLimits | None = None,
        expected_models: Sequence[str] | None = (),
        clock: Callable[[], float] = time.monotonic,
        max_staleness_s: Mapping[str, float] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(expected_models, self._forget)
        self.limits = limits or RequestLimits()
        self.clock = clock
        self.wall_clock = wall_clock
        self.watch = NodeWatch(self.generations, expected_models, max_staleness_s, wall_clock)
        self.metrics = ServingMetrics(StateCollector(self.watch, self))
        self.untaken = UntakenAnswers(self.limits.max_untaken_floats)
        self._receiving = 0
        self._admitted = 0
        self._counting = threading.Lock()

    def expect(self, models: Sequence[str]) -> None:
        """Says which models must be live before the process is ready. A model that comes later does not count."""
        super().expect(models)
        self.watch.expect(models)

    @contextlib.contextmanager
    def call(self, api: str, method: str) -> Iterator[Call]:
        """Counts one call in as `begin_call` does, and out with its status; all about it happens in a `with` block."""
        call = self.begin_call(api, method)
        try:
            yield call
        except BaseException as error:
            self.end_call(call, error)
            raise
        self.end_call(call)

    def begin_call(self, api: str, method: str) -> Call:
        """Counts one call in; `end_call` must follow.

        Until it is admitted it is being received; calls that never become complete take no place from those that are.
        Raises OverloadedError if too many are being received.
        """
        call = Call(api, method, self.clock())
        with self._counting:
            is_full = self._receiving >= self.limits.max_receiving
            self._receiving += not is_full
        if is_full:
            limit = f"max_receiving = {self.limits.max_receiving}"
            error = OverloadedError(f"too many requests that are not complete yet; the limit is {limit}")
            self.metrics.call_ended(call, error.kind, None, call.began)
            raise error
        self.metrics.in_flight.inc()
        return call

    def end_call(self, call: Call, error: BaseException | None = None) -> None:
        """Counts a call out, with what it ended with."""
        with self._counting:
            if call.admitted:
                self._admitted -= 1
            else:
                self._receiving -= 1
        self.metrics.in_flight.dec()
        now, status = self.clock(), "ok"
        outcome: Outcome | None = "ok"
        if error is not None:
            gone = ClientGoneError if isinstance(error, asyncio.CancelledError) else ShardrankError
            status, outcome = (error if isinstance(error, ShardrankError) else gone).kind, outcome_of(error)
        if call.counter is None:
            outcome = None
        else:
            call.counter.ended(call, outcome, now)
        self.metrics.call_ended(call, status, outcome, now)
        # The lease ended with the batch, so the version may be freed and forgotten by now: not to be told again.
        if outcome is not None and call.generation is not None and call.generation.state == "retired":
            self._forget(call.model, call.version)

    def admit(self, call: Call) -> None:
        """Lets a call in whose request is complete; a second time changes nothing.

        Raises OverloadedError, at once, if too many are in flight.
        """
        with self._counting:
            if call.admitted:
                return
            if self._admitted < self.limits.max_in_flight:
                self._receiving -= 1
                self._admitted += 1
                call.admitted = True
                return
        raise OverloadedError(f"too many requests in flight; the limit is max_in_flight = {self.limits.max_in_flight}")

    async def wait(self, pending: Pending, watch_client: WatchClient) -> Answer:
        """Has a request answered by a replica, on the calling event loop, which its future belongs to.

        Args:
            pending: its lease is taken over.
            watch_client: is given a callback for the moment at which the client leaves; what has not begun by then
                is dropped. Cancelling the caller's task does the same.

        Raises:
            ShardrankError: UnknownIdError for an id without a row, DeadlineExceededError when the deadline passes,
                OverloadedError at once if too many requests wait, RouterError or ShardNodeError from the shards.
        """
        future = cast("asyncio.Future[Answer]", pending.future)
        pending.lease.generation.payload.submit(pending)
        timer = future.get_loop().call_later(max(0.0, pending.deadline - self.clock()), pending.expire)
        watch_client(pending.leave)
        try:
            return await future
        finally:
            timer.cancel()
            pending.abandoned = True
            # An error's traceback holds this frame, and the future the error.
            pending.future = None
            del future

    def wait_in_thread(self, pending: Pending) -> Answer:
        """Has a request answered while the calling thread waits; its future belongs to no loop. Raises as `wait`."""
        future = cast("concurrent.futures.Future[Answer]", pending.future)
        pending.lease.generation.payload.submit(pending)
        try:
            return future.result(max(0.0, pending.deadline - self.clock()))
        except TimeoutError:
            if future.done():
                raise
            raise DeadlineExceededError("the deadline passed before the answer was complete") from None
        finally:
            pending.abandoned = True
            pending.future = None
            del future

    def describe(self, model: str, version: int | None = None) -> ModelDescription:
        """What a model tells of itself. Raises ModelNotFoundError."""
        with self.lease(model, version) as lease:
            return lease.payload.description

    def models(self) -> list[ModelDescription]:
        """The live version of every model."""
        return [self.describe(model) for model in self.generations.models()]

    def close(self) -> None:
        """Withdraws every version, and waits until each has drained and its payload is freed."""
        self.watch.begin_shutdown()
        for generation in self.generations.retire_all():
            # No request outlives its deadline by more than the batch that it is in.
            if not generation.retired.wait(self.limits.max_timeout_ms / 1000 + CLOSE_GRACE_S):
                logger.error("%s %d still has leases; it is not freed", generation.model, generation.version)

    @property
    def in_flight(self) -> int:
        """Calls being received or handled."""
        return self._receiving + self._admitted

    def _forget(self, model: str, version: int) -> None:
        self.metrics.forget_version(model, version)
