"""A server's end of one HTTP/2 connection (RFC 9113) as a state machine: bytes in, calls of streams and bytes out.

No sockets, no event loop, no clock of its own; nothing is known of what streams carry. Whatever comes in, nothing is
raised: a peer that breaks a rule or a limit is sent a GOAWAY that says so.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from loader.errors import ShardrankError
from serving.api.grpc import wire
from serving.api.grpc.wire import ACK, DATA, END_HEADERS, END_STREAM, HEADERS, MAX_WINDOW, PADDED, ErrorCode, Http2Error

_ALIVE, _GOING = b"alive?\0\0", b"going\0\0\0"
# Where a frame may be, and how long it may be: on the connection, on a stream that was opened, on another stream.
_CONNECTION, _OPENED, _IDLE = 1, 2, 4
_RULES = {
    wire.PRIORITY: (_OPENED | _IDLE, range(5, 6)),
    wire.RST_STREAM: (_OPENED, range(4, 5)),
    wire.SETTINGS: (_CONNECTION, range(wire.DEFAULT_FRAME_SIZE + 1)),
    # Never from a client.
    wire.PUSH_PROMISE: (0, range(0)),
    wire.PING: (_CONNECTION, range(8, 9)),
    wire.GOAWAY: (_CONNECTION, range(8, wire.DEFAULT_FRAME_SIZE + 1)),
    wire.WINDOW_UPDATE: (_CONNECTION | _OPENED, range(4, 5)),
}
_read_head, _pack_head = wire.FRAME_HEAD.unpack_from, wire.FRAME_HEAD.pack


class Phase(enum.IntEnum):
    """How far a connection is; it never goes back.

    It waits for the preface, then for SETTINGS, and serves. Once it is asked to go it serves on, until the peer knows
    (RFC 9113, section 6.8): then further streams are passed over. Once it is over only the peer's close is waited for.
    """

    PREFACE = 0
    SETTINGS = 1
    SERVING = 2
    GOING = 3
    REFUSING = 4
    OVER = 5


class Stream:
    """One stream: what it may send and receive, in bytes. A subclass serves it.

    `send_window` is negative if the peer made it smaller. The peer's windows hold back data `unsent` from `num_sent`
    on, and the header block `trailers` after it, since `waits_since`; `has_all` once the request has ended.
    """

    send_window = receive_window = num_sent = 0
    has_all = False
    unsent = trailers = b""
    waits_since = 0.0

    def begin(self) -> None:
        """Begin, after everything that came together with the stream's headers was passed on."""

    def on_data(self, data: memoryview) -> None:
        """Receive the next bytes of the request: a view of what was fed."""

    def on_end(self) -> None:
        """Note that the request has ended."""

    def on_drained(self) -> None:
        """Note that all that `send` could not send at once has been sent."""

    def on_dropped(self) -> None:
        """Note that the stream was given up; no client waits for its response."""

    def give_way(self, error: ShardrankError) -> None:
        """Refuse a message that is not complete, for its bytes to be freed."""


class Connection:
    """A server's end of one connection. A subclass opens streams, and may send what there is whenever it `changed`.

    Attributes:
        streams: those that are neither answered nor dropped, by id.
        can_read: whether more of what was fed can be read now.
        failure: why the peer was sent away.
        idle_since: when the last stream ended.
    """

    def __init__(self, limits: wire.ConnectionLimits, clock: Callable[[], float]) -> None:
        self.limits, self.clock = limits, clock
        self.phase = Phase.PREFACE
        self.streams: dict[int, Stream] = {}
        self.last_stream_id = 0
        self.can_read = False
        self.failure: Http2Error | None = None
        self._decoder = wire.HeaderDecoder(limits.max_block_bytes)
        values = {
            wire.MAX_CONCURRENT_STREAMS: limits.max_streams,
            wire.INITIAL_WINDOW_SIZE: limits.stream_window,
            wire.MAX_FRAME_SIZE: limits.frame_size,
            wire.MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
        }
        self._outgoing = [wire.settings(values), wire.window_update(0, limits.connection_window - wire.DEFAULT_WINDOW)]
        self._buffer = b""
        # Of data, since the connection's window was last made larger.
        self._received = 0
        # Of the header block that goes on in the next frame: its bytes, stream and flags.
        self._block: tuple[bytes, int, int] | None = None
        self._blocked: dict[int, Stream] = {}
        self._window = self._new_window = wire.DEFAULT_WINDOW
        self._frame_size = wire.DEFAULT_FRAME_SIZE
        self._sent_at = self._unread_at = 0.0
        # What is sent before the next header block; None as long as the peer has not made the table smaller.
        self._table_size: bytes | None = None
        self._made = self.idle_since = self._pinged = clock()
        self._going_since: float | None = None
        self._announced_last_id = wire.MAX_STREAM_ID
        # Since the last ping: whether anything came; what the peer still had to read then, and had read.
        self._has_heard, self._had_unread, self._num_read = True, False, 0

    def open_stream(self, stream_id: int, request: wire.HeaderList) -> Stream:
        """Return what serves a new stream."""
        raise NotImplementedError

    def changed(self) -> None:
        """Note that there may be bytes to send, or that the connection is over."""

    def feed(self, data: bytes) -> None:
        """Append bytes that came."""
        if self.phase < Phase.OVER:
            self._buffer = self._buffer + data if self._buffer else data
            self.can_read = self._has_heard = True

    def read(self, until: float = float("inf")) -> None:
        """Read what was fed, as long as the clock does not say `until`."""
        if self.phase is Phase.OVER:
            return
        data, at = self._buffer, 0
        try:
            if self.phase is Phase.PREFACE:
                at = len(wire.PREFACE)
                if not wire.PREFACE.startswith(data[:at]):
                    raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the connection does not begin with HTTP/2's preface")
                if len(data) < at:
                    self.can_read = False
                    return
                self.phase = Phase.SETTINGS
            while (stop := self._read_frame(data, at)) is not None:
                if self.phase is Phase.OVER:
                    return
                at = stop
                if self.clock() >= until:
                    break
        except Http2Error as error:
            self.fail(error.with_traceback(None))
        else:
            self.can_read = stop is not None and at < len(data)
            self._buffer = data[at:]

    def outgoing(self) -> bytes:
        """Return the bytes to send since the last time."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing[0] if len(outgoing) == 1 else b"".join(outgoing)

    def grant(self, stream_id: int, size: int) -> None:
        """Let the peer send `size` bytes more on a stream."""
        stream = self.streams.get(stream_id)
        if stream is not None and not stream.has_all:
            stream.receive_window += size
            self._outgoing.append(wire.window_update(stream_id, size))
            self.changed()

    def send(self, stream_id: int, head: bytes, body: bytes, trailers: bytes = b"") -> bool:
        """Send a header block, data, and a header block that ends the stream, without those that are empty.

        What the peer's windows hold back is sent later, then the stream is `drained`; until then no further data may
        be sent on the stream. Returns whether all of it was sent.
        """
        stream = self.streams.get(stream_id)
        if stream is None:
            return True
        if head:
            self._send_headers(stream_id, END_HEADERS, head)
        if body:
            stream.unsent, stream.num_sent = body, 0
        stream.trailers = trailers
        is_sent = self._send_unsent(stream_id, stream)
        self.changed()
        return is_sent

    def fail(self, error: Http2Error) -> None:
        """End everything, and tell the peer why."""
        if self.phase < Phase.OVER:
            self.failure = error
            # It must never be told of a later one than before (RFC 9113, section 6.8).
            last = min(self._announced_last_id, self.last_stream_id)
            self._outgoing.append(wire.goaway(last, error.code, str(error)))
            self._close()
            for stream_id in list(self.streams):
                self._drop(stream_id)
            self.changed()

    def ask_to_go(self) -> None:
        """Let streams end that there are, or that come before the peer knows; idempotent.

        In two steps (RFC 9113, section 6.8): the peer is told to open no further stream, then, once a ping shows that
        it knows, which one is the last.
        """
        if self._going_since is None and self.phase < Phase.OVER:
            self._going_since = self.clock()
            if self.phase is Phase.SERVING:
                self.phase = Phase.GOING
            ping = wire.frame(wire.PING, 0, 0, _GOING)
            self._outgoing.append(wire.goaway(wire.MAX_STREAM_ID, ErrorCode.NO_ERROR) + ping)
            self.changed()

    def tick(self, num_unread: int, num_read: int) -> bool:
        """Act on time; return False to cut it off. Of the bytes sent the peer has `num_read`, and not `num_unread`."""
        if self.phase is Phase.OVER:
            return True
        now, limits = self.clock(), self.limits
        since = now - 2 * limits.patience_s
        if self._blocked and num_unread:
            self._unread_at = now
        elif self._blocked and self._unread_at <= since:
            # The peer has all that was sent, and its windows have held these back for too long.
            for stream_id, stream in list(self._blocked.items()):
                # One that waits for the connection's window alone may have others before it.
                last = stream.waits_since if stream.send_window <= 0 else max(stream.waits_since, self._sent_at)
                if last <= since:
                    self._reset(stream_id, ErrorCode.CANCEL)
        if self._going_since is not None:
            if self.phase < Phase.REFUSING and now - self._going_since >= limits.patience_s:
                self._refuse()
            elif now - self._going_since >= limits.grace_s:
                return False
        elif now - self._made >= limits.age_s or (not self.streams and now - self.idle_since >= limits.idle_s):
            self.ask_to_go()
        if now - self._pinged >= limits.patience_s:
            # A slow peer sees the ping only once it has read what was sent before it.
            reads = self._had_unread and num_read > self._num_read
            if self.phase < Phase.SERVING or not (self._has_heard or reads):
                return False
            self._had_unread, self._num_read = num_unread > 0, num_read
            self._pinged, self._has_heard = now, False
            self._outgoing.append(wire.frame(wire.PING, 0, 0, _ALIVE))
        return True

    def _close(self) -> None:
        self.phase, self.can_read, self._buffer, self._block = Phase.OVER, False, b"", None

    def _read_frame(self, data: bytes, at: int) -> int | None:
        """Read the frame that begins at a position. Returns where it ends; None if it is not complete."""
        start = at + wire.HEAD_BYTES
        if len(data) < start:
            return None
        high, low, kind, flags, stream_id = _read_head(data, at)
        size: int = high << 8 | low
        stream_id &= MAX_WINDOW
        is_headers = kind in (HEADERS, wire.CONTINUATION)
        allowed = self.limits.frame_size
        if is_headers:
            allowed = min(allowed, self.limits.max_block_bytes)
        if size > allowed:
            code = ErrorCode.ENHANCE_YOUR_CALM if is_headers else ErrorCode.FRAME_SIZE_ERROR
            raise Http2Error(code, f"a frame of type {kind} and {size} bytes; at most {allowed}")
        if self._block is not None and (kind != wire.CONTINUATION or stream_id != self._block[1]):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted by another frame")
        end = start + size
        if len(data) < end:
            return None
        if self.phase is Phase.SETTINGS and (kind != wire.SETTINGS or flags & ACK):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
        if kind == DATA:
            self._on_data(memoryview(data)[start:end], stream_id, flags)
        elif kind == HEADERS:
            self._on_block(wire.unpadded(flags, data[start:end]), stream_id, flags)
        elif kind == wire.CONTINUATION:
            if self._block is None:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
            block, stream_id, first_flags = self._block
            self._on_block(block + data[start:end], stream_id, first_flags & END_STREAM | flags & END_HEADERS)
        elif kind in _RULES:
            self._on_control(kind, flags, stream_id, data[start:end])
        return end

    def _on_data(self, data: memoryview, stream_id: int, flags: int) -> None:
        size = len(data)
        if not stream_id & 1 or stream_id > self.last_stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"DATA on stream {stream_id}, which was not opened")
        self._received += size
        if self._received > self.limits.connection_window:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "more data than the connection's window")
        if self._received >= self.limits.connection_window // 2:
            # Whatever the streams hold is bounded by their windows.
            self._outgoing.append(wire.window_update(0, self._received))
            self._received = 0
        if flags & PADDED:
            data = wire.unpadded(PADDED, data)
        stream = self.streams.get(stream_id)
        if stream is not None:
            stream.receive_window -= size
            if stream.has_all or stream.receive_window < 0:
                self._reset(stream_id, ErrorCode.STREAM_CLOSED if stream.has_all else ErrorCode.FLOW_CONTROL_ERROR)
                stream = None
        if stream is None:
            # The peer may not know yet that the stream is over.
            return
        if len(data) < size:
            self.grant(stream_id, size - len(data))
        if data:
            stream.on_data(data)
        if flags & END_STREAM:
            self._end_request(stream_id)

    def _end_request(self, stream_id: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is not None:
            stream.has_all = True
            stream.on_end()

    def _on_control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        allowed, sizes = _RULES[kind]
        position = _CONNECTION
        if stream_id:
            position = _OPENED if stream_id & 1 and stream_id <= self.last_stream_id else _IDLE
        if not allowed & position:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} on stream {stream_id}")
        size, is_ack = len(payload), flags & ACK
        if size not in sizes or (kind == wire.SETTINGS and is_ack and size):
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} and {size} bytes")
        if kind == wire.WINDOW_UPDATE:
            self._on_window_update(stream_id, int.from_bytes(payload, "big") & MAX_WINDOW)
        elif kind == wire.RST_STREAM:
            self._drop(stream_id)
        elif kind == wire.SETTINGS and not is_ack:
            self._on_settings(payload)
        elif kind == wire.PING and not is_ack:
            self._outgoing.append(wire.frame(wire.PING, ACK, 0, payload))
        elif kind == wire.PING and payload == _GOING and self._going_since is not None:
            self._refuse()

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
        is_request = stream_id > self.last_stream_id
        headers = self._decoder.decode(block, is_request=is_request)
        has_all = bool(flags & END_STREAM)
        if not is_request:
            # Trailers.
            stream = self.streams.get(stream_id)
            if stream is not None and (stream.has_all or not has_all or headers.problem is not None):
                self._reset(stream_id, ErrorCode.STREAM_CLOSED if stream.has_all else ErrorCode.PROTOCOL_ERROR)
            else:
                self._end_request(stream_id)
            return
        self.last_stream_id = stream_id
        if self.phase is Phase.REFUSING:
            return
        if len(self.streams) >= self.limits.max_streams:
            self._outgoing.append(wire.rst_stream(stream_id, ErrorCode.REFUSED_STREAM))
        else:
            stream = self.streams[stream_id] = self.open_stream(stream_id, headers)
            stream.send_window, stream.receive_window = self._new_window, self.limits.stream_window
            if has_all:
                self._end_request(stream_id)

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
                self._reset(stream_id, code)
            elif stream_id in self._blocked:
                self._send_unsent(stream_id, stream)

    def _on_settings(self, payload: bytes) -> None:
        if self.phase is Phase.SETTINGS:
            self.phase = Phase.SERVING if self._going_since is None else Phase.GOING
        self._outgoing.append(wire.frame(wire.SETTINGS, ACK, 0))
        values = wire.read_settings(payload)
        if any(name == wire.HEADER_TABLE_SIZE and value < wire.DEFAULT_TABLE_BYTES for name, value in values):
            # The smallest has to be answered, though a larger one follows (RFC 7541, section 4.2). No table is used, so
            # an empty one fits whatever the peer says later.
            self._table_size = wire.EMPTY_TABLE if self._table_size is None else self._table_size
        # They count in their order, so the last one of a name is what holds.
        last = dict(values)
        self._frame_size = last.get(wire.MAX_FRAME_SIZE, self._frame_size)
        before, self._new_window = self._new_window, last.get(wire.INITIAL_WINDOW_SIZE, self._new_window)
        for stream in self.streams.values():
            stream.send_window += self._new_window - before
            if stream.send_window > MAX_WINDOW:
                raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE makes a window too large")
        self._send_blocked()

    def _send_blocked(self) -> None:
        for stream_id, stream in list(self._blocked.items()):
            if self._window <= 0:
                return
            self._send_unsent(stream_id, stream)

    def _send_unsent(self, stream_id: int, stream: Stream) -> bool:
        """Send of what a stream holds back as much as the windows take. Returns whether that was all."""
        unsent, first = stream.unsent, stream.num_sent
        while stream.num_sent < len(unsent):
            at = stream.num_sent
            # A peer may make its windows smaller than what is on the way: they are negative then.
            size = min(len(unsent) - at, stream.send_window, self._window, self._frame_size)
            if size <= 0:
                break
            stream.send_window -= size
            self._window -= size
            stream.num_sent += size
            head = _pack_head(size >> 8, size & 0xFF, DATA, 0, stream_id)
            self._outgoing += (head, unsent[at : at + size])
        sent = stream.num_sent - first
        if stream.num_sent < len(unsent):
            if sent or stream_id not in self._blocked:
                stream.waits_since = self.clock()
            if sent:
                self._sent_at = stream.waits_since
            self._blocked[stream_id] = stream
            return False
        stream.unsent, stream.num_sent = b"", 0
        was_blocked = self._blocked.pop(stream_id, None) is not None
        if stream.trailers:
            self._send_headers(stream_id, END_HEADERS | END_STREAM, stream.trailers)
            if not stream.has_all:
                # RFC 9113, section 8.1: the peer need not send the rest.
                self._outgoing.append(wire.rst_stream(stream_id, ErrorCode.NO_ERROR))
            self._forget(stream_id)
        if was_blocked:
            stream.on_drained()
        return True

    def _send_headers(self, stream_id: int, flags: int, block: bytes) -> None:
        if self._table_size:
            block, self._table_size = self._table_size + block, b""
        size = len(block)
        self._outgoing += (_pack_head(size >> 8, size & 0xFF, HEADERS, flags, stream_id), block)

    def _reset(self, stream_id: int, code: ErrorCode) -> None:
        self._outgoing.append(wire.rst_stream(stream_id, code))
        self._drop(stream_id)

    def _drop(self, stream_id: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._forget(stream_id)
            stream.on_dropped()

    def _forget(self, stream_id: int) -> None:
        del self.streams[stream_id]
        self._blocked.pop(stream_id, None)
        if not self.streams:
            self.idle_since = self.clock()
            if self.phase is Phase.REFUSING:
                self._close()

    def _refuse(self) -> None:
        if self.phase < Phase.REFUSING:
            self.phase = Phase.REFUSING
            self._announced_last_id = self.last_stream_id
            self._outgoing.append(wire.goaway(self.last_stream_id, ErrorCode.NO_ERROR))
            if not self.streams:
                self._close()
