"""Uvicorn's HTTP protocol with the bounds it does not have: time to receive, size of headers, number of connections.

A request must be complete within `receive_timeout_s` of its first byte. A connection that brings no request at all, or
a peer that does not take its answer, is closed after the same time. So a stalled or half-sent request holds nothing for
longer, however slowly its bytes trickle in.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from loader.errors import ShardrankError
from serving.encode_json import RETRY_AFTER_S, encode, error_document
from serving.errors import HeaderTooLargeError, MalformedRequestError, OverloadedError, RequestTimeoutError
from serving.limits import RequestLimits
from serving.metrics import ServingMetrics

# How long the rest of a body that was refused is read and dropped, so that the client gets to see the refusal.
LINGER_S = 1.0
# How long a connection that has brought nothing yet is kept when the server stops: its request may be on the way.
LAST_REQUEST_S = 0.5
_NO_LINGER = struct.pack("ii", 1, 0)
DISCONNECT_EXTENSION = "shardrank.disconnect"


class Disconnect:
    """Tells a handler that its client has gone."""

    __slots__ = ("_callback", "_has_gone")

    def __init__(self) -> None:
        self._callback: Callable[[], None] | None = None
        self._has_gone = False

    def watch(self, callback: Callable[[], None]) -> None:
        """Sets what is called when the client goes: at once, if it has gone already."""
        self._callback = callback
        if self._has_gone:
            callback()

    def gone(self) -> None:
        """The connection has ended."""
        self._has_gone = True
        if self._callback is not None:
            self._callback()


def watch_client(request: Request) -> Callable[[Callable[[], None]], None]:
    """What registers a callback for the moment at which the client closes its connection."""
    disconnect = request.scope.get("extensions", {}).get(DISCONNECT_EXTENSION)

    def register(callback: Callable[[], None]) -> None:
        if disconnect is not None:
            disconnect.watch(callback)

    return register


class BoundedHttpProtocol(HttpToolsProtocol):
    """One HTTP connection. `bounded_protocol` gives uvicorn the class with its limits."""

    limits: RequestLimits
    metrics: ServingMetrics
    # Set for all connections of a server that is about to stop: each answer is its connection's last.
    is_draining = False

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._receive_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._has_begun = False
        self._head_bytes = 0
        self._refusal: ShardrankError | None = None
        self._deferred: ShardrankError | None = None
        self._disconnect = Disconnect()

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
        self._stop_receive_timer()
        self._stop_write_timer()
        super().connection_lost(exc)
        self._disconnect.gone()

    def data_received(self, data: bytes) -> None:
        """Counts bytes until the headers are complete, and starts the clock with a request's first byte."""
        if self.transport.is_closing() or self._deferred is not None:
            return
        if self._in_head:
            if self._receive_timer is None:
                self._start_receive_timer()
            if self._head_bytes > self.limits.max_header_bytes:
                self._refuse_in_turn(self._header_too_large())
                return
            self._head_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        """A request's first byte."""
        super().on_message_begin()
        self._has_begun = True
        self._disconnect = Disconnect()
        # ASGI lets a server add extensions of its own; uvicorn's type does not.
        self.scope["extensions"] = {DISCONNECT_EXTENSION: self._disconnect}  # type: ignore[dict-item]
        if self._receive_timer is None:
            self._start_receive_timer()

    def on_headers_complete(self) -> None:
        """Refuses long headers that came in one piece, which `data_received` could not see."""
        head = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if head > self.limits.max_header_bytes:
            self._refusal = self._header_too_large()
            raise self._refusal
        self._in_head = self._has_begun = False
        self._head_bytes = 0
        super().on_headers_complete()
        if self.is_draining:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """The request is complete: the rest takes as long as its own deadline allows."""
        self._in_head = True
        self._stop_receive_timer()
        super().on_message_complete()
        if self.cycle.response_complete and self.timeout_keep_alive_task is None:
            # The body was refused early and is now dropped to its end: from here on the connection is idle.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """If the body was refused before it was complete, the rest of it is dropped for a moment."""
        if self._deferred is not None and not (self.pipeline and not self.pipeline[-1][0].more_body):
            self._refuse(self._deferred)
        super().on_response_complete()
        cycle = self.cycle
        if cycle.response_complete and cycle.more_body and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._stop_receive_timer()
            self._receive_timer = self.loop.call_later(LINGER_S, self.transport.close)

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
        elif self._head_bytes == 0 and not self._has_begun and (self.cycle is None or _is_readable(self.transport)):
            self._unset_keepalive_if_required()
            self._stop_receive_timer()
            self._receive_timer = self.loop.call_later(
                min(LAST_REQUEST_S, self.limits.receive_timeout_s), self._on_receive_timeout
            )
        elif self._head_bytes == 0 and not self._has_begun:
            super().shutdown()

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
        self._receive_timer = None
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
        timeout_s = self.limits.receive_timeout_s
        self._refuse(RequestTimeoutError(f"the request was not complete after receive_timeout_s = {timeout_s} s"))

    def _drop_peer(self) -> None:
        # Without lingering, what the peer has not taken is thrown away, and not kept by the kernel for it.
        if (connected := self.transport.get_extra_info("socket")) is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

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
        self._stop_receive_timer()

    def _refuse(self, error: ShardrankError) -> None:
        """Answers without an application, and closes. A handler that still waits for the body sees a disconnect."""
        if self.transport.is_closing():
            return
        self.metrics.failed("http", "connection", error.kind)
        body = encode(error_document(error))
        phrase = HTTPStatus(error.http_status).phrase
        head = (
            f"HTTP/1.1 {error.http_status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
        )
        if error.http_status == HTTPStatus.SERVICE_UNAVAILABLE:
            head += f"retry-after: {RETRY_AFTER_S}\r\n"
        self.transport.write(head.encode() + b"\r\n" + body)
        self.transport.close()

    def _start_receive_timer(self) -> None:
        self._receive_timer = self.loop.call_later(self.limits.receive_timeout_s, self._on_receive_timeout)

    def _stop_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _is_readable(transport: asyncio.Transport) -> bool:
    """Whether bytes of the peer wait that the event loop has not seen yet."""
    poller = select.poll()
    poller.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poller.poll(0))


def bounded_protocol(limits: RequestLimits, metrics: ServingMetrics) -> type[BoundedHttpProtocol]:
    """The protocol class with its limits: uvicorn makes connections from a class alone."""
    return type("LimitedHttpProtocol", (BoundedHttpProtocol,), {"limits": limits, "metrics": metrics})
