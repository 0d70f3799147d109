"""One connection of a node server: requests in, answers out in whatever order they are ready."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Protocol

from shard_node.errors import WireError
from shard_node.wire.connection import FrameConnection
from shard_node.wire.frame import Frame
from shard_node.wire.messages import Buffer, encode_error, encode_goaway
from shard_node.wire.request_handler import RequestHandler, ServerLimits

logger = logging.getLogger(__name__)

# What the kernel keeps of a Unix socket's unread bytes, 208 KB by default, is less than the answer to a batch: both
# ends would wake up for each piece of it. The kernel may allow less; TCP's buffers grow by themselves.
UNIX_SEND_BUFFER_BYTES = 1 << 20


class ConnectionOwner(Protocol):
    """Who is told about connections: the server."""

    def opened(self, connection: ServerConnection) -> None:
        """A connection was accepted. May refuse it."""
        ...

    def ended(self, connection: ServerConnection) -> None:
        """A connection is gone."""
        ...


class ServerConnection(FrameConnection):
    """Serves one peer. A bad request is answered with an ERROR frame; only a broken stream ends the connection.

    When the peer leaves answers unread, no more of its requests are taken, so what it can make the node hold is
    bounded by `max_unsent_bytes` and what was in flight by then.
    """

    def __init__(
        self, owner: ConnectionOwner, handler: RequestHandler, limits: ServerLimits, clock: Callable[[], float]
    ) -> None:
        super().__init__(limits.max_frame_bytes, limits.max_unsent_bytes)
        self._owner = owner
        self._handler = handler
        self._limits = limits
        self._clock = clock
        self._receive_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._frame_begun_at = 0.0

    def go_away(self) -> None:
        """Asks the peer to send no more requests; it closes the connection when it has its answers."""
        self.send(encode_goaway())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Announces itself to the server."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SEND_BUFFER_BYTES)
        self._owner.opened(self)

    def buffer_updated(self, nbytes: int) -> None:
        """Takes frames, and starts the time limit of one that is not whole yet."""
        if self._receive_timer is None:
            self._frame_begun_at = self._clock()
        super().buffer_updated(nbytes)
        self._watch_receiving()

    def frame_received(self, frame: Frame) -> None:
        """Has it answered."""
        # A frame that came in pieces spent its budget from its first byte on.
        begun_at = self._frame_begun_at
        self._stop_receive_timer()
        budget_us = frame.header.budget_us
        deadline = begun_at + budget_us * 1e-6 if budget_us else None
        self._handler.handle(frame, deadline, self._send_answer, self._is_wanted)
        self._frame_begun_at = self._clock()

    def stream_broken(self, error: WireError, request_id: int) -> None:
        """Says what is wrong, and closes."""
        logger.warning("closing the connection from %s: %s", self.peer, error)
        self.refuse(encode_error(request_id, error))

    def pause_writing(self) -> None:
        """The peer does not read: take nothing more from it."""
        self._stop_receive_timer()
        self.hold_reading()
        self._send_timer = self._loop.call_later(self._limits.send_timeout_ms / 1e3, self._send_timed_out)

    def resume_writing(self) -> None:
        """The peer reads again."""
        self._stop_send_timer()
        self._frame_begun_at = self._clock()
        self.release_reading()
        self._watch_receiving()

    def connection_ended(self, error: Exception | None) -> None:
        """Forgets its timers. Requests that have not begun will not be."""
        del error
        self._stop_receive_timer()
        self._stop_send_timer()
        self._owner.ended(self)

    def _send_answer(self, buffers: list[Buffer]) -> None:
        # False means that the peer has gone: nobody is left to be told.
        self.send(buffers)

    def _is_wanted(self) -> bool:
        return not self.closed.done()

    def _watch_receiving(self) -> None:
        if self._receive_timer is None and self._receiver.is_mid_frame and self.is_open and not self.is_reading_held:
            timeout_s = self._limits.receive_timeout_ms / 1e3
            self._receive_timer = self._loop.call_later(timeout_s, self._receive_timed_out)

    def _receive_timed_out(self) -> None:
        self._receive_timer = None
        request_id = self._receiver.request_id
        error = WireError(f"frame was not whole {self._limits.receive_timeout_ms} ms after its first byte")
        self.stream_broken(error, request_id)

    def _send_timed_out(self) -> None:
        logger.warning(
            "closing the connection from %s: it left answers unread for %d ms", self.peer, self._limits.send_timeout_ms
        )
        self.abort()

    def _stop_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
