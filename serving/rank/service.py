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
from typing import Protocol, TypeAlias, cast

from loader.errors import DeadlineExceededError, OverloadedError, ShardrankError, UnavailableError
from loader.progress import BeginThread, begin_thread
from serving.description import ModelInfo
from serving.errors import InvalidRequestError
from serving.formats.requests import Buffer, Codec, Encoded, LookupRequest, RankRequest, Response
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from serving.observe.access import AccessLog
from serving.observe.calls import Call, Outcome, outcome_of
from serving.observe.metrics import ServingMetrics
from serving.observe.traces import Parent, Tracer, call_span
from serving.observe.watch import Readiness, StateCollector
from serving.rank.batcher import LookupMemoryLimit, resolve
from serving.results import RankResult
from serving.versions.loaded_version import LoadedVersion
from serving.versions.version_choice import VersionChoice
from shard_node.byte_budget import ByteBudget
from shard_node.errors import GenerationNotFoundError
from shard_node.generation import Lease

logger = logging.getLogger(__name__)

OnRanked: TypeAlias = Callable[[RequestSchema, RankRequest, RankResult, float], None]
"""Called with an answered rank request, its schema, and when its call began, monotonic seconds; must be quick."""
WatchClient: TypeAlias = Callable[[Callable[[], None]], None]
CLOSE_GRACE_S = 5.0
MAX_EXPANDING = 2


class RankingService(VersionChoice):
    """Holds the served versions and answers requests. Belongs to no event loop; thread-safe.

    Args:
        expected_models: models without which the process is not ready; None until `expected` is set.
        clock: monotonic seconds.
        max_staleness_s: by model, the age of the newest change of a row that its shards lack, above which the model is
            degraded.
        wall_clock: seconds since the epoch.

    Attributes:
        expanding: limits the bodies that are decompressed at a time.
        on_ranked: called with every rank request of an API, once its answer is encoded.
        in_flight: how many calls are being received or handled.
    """

    def __init__(
        self,
        limits: RequestLimits | None = None,
        expected_models: Sequence[str] | None = (),
        clock: Callable[[], float] = time.monotonic,
        max_staleness_s: Mapping[str, float] | None = None,
        wall_clock: Callable[[], float] = time.time,
        begin: BeginThread = begin_thread,
    ) -> None:
        super().__init__(expected_models, lambda *freed: self.metrics.forget_version(*freed), begin)  # noqa: PLW0108
        self.limits = limits or RequestLimits()
        self.clock = clock
        self.wall_clock = wall_clock
        self.watch = Readiness(self, max_staleness_s or {}, wall_clock)
        self.metrics = ServingMetrics(StateCollector(self.watch.samples))
        self.tracer: Tracer | None = None
        self.access_log: AccessLog | None = None
        self.untaken = LookupMemoryLimit(self.limits.max_untaken_floats)
        self.buffers = ByteBudget(self.limits.max_buffered_bytes, partial(self.metrics.count, "buffer_refusals"))
        self.metrics.buffered_bytes = lambda: self.buffers.buffered
        self.metrics.num_in_flight = lambda: self.in_flight
        self.expanding = asyncio.Semaphore(MAX_EXPANDING)
        self.on_ranked: tuple[OnRanked, ...] = ()
        self.in_flight = self._receiving = 0
        self._num_ahead = 0
        self._counting = threading.Lock()

    @contextlib.contextmanager
    def call(self, api: str, method: str, request_id: str = "") -> Iterator[Call]:
        """Count one call in that is never queued, and out with its status; all about it happens in a `with` block."""
        call = self.admit(api, method, None, request_id, is_queued=False)
        try:
            yield call
        except BaseException as error:
            self.end_call(call, error)
            raise
        self.end_call(call)

    def admit(
        self, api: str, method: str, remaining_s: float | None, request_id: str = "", *, is_queued: bool = True
    ) -> Call:
        """Count in a call whose head has come, as being received until it is complete; `end_call` must follow.

        One that is queued, on the loop of the APIs, is not let in if it would wait in vain: if, for each live model,
        an answer were due too late (`Batcher.overload`) within `remaining_s`, the seconds until its deadline, None if
        that is not known yet. Raises OverloadedError.
        """
        call = Call(api, method, self.clock(), request_id)
        if is_queued and self.in_flight:
            self._check_queues(call, remaining_s)
        if remaining_s is not None:
            call.deadline = call.started_at + remaining_s
        with self._counting:
            is_full = self._receiving >= self.limits.max_receiving
            if not is_full:
                self._receiving += 1
                self.in_flight += 1
        if is_full:
            limit = f"max_receiving = {self.limits.max_receiving}"
            error = OverloadedError(f"too many requests that are not complete yet; the limit is {limit}")
            self.metrics.call_ended(call, error.kind, None, call.started_at)
            self._log(call, call.started_at, error.kind, error)
            raise error
        return call

    def _check_queues(self, call: Call, remaining_s: float | None) -> None:
        refusal, live = None, self.generations.live()
        for generation in live:
            # Those that were admitted in this loop iteration are not queued yet.
            refusal = generation.payload.batcher.overload(remaining_s, self._num_ahead)
            if refusal is None:
                break
        if refusal is not None:
            call.model = live[0].model if len(live) == 1 else ""
            self.metrics.refused(call.api, call.method, call.model, refusal.kind)
            self._log(call, call.started_at, refusal.kind, refusal)
            try:
                raise refusal
            finally:
                # The traceback has this frame: a cycle, whose collection took a sixth of the time under overload.
                del refusal
        if not self._num_ahead:
            asyncio.get_running_loop().call_soon(self._end_iteration)
        self._num_ahead += 1

    def _end_iteration(self) -> None:
        self._num_ahead = 0

    def complete(self, call: Call) -> None:
        """Count a call as complete; idempotent. Raises OverloadedError if too many are in flight."""
        with self._counting:
            if call.is_complete:
                return
            if self.in_flight - self._receiving < self.limits.max_in_flight:
                self._receiving -= 1
                call.is_complete = True
                return
        raise OverloadedError(f"too many requests in flight; the limit is max_in_flight = {self.limits.max_in_flight}")

    def end_call(self, call: Call, error: BaseException | None = None) -> None:
        """Count a call out, with what it ended with."""
        with self._counting:
            self.in_flight -= 1
            if not call.is_complete:
                self._receiving -= 1
        now, status = self.clock(), "ok"
        outcome: Outcome | None = "ok"
        if error is not None:
            gone = "client_gone" if isinstance(error, asyncio.CancelledError) else ShardrankError.kind
            status = error.kind if isinstance(error, ShardrankError) else gone
            # A client that gave less time than the live version's median answer takes says nothing of the version.
            is_hasty = isinstance(error, DeadlineExceededError) and any(
                generation.payload.counter.is_below_median(call.deadline - call.leased_at)
                for generation in self.generations.live()
                if generation.model == call.model
            )
            outcome = None if is_hasty else outcome_of(error)
        if call.counter is None:
            outcome = None
        else:
            call.counter.ended(call, outcome, now)
        self.metrics.call_ended(call, status, outcome, now)
        self._log(call, now, status, error)
        if call.trace is not None:
            call_span(call.trace, call, now, error)
        # The lease ended with the batch, so the version may be freed, and its metrics dropped, by now.
        if outcome is not None and call.lease.generation.state == "retired":
            self.metrics.forget_version(call.model, call.version)

    def _log(self, call: Call, now: float, status: str, error: BaseException | None) -> None:
        if self.access_log is not None:
            self.access_log.add(call, now - call.started_at, status, error)

    def lease_fallback(self, call: Call, error: BaseException) -> Lease[LoadedVersion] | None:
        """Lease the version before for a call that found no replica of some shard; None for all others.

        That is the live one for the canary, and for the live one what was live before, while that is here.
        """
        canary, kind = self.canary(call.model), getattr(error, "kind", "")
        is_canary = canary is not None and canary.version == call.version
        fallback = self.live(call.model) if is_canary else self.fallbacks.get(call.model)
        if call.counter is None or call.is_pinned or kind != "shard_unavailable" or fallback in (None, call.version):
            return None
        with contextlib.suppress(GenerationNotFoundError):
            lease = self.generations.lease(call.model, fallback)
            # The try counts for its version: guards must see one whose nodes die.
            call.counter.ended(call, "error", self.clock())
            self.metrics.count("version_requests", call.model, call.version, "error")
            return lease
        return None

    async def wait(self, call: Call, watch_client: WatchClient) -> Response:
        """Return a replica's answer to a request, on the loop of the call; its lease will be released.

        A request that has not begun when `watch_client` calls back, or the caller is cancelled, is dropped. Raises
        InvalidRequestError for an id without a row, DeadlineExceededError, OverloadedError, and ShardrankError from the
        shards.
        """
        batcher, loop = call.lease.generation.payload.batcher, call.loop
        assert loop is not None
        future = call.future = loop.create_future()
        batcher.submit(call)
        late = DeadlineExceededError("the deadline passed before the answer was complete")
        timer = loop.call_later(max(0.0, call.deadline - self.clock()), resolve, [(future, late)])
        gone = InvalidRequestError("", "the client closed the connection", kind="client_gone")
        watch_client(partial(resolve, [(future, gone)]))
        try:
            return cast(Response, await future)
        finally:
            timer.cancel()
            call.is_abandoned = True
            # An error's traceback holds this frame, and the future the error.
            call.future = None
            del future

    def wait_in_thread(self, call: Call) -> Response:
        """Return a replica's answer, while the calling thread waits; the future has no loop. Raises as `wait`."""
        future = cast("concurrent.futures.Future[Response]", call.future)
        call.lease.generation.payload.batcher.submit(call)
        try:
            return future.result(max(0.0, call.deadline - self.clock()))
        except TimeoutError:
            if future.done():
                raise
            raise DeadlineExceededError("the deadline passed before the answer was complete") from None
        finally:
            call.is_abandoned = True
            call.future = None
            del future

    def describe(self, model: str, version: int | None = None) -> ModelInfo:
        """Describe a model. Raises NotFoundError."""
        with self.lease(model, version) as lease:
            return lease.payload.description

    def close(self) -> None:
        """Withdraw every version, and wait until each is freed."""
        self.watch.begin_shutdown()
        for generation in self.generations.retire_all():
            # No request outlives its deadline by more than the batch that it is in.
            if not generation.retired.wait(self.limits.max_timeout_ms / 1000 + CLOSE_GRACE_S):
                logger.error("version %d of %s still answers requests: not freed", generation.version, generation.model)


class Caller(Protocol):
    """The client of a call."""

    @property
    def connection(self) -> Hashable:
        """The key of its connection."""

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` when it leaves: at once, if it has left already."""

    def once_sent(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the next answer is sent, or given up."""


async def answer(
    service: RankingService,
    call: Call,
    codec: Codec,
    body: Buffer | Awaitable[Buffer],
    client: Caller,
    parent: Parent | None = None,
    fallback: Lease[LoadedVersion] | None = None,
) -> Encoded:
    """Answer an admitted call of the trace `parent`; `body` is its request, complete and decompressed.

    The call is counted out; a second try is by the version of `fallback`. Raises ShardrankError with both statuses.
    """
    if service.tracer is not None and fallback is None:
        call.trace = service.tracer.begin(parent)
    try:
        if not isinstance(body, (bytes, bytearray, memoryview)):
            body = await body
        parsed = _parse(service, codec, call, body, fallback)
        call.loop = asyncio.get_running_loop()
        if isinstance(call.request, LookupRequest):
            encoded = await _looked_up(service, parsed, call, client)
        else:
            # The lease ends with the batch, and the version may be gone by then.
            served = call.lease.generation.payload
            schema, answered = served.schema, None
            if service.in_flight == 1:
                answered = await served.batcher.rank_alone(call)
            if answered is None:
                answered = await service.wait(call, client.watch)
            call.answered_at = service.clock()
            encoded = parsed.encode(answered)
            for notify in service.on_ranked:
                notify(schema, call.request, cast(RankResult, answered), call.started_at)
        call.encoded_at = service.clock()
    except BaseException as error:
        if (lease := service.lease_fallback(call, error)) is not None:
            call.is_abandoned = False
            return await answer(service, call, codec, body, client, parent, lease)
        is_refusal = isinstance(error, InvalidRequestError) and error.kind not in ("schema_digest", "client_gone")
        if fallback is not None and is_refusal:
            error = UnavailableError(f"only version {call.version} answers: {error}", kind="shard_unavailable")
        service.end_call(call, error)
        raise error
    service.end_call(call)
    return encoded


async def _looked_up(service: RankingService, codec: Codec, call: Call, client: Caller) -> Encoded:
    num_floats, untaken = cast(LookupRequest, call.request).num_floats, service.untaken
    try:
        await untaken.acquire(client.connection, num_floats, call.deadline - call.parsed_at)
    except BaseException:
        # It waited for earlier answers that its client has not read: no guard counts that.
        call.is_pinned = True
        call.lease.release()
        raise
    call.leased_at = service.clock()
    give = partial(untaken.release, client.connection, num_floats)
    try:
        answered = await service.wait(call, client.watch)
        call.answered_at = service.clock()
        encoded = await untaken.write(codec.encode(answered))
        client.once_sent(give)
    except BaseException:
        give()
        raise
    return encoded


def answer_in_thread(service: RankingService, codec: Codec, body: Buffer) -> Response:
    """Answer one call of this process while the calling thread waits. Nothing is encoded. Raises as `answer`."""
    with service.call(codec.api, codec.method) as call:
        _parse(service, codec, call, body)
        call.future = concurrent.futures.Future()
        return service.wait_in_thread(call)


def _parse(
    service: RankingService, codec: Codec, call: Call, body: Buffer, fallback: Lease[LoadedVersion] | None = None
) -> Codec:
    """Parse a complete request under a lease on the version that will answer it; return the codec that has read it."""
    call.received_at, lease = call.received_at or service.clock(), fallback
    try:
        service.complete(call)
        codec = codec.read(body, service.limits)
        lease = fallback or service.lease(codec.model, codec.version, lambda: codec.key)
        generation = lease.generation
        call.lease, call.is_pinned = lease, codec.version is not None
        call.model, call.version, call.counter = generation.model, generation.version, generation.payload.counter
        call.leased_at = service.clock()
        call.request = codec.parse(generation.payload.schema)
    except BaseException:
        if lease is not None:
            lease.release()
        raise
    call.parsed_at = service.clock()
    call.deadline = min(call.deadline, call.started_at + call.request.timeout_s)
    return codec
