"""Stands between a client and a server: ends TLS, loses an answer after the server has acted, holds answers back."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeAlias

from shardrank_testing.registries import RedisServer

Below: TypeAlias = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
_LOOK_S = 0.005


class TcpProxy:
    """Passes bytes on.

    Attributes:
        answers_to_lose: so many pieces of answers are not passed on: their connections end instead.
        answer_bytes: of what was passed on to clients.
        hold_after: once so many bytes were passed on, no more are, until it is changed; None for never.
    """

    def __init__(self, below: Below) -> None:
        self.port = 0
        self.answers_to_lose = 0
        self.connections = 0
        self.answer_bytes = 0
        self.hold_after: int | None = None
        self._below = below
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @property
    def is_in_use(self) -> bool:
        """Whether a connection is open."""
        return bool(self._open)

    async def close(self) -> None:
        """Ends all connections."""
        self.hold_after = None
        for writer in self._open.values():
            writer.close()
        await asyncio.gather(*self._open)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection."""
        self.connections += 1
        below_reader, below_writer = await self._below()
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = below_writer
        upward = asyncio.ensure_future(self._pass_on(reader, below_writer))
        try:
            while answer := await below_reader.read(1 << 16):
                if self.answers_to_lose:
                    self.answers_to_lose -= 1
                    break
                while self.hold_after is not None and self.answer_bytes >= self.hold_after:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
                writer.write(answer)
                self.answer_bytes += len(answer)
                await writer.drain()
        except OSError:
            pass
        finally:
            upward.cancel()
            writer.close()
            below_writer.close()
            del self._open[task]

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while request := await reader.read(1 << 16):
                writer.write(request)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def tcp_proxy(below: Below, tls: ssl.SSLContext | None = None) -> AsyncIterator[TcpProxy]:
    """A proxy on a port of 127.0.0.1; with `tls`, the client has to speak TLS."""
    proxy = TcpProxy(below)
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, ssl=tls)
    proxy.port = listener.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        listener.close()
        await proxy.close()


def redis_proxy(
    server: RedisServer, tls: ssl.SSLContext | None = None
) -> contextlib.AbstractAsyncContextManager[TcpProxy]:
    """A proxy of a server on a Unix socket."""
    return tcp_proxy(lambda: asyncio.open_unix_connection(str(server.socket_path)), tls)


@contextlib.contextmanager
def threaded_proxy(port: int) -> Iterator[TcpProxy]:
    """A proxy of a port of 127.0.0.1, in a thread of its own, for clients that block."""
    found: list[TcpProxy] = []
    ready, stop = threading.Event(), threading.Event()

    async def program() -> None:
        async with tcp_proxy(lambda: asyncio.open_connection("127.0.0.1", port)) as proxy:
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
