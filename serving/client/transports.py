"""One call over HTTP or gRPC: a message out, bytes in, or a `ShardrankError` of the server's kind.

Coroutines that are awaited on an event loop (`on_loop`), or run by blocking calls, where they are never suspended.
Connections are kept. Proxies of the environment are not used: a ranking server is not outside.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args
from urllib.parse import quote, urlsplit

import grpc
import httpx
from google.protobuf.json_format import ParseDict, ParseError

from loader.errors import ConfigError, DeadlineExceededError, OverloadedError, ShardrankError, UnavailableError
from serving.errors import (
    InternalError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from serving.proto.shardrank.v1 import ranking_pb2

Method = Literal["Rank", "Lookup", "GetModel"]
Request: TypeAlias = ranking_pb2.RankRequest | ranking_pb2.LookupRequest | ranking_pb2.GetModelRequest
Token = str | Callable[[], str]
Exchanged: TypeAlias = tuple[httpx.Response, bytes]

# An answer to a lookup of the server's default limit is 4 MiB.
MAX_ANSWER_BYTES = 64 * 2**20
_MAX_CONNECTIONS = 256
_CONTENT_TYPE = "application/x-protobuf"
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # Each client has a connection of its own: several may reach several processes behind one port.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    # The library's second of waiting after a connection that failed is longer than most deadlines here.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also how long a connection may take to be made, and a busy server's settings frame to come.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 2000),
)

_BY_KIND: dict[str, type[ShardrankError]] = {
    "overloaded": OverloadedError,
    "buffer_full": OverloadedError,
    "memory_budget": InternalError,
    "header_too_large": InvalidRequestError,
}
_CLASSES = (
    *(InvalidRequestError, UnauthenticatedError, PermissionDeniedError, NotFoundError),
    # 503 is OverloadedError's as well, whose kind says so.
    *(DeadlineExceededError, UnavailableError),
)
_BY_STATUS: dict[int | str, type[ShardrankError]] = {
    **{status: error for error in _CLASSES for status in (error.http_status, error.grpc_status)},
    **dict.fromkeys(("FAILED_PRECONDITION", "OUT_OF_RANGE", "UNIMPLEMENTED"), InvalidRequestError),
    **dict.fromkeys((429, "RESOURCE_EXHAUSTED"), OverloadedError),
    408: DeadlineExceededError,
    502: UnavailableError,
}


@dataclass(frozen=True, slots=True)
class Target:
    """The arguments of `Client` that make a connection. Raises ConfigError."""

    address: str
    token: Token | None
    ca: str | Path | None
    cert: str | Path | None
    key: str | Path | None

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.address)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"address {self.address!r}: {error}", field="address") from error
        problem = ""
        if not self.address.startswith(("http://", "https://", "grpc://", "grpcs://")) or not parts.hostname:
            problem = "must be http://, https://, grpc:// or grpcs:// and a host"
        elif parts.scheme == "grpc" and not port:
            problem = "needs a port"
        elif "@" in parts.netloc or parts.query or parts.fragment or (self.is_grpc and parts.path.strip("/")):
            problem = "has more than scheme, host and port"
        elif (self.ca or self.cert or self.key) and not self.is_tls:
            problem = "has no TLS, so ca, cert and key have no use"
        if problem:
            raise ConfigError(f"address {self.address!r} {problem}", field="address")
        if (self.cert is None) != (self.key is None):
            raise ConfigError("cert and key are given together", field="cert")

    @property
    def is_grpc(self) -> bool:
        """Return whether it is gRPC, else HTTP."""
        return self.address.startswith("grpc")

    @property
    def is_tls(self) -> bool:
        """Return whether connections are encrypted."""
        return self.address.startswith(("grpcs", "https"))

    def authorization(self) -> list[tuple[str, str]]:
        """Return the header with the token, if there is one."""
        token = self.token() if callable(self.token) else self.token
        return [] if token is None else [("authorization", f"Bearer {token}")]


class Transport(Protocol):
    """What a client makes its calls by."""

    async def send(self, method: Method, request: Request, timeout_s: float, headers: Mapping[str, str]) -> Any:
        """Make one call; returns a message, or what is read from it. Raises ShardrankError."""

    async def close(self) -> None:
        """Close the connections."""


class GrpcTransport:
    """Calls over one channel. Raises OSError for a file that can't be read."""

    def __init__(self, target: Target, on_loop: bool) -> None:
        self._target = target
        self._on_loop = on_loop
        self._credentials: grpc.ChannelCredentials | None = None
        if target.is_tls:
            paths = (target.ca, target.key, target.cert)
            self._credentials = grpc.ssl_channel_credentials(
                *(None if path is None else Path(path).read_bytes() for path in paths)
            )
        self._channel: Any = None
        self._calls: dict[Method, Any] = {}
        if not on_loop:
            self._open(grpc)

    def _open(self, library: Any) -> None:
        at = urlsplit(self._target.address)
        if self._credentials is None:
            self._channel = library.insecure_channel(at.netloc, options=_CHANNEL_OPTIONS)
        else:
            authority = at.netloc if at.port else f"{at.netloc}:443"
            self._channel = library.secure_channel(authority, self._credentials, options=_CHANNEL_OPTIONS)
        for method in get_args(Method):
            self._calls[method] = self._channel.unary_unary(f"/shardrank.v1.RankingService/{method}", None, None)

    async def send(self, method: Method, request: Request, timeout_s: float, headers: Mapping[str, str]) -> bytes:
        """Make one call. Raises ShardrankError."""
        if self._channel is None:
            # Not before: the library ties a channel to the event loop that it finds then.
            self._open(grpc.aio)
        metadata = *self._target.authorization(), *((name.lower(), value) for name, value in headers.items())
        try:
            answer = self._calls[method](request.SerializeToString(), timeout=timeout_s, metadata=metadata)
            data: bytes = await answer if self._on_loop else answer
        except grpc.RpcError as error:
            # What calls raise is a `grpc.Call` too, blocking or not.
            raise _grpc_error(error) from error
        return data

    async def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            await self._channel.close(None) if self._on_loop else self._channel.close()


class HttpTransport:
    """Calls over kept-alive connections. Raises OSError for a file that can't be used.

    The deadline bounds each wait for the peer, and is compared between pieces of the answer. On a loop a call that is
    late or cancelled ends by that alone: httpcore's pool would keep what was cancelled on its way for good.
    """

    def __init__(self, target: Target, on_loop: bool) -> None:
        self._target = target
        self._on_loop, self._free = on_loop, asyncio.Semaphore(_MAX_CONNECTIONS)
        self._exchanging, self._is_closed = set[asyncio.Task[Exchanged]](), False
        verify: ssl.SSLContext | bool = False
        if target.is_tls:
            verify = ssl.create_default_context(cafile=target.ca)
            if target.cert is not None:
                verify.load_cert_chain(target.cert, target.key)
        self._client: Any = (httpx.AsyncClient if on_loop else httpx.Client)(
            base_url=target.address,
            verify=verify,
            trust_env=False,
            headers={"accept-encoding": "identity"},
            # A connection for each call at once, and none is closed because there are many.
            limits=httpx.Limits(max_connections=_MAX_CONNECTIONS, max_keepalive_connections=_MAX_CONNECTIONS),
        )

    async def send(self, method: Method, request: Request, timeout_s: float, headers: Mapping[str, str]) -> bytes:
        """Make one call. Raises ShardrankError."""
        verb, path, body = "GET", f"/v1/models/{quote(request.model, safe='')}", b""
        fields = [*self._target.authorization(), *headers.items()]
        if method != "GetModel":
            verb, path, body = "POST", f"{path}:{method.lower()}", request.SerializeToString()
            fields += [("content-type", _CONTENT_TYPE), ("accept", _CONTENT_TYPE)]
        timeout = httpx.Timeout(timeout_s)
        message = self._client.build_request(verb, path, content=body or None, headers=fields, timeout=timeout)
        exchange = self._exchange(message, time.monotonic() + timeout_s)
        try:
            response, body = await (self._until(timeout_s, exchange) if self._on_loop else exchange)
        except (httpx.TimeoutException, TimeoutError) as error:
            raise DeadlineExceededError(f"no answer within {1000 * timeout_s:.0f} ms") from error
        except (httpx.HTTPError, OSError) as error:
            # What TLS refuses after its handshake comes through httpx as it is.
            raise UnavailableError(f"{self._target.address}: {type(error).__name__}: {error}") from error
        if response.status_code != httpx.codes.OK:
            raise http_error(response.status_code, body, response.headers.get("retry-after"))
        return _described(body) if method == "GetModel" else body

    async def _until(self, timeout_s: float, exchange: Coroutine[Any, Any, Exchanged]) -> Exchanged:
        """Wait for an exchange, which goes on if it is late. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            try:
                await self._free.acquire()
            except BaseException:
                exchange.close()
                raise
            exchanging = asyncio.create_task(exchange)
            self._exchanging.add(exchanging)
            exchanging.add_done_callback(self._over)
            await asyncio.wait([exchanging])
        return exchanging.result()

    def _over(self, exchanging: asyncio.Task[Exchanged]) -> None:
        self._free.release()
        self._exchanging.discard(exchanging)
        if not exchanging.cancelled():
            exchanging.exception()

    async def _exchange(self, message: httpx.Request, ends: float) -> Exchanged:
        if self._is_closed:
            raise UnavailableError("this client is closed", kind="closed")

        async def trace(event: str, _info: Any) -> None:
            if event.endswith("send_request_headers.started") and time.monotonic() > ends:
                raise TimeoutError

        if self._on_loop:
            # No request is sent for an answer that nobody waits for any more.
            message.extensions["trace"] = trace
        parts, size, answer = [], 0, self._client.send(message, stream=True)
        response: httpx.Response = await answer if self._on_loop else answer
        try:
            async for part in response.aiter_raw() if self._on_loop else _pieces(response):
                parts.append(part)
                size += len(part)
                if size > MAX_ANSWER_BYTES:
                    problem = f"the answer has more than the {MAX_ANSWER_BYTES} bytes that a client takes"
                    raise InternalError(problem, kind="answer_too_large")
                if time.monotonic() > ends:
                    raise TimeoutError
        finally:
            await response.aclose() if self._on_loop else response.close()
        return response, b"".join(parts)

    async def close(self) -> None:
        """Close the connections; exchanges on a loop are cancelled with them."""
        self._is_closed = True
        if self._on_loop:
            for exchanging in self._exchanging:
                exchanging.cancel()
            if self._exchanging:
                await asyncio.wait(self._exchanging)
            await self._client.aclose()
        else:
            self._client.close()


async def _pieces(response: httpx.Response) -> AsyncIterator[bytes]:
    for piece in response.iter_raw():
        yield piece


def _described(body: bytes) -> bytes:
    """Make the message of a model's description of the document that HTTP has for it. Raises InternalError."""
    try:
        document = json.loads(body)
        limits = document.get("limits", {})
        # As over gRPC, where a limit is a number.
        document["limits"] = {name: value for name, value in limits.items() if isinstance(value, int | float)}
        description = ParseDict(document, ranking_pb2.GetModelResponse(), ignore_unknown_fields=True)
    except (ValueError, RecursionError, AttributeError, ParseError) as error:
        raise InternalError(f"the answer does not describe a model: {error}", kind="malformed_answer") from error
    return description.SerializeToString()


def _grpc_error(call: Any) -> ShardrankError:
    trailers = {name: str(value) for name, value in call.trailing_metadata() or ()}
    status, message, pushback_ms = call.code().name, call.details() or "", trailers.get("grpc-retry-pushback-ms", "")
    known = {"grpc_status": status, "retry_after_s": int(pushback_ms) / 1000 if pushback_ms.isdecimal() else None}
    return _error(trailers.get("shardrank-error-kind", ""), status, message, None, known)


def http_error(status: int, body: bytes, retry_after: str | None) -> ShardrankError:
    """Return the error that an HTTP answer carries. A `retry-after` that is a date is passed over."""
    try:
        content: dict[str, Any] = json.loads(body)["error"]
        message, kind, field = str(content["message"]), str(content["kind"]), str(content.get("field") or "")
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        # Not of this project: a proxy's page, perhaps. Its beginning is the best there is.
        message, kind, field = f"HTTP status {status}: {body[:300].decode('utf-8', 'replace')}", "", ""
    wait_s = float(retry_after) if retry_after and retry_after.isdecimal() else None
    return _error(kind, status, message, field, {"http_status": status, "retry_after_s": wait_s})


def _error(kind: str, status: int | str, message: str, field: str | None, known: dict[str, Any]) -> ShardrankError:
    is_refused = isinstance(status, int) and status < httpx.codes.INTERNAL_SERVER_ERROR
    error = _BY_KIND.get(kind) or _BY_STATUS.get(status, InvalidRequestError if is_refused else InternalError)
    known["kind"] = kind or None
    if error is not InvalidRequestError:
        return error(message, field=field or "", **known)
    if field is None:
        # gRPC carries no field of its own; a text about one begins with it.
        match = re.match(r"(\S+): ", message)
        field = match[1] if match else ""
    return InvalidRequestError(field, message.removeprefix(f"{field}: "), **known)
