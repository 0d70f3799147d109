"""HTTP/1.1 connections: uvicorn's protocol with limits on bytes, times, connections and work.

uvicorn's parser (llhttp) reads each head once and refuses what is malformed. What is fed to it is cut where a head, a
body or a chunked body ends, so one request at a time is parsed, and what was sent ahead waits unread. The states of a
connection are in `TRANSITIONS`. Its rules:

1. Each state has a time limit, see `HttpListener`; that of a request begins with its first byte. In ANSWERING the
   connection is only checked then: requests have deadlines of their own.
2. A request is admitted or refused in `on_headers_complete`. Ranking begins once its body is complete, and its answer
   is one write; the application, which has all other routes, begins with the head.
3. Bytes of a body are charged to the budget. Without room it is refused, and what still comes of it is dropped
   (LINGERING), so that the client can read the refusal. A body whose answer is complete early is dropped likewise.
4. Nothing is read in ANSWERING once bytes of the next request are there, and nothing is parsed while the peer does not
   read its answer. What is kept until then is charged to the budget, too.
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
from collections.abc import Callable, Coroutine, Iterable
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
from serving.api.http_messages import Exchange, Respond, body_length, error_reply, header_too_large
from serving.errors import InvalidRequestError, malformed
from serving.limits import RequestLimits
from shard_node.byte_budget import LARGEST_MESSAGES, ByteAccount, ByteBudget
from shard_node.wire.listening import MAX_READ_S, Accepted, ConnectionListener, CountFailure, forget_unsent

LINGER_S = 1.0
"""For a client to send the remainder of a body that was refused, and to read the refusal."""
CHECK_S = 0.5
"""Between two checks of all time limits, and of clients that are not read from."""

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


_ALWAYS = {Event.CLOSE: State.CLOSING, Event.LOST: State.CLOSED}
TRANSITIONS: dict[State, dict[Event, State]] = {
    State.NEW: {Event.BYTES: State.HEAD, Event.HEAD_END: State.BODY, **_ALWAYS},
    State.IDLE: {Event.BYTES: State.HEAD, Event.HEAD_END: State.BODY, **_ALWAYS},
    State.HEAD: {Event.HEAD_END: State.BODY, **_ALWAYS},
    State.BODY: {Event.BODY_END: State.ANSWERING, Event.ANSWERED: State.LINGERING, **_ALWAYS},
    State.ANSWERING: {Event.ANSWERED: State.IDLE, **_ALWAYS},
    State.LINGERING: {Event.BODY_END: State.IDLE, **_ALWAYS},
    State.CLOSING: {Event.LOST: State.CLOSED},
    State.CLOSED: {},
}
_CLOSED = (State.CLOSING, State.CLOSED)


class HttpConnection(Accepted, HttpToolsProtocol):
    """One connection of a listener.

    Attributes:
        deadline: when it has been in its state for too long; `unread_deadline`: when the peer had to read its answer.
        account: the bytes of a request, of what it expands to, and of what was sent ahead of its turn.
    """

    cycle: RequestResponseCycle | None  # type: ignore[assignment]

    def __init__(self, listener: HttpListener, address: str) -> None:
        super().__init__(listener.config, listener.uvicorn_state, {})
        self.logger = _uvicorn_logger
        self.address = address
        self.state, self.deadline, self.unread_deadline = State.NEW, math.inf, math.inf
        self.account = ByteAccount(listener.buffers, self._give_way)
        self._listener = listener
        self._exchange: Exchange | None = None
        self._is_last, self._answer_headers = False, listener.uvicorn_state.default_headers
        # Part of a head, what was sent ahead, or what the next loop iteration parses; nothing is read in the last two.
        self._buffered, self._num_fed, self._is_paused = b"", 0, False
        # Bytes of the body that are to come, None of a chunked one; those that came, and other bytes of a chunked one.
        self._body_left: int | None = 0
        self._body_bytes = self._framing_bytes = 0
        self._body_parts: list[bytes | bytearray] = []
        self._idle_work_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self.has_connected = True
        self._listener.waiting[State.NEW][self] = None
        self.deadline = self._listener.clock() + self._listener.time_limits_s[State.NEW]

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify those who work for this client."""
        super().connection_lost(exc)
        self._advance(Event.LOST)
        self._forget()
        self._listener.leave(self)
        self.account.close()

    def data_received(self, data: bytes) -> None:
        """Parse bytes as far as the end of one request, and keep the remainder."""
        if self.state in _CLOSED:
            return
        clock, num_bytes = self._listener.clock, len(data)
        started_at = clock()
        try:
            if self._is_paused or self.state is State.ANSWERING or self.unread_deadline != math.inf:
                self._keep_ahead(data)
            else:
                self._parse(data, started_at + MAX_READ_S)
        except (ShardrankError, httptools.HttpParserError) as error:
            cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
            if isinstance(cause, httptools.HttpParserError):
                cause = malformed("", f"not HTTP/1.1: {cause}")
            if not isinstance(cause, ShardrankError):
                raise
            self._refuse(cause, closes=True)
        is_short = num_bytes < _SHORT_READ_BYTES and self.state in (State.HEAD, State.BODY)
        # By the wall clock, and so no more than a turn: the process may have been suspended meanwhile.
        self._idle_work_s += min(MAX_READ_S, clock() - started_at) + is_short * _SHORT_READ_S
        if self._idle_work_s > self._listener.max_idle_work_s:
            self.spent(0.0)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer what is complete, to a client that has closed its side."""
        if self.state is not State.ANSWERING or self._listener.ssl is not None:
            return False
        self.close_with_answer()
        return True

    def pause_writing(self) -> None:
        """Wait for a peer that does not read its answer, for so long."""
        super().pause_writing()
        self.unread_deadline = self._listener.clock() + self._listener.limits.receive_timeout_s

    def resume_writing(self) -> None:
        """Continue: the peer has read it."""
        super().resume_writing()
        self.unread_deadline = math.inf
        if self.state is State.ANSWERING and self._exchange is not None and self._exchange.is_answered:
            self.on_response_complete()
        else:
            self._read_on()

    def on_headers_complete(self) -> None:
        """Admit a request by its head and start its application, or refuse it."""
        parser, listener, headers, scope = self.parser, self._listener, self.headers, self.scope
        method, version = parser.get_method().decode("ascii"), parser.get_http_version()
        if parser.should_upgrade():
            if method == "CONNECT":
                raise InvalidRequestError("", "CONNECT: this method is not allowed here", kind="method_not_allowed")
            # `_parse` has it parsed again.
            return
        fields = dict(reversed(headers))
        length = body_length(version, headers, fields)
        target = httptools.parse_url(self.url)
        if target.path is None:
            raise malformed("", "not HTTP/1.1: the target has no path")
        path = target.path.decode("ascii")
        if "%" in path:
            path = urllib.parse.unquote(path)
        exchange = self._exchange = Exchange(self, method, path, fields)
        scope["method"], scope["http_version"], scope["state"] = method, version, {"exchange": exchange}
        scope["path"], scope["raw_path"], scope["query_string"] = path, target.path, target.query or b""
        # uvicorn would add trailers to those of the scope.
        self.headers = []
        self._body_left, self._body_bytes, self._framing_bytes = length, 0, 0
        self._is_last = listener.is_draining or version == "1.0" or not parser.should_keep_alive()
        self._answer_headers = self.server_state.default_headers
        if b"x-request-id" in fields:
            self._answer_headers = [*self._answer_headers, (b"x-request-id", exchange.request_id.encode("latin-1"))]
        self._advance(Event.HEAD_END)
        if length is not None and length > listener.limits.max_body_bytes:
            self._refuse(body_too_large("max_body_bytes", listener.limits.max_body_bytes, length))
        elif (error := listener.admit(exchange)) is not None:
            self._answer(error)
        elif exchange.respond is not None:
            if self.expect_100_continue:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        else:
            self.cycle = RequestResponseCycle(
                scope=scope,
                transport=self.transport,
                flow=self.flow,
                logger=self.logger,
                access_logger=self.access_logger,
                access_log=False,
                default_headers=self._answer_headers,
                message_event=asyncio.Event(),
                expect_100_continue=self.expect_100_continue,
                keep_alive=not self._is_last,
                on_response=self.on_response_complete,
            )
            self._begin(self.cycle.run_asgi(self.app))

    def on_body(self, body: bytes) -> None:
        """Keep a part of a body, if there is room for it."""
        self._framing_bytes -= len(body) + _CHUNK_LINE_BYTES
        if self.state is not State.BODY:
            return
        max_bytes, parts = self._listener.limits.max_body_bytes, self._body_parts
        self._body_bytes += len(body)
        try:
            if self._body_bytes > max_bytes:
                raise body_too_large("max_body_bytes", max_bytes, f"at least {self._body_bytes}")
            self.account.charge(len(body))
        except ShardrankError as error:
            self._refuse(error)
            return
        if len(body) >= _SHORT_PART_BYTES or not parts:
            parts.append(body)
        elif isinstance(last := parts[-1], bytearray):
            last += body
        else:
            parts.append(bytearray(body))

    def on_message_complete(self) -> None:
        """Answer the request, or give the body to the application."""
        exchange, cycle, self._body_left = self._exchange, self.cycle, 0
        if self.state is State.LINGERING:
            self._advance(Event.BODY_END)
            self._await_request()
        elif self.state is State.BODY and exchange is not None:
            body = b"".join(self._body_parts)
            self._body_parts.clear()
            self._advance(Event.BODY_END)
            if exchange.respond is not None:
                self._begin(self._respond(exchange, exchange.respond, body))
            elif cycle is not None:
                # As bytes, of which uvicorn makes no copy.
                cycle.body = body  # type: ignore[assignment]
                cycle.more_body = False
                cycle.message_event.set()

    def close_with_answer(self) -> None:
        """Make the answer that is awaited the connection's last."""
        self._is_last = True
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        """Go on to the next request, once the peer has read what was written."""
        if self.state in _CLOSED:
            return
        exchange = self._exchange
        if exchange is not None:
            exchange.is_answered = True
        if self.unread_deadline != math.inf and self.state is State.ANSWERING:
            self.account.hold(self.transport.get_write_buffer_size())
            return
        self._exchange = self.cycle = self.scope = None  # type: ignore[assignment]
        self._advance(Event.ANSWERED)
        self._idle_work_s = 0.0
        self._body_parts.clear()
        self.account.refund(self.account.held)
        if exchange is not None:
            exchange.respond = exchange.on_leave = None  # they would keep the request and its version
            for callback in exchange.on_sent:
                callback()
        if self.transport.is_closing():
            self.end()
        elif self.state is State.IDLE and (self._is_last or self._is_paused):
            self._await_request()

    def spent(self, seconds: float) -> None:
        """Count work for a request that is not answered yet; drop a connection of much work and no answers."""
        self._idle_work_s += seconds
        if self._idle_work_s > self._listener.max_idle_work_s and self.state not in _CLOSED:
            self._listener.note("idle_work")
            self.drop()

    def end(self) -> None:
        """Close the connection, once all that was written is sent."""
        if self.state not in _CLOSED:
            self._advance(Event.CLOSE)
            self._forget()
            self.account.refund(self.account.held)
            self.transport.close()

    def drop(self) -> None:
        """Close the connection now."""
        if self.state not in _CLOSED:
            self._advance(Event.CLOSE)
        if (connected := self.transport.get_extra_info("socket")) is not None:
            forget_unsent(connected)
        self.transport.abort()

    def expire(self, now: float) -> None:
        """Act on a deadline that has passed."""
        if self.unread_deadline <= now:
            self._listener.note("unread")
            self.drop()
        elif self.state in (State.HEAD, State.BODY):
            limit = f"receive_timeout_s = {self._listener.limits.receive_timeout_s} s"
            error = DeadlineExceededError(f"the request was not complete after {limit}", kind="request_timeout")
            self._refuse(error, closes=True)
        elif self.state is State.CLOSING:
            self.drop()
        elif self.state is not State.ANSWERING:
            self.end()
        elif self.unread_deadline == math.inf and self.transport.is_closing():
            # The application has failed within its answer.
            self.end()
        elif self._buffered and self._has_left():
            self.drop()
        else:
            self.deadline = now + CHECK_S

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _respond(self, exchange: Exchange, respond: Respond, body: bytes) -> None:
        if self._exchange is not exchange:
            return
        exchange.on_leave = None
        reply = await respond(body)
        if self._exchange is exchange and self.state not in _CLOSED:
            self.transport.write(reply.encode(self._answer_headers, is_last=self._is_last))
            self.on_response_complete()

    def _advance(self, event: Event) -> None:
        before, listener = self.state, self._listener
        after = self.state = TRANSITIONS[before][event]
        if before in listener.waiting:
            listener.waiting[before].pop(self, None)
        if after in listener.waiting:
            listener.waiting[after][self] = None
        if before is not State.HEAD or after is not State.BODY:
            self.deadline = listener.clock() + listener.time_limits_s[after]

    def _parse(self, data: bytes, until: float) -> None:
        """Feed the parser as far as the end of a request, or until the clock says `until`; keep the remainder.

        Raises HttpParserError for what is malformed, or raised by a callback, and InvalidRequestError.
        """
        listener, max_header_bytes, overlap = self._listener, self._listener.limits.max_header_bytes, len(_END) - 1
        start, searched = self._num_fed, max(0, len(self._buffered) - overlap)
        if self._buffered:
            data = self._buffered + data
        view = memoryview(data)
        while start < len(data) and self.state is not State.ANSWERING:
            is_unread = self.unread_deadline != math.inf
            if is_unread or (start > self._num_fed and listener.clock() >= until):
                self._pause()
                if not is_unread:
                    self.loop.call_soon(self._read_on)
                break
            is_chunked = self._body_left is None
            if self._body_left:
                end = min(len(data), start + self._body_left)
                self._body_left -= end - start
            elif is_chunked:
                # Its end looks like that of a head, maybe with trailers; such bytes in a chunk do no harm.
                limit = min(len(data), start + _CHUNKED_BYTES)
                end = data.find(_END, max(0, start - overlap), limit) + len(_END)
                end = limit if end <= overlap else end
                self._framing_bytes += end - start
            else:
                end = data.find(_END, max(start, searched)) + len(_END)
                if (end if end > overlap else len(data)) - start > max_header_bytes:
                    raise header_too_large(max_header_bytes)
                if end <= overlap:
                    break
            parser = self.parser
            try:
                parser.feed_data(view[start:end])
            except httptools.HttpParserUpgrade:
                # No other protocol is granted. llhttp expects one to follow the head, and no body.
                self.parser = httptools.HttpRequestParser(self)
            if self.parser is not parser:
                self.parser.feed_data(_UPGRADE.sub(b"", data[start:end]))
            start = end
            if is_chunked and self._framing_bytes > max_header_bytes:
                raise header_too_large(max_header_bytes)
            if self.state in _CLOSED:
                return
        # The end of a chunked body is searched for in what was fed, too.
        self._num_fed = min(start, overlap) if self._body_left is None else 0
        self._buffered = data[start - self._num_fed :]
        if not self._buffered:
            return
        if self.state is State.ANSWERING:
            ahead, self._buffered = self._buffered, b""
            self._keep_ahead(ahead)
        elif self.state in (State.NEW, State.IDLE):
            # RFC 9112, 2.2: some send an empty line after a body.
            self._buffered = self._buffered.lstrip(b"\r\n")
            if self._buffered:
                self._advance(Event.BYTES)

    def _keep_ahead(self, data: bytes) -> None:
        """Keep bytes that came before the turn of their request, and read nothing more. Raises OverloadedError."""
        self._buffered += data
        self._pause()
        self.account.charge(len(data))

    def _pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def _read_on(self) -> None:
        if self._is_paused and self.unread_deadline == math.inf and self.state not in (State.ANSWERING, *_CLOSED):
            data, self._buffered = self._buffered[self._num_fed :], self._buffered[: self._num_fed]
            self._is_paused = False
            self.transport.resume_reading()
            self.data_received(data)

    def _await_request(self) -> None:
        if self._is_last or self._listener.is_draining:
            self.end()
        elif self._is_paused:
            self.loop.call_soon(self._read_on)

    def _refuse(self, error: ShardrankError, *, closes: bool = False) -> None:
        self._listener.note(error.kind)
        self._answer(error, closes=closes)

    def _answer(self, error: ShardrankError, *, closes: bool = False) -> None:
        """Answer in place of the application. What still comes of a body is dropped, unless it `closes`."""
        exchange, cycle = self._exchange, self.cycle
        is_answered = exchange is not None and exchange.is_answered
        has_begun = self.state is State.LINGERING or is_answered or (cycle is not None and cycle.response_started)
        if not has_begun:
            path, request_id = ("", "") if exchange is None else (exchange.path, exchange.request_id)
            headers = self.server_state.default_headers if exchange is None else self._answer_headers
            reply = error_reply(path, request_id, error)
            self.transport.write(reply.encode(headers, is_last=closes or self._is_last))
        if has_begun or closes:
            self.end()
        else:
            self._forget()
            self.on_response_complete()

    def _give_way(self, error: OverloadedError) -> None:
        if self.state is State.BODY and self.account.held:
            self._refuse(error)

    def _forget(self) -> None:
        """Drop what came, and tell the application, if it has not answered, that its client has left."""
        exchange, cycle = self._exchange, self.cycle
        self._exchange = self.cycle = self.scope = None  # type: ignore[assignment]
        self._body_parts.clear()
        if self.state in _CLOSED:
            self._buffered = b""
        if cycle is not None:
            cycle.disconnected, cycle.waiting_for_100_continue = True, False
            cycle.message_event.set()
        if exchange is not None:
            exchange.leave()

    def _has_left(self) -> bool:
        """Return whether the peer has closed or reset; the loop does not see that of what it does not read."""
        if (connected := self.transport.get_extra_info("socket")) is None:
            return True
        poller = select.poll()
        poller.register(connected.fileno(), 0)
        return bool(poller.poll(0))


Admit: TypeAlias = Callable[[Exchange], ShardrankError | None]
"""Matches the route of a request whose head is there, sets its `respond`, and returns why it is refused by that.

What watches the exchange is called if `respond` will not be, since the client has left."""


class HttpListener(ConnectionListener[HttpConnection]):
    """The connections of a port, and what they share. Belongs to one event loop.

    `app` answers what `admit` lets in; `failed` counts refused connections.

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
        self.noted: Counter[str] = Counter()
        self._failed = failed

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
        """Count what was refused, or closed. TLS logs itself."""
        if not kind.startswith("tls_"):
            self.noted[kind] += 1
        self._failed("http", "connection", kind)

    def expire(self) -> None:
        """Act on each deadline that has passed."""
        now = self.clock()
        for connection in [each for each in self.open if each.deadline <= now or each.unread_deadline <= now]:
            connection.expire(now)
