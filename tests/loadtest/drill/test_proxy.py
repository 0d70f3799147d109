"""What the proxy does to bytes of each direction, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from loadtest.drill.proxy import TcpProxy, listening

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def proxied() -> AsyncIterator[tuple[TcpProxy, Ends, Ends]]:
    """A proxy, a client's connection through it, and the server's end of that."""
    accepted = asyncio.Queue[Ends]()
    server = await asyncio.start_server(lambda *ends: accepted.put_nowait(ends), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with listening(TcpProxy(lambda: asyncio.open_connection("127.0.0.1", port))) as proxy:
        client = await asyncio.open_connection("127.0.0.1", proxy.port)
        yield proxy, client, await accepted.get()
    server.close()


async def test_delayed_bytes_come_later_and_in_order():
    async with proxied() as (proxy, (reader, _), (_, server_writer)):
        proxy.replies.delay_s = 0.2
        begin = asyncio.get_running_loop().time()
        server_writer.write(b"a" * 100_000)
        await server_writer.drain()
        await asyncio.sleep(0.01)
        proxy.replies.delay_s = 0.0
        server_writer.write(b"b")
        assert await reader.readexactly(100_001) == b"a" * 100_000 + b"b"
        # Its clock has milliseconds, whose difference is not exactly one.
        assert round(asyncio.get_running_loop().time() - begin, 3) >= 0.2


async def test_a_connection_that_lost_bytes_is_cut_once_others_may_pass():
    async with proxied() as (proxy, (reader, writer), (server_reader, server_writer)):
        proxy.requests.is_black = True
        writer.write(b"lost")
        server_writer.write(b"there")
        # The other direction is as before.
        assert await reader.readexactly(5) == b"there"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server_reader.read(1), 0.05)
        proxy.requests.is_black = False
        writer.write(b"late")
        assert (await server_reader.read(), await reader.read()) == (b"", b"")
