"""Frames: the fixed header, cutting a byte stream into frames, and connections. docs/wire-protocol.md is the format.

A frame is a header of 24 bytes and a body whose length the header states, so a body is refused before it is read.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from shard_node.errors import WireError

MAGIC = b"SHRK"
# Type and major version of a TLS record that begins a handshake.
TLS_HANDSHAKE = b"\x16\x03"
PROTOCOL_VERSION = 1
DEFAULT_MAX_FRAME_BYTES = 64 << 20
MAX_BODY_BYTES = 2**32 - 1
MAX_BUDGET_US = 2**32 - 1

# magic, protocol version, frame type, request id, body bytes, budget in microseconds.
HEADER = struct.Struct("<4sHHQII")
# Frames up to this size come in with one read and are copied out once; of larger ones only this much is copied.
CHUNK_BYTES = 64 << 10

Body = npt.NDArray[np.uint8]
Buffer: TypeAlias = bytes | bytearray | memoryview


class FrameType(IntEnum):
    """What a frame is. A number that is in use never changes its meaning."""

    POOL = 1
    POOLED = 2
    INFO = 3
    INFO_ANSWER = 4
    ERROR = 5
    GOAWAY = 6
    STORED = 7
    # 8 and 9 were counts of a part of one table's rows.
    COUNTS = 10
    COUNTS_ANSWER = 11
    PUSH = 12
    PUSHED = 13


class FrameHeader(NamedTuple):
    """The first 24 bytes of a frame, without the magic.

    Attributes:
        frame_type: a `FrameType`, or a number that this release does not know.
        request_id: chosen by the client, repeated in the answer; 0 in a frame that answers no request.
        body_bytes: length of what follows the header.
        budget_us: microseconds that the client will still wait; 0 for no limit.
    """

    protocol_version: int
    frame_type: int
    request_id: int
    body_bytes: int
    budget_us: int


class Frame(NamedTuple):
    """A whole frame. `body` is uint8 [body_bytes], at an address that is a multiple of 8."""

    header: FrameHeader
    body: Body


def pack_header(frame_type: FrameType, request_id: int, body_bytes: int, budget_us: int = 0) -> bytes:
    """Packs a header. Raises WireError for a body that the length field can't state."""
    if body_bytes > MAX_BODY_BYTES:
        raise WireError(f"body has {body_bytes} bytes, a frame holds at most {MAX_BODY_BYTES}", kind="frame_too_large")
    return HEADER.pack(MAGIC, PROTOCOL_VERSION, frame_type, request_id, body_bytes, budget_us)


def unpack_header(data: memoryview) -> FrameHeader:
    """Read a header from the first 24 bytes. Raises WireError if they do not begin with the magic."""
    magic, *fields = HEADER.unpack_from(data)
    if magic != MAGIC:
        reason = "; it is a TLS handshake, and this address speaks plain text" if magic[:2] == TLS_HANDSHAKE else ""
        raise WireError(f"magic is {magic!r}, a frame begins with {MAGIC!r}{reason}")
    return FrameHeader(*fields)


class FrameReceiver:
    """Cuts a stream of bytes into frames. The caller reads into `get_buffer()` and says how much came.

    A small frame's body is copied out of a chunk. A large body is read straight into the array that is handed over; its
    pages are only touched as bytes come in, so a header that promises much costs nothing.

    After a WireError the stream can't be followed any more, and the receiver must be dropped.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._chunk = np.empty(CHUNK_BYTES, np.uint8)
        self._chunk_view = self._chunk.data
        self._start = 0
        self._end = 0
        self._header: FrameHeader | None = None
        self._body = self._chunk[:0]
        self._body_filled = 0

    @property
    def is_mid_frame(self) -> bool:
        """Whether a frame has begun and is not complete."""
        return self._header is not None or self._start != self._end

    @property
    def is_mid_body(self) -> bool:
        """Whether the next bytes go into the body of a long frame."""
        return self._header is not None

    @property
    def request_id(self) -> int:
        """The request id of the frame at which `next_frame` failed; 0 if it could not be read."""
        return 0 if self._header is None else self._header.request_id

    def get_buffer(self) -> memoryview:
        """Return writable bytes for the next read; never empty once `next_frame` has returned None."""
        if self._header is not None:
            return self._body.data[self._body_filled :]
        if self._start:
            # At most a part of a header is left, so this moves less than 24 bytes.
            self._chunk[: self._end - self._start] = self._chunk[self._start : self._end]
            self._start, self._end = 0, self._end - self._start
        return self._chunk_view[self._end :]

    def get_discard_buffer(self) -> memoryview:
        """Return writable bytes for reads that are thrown away; no frame may be read afterwards."""
        return self._chunk_view

    def received(self, num_bytes: int) -> None:
        """Count in what was read into the buffer that `get_buffer` gave last."""
        if self._header is not None:
            self._body_filled += num_bytes
        else:
            self._end += num_bytes

    def next_frame(self) -> Frame | None:
        """Return the next complete frame, or None until more bytes come.

        Raises WireError if the header is none, or of another protocol version, or states more than `max_frame_bytes`.
        """
        header = self._header
        if header is None:
            if self._end - self._start < HEADER.size:
                return None
            self._header = header = unpack_header(self._chunk_view[self._start : self._end])
            # The layout of an ERROR frame is the same in all versions, so that a peer can always say what is wrong.
            version = header.protocol_version
            if version != PROTOCOL_VERSION and header.frame_type != FrameType.ERROR:
                raise WireError(f"protocol version {version} is not spoken here, only {PROTOCOL_VERSION}")
            if (size := header.body_bytes + HEADER.size) > self._max_frame_bytes:
                limit = f"at most {self._max_frame_bytes} are taken"
                raise WireError(f"frame has {size} bytes, {limit}", kind="frame_too_large")
            self._start += HEADER.size
            received = min(self._end - self._start, header.body_bytes)
            self._body = np.empty(header.body_bytes, np.uint8)
            self._body[:received] = self._chunk[self._start : self._start + received]
            self._body_filled = received
            self._start += received
        if self._body_filled < header.body_bytes:
            return None
        frame = Frame(header, self._body)
        self._header = None
        return frame


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
        return (self._transport is not None and self._transport.get_extra_info("peercert")) or {}

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
