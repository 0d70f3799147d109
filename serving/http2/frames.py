"""Frames of HTTP/2 (RFC 9113, sections 4 and 6): their layout, and those that a server sends."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from serving.http2.errors import ErrorCode, Http2Error

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)
DEFAULT_WINDOW, DEFAULT_FRAME_SIZE = 65_535, 16_384
MAX_WINDOW = MAX_STREAM_ID = 2**31 - 1
MAX_GOAWAY_BYTES = 256

FRAME_HEAD = struct.Struct(">HBBBI")
"""Length as 16 high and 8 low bits, type, flags, stream id with a reserved bit."""
HEAD_BYTES = FRAME_HEAD.size
_SETTING = struct.Struct(">HI")
_TWO_WORDS = struct.Struct(">II")


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """A frame."""
    size = len(payload)
    return FRAME_HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def settings(values: dict[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(name, value) for name, value in values.items()))


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """The settings of a frame. Raises Http2Error for values that RFC 9113, section 6.5.2, does not allow."""
    if len(payload) % _SETTING.size:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes; it must be a multiple of 6")
    for name, value in _SETTING.iter_unpack(payload):
        if name == INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE {value}; at most {MAX_WINDOW}")
        if name == MAX_FRAME_SIZE and not DEFAULT_FRAME_SIZE <= value < 2**24:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE {value}; allowed are 16384 to 16777215")
        if name == ENABLE_PUSH and value > 1:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH {value}; allowed are 0 and 1")
        yield name, value


def window_update(stream_id: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    """A RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def goaway(last_stream_id: int, code: ErrorCode, message: str = "") -> bytes:
    """A GOAWAY frame: streams after the last one were not and will not be processed. A long message is cut."""
    said = message.encode("utf-8", "replace")[:MAX_GOAWAY_BYTES]
    return frame(GOAWAY, 0, 0, _TWO_WORDS.pack(last_stream_id, code) + said)


def unpadded(flags: int, payload: bytes) -> bytes:
    """The payload of a HEADERS frame without padding and priority. Raises Http2Error if they do not fit in it."""
    start, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without the length of its padding")
        start, end = 1, end - payload[0]
    if flags & HAS_PRIORITY:
        start += 5
    if start > end:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a frame whose padding and priority are longer than itself")
    return payload[start:end]
