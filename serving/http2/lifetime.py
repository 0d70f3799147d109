"""How a connection is kept, and how it ends: pings, idleness, age, floods, and a close that loses no answer."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from typing import TYPE_CHECKING, Any

from serving.http2 import frames
from serving.http2.errors import ErrorCode, Http2Error

if TYPE_CHECKING:
    from serving.http2.connection import Http2Connection

_ALIVE, _GOING = b"alive?\0\0", b"going\0\0\0"
_NO_LINGER = struct.pack("ii", 1, 0)
LINGER_S = 1.0
MAX_TICK_S = 1.0


class Lifetime:
    """Of one connection.

    A connection is asked to go in two steps (RFC 9113, section 6.8): first it is told to open no further stream, then,
    once a ping shows that it knows, which stream is the last one. It is closed when that one is answered.

    Attributes:
        has_begun: whether the peer's first frames have come.
        is_refusing: whether further streams are passed over; the peer was told that they will be.
        is_lingering: whether everything was said, and only the peer's close is waited for.
        has_heard: whether anything whole has come since the last ping.
    """

    def __init__(self, connection: Http2Connection[Any]) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._made = self._idle_since = self._pinged = self._loop.time()
        self._asked_to_go: float | None = None
        self._last_stream_id = frames.MAX_STREAM_ID
        self._control_frames = 0
        # When the last ping went: whether the peer had bytes to take before it, and how many it had taken.
        self._had_to_take, self._taken = False, 0
        # When it was last seen to have bytes to take.
        self._held_at = 0.0
        self.has_begun = self.is_refusing = self.is_lingering = False
        self.has_heard = True

    def begin(self, transport: asyncio.Transport) -> None:
        """The connection is there."""
        self._transport = transport
        self._schedule()

    def end(self) -> None:
        """The connection is gone."""
        if self._timer is not None:
            self._timer.cancel()

    def idle(self) -> None:
        """The last stream is over."""
        self._idle_since = self._loop.time()
        if self.is_refusing:
            self._linger()

    def control_frame(self, weight: int = 1) -> None:
        """Counts a frame that carries no request. Raises Http2Error for too many of them."""
        self._control_frames += weight
        if self._control_frames > self._connection.limits.max_control_frames:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that carry no request, or headers too long")

    def was_useful(self, count: int) -> None:
        """A peer that takes answers may send `count` control frames for that."""
        self._control_frames = max(0, self._control_frames - count)

    def on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Answers a ping, or takes the answer to one. Raises Http2Error."""
        if stream_id or len(payload) != 8:
            code = ErrorCode.PROTOCOL_ERROR if stream_id else ErrorCode.FRAME_SIZE_ERROR
            raise Http2Error(code, f"PING of {len(payload)} bytes on stream {stream_id}")
        self.control_frame()
        if not flags & frames.ACK:
            self._connection.write(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif payload == _GOING:
            self._refuse()

    def ask_to_go(self) -> None:
        """Streams that there are, or that come before the peer knows, are served; a second time changes nothing."""
        if self._asked_to_go is None:
            self._asked_to_go = self._loop.time()
            going = frames.goaway(frames.MAX_STREAM_ID, ErrorCode.NO_ERROR)
            self._connection.write(going + frames.frame(frames.PING, 0, 0, _GOING))

    def fail(self, error: Http2Error) -> None:
        """The peer broke a rule: it is told which, and everything ends."""
        if not self.is_lingering:
            # It must never be told of a later one than before (RFC 9113, section 6.8).
            last = min(self._last_stream_id, self._connection.last_stream_id)
            self._connection.write(frames.goaway(last, error.code, str(error)))
            self._linger()
            self._connection.drop_streams()

    def abort(self) -> None:
        """Ends it now."""
        if self._transport is not None:
            connected = self._transport.get_extra_info("socket")
            if connected is not None and self._transport.get_write_buffer_size():
                # What the peer does not take is thrown away, and not kept by the kernel for it.
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._transport.abort()

    def _refuse(self) -> None:
        if self._asked_to_go is not None and not self.is_refusing:
            self.is_refusing = True
            self._last_stream_id = self._connection.last_stream_id
            self._connection.write(frames.goaway(self._last_stream_id, ErrorCode.NO_ERROR))
            if not self._connection.streams:
                self._linger()

    def _linger(self) -> None:
        # A socket that is closed while the peer still sends resets it, and then the peer may lose the last answer.
        if not self.is_lingering and self._transport is not None and not self._transport.is_closing():
            self.is_lingering = True
            self._connection.flush()
            self._transport.write_eof()
            self._loop.call_later(LINGER_S, self._end_linger, self._num_held())

    def _end_linger(self, before: int) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        held = self._num_held()
        if 0 < held < before:
            # A slow peer has the time that it needs, as long as it takes something.
            self._loop.call_later(max(LINGER_S, self._connection.limits.patience_s), self._end_linger, held)
        else:
            self._transport.abort()

    def _num_held(self) -> int:
        """Bytes that were written and that the peer's host does not have, here and in the kernel."""
        self._connection.flush()
        transport = self._transport
        if transport is None or (connected := transport.get_extra_info("socket")) is None:
            return 0
        # SIOCOUTQ of tcp(7), which is the same number.
        try:
            (in_kernel,) = struct.unpack("i", fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(4)))
        except OSError:
            # It was closed in this turn of the loop.
            return 0
        return transport.get_write_buffer_size() + int(in_kernel)

    def _drop_stuck(self, now: float) -> None:
        """Drops streams that the peer's windows hold back for too long. They count while it has all that was sent."""
        connection = self._connection
        if connection.outflow.blocked:
            if self._num_held():
                self._held_at = now
            since = now - 2 * connection.limits.patience_s
            if self._held_at <= since:
                connection.outflow.drop_stuck(since)

    def _schedule(self) -> None:
        limits = self._connection.limits
        delay_s = min(MAX_TICK_S, limits.patience_s / 2, limits.idle_s / 2, limits.age_s / 2)
        self._timer = self._loop.call_later(max(0.01, delay_s), self._tick)

    def _tick(self) -> None:
        now, limits, connection = self._loop.time(), self._connection.limits, self._connection
        self._schedule()
        if self.is_lingering:
            return
        self._drop_stuck(now)
        if self._asked_to_go is not None:
            if not self.is_refusing and now - self._asked_to_go >= limits.patience_s:
                self._refuse()
            elif now - self._asked_to_go >= limits.grace_s:
                self.abort()
                return
        elif now - self._made >= limits.age_s or (not connection.streams and now - self._idle_since >= limits.idle_s):
            self.ask_to_go()
        if now - self._pinged < limits.patience_s:
            return
        held = self._num_held()
        taken = connection.num_written - held
        # A slow peer sees the ping only once it has taken what lies before it.
        takes = self._had_to_take and taken > self._taken
        if not self.has_begun or not (self.has_heard or takes):
            self.abort()
            return
        self._had_to_take, self._taken = held > 0, taken
        self._pinged, self.has_heard, self._control_frames = now, False, 0
        connection.write(frames.frame(frames.PING, 0, 0, _ALIVE))
