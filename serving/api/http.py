"""The HTTP API: which requests rank, and how they are answered; and ports for operators on a thread of their own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import re
import ssl as tls
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from email.utils import formatdate
from functools import partial
from typing import Literal

import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from loader.errors import OverloadedError, ShardrankError
from serving.api.bodies import CODINGS, expand, left_early
from serving.api.documents import RANKING_ROUTE, create_documents, create_probes
from serving.api.http_connection import CHECK_S, HttpListener, State
from serving.api.http_messages import Exchange, Fields, HttpReply, error_reply, internal_error_reply
from serving.api.tokens import Tokens
from serving.dashboard.board import Board, run_board
from serving.errors import invalid_field
from serving.formats.infer import InferHttpCodec
from serving.formats.json_reader import JsonCodec
from serving.formats.messages import MessageCodec
from serving.formats.requests import Codec
from serving.observe.calls import Call
from serving.observe.traces import TRACEPARENT, Parent, parent_of
from serving.rank.service import RankingService, answer
from shard_node.wire.address import Address

logger = logging.getLogger(__name__)

ADMIN_DRAIN_TIMEOUT_S = 1.0
LAST_READ_S = 0.01
LAST_REQUEST_S = 0.5
"""For bytes that have come to be read, and for a new connection to bring its first request, when the server stops."""
PROTOBUF = b"application/x-protobuf"
_GONE = left_early()


class HttpApp:
    """The HTTP API of a service; `documents` has all paths that do not rank. Without `tokens` all is allowed."""

    def __init__(self, service: RankingService, tokens: Tokens | None = None) -> None:
        self._service = service
        self._tokens = tokens
        self.documents = create_documents(service, tokens)
        self.application = answered_once(self.documents)

    def admit(self, exchange: Exchange) -> ShardrankError | None:
        """Match the route of a request by its head, and admit it if it ranks; return why it is refused."""
        if exchange.method != "POST" or (route := RANKING_ROUTE.fullmatch(exchange.path)) is None:
            return None
        service, fields = self._service, exchange.fields
        api, method = ("oip_http", "rank") if route["model"] is None else ("http", route["method"])
        try:
            call = service.admit(api, method, None, exchange.request_id)
        except OverloadedError as error:
            return error
        try:
            if self._tokens is not None:
                self._tokens.check(_text(fields, b"authorization"), "rank")
            codec, codings = _codec(route, fields)
            is_coded = b"content-encoding" in fields and _is_coded(fields, codings)
        except ShardrankError as error:
            service.end_call(call, error)
            return error
        parent = None
        if service.tracer is not None and TRACEPARENT in fields:
            parent = parent_of(fields, exchange.connection.scope["headers"])
        exchange.respond = partial(self._ranked, exchange, call, codec, is_coded, parent)
        exchange.watch(partial(service.end_call, call, _GONE))
        return None

    async def _ranked(
        self, exchange: Exchange, call: Call, codec: Codec, is_coded: bool, parent: Parent | None, body: bytes
    ) -> HttpReply:
        service = self._service
        received: bytes | Awaitable[bytes] = body
        if is_coded:
            account, limit = exchange.connection.account, service.limits.max_body_bytes
            received = expand(body, limit, account, exchange.connection.spent, service.expanding)
        try:
            encoded = await answer(service, call, codec, received, exchange, parent)
        except ShardrankError as error:
            return error_reply(exchange.path, exchange.request_id, error)
        except Exception:
            return internal_error_reply(exchange.path, exchange.request_id)
        return HttpReply(200, encoded.body, encoded.content_type, encoded.headers)


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
        return InferHttpCodec(model=route["infer"], version_name=route["version"] or "", header_length=length), CODINGS
    method: Literal["rank", "lookup"] = "rank" if route["method"] == "rank" else "lookup"
    content_type = fields.get(b"content-type", b"")
    if content_type == PROTOBUF or content_type.partition(b";")[0].strip().lower() == PROTOBUF:
        return MessageCodec(method, model), ()
    return JsonCodec(method, model), ()


def _is_coded(fields: Fields, codings: tuple[str, ...]) -> bool:
    coding = (_text(fields, b"content-encoding") or "identity").lower()
    if coding != "identity" and coding not in codings:
        others = f", or coded as {' or '.join(codings)}" if codings else ""
        raise invalid_field("content-encoding", f"{coding[:40]!r} is not supported; send the body as it is{others}")
    return coding != "identity"


def _text(fields: Fields, name: bytes) -> str | None:
    value = fields.get(name)
    return None if value is None else value.decode("latin-1")


class HttpServer(HttpListener):
    """A port that listens, until it is stopped."""

    _ticking: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, see `listen`. Returns the port. Raises ConfigError."""
        bound = self.listen(host, port, "HTTP")
        self._ticking = asyncio.create_task(self._tick())
        return bound

    def begin_drain(self) -> None:
        """Continue, but every answer from now on closes its connection."""
        self.is_draining = True
        for connection in self.open:
            connection.close_with_answer()

    async def stop(self, drain_timeout_s: float) -> None:
        """Accept what has connected, then nothing more; close idle connections, and wait for requests in flight."""
        self.begin_drain()
        await self.stop_listening(drain_timeout_s)
        # Has what the kernel has already be read.
        await asyncio.sleep(LAST_READ_S)
        for connection in list(self.waiting[State.IDLE]):
            connection.end()
        await self.all_closed(min(LAST_REQUEST_S, drain_timeout_s))
        for connection in list(self.idle_connections()):
            connection.end()
        await self.all_closed(drain_timeout_s)
        tasks = list(self.uvicorn_state.tasks)
        if self.open:
            logger.error("%d HTTP requests did not end within %s s", len(tasks), drain_timeout_s)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_REQUEST_S)
        await self.all_closed(LAST_REQUEST_S)
        for connection in list(self.open):
            connection.drop()
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking

    async def _tick(self) -> None:
        second, period_s = -math.inf, min(CHECK_S, self.limits.receive_timeout_s / 8)
        while True:
            if (now := self.clock()) - second >= 1.0:
                second = now
                self.uvicorn_state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
                if self.noted:
                    counts = ", ".join(f"{kind}: {count}" for kind, count in self.noted.most_common())
                    logger.warning("HTTP connections refused or ended: %s", counts)
                    self.noted.clear()
            self.expire()
            await asyncio.sleep(period_s)


def running_admin(
    service: RankingService,
    host: str,
    port: int,
    *,
    tokens: Tokens | None = None,
    ssl: tls.SSLContext | None = None,
    page: Callable[[], Board] | None = None,
) -> AbstractAsyncContextManager[int]:
    """Serve probes, metrics and a page while the block runs, and yield the port. Raises ConfigError, or as `page`."""

    @contextlib.asynccontextmanager
    async def probes() -> AsyncIterator[ASGIApp]:
        async with contextlib.AsyncExitStack() as stack:
            board = None if page is None else await stack.enter_async_context(run_board(page))
            yield answered_once(create_probes(service, tokens, board, is_loopback=Address(host).is_loopback))

    make = partial(HttpServer, service.limits, service.clock, service.metrics.failed, ssl=ssl)
    return listening_on_thread(make, probes(), host, port)


@contextlib.asynccontextmanager
async def listening_on_thread(
    make: Callable[[ASGIApp], HttpServer], opening: AbstractAsyncContextManager[ASGIApp], host: str, port: int
) -> AsyncIterator[int]:
    """Let an application answer on a separate thread while the block runs, and yield the port. Raises ConfigError.

    So full batches keep nobody waiting who only asks. It is opened there, and its server made.
    """
    loop, stop = uvloop.new_event_loop(), asyncio.Event()
    bound: concurrent.futures.Future[int] = concurrent.futures.Future()
    # From now on it can't be cancelled, which the thread would not expect.
    bound.set_running_or_notify_cancel()

    async def listen() -> None:
        try:
            async with opening as app:
                server = make(app)
                bound.set_result(await server.start(host, port))
                await stop.wait()
                await server.stop(ADMIN_DRAIN_TIMEOUT_S)
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
