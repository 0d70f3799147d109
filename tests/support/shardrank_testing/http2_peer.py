"""A client's end of an HTTP/2 connection that sends the frames it is told to, right or wrong."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import hpack

from serving.api.grpc import wire as frames
from serving.api.grpc.connection import Stream
from serving.api.grpc.listener import Http2Listener, Http2Protocol
from serving.api.grpc.wire import ConnectionLimits, Header, HeaderList
from serving.limits import RequestLimits
from shard_node.byte_budget import ByteBudget

LIMITS = ConnectionLimits(
    max_connections=3,
    max_streams=4,
    max_idle_work_s=0.2,
    max_header_bytes=4096,
    patience_s=5,
    idle_s=60,
    age_s=60,
    grace_s=60,
    stream_window=1000,
    connection_window=100_000,
    frame_size=50_000,
)
REQUEST = [(b":method", b"POST"), (b":path", b"/echo"), (b":scheme", b"http")]
SETTINGS = frames.settings({})
END, END_HEADERS = frames.END_STREAM, frames.END_HEADERS
PING = frames.frame(frames.PING, 0, 0, bytes(8))


def data(stream_id: int, payload: bytes, flags: int = 0) -> bytes:
    """A DATA frame."""
    return frames.frame(frames.DATA, flags, stream_id, payload)


def prefixed(message: bytes, flag: int = 0) -> bytes:
    """A gRPC message; flag 1 says that it is compressed."""
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message


@dataclass
class Frame:
    """One that came."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def code(self) -> int:
        """Why a GOAWAY was sent."""
        assert self.kind == frames.GOAWAY
        return int.from_bytes(self.payload[4:8], "big")


class Http2Peer:
    """A client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.encoder, self.decoder = hpack.Encoder(), hpack.Decoder()

    def send(self, *parts: bytes) -> None:
        """Sends frames, or other bytes."""
        self._writer.write(b"".join(parts))

    def begin(self, settings: bytes = SETTINGS) -> None:
        """Sends what a connection begins with."""
        self.send(frames.PREFACE, settings)

    def headers(self, stream_id: int, flags: int = frames.END_HEADERS, more: Iterable[Any] = ()) -> bytes:
        """A HEADERS frame of a request."""
        return frames.frame(frames.HEADERS, flags, stream_id, self.encoder.encode([*REQUEST, *more]))

    def call(self, stream_id: int, path: str, **headers: str) -> bytes:
        """A HEADERS frame of a gRPC call."""
        sent = [(":method", "POST"), (":scheme", "http"), (":path", path), ("te", "trailers")]
        sent += [("content-type", "application/grpc"), *((name.replace("_", "-"), headers[name]) for name in headers)]
        return frames.frame(frames.HEADERS, END_HEADERS, stream_id, self.encoder.encode(sent))

    async def status(self, stream_id: int) -> dict[str, str]:
        """The trailers that end a call."""
        return dict((await self.answer(stream_id))[1])

    async def read(self) -> Frame | None:
        """The next frame; None after the last."""
        try:
            high, low, kind, flags, stream_id = frames.FRAME_HEAD.unpack(
                await self._reader.readexactly(frames.HEAD_BYTES)
            )
            return Frame(kind, flags, stream_id, await self._reader.readexactly(high << 8 | low))
        except asyncio.IncompleteReadError as end:
            if end.partial:
                raise
            return None

    async def find(self, kind: int, stream_id: int | None = None) -> Frame:
        """The next frame of a kind, on one stream if given; others before it are passed over."""
        while True:
            frame = await self.read()
            assert frame is not None, f"no frame of kind {kind}"
            is_ack = kind == frames.SETTINGS and frame.flags & frames.ACK
            if frame.kind == kind and not is_ack and stream_id in (None, frame.stream_id):
                return frame

    async def rest(self) -> list[Frame]:
        """All frames until the server closes."""
        found = []
        while (frame := await self.read()) is not None:
            found.append(frame)
        return found

    async def answer(self, stream_id: int) -> tuple[bytes, list[Any]]:
        """Data and trailers of an answer that is under way."""
        data = b""
        while True:
            frame = await self.read()
            assert frame is not None
            if frame.stream_id != stream_id:
                continue
            if frame.kind == frames.DATA:
                data += frame.payload
            elif frame.kind == frames.HEADERS:
                headers = list(self.decoder.decode(frame.payload))
                if frame.flags & frames.END_STREAM:
                    return data, headers

    def close(self) -> None:
        """Closes the connection."""
        self._writer.close()


class EchoStream(Stream):
    """Answers with the request's data, when there are all of them, unless its path says `/hold`."""

    def __init__(self, connection: Http2Protocol, stream_id: int, headers: list[Header], echo: Echo) -> None:
        self.connection, self.stream_id, self.headers = connection, stream_id, headers
        self.received: list[bytes] = []
        self.echo = echo
        echo.streams.append(self)

    def begin(self) -> None:
        """Counts it."""
        self.echo.begun.append(self.stream_id)
        self.echo.changed()

    def on_data(self, data: memoryview) -> None:
        """Keeps the data."""
        self.received.append(bytes(data))
        self.echo.changed()

    def on_end(self) -> None:
        """Answers."""
        if (b":path", b"/hold") not in self.headers:
            self.reply()

    def reply(self) -> None:
        """Answers now."""
        self.connection.completed()
        self.send(b"\x88", b"".join(self.received), b"\x88")

    def send(self, head: bytes, body: bytes, trailers: bytes = b"") -> None:
        """Sends on its stream."""
        self.connection.send(self.stream_id, head, body, trailers)

    def on_dropped(self) -> None:
        """Counts it."""
        self.echo.dropped.append(self.stream_id)
        self.echo.changed()


@dataclass
class Echo:
    """What the server's end has seen."""

    streams: list[EchoStream] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def changed(self) -> None:
        """Wakes who waits."""
        self._changed.set()

    @property
    def num_received(self) -> int:
        """Bytes of data of all streams together."""
        return sum(len(data) for stream in self.streams for data in stream.received)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Waits for what data or a drop brings about."""
        while not is_so():
            self._changed.clear()
            await self._changed.wait()


class EchoListener(Http2Listener):
    """A listener that echoes."""

    def __init__(
        self, echo: Echo, limits: ConnectionLimits = LIMITS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(limits, ByteBudget(RequestLimits().max_buffered_bytes), clock, None)
        self._echo = echo

    def new_stream(self, connection: Http2Protocol, stream_id: int, request: HeaderList) -> EchoStream:
        """Makes one that echoes."""
        return EchoStream(connection, stream_id, request.headers, self._echo)

    def note(self, kind: str) -> None:
        """Counts nothing."""


Connect = Callable[..., Awaitable[Http2Peer]]


@contextlib.asynccontextmanager
async def echoing(
    limits: ConnectionLimits = LIMITS, **options: Any
) -> AsyncIterator[tuple[Connect, Echo, Http2Listener]]:
    """A listener that echoes, and what connects to it, from a local address of choice."""
    echo = Echo()
    listener = EchoListener(echo, limits, **options)
    port = listener.listen("127.0.0.1", 0, "echoes")
    peers = []

    async def connect(source: str = "127.0.0.1") -> Http2Peer:
        peers.append(Http2Peer(*await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))))
        return peers[-1]

    try:
        yield connect, echo, listener
    finally:
        for peer in peers:
            peer.close()
        await listener.stop(0.1)


@contextlib.asynccontextmanager
async def http2_peer(limits: ConnectionLimits = LIMITS) -> AsyncIterator[tuple[Http2Peer, Echo, Http2Listener]]:
    """A client, connected to a listener that echoes."""
    async with echoing(limits) as (connect, echo, listener):
        yield await connect(), echo, listener
