"""A server's end of one HTTP/2 connection (RFC 9113) as a state machine: bytes in, events and bytes out.

No sockets, no event loop, no clock of its own; nothing is known of what streams carry. Whatever comes in, nothing is
raised: a peer that breaks a rule or a limit is told so by GOAWAY, and the last event is `ConnectionFailed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from serving.api.grpc import wire
from serving.api.grpc.wire import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_WINDOW,
    PADDED,
    ConnectionFailed,
    ConnectionLimits,
    DataReceived,
    ErrorCode,
    Event,
    FloodError,
    Http2Error,
    RequestEnded,
    RequestReceived,
    StreamDrained,
    StreamDropped,
)

_ALIVE, _GOING = b"alive?\0\0", b"going\0\0\0"
# What counts as one frame that carries no request: so many bytes of a header block or of settings, so many streams that
# are looked at, so many bytes of data that nobody takes.
BLOCK_BYTES_OF_A_FRAME = 1024
SETTINGS_BYTES_OF_A_FRAME = 128
STREAMS_OF_A_FRAME = 16
STALE_BYTES_OF_A_FRAME = 4096
# A frame of fewer data, in the midst of a stream, costs what a full one does.
SMALL_DATA_BYTES = 256
# A peer that takes answers may send so many such frames for each, and one for so many bytes.
CONTROL_FRAMES_OF_AN_ANSWER = 8
BYTES_OF_A_CONTROL_FRAME = 1024
EVENTS_AT_ONCE = 64

_read_head, _pack_head = wire.FRAME_HEAD.unpack_from, wire.FRAME_HEAD.pack


@dataclass(slots=True)
class _Stream:
    """What a stream may send and take.

    Attributes:
        send_window: bytes of data that the peer still takes; negative if it made its windows smaller.
        receive_window: bytes of data that the peer may still send.
        has_all: whether the peer has sent everything.
        unsent: data that the peer's windows hold back.
        trailers: the header block that goes out behind them.
        waits_since: when it last could send something of them.
    """

    send_window: int
    receive_window: int
    has_all: bool = False
    unsent: memoryview | None = None
    trailers: bytes = b""
    waits_since: float = 0.0


class Connection:
    """A server's end of one connection.

    Args:
        limits: of it.
        clock: monotonic seconds.

    Attributes:
        streams: those that are neither answered nor dropped, by id.
        last_stream_id: the highest that the peer has opened.
        can_read: whether `read` may have more to tell of what was fed already.
        is_refusing: whether further streams are passed over; the peer was told that they will be.
        is_over: whether everything was said, and only the peer's close is waited for.
    """

    def __init__(self, limits: ConnectionLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.streams: dict[int, _Stream] = {}
        self.last_stream_id = 0
        self.can_read = self.is_refusing = self.is_over = False
        self._clock = clock
        self._decoder = wire.HeaderDecoder(limits.max_block_bytes)
        self._events: list[Event] = []
        self._out: list[bytes] = []
        self._buffer = b""
        self._has_preface = self._has_settings = False
        # Of the frame whose payload is passed on, or passed over, as it comes.
        self._left = self._padding = 0
        self._into = 0
        self._ends_stream = False
        self._received = 0
        # Of the header block that goes on in the next frame: its bytes, stream and flags.
        self._block: tuple[bytes, int, int] | None = None
        # What the peer takes.
        self._blocked: dict[int, _Stream] = {}
        self._window = self._new_window = wire.DEFAULT_WINDOW
        self._frame_size = wire.DEFAULT_FRAME_SIZE
        self._sent_at = self._held_at = 0.0
        self._has_to_shrink_table = self._has_shrunk_table = False
        # How it is kept.
        self._made = self._idle_since = self._pinged = clock()
        self._asked_to_go: float | None = None
        self._told_last_stream_id = wire.MAX_STREAM_ID
        self._control_frames = 0
        self._has_heard = True
        self._had_to_take, self._taken = False, 0
        self._out.append(
            wire.settings(limits.settings) + wire.window_update(0, limits.connection_window - wire.DEFAULT_WINDOW)
        )

    @property
    def unread_bytes(self) -> int:
        """Bytes that were fed and of which nothing was told yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Take bytes that came."""
        if not self.is_over:
            self._buffer = self._buffer + data if self._buffer else data
            self.can_read = True

    def read(self, until: float = float("inf")) -> list[Event]:
        """What the bytes say that were fed: some events, or as many as there are before the clock says `until`."""
        try:
            if not self.is_over:
                self._read(until)
        except Http2Error as error:
            self.fail(error.code, str(error), is_flood=isinstance(error, FloodError))
        return self._told()

    def take(self) -> bytes:
        """The bytes to send since the last time."""
        out, self._out = self._out, []
        return out[0] if len(out) == 1 else b"".join(out)

    def grant(self, stream_id: int, size: int) -> None:
        """Let the peer send `size` bytes more on a stream."""
        stream = self.streams.get(stream_id)
        if stream is not None and not stream.has_all:
            stream.receive_window += size
            self._out.append(wire.window_update(stream_id, size))

    def receive_window(self, stream_id: int) -> int:
        """Bytes that the peer may still send on a stream."""
        stream = self.streams.get(stream_id)
        return stream.receive_window if stream is not None else 0

    def send(self, stream_id: int, head: bytes, body: bytes, trailers: bytes = b"") -> bool:
        """Send a header block, data, and a header block that ends the stream; what is empty is left out.

        What the peer's windows do not take is sent when they do; then there is a `StreamDrained`, and until then no
        further data may be sent on the stream. Nothing is sent on one that is over.

        Returns:
            Whether all of it was sent.
        """
        stream, size = self.streams.get(stream_id), len(body)
        if stream is None:
            return True
        parts = self._out
        if head:
            head = self._shrunk(head)
            parts += (_pack_head(len(head) >> 8, len(head) & 0xFF, HEADERS, END_HEADERS, stream_id), head)
        # A peer may make its windows smaller than what is on the way: they are negative then, and take only frames
        # without data.
        if not stream.unsent and (not size or size <= min(stream.send_window, self._window, self._frame_size)):
            if size:
                stream.send_window -= size
                self._window -= size
                parts += (_pack_head(size >> 8, size & 0xFF, DATA, 0, stream_id), body)
            if trailers:
                self._end(stream_id, stream, trailers)
            return True
        if size:
            stream.unsent = memoryview(body)
        stream.trailers = trailers
        return self._send_held(stream_id, stream)

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        """Tell the peer that a stream is given up, and drop it."""
        if stream_id in self.streams:
            self._out.append(wire.rst_stream(stream_id, code))
            self._drop(stream_id)

    def fail(self, code: ErrorCode, message: str, *, is_flood: bool = False) -> None:
        """End everything: the peer is told why, `read` and `tick` tell of the streams that are dropped."""
        if not self.is_over:
            # It must never be told of a later one than before (RFC 9113, section 6.8).
            last = min(self._told_last_stream_id, self.last_stream_id)
            self._out.append(wire.goaway(last, code, message))
            self._close()
            for stream_id in list(self.streams):
                self._drop(stream_id)
            self._events.append(ConnectionFailed(code, message, is_flood))

    def ask_to_go(self) -> None:
        """Have it end: streams that there are, or that come before the peer knows, are served.

        In two steps (RFC 9113, section 6.8): the peer is told to open no further stream, then, once a ping shows that
        it knows, which one is the last. It is over when that one is answered. A second time changes nothing.
        """
        if self._asked_to_go is None and not self.is_over:
            self._asked_to_go = self._clock()
            self._out.append(wire.goaway(wire.MAX_STREAM_ID, ErrorCode.NO_ERROR) + wire.frame(wire.PING, 0, 0, _GOING))

    def tick(self, num_held: int, num_taken: int) -> tuple[bool, list[Event]]:
        """Do what time asks for; to be called every half of `patience_s` or so.

        Args:
            num_held: bytes that were sent and that the peer's host does not have yet.
            num_taken: those that it has.

        Returns:
            Whether the connection may go on, or is to be cut off at once; and what has happened.
        """
        now, limits = self._clock(), self.limits
        if self.is_over:
            return True, self._told()
        self._drop_stuck(now, num_held)
        if self._asked_to_go is not None:
            if not self.is_refusing and now - self._asked_to_go >= limits.patience_s:
                self._refuse()
            elif now - self._asked_to_go >= limits.grace_s:
                return False, self._told()
        elif now - self._made >= limits.age_s or (not self.streams and now - self._idle_since >= limits.idle_s):
            self.ask_to_go()
        if now - self._pinged >= limits.patience_s:
            # A slow peer sees the ping only once it has taken what lies before it.
            takes = self._had_to_take and num_taken > self._taken
            if not self._has_settings or not (self._has_heard or takes):
                return False, self._told()
            self._had_to_take, self._taken = num_held > 0, num_taken
            self._pinged, self._has_heard, self._control_frames = now, False, 0
            self._out.append(wire.frame(wire.PING, 0, 0, _ALIVE))
        return True, self._told()

    def _told(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _close(self) -> None:
        self.is_over, self.can_read, self._buffer, self._block = True, False, b"", None

    def _control_frame(self, weight: int = 1) -> None:
        self._control_frames += weight
        if self._control_frames > self.limits.max_control_frames:
            raise FloodError

    def _was_useful(self, count: int) -> None:
        self._control_frames = max(0, self._control_frames - count)

    # What comes in.

    def _read(self, until: float) -> None:
        data, clock, events = self._buffer, self._clock, self._events
        at, end = 0, len(data)
        if not self._has_preface:
            preface = data[: len(wire.PREFACE)]
            if preface != wire.PREFACE[: len(preface)]:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the connection does not begin with HTTP/2's preface")
            if end < len(wire.PREFACE):
                self.can_read = False
                return
            self._has_preface, at = True, len(wire.PREFACE)
        while True:
            if self._left:
                at = self._pass_on(data, at, end)
            stop = None if self._left else self._read_frame(data, at, end)
            if stop is None:
                self.can_read = False
                break
            at = stop
            if self.is_over:
                return
            if len(events) >= EVENTS_AT_ONCE or clock() >= until:
                self.can_read = at < end
                break
        if at:
            self._buffer, self._has_heard = data[at:], True

    def _read_frame(self, data: bytes, at: int, end: int) -> int | None:
        """Read a frame, or the head of one whose payload is passed on. Returns where it stopped; None without one."""
        if end - at < wire.HEAD_BYTES:
            return None
        high, low, kind, flags, stream_id = _read_head(data, at)
        size: int = high << 8 | low
        stream_id, start = stream_id & MAX_WINDOW, at + wire.HEAD_BYTES
        if size > self.limits.frame_size:
            says = f"a frame of {size} bytes; at most {self.limits.frame_size}"
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, says)
        if self._block is not None and (kind != wire.CONTINUATION or stream_id != self._block[1]):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted by another frame")
        if kind == DATA:
            if flags & PADDED and size and end == start:
                return None
            return self._begin_data(data, start, size, flags, stream_id)
        if kind > wire.CONTINUATION:
            self._control_frame()
            self._left, self._into, self._ends_stream, self._padding = size, 0, False, 0
            return start
        is_headers = kind in (HEADERS, wire.CONTINUATION)
        if size > (self.limits.max_block_bytes if is_headers else wire.DEFAULT_FRAME_SIZE):
            code = ErrorCode.ENHANCE_YOUR_CALM if is_headers else ErrorCode.FRAME_SIZE_ERROR
            raise Http2Error(code, f"a frame of type {kind} and {size} bytes")
        if end - start < size:
            return None
        self._frame(kind, flags, stream_id, data[start : start + size])
        return start + size

    def _begin_data(self, data: bytes, at: int, size: int, flags: int, stream_id: int) -> int:
        """Account for a DATA frame. Returns where its content begins."""
        if not self._has_settings or not stream_id & 1 or stream_id > self.last_stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"DATA on stream {stream_id}, which was not opened")
        self._received += size
        if self._received > self.limits.connection_window:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "more data than the connection's window")
        if self._received >= self.limits.connection_window // 2:
            # Whatever the streams hold is bounded by their own windows.
            self._out.append(wire.window_update(0, self._received))
            self._received = 0
        padding, length = 0, size
        if flags & PADDED:
            padding = data[at] if size else 0
            if padding >= size:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "DATA with more padding than it has bytes")
            at, size = at + 1, size - 1
        stream = self.streams.get(stream_id)
        if stream is not None:
            stream.receive_window -= length
            if stream.has_all or stream.receive_window < 0:
                self.reset(stream_id, ErrorCode.STREAM_CLOSED if stream.has_all else ErrorCode.FLOW_CONTROL_ERROR)
                stream = None
            elif flags & PADDED:
                # Nobody else takes the padding.
                self.grant(stream_id, padding + 1)
        if stream is None:
            # The peer may not know yet that the stream is over: what was on the way then is little.
            self._control_frame(1 + length // STALE_BYTES_OF_A_FRAME)
        elif size == padding or (size < SMALL_DATA_BYTES and not flags & END_STREAM):
            self._control_frame()
        self._left, self._padding, self._into = size, padding, stream_id if stream is not None else 0
        self._ends_stream = bool(flags & END_STREAM)
        if not size:
            self._end_data()
        return at

    def _pass_on(self, data: bytes, at: int, end: int) -> int:
        """Tell of what there is of a payload. Returns where it stopped."""
        stop = min(end, at + self._left)
        self._left -= stop - at
        content_end = stop
        if self._left < self._padding:
            content_end = max(at, stop - (self._padding - self._left))
        if self._into and content_end > at and self._into in self.streams:
            self._events.append(DataReceived(self._into, memoryview(data)[at:content_end]))
        if not self._left:
            self._end_data()
        return stop

    def _end_data(self) -> None:
        if self._ends_stream and self._into:
            self._request_ended(self._into)

    def _request_ended(self, stream_id: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is not None:
            stream.has_all = True
            self._events.append(RequestEnded(stream_id))

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if not self._has_settings and (kind != wire.SETTINGS or flags & ACK):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
        if kind == HEADERS:
            self._on_block(wire.unpadded(flags, payload), stream_id, flags)
        elif kind == wire.CONTINUATION:
            if self._block is None:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
            block, _, first_flags = self._block
            # Each one costs a copy of those before it.
            self._control_frame(1 + len(block) // BLOCK_BYTES_OF_A_FRAME)
            self._on_block(block + payload, stream_id, first_flags & END_STREAM | flags & END_HEADERS)
        elif kind == wire.WINDOW_UPDATE:
            self._check_opened(stream_id, len(payload) == 4)
            # That of the connection is offered to all who wait.
            self._control_frame(1 if stream_id else 1 + len(self._blocked) // STREAMS_OF_A_FRAME)
            self._on_window_update(stream_id, int.from_bytes(payload, "big") & MAX_WINDOW)
        elif kind == wire.PING:
            _check(stream_id == 0, len(payload) == 8)
            self._control_frame()
            if not flags & ACK:
                self._out.append(wire.frame(wire.PING, ACK, 0, payload))
            elif payload == _GOING:
                self._refuse()
        elif kind == wire.SETTINGS:
            _check(stream_id == 0, not (flags & ACK and payload))
            self._control_frame(1 + len(payload) // SETTINGS_BYTES_OF_A_FRAME + len(self.streams) // STREAMS_OF_A_FRAME)
            if not flags & ACK:
                self._on_settings(payload)
        elif kind == wire.RST_STREAM:
            self._check_opened(stream_id or 2, len(payload) == 4)
            self._control_frame()
            self._drop(stream_id)
        elif kind == wire.PUSH_PROMISE:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        elif kind == wire.PRIORITY:
            _check(stream_id > 0, len(payload) == 5)
            self._control_frame()
        else:
            _check(stream_id == 0, len(payload) >= 8)
            self._control_frame()

    def _on_block(self, block: bytes, stream_id: int, flags: int) -> None:
        if not stream_id & 1:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}; a client's are odd")
        max_bytes = self.limits.max_block_bytes
        if len(block) > max_bytes:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"a header block of more than {max_bytes} bytes")
        if not flags & END_HEADERS:
            self._block = block, stream_id, flags
            return
        self._block = None
        self._control_frame(len(block) // BLOCK_BYTES_OF_A_FRAME)
        try:
            found = self._decoder.decode(block)
        except wire.HpackError as error:
            code = ErrorCode.ENHANCE_YOUR_CALM if error.is_too_large else ErrorCode.COMPRESSION_ERROR
            raise Http2Error(code, str(error)) from None
        if stream_id <= self.last_stream_id:
            self._on_trailers(stream_id, bool(flags & END_STREAM) and found.problem is None)
            return
        self.last_stream_id = stream_id
        if self.is_refusing:
            self._control_frame()
            return
        if len(self.streams) >= self.limits.max_streams:
            self._control_frame()
            self._out.append(wire.rst_stream(stream_id, ErrorCode.REFUSED_STREAM))
            return
        self.streams[stream_id] = _Stream(self._new_window, self.limits.stream_window)
        self._events.append(RequestReceived(stream_id, found.headers, found.size, wire.request_problem(found)))
        if flags & END_STREAM:
            self._request_ended(stream_id)

    def _on_trailers(self, stream_id: int, is_right: bool) -> None:
        stream = self.streams.get(stream_id)
        self._control_frame()
        if stream is None:
            return
        if stream.has_all or not is_right:
            self.reset(stream_id, ErrorCode.STREAM_CLOSED if stream.has_all else ErrorCode.PROTOCOL_ERROR)
        else:
            self._request_ended(stream_id)

    def _check_opened(self, stream_id: int, fits: bool) -> None:
        _check(not stream_id or (stream_id & 1 and stream_id <= self.last_stream_id), fits)

    # What goes out.

    def _on_window_update(self, stream_id: int, increment: int) -> None:
        code = ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR
        stream = self.streams.get(stream_id)
        if stream_id == 0:
            self._window += increment
            if not increment or self._window > MAX_WINDOW:
                raise Http2Error(code, f"WINDOW_UPDATE by {increment} to {self._window}")
            self._send_blocked()
        elif stream is not None:
            stream.send_window += increment
            if not increment or stream.send_window > MAX_WINDOW:
                self.reset(stream_id, code)
            elif stream_id in self._blocked:
                self._send_held(stream_id, stream)

    def _on_settings(self, payload: bytes) -> None:
        self._has_settings = True
        self._out.append(wire.frame(wire.SETTINGS, ACK, 0))
        found = list(wire.read_settings(payload))
        if any(name == wire.HEADER_TABLE_SIZE and value < wire.DEFAULT_TABLE_BYTES for name, value in found):
            # The smallest has to be answered, though a larger one follows (RFC 7541, section 4.2). No table is used, so
            # an empty one fits whatever the peer says later.
            self._has_to_shrink_table = not self._has_shrunk_table
        # They count in their order, so the last one of a name is what holds.
        for name, value in dict(found).items():
            if name == wire.INITIAL_WINDOW_SIZE:
                for stream in self.streams.values():
                    stream.send_window += value - self._new_window
                    if stream.send_window > MAX_WINDOW:
                        raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE makes a window too large")
                self._new_window = value
            elif name == wire.MAX_FRAME_SIZE:
                self._frame_size = value
        self._send_blocked()

    def _send_blocked(self) -> None:
        for stream_id, stream in list(self._blocked.items()):
            if self._window <= 0:
                return
            self._send_held(stream_id, stream)

    def _send_held(self, stream_id: int, stream: _Stream) -> bool:
        """Send of what a stream holds back as much as the windows take. Returns whether that was all."""
        before = len(stream.unsent) if stream.unsent else 0
        while stream.unsent:
            size = min(len(stream.unsent), stream.send_window, self._window, self._frame_size)
            if size <= 0:
                self._wait_for_windows(stream_id, stream, before - len(stream.unsent))
                return False
            stream.send_window -= size
            self._window -= size
            self._out += (_pack_head(size >> 8, size & 0xFF, DATA, 0, stream_id), bytes(stream.unsent[:size]))
            stream.unsent = stream.unsent[size:]
        self._was_useful(before // BYTES_OF_A_CONTROL_FRAME)
        stream.unsent = None
        if self._blocked.pop(stream_id, None) is not None:
            self._events.append(StreamDrained(stream_id))
        if stream.trailers:
            self._end(stream_id, stream, stream.trailers)
        return True

    def _wait_for_windows(self, stream_id: int, stream: _Stream, sent: int) -> None:
        if sent:
            self._was_useful(sent // BYTES_OF_A_CONTROL_FRAME)
        if sent or stream_id not in self._blocked:
            stream.waits_since = self._clock()
        if sent:
            self._sent_at = stream.waits_since
        self._blocked[stream_id] = stream

    def _shrunk(self, block: bytes) -> bytes:
        """A header block as the next one goes out."""
        if not self._has_to_shrink_table:
            return block
        self._has_to_shrink_table, self._has_shrunk_table = False, True
        return wire.EMPTY_TABLE + block

    def _end(self, stream_id: int, stream: _Stream, trailers: bytes) -> None:
        trailers = self._shrunk(trailers)
        size = len(trailers)
        self._out += (_pack_head(size >> 8, size & 0xFF, HEADERS, END_HEADERS | END_STREAM, stream_id), trailers)
        self._was_useful(CONTROL_FRAMES_OF_AN_ANSWER)
        if not stream.has_all:
            # RFC 9113, section 8.1: the peer need not send the rest.
            self._out.append(wire.rst_stream(stream_id, ErrorCode.NO_ERROR))
        self._forget(stream_id)

    def _drop(self, stream_id: int) -> None:
        if stream_id in self.streams:
            self._forget(stream_id)
            self._events.append(StreamDropped(stream_id))

    def _forget(self, stream_id: int) -> None:
        del self.streams[stream_id]
        self._blocked.pop(stream_id, None)
        if not self.streams:
            self._idle_since = self._clock()
            if self.is_refusing:
                self._close()

    def _refuse(self) -> None:
        if self._asked_to_go is not None and not self.is_refusing:
            self.is_refusing = True
            self._told_last_stream_id = self.last_stream_id
            self._out.append(wire.goaway(self.last_stream_id, ErrorCode.NO_ERROR))
            if not self.streams:
                self._close()

    def _drop_stuck(self, now: float, num_held: int) -> None:
        """Drop streams that the peer's windows hold back for too long. They count while it has all that was sent."""
        if not self._blocked:
            return
        if num_held:
            self._held_at = now
        since = now - 2 * self.limits.patience_s
        if self._held_at > since:
            return
        for stream_id, stream in list(self._blocked.items()):
            # One that waits for the connection's window alone may have others before it.
            last = stream.waits_since if stream.send_window <= 0 else max(stream.waits_since, self._sent_at)
            if last <= since:
                self.reset(stream_id, ErrorCode.CANCEL)


def _check(is_on_right_stream: object, fits: bool) -> None:
    if not is_on_right_stream:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a frame on a stream that it can't be on")
    if not fits:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "a frame of a length that it can't have")
