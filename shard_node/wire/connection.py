"""One connection that speaks frames: what node and client have in common. Works under asyncio and uvloop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any, cast

from shard_node.errors import WireError
from shard_node.wire.frame import Frame, FrameReceiver
from shard_node.wire.messages import Buffer

# How long the end of a refused connection is read and thrown away: closing a socket with unread bytes makes TCP
# reset it, and the peer may then never see the ERROR frame that says why.
LINGER_S = 1.0
KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 3


class FrameConnection(asyncio.BufferedProtocol):
    """Reads frames straight into the arrays they are handed over in, and writes frames from the arrays they lie in.

    A subclass says what happens with a frame, with a broken stream, and when the connection is gone. The transport asks
    for a pause in writing above `max_unsent_bytes`, and for more below a quarter of it; servers set other limits.
    """

    def __init__(self, max_frame_bytes: int, max_unsent_bytes: int) -> None:
        self._max_unsent_bytes = max_unsent_bytes
        self._receiver = FrameReceiver(max_frame_bytes)
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._linger_timer: asyncio.TimerHandle | None = None
        self.is_discarding = False
        self.is_reading_held = False
        self.closed: asyncio.Future[None] = self._loop.create_future()

    def frame_received(self, frame: Frame) -> None:
        """Handle a whole frame."""
        raise NotImplementedError

    def stream_broken(self, error: WireError, request_id: int) -> None:
        """Handle a stream that can't be followed any more; `request_id` is 0 if it could not be read."""
        raise NotImplementedError

    def connection_ended(self, error: Exception | None) -> None:
        """Handle the end of the connection; called once."""
        raise NotImplementedError

    @property
    def peer(self) -> str:
        """The other end, for messages."""
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a Unix socket"

    @property
    def certificate(self) -> dict[str, Any]:
        """The other end's certificate, verified, as `ssl.SSLSocket.getpeercert` has it; empty if none was asked for."""
        found = self._transport.get_extra_info("peercert") if self._transport is not None else None
        return found or {}

    @property
    def was_made(self) -> bool:
        """Whether a transport was ever there, and thus `connection_ended` will come or has come."""
        return self._transport is not None or self.closed.done()

    @property
    def is_open(self) -> bool:
        """Whether frames can still be sent."""
        return self._transport is not None and not self._transport.is_closing() and not self.is_discarding

    def send(self, buffers: Sequence[Buffer]) -> bool:
        """Write one frame; False if the connection is gone."""
        if self._transport is None or not self.is_open:
            return False
        self._transport.writelines(buffers)
        return True

    def refuse(self, buffers: Sequence[Buffer]) -> None:
        """Write one last frame, then throw away what still comes until the peer has closed or a second is over."""
        if self._transport is None or not self.send(buffers):
            return
        self.is_discarding = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._linger_timer = self._loop.call_later(LINGER_S, self._transport.abort)
        if self.is_reading_held:
            self.is_reading_held = False
            self._transport.resume_reading()

    def close(self) -> None:
        """Close when what was written is out. Idempotent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    def hold_reading(self) -> None:
        """Take no more frames, from this moment on, until `release_reading`."""
        if self._transport is not None and self.is_open and not self.is_reading_held:
            self.is_reading_held = True
            self._transport.pause_reading()

    def release_reading(self) -> None:
        """Take the frames that came before `hold_reading` stopped the reading, and read on."""
        if self._transport is None or not self.is_reading_held:
            return
        self.is_reading_held = False
        self.take_frames()
        # Taking them may have filled the write buffer again, or have ended the connection.
        if not self.is_reading_held and not self._transport.is_closing():
            self._transport.resume_reading()

    def take_frames(self) -> None:
        """Hands over every whole frame that has been received."""
        while not self.is_reading_held and self.is_open:
            try:
                frame = self._receiver.next_frame()
            except WireError as error:
                self.stream_broken(error, self._receiver.request_id)
                return
            if frame is None:
                return
            self.frame_received(frame)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the socket up."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(self._max_unsent_bytes, self._max_unsent_bytes // 4)
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            # A host that has vanished sends nothing: without these a connection to it would look alive for hours.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        del sizehint
        return self._receiver.get_discard_buffer() if self.is_discarding else self._receiver.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came."""
        if not self.is_discarding:
            self._receiver.received(nbytes)
            self.take_frames()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell who waits that the transport has closed."""
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self.connection_ended(exc)
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)
