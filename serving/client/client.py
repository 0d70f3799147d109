"""`Client` and `AsyncClient`: requests to a ranking server.

A request's steps (describe the model once, pack, send, try again) are coroutines. An `AsyncClient` awaits them; those
of a `Client` block where they would be suspended, so that they end in their first step.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random as random_numbers
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar

from loader.errors import ConfigError, DeadlineExceededError, OverloadedError, ShardrankError, UnavailableError
from serving.client import features
from serving.client.transports import GrpcTransport, HttpTransport, Method, Request, Target, Token, Transport
from serving.errors import InvalidRequestError, NotFoundError, invalid_field
from serving.proto.shardrank.v1 import ranking_pb2
from serving.results import LookupResult, RankResult

P = ParamSpec("P")
T = TypeVar("T")

MAX_LAYOUTS = 64
EJECTION_S = 1.0
"""For so long an address that failed comes after the others; then one request at a time tries it."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a call is made again: the server was not reached, was not ready, or said when to come back.

    Never after a refusal or past the deadline. Waits are drawn from 0 to a bound that doubles.

    Attributes:
        max_attempts: calls for one request, the first one included; 1 for no retries.
        backoff_ms: bound of the first wait.
        max_backoff_ms: bound of any wait, `retry-after` apart.
        budget_ratio: retries for each request over time, which bounds the load on a server that is down.
        budget_burst: retries that may come at once, after a time without any.
    """

    max_attempts: int = 3
    backoff_ms: float = 25.0
    max_backoff_ms: float = 1000.0
    budget_ratio: float = 0.1
    budget_burst: float = 10.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigError(f"max_attempts {self.max_attempts} is not 1 or more", field="max_attempts")
        for name in ("backoff_ms", "max_backoff_ms", "budget_ratio", "budget_burst"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} {getattr(self, name)} is not 0 or more", field=name)


@dataclass(slots=True, eq=False)
class _Server:
    transport: Transport
    ejected_until: float = -math.inf


class Requests:
    """What both clients are made from.

    Args:
        address: `grpc://host:port`, `grpcs://host:port`, `http://host:port` or `https://host:port`; the last two may
            have a path, for a gateway. Several of servers of one fleet are used in turn, and in place of one another:
            an attempt may take half of the time left, if another one may follow. Or what makes the calls.
        token: sent with every call as `authorization: Bearer ...`; or a function that returns it.
        ca: PEM file of the authorities that may have signed the server's certificate; those of the system if None.
        cert, key: PEM files of the client's certificate and its key, for mutual TLS.
        timeout_ms: deadline of a request without one, retries included.
        retry: when calls are made again.
        random: returns numbers in [0, 1).
        clock: seconds.
        sleep: waits for seconds; an `AsyncClient` awaits it.

    Raises:
        ConfigError: an address or a file that can't be used.
    """

    _on_loop: ClassVar[bool]

    def __init__(
        self,
        address: str | Sequence[str] | Transport,
        *,
        token: Token | None = None,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        key: str | Path | None = None,
        timeout_ms: int = 1000,
        retry: RetryPolicy | None = None,
        random: Callable[[], float] = random_numbers.random,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Any] | None = None,
    ) -> None:
        self._servers, self._round = list[_Server](), itertools.count()
        if isinstance(address, str | Sequence):
            addresses = [address] if isinstance(address, str) else address
            try:
                for target in [Target(each, token, ca, cert, key) for each in addresses]:
                    kind = GrpcTransport if target.is_grpc else HttpTransport
                    self._servers.append(_Server(kind(target, self._on_loop)))
            except OSError as error:
                raise ConfigError(f"ca, cert, key: {error}", field="ca") from error
            if not addresses:
                raise ConfigError("address: there is none in the list", field="address")
        else:
            self._servers.append(_Server(address))
        self._is_closed = False
        self._timeout_ms = timeout_ms
        self._retry = retry or RetryPolicy()
        # A request earns a part of a token, a retry costs one.
        self._tokens, self._lock = self._retry.budget_burst, threading.Lock()
        self._random = random
        self._clock = clock
        self._sleep: Callable[[float], Any] = sleep or (asyncio.sleep if self._on_loop else time.sleep)
        # By model and by the version that was asked for, None for the live one.
        self._layouts: dict[str, features.Layout] = {}

    async def _rank(
        self,
        model: str,
        context: features.Features = features.NO_FEATURES,
        candidates: features.Features = features.NO_FEATURES,
        *,
        context_dense: features.Values = None,
        candidate_dense: features.Values = None,
        weights: features.Features | None = None,
        top_k: int | None = None,
        request_id: str = "",
        routing_key: str = "",
        version: int | None = None,
        timeout_ms: int | None = None,
        max_age_ms: int | None = None,
        min_sequence: int | None = None,
        return_missing: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> RankResult:
        """Score candidates: float32 [N], and their order.

        N is the number of candidates. Arrays are anything that NumPy takes as one; flat arrays and `Ragged` cost no
        work for each id, lists one pass. A body of the JSON form is a request too: `rank(model, **body)`.

        Args:
            model: its name.
            context: by feature, its ids: integers or strings, a flat list or array, or a single one. Or, as in the JSON
                form, an object of `sparse`, which are these, `weights` and `dense`.
            candidates: by feature, the ids of all candidates, in one order for all features. One id for each: flat,
                [N]. Several: a list of N lists, an array [N, K], or `Ragged` with the values and N lengths. Or an
                object, likewise.
            context_dense: numbers [Kc], as many as the model takes.
            candidate_dense: numbers [N, Kd].
            weights: by feature, for features that the model weights, of either side: numbers in the shape of the ids;
                for `Ragged` ids also flat. All 1 for features that are not named.
            top_k: how many positions `order` shall have; all if None.
            request_id: comes back with the answer, and stands in traces.
            routing_key: whose request it is: while a canary is on, the same key gets the same version.
            version: that must answer; the live one, or the canary, if None.
            timeout_ms: deadline of the request, in place of the client's.
            max_age_ms: how old rows may be, any age if None; if all are older, UnavailableError (`rows_stale`).
            min_sequence: the row update that rows must be of, or a later one; likewise.
            return_missing: whether to tell which keys their tables have not.
            headers: sent with its calls, as metadata over gRPC: `traceparent`, for the server's part of a trace.

        Raises:
            InvalidRequestError: the request does not fit the model; `field` says where.
            ShardrankError: docs/errors.md has all of them.
        """
        ends = self._ends(timeout_ms)
        given = features.RankFeatures(context, candidates, weights or {}, context_dense, candidate_dense)
        key = f"{model}/{version}"
        layout = self._layouts.get(key) or await self._new_layout(key, model, version, ends)
        if top_k is not None:
            _check_number("top_k", top_k)
        options = {"model": model, "version": version, "top_k": top_k, "return_missing": return_missing}
        options |= {"max_age_ms": max_age_ms, "min_sequence": min_sequence}
        options |= {"request_id": request_id, "routing_key": routing_key}
        read = partial(features.read_rank, with_missing=return_missing)
        if version in (None, layout.version):
            try:
                if request := layout.packed(given):
                    return read(await self._send("Rank", request, options, ends, headers))
            except InvalidRequestError as error:
                if error.kind != "schema_digest":
                    raise
            # Another version answers than the one described, by a flip or a canary: names fit any version.
            self._layouts.pop(key, None)
        return read(await self._send("Rank", given.by_name(), options, ends, headers))

    async def _new_layout(self, key: str, model: str, version: int | None, ends: float) -> features.Layout:
        layout = features.Layout(await self._described(model, version, ends))
        while len(self._layouts) >= MAX_LAYOUTS:
            self._layouts.pop(next(iter(self._layouts)), None)
        self._layouts[key] = layout
        return layout

    async def _lookup(
        self,
        model: str,
        sparse: features.Features,
        *,
        weights: features.Features | None = None,
        request_id: str = "",
        routing_key: str = "",
        version: int | None = None,
        timeout_ms: int | None = None,
        max_age_ms: int | None = None,
        min_sequence: int | None = None,
        return_missing: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> LookupResult:
        """Look up embeddings, pooled as the model pools them; `Ragged` of features that it does not pool.

        `sparse` are, by feature, any number of bags of ids, as candidates of `rank`; flat ids are one bag each. Any
        feature may be left out. All else is as in `rank`, and in the JSON form: `lookup(model, **body)`.
        """
        options = {"model": model, "version": version, "request_id": request_id, "routing_key": routing_key}
        options |= {"max_age_ms": max_age_ms, "min_sequence": min_sequence, "return_missing": return_missing}
        request = features.lookup_request(sparse, weights or {})
        answer = await self._send("Lookup", request, options, self._ends(timeout_ms), headers)
        return features.read_lookup(answer, with_missing=return_missing)

    async def _describe(
        self, model: str, version: int | None = None, *, timeout_ms: int | None = None
    ) -> ranking_pb2.GetModelResponse:
        """Return the description of a model's version, the live one if None.

        The message `GetModelResponse` has `features` in the order of packed requests, `tables`, `dense_inputs`,
        `dense_model`, `limits`, `schema_digest`, `version`, `identity`.

        Raises:
            NotFoundError: no such model or version, or over HTTP a version that is not live.
            ShardrankError: as `rank`.
        """
        description = await self._described(model, version, self._ends(timeout_ms))
        if version is not None and description.version != version:
            problem = f"over HTTP only the live version is described, which is {description.version}, not {version}"
            raise NotFoundError(problem, kind="model_not_found", field="version")
        return description

    async def _close(self) -> None:
        """Close the connections; calls after it raise UnavailableError of the kind `closed`."""
        self._is_closed = True
        for server in self._servers:
            await server.transport.close()

    async def _described(self, model: str, version: int | None, ends: float) -> ranking_pb2.GetModelResponse:
        data = await self._send("GetModel", ranking_pb2.GetModelRequest(), {"model": model, "version": version}, ends)
        return features.read_message(ranking_pb2.GetModelResponse, data)

    def _closed(self) -> UnavailableError | None:
        problem = f"this {type(self).__name__} is closed; make another one"
        return UnavailableError(problem, kind="closed") if self._is_closed else None

    def _next_server(self, failed: _Server | None) -> _Server:
        """Return the next server that is not ejected, if possible not `failed`; or else the first not ejected again."""
        now, start = self._clock(), next(self._round) % len(self._servers)
        with self._lock:
            server = min(
                self._servers[start:] + self._servers[:start],
                key=lambda server: (max(server.ejected_until, now), server is failed),
            )
            if server.ejected_until > -math.inf:
                # Until it has answered, no other request needs to wait for it.
                server.ejected_until = now + EJECTION_S
        return server

    def _add_tokens(self, count: float) -> None:
        with self._lock:
            self._tokens = min(self._retry.budget_burst, self._tokens + count)

    def _took_token(self) -> bool:
        with self._lock:
            is_there = self._tokens >= 1
            self._tokens -= is_there
        return is_there

    def _ends(self, timeout_ms: int | None) -> float:
        timeout_ms = self._timeout_ms if timeout_ms is None else timeout_ms
        _check_number("timeout_ms", timeout_ms)
        return self._clock() + timeout_ms / 1000

    async def _send(
        self,
        method: Method,
        request: Request,
        options: dict[str, Any],
        ends: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        for name, value in options.items():
            try:
                if value is not None:
                    setattr(request, name, value)
            except (TypeError, ValueError) as error:
                # No number, one out of the field's range, or text that is not valid Unicode.
                raise invalid_field(name, f"{value!r:.80}: {error}") from error
        policy, attempt, server = self._retry, 0, None
        self._add_tokens(policy.budget_ratio)
        while True:
            if (closed := self._closed()) is not None:
                raise closed
            remaining_s = ends - self._clock()
            if remaining_s <= 0:
                raise DeadlineExceededError("the deadline passed before the call was made")
            if not isinstance(request, ranking_pb2.GetModelRequest):
                request.timeout_ms = min(2**32 - 1, max(1, round(1000 * remaining_s)))
            server, has_others = self._next_server(server), len(self._servers) > 1
            is_paid = has_others and attempt + 1 < policy.max_attempts and self._took_token()
            attempt_s = remaining_s / 2 if is_paid else remaining_s
            try:
                answer = await server.transport.send(method, request, attempt_s, headers or {})
                server.ejected_until = -math.inf
                return answer
            except (ShardrankError, asyncio.CancelledError) as error:
                task = asyncio.current_task() if self._on_loop else None
                if (closed := self._closed()) is not None and (task is None or not task.cancelling()):
                    raise closed from error
                retried = (UnavailableError, OverloadedError, *((DeadlineExceededError,) if has_others else ()))
                if not isinstance(error, retried):
                    raise
                if not isinstance(error, OverloadedError):
                    server.ejected_until = self._clock() + EJECTION_S
                attempt += 1
                pause_s = self._random() * min(policy.backoff_ms * 2 ** (attempt - 1), policy.max_backoff_ms) / 1000
                # After an overload without `retry-after`, a retry at the same server would only add to its load.
                is_passing = has_others or not isinstance(error, OverloadedError) or error.retry_after_s is not None
                if attempt >= len(self._servers):
                    pause_s += error.retry_after_s or 0.0
                is_in_time = attempt < policy.max_attempts and self._clock() + pause_s < ends
                if not (is_passing and is_in_time and (is_paid or self._took_token())):
                    raise
                is_paid = False
            finally:
                self._add_tokens(is_paid)
            slept = self._sleep(pause_s)
            if self._on_loop:
                await slept


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, Real) or not 1 <= float(value) < 2**32:
        raise invalid_field(name, f"{value!r:.80} is not a number of 1 or more, and below 2^32")


def _blocking(request: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Client, P], T]:
    """Make a method of a coroutine that is never suspended."""

    @wraps(request)
    def method(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            request(client, *args, **kwargs).send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        raise AssertionError("a call that blocks was suspended")

    return method


class Client(Requests):
    """Ranks by blocking calls, from any thread; made as `Requests`. Share one: it keeps connections."""

    _on_loop = False
    rank = _blocking(Requests._rank)
    lookup = _blocking(Requests._lookup)
    describe = _blocking(Requests._describe)
    close = _blocking(Requests._close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(Requests):
    """Ranks on one event loop; made as `Requests`."""

    _on_loop = True
    rank = Requests._rank
    lookup = Requests._lookup
    describe = Requests._describe
    close = Requests._close

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
