"""Stands between a client and a Redis server: can end TLS, and can lose an answer after the server has acted."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

from shardrank_testing.registries import RedisServer


class RedisProxy:
    """Passes bytes on. Made by `redis_proxy`."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.port = 0
        self.answers_to_lose = 0
        self.connections = 0
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def close(self) -> None:
        """Ends all connections."""
        for writer in self._open.values():
            writer.close()
        await asyncio.gather(*self._open)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection."""
        self.connections += 1
        below_reader, below_writer = await asyncio.open_unix_connection(str(self.server.socket_path))
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = below_writer
        upward = asyncio.ensure_future(self._pass_on(reader, below_writer))
        try:
            while answer := await below_reader.read(1 << 16):
                if self.answers_to_lose:
                    self.answers_to_lose -= 1
                    break
                writer.write(answer)
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
async def redis_proxy(server: RedisServer, tls: ssl.SSLContext | None = None) -> AsyncIterator[RedisProxy]:
    """A proxy on a port of 127.0.0.1, of a server on a Unix socket; with `tls`, the client has to speak TLS."""
    proxy = RedisProxy(server)
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, ssl=tls)
    proxy.port = listener.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        listener.close()
        await proxy.close()
