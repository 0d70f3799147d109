"""What the peer of one connection takes, and the streams that wait for it to take more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serving.http2 import frames
from serving.http2.errors import ErrorCode, Http2Error
from serving.http2.frames import MAX_WINDOW
from serving.http2.header_blocks import DEFAULT_TABLE_BYTES, EMPTY_TABLE
from serving.http2.stream import Stream


class Outflow:
    """Windows and sizes as the peer has set them (RFC 9113, sections 5.2 and 6.5).

    Args:
        streams: of the connection, by id.

    Attributes:
        blocked: streams that have more to send than the peer takes now, longest first.
        window: bytes of data that it still takes on all streams together.
        sent_at: when a stream that waited could last send something.
        stream_window: what a new stream's window is.
        frame_size: the longest payload that it takes.
        has_to_shrink_table: whether the next header block has to say that the table is small enough for the peer.
    """

    __slots__ = (
        "_has_shrunk_table",
        "_streams",
        "blocked",
        "frame_size",
        "has_to_shrink_table",
        "sent_at",
        "stream_window",
        "window",
    )

    def __init__(self, streams: Mapping[int, Stream[Any]]) -> None:
        self._streams = streams
        self.blocked: dict[int, Stream[Any]] = {}
        self.window = frames.DEFAULT_WINDOW
        self.stream_window = frames.DEFAULT_WINDOW
        self.frame_size = frames.DEFAULT_FRAME_SIZE
        self.sent_at = 0.0
        self.has_to_shrink_table = self._has_shrunk_table = False

    def shrink_table(self, block: bytes) -> bytes:
        """A header block as the first one goes out after `has_to_shrink_table`."""
        self.has_to_shrink_table, self._has_shrunk_table = False, True
        return EMPTY_TABLE + block

    def on_window_update(self, stream_id: int, payload: bytes) -> None:
        """The peer takes more. Raises Http2Error."""
        increment = int.from_bytes(payload, "big") & MAX_WINDOW
        code = ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR
        stream = self._streams.get(stream_id)
        if stream_id == 0:
            self.window += increment
            if not increment or self.window > MAX_WINDOW:
                raise Http2Error(code, f"WINDOW_UPDATE by {increment} to {self.window}")
            self._flush()
        elif stream is not None:
            stream.send_window += increment
            if not increment or stream.send_window > MAX_WINDOW:
                stream.reset(code)
            elif stream_id in self.blocked:
                stream.flush()

    def on_settings(self, payload: bytes) -> None:
        """The peer has set something. Raises Http2Error."""
        settings = list(frames.read_settings(payload))
        if any(name == frames.HEADER_TABLE_SIZE and value < DEFAULT_TABLE_BYTES for name, value in settings):
            # The smallest has to be answered, though a larger one follows (RFC 7541, section 4.2). No table is used, so
            # an empty one fits whatever the peer says later.
            self.has_to_shrink_table = not self._has_shrunk_table
        # They count in their order, so the last one of a name is what holds.
        for name, value in dict(settings).items():
            if name == frames.INITIAL_WINDOW_SIZE:
                for stream in self._streams.values():
                    stream.send_window += value - self.stream_window
                    if stream.send_window > MAX_WINDOW:
                        raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE makes a window too large")
                self.stream_window = value
            elif name == frames.MAX_FRAME_SIZE:
                self.frame_size = value
        self._flush()

    def drop_stuck(self, since: float) -> None:
        """Drops the streams whose data the peer has not let go on since then, by its windows."""
        for stream in list(self.blocked.values()):
            # One that waits for the connection's window alone may have others before it.
            last = stream.waits_since if stream.send_window <= 0 else max(stream.waits_since, self.sent_at)
            if last <= since:
                stream.reset(ErrorCode.CANCEL)

    def _flush(self) -> None:
        for stream in list(self.blocked.values()):
            if self.window <= 0:
                return
            stream.flush()
