"""HTTP/1.1 connections: uvicorn's protocol with limits on bytes, times, connections and work.

uvicorn's parser (llhttp) reads each head once and refuses what is malformed. What is fed to it is cut where a head, a
body or a chunked body ends, so one request at a time is parsed, and what was sent ahead waits unread. The states of a
connection are in `TRANSITIONS`. Its rules:

1. Each state but ANSWERING has a time limit, see `HttpServer`; that of a request begins with its first byte.
2. A request is admitted or refused in `on_headers_complete`; the application starts there, and gets the body complete.
3. Bytes of a body are charged to the budget. Without room it is refused, and what still comes of it is dropped
   (LINGERING), so that the client can read the refusal. A body whose answer is complete early is dropped likewise.
4. Nothing is read in ANSWERING once bytes of the next request are there, nor while the peer does not read its answer.
5. What two readers could understand differently is answered by an error, and the connection closed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import select
import socket
import ssl as tls
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from email.utils import formatdate
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from loader.errors import DeadlineExceededError, OverloadedError, ShardrankError
from serving.api.bodies import body_too_large
from serving.api.http_messages import Fields, Headers, HttpReply, body_length, error_reply, header_too_large
from serving.api.listening import TURN_S, Accepted, ConnectionListener, CountFailure, forget_unsent
from serving.errors import InvalidRequestError, malformed
from serving.limits import RequestLimits
from shard_node.byte_budget import LARGEST_MESSAGES, ByteAccount, ByteBudget

LINGER_S = 1.0
"""For a client to send the remainder of a body that was refused, and to read the refusal."""
CHECK_S = 0.5
"""Between two checks of all time limits, and of clients that are not read from."""
LAST_REQUEST_S = 0.5
"""How long a connection that may bring its first request is kept when the server stops."""

logger = logging.getLogger(__name__)
_uvicorn_logger = logger.getChild("uvicorn")
_uvicorn_logger.setLevel(logging.INFO)

# What a read costs the event loop outside of this file; larger ones are free.
_SHORT_READ_BYTES, _SHORT_READ_S = 512, 10e-6
# A part of a body that is shorter is joined with the one before: an object has 40 bytes of its own.
_SHORT_PART_BYTES = 2048
# What a chunk's length and line ends may be long; other bytes of a chunked body count as headers.
_CHUNK_LINE_BYTES = 20
# Of a chunked body, parsed at once: small chunks cost a microsecond each.
_CHUNKED_BYTES = 2**14
_END = b"\r\n\r\n"
_UPGRADE = re.compile(rb"\r\n(?i:upgrade):[^\r]*+")


class State(StrEnum):
    """What a connection waits for."""

    NEW = "the first byte"
    IDLE = "the next request"
    HEAD = "the end of a head"
    BODY = "the end of a body, and its answer"
    ANSWERING = "the answer"
    LINGERING = "the end of a body whose answer is written"
    CLOSING = "the peer, to read the last bytes"
    CLOSED = "nothing"


class Event(StrEnum):
    """What happens to a connection."""

    BYTES = "some of a head came"
    HEAD_END = "a head is complete"
    BODY_END = "a body is complete"
    ANSWERED = "an answer is written"
    CLOSE = "the connection is closed, once all that was written is sent"
    LOST = "the transport is closed"


_ANY = {Event.CLOSE: State.CLOSING, Event.LOST: State.CLOSED}
TRANSITIONS: dict[State, dict[Event, State]] = {
    State.NEW: {Event.BYTES: State.HEAD, Event.HEAD_END: State.BODY, **_ANY},
    State.IDLE: {Event.BYTES: State.HEAD, Event.HEAD_END: State.BODY, **_ANY},
    State.HEAD: {Event.HEAD_END: State.BODY, **_ANY},
    State.BODY: {Event.BODY_END: State.ANSWERING, Event.ANSWERED: State.LINGERING, **_ANY},
    State.ANSWERING: {Event.ANSWERED: State.IDLE, **_ANY},
    State.LINGERING: {Event.BODY_END: State.IDLE, **_ANY},
    State.CLOSING: {Event.LOST: State.CLOSED},
    State.CLOSED: {},
}
_ENDED = (State.CLOSING, State.CLOSED)


class Exchange:
    """A request whose head was read, and its answer. Implements `serving.rank.service.Caller`.

    Attributes:
        fields: the first header of each name, which is in lower case.
        route: what `Admit` has matched the path to, for the application.
        on_sent: called once the answer is sent, or the client has left.
    """

    def __init__(self, connection: HttpConnection, method: str, path: str, fields: Fields) -> None:
        self.connection, self.method, self.path, self.fields = connection, method, path, fields
        self.route: Any = None
        self.is_answered = False
        self.on_sent: list[Callable[[], None]] = []
        self._on_leave: Callable[[], None] | None = None
        self._was_left = False

    @property
    def request_id(self) -> str:
        """The client's id of the request, "" for none."""
        return self.fields.get(b"x-request-id", b"").strip(b" \t").decode("latin-1")

    def time_remaining(self) -> None:
        """Return None: an HTTP client sets no deadline in a head."""

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the client leaves before its answer: at once, if it has left already."""
        self._on_leave = callback
        if self._was_left:
            callback()

    def when_taken(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the answer is sent, or the client has left."""
        self.on_sent.append(callback)
        if self._was_left:
            callback()

    def leave(self) -> None:
        """Notify those who work for a client that has left, or was refused meanwhile."""
        self._was_left = True
        for callback in self.on_sent:
            callback()
        if self._on_leave is not None:
            self._on_leave()


class HttpConnection(Accepted, HttpToolsProtocol):
    """One connection of a server."""

    def __init__(self, server: HttpServer, address: str) -> None:
        super().__init__(server.config, server.uvicorn_state, {})
        self.logger = _uvicorn_logger
        self.address = address
        self.state, self.deadline, self.unread_deadline = State.NEW, math.inf, math.inf
        self.account = ByteAccount(server.buffers, self._give_way)
        self._server = server
        self._exchange: Exchange | None = None
        # Read, and not parsed: part of a head, what was sent ahead, or what the next loop iteration parses.
        self._buffered, self._num_fed = b"", 0
        self._is_paused = self._is_last = False
        # Bytes of the body that are to come, None of a chunked one; those that came, and other bytes of a chunked one.
        self._body_left: int | None = 0
        self._body_bytes = self._framing_bytes = 0
        self._body_parts: list[bytes | bytearray] = []
        # Called when the peer has read what was written; bytes that are charged until then.
        self._on_sent: list[Callable[[], None]] = []
        self._unread_bytes = 0
        self._idle_work_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self.has_connected = True
        self._server.waiting[State.NEW][self] = None
        self.deadline = self._server.clock() + self._server.time_limits_s[State.NEW]

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify those who work for this client."""
        super().connection_lost(exc)
        self._advance(Event.LOST)
        self._buffered = b""
        self._server.leave(self)
        self._peer_has_read()
        self._abandon()
        self.account.close()

    def data_received(self, data: bytes) -> None:
        """Parse bytes as far as the end of one request, and keep the remainder."""
        if self.state in _ENDED:
            return
        clock, num_read, searched = self._server.clock, len(data), max(0, len(self._buffered) - len(_END) + 1)
        started_at = clock()
        try:
            if self._is_paused or self.state is State.ANSWERING or self.unread_deadline != math.inf:
                self._keep_ahead(data)
            else:
                self._parse(self._buffered + data if self._buffered else data, searched, started_at + TURN_S)
        except ShardrankError as error:
            self._refuse(error)
        is_short = num_read < _SHORT_READ_BYTES and self.state in (State.HEAD, State.BODY)
        # By the wall clock, and so no more than a turn: the process may have been suspended meanwhile.
        self.spent(min(TURN_S, clock() - started_at) + is_short * _SHORT_READ_S)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer what is complete, to a client that has closed its side."""
        if self.state is not State.ANSWERING or self._server.ssl is not None:
            return False
        self.cycle.keep_alive = False
        return True

    def pause_writing(self) -> None:
        """Wait for a peer that does not read its answer, for so long."""
        super().pause_writing()
        self.unread_deadline = self._server.clock() + self._server.limits.receive_timeout_s

    def resume_writing(self) -> None:
        """Continue: the peer has read it."""
        super().resume_writing()
        self.unread_deadline = math.inf
        self._peer_has_read()
        self._read_on()

    def on_headers_complete(self) -> None:
        """Admit a request by its head and start its application, or refuse it."""
        parser, server, headers, scope = self.parser, self._server, self.headers, self.scope
        method, version = parser.get_method().decode("ascii"), parser.get_http_version()
        if parser.should_upgrade():
            if method == "CONNECT":
                raise InvalidRequestError("", "CONNECT: this method is not allowed here", kind="method_not_allowed")
            # `_feed` has it parsed again.
            return
        fields = dict(reversed(headers))
        length = body_length(version, headers, fields)
        target = httptools.parse_url(self.url)
        if target.path is None:
            raise malformed("", "not HTTP/1.1: the target has no path")
        path = target.path.decode("ascii")
        scope["method"], scope["http_version"] = method, version
        scope["path"] = path = urllib.parse.unquote(path) if "%" in path else path
        scope["raw_path"], scope["query_string"] = target.path, target.query or b""
        # uvicorn would add trailers to those of the scope.
        self.headers = []
        self._body_left, self._body_bytes, self._framing_bytes = length, 0, 0
        self._is_last = server.is_draining or version == "1.0" or not parser.should_keep_alive()
        exchange = self._exchange = Exchange(self, method, path, fields)
        scope["state"] = {"exchange": exchange}
        self._advance(Event.HEAD_END)
        max_bytes = server.limits.max_body_bytes
        if length is not None and length > max_bytes:
            self._refuse_body(body_too_large("max_body_bytes", max_bytes, length))
            return
        if (reply := server.admit(exchange)) is not None:
            self._reply(reply)
            return
        cycle = self.cycle = RequestResponseCycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self._answer_headers(),
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=not self._is_last,
            on_response=self.on_response_complete,
        )
        task = self.loop.create_task(cycle.run_asgi(self.app))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def on_body(self, body: bytes) -> None:
        """Keep a part of a body, if there is room for it."""
        self._framing_bytes -= len(body) + _CHUNK_LINE_BYTES
        if self.state is not State.BODY:
            return
        max_bytes, parts = self._server.limits.max_body_bytes, self._body_parts
        self._body_bytes += len(body)
        try:
            if self._body_bytes > max_bytes:
                raise body_too_large("max_body_bytes", max_bytes, f"at least {self._body_bytes}")
            self.account.charge(len(body))
        except ShardrankError as error:
            self._refuse_body(error)
            return
        if len(body) >= _SHORT_PART_BYTES or not parts:
            parts.append(body)
        elif isinstance(last := parts[-1], bytearray):
            last += body
        else:
            parts.append(bytearray(body))

    def on_message_complete(self) -> None:
        """Give the body to the application."""
        if self.state is State.BODY:
            # As bytes, of which uvicorn makes no copy.
            self.cycle.body = b"".join(self._body_parts)  # type: ignore[assignment]
            self._body_parts.clear()
            self.cycle.more_body = False
            self.cycle.message_event.set()
            self._advance(Event.BODY_END)
        elif self.state is State.LINGERING:
            self._advance(Event.BODY_END)
            self._await_request()
        self._body_left = 0

    def on_response_complete(self) -> None:
        """Go on to the next request."""
        exchange, self._exchange, self.cycle = self._exchange, None, None  # type: ignore[assignment]
        self._advance(Event.ANSWERED)
        self._body_parts.clear()
        self._idle_work_s = 0.0
        if exchange is not None:
            exchange.is_answered = True
            self._on_sent += exchange.on_sent
        if self.unread_deadline != math.inf:
            self.account.hold(self.transport.get_write_buffer_size())
            self._unread_bytes = self.account.held
        else:
            if self.account.held:
                self.account.refund(self.account.held)
            if self._on_sent:
                self._peer_has_read()
        if self.transport.is_closing():
            self.end()
        elif self.state is State.IDLE and (self._is_last or self._is_paused):
            self._await_request()

    def spent(self, seconds: float) -> None:
        """Count work for a request that is not answered yet; drop a connection of much work and no answers."""
        self._idle_work_s += seconds
        if self._idle_work_s > self._server.max_idle_work_s and self.state not in _ENDED:
            self._server.note("idle_work")
            self.drop()

    def poll(self, events: int) -> int:
        """Return which of `events`, or the end, the kernel has of the socket, also while nothing is read."""
        if (connected := self.transport.get_extra_info("socket")) is None:
            return select.POLLHUP
        poller = select.poll()
        poller.register(connected.fileno(), events)
        return sum(ready for _, ready in poller.poll(0))

    def begin_drain(self) -> None:
        """Make the answer that is due the connection's last."""
        self._is_last = True
        if self.state in (State.BODY, State.ANSWERING):
            self.cycle.keep_alive = False

    def is_between_requests(self) -> bool:
        """Return whether nothing of a request has come."""
        return self.state in (State.NEW, State.IDLE) and not self._buffered

    def may_bring_request(self) -> bool:
        """Return whether a request may be on its way: the first one, or bytes that came and were not read yet."""
        return self.state is State.NEW or bool(self.poll(select.POLLIN) & select.POLLIN)

    def end(self) -> None:
        """Close the connection, once all that was written is sent."""
        if self.state not in _ENDED:
            self._advance(Event.CLOSE)
            self._buffered = b""
            self._abandon()
            self.account.refund(self.account.held)
            self.transport.close()

    def drop(self) -> None:
        """Close the connection now."""
        if self.state not in _ENDED:
            self._advance(Event.CLOSE)
        if (connected := self.transport.get_extra_info("socket")) is not None:
            forget_unsent(connected)
        self.transport.abort()

    def expire(self, now: float) -> None:
        """Act on a deadline that has passed."""
        if self.unread_deadline <= now:
            self._server.note("unread")
            self.drop()
        elif self.state in (State.HEAD, State.BODY):
            limit = f"receive_timeout_s = {self._server.limits.receive_timeout_s} s"
            self._refuse(DeadlineExceededError(f"the request was not complete after {limit}", kind="request_timeout"))
        elif self.state is State.CLOSING:
            self.drop()
        elif self.state is not State.ANSWERING or self.transport.is_closing():
            self.end()
        elif self._buffered and self.poll(0):
            # The loop does not see the end of what it does not read.
            self.drop()
        else:
            self.deadline = now + CHECK_S

    def _advance(self, event: Event) -> None:
        before, server = self.state, self._server
        after = self.state = TRANSITIONS[before][event]
        if before in server.waiting:
            server.waiting[before].pop(self, None)
        if after in server.waiting:
            server.waiting[after][self] = None
        if before is not State.HEAD or after is not State.BODY:
            self.deadline = server.clock() + server.time_limits_s[after]

    def _parse(self, data: bytes, searched: int, until: float) -> None:
        """Feed the parser as far as the end of a request, or until the clock says `until`; keep the remainder."""
        view, start, server = memoryview(data), self._num_fed, self._server
        max_header_bytes = server.limits.max_header_bytes
        while start < len(data) and self.state is not State.ANSWERING:
            if start > self._num_fed and server.clock() >= until:
                self._pause()
                self.loop.call_soon(self._read_on)
                break
            is_chunked = self._body_left is None
            if self._body_left:
                end = min(len(data), start + self._body_left)
                self._body_left -= end - start
            elif is_chunked:
                # Its end looks like that of a head, maybe with trailers; such bytes in a chunk do no harm.
                limit = start + _CHUNKED_BYTES
                end = data.find(_END, max(0, start - len(_END) + 1), limit) + len(_END)
                if end < len(_END):
                    end = min(limit, len(data))
                self._framing_bytes += end - start
            else:
                end = data.find(_END, max(start, searched)) + len(_END)
                if max(end, len(data) * (end < len(_END))) - start > max_header_bytes:
                    raise header_too_large(max_header_bytes)
                if end < len(_END):
                    break
            self._feed(view[start:end])
            start = end
            if is_chunked and self._framing_bytes > max_header_bytes:
                raise header_too_large(max_header_bytes)
            if self.state in _ENDED:
                return
        # The end of a chunked body is searched for in what was fed, too.
        self._num_fed = min(start, len(_END) - 1) if self._body_left is None else 0
        self._buffered = data[start - self._num_fed :]
        if self.state is State.ANSWERING and self._buffered:
            self._buffered = b""
            self._keep_ahead(data[start:])
        elif self.state in (State.NEW, State.IDLE):
            # RFC 9112, 2.2: some send an empty line after a body.
            self._buffered = self._buffered.lstrip(b"\r\n")
            if self._buffered:
                self._advance(Event.BYTES)

    def _feed(self, data: memoryview) -> None:
        """Parse a head, or some of a body. Raises ShardrankError for what callbacks refuse, and what is malformed."""
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade:
                # No other protocol is granted. llhttp expects it after the head, and no body.
                self.parser = httptools.HttpRequestParser(self)
                self.parser.feed_data(_UPGRADE.sub(b"", data))
        except httptools.HttpParserError as error:
            cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
            if isinstance(cause, httptools.HttpParserError):
                raise malformed("", f"not HTTP/1.1: {cause}") from None
            if cause is not None:
                raise cause from None
            raise

    def _keep_ahead(self, data: bytes) -> None:
        """Keep bytes that come before the turn of their request, and read nothing more. Raises OverloadedError."""
        self._buffered += data
        self._pause()
        self.account.charge(len(data))

    def _pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def _read_on(self) -> None:
        """Parse what was kept, and read again."""
        if self.state in (State.ANSWERING, *_ENDED) or self.unread_deadline != math.inf:
            return
        data, self._buffered = self._buffered, b""
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()
        if data:
            self.data_received(data)

    def _await_request(self) -> None:
        if self._is_last:
            self.end()
        elif self._is_paused:
            self.loop.call_soon(self._read_on)

    def _answer_headers(self) -> Headers:
        headers, exchange = self.server_state.default_headers, self._exchange
        if exchange is None or b"x-request-id" not in exchange.fields:
            return headers
        return [*headers, (b"x-request-id", exchange.request_id.encode("latin-1"))]

    def _reply(self, reply: HttpReply) -> None:
        """Write the answer to a request that its application does not answer."""
        self.transport.write(reply.encode(self._answer_headers(), is_last=self._is_last))
        self.on_response_complete()

    def _refuse(self, error: ShardrankError) -> None:
        """Answer in place of the application, if that is possible, and close."""
        exchange = self._exchange
        self._server.note(error.kind)
        if self.state is not State.LINGERING and not (self.cycle and self.cycle.response_started):
            path, request_id = ("", "") if exchange is None else (exchange.path, exchange.request_id)
            reply = error_reply(path, request_id, error)
            self.transport.write(reply.encode(self._answer_headers(), is_last=True))
        self.end()

    def _refuse_body(self, error: ShardrankError) -> None:
        """Answer a request that is not read to its end; what still comes of it is dropped, for a while."""
        exchange = self._exchange
        if exchange is None or (self.cycle and self.cycle.response_started):
            self._refuse(error)
            return
        self._server.note(error.kind)
        reply = error_reply(exchange.path, exchange.request_id, error)
        self.transport.write(reply.encode(self._answer_headers(), is_last=self._is_last))
        self._abandon()
        self.on_response_complete()

    def _give_way(self, error: OverloadedError) -> None:
        if self.state is State.BODY and self.account.held:
            self._refuse_body(error)

    def _abandon(self) -> None:
        """Notify the application, if it has not answered, that its client has left."""
        exchange, cycle, self._exchange, self.cycle = self._exchange, self.cycle, None, None  # type: ignore[assignment]
        self._body_parts.clear()
        if cycle is not None:
            cycle.disconnected, cycle.waiting_for_100_continue = True, False
            cycle.message_event.set()
        if exchange is not None:
            exchange.leave()

    def _peer_has_read(self) -> None:
        callbacks, self._on_sent = self._on_sent, []
        for callback in callbacks:
            callback()
        self.account.refund(self._unread_bytes)
        self._unread_bytes = 0


Admit: TypeAlias = Callable[[Exchange], HttpReply | None]
"""Matches the route of a request whose head is there, and returns the answer if it is refused by that."""


class HttpServer(ConnectionListener[HttpConnection]):
    """An HTTP listener and its connections: `app` answers what `admit` lets in; `failed` counts refused connections.

    Requests in flight may last `drain_timeout_s` once it is stopped. It belongs to one event loop.

    Attributes:
        waiting: by state, the connections in it, longest first.
        time_limits_s: by state, how long a connection may stay in it; in ANSWERING until it is checked again.
        is_draining: whether each answer is its connection's last.
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
        admit: Admit = lambda exchange: None,
    ) -> None:
        buffers = buffers or ByteBudget(LARGEST_MESSAGES * limits.max_body_bytes)
        super().__init__(buffers, limits.max_connections, limits.receive_timeout_s, ssl)
        self.new_connection = partial(HttpConnection, self)
        self.limits, self.clock, self.admit = limits, clock, admit
        self.max_idle_work_s = limits.max_idle_work_ms / 1000 or math.inf
        self.is_draining = False
        self.uvicorn_state = ServerState()
        self.config = uvicorn.Config(
            app, interface="asgi3", ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False
        )
        self.config.load()
        self.waiting: dict[State, dict[HttpConnection, None]] = {State.NEW: {}, State.IDLE: {}, State.CLOSING: {}}
        self.time_limits_s = dict.fromkeys(State, limits.receive_timeout_s) | {
            State.IDLE: limits.keep_alive_s,
            State.ANSWERING: CHECK_S,
            State.LINGERING: LINGER_S,
        }
        self._failed, self._drain_timeout_s = failed, drain_timeout_s
        self._noted: Counter[str] = Counter()
        self._ticking: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, see `listen`. Returns the port. Raises ConfigError."""
        bound = self.listen(host, port, "HTTP")
        self._ticking = asyncio.create_task(self._tick())
        return bound

    def begin_drain(self) -> None:
        """Continue, but every answer from now on closes its connection."""
        self.is_draining = True
        for connection in list(self.open):
            connection.begin_drain()

    async def stop(self) -> None:
        """Accept what has connected, then nothing more; close idle connections, and wait for requests in flight."""
        self.begin_drain()
        await self.stop_listening(self._drain_timeout_s)
        for connection in list(self.open):
            if connection.is_between_requests() and not connection.may_bring_request():
                connection.end()
        await self.all_closed(min(LAST_REQUEST_S, self._drain_timeout_s))
        for connection in list(self.open):
            if connection.is_between_requests():
                connection.end()
        await self.all_closed(self._drain_timeout_s)
        tasks = list(self.uvicorn_state.tasks)
        if self.open:
            logger.error("%d HTTP requests did not end within %s s", len(tasks), self._drain_timeout_s)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_REQUEST_S)
        await self.all_closed(LAST_REQUEST_S)
        for connection in list(self.open):
            connection.drop()
        if self._ticking is not None:
            self._ticking.cancel()
            with suppress(asyncio.CancelledError):
                await self._ticking

    def idle_connections(self) -> Iterable[HttpConnection]:
        """See `ConnectionListener`: then those of which nothing has come."""
        return chain(self.waiting[State.IDLE], self.waiting[State.NEW])

    def num_open(self) -> int:
        """See `ConnectionListener`."""
        return len(self.open) - len(self.waiting[State.CLOSING])

    def send_refusal(self, connection: socket.socket, error: OverloadedError) -> None:
        """See `ConnectionListener`."""
        connection.send(error_reply("", "", error).encode(self.uvicorn_state.default_headers, is_last=True))

    def note(self, kind: str) -> None:
        """Count what was refused, or closed. It is logged with others of its second, but TLS logs itself."""
        if not kind.startswith("tls_"):
            self._noted[kind] += 1
        self._failed("http", "connection", kind)

    def expire(self) -> None:
        """Act on each deadline that has passed."""
        now = self.clock()
        for connection in [each for each in self.open if each.deadline <= now or each.unread_deadline <= now]:
            connection.expire(now)

    async def _tick(self) -> None:
        """Check deadlines, and write the date of answers and the log of a second."""
        second, period_s = -math.inf, min(CHECK_S, self.limits.receive_timeout_s / 8)
        while True:
            if (now := self.clock()) - second >= 1.0:
                second = now
                self.uvicorn_state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
                if self._noted:
                    counts = ", ".join(f"{kind}: {count}" for kind, count in self._noted.most_common())
                    logger.warning("HTTP connections refused or ended: %s", counts)
                    self._noted.clear()
            self.expire()
            await asyncio.sleep(period_s)
