"""Uvicorn's HTTP protocol with the bounds it does not have: time to receive, size of headers, number of connections.

A request must be complete within `receive_timeout_s` of its first byte. A connection that brings no request at all, or
a peer that does not take its answer, is closed after the same time. So a stalled or half-sent request holds nothing for
longer, however slowly its bytes trickle in.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import chain
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from loader.errors import ShardrankError
from serving.errors import HeaderTooLargeError, MalformedRequestError, OverloadedError, RequestTimeoutError
from serving.http.asgi import DISCONNECT_EXTENSION
from serving.http.direct import DirectRoutes
from serving.http.direct_exchange import DirectExchange
from serving.http.disconnect import Disconnect
from serving.http.exchange import Reply
from serving.http.lazy_timer import LazyTimer
from serving.http.peer_socket import drop_peer, is_readable
from serving.http.reading import LongBody
from serving.http.reply_head import refusal, reply_head
from serving.limits import RequestLimits
from serving.observe.metrics import ServingMetrics

logger = logging.getLogger(__name__)

# How long the rest of a body that was refused is read and dropped, so that the client gets to see the refusal.
LINGER_S = 1.0
# How long a connection that has brought nothing yet is kept when the server stops: its request may be on the way.
LAST_REQUEST_S = 0.5
# Head and body of an answer up to so long are joined for one write; a longer body is not copied for that.
_JOINED_BYTES = 64 * 2**10
_DEFECT = Reply(500, b"Internal Server Error", "text/plain; charset=utf-8")


class BoundedHttpProtocol(HttpToolsProtocol):
    """One HTTP connection. Uvicorn gives it only what is its own; limits and routes stand in a derived class."""

    limits: RequestLimits
    metrics: ServingMetrics
    routes: DirectRoutes
    # Set for all connections of a server that is about to stop: each answer is its connection's last.
    is_draining = False
    # What is answered last, of the application's or our own; uvicorn's type knows the former only.
    cycle: RequestResponseCycle | DirectExchange  # type: ignore[assignment]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._receive_timer = LazyTimer(self.loop)
        self._idle_timer = LazyTimer(self.loop)
        self._write_timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._has_begun = False
        self._head_bytes = 0
        # Since a body's last part: the names of its chunks, and headers behind it.
        self._bodiless_bytes = 0
        self._refusal: ShardrankError | None = None
        self._deferred: ShardrankError | None = None
        self._body_event = asyncio.Event()
        self.long_body: LongBody | None = None
        # Of the request that is being answered: not the last one that came, if some were sent ahead.
        self._disconnect: Disconnect | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuses one connection too many; else waits for its first request."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            allowed = self.limits.max_connections
            self._refuse(OverloadedError(f"more than the limit max_connections = {allowed} connections are open"))
            return
        self._start_receive_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells the handler, which may drop what has not begun."""
        self._receive_timer.close()
        self._idle_timer.close()
        self._stop_write_timer()
        super().connection_lost(exc)
        if self._disconnect is not None:
            self._disconnect.gone()

    def data_received(self, data: memoryview) -> None:  # type: ignore[override]
        """Counts bytes until the headers are complete, and starts the clock with a request's first byte."""
        if self._deferred is not None or self.transport.is_closing():
            return
        if self._in_head:
            if not self._receive_timer.is_running:
                self._start_receive_timer()
            if self._head_bytes > self.limits.max_header_bytes:
                self._refuse_in_turn(self._header_too_large())
                return
            self._head_bytes += len(data)
        self._bodiless_bytes += len(data)
        super().data_received(data)  # type: ignore[arg-type]
        if self._in_head:
            return
        if self._bodiless_bytes > self.limits.max_header_bytes:
            self._refuse_in_turn(self._header_too_large())
        elif isinstance(self.cycle, DirectExchange) and self.cycle.more_body:
            self.long_body = self.cycle.expect_rest()

    def end_long_body(self) -> None:
        """All of it has come, past the parser: the next request is for a new one."""
        self.long_body = None
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.on_message_complete()

    def on_message_begin(self) -> None:
        """A request's first byte."""
        self.url = b""
        self.headers = []
        self._has_begun = True
        if not self._receive_timer.is_running:
            self._start_receive_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header. What stands behind a body says nothing about how it was to be read, so it is dropped."""
        if self._in_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Refuses long headers that came in one piece, which `data_received` could not see; else begins to answer."""
        headers = self.headers
        if (
            len(self.url) + 4 * len(headers) + sum(map(len, chain.from_iterable(headers)))
            > self.limits.max_header_bytes
        ):
            self._refusal = self._header_too_large()
            raise self._refusal
        self._in_head = self._has_begun = False
        self._head_bytes = self._bodiless_bytes = 0
        parser = self.parser
        route = self.routes.find(self.url) if parser.get_method() == b"POST" else None
        if route is None or parser.should_upgrade():
            self._hand_to_application()
        else:
            exchange = DirectExchange(
                route,
                dict(reversed(headers)),
                self.transport,
                self.flow,
                self._body_event,
                self.limits.max_body_bytes,
                keep_alive=parser.should_keep_alive() and parser.get_http_version() != "1.0",
            )
            before, self.cycle = self.cycle, exchange
            if before is None or before.response_complete:
                self._start_answer(exchange)
            else:
                self.flow.pause_reading()
                self.pipeline.appendleft((exchange, self.app))  # type: ignore[arg-type]
        if self.is_draining or parser.should_upgrade():
            # The parser takes what follows a wish for another protocol for no body: it must not pass for a request.
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        self._bodiless_bytes = 0
        cycle = self.cycle
        if isinstance(cycle, DirectExchange):
            cycle.take(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete: the rest takes as long as its own deadline allows."""
        self._in_head = True
        self._receive_timer.stop()
        cycle = self.cycle
        if not isinstance(cycle, DirectExchange):
            super().on_message_complete()
        elif not cycle.response_complete:
            cycle.end_body()
        if cycle.response_complete and not self._idle_timer.is_running:
            # The body was refused early and is now dropped to its end: from here on the connection is idle.
            self._idle_timer.start(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def on_response_complete(self) -> None:
        """If the body was refused before it was complete, the rest of it is dropped for a moment."""
        if self._deferred is not None and not (self.pipeline and not self.pipeline[-1][0].more_body):
            self._refuse(self._deferred)
        self._go_on()
        cycle = self.cycle
        if cycle.response_complete and cycle.more_body and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._receive_timer.start(LINGER_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what it can't parse; the error's form is this API's own."""
        self._refuse_in_turn(self._refusal or MalformedRequestError("", f"not HTTP: {msg}"))

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has sent all it wants to send gets the answers to its complete requests."""
        if not self._owes_answer():
            return False
        self.cycle.keep_alive = False
        return True

    def begin_drain(self) -> None:
        """The next answer is this connection's last."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def shutdown(self) -> None:
        """Closes an idle connection; one that has brought its first request, or is about to, gets its answer."""
        is_idle = self.cycle is None or self.cycle.response_complete
        if not is_idle or self.transport.is_closing():
            super().shutdown()
        elif self._head_bytes == 0 and not self._has_begun and (self.cycle is None or is_readable(self.transport)):
            self._unset_keepalive_if_required()
            self._receive_timer.start(min(LAST_REQUEST_S, self.limits.receive_timeout_s), self._on_receive_timeout)
        elif self._head_bytes == 0 and not self._has_begun:
            super().shutdown()

    def _is_between_requests(self) -> bool:
        """Whether all that came before is answered, and nothing has come of what is next."""
        if not self._in_head or self._has_begun or self._head_bytes or self._deferred is not None:
            return False
        return (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing()

    def _hand_to_application(self) -> None:
        url, headers = self.url, self.headers
        # Makes the scope, which the requests that are answered directly do without, and forgets what has come.
        super().on_message_begin()
        self.url = url
        self.headers.extend(headers)
        self.expect_100_continue = any(
            name == b"expect" and value.lower() == b"100-continue" for name, value in headers
        )
        disconnect = Disconnect()
        # ASGI lets a server add extensions of its own; uvicorn's type does not.
        self.scope["extensions"] = {DISCONNECT_EXTENSION: disconnect}  # type: ignore[dict-item]
        if self.cycle is None or self.cycle.response_complete:
            self._disconnect = disconnect
        super().on_headers_complete()

    def _start_waiting(self, cycle: RequestResponseCycle | DirectExchange, app: ASGI3Application) -> None:
        if isinstance(cycle, DirectExchange):
            self._start_answer(cycle)
            return
        self._disconnect = cycle.scope["extensions"][DISCONNECT_EXTENSION]  # type: ignore[assignment]
        task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _start_answer(self, exchange: DirectExchange) -> None:
        self._disconnect = exchange
        task = exchange.task = self.loop.create_task(self._answer(exchange))
        self.tasks.add(task)

    async def _answer(self, exchange: DirectExchange) -> None:
        """Runs a handler and writes what it gives."""
        try:
            reply = await exchange.route.handler(exchange)
            if self.flow.write_paused:
                await self._peer_takes(exchange)
            self._reply(exchange, reply)
        except BaseException as error:
            # Handlers turn what they raise into answers. This is a defect, or a server that stops and waits no longer.
            logger.error("%s was not answered", exchange.target, exc_info=error)
            if not exchange.response_complete:
                exchange.keep_alive = False
                await self._peer_takes(exchange)
                self._reply(exchange, _DEFECT)
            if not isinstance(error, Exception):
                raise
        finally:
            if exchange.task is not None:
                self.tasks.discard(exchange.task)
                exchange.task = None

    async def _peer_takes(self, exchange: DirectExchange) -> None:
        if self.flow.write_paused and not exchange.disconnected:
            await self.flow.drain()

    def _reply(self, exchange: DirectExchange, reply: Reply) -> None:
        if exchange.disconnected:
            return
        head = reply_head(reply, self.server_state.default_headers, keep_alive=exchange.keep_alive)
        if len(reply.body) <= _JOINED_BYTES:
            self.transport.write(head + reply.body)
        else:
            self.transport.write(head)
            self.transport.write(reply.body)
        exchange.finish()
        if not exchange.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def _go_on(self) -> None:
        """After an answer: to the next request if it is here, else idle."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.pipeline:
            self._start_waiting(*self.pipeline.pop())
        else:
            self._idle_timer.start(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _unset_keepalive_if_required(self) -> None:
        self._idle_timer.stop()

    def _unsupported_upgrade_warning(self) -> None:
        # Whoever asks for a WebSocket gets the answer that the path has for a plain request.
        pass

    def _owes_answer(self) -> bool:
        """Whether a request that has come in full is not answered yet."""
        if self.cycle is None or self.transport.is_closing():
            return False
        return bool(self.pipeline) or not (self.cycle.response_complete or self.cycle.more_body)

    def pause_writing(self) -> None:
        """The peer does not take its answer."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.receive_timeout_s, self._drop_peer)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        self._stop_write_timer()

    def _on_receive_timeout(self) -> None:
        if self.transport.is_closing():
            return
        answering = self._in_head and self.cycle is not None and not self.cycle.response_complete
        if answering or self.flow.read_paused:
            # A request sent ahead of its turn: it is not read on before the one that is being handled is answered.
            self._start_receive_timer()
            return
        nothing_came = self._in_head and self._head_bytes == 0 and not self._has_begun
        if nothing_came or (not self._in_head and self.cycle is not None and self.cycle.response_started):
            self.transport.close()
            return
        limit = f"receive_timeout_s = {self.limits.receive_timeout_s} s"
        self._refuse_in_turn(RequestTimeoutError(f"the request was not complete after {limit}"))

    def _drop_peer(self) -> None:
        drop_peer(self.transport)

    def _header_too_large(self) -> HeaderTooLargeError:
        return HeaderTooLargeError(
            f"the headers are longer than the limit max_header_bytes = {self.limits.max_header_bytes}"
        )

    def _refuse_in_turn(self, error: ShardrankError) -> None:
        """Refuses what came behind requests that are still to be answered, once they are. What follows is not read."""
        if not self._owes_answer():
            self._refuse(error)
            return
        self._deferred = error
        self.long_body = None
        self._receive_timer.stop()

    def _refuse(self, error: ShardrankError) -> None:
        """Answers without an application, and closes. A handler that still waits for the body sees a disconnect."""
        if self.transport.is_closing():
            return
        self.metrics.failed("http", "connection", error.kind)
        # A request is answered once, even if the rest of its body turns out to be wrong.
        if self._in_head or self.cycle is None or not self.cycle.response_started:
            self.transport.write(refusal(error))
        self.transport.close()

    def _start_receive_timer(self) -> None:
        self._receive_timer.start(self.limits.receive_timeout_s, self._on_receive_timeout)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
