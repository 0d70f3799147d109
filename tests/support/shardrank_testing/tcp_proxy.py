"""A TCP proxy that counts, holds back and cuts what passes, in front of a Redis, or in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from loadtest.drill.proxy import READ_BYTES, Direction, Pieces, TcpProxy, listening
from shardrank_testing.registries import RedisServer

_LOOK_S = 0.005


@dataclass(slots=True, eq=False)
class CountedDirection(Direction):
    """A direction whose bytes are counted, and that is held back or cut, neither delayed nor black.

    Attributes:
        hold_after: once so many bytes were passed on, no more are; None for never.
        cuts: so many pieces are lost, each with its connection.
    """

    hold_after: int | None = None
    cuts: int = 0
    passed_bytes: int = 0

    async def read(self, reader: asyncio.StreamReader, pieces: Pieces) -> None:
        """Queue what comes until it ends, or the connection is to be cut."""
        while piece := await reader.read(READ_BYTES):
            if self.cuts:
                self.cuts -= 1
                break
            await pieces.put((0.0, piece))
        await pieces.put((0.0, b""))

    async def write(self, pieces: Pieces, writer: asyncio.StreamWriter) -> None:
        """Pass on what is queued. Raises ConnectionError at the end."""
        while piece := (await pieces.get())[1]:
            while self.hold_after is not None and self.hold_after <= self.passed_bytes:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
            writer.write(piece)
            self.passed_bytes += len(piece)
            await writer.drain()
        raise ConnectionError


@dataclass(eq=False)
class CountedProxy(TcpProxy):
    """A proxy whose directions are counted; `connections` were made so far."""

    requests: CountedDirection = field(default_factory=CountedDirection)
    replies: CountedDirection = field(default_factory=CountedDirection)
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Count a client's connection, and serve it until either side ends it."""
        self.connections += 1
        await TcpProxy.serve(self, reader, writer)


def redis_proxy(
    server: RedisServer, tls: ssl.SSLContext | None = None
) -> contextlib.AbstractAsyncContextManager[CountedProxy]:
    """A proxy of a server on a Unix socket."""
    return listening(CountedProxy(lambda: asyncio.open_unix_connection(str(server.socket_path))), tls)


@contextlib.contextmanager
def threaded_proxy(port: int) -> Iterator[CountedProxy]:
    """A proxy of a port of 127.0.0.1, in a thread of its own, for clients that block."""
    found: list[CountedProxy] = []
    ready, stop = threading.Event(), threading.Event()

    async def program() -> None:
        async with listening(CountedProxy(lambda: asyncio.open_connection("127.0.0.1", port))) as proxy:
            found.append(proxy)
            ready.set()
            while not stop.is_set():  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)

    thread = threading.Thread(target=lambda: asyncio.run(program()), name="proxy")
    thread.start()
    assert ready.wait(10)
    try:
        yield found[0]
    finally:
        stop.set()
        thread.join(10)
