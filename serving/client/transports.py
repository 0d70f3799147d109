"""One call over HTTP or gRPC, blocking or on an event loop: bytes out, bytes in, or a `ClientError`.

Connections are kept and used again. Proxies of the environment are not asked: they are for the way out, and a ranking
server is not outside.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import grpc
import httpx
from google.protobuf.json_format import ParseDict, ParseError

from serving.client.errors import (
    ClientConfigError,
    ClientError,
    DeadlineExceededError,
    InternalError,
    UnavailableError,
    grpc_error,
    http_error,
)
from serving.proto.shardrank.v1 import ranking_pb2

Method = Literal["rank", "lookup", "model"]
Token = str | Callable[[], str]
Clock = Callable[[], float]

CONTENT_TYPE = "application/x-protobuf"
# An answer to a lookup of the server's default limit is 4 MiB.
MAX_ANSWER_BYTES = 64 * 2**20
_OK = 200
_PORTS = {"http": 80, "https": 443, "grpc": None, "grpcs": 443}
_ERROR_KIND = "shardrank-error-kind"
_METHODS: dict[Method, str] = {"rank": "Rank", "lookup": "Lookup", "model": "GetModel"}
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    # The library's second of waiting after a connection that failed is longer than most deadlines here.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


@dataclass(frozen=True, slots=True)
class Call:
    """One attempt.

    Attributes:
        method: what is asked.
        model: that is meant.
        body: the encoded message: `RankRequest`, `LookupRequest`, `GetModelRequest`.
        timeout_s: seconds that it may take.
    """

    method: Method
    model: str
    body: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Target:
    """Where the server is, and what a connection to it takes.

    Attributes:
        scheme: `http`, `https`, `grpc` or `grpcs`.
        host: name or address, without brackets.
        port: number.
        path: before `/v1`, over HTTP behind a gateway; else "".
        token: sent as a bearer token, or what gives it for each call; None for none.
        ca, cert, key: PEM files; see `Client`.
    """

    scheme: str
    host: str
    port: int
    path: str
    token: Token | None
    ca: Path | None
    cert: Path | None
    key: Path | None

    @classmethod
    def of(
        cls, address: str, token: Token | None, ca: str | Path | None, cert: str | Path | None, key: str | Path | None
    ) -> Target:
        """Read an address such as `grpc://ranking:8081`. Raises ClientConfigError."""
        try:
            parts = urlsplit(address)
            port = parts.port or _PORTS.get(parts.scheme)
        except ValueError as error:
            raise ClientConfigError(f"address {address!r}: {error}", field="address") from error
        if parts.scheme not in _PORTS or not parts.hostname:
            wanted = "must be http://, https://, grpc:// or grpcs:// and a host"
            raise ClientConfigError(f"address {address!r} {wanted}", field="address")
        if port is None:
            raise ClientConfigError(f"address {address!r} needs a port", field="address")
        path, is_grpc = parts.path.rstrip("/"), parts.scheme.startswith("grpc")
        if parts.username is not None or parts.query or parts.fragment or (is_grpc and path):
            raise ClientConfigError(f"address {address!r} has more than scheme, host and port", field="address")
        files = [None if one is None else Path(one) for one in (ca, cert, key)]
        if any(files) and not parts.scheme.endswith("s"):
            problem = f"address {address!r} has no TLS, so ca, cert and key have no use"
            raise ClientConfigError(problem, field="address")
        if (cert is None) != (key is None):
            raise ClientConfigError("cert and key are given together", field="cert")
        return cls(parts.scheme, parts.hostname, port, path, token, *files)

    @property
    def is_grpc(self) -> bool:
        """Whether it is gRPC."""
        return self.scheme.startswith("grpc")

    @property
    def authority(self) -> str:
        """Host and port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def authorization(self) -> list[tuple[str, str]]:
        """The header with the token."""
        if self.token is None:
            return []
        return [("authorization", f"Bearer {self.token if isinstance(self.token, str) else self.token()}")]

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """What gRPC wants for TLS. Raises ClientConfigError."""
        try:
            ca, cert, key = (None if one is None else one.read_bytes() for one in (self.ca, self.cert, self.key))
        except OSError as error:
            raise ClientConfigError(f"{error.filename}: {error.strerror}", field="ca") from error
        return grpc.ssl_channel_credentials(ca, key, cert)

    def http_options(self) -> dict[str, Any]:
        """Arguments of `httpx.Client`. Raises ClientConfigError."""
        verify: ssl.SSLContext | bool = False
        if self.scheme == "https":
            try:
                verify = ssl.create_default_context(cafile=self.ca)
                if self.cert is not None:
                    verify.load_cert_chain(self.cert, self.key)
            except OSError as error:
                raise ClientConfigError(f"ca, cert, key: {error}", field="ca") from error
        return {
            "base_url": f"{self.scheme}://{self.authority}{self.path}",
            "verify": verify,
            "trust_env": False,
            "headers": {"accept-encoding": "identity"},
            # A connection for each call at once, and none is closed because there are many.
            "limits": httpx.Limits(max_connections=256, max_keepalive_connections=256),
        }


class GrpcTransport:
    """Blocking calls over one channel, from any thread."""

    def __init__(self, target: Target) -> None:
        self._target = target
        if target.scheme == "grpcs":
            credentials = target.channel_credentials()
            self._channel = grpc.secure_channel(target.authority, credentials, options=_CHANNEL_OPTIONS)
        else:
            self._channel = grpc.insecure_channel(target.authority, options=_CHANNEL_OPTIONS)
        self._methods = {method: self._channel.unary_unary(_path(method), None, None) for method in _METHODS}

    def send(self, call: Call) -> bytes:
        """Make one call. Raises ClientError."""
        metadata = tuple(self._target.authorization())
        try:
            answer: bytes = self._methods[call.method](call.body, timeout=call.timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise _of_grpc(error) from error
        return answer

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


class AsyncGrpcTransport:
    """Calls over one channel of `grpc.aio`, which belongs to the event loop of the first one."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._credentials = target.channel_credentials() if target.scheme == "grpcs" else None
        self._channel: grpc.aio.Channel | None = None
        self._methods: dict[Method, Any] = {}

    async def send(self, call: Call) -> bytes:
        """Make one call. Raises ClientError."""
        if self._channel is None:
            self._open()
        metadata = tuple(self._target.authorization())
        try:
            answer: bytes = await self._methods[call.method](call.body, timeout=call.timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise _of_grpc(error) from error
        return answer

    async def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            await self._channel.close(None)

    def _open(self) -> None:
        at = self._target.authority
        if self._credentials is None:
            self._channel = grpc.aio.insecure_channel(at, options=_CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(at, self._credentials, options=_CHANNEL_OPTIONS)
        self._methods = {method: self._channel.unary_unary(_path(method), None, None) for method in _METHODS}


class HttpTransport:
    """Blocking calls over kept-alive connections, from any thread.

    The deadline bounds each wait for the peer, and is looked at between pieces of the answer.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._client = httpx.Client(**target.http_options())

    def send(self, call: Call) -> bytes:
        """Make one call. Raises ClientError."""
        ends = time.monotonic() + call.timeout_s
        try:
            response = self._client.send(_http_request(self._client, self._target, call), stream=True)
            try:
                parts, size = [], 0
                for part in response.iter_raw():
                    parts.append(part)
                    size += len(part)
                    _check_size(size)
                    if time.monotonic() > ends:
                        raise _late(call)
            finally:
                response.close()
        except (httpx.HTTPError, OSError) as error:
            raise _of_httpx(error, call) from error
        return _http_answer(call, response, b"".join(parts))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class AsyncHttpTransport:
    """Calls over kept-alive connections on an event loop."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._client = httpx.AsyncClient(**target.http_options())

    async def send(self, call: Call) -> bytes:
        """Make one call. Raises ClientError."""
        try:
            async with asyncio.timeout(call.timeout_s):
                response = await self._client.send(_http_request(self._client, self._target, call), stream=True)
                try:
                    parts, size = [], 0
                    async for part in response.aiter_raw():
                        parts.append(part)
                        size += len(part)
                        _check_size(size)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise _late(call) from None
        except (httpx.HTTPError, OSError) as error:
            raise _of_httpx(error, call) from error
        return _http_answer(call, response, b"".join(parts))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _path(method: Method) -> str:
    return f"/shardrank.v1.RankingService/{_METHODS[method]}"


def _of_grpc(error: grpc.RpcError) -> ClientError:
    # What calls raise is a `grpc.Call` too, blocking or not.
    call: Any = error
    kinds = [value for name, value in call.trailing_metadata() or () if name == _ERROR_KIND]
    return grpc_error(call.code().name, call.details() or "", str(kinds[0]) if kinds else "")


def _http_request(client: httpx.Client | httpx.AsyncClient, target: Target, call: Call) -> httpx.Request:
    headers, timeout = target.authorization(), httpx.Timeout(call.timeout_s)
    path = f"/v1/models/{quote(call.model, safe='')}"
    if call.method == "model":
        return client.build_request("GET", path, headers=headers, timeout=timeout)
    headers += [("content-type", CONTENT_TYPE), ("accept", CONTENT_TYPE)]
    return client.build_request("POST", f"{path}:{call.method}", content=call.body, headers=headers, timeout=timeout)


def _http_answer(call: Call, response: httpx.Response, body: bytes) -> bytes:
    if response.status_code != _OK:
        raise http_error(response.status_code, body, response.headers.get("retry-after"))
    if call.method != "model":
        return body
    try:
        description = ranking_pb2.GetModelResponse()
        document = json.loads(body)
        limits = document.get("limits", {})
        # As over gRPC, where a limit is a number.
        document["limits"] = {name: value for name, value in limits.items() if isinstance(value, int | float)}
        ParseDict(document, description, ignore_unknown_fields=True)
    except (ValueError, AttributeError, ParseError) as error:
        raise InternalError(f"the answer does not describe a model: {error}", kind="malformed_answer") from error
    return description.SerializeToString()


def _check_size(size: int) -> None:
    if size > MAX_ANSWER_BYTES:
        problem = f"the answer has more than the {MAX_ANSWER_BYTES} bytes that a client takes"
        raise InternalError(problem, kind="answer_too_large")


def _late(call: Call) -> DeadlineExceededError:
    return DeadlineExceededError(f"no answer within {1000 * call.timeout_s:.0f} ms")


def _of_httpx(error: httpx.HTTPError | OSError, call: Call) -> ClientError:
    # What TLS refuses after its handshake comes through httpx as it is.
    if isinstance(error, httpx.TimeoutException | TimeoutError):
        return _late(call)
    return UnavailableError(f"{type(error).__name__}: {error}")
