"""Frames: the fixed header, and cutting a byte stream into frames. No I/O; docs/wire-protocol.md is the format.

A frame is a header of 24 bytes and a body whose length the header states, so a body is refused before it is read.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

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
        told = "; it is a TLS handshake, and this address speaks plain text" if magic[:2] == TLS_HANDSHAKE else ""
        raise WireError(f"magic is {magic!r}, a frame begins with {MAGIC!r}{told}")
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
        """Whether a frame has begun and is not whole."""
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
        """Give writable bytes for the next read; never empty once `next_frame` has given None."""
        if self._header is not None:
            return self._body.data[self._body_filled :]
        if self._start:
            rest = self._end - self._start
            # At most a part of a header is left, so this moves less than 24 bytes.
            self._chunk[:rest] = self._chunk[self._start : self._end]
            self._start, self._end = 0, rest
        return self._chunk_view[self._end :]

    def get_discard_buffer(self) -> memoryview:
        """Give writable bytes for reads that nobody looks at; no frame may be taken afterwards."""
        return self._chunk_view

    def received(self, num_bytes: int) -> None:
        """Count in what was read into the buffer that `get_buffer` gave last."""
        if self._header is not None:
            self._body_filled += num_bytes
        else:
            self._end += num_bytes

    def next_frame(self) -> Frame | None:
        """Return the next complete frame, or None until more bytes come.

        Raises WireError if the header is not one, or of another protocol version, or states more
        than `max_frame_bytes`.
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
                raise WireError(
                    f"frame has {size} bytes, at most {self._max_frame_bytes} are taken", kind="frame_too_large"
                )
            self._start += HEADER.size
            here = min(self._end - self._start, header.body_bytes)
            self._body = np.empty(header.body_bytes, np.uint8)
            self._body[:here] = self._chunk[self._start : self._start + here]
            self._body_filled = here
            self._start += here
        if self._body_filled < header.body_bytes:
            return None
        frame = Frame(header, self._body)
        self._header = None
        return frame
