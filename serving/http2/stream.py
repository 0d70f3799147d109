"""One stream: what it may send and take, and how an answer goes out."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

from serving.http2.errors import ErrorCode
from serving.http2.frames import DATA, END_HEADERS, END_STREAM, FRAME_HEAD, HEADERS, rst_stream, window_update

if TYPE_CHECKING:
    from serving.http2.connection import Http2Connection

Head = TypeVar("Head")
# A peer that takes answers may send so many frames that carry no request for each, and one for so many bytes.
CONTROL_FRAMES_OF_AN_ANSWER = 8
BYTES_OF_A_CONTROL_FRAME = 1024
_pack = FRAME_HEAD.pack


class Stream(ABC, Generic[Head]):
    """A request and its answer. Belongs to the connection's event loop.

    Whoever serves streams derives from it: `begin`, `take`, `remote_ended` and `dropped` are called by the connection.

    Args:
        connection: it came on.
        stream_id: odd, as the client's are.
        head: what was read from its headers.

    Attributes:
        send_window: bytes of data that the peer still takes.
        receive_window: bytes of data that the peer may still send.
        has_all: whether the peer has sent everything.
        is_over: whether it has been answered or dropped; nothing more is sent then.
        waits_since: when it last could send something of what the peer's windows held back.
    """

    __slots__ = (
        "_drained",
        "_trailers",
        "_unsent",
        "connection",
        "has_all",
        "head",
        "is_over",
        "receive_window",
        "send_window",
        "stream_id",
        "waits_since",
    )

    def __init__(self, connection: Http2Connection[Head], stream_id: int, head: Head) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self.head = head
        self.send_window = connection.outflow.stream_window
        self.receive_window = connection.limits.stream_window
        self.has_all = False
        self.is_over = False
        self.waits_since = 0.0
        self._unsent: memoryview | None = None
        self._trailers = b""
        self._drained: asyncio.Future[None] | None = None

    @abstractmethod
    def begin(self) -> None:
        """Called once, after everything that came together with the stream's headers was taken."""

    @abstractmethod
    def take(self, data: bytes, start: int, end: int) -> None:
        """Takes `data[start:end]`, the next bytes of the request."""

    @abstractmethod
    def remote_ended(self) -> None:
        """The request has ended; `has_all` is set."""

    @abstractmethod
    def dropped(self) -> None:
        """The peer or the server gave the stream up; nobody waits for its answer."""

    def grant(self, size: int) -> None:
        """Lets the peer send `size` bytes more."""
        if not self.is_over and not self.has_all:
            self.receive_window += size
            self.connection.write(window_update(self.stream_id, size))

    def send(self, head: bytes, body: bytes, trailers: bytes = b"") -> None:
        """Sends a header block, data, and a header block that ends the stream; what is empty is left out.

        What the peer's windows do not take is sent when they do. Data may only follow data that was sent: see
        `drained`.
        """
        if self.is_over:
            return
        connection, stream_id, size = self.connection, self.stream_id, len(body)
        outflow = connection.outflow
        parts: list[bytes] = []
        if head:
            if outflow.has_to_shrink_table:
                head = outflow.shrink_table(head)
            parts += (_pack(len(head) >> 8, len(head) & 0xFF, HEADERS, END_HEADERS, stream_id), head)
        # A peer may make its windows smaller than what is on the way: they are negative then, and take only frames
        # without data.
        fits = not size or size <= min(self.send_window, outflow.window, outflow.frame_size)
        if fits and not self._unsent:
            if size:
                self.send_window -= size
                outflow.window -= size
                parts += (_pack(size >> 8, size & 0xFF, DATA, 0, stream_id), body)
            if trailers:
                flags = END_HEADERS | END_STREAM
                if outflow.has_to_shrink_table:
                    trailers = outflow.shrink_table(trailers)
                parts += (_pack(len(trailers) >> 8, len(trailers) & 0xFF, HEADERS, flags, stream_id), trailers)
            connection.write(b"".join(parts))
            if trailers:
                self._answered()
            return
        if parts:
            connection.write(b"".join(parts))
        if size:
            self._unsent = memoryview(body)
        self._trailers = trailers
        self.flush()

    def flush(self) -> None:
        """Sends of what waits as much as the windows take."""
        connection, outflow = self.connection, self.connection.outflow
        unsent = len(self._unsent) if self._unsent else 0
        while self._unsent:
            size = min(len(self._unsent), self.send_window, outflow.window, outflow.frame_size)
            if size <= 0:
                self._wait_for_windows(unsent - len(self._unsent))
                return
            self.send_window -= size
            outflow.window -= size
            head = _pack(size >> 8, size & 0xFF, DATA, 0, self.stream_id)
            connection.write(b"".join((head, self._unsent[:size])))
            self._unsent = self._unsent[size:]
        connection.lifetime.was_useful(unsent // BYTES_OF_A_CONTROL_FRAME)
        self._unsent = None
        outflow.blocked.pop(self.stream_id, None)
        if self._trailers:
            trailers, self._trailers = self._trailers, b""
            self.send(b"", b"", trailers)
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    async def drained(self) -> None:
        """Returns when everything was sent. One task may wait."""
        if self._unsent and not self.is_over:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    def reset(self, code: ErrorCode) -> None:
        """Tells the peer that the stream is given up, and drops it."""
        if not self.is_over:
            self.connection.write(rst_stream(self.stream_id, code))
            self.drop()

    def drop(self) -> None:
        """Ends it without a word to the peer."""
        if not self.is_over:
            self._end()
            self.dropped()

    def _wait_for_windows(self, sent: int) -> None:
        outflow = self.connection.outflow
        if sent:
            self.connection.lifetime.was_useful(sent // BYTES_OF_A_CONTROL_FRAME)
        if sent or self.stream_id not in outflow.blocked:
            self.waits_since = self.connection.loop.time()
        if sent:
            outflow.sent_at = self.waits_since
        outflow.blocked[self.stream_id] = self

    def _answered(self) -> None:
        self.connection.lifetime.was_useful(CONTROL_FRAMES_OF_AN_ANSWER)
        if not self.has_all:
            # RFC 9113, section 8.1: the peer need not send the rest.
            self.connection.write(rst_stream(self.stream_id, ErrorCode.NO_ERROR))
        self._end()

    def _end(self) -> None:
        self.is_over = True
        self._unsent = None
        self.connection.outflow.blocked.pop(self.stream_id, None)
        self.connection.forget(self)
