"""HTTP by bytes: a client that sends what it is given; connections over a transport whose other end is a list."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, NamedTuple

from loader.errors import OverloadedError
from serving.api.http_connection import HttpConnection, HttpListener
from serving.api.http_messages import Exchange, HttpReply
from serving.limits import RequestLimits
from serving.observe.metrics import ServingMetrics
from shard_node.byte_budget import ByteAccount, ByteBudget, MessageBytes
from shard_node.wire.listening import forget_unsent
from shardrank_testing.serving_api import Api
from shardrank_testing.waiting import Clock

HOME = "192.0.2.1"
LIMITS = RequestLimits(max_header_bytes=4096, max_body_bytes=100_000)


class Response(NamedTuple):
    """One answer as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


class HttpPeer:
    """A client's end of an HTTP connection that sends the bytes it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.send = writer.write

    async def response(self) -> Response:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Response(int(head[0].split()[1]), headers, body)

    async def rest(self) -> bytes:
        """What else comes until the server closes."""
        return await self.reader.read()

    async def assert_silent(self, seconds: float) -> None:
        """Nothing comes for so long, and the connection stays."""
        try:
            came = await asyncio.wait_for(self.reader.read(1), seconds)
        except TimeoutError:
            return
        raise AssertionError(f"{came!r} came")

    def reset(self) -> None:
        """Closes for both directions at once: the end of sending alone looks the same as an orderly close."""
        forget_unsent(self.writer.get_extra_info("socket"))
        self.writer.close()


@contextlib.asynccontextmanager
async def http_peer(api: Api) -> AsyncIterator[HttpPeer]:
    """A client that is connected to a server."""
    peer = HttpPeer(*await asyncio.open_connection(api.listening.host, api.listening.http_port))
    try:
        yield peer
    finally:
        peer.writer.close()


def message_bytes(max_bytes: int = 1 << 30) -> MessageBytes:
    """What a message holds of a budget of its own."""
    return MessageBytes(ByteAccount(ByteBudget(max_bytes), lambda error: None))


class Wire(asyncio.Transport):
    """A transport whose other end is a list."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.is_closed = self.is_aborted = self.is_paused = False

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.sent += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        assert not self.is_paused
        self.is_paused = True

    def resume_reading(self) -> None:
        assert self.is_paused
        self.is_paused = False


class Served:
    """A listener that reports what it got; requests with the header `x-refuse` end if `refuses`.

    If `is_ranked`, they are answered as those that rank, by `Exchange.respond`; else by an application.
    """

    is_ranked = True

    def __init__(
        self, limits: RequestLimits = LIMITS, clock: Clock | None = None, hold: bool = False, refuses: bool = False
    ) -> None:
        self.calls: list[tuple[str, str, bytes, dict[bytes, bytes]]] = []
        self.may_answer = asyncio.Event()
        self.left = 0
        if not hold:
            self.may_answer.set()
        self.clock = clock or Clock(1000.0)
        self.metrics = ServingMetrics()
        self.buffers = ByteBudget(limits.max_buffered_bytes)

        def admit(exchange: Exchange) -> OverloadedError | None:
            if refuses and b"x-refuse" in exchange.fields:
                return OverloadedError("no")
            exchange.watch(self._leave)
            if self.is_ranked:
                headers = dict(exchange.connection.headers)
                exchange.respond = partial(self._respond, exchange, headers)
            return None

        self.listener = HttpListener(
            limits, self.clock, self.metrics.failed, self.app, buffers=self.buffers, admit=admit
        )

    def _leave(self) -> None:
        self.left += 1

    async def _respond(self, exchange: Exchange, headers: dict[bytes, bytes], body: bytes) -> HttpReply:
        exchange.watch(self._leave)
        self.calls.append((exchange.method, exchange.path, body, headers))
        await self.may_answer.wait()
        return HttpReply(200, b"%d" % len(body))

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        body, is_more = b"", True
        while is_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, is_more = body + message["body"], message["more_body"]
        self.calls.append((scope["method"], scope["path"], body, dict(scope["headers"])))
        await self.may_answer.wait()
        text = b"%d" % len(body)
        headers = [(b"content-length", b"%d" % len(text))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    @property
    def tasks(self) -> set[Any]:
        return self.listener.uvicorn_state.tasks

    def connect(self, address: str = HOME) -> tuple[HttpConnection, Wire]:
        wire, connection = Wire(), self.listener.make(address)
        connection.connection_made(wire)
        return connection, wire

    async def converse(self, pieces: list[bytes]) -> Wire:
        """Sends pieces as a socket would: only while they are read."""
        connection, wire = self.connect()
        for piece in pieces:
            left = memoryview(piece)
            while left and not wire.is_closed:
                await settled(lambda: not wire.is_paused or wire.is_closed)
                left = left[read_from(left, connection) :]
        await settled(lambda: not (self.tasks or wire.is_paused) or wire.is_closed)
        # As by a reset: uvicorn closes what was closed in order.
        connection.connection_lost(ConnectionResetError())
        await settled(lambda: not self.tasks)
        return wire


def read_from(data: memoryview | bytes, connection: HttpConnection) -> int:
    """What uvloop does when a socket can be read from. Returns how much was."""
    piece = bytes(data[:256_000])
    connection.data_received(piece)
    return len(piece)


async def settled(condition: Any) -> None:
    for _ in range(2000):
        await asyncio.sleep(0)
        if condition():
            return


def post(body: bytes = b"abc", *headers: str, path: str = "/p", length: int | None = None) -> bytes:
    """A request; `length` is what it says of its body if that is another than the body's."""
    length = len(body) if length is None else length
    lines = (f"POST {path} HTTP/1.1", "host: x", f"content-length: {length}", *headers, "", "")
    return "\r\n".join(lines).encode("latin-1") + body


CHUNKED = "POST {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(parts: list[bytes], extension: bytes = b"", trailers: bytes = b"", path: str = "/c") -> bytes:
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts if part)
    return CHUNKED.format(path=path).encode() + chunks + b"0\r\n" + trailers + b"\r\n"


def statuses(sent: bytes) -> list[int]:
    return [int(part[:3]) for part in sent.split(b"HTTP/1.1 ")[1:]]


def errors(metrics: ServingMetrics) -> dict[str, float]:
    found = {}
    for line in metrics.render().decode().splitlines():
        if line.startswith("shardrank_errors_total{"):
            found[line.split('kind="')[1].split('"')[0]] = float(line.rsplit(" ", 1)[1])
    return found
