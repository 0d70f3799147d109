"""`Client` and `AsyncClient`: a product's way to a ranking server.

What a request takes (describe the model once, pack, send, try again) is written once, as generators that say which
call to make or how long to wait; a client carries that out by blocking or by awaiting.
"""

from __future__ import annotations

import random as random_numbers
import threading
import time
from asyncio import sleep as sleep_on_loop
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeAlias, TypeVar

from google.protobuf.message import Message

from serving.client.errors import (
    ClientConfigError,
    ClientError,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    SchemaDigestError,
    UnavailableError,
)
from serving.client.features import (
    Features,
    Layout,
    LookupResult,
    RankFeatures,
    RankResult,
    Values,
    lookup_request,
    read_lookup,
    read_message,
    read_rank,
    refused,
)
from serving.client.transports import (
    AsyncGrpcTransport,
    AsyncHttpTransport,
    Call,
    Clock,
    GrpcTransport,
    HttpTransport,
    Method,
    Target,
    Token,
)
from serving.proto.shardrank.v1 import ranking_pb2

P = ParamSpec("P")
T = TypeVar("T")
# What a request takes: calls, each answered with bytes or an error, and waits in seconds.
Steps: TypeAlias = Generator[Call | float, bytes | None, T]

MAX_LAYOUTS = 64


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a call is made again: the server was not reached, was not ready, or said when to come back.

    Never after a deadline or a refusal, and never past the deadline of the request. The waits are
    drawn from 0 to a bound that doubles, so that clients that failed together do not come back together.

    Attributes:
        max_attempts: calls for one request, the first one included; 1 for no retries.
        backoff_ms: bound of the first wait.
        max_backoff_ms: bound of any wait, `retry-after` apart.
        budget_ratio: retries for each request that the client makes, over time: a server that is down gets that much
            more load and no more.
        budget_burst: retries that may come at once, after a time without any.
    """

    max_attempts: int = 3
    backoff_ms: float = 25.0
    max_backoff_ms: float = 1000.0
    budget_ratio: float = 0.1
    budget_burst: float = 10.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ClientConfigError(f"max_attempts {self.max_attempts} is not 1 or more", field="max_attempts")
        for name in ("backoff_ms", "max_backoff_ms", "budget_ratio", "budget_burst"):
            if not getattr(self, name) >= 0:
                raise ClientConfigError(f"{name} {getattr(self, name)} is not 0 or more", field=name)


class RetryBudget:
    """Tokens for retries: a request earns a part of one, a retry costs one. From any thread.

    Args:
        policy: how much.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self._ratio, self._most = policy.budget_ratio, policy.budget_burst
        self._tokens = policy.budget_burst
        self._lock = threading.Lock()

    def earn(self) -> None:
        """Count a request."""
        with self._lock:
            self._tokens = min(self._most, self._tokens + self._ratio)

    def spend(self) -> bool:
        """Take a token for a retry; False if there is none."""
        with self._lock:
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


class Requests:
    """What both clients are: the requests, step by step.

    Args:
        address: `grpc://host:port`, `grpcs://host:port`, `http://host:port` or `https://host:port`; the last two may
            have a path, for a gateway.
        token: sent with every call as `authorization: Bearer ...`; or a function that gives it, for tokens that
            change.
        ca: PEM file of the authorities that may have signed the server's certificate; those of the system if None.
        cert: PEM file of a certificate of the client's own, for mutual TLS.
        key: PEM file of its key.
        timeout_ms: deadline of a request that does not bring its own: for everything it takes, retries too.
        retry: when calls are made again.
        random: gives numbers in [0, 1).
        clock: seconds.
        sleep: waits for seconds; an `AsyncClient` awaits it.

    Raises:
        ClientConfigError: an address or a file that can't be used.
    """

    _transports: ClassVar[tuple[type[Any], type[Any]]]
    _default_sleep: ClassVar[Any]

    def __init__(
        self,
        address: str,
        *,
        token: Token | None = None,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        key: str | Path | None = None,
        timeout_ms: int = 1000,
        retry: RetryPolicy | None = None,
        random: Callable[[], float] = random_numbers.random,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], Any] | None = None,
    ) -> None:
        self._target = Target.of(address, token, ca, cert, key)
        self._timeout_ms = timeout_ms
        self._retry = retry or RetryPolicy()
        self._budget = RetryBudget(self._retry)
        self._random = random
        self._clock = clock
        self._sleep = sleep or self._default_sleep
        over_grpc, over_http = self._transports
        self._transport: Any = (over_grpc if self._target.is_grpc else over_http)(self._target)
        # By model and by the version that was asked for, None for the live one.
        self._layouts: dict[tuple[str, int | None], Layout] = {}

    def _rank(
        self,
        model: str,
        context: Features,
        candidates: Features,
        *,
        context_dense: Values = None,
        candidate_dense: Values = None,
        weights: Features | None = None,
        top_k: int | None = None,
        request_id: str = "",
        routing_key: str = "",
        version: int | None = None,
        timeout_ms: int | None = None,
    ) -> Steps[RankResult]:
        """Score candidates.

        N is the number of candidates. Arrays are anything that NumPy takes as one; flat arrays and `Ragged` cost no
        work for each id, lists one pass.

        Args:
            model: its name.
            context: by feature, its ids: integers or strings, a flat list or array, or a single one.
            candidates: by feature, the ids of all candidates, in one order for all features. One id for each: flat,
                [N]. Several: a list of N lists, an array [N, K], or `Ragged` with the values and N lengths.
            context_dense: numbers [Kc], as many as the model takes.
            candidate_dense: numbers [N, Kd].
            weights: by feature, for features that the model weights, of either side: numbers in the shape of the ids;
                for `Ragged` ids also flat. All 1 for features that are not named.
            top_k: how many positions `order` shall have; all if None.
            request_id: comes back with the answer, and stands in traces.
            routing_key: whose request it is: while a canary is on, the same key gets the same version.
            version: that must answer; the live one, or the canary, if None.
            timeout_ms: deadline of the request, in place of the client's.

        Returns:
            Scores float32 [N] and their order.

        Raises:
            InvalidRequestError: the request does not fit the model; `field` says where.
            ClientError: see the tree in `serving.client.errors`.
        """
        ends = self._ends(timeout_ms)
        given = RankFeatures.of(context, candidates, weights or {}, context_dense, candidate_dense)
        options = {"model": model, "version": version, "top_k": top_k or 0}
        options |= {"request_id": request_id, "routing_key": routing_key}
        request = yield from self._packed(model, version, given, ends)
        try:
            data = yield from self._send("rank", model, _encoded(request, options), ends)
        except SchemaDigestError:
            # Another version answers than the one described: a flip, a canary, or a fleet of which a part has flipped.
            # Names fit whichever it is; what is packed next is packed for what the server says then.
            self._layouts.pop((model, version), None)
            data = yield from self._send("rank", model, _encoded(given.map_request(), options), ends)
        return read_rank(data)

    def _lookup(
        self,
        model: str,
        features: Features,
        *,
        weights: Features | None = None,
        request_id: str = "",
        routing_key: str = "",
        version: int | None = None,
        timeout_ms: int | None = None,
    ) -> Steps[LookupResult]:
        """Look up embeddings, pooled as the model pools them.

        Args:
            model: its name.
            features: by feature, bags of ids, as candidates of `rank`; flat ids are one bag each. Each feature has as
                many bags as it likes, and none needs to be there.
            weights: by feature, as in `rank`.
            request_id: comes back with the answer.
            routing_key: as in `rank`.
            version: as in `rank`.
            timeout_ms: as in `rank`.

        Returns:
            By feature float32 [bags, embedding_dim], or `Ragged` if the model does not pool it.

        Raises:
            ClientError: as `rank`.
        """
        ends = self._ends(timeout_ms)
        options = {"model": model, "version": version, "request_id": request_id, "routing_key": routing_key}
        request = lookup_request(features, weights or {})
        return read_lookup((yield from self._send("lookup", model, _encoded(request, options), ends)))

    def _describe(
        self, model: str, version: int | None = None, *, timeout_ms: int | None = None
    ) -> Steps[ranking_pb2.GetModelResponse]:
        """Ask what a model takes and what it is made of.

        Args:
            model: its name.
            version: the live one if None.
            timeout_ms: deadline, in place of the client's.

        Returns:
            The message `GetModelResponse`: `features` in the order of packed requests, `tables`, `dense_inputs`,
            `dense_model`, `limits`, `schema_digest`, `version`, `identity`.

        Raises:
            NotFoundError: no such model or version, or over HTTP a version that is not live.
            ClientError: as `rank`.
        """
        description = yield from self._described(model, version, self._ends(timeout_ms))
        if version is not None and description.version != version:
            problem = f"over HTTP only the live version is described, which is {description.version}, not {version}"
            raise NotFoundError(problem, kind="model_not_found", field="version")
        return description

    def _packed(self, model: str, version: int | None, given: RankFeatures, ends: float) -> Steps[Message]:
        """Pack a request, or put it by names for a version that the server does not describe."""
        key = model, version
        layout = self._layouts.get(key)
        was_known = layout is not None
        if layout is None:
            layout = yield from self._layout(key, ends)
        if version is not None and layout.version != version:
            return given.map_request()
        try:
            return layout.packed_request(given)
        except InvalidRequestError:
            # The model may have changed since it was described.
            if not was_known:
                raise
            newer = yield from self._layout(key, ends)
            if newer.digest == layout.digest:
                raise
        return newer.packed_request(given)

    def _layout(self, key: tuple[str, int | None], ends: float) -> Steps[Layout]:
        layout = Layout((yield from self._described(*key, ends)))
        while len(self._layouts) >= MAX_LAYOUTS and key not in self._layouts:
            self._layouts.pop(next(iter(self._layouts)), None)
        self._layouts[key] = layout
        return layout

    def _described(self, model: str, version: int | None, ends: float) -> Steps[ranking_pb2.GetModelResponse]:
        request = ranking_pb2.GetModelRequest()
        data = yield from self._send("model", model, _encoded(request, {"model": model, "version": version}), ends)
        return read_message(ranking_pb2.GetModelResponse, data)

    def _ends(self, timeout_ms: int | None) -> float:
        timeout_ms = self._timeout_ms if timeout_ms is None else timeout_ms
        if timeout_ms < 1:
            raise refused("invalid_field", "timeout_ms", f"{timeout_ms} is not 1 or more")
        return self._clock() + timeout_ms / 1000

    def _send(self, method: Method, model: str, body: bytes, ends: float) -> Steps[bytes]:
        """Make a call, and make it again as the policy allows."""
        self._budget.earn()
        policy, attempt = self._retry, 0
        while True:
            remaining_s = ends - self._clock()
            if remaining_s <= 0:
                raise DeadlineExceededError("the deadline passed before the call was made")
            try:
                answer = yield Call(method, model, body + _timeout(method, remaining_s), remaining_s)
            except (UnavailableError, OverloadedError) as error:
                attempt += 1
                pause_s = self._random() * min(policy.backoff_ms * 2 ** (attempt - 1), policy.max_backoff_ms) / 1000
                # Who is shed and not told when to come back would only add to the load.
                is_passing = isinstance(error, UnavailableError) or error.retry_after_s is not None
                pause_s += error.retry_after_s or 0.0
                in_time = self._clock() + pause_s < ends
                if not (is_passing and attempt < policy.max_attempts and in_time and self._budget.spend()):
                    raise
            else:
                assert answer is not None, "a call is answered with bytes"
                return answer
            yield pause_s


def _encoded(request: Message, options: dict[str, Any]) -> bytes:
    """Encode a message and what all requests have. Raises InvalidRequestError."""
    for name, value in options.items():
        try:
            if value is not None:
                setattr(request, name, value)
        except ValueError as error:
            # A number out of the field's range, or text that is not valid Unicode.
            raise refused("invalid_field", name, str(error)) from error
    return request.SerializeToString()


def _timeout(method: Method, seconds: float) -> bytes:
    """The field `timeout_ms`, to stand behind an encoded request."""
    if method == "model":
        return b""
    kind = ranking_pb2.RankRequest if method == "rank" else ranking_pb2.LookupRequest
    return kind(timeout_ms=min(2**32 - 1, max(1, round(1000 * seconds)))).SerializeToString()


def _blocking(
    steps: Callable[Concatenate[Requests, P], Steps[T]],
) -> Callable[Concatenate[Client, P], T]:
    @wraps(steps)
    def method(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._carry_out(steps(client, *args, **kwargs))

    return method


def _awaiting(
    steps: Callable[Concatenate[Requests, P], Steps[T]],
) -> Callable[Concatenate[AsyncClient, P], Awaitable[T]]:
    @wraps(steps)
    async def method(client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await client._carry_out(steps(client, *args, **kwargs))

    return method


class Client(Requests):
    """Ranks by blocking calls. One client may be used by many threads, and should be: it keeps connections.

    `Requests` says what it is made from.
    """

    _transports = (GrpcTransport, HttpTransport)
    _default_sleep = staticmethod(time.sleep)

    rank = _blocking(Requests._rank)
    lookup = _blocking(Requests._lookup)
    describe = _blocking(Requests._describe)

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _carry_out(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                if isinstance(step, Call):
                    try:
                        answer = self._transport.send(step)
                    except ClientError as error:
                        step = steps.throw(error)
                    else:
                        step = steps.send(answer)
                else:
                    self._sleep(step)
                    step = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


class AsyncClient(Requests):
    """Ranks on an event loop; all its requests are awaited on the same one.

    `Requests` says what it is made from.
    """

    _transports = (AsyncGrpcTransport, AsyncHttpTransport)
    _default_sleep = staticmethod(sleep_on_loop)

    rank = _awaiting(Requests._rank)
    lookup = _awaiting(Requests._lookup)
    describe = _awaiting(Requests._describe)

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _carry_out(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                if isinstance(step, Call):
                    try:
                        answer = await self._transport.send(step)
                    except ClientError as error:
                        step = steps.throw(error)
                    else:
                        step = steps.send(answer)
                else:
                    await self._sleep(step)
                    step = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
