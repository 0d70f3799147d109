"""One connection: frames are read as bytes come, and handed to streams.

Data go to their stream as they come, whatever the size of their frame; any other frame is short and is read whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from serving.http2 import frames
from serving.http2.errors import ErrorCode, Http2Error
from serving.http2.frames import FRAME_HEAD, HEAD_BYTES, MAX_WINDOW
from serving.http2.header_blocks import Header, HeaderReader
from serving.http2.lifetime import Lifetime
from serving.http2.limits import ConnectionLimits
from serving.http2.outflow import Outflow
from serving.http2.stream import Stream

Head = TypeVar("Head")
# A header block that was not read before takes time that grows with its length, some 20 us for so many bytes.
BLOCK_BYTES_OF_A_FRAME = 128
# Some frames are looked at for each stream; so many are as good as a frame.
STREAMS_OF_A_FRAME = 16

_read_head = FRAME_HEAD.unpack_from


class Http2Connection(asyncio.Protocol, Generic[Head]):
    """A server's end of one connection.

    Args:
        limits: of it.
        read_head: from the headers of a request to what its stream is made with. Any error that it raises is a defect.
        make_stream: from this connection, the stream's id and what was read.
        opened, closed: called when it is there, and when it has ended.

    Attributes:
        loop: the event loop that it belongs to.
        streams: those that are neither answered nor dropped, by id.
        outflow: what the peer takes.
        last_stream_id: the highest that the peer has opened.
        num_written: bytes handed to the transport, or about to be.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        read_head: Callable[[list[Header]], Head],
        make_stream: Callable[[Http2Connection[Head], int, Head], Stream[Head]],
        opened: Callable[[Http2Connection[Head]], None],
        closed: Callable[[Http2Connection[Head]], None],
    ) -> None:
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.streams: dict[int, Stream[Head]] = {}
        self.outflow = Outflow(self.streams)
        self.last_stream_id = 0
        self.num_written = 0
        self.lifetime = Lifetime(self)
        self._make_stream, self._opened, self._closed = make_stream, opened, closed
        self._headers = HeaderReader(limits.max_block_bytes, read_head)
        self._transport: asyncio.Transport
        self._buffer = b""
        self._unwritten: list[bytes] = []
        self._has_preface = self._has_settings = False
        self._begun: list[Stream[Head]] = []
        # Of the frame whose payload is passed on, or passed over, as it comes.
        self._left = self._padding = 0
        self._into: Stream[Head] | None = None
        self._ends_stream = False
        self._received = 0
        # Of the header block that goes on in the next frame: its bytes, stream and flags.
        self._block: tuple[bytes, int, int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the settings."""
        # Uvloop's are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        more = self.limits.connection_window - frames.DEFAULT_WINDOW
        self.write(frames.settings(self.limits.settings) + frames.window_update(0, more))
        self.lifetime.begin(self._transport)
        self._opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drops every stream."""
        del exc
        self.lifetime.end()
        self.drop_streams()
        self._closed(self)

    def pause_writing(self) -> None:
        """A peer that takes no answers is not read from either."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """It takes them again."""
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Reads frames."""
        if self.lifetime.is_lingering:
            return
        if self._buffer:
            data = self._buffer + data
        try:
            used = self._read(data)
        except Http2Error as error:
            self._buffer = b""
            self.lifetime.fail(error)
            return
        self._buffer = data[used:]
        if used:
            self.lifetime.has_heard = True
        if self._begun:
            begun, self._begun = self._begun, []
            for stream in begun:
                if not stream.is_over:
                    stream.begin()

    def eof_received(self) -> None:
        """The transport closes itself now: what is answered by then goes out first."""
        self.flush()

    def write(self, data: bytes) -> None:
        """Hands bytes to the transport at the end of the loop's turn; none once it closes.

        A batch's answers are ready together, and a system call costs more than all else about one.
        """
        if not self._transport.is_closing() and not self.lifetime.is_lingering:
            self.num_written += len(data)
            if not self._unwritten:
                self.loop.call_soon(self.flush)
            self._unwritten.append(data)

    def flush(self) -> None:
        """Hands over now what is about to be."""
        unwritten, self._unwritten = self._unwritten, []
        if unwritten and not self._transport.is_closing():
            self._transport.write(b"".join(unwritten))

    def forget(self, stream: Stream[Head]) -> None:
        """A stream is over."""
        self.streams.pop(stream.stream_id, None)
        if not self.streams:
            self.lifetime.idle()

    def drop_streams(self) -> None:
        """Drops those that there are."""
        for stream in list(self.streams.values()):
            stream.drop()

    def _read(self, data: bytes) -> int:
        at, end = 0, len(data)
        if not self._has_preface:
            preface = data[: len(frames.PREFACE)]
            if preface != frames.PREFACE[: len(preface)]:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the connection does not begin with HTTP/2's preface")
            if end < len(frames.PREFACE):
                return 0
            self._has_preface, at = True, len(frames.PREFACE)
        while True:
            if self._left:
                at = self._pass_on(data, at, end)
                if self._left:
                    return at
            if end - at < HEAD_BYTES:
                return at
            high, low, kind, flags, stream_id = _read_head(data, at)
            size, stream_id = high << 8 | low, stream_id & MAX_WINDOW
            if size > self.limits.frame_size:
                raise Http2Error(
                    ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes; at most {self.limits.frame_size}"
                )
            if self._block is not None and (kind != frames.CONTINUATION or stream_id != self._block[1]):
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted by another frame")
            if kind == frames.DATA:
                if flags & frames.PADDED and size and end - at == HEAD_BYTES:
                    return at
                at = self._begin_data(data, at + HEAD_BYTES, size, flags, stream_id)
                continue
            if kind > frames.CONTINUATION:
                self.lifetime.control_frame()
                self._left, self._into, self._ends_stream, self._padding = size, None, False, 0
                at += HEAD_BYTES
                continue
            is_headers = kind in (frames.HEADERS, frames.CONTINUATION)
            if size > (self.limits.max_block_bytes if is_headers else frames.DEFAULT_FRAME_SIZE):
                code = ErrorCode.ENHANCE_YOUR_CALM if is_headers else ErrorCode.FRAME_SIZE_ERROR
                raise Http2Error(code, f"a frame of type {kind} and {size} bytes")
            if end - at - HEAD_BYTES < size:
                return at
            start = at + HEAD_BYTES
            at = start + size
            self._frame(kind, flags, stream_id, data[start:at])

    def _pass_on(self, data: bytes, at: int, end: int) -> int:
        """Hands on what there is of a payload. Returns where it stopped."""
        stop = min(end, at + self._left)
        self._left -= stop - at
        stream, content_end = self._into, stop
        if self._left < self._padding:
            content_end = max(at, stop - (self._padding - self._left))
        if stream is not None and content_end > at and not stream.is_over:
            stream.take(data, at, content_end)
        if not self._left:
            self._end_data(stream)
        return stop

    def _begin_data(self, data: bytes, at: int, size: int, flags: int, stream_id: int) -> int:
        """Accounts for a DATA frame. Returns where its content begins."""
        if not self._has_settings or not stream_id & 1 or stream_id > self.last_stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"DATA on stream {stream_id}, which was not opened")
        self._received += size
        if self._received > self.limits.connection_window:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "more data than the connection's window")
        if self._received >= self.limits.connection_window // 2:
            # Whatever the streams hold is bounded by their own windows.
            self.write(frames.window_update(0, self._received))
            self._received = 0
        self._padding = 0
        if flags & frames.PADDED:
            self._padding = data[at] if size else 0
            if self._padding >= size:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "DATA with more padding than it has bytes")
            at, size = at + 1, size - 1
        if size == self._padding:
            self.lifetime.control_frame()
        stream = self.streams.get(stream_id)
        if stream is not None:
            is_padded = bool(flags & frames.PADDED)
            stream.receive_window -= size + is_padded
            if stream.has_all or stream.receive_window < 0:
                stream.reset(ErrorCode.STREAM_CLOSED if stream.has_all else ErrorCode.FLOW_CONTROL_ERROR)
                stream = None
            elif is_padded:
                # Nobody else takes the padding.
                stream.grant(self._padding + 1)
        self._left, self._into, self._ends_stream = size, stream, bool(flags & frames.END_STREAM)
        if not size:
            self._end_data(stream)
        return at

    def _end_data(self, stream: Stream[Head] | None) -> None:
        self._into = None
        if self._ends_stream and stream is not None and not stream.is_over:
            self._ended(stream)

    def _ended(self, stream: Stream[Head]) -> None:
        stream.has_all = True
        stream.remote_ended()

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if not self._has_settings and (kind != frames.SETTINGS or flags & frames.ACK):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
        if kind == frames.HEADERS:
            self._on_block(frames.unpadded(flags, payload), stream_id, flags)
        elif kind == frames.CONTINUATION:
            if self._block is None:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
            self.lifetime.control_frame()
            block, _, first_flags = self._block
            self._on_block(block + payload, stream_id, first_flags & frames.END_STREAM | flags & frames.END_HEADERS)
        elif kind == frames.WINDOW_UPDATE:
            self._on_window_update(stream_id, payload)
        elif kind == frames.PING:
            self.lifetime.on_ping(flags, stream_id, payload)
        elif kind == frames.SETTINGS:
            self._on_settings(flags, stream_id, payload)
        elif kind == frames.RST_STREAM:
            self._on_reset(stream_id, payload)
        elif kind == frames.PUSH_PROMISE:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        elif kind == frames.PRIORITY:
            _check(stream_id > 0, len(payload) == 5)
            self.lifetime.control_frame()
        else:
            _check(stream_id == 0, len(payload) >= 8)
            self.lifetime.control_frame()

    def _on_block(self, block: bytes, stream_id: int, flags: int) -> None:
        if not stream_id & 1:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}; a client's are odd")
        if not flags & frames.END_HEADERS:
            if len(block) > self.limits.max_block_bytes:
                raise Http2Error(
                    ErrorCode.ENHANCE_YOUR_CALM, f"a header block of more than {self.limits.max_block_bytes} bytes"
                )
            self._block = block, stream_id, flags
            return
        self._block = None
        head, ends = self._headers.known.get(block), bool(flags & frames.END_STREAM)
        if head is None:
            self.lifetime.control_frame(len(block) // BLOCK_BYTES_OF_A_FRAME)
            head = self._headers.read(block)
        if stream_id <= self.last_stream_id:
            self._on_trailers(stream_id, ends)
            return
        self.last_stream_id = stream_id
        if self.lifetime.is_refusing:
            return
        if len(self.streams) >= self.limits.max_streams:
            self.lifetime.control_frame()
            self.write(frames.rst_stream(stream_id, ErrorCode.REFUSED_STREAM))
            return
        stream = self._make_stream(self, stream_id, head)
        self.streams[stream_id] = stream
        self._begun.append(stream)
        if ends:
            self._ended(stream)

    def _on_trailers(self, stream_id: int, ends: bool) -> None:
        stream = self.streams.get(stream_id)
        self.lifetime.control_frame()
        if stream is None:
            return
        if stream.has_all or not ends:
            stream.reset(ErrorCode.STREAM_CLOSED if stream.has_all else ErrorCode.PROTOCOL_ERROR)
        else:
            self._ended(stream)

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        self._check_opened(stream_id, len(payload) == 4)
        # That of the connection is offered to all who wait.
        self.lifetime.control_frame(1 if stream_id else 1 + len(self.outflow.blocked) // STREAMS_OF_A_FRAME)
        self.outflow.on_window_update(stream_id, payload)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        _check(stream_id == 0, not (flags & frames.ACK and payload))
        weight = 1 + len(payload) // BLOCK_BYTES_OF_A_FRAME + len(self.streams) // STREAMS_OF_A_FRAME
        self.lifetime.control_frame(weight)
        if flags & frames.ACK:
            return
        self._has_settings = True
        self.lifetime.has_begun = True
        self.write(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self.outflow.on_settings(payload)

    def _on_reset(self, stream_id: int, payload: bytes) -> None:
        self._check_opened(stream_id or 2, len(payload) == 4)
        self.lifetime.control_frame()
        if (stream := self.streams.get(stream_id)) is not None:
            stream.drop()

    def _check_opened(self, stream_id: int, fits: bool) -> None:
        _check(not stream_id or (stream_id & 1 and stream_id <= self.last_stream_id), fits)


def _check(is_on_right_stream: object, fits: bool) -> None:
    if not is_on_right_stream:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a frame on a stream that it can't be on")
    if not fits:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "a frame of a length that it can't have")
