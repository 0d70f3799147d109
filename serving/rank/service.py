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
from serving.formats.requests import Answer, Unparsed
from serving.limits import RequestLimits
from serving.observe.collectors import NodeCollector, VersionCollector
from serving.observe.metrics import ServingMetrics
from serving.observe.statistics import Outcome, outcome_of
from serving.observe.times import Call
from serving.observe.watch import NodeWatch
from serving.rank.batcher import Expiry, Pending
from serving.versions.served_model import ServedModel
from serving.versions.served_versions import ServedVersions
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

    @contextlib.contextmanager
    def call(self, api: str, method: str) -> Iterator[Call]:
        """Counts one call in, and out with its status; everything about it happens in a `with` block.

        Raises:
            OverloadedError: on entering, if too many are being received.
        """
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

        Raises:
            OverloadedError: if too many are being received.
        """
        call = Call(api, method, self.clock())
        with self._lock:
            is_full = self._receiving >= self.limits.max_receiving
            self._receiving += not is_full
        if is_full:
            limit = self.limits.max_receiving
            error = OverloadedError(
                f"too many requests that are not complete yet; the limit is max_receiving = {limit}"
            )
            self.metrics.call_ended(call, error.kind, None, call.began)
            raise error
        self.metrics.in_flight.inc()
        return call

    def end_call(self, call: Call, error: BaseException | None = None) -> None:
        """Counts a call out, with what it ended with."""
        with self._lock:
            if call.admitted:
                self._admitted -= 1
            else:
                self._receiving -= 1
        self.metrics.in_flight.dec()
        now, status = self.clock(), "ok"
        if error is not None:
            status = ClientGoneError.kind if isinstance(error, asyncio.CancelledError) else ShardrankError.kind
            status = error.kind if isinstance(error, ShardrankError) else status
        if call.counter is None:
            self.metrics.call_ended(call, status, None, now)
            return
        outcome: Outcome | None = "ok" if error is None else outcome_of(error)
        call.counter.ended(call, outcome, now, is_answered=error is None)
        self.metrics.call_ended(call, status, outcome, now)
        # The lease ended with the batch, so the version may be freed and forgotten by now: not to be told again.
        if outcome is not None and call.generation is not None and call.generation.state == "retired":
            self._forget(call.model, call.version)

    def admit(self, call: Call) -> None:
        """Lets a call in whose request is complete; a second time changes nothing.

        Raises:
            OverloadedError: at once, if too many are in flight.
        """
        with self._lock:
            if call.admitted:
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
        lease = self.versions.lease(unparsed.model, unparsed.version, lambda: unparsed.key)
        generation = call.generation = lease.generation
        call.model, call.version = generation.model, generation.version
        call.counter, call.leased = generation.payload.counter, self.clock()
        return lease

    async def wait(self, pending: Pending, watch_client: WatchClient) -> Answer:
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
        try:
            pending.lease.generation.payload.submit(pending)
        except BaseException:
            pending.lease.release()
            raise
        loop = future.get_loop()
        expiry: Expiry | None = getattr(self._of_thread, "expiry", None)
        if expiry is None or expiry.loop is not loop:
            expiry = self._of_thread.expiry = Expiry(loop)
        expiry.add(future, pending.deadline - pending.arrived)
        watch_client(pending.leave)
        try:
            return await future
        finally:
            expiry.discard(future)
            pending.abandoned = True
            # An error's traceback holds this frame, and the future the error.
            pending.future = None
            del future

    def wait_in_thread(self, pending: Pending) -> Answer:
        """Has a request answered while the calling thread waits; its future belongs to no loop. Raises as `wait`."""
        future = cast("concurrent.futures.Future[Answer]", pending.future)
        try:
            pending.lease.generation.payload.submit(pending)
        except BaseException:
            pending.lease.release()
            raise
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

    def _forget(self, model: str, version: int) -> None:
        self.metrics.forget_version(model, version)
