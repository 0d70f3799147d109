"""The ranking service: what HTTP, gRPC and the in-process call have in common.

A request is parsed under a lease on the version that will answer it (see docs/decisions/lease-at-admission.md). From
`rank` or `lookup` on, the lease is the service's: it ends when nothing uses the version for this request any more,
which may be after the caller was told that the deadline has passed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar, cast

from loader.errors import ShardrankError
from serving.description import ModelDescription
from serving.errors import ClientGoneError, ModelNotFoundError, NotReadyError, OverloadedError
from serving.health import NodeWatch
from serving.limits import RequestLimits
from serving.metrics import ServingMetrics
from serving.parse_json import JsonBody, peek_version
from serving.parse_proto import LookupMessage, RankMessage, check_model
from serving.pending import Pending
from serving.request import LookupAnswer, LookupRequest, RankAnswer, RankRequest
from serving.served_model import ServedModel
from shard_node.errors import DeadlineExceededError, GenerationNotFoundError
from shard_node.generation import Generations, Lease

logger = logging.getLogger(__name__)

WatchClient: TypeAlias = Callable[[Callable[[], None]], None]
CLOSE_GRACE_S = 5.0

Request = TypeVar("Request", RankRequest, LookupRequest)


@dataclass(slots=True)
class Call:
    """One call of an API while it is handled.

    Attributes:
        api: `http`, `grpc` or `embedded`.
        method: `rank`, `lookup` or `model`.
        began: monotonic seconds.
        model: name of the served model, once it is known; never what a client made up.
        admitted: whether it is complete and counts towards `max_in_flight`; until then towards `max_receiving`.
        ended: whether it was counted out. A parser on another thread may still be at work for it.
    """

    api: str
    method: str
    began: float
    model: str = ""
    admitted: bool = False
    ended: bool = False


class RankingService:
    """Holds the served generations and answers requests. Belongs to no event loop; thread-safe.

    Args:
        limits: of requests, queues and connections.
        expected_models: models without which the process is not ready.
        metrics: where it counts; by default its own.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        limits: RequestLimits | None = None,
        expected_models: Sequence[str] = (),
        metrics: ServingMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or RequestLimits()
        self.clock = clock
        self.generations: Generations[ServedModel] = Generations(ServedModel.close)
        self.watch = NodeWatch(self.generations, expected_models)
        self.metrics = metrics or ServingMetrics(self.watch.nodes)
        self._expected = frozenset(expected_models)
        self._receiving = 0
        self._admitted = 0
        self._lock = threading.Lock()

    def install(self, served: ServedModel) -> None:
        """Makes a loaded version the live one of its model, and retires the others when their requests have ended."""
        self.generations.stage(served.model, served.version, served)
        self.generations.flip(served.model, served.version)
        for other in self.generations.all():
            if other.model == served.model and other.version != served.version and other.state == "staged":
                self.generations.retire(other.model, other.version)

    @contextmanager
    def call(self, api: str, method: str) -> Iterator[Call]:
        """Counts one call in, and out with its status. Everything about it happens inside.

        Until it is admitted it is being received; calls that never become complete take no place from those that are.

        Raises:
            OverloadedError: at once, if too many are being received.
        """
        call = Call(api, method, self.clock())
        status = "ok"
        try:
            with self._receiving_or_admitted(call):
                yield call
        except ShardrankError as error:
            status = error.kind
            raise
        except asyncio.CancelledError:
            status = ClientGoneError.kind
            raise
        except Exception:
            status = ShardrankError.kind
            raise
        finally:
            self._count(call, status)

    def admit(self, call: Call) -> None:
        """Lets a call in whose request is complete. Every parse method does it too; a second time changes nothing.

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
        try:
            return self.generations.lease(model, version)
        except GenerationNotFoundError as error:
            if version is None and model in self._expected:
                raise NotReadyError(f"model: {model!r} is not loaded yet") from error
            here = [f"{one.model} {one.version}" for one in self.generations.all()]
            wanted = repr(model[:128]) + ("" if version is None else f" version {version}")
            raise ModelNotFoundError(f"model: {wanted} is not served here; served are {here}") from error

    def parse_rank(self, call: Call, model: str, body: JsonBody) -> RankRequest:
        """Parses the JSON form. Raises OverloadedError as `admit`, BadRequestError, ModelNotFoundError."""
        self.admit(call)
        lease = self._lease_for(call, model, peek_version(body))
        return self._parsed(call, lease, lambda: lease.payload.json.rank(body, lease, call.began))

    def parse_lookup(self, call: Call, model: str, body: JsonBody) -> LookupRequest:
        """Parses the JSON form. Raises OverloadedError as `admit`, BadRequestError, ModelNotFoundError."""
        self.admit(call)
        lease = self._lease_for(call, model, peek_version(body))
        return self._parsed(call, lease, lambda: lease.payload.json.lookup(body, lease, call.began))

    def parse_rank_message(self, call: Call, message: RankMessage) -> RankRequest:
        """Parses the protobuf form. Raises OverloadedError as `admit`, BadRequestError, ModelNotFoundError."""
        self.admit(call)
        check_model(message.model)
        lease = self._lease_for(call, message.model, message.version if message.HasField("version") else None)
        return self._parsed(call, lease, lambda: lease.payload.proto.rank(message, lease, call.began))

    def parse_lookup_message(self, call: Call, message: LookupMessage) -> LookupRequest:
        """Parses the protobuf form. Raises OverloadedError as `admit`, BadRequestError, ModelNotFoundError."""
        self.admit(call)
        check_model(message.model)
        lease = self._lease_for(call, message.model, message.version if message.HasField("version") else None)
        return self._parsed(call, lease, lambda: lease.payload.proto.lookup(message, lease, call.began))

    async def rank(self, request: RankRequest, watch_client: WatchClient | None = None) -> RankAnswer:
        """Ranks on the calling event loop.

        Args:
            request: from one of the parse methods; its lease is taken over.
            watch_client: is given a callback for the moment at which the client leaves; what has not begun by then
                is dropped. Cancelling the caller's task does the same.

        Raises:
            UnknownIdError: for an id without a row.
            DeadlineExceededError: when the request's deadline passes.
            OverloadedError: at once, if too many requests wait.
            RouterError, ShardNodeError: if the shards can't answer.
        """
        return cast(RankAnswer, await self._answer(request, watch_client))

    async def lookup(self, request: LookupRequest, watch_client: WatchClient | None = None) -> LookupAnswer:
        """Looks up on the calling event loop. Arguments and errors as `rank`."""
        return cast(LookupAnswer, await self._answer(request, watch_client))

    def rank_in_thread(self, request: RankRequest) -> RankAnswer:
        """Ranks while the calling thread waits. Raises as `rank`."""
        return cast(RankAnswer, self._answer_in_thread(request))

    def lookup_in_thread(self, request: LookupRequest) -> LookupAnswer:
        """Looks up while the calling thread waits. Raises as `rank`."""
        return cast(LookupAnswer, self._answer_in_thread(request))

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

    @contextmanager
    def _receiving_or_admitted(self, call: Call) -> Iterator[None]:
        with self._lock:
            is_full = self._receiving >= self.limits.max_receiving
            self._receiving += not is_full
        if is_full:
            raise OverloadedError(
                f"too many requests that are not complete yet; the limit is max_receiving = {self.limits.max_receiving}"
            )
        self.metrics.in_flight.inc()
        try:
            yield
        finally:
            with self._lock:
                call.ended = True
                if call.admitted:
                    self._admitted -= 1
                else:
                    self._receiving -= 1
            self.metrics.in_flight.dec()

    def _count(self, call: Call, status: str) -> None:
        self.metrics.answered(call.api, call.method, call.model, status)
        if status != "ok":
            self.metrics.failed(call.api, call.method, status)
        self.metrics.stage(call.model, "total", self.clock() - call.began)

    def _lease_for(self, call: Call, model: str, version: int | None) -> Lease[ServedModel]:
        lease = self.lease(model, version)
        call.model = lease.generation.model
        return lease

    def _parsed(self, call: Call, lease: Lease[ServedModel], parse: Callable[[], Request]) -> Request:
        began = self.clock()
        try:
            request = parse()
        except BaseException:
            lease.release()
            raise
        self.metrics.stage(call.model, "parse", self.clock() - began)
        return request

    async def _answer(
        self, request: RankRequest | LookupRequest, watch_client: WatchClient | None
    ) -> RankAnswer | LookupAnswer:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[RankAnswer | LookupAnswer] = loop.create_future()
        pending = Pending(request, self.clock(), future, loop)
        self._submit(pending)
        expiry = loop.call_later(max(0.0, request.deadline - self.clock()), _expire, future)
        if watch_client is not None:
            watch_client(partial(_leave_early, future))
        try:
            return await future
        finally:
            expiry.cancel()
            pending.abandoned = True

    def _answer_in_thread(self, request: RankRequest | LookupRequest) -> RankAnswer | LookupAnswer:
        future: concurrent.futures.Future[RankAnswer | LookupAnswer] = concurrent.futures.Future()
        pending = Pending(request, self.clock(), future, None)
        self._submit(pending)
        try:
            return future.result(max(0.0, request.deadline - self.clock()))
        except TimeoutError:
            if future.done():
                raise
            raise DeadlineExceededError("the deadline passed before the answer was complete") from None
        finally:
            pending.abandoned = True

    def _submit(self, pending: Pending) -> None:
        try:
            pending.request.lease.payload.submit(pending)
        except BaseException:
            pending.request.lease.release()
            raise


def _expire(future: asyncio.Future[RankAnswer | LookupAnswer]) -> None:
    if not future.done():
        future.set_exception(DeadlineExceededError("the deadline passed before the answer was complete"))


def _leave_early(future: asyncio.Future[RankAnswer | LookupAnswer]) -> None:
    if not future.done():
        future.set_exception(ClientGoneError("the client closed the connection"))
