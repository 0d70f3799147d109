"""The HTTP API: an ASGI application that ranks by itself, and ports for operators on a thread of their own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import re
import ssl as tls
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Literal, TypeAlias

import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from loader.errors import OverloadedError, ShardrankError
from serving.api.bodies import CODINGS, expand, read_body
from serving.api.documents import create_documents, create_probes
from serving.api.http_connection import Exchange, HttpServer
from serving.api.http_messages import Fields, HttpReply, error_reply, internal_error_reply
from serving.api.listening import CountFailure
from serving.api.tokens import Tokens
from serving.dashboard.board import Source, run_board
from serving.errors import invalid_field
from serving.formats.infer import InferHttpCodec
from serving.formats.json_reader import JsonCodec
from serving.formats.messages import MessageCodec
from serving.formats.requests import Buffer, Codec
from serving.limits import RequestLimits
from serving.observe.traces import TRACEPARENT, parent_of
from serving.rank.service import RankingService, answer
from shard_node.wire.address import Address

ADMIN_DRAIN_TIMEOUT_S = 1.0
PROTOBUF = b"application/x-protobuf"
# No colon in a model's name, so that what follows one can only be an action.
_ROUTE = re.compile(
    r"/v1/models/(?P<model>[^/:]+):(?P<method>rank|lookup)"
    r"|/v2/models/(?P<infer>[^/:]+)(?:/versions/(?P<version>[^/]+))?/infer"
)


class HttpApp:
    """The HTTP API of a service; `documents` has all paths that do not rank. Without `tokens` all is allowed."""

    def __init__(self, service: RankingService, tokens: Tokens | None = None) -> None:
        self._service = service
        self._tokens = tokens
        # Of the requests whose heads are read in this loop iteration.
        self._num_admitted = 0
        self._refusal: OverloadedError | None = None
        self._refused: Counter[tuple[str, str]] = Counter()
        self.documents = create_documents(service, tokens)
        self._documents = answered_once(self.documents)

    def admit(self, exchange: Exchange) -> HttpReply | None:
        """Match the route of a request by its head; answer it if it would wait in vain.

        Its token is not checked: the refusal says nothing of what is served.
        """
        if exchange.method != "POST" or (route := _ROUTE.fullmatch(exchange.path)) is None:
            return None
        exchange.route = route
        if not (self._num_admitted or self._refused):
            asyncio.get_running_loop().call_soon(self._end_iteration)
        # In so short a time next to nothing is done of what waits: what follows a refused request is refused too.
        error = self._refusal = self._refusal or self._service.overload(None, self._num_admitted)
        if error is None:
            self._num_admitted += 1
            return None
        self._refused[("oip_http", "rank") if route["model"] is None else ("http", route["method"])] += 1
        return error_reply(exchange.path, exchange.request_id, error)

    def _end_iteration(self) -> None:
        """Count the refused; forget the admitted: those that are complete are about to be queued."""
        for (api, method), count in self._refused.items():
            self._service.refused(api, method, OverloadedError.kind, count)
        self._refused.clear()
        self._num_admitted, self._refusal = 0, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange: Exchange = scope["state"]["exchange"]
        if exchange.route is None:
            await self._documents(scope, receive, send)
            return
        service, fields = self._service, exchange.fields
        try:
            if self._tokens is not None:
                self._tokens.check(_text(fields, b"authorization"), "rank")
            codec, codings = _codec(exchange.route, fields)
            parent = None
            if service.tracer is not None and TRACEPARENT in fields:
                parent = parent_of(fields, scope["headers"])
            read: Callable[[], Awaitable[Buffer]] = partial(
                read_body, receive, "max_body_bytes", service.limits.max_body_bytes
            )
            if b"content-encoding" in fields:
                read = partial(self._expanded, exchange, codings, read)
            encoded = await answer(service, codec, read, exchange, parent)
            reply = HttpReply(200, encoded.body, encoded.content_type, encoded.headers)
        except ShardrankError as error:
            reply = error_reply(exchange.path, exchange.request_id, error)
        except Exception:
            reply = internal_error_reply(exchange.path, exchange.request_id)
        await send({"type": "http.response.start", "status": reply.status, "headers": reply.header_lines()})
        await send({"type": "http.response.body", "body": reply.body})

    async def _expanded(
        self, exchange: Exchange, codings: tuple[str, ...], read: Callable[[], Awaitable[Buffer]]
    ) -> Buffer:
        coding = (_text(exchange.fields, b"content-encoding") or "identity").lower()
        if coding != "identity" and coding not in codings:
            others = f", or coded as {' or '.join(codings)}" if codings else ""
            says = f"{coding[:40]!r} is not supported; send the body as it is{others}"
            raise invalid_field("content-encoding", says)
        body = await read()
        if coding == "identity":
            return body
        connection, limit = exchange.connection, self._service.limits.max_body_bytes
        return await expand(body, limit, connection.account, connection.spent, self._service.expanding)


def answered_once(app: ASGIApp) -> ASGIApp:
    """Return an application without the errors that Starlette raises again once it has answered them."""

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Exception:
            if not scope["state"]["exchange"].is_answered:
                raise

    return answering


def _codec(route: re.Match[str], fields: Fields) -> tuple[Codec, tuple[str, ...]]:
    """Choose how a request is read, and the content codings that it may have."""
    model = route["model"]
    if model is None:
        length = _text(fields, b"inference-header-content-length")
        return InferHttpCodec(route["infer"], route["version"] or "", length), CODINGS
    method: Literal["rank", "lookup"] = "rank" if route["method"] == "rank" else "lookup"
    content_type = fields.get(b"content-type", b"")
    if content_type == PROTOBUF or content_type.partition(b";")[0].strip().lower() == PROTOBUF:
        return MessageCodec(method, model), ()
    return JsonCodec(method, model), ()


def _text(fields: Fields, name: bytes) -> str | None:
    value = fields.get(name)
    return None if value is None else value.decode("latin-1")


Answering: TypeAlias = tuple[ASGIApp, Callable[[], object]]
"""An application, and what ends its endless streams."""


@contextlib.asynccontextmanager
async def running_admin(
    service: RankingService,
    host: str,
    port: int,
    *,
    tokens: Tokens | None = None,
    ssl: tls.SSLContext | None = None,
    page: Callable[[], Source] | None = None,
) -> AsyncIterator[int]:
    """Serve probes, metrics and a page while the block runs, and yield the port. Raises ConfigError, or as `page`."""

    @contextlib.asynccontextmanager
    async def probes() -> AsyncIterator[Answering]:
        async with contextlib.AsyncExitStack() as stack:
            board = None if page is None else await stack.enter_async_context(run_board(page))
            app = create_probes(service, tokens, board, is_loopback=Address(host).is_loopback)
            yield answered_once(app), (lambda: None) if board is None else board.close

    async with listening_beside(
        service.limits, service.clock, service.metrics.failed, probes(), host, port, ssl
    ) as bound:
        yield bound


@contextlib.asynccontextmanager
async def listening_beside(
    limits: RequestLimits,
    clock: Callable[[], float],
    failed: CountFailure,
    opening: contextlib.AbstractAsyncContextManager[Answering],
    host: str,
    port: int,
    ssl: tls.SSLContext | None,
) -> AsyncIterator[int]:
    """Let an application answer on a separate thread while the block runs, and yield the port. Raises ConfigError.

    So full batches keep nobody waiting who only asks. It is opened there.
    """
    loop, stop = uvloop.new_event_loop(), asyncio.Event()
    bound: concurrent.futures.Future[int] = concurrent.futures.Future()
    # From now on it can't be cancelled, which the thread would not expect.
    bound.set_running_or_notify_cancel()

    async def listen() -> None:
        try:
            async with opening as (app, end_streams):
                server = HttpServer(limits, clock, failed, ADMIN_DRAIN_TIMEOUT_S, app, ssl=ssl)
                bound.set_result(await server.start(host, port))
                await stop.wait()
                end_streams()
                await server.stop()
        except Exception as error:
            if bound.done():
                raise
            bound.set_exception(error)

    thread = threading.Thread(target=loop.run_until_complete, args=(listen(),), name="admin", daemon=True)
    thread.start()
    try:
        yield await asyncio.wrap_future(bound)
    finally:
        loop.call_soon_threadsafe(stop.set)
        await asyncio.to_thread(thread.join)
        loop.close()
