"""A TCP proxy that shapes, delays or loses what passes in either direction; all may be changed while it runs.

Due times are computed from each other, so that late timers add up to nothing: a frame is late once, by the timer of its
last bytes. On uvloop that is about 0.1 ms; asyncio's own loop sleeps in whole milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

Connect: TypeAlias = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
Pieces: TypeAlias = asyncio.Queue[tuple[float, bytes]]
"""Bytes, and when they are due; none at the end."""
READ_BYTES = 1 << 16
MAX_QUEUED_PIECES = 1024
MAX_BACKLOG_S = 0.05
"""No more is read of a connection while so much of a link's time is queued: TCP makes the sender wait."""


@dataclass(slots=True, eq=False)
class Direction:
    """What happens to bytes that go one way, on all connections; fields may be changed at any time.

    Attributes:
        delay_s: by which they come later, in order.
        is_black: they are lost. A connection that has lost any is cut by the first ones that come afterwards.
        bits_per_s: at which they leave, one after the other in the order of their arrival; None for no limit.
        free_at: when the last of them has left, by `time.monotonic`.
    """

    delay_s: float = 0.0
    is_black: bool = False
    bits_per_s: float | None = None
    free_at: float = 0.0

    def due(self, size_bytes: int, now: float) -> float:
        """Queue bytes that have arrived; return when the last of them is at the other end of the link."""
        self.free_at = max(now, self.free_at) + (8 * size_bytes / self.bits_per_s if self.bits_per_s else 0.0)
        return self.free_at + self.delay_s

    async def read(self, reader: asyncio.StreamReader, pieces: Pieces) -> None:
        """Queue what comes until it ends, or the connection is to be cut."""
        has_lost = False
        while piece := await reader.read(READ_BYTES):
            if self.is_black:
                has_lost = True
            elif has_lost:
                break
            else:
                await pieces.put((self.due(len(piece), time.monotonic()), piece))
                if self.bits_per_s:
                    await asyncio.sleep(self.free_at - MAX_BACKLOG_S - time.monotonic())
        await pieces.put((0.0, b""))

    async def write(self, pieces: Pieces, writer: asyncio.StreamWriter) -> None:
        """Pass on what is queued. Raises ConnectionError at the end."""
        while (item := await pieces.get())[1]:
            # Timers of uvloop are of whole milliseconds, rounded: the last half is a loop without sleep.
            while (left_s := item[0] - time.monotonic()) > 0:  # noqa: ASYNC110
                await asyncio.sleep(left_s)
            writer.write(item[1])
            await writer.drain()
        raise ConnectionError


@dataclass(eq=False)
class TcpProxy:
    """Passes `requests` of clients to a server, and `replies` back; `serving` are the connections that are open."""

    connect: Connect
    requests: Direction = field(default_factory=Direction)
    replies: Direction = field(default_factory=Direction)
    port: int = 0
    serving: set[asyncio.Task[Any] | None] = field(default_factory=set)

    def cut(self) -> None:
        """End all connections."""
        for task in self.serving:
            assert task is not None
            task.cancel()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a client's connection until either side ends it."""
        self.serving.add(asyncio.current_task())
        writers = [writer]
        try:
            server_reader, server_writer = await self.connect()
            writers.append(server_writer)
            ways = (self.requests, reader, server_writer), (self.replies, server_reader, writer)
            async with asyncio.TaskGroup() as group:
                for direction, source, target in ways:
                    pieces = Pieces(MAX_QUEUED_PIECES)
                    group.create_task(direction.read(source, pieces))
                    group.create_task(direction.write(pieces, target))
        except* OSError:
            pass
        finally:
            for opened in writers:
                opened.close()
            self.serving.discard(asyncio.current_task())


Proxy = TypeVar("Proxy", bound=TcpProxy)


@contextlib.asynccontextmanager
async def listening(proxy: Proxy, tls: ssl.SSLContext | None = None) -> AsyncIterator[Proxy]:
    """Run a proxy on a port of 127.0.0.1; with `tls`, clients have to speak TLS."""
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, ssl=tls)
    proxy.port = listener.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        listener.close()
        proxy.cut()
