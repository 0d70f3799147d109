"""A client's end of HTTP/2 that sends the frames it is told to, right or wrong (RFC 9113). No I/O."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import grpc
import hpack
from hpack.hpack import encode_integer

from serving.api.grpc.wire import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_FRAME_SIZE,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    FRAME_HEAD,
    GOAWAY,
    HEAD_BYTES,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_WINDOW,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    settings,
    window_update,
)

# https://grpc.io/docs/guides/status-codes/
STATUS_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


def header(name: bytes, value: bytes, *, indexed: bool = False) -> bytes:
    """Return a literal header, as it is; `indexed` asks the server to remember it."""
    first = b"\x40" if indexed else b"\x00"
    return first + encode_integer(len(name), 7) + name + encode_integer(len(value), 7) + value


def block(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a header block of literals that nobody remembers."""
    return b"".join(header(*pair) for pair in pairs)


def call_headers(path: str, extra: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """Return the header block of a gRPC call."""
    pairs = (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"drill"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
    return block((*pairs, *extra))


def message(body: bytes, *, compressed: bool = False) -> bytes:
    """Return a gRPC message with its prefix of five bytes."""
    return struct.pack(">BI", compressed, len(body)) + body


@dataclass(slots=True)
class Reply:
    """What came on one stream.

    Attributes:
        status: the HTTP status; None before there is one.
        code: the gRPC status; None before there is one.
        reset: the code of a RST_STREAM.
        ended: whether nothing more comes.
    """

    status: int | None = None
    code: int | None = None
    reset: int | None = None
    ended: bool = False

    def __str__(self) -> str:
        if self.code is not None:
            return STATUS_NAMES.get(self.code, f"grpc {self.code}")
        if self.reset is not None:
            return f"RST_STREAM {self.reset}"
        return f"HTTP {self.status}" if self.status is not None else "nothing"


class Http2Peer:
    """What a client must know of its connection.

    Attributes:
        replies: by stream, of those that are watched.
        window: bytes that may be sent on the connection; those on streams are in `stream_windows`.
        out: what must be sent in answer: acknowledgements.
        goaway: the error code of a GOAWAY.
        pongs: acknowledgements of PING that came.
        last_stream: the last one that was opened.
    """

    def __init__(self, *, opens_window: bool = True) -> None:
        self.replies: dict[int, Reply] = {}
        self.window = DEFAULT_WINDOW
        self.initial_window = DEFAULT_WINDOW
        self.stream_windows: dict[int, int] = {}
        self.out = bytearray()
        self.goaway: int | None = None
        self.last_stream = -1
        self.pongs = 0
        self._opens_window = opens_window
        self._decoder = hpack.Decoder()
        self._decoder.max_header_list_size = 1 << 20
        self._in = bytearray()
        self._block = b""

    def begin(self) -> bytes:
        """Return the preface, with windows as large as they may be unless answers shall not be taken."""
        if not self._opens_window:
            return PREFACE + settings({INITIAL_WINDOW_SIZE: 0})
        return PREFACE + settings({INITIAL_WINDOW_SIZE: MAX_WINDOW}) + window_update(0, MAX_WINDOW - DEFAULT_WINDOW)

    def open(self, *, watched: bool = True) -> int:
        """Return the number of a new stream."""
        self.last_stream += 2
        if watched:
            self.replies[self.last_stream] = Reply()
            self.stream_windows[self.last_stream] = self.initial_window
        return self.last_stream

    def taken_out(self) -> bytes:
        """Return what must be sent in answer, once."""
        out = bytes(self.out)
        self.out.clear()
        return out

    def ended(self) -> dict[int, Reply]:
        """Return the replies that are whole, by stream, once. Raises ValueError after a GOAWAY for an error."""
        if self.goaway:
            raise ValueError(f"GOAWAY {self.goaway}")
        return {stream: self.replies.pop(stream) for stream, reply in list(self.replies.items()) if reply.ended}

    def room(self, stream: int) -> int:
        """Bytes that may be sent on a stream now, at most a frame's."""
        return min(self.window, self.stream_windows.get(stream, self.initial_window), DEFAULT_FRAME_SIZE)

    def data(self, stream: int, body: bytes | memoryview, *, last: bool) -> bytes:
        """Return a DATA frame, counted against the windows."""
        self.window -= len(body)
        if stream in self.stream_windows:
            self.stream_windows[stream] -= len(body)
        return frame(DATA, END_STREAM if last else 0, stream, bytes(body))

    def feed(self, data: bytes) -> None:
        """Take bytes of the server. Raises ValueError if they are not HTTP/2."""
        self._in += data
        while len(self._in) >= HEAD_BYTES:
            high, low, kind, flags, stream = FRAME_HEAD.unpack_from(self._in)
            end = HEAD_BYTES + (high << 8 | low)
            if len(self._in) < end:
                break
            payload = bytes(self._in[HEAD_BYTES:end])
            del self._in[:end]
            self._take(kind, flags, stream & MAX_WINDOW, payload)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind in (HEADERS, CONTINUATION):
            self._block += payload
            if flags & END_HEADERS:
                self._head(stream)
            if kind == HEADERS and flags & END_STREAM:
                self._ended(stream)
        elif kind == DATA:
            if self._opens_window and payload:
                self.out += window_update(0, len(payload))
            if flags & END_STREAM:
                self._ended(stream)
        elif kind == RST_STREAM:
            if (reply := self.replies.get(stream)) is not None and not reply.ended:
                reply.reset = int.from_bytes(payload[:4], "big")
            self._ended(stream)
        elif kind == SETTINGS and not flags & ACK:
            self._settings(payload)
        elif kind == PING:
            self.pongs += flags & ACK
            self.out += b"" if flags & ACK else frame(PING, ACK, 0, payload)
        elif kind == GOAWAY:
            self.goaway = int.from_bytes(payload[4:8], "big")
        elif kind == WINDOW_UPDATE:
            increment = int.from_bytes(payload, "big")
            if stream == 0:
                self.window += increment
            elif stream in self.stream_windows:
                self.stream_windows[stream] += increment

    def _head(self, stream: int) -> None:
        made, self._block = self._block, b""
        try:
            pairs = self._decoder.decode(made, raw=True)
        except hpack.HPACKError as error:
            raise ValueError(f"header block: {error}") from error
        reply = self.replies.get(stream)
        if reply is None:
            return
        for name, value in pairs:
            if name == b":status":
                reply.status = int(value)
            elif name == b"grpc-status":
                reply.code = int(value)

    def _ended(self, stream: int) -> None:
        if (reply := self.replies.get(stream)) is not None:
            reply.ended = True
        self.stream_windows.pop(stream, None)

    def _settings(self, payload: bytes) -> None:
        for at in range(0, len(payload) - 5, 6):
            name, value = struct.unpack_from(">HI", payload, at)
            if name == INITIAL_WINDOW_SIZE:
                change, self.initial_window = value - self.initial_window, value
                for stream in self.stream_windows:
                    self.stream_windows[stream] += change
        self.out += frame(SETTINGS, ACK, 0)
