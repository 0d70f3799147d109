"""The ranking service: versions, admission, and the wait for a replica.

A request is parsed under a lease on the version that will answer it (see docs/decisions/lease-at-admission.md). From
`wait` on, the lease is the service's: it ends when nothing uses the version for this request any more, which may be
after the caller was told that the deadline has passed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeAlias, cast

from loader.errors import ShardrankError
from loader.registry.records import VersionStats
from serving.call import Call, CallScope
from serving.description import ModelDescription
from serving.errors import ClientGoneError, OverloadedError
from serving.expiry import Expiry
from serving.formats.requests import Answer, RankRequest, Unparsed
from serving.health import NodeWatch
from serving.limits import RequestLimits
from serving.metrics import ServingMetrics
from serving.node_metrics import NodeCollector
from serving.pending import Pending
from serving.served_model import ServedModel
from serving.version_metrics import VersionCollector
from serving.version_stats import VersionCounter, outcome_of
from serving.versions import ServedVersions
from shard_node.errors import DeadlineExceededError
from shard_node.generation import Generation, Lease

logger = logging.getLogger(__name__)

WatchClient: TypeAlias = Callable[[Callable[[], None]], None]
CLOSE_GRACE_S = 5.0


class RankingService:
    """Holds the served generations and answers requests. Belongs to no event loop; thread-safe.

    Args:
        limits: of requests, queues and connections.
        expected_models: models without which the process is not ready; None if `expect` will say.
        metrics: where it counts; by default its own, which then also tell of the versions and shard nodes.
        clock: monotonic seconds.
        max_staleness_s: by model, how old the newest change of a row may be that its shards lack before the model is
            called degraded; models that are left out never are.
        wall_clock: seconds since the epoch.
    """

    def __init__(
        self,
        limits: RequestLimits | None = None,
        expected_models: Sequence[str] | None = (),
        metrics: ServingMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_staleness_s: Mapping[str, float] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits or RequestLimits()
        self.clock = clock
        self.wall_clock = wall_clock
        self.versions = ServedVersions(expected_models, self._forget)
        self.generations = self.versions.generations
        self.watch = NodeWatch(self.generations, expected_models, max_staleness_s, wall_clock)
        self.metrics = metrics or ServingMetrics(
            [NodeCollector(self.watch.nodes, wall_clock), VersionCollector(self.versions, self.watch.degraded)]
        )
        self._receiving = 0
        self._admitted = 0
        self._lock = threading.Lock()
        self._of_thread = threading.local()

    def expect(self, models: Sequence[str]) -> None:
        """Says which models must be live before the process is ready. A model that comes later does not count."""
        self.versions.expect(models)
        self.watch.expect(models)

    def install(self, served: ServedModel) -> None:
        """Makes a loaded version the live one of its model, and retires the others when their requests have ended."""
        self.versions.install(served)

    def install_staged(self, served: ServedModel) -> None:
        """Puts a loaded version beside the live one. Raises GenerationStateError if it is here already."""
        self.versions.install_staged(served)

    def flip(self, model: str, version: int) -> None:
        """Makes a version that is here the live one; a second time changes nothing. Ends its being the canary.

        Raises:
            GenerationNotFoundError: if it is not here, or drains.
        """
        self.versions.flip(model, version)

    def retire(self, model: str, version: int) -> Generation[ServedModel]:
        """Withdraws a version, be it live or the canary: no new request gets it, and it is freed after its last one.

        Returns:
            The generation; wait for its `retired` event, on a thread.

        Raises:
            GenerationNotFoundError: if it is not here, or was withdrawn before.
        """
        return self.versions.retire(model, version)

    def live(self, model: str) -> int | None:
        """The version that answers requests; None if there is none."""
        return self.versions.live(model)

    def set_canary(self, model: str, version: int | None, share: float = 0.0) -> None:
        """Sends a stable share of a model's requests to a version that is here; None ends that.

        Raises:
            GenerationNotFoundError: if the version is not here, or drains.
            CanaryShareError: if the share is not above 0 and below 1.
        """
        self.versions.set_canary(model, version, share)

    def stats(self, model: str, version: int) -> VersionStats:
        """What a version has done since it is here. Raises GenerationNotFoundError if it is not here any more."""
        return self.versions.stats(model, version)

    def call(self, api: str, method: str) -> AbstractContextManager[Call]:
        """Counts one call in, and out with its status. Everything about it happens inside.

        Until it is admitted it is being received; calls that never become complete take no place from those that are.

        Raises:
            OverloadedError: on entering, if too many are being received.
        """
        return CallScope(Call(api, method, self.clock()), self._count_in, self._count_out)

    def admit(self, call: Call) -> None:
        """Lets a call in whose request is complete; a second time changes nothing.

        Raises:
            OverloadedError: at once, if too many are in flight.
        """
        with self._lock:
            if call.admitted or call.ended:
                return
            if self._admitted < self.limits.max_in_flight:
                self._receiving -= 1
                self._admitted += 1
                call.admitted = True
                return
        raise OverloadedError(f"too many requests in flight; the limit is max_in_flight = {self.limits.max_in_flight}")

    def lease(self, model: str, version: int | None = None) -> Lease[ServedModel]:
        """A lease on the live version, or on the given one.

        Raises:
            ModelNotFoundError: naming what is served instead.
            NotReadyError: for a model that is configured but not loaded yet.
        """
        return self.versions.lease(model, version)

    def lease_for(self, call: Call, unparsed: Unparsed) -> Lease[ServedModel]:
        """A lease on the version that shall answer a request; the call counts for that version from now on.

        Raises:
            ModelNotFoundError: naming what is served instead.
            NotReadyError: for a model that is configured but not loaded yet.
        """
        lease = self.versions.lease_for(unparsed.model, unparsed.version, lambda: unparsed.key)
        call.model, call.version = lease.generation.model, lease.version
        call.counter, call.leased = lease.payload.counter, self.clock()
        return lease

    async def wait(self, pending: Pending, watch_client: WatchClient | None = None) -> Answer:
        """Has a request answered by a replica, on the calling event loop.

        Args:
            pending: its future belongs to the loop; its lease is taken over.
            watch_client: is given a callback for the moment at which the client leaves; what has not begun by then
                is dropped. Cancelling the caller's task does the same.

        Raises:
            UnknownIdError: for an id without a row.
            DeadlineExceededError: when the request's deadline passes.
            OverloadedError: at once, if too many requests wait.
            RouterError, ShardNodeError: if the shards can't answer.
        """
        future = cast("asyncio.Future[Answer]", pending.future)
        counter = self._submit(pending)
        expiry = self._expiry_on(future.get_loop())
        expiry.add(future, pending.deadline - pending.arrived)
        if watch_client is not None:
            watch_client(partial(_leave_early, future))
        try:
            return _executed(counter, pending, await future)
        finally:
            expiry.discard(future)
            pending.abandoned = True

    def wait_in_thread(self, pending: Pending) -> Answer:
        """Has a request answered while the calling thread waits; its future belongs to no loop. Raises as `wait`."""
        future = cast("concurrent.futures.Future[Answer]", pending.future)
        counter = self._submit(pending)
        try:
            return _executed(counter, pending, future.result(max(0.0, pending.deadline - self.clock())))
        except TimeoutError:
            if future.done():
                raise
            raise DeadlineExceededError("the deadline passed before the answer was complete") from None
        finally:
            pending.abandoned = True

    def describe(self, model: str, version: int | None = None) -> ModelDescription:
        """What a model tells of itself. Raises ModelNotFoundError."""
        with self.lease(model, version) as lease:
            return lease.payload.description

    def models(self) -> list[ModelDescription]:
        """The live version of every model."""
        return [self.describe(model) for model in self.generations.models()]

    def begin_shutdown(self) -> None:
        """Not ready from now on. Requests that still come are answered until the listeners are closed."""
        self.watch.begin_shutdown()

    def close(self) -> None:
        """Withdraws every version, and waits until each has drained and its payload is freed."""
        self.begin_shutdown()
        for generation in self.generations.retire_all():
            # No request outlives its deadline by more than the batch that it is in.
            if not generation.retired.wait(self.limits.max_timeout_ms / 1000 + CLOSE_GRACE_S):
                logger.error("%s %d still has leases; it is not freed", generation.model, generation.version)

    @property
    def in_flight(self) -> int:
        """Calls being received or handled."""
        return self._receiving + self._admitted

    def _count_in(self, call: Call) -> None:
        with self._lock:
            is_full = self._receiving >= self.limits.max_receiving
            self._receiving += not is_full
        if is_full:
            error = OverloadedError(
                f"too many requests that are not complete yet; the limit is max_receiving = {self.limits.max_receiving}"
            )
            self._count(call, error)
            raise error
        self.metrics.in_flight.inc()

    def _count_out(self, call: Call, error: BaseException | None) -> None:
        with self._lock:
            call.ended = True
            if call.admitted:
                self._admitted -= 1
            else:
                self._receiving -= 1
        self.metrics.in_flight.dec()
        self._count(call, error)

    def _forget(self, model: str, version: int) -> None:
        self.metrics.forget_version(model, version)

    def _count(self, call: Call, error: BaseException | None) -> None:
        now, status = self.clock(), _status_of(error)
        self.metrics.answered(call.api, call.method, call.model, status)
        if error is not None:
            self.metrics.failed(call.api, call.method, status)
        self.metrics.stage(call.model, "total", now - call.began, call.method)
        outcome = outcome_of(error)
        if call.counter is not None and call.method == "rank":
            call.counter.inference.ended(now - call.began, now, is_answered=error is None)
        if call.counter is not None and outcome is not None:
            call.counter.count(outcome, now - call.leased)
            self.metrics.version_answered(call.model, call.version, outcome)
            # The lease ended with the batch, so the version may be freed and forgotten by now: not to be told again.
            if not self.generations.has(call.model, call.version):
                self._forget(call.model, call.version)

    def _expiry_on(self, loop: asyncio.AbstractEventLoop) -> Expiry:
        """That of a loop, which runs on this thread."""
        expiry: Expiry | None = getattr(self._of_thread, "expiry", None)
        if expiry is None or expiry.loop is not loop:
            expiry = self._of_thread.expiry = Expiry(loop)
        return expiry

    def _submit(self, pending: Pending) -> VersionCounter:
        # Once it is submitted the lease may end at any moment, and what it is on with it.
        counter = pending.lease.payload.counter
        try:
            pending.lease.payload.submit(pending)
        except BaseException:
            pending.lease.release()
            raise
        return counter


def _executed(counter: VersionCounter, pending: Pending, answer: Answer) -> Answer:
    if isinstance(pending.request, RankRequest):
        counter.inference.executed(pending)
    return answer


def _status_of(error: BaseException | None) -> str:
    if error is None:
        return "ok"
    if isinstance(error, ShardrankError):
        return error.kind
    return ClientGoneError.kind if isinstance(error, asyncio.CancelledError) else ShardrankError.kind


def _leave_early(future: asyncio.Future[Answer]) -> None:
    if not future.done():
        future.set_exception(ClientGoneError("the client closed the connection"))
