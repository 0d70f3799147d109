"""The HTTP API: an ASGI application that ranks by itself, and its listener, with uvicorn's protocol behind gates."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import re
import ssl as tls
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from email.utils import formatdate
from functools import partial
from typing import Literal, TypeAlias

import uvicorn
import uvloop
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from loader.errors import OverloadedError, ShardrankError
from serving.api.documents import create_documents, create_probes
from serving.api.http_connection import HttpConnection, HttpListener
from serving.api.http_messages import CODINGS, HttpReply, Refuse, defect_reply, error_reply, expand, read_body
from serving.api.listening import CountFailure, Place
from serving.api.tokens import Tokens
from serving.dashboard.board import FleetSource, run_board
from serving.errors import invalid_field
from serving.formats.infer import InferHttpCodec
from serving.formats.json_reader import JsonCodec
from serving.formats.messages import MessageCodec
from serving.formats.requests import Codec
from serving.limits import RequestLimits
from serving.observe.traces import TRACEPARENT, Parent, parent_of
from serving.rank.service import RankingService, answer
from shard_node.byte_budget import LARGEST_MESSAGES, ByteBudget
from shard_node.wire.address import Address

logger = logging.getLogger(__name__)
_protocol_logger = logger.getChild("uvicorn")
_protocol_logger.setLevel(logging.INFO)
# The gate says so itself, and not once for each.
_protocol_logger.addFilter(lambda record: not record.getMessage().startswith("Invalid HTTP request"))

LAST_REQUEST_S = 0.5
"""How long a connection that may bring its first request is kept when the server stops."""
ADMIN_DRAIN_TIMEOUT_S = 1.0
_SWEEP_S = 0.5
_SECOND_S = 1.0

PROTOBUF = b"application/x-protobuf"
_REQUEST_ID = b"x-request-id"
# No colon in a model's name, so that what follows one can only be an action.
_ROUTE = re.compile(
    r"/v1/models/(?P<model>[^/:]+):(?P<method>rank|lookup)"
    r"|/v2/models/(?P<infer>[^/:]+)(?:/versions/(?P<version>[^/]+))?/infer"
)

# Of a head: whether it is its connection's last, or may be; and its id.
_MAY_BE_LAST = re.compile(rb"\r\nconnection:(?![ \t]*keep-alive[ \t]*\r\n)", re.IGNORECASE)
_ID_LINE = re.compile(rb"\r\nx-request-id:([^\r]*+)", re.IGNORECASE)

Headers = dict[bytes, bytes]


class HttpApp:
    """The HTTP API of a service, behind gates; `documents` has all other paths. Without `tokens` all is allowed."""

    def __init__(self, service: RankingService, tokens: Tokens | None = None) -> None:
        self._service = service
        self._tokens = tokens
        # Of the requests whose heads are read in this turn of the event loop.
        self._let_in = 0
        self._refusal: OverloadedError | None = None
        self._refused: Counter[tuple[str, str]] = Counter()
        self.documents = create_documents(service, tokens)

    def refuse(self, head: bytes) -> HttpReply | None:
        """Refuse a request that would wait in vain, by its head: for much less work than a call of this application.

        Its token is not checked: the refusal says nothing of what is served.
        """
        verb, target, rest = head.split(b" ", 2)
        if verb != b"POST" or not rest.startswith(b"HTTP/1.1") or _MAY_BE_LAST.search(rest) is not None:
            return None
        # A path that has to be decoded, or cut, is for the application.
        match = None if b"%" in target or b"?" in target else _ROUTE.fullmatch(target.decode("ascii"))
        if match is None:
            return None
        api, method = ("oip_http", "rank") if match["model"] is None else ("http", match["method"])
        if not (self._let_in or self._refused):
            asyncio.get_running_loop().call_soon(self._end_turn)
        # In so short a time next to nothing is done of what waits: whoever comes behind a refused one is refused too.
        error = self._refusal = self._refusal or self._service.overload(None, self._let_in)
        if error is None:
            self._let_in += 1
            return None
        self._refused[api, method] += 1
        found = _ID_LINE.search(rest)
        request_id = "" if found is None else found[1].strip(b" \t").decode("latin-1")
        reply = error_reply(match.string, request_id, error)
        return reply._replace(headers=((_REQUEST_ID.decode(), request_id), *reply.headers)) if found else reply

    def _end_turn(self) -> None:
        """Count the refused; forget whom was let in: whoever is complete is about to be queued."""
        for (api, method), count in self._refused.items():
            self._service.refused(api, method, OverloadedError.kind, count)
        self._refused.clear()
        self._let_in, self._refusal = 0, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        match = _ROUTE.fullmatch(scope["path"]) if scope["method"] == "POST" else None
        if match is None:
            await answer_whole(self.documents, scope, receive, send)
            return
        gate: HttpConnection = scope["state"]["gate"]
        # Of several headers of a name the first counts.
        headers: Headers = dict(reversed(scope["headers"]))
        parent = None
        if self._service.tracer is not None and TRACEPARENT in headers:
            parent = parent_of(headers, scope["headers"])
        reply = await self._answered(match, headers, receive, gate, parent)
        lines = [(b"content-type", reply.content_type.encode()), (b"content-length", b"%d" % len(reply.body))]
        if (request_id := headers.get(_REQUEST_ID)) is not None:
            lines.append((_REQUEST_ID, request_id))
        for name, value in reply.headers:
            lines.append((name.encode("latin-1"), value.encode("latin-1")))
        await send({"type": "http.response.start", "status": reply.status, "headers": lines})
        await send({"type": "http.response.body", "body": reply.body})
        gate.answered(scope["state"]["protocol"])

    async def _answered(
        self, match: re.Match[str], headers: Headers, receive: Receive, gate: HttpConnection, parent: Parent | None
    ) -> HttpReply:
        max_bytes = self._service.limits.max_body_bytes
        try:
            if self._tokens is not None:
                authorization = headers.get(b"authorization")
                self._tokens.check(None if authorization is None else _text(authorization), "rank")
            codec, codings = _codec(match, headers)

            async def body() -> bytes:
                coding = _text(headers.get(b"content-encoding")).lower() or "identity"
                if coding != "identity" and coding not in codings:
                    others = f", or coded as {' or '.join(codings)}" if codings else ""
                    says = f"{coding[:40]!r} is not supported; send the body as it is{others}"
                    raise invalid_field("content-encoding", says)
                data = await read_body(receive, "max_body_bytes", max_bytes, headers.get(b"content-length"))
                if coding == "identity":
                    return data
                return await expand(data, max_bytes, gate.bytes, gate.spent, self._service.expanding)

            encoded = await answer(self._service, codec, body, gate, parent)
            return HttpReply(200, encoded.body, encoded.content_type, encoded.headers)
        except ShardrankError as error:
            return error_reply(match.string, _text(headers.get(_REQUEST_ID)), error)
        except Exception:
            return defect_reply(match.string, _text(headers.get(_REQUEST_ID)))


async def answer_whole(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Run another application; give the request's id back, and tell the gate when the answer is complete."""
    is_complete = False

    async def sending(message: Message) -> None:
        nonlocal is_complete
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *request_id]
        await send(message)
        is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)

    request_id = [header for header in scope["headers"] if header[0] == _REQUEST_ID][:1]
    try:
        await app(scope, receive, sending)
    except Exception:
        # The application has answered it, and logged; what it has not, the server answers.
        if not is_complete:
            raise
    if is_complete:
        scope["state"]["gate"].answered(scope["state"]["protocol"])


def _codec(match: re.Match[str], headers: Headers) -> tuple[Codec, tuple[str, ...]]:
    """Choose how a request is read, and the content codings that it may have."""
    model = match["model"]
    if model is None:
        length = headers.get(b"inference-header-content-length")
        return InferHttpCodec(
            match["infer"], match["version"] or "", None if length is None else _text(length)
        ), CODINGS
    method: Literal["rank", "lookup"] = "rank" if match["method"] == "rank" else "lookup"
    content_type = headers.get(b"content-type", b"")
    if content_type == PROTOBUF or content_type.partition(b";")[0].strip().lower() == PROTOBUF:
        return MessageCodec(method, model), ()
    return JsonCodec(method, model), ()


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("latin-1")


class _Wire(asyncio.Transport):
    def __init__(self, gate: HttpConnection, transport: asyncio.Transport) -> None:
        super().__init__()
        self._gate = gate
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]
        self.write = gate.write  # type: ignore[method-assign]
        self.pause_reading = partial(gate.pause, "protocol")  # type: ignore[method-assign]
        self.resume_reading = partial(gate.resume, "protocol")  # type: ignore[method-assign]

    def close(self) -> None:
        # Without a request it is uvicorn's timer of idle connections, which knows of none that the gate refused.
        if self._gate.owes and not self._gate.is_feeding:
            self._gate.end()

    def is_closing(self) -> bool:
        return self._gate.is_ended


def behind_gate(
    config: uvicorn.Config, gate: HttpConnection, transport: asyncio.Transport, state: ServerState
) -> HttpToolsProtocol:
    """Connect what parses a connection's requests and calls the application, with the gate in their scope."""
    protocol = HttpToolsProtocol(config, state, {"gate": gate, "transport": transport})
    protocol.app_state["protocol"] = protocol
    protocol.logger = _protocol_logger
    protocol.connection_made(_Wire(gate, transport))
    return protocol


class HttpServer:
    """An HTTP listener: `app` answers what `refuse` has let pass by its head; `failed` counts refused connections.

    Requests in flight may take `drain_timeout_s` once it is stopped.
    """

    def __init__(
        self,
        limits: RequestLimits,
        clock: Callable[[], float],
        failed: CountFailure,
        drain_timeout_s: float,
        app: ASGIApp,
        *,
        buffers: ByteBudget | None = None,
        ssl: tls.SSLContext | None = None,
        refuse: Refuse = lambda head: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            # The gate ends idle connections; uvicorn's own timer shall never come first.
            timeout_keep_alive=round(2 * limits.keep_alive_s) + 60,
        )
        config.load()
        buffers = buffers or ByteBudget(LARGEST_MESSAGES * limits.max_body_bytes)
        self._gates = HttpListener(partial(behind_gate, config), limits, failed, buffers, clock, ssl, refuse)
        self._drain_timeout_s = drain_timeout_s
        self._ticking: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, place: Place | None = None) -> int:
        """Listen, as `ConnectionListener.listen` does. Returns the port. Raises ConfigError."""
        bound = self._gates.listen(host, port, "HTTP", place)
        self._ticking = asyncio.create_task(self._tick())
        return bound

    def begin_drain(self) -> None:
        """Go on as before, but every answer from now on closes its connection."""
        self._gates.is_draining = True
        for gate in list(self._gates.open):
            gate.begin_drain()

    async def stop(self) -> None:
        """Take in what has connected, then nothing more; end idle connections, and wait for requests in flight."""
        self.begin_drain()
        await self._gates.stop_listening(self._drain_timeout_s)
        gates = self._gates
        for gate in list(gates.open):
            if gate.is_between_requests() and not gate.may_bring_request():
                gate.end()
        await gates.all_closed(min(LAST_REQUEST_S, self._drain_timeout_s))
        for gate in list(gates.open):
            if gate.is_between_requests():
                gate.end()
        await gates.all_closed(self._drain_timeout_s)
        if gates.open:
            logger.error("%d HTTP requests did not end within %s s", len(gates.state.tasks), self._drain_timeout_s)
        for task in list(gates.state.tasks):
            task.cancel()
        if gates.state.tasks:
            await asyncio.wait(gates.state.tasks, timeout=LAST_REQUEST_S)
        await gates.all_closed(LAST_REQUEST_S)
        for gate in list(gates.open):
            gate.drop()
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking

    async def _tick(self) -> None:
        """Sweep, and keep the date that answers have; nobody else does."""
        gates, second = self._gates, 0.0
        period_s = min(_SWEEP_S, gates.limits.receive_timeout_s / 8)
        while True:
            if (now := gates.clock()) - second >= _SECOND_S:
                second = now
                gates.state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
                gates.tell()
            gates.sweep()
            await asyncio.sleep(period_s)


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
    page: Callable[[], FleetSource] | None = None,
) -> AsyncIterator[int]:
    """Serve probes, metrics and a page while the block runs, and yield the port. Raises ConfigError, or as `page`."""

    @contextlib.asynccontextmanager
    async def probes() -> AsyncIterator[Answering]:
        async with contextlib.AsyncExitStack() as stack:
            board = None if page is None else await stack.enter_async_context(run_board(page))
            app = create_probes(service, tokens, board, is_loopback=Address(host).is_loopback)
            yield partial(answer_whole, app), (lambda: None) if board is None else board.close

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
