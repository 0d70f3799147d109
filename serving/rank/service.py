"""The ranking service, and the one road of a call that ranks or looks up: admit, lease, parse, rank, encode.

A request is parsed under a lease on the version that will answer it (docs/decisions/version-leases.md).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

from loader.errors import DeadlineExceededError, OverloadedError, ShardrankError
from serving.description import ModelInfo
from serving.formats.requests import (
    Answer,
    Buffer,
    Codec,
    Encoded,
    LookupRequest,
    RankAnswer,
    RankRequest,
    Request,
    Unparsed,
)
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from serving.observe.calls import Call, Outcome, outcome_of
from serving.observe.metrics import ServingMetrics
from serving.observe.traces import Parent, Tracer, call_span
from serving.observe.watch import Readiness, StateCollector
from serving.rank.batcher import LookupMemoryLimit, Pending
from serving.versions.loaded_version import LoadedVersion
from serving.versions.version_choice import VersionChoice
from shard_node.byte_budget import ByteBudget
from shard_node.generation import Lease

logger = logging.getLogger(__name__)

OnRanked: TypeAlias = Callable[[RequestSchema, RankRequest, RankAnswer, float], None]
"""Called with an answered rank request, its schema, and when its call began, monotonic seconds; must be quick."""
WatchClient: TypeAlias = Callable[[Callable[[], None]], None]
Receive: TypeAlias = Callable[[], Awaitable[Buffer]]
CLOSE_GRACE_S = 5.0
MAX_EXPANDING = 2


class RankingService(VersionChoice):
    """Holds the served versions and answers requests. Belongs to no event loop; thread-safe.

    Args:
        expected_models: models without which the process is not ready; None if `expect` follows.
        clock: monotonic seconds.
        max_staleness_s: by model, the age of the newest change of a row that its shards lack, above which the model is
            degraded.
        wall_clock: seconds since the epoch.

    Attributes:
        expanding: limits the bodies that are decompressed at a time.
        on_ranked: called with every rank request of an API, once its answer is encoded.
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
        self.watch = Readiness(self, max_staleness_s, wall_clock)
        self.metrics = ServingMetrics(StateCollector(self.watch.samples))
        self.tracer: Tracer | None = None
        self.untaken = LookupMemoryLimit(self.limits.max_untaken_floats)
        self.buffers = ByteBudget(self.limits.max_buffered_bytes, partial(self.metrics.count, "buffer_refusals"))
        self.metrics.buffered_bytes = lambda: self.buffers.buffered
        self.expanding = asyncio.Semaphore(MAX_EXPANDING)
        self.on_ranked: tuple[OnRanked, ...] = ()
        self._receiving = 0
        self._admitted = 0
        self._counting = threading.Lock()

    @contextlib.contextmanager
    def call(self, api: str, method: str) -> Iterator[Call]:
        """Count one call in as `begin_call` does, and out with its status; all about it happens in a `with` block."""
        call = self.begin_call(api, method)
        try:
            yield call
        except BaseException as error:
            self.end_call(call, error)
            raise
        self.end_call(call)

    def begin_call(self, api: str, method: str) -> Call:
        """Count one call in, as being received until it is admitted; `end_call` must follow. Raises OverloadedError."""
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
        """Count a call out, with what it ended with."""
        with self._counting:
            if call.admitted:
                self._admitted -= 1
            else:
                self._receiving -= 1
        self.metrics.in_flight.dec()
        now, status = self.clock(), "ok"
        outcome: Outcome | None = "ok"
        if error is not None:
            gone = "client_gone" if isinstance(error, asyncio.CancelledError) else ShardrankError.kind
            status = error.kind if isinstance(error, ShardrankError) else gone
            # A client that gave less time than the live version's median answer takes says nothing of the version.
            is_hasty = isinstance(error, DeadlineExceededError) and any(
                generation.payload.counter.is_below_median(call.deadline - call.leased)
                for generation in self.generations.live()
                if generation.model == call.model
            )
            outcome = None if is_hasty else outcome_of(error)
        if call.counter is None:
            outcome = None
        else:
            call.counter.ended(call, outcome, now)
        self.metrics.call_ended(call, status, outcome, now)
        if call.trace is not None:
            call_span(call.trace, call, now, error)
        # The lease ended with the batch, so the version may be freed, and its metrics dropped, by now.
        if outcome is not None and call.generation is not None and call.generation.state == "retired":
            self._forget(call.model, call.version)

    def overload(self, remaining_s: float | None, ahead: int = 0) -> OverloadedError | None:
        """Return why a new call would wait in vain, as `Batcher.overload`, for any live model; None if it would not.

        Under overload most calls end here, before they cost more; `refused` must follow.
        """
        refusal = None
        for generation in self.generations.live():
            refusal = generation.payload.overload(remaining_s, ahead)
            if refusal is None:
                break
        return refusal

    def refused(self, api: str, method: str, kind: str, count: int = 1) -> None:
        """Count calls that were refused before they were received."""
        live = self.generations.live()
        self.metrics.refused(api, method, live[0].model if len(live) == 1 else "", kind, count)

    def admit(self, call: Call) -> None:
        """Admit a call whose request is complete; idempotent. Raises OverloadedError if too many are in flight."""
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
        """Return a replica's answer to a request, on the event loop of its future; its lease will be released.

        A request that has not begun when `watch_client` calls back, or the caller is cancelled, is dropped. Raises
        InvalidRequestError for an id without a row, DeadlineExceededError, OverloadedError, and ShardrankError from the
        shards.
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
        """Return a replica's answer, while the calling thread waits; the future has no loop. Raises as `wait`."""
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

    def describe(self, model: str, version: int | None = None) -> ModelInfo:
        """Describe a model. Raises NotFoundError."""
        with self.lease(model, version) as lease:
            return lease.payload.description

    def models(self) -> list[ModelInfo]:
        """Describe the live version of every model."""
        return [self.describe(model) for model in self.generations.models()]

    def close(self) -> None:
        """Withdraw every version, and wait until each is freed."""
        self.watch.begin_shutdown()
        for generation in self.generations.retire_all():
            # No request outlives its deadline by more than the batch that it is in.
            if not generation.retired.wait(self.limits.max_timeout_ms / 1000 + CLOSE_GRACE_S):
                logger.error("%s %d still has leases; it is not freed", generation.model, generation.version)

    @property
    def in_flight(self) -> int:
        """Count the calls being received or handled."""
        return self._receiving + self._admitted

    def _forget(self, model: str, version: int) -> None:
        self.metrics.forget_version(model, version)


class Caller(Protocol):
    """The client of a call."""

    @property
    def connection(self) -> Hashable:
        """The key of its connection."""

    def time_remaining(self) -> float | None:
        """Return the seconds until its deadline, if it set one."""

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` when it leaves: at once, if it has left already."""

    def when_taken(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the next answer is sent, or given up."""


async def answer(
    service: RankingService, codec: Codec, receive: Receive, client: Caller, parent: Parent | None = None
) -> Encoded:
    """Answer one call, whose request `receive` returns complete and decompressed, of the trace `parent`.

    Raises ShardrankError with its HTTP and gRPC status.
    """
    refusal = service.overload(client.time_remaining())
    if refusal is not None:
        service.refused(codec.api, codec.method, refusal.kind)
        try:
            raise refusal
        finally:
            # The traceback has this frame: a cycle, whose collection took a sixth of the time under overload.
            del refusal
    call = service.begin_call(codec.api, codec.method)
    if service.tracer is not None:
        call.trace = service.tracer.begin(parent)
    try:
        body = await receive()
        unparsed, request, lease = _parsed(service, codec, call, body)
        del body
        deadline = call.began + request.timeout_s
        if (remaining_s := client.time_remaining()) is not None:
            deadline = min(deadline, call.parsed + remaining_s)
        loop = asyncio.get_running_loop()
        call.deadline = deadline
        pending = Pending(request, lease, deadline, call, loop.create_future(), loop)
        if isinstance(request, LookupRequest):
            encoded = await _looked_up(service, unparsed, pending, client)
        else:
            # The lease ends with the batch, and the version may be gone by then.
            schema = lease.generation.payload.schema
            answered = cast(RankAnswer, await service.wait(pending, client.watch))
            call.answered = service.clock()
            encoded = unparsed.encode(answered)
            for tell in service.on_ranked:
                tell(schema, request, answered, call.began)
        call.encoded = service.clock()
    except BaseException as error:
        service.end_call(call, error)
        raise
    service.end_call(call)
    return encoded


async def _looked_up(service: RankingService, unparsed: Unparsed, pending: Pending, client: Caller) -> Encoded:
    """Answer a lookup, once there is room for its answer."""
    num_floats, untaken = cast(LookupRequest, pending.request).num_floats, service.untaken
    try:
        await untaken.acquire(client.connection, num_floats, pending.deadline - pending.call.parsed)
    except BaseException:
        # It waited for earlier answers that its client has not read: no guard counts that.
        pending.call.pinned = True
        pending.lease.release()
        raise
    pending.call.leased = service.clock()
    give = partial(untaken.release, client.connection, num_floats)
    try:
        answered = await service.wait(pending, client.watch)
        pending.call.answered = service.clock()
        encoded = await untaken.write(unparsed.encode(answered))
        client.when_taken(give)
    except BaseException:
        give()
        raise
    return encoded


def answer_in_thread(service: RankingService, codec: Codec, body: Buffer) -> Answer:
    """Answer one call of this process while the calling thread waits. Nothing is encoded. Raises as `answer`."""
    with service.call(codec.api, codec.method) as call:
        _, request, lease = _parsed(service, codec, call, body)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        call.deadline = call.began + request.timeout_s
        return service.wait_in_thread(Pending(request, lease, call.deadline, call, future, None))


def _parsed(
    service: RankingService, codec: Codec, call: Call, body: Buffer
) -> tuple[Unparsed, Request, Lease[LoadedVersion]]:
    call.received = service.clock()
    service.admit(call)
    unparsed = codec.read(body, service.limits)
    lease = service.lease(unparsed.model, unparsed.version, lambda: unparsed.key)
    generation = call.generation = lease.generation
    call.pinned = unparsed.version is not None
    call.model, call.version, call.counter = generation.model, generation.version, generation.payload.counter
    call.leased = service.clock()
    try:
        request = unparsed.parse(generation.payload.schema)
    except BaseException:
        lease.release()
        raise
    call.parsed = service.clock()
    return unparsed, request, lease
