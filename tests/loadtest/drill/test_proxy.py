"""What the proxy does to bytes of each direction, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from loadtest.drill.proxy import MAX_BACKLOG_S, Direction, TcpProxy, listening

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


def test_a_link_sends_one_piece_after_the_other():
    link = Direction(delay_s=0.5, bits_per_s=8e6)
    # Of 8 Mbit/s a megabyte takes a second.
    assert [link.due(1_000_000, now=10.0), link.due(500_000, now=10.25), link.due(0, now=20.0)] == [11.5, 12.0, 20.5]
    link.bits_per_s = None
    assert link.due(1_000_000, now=30.0) == 30.5


def test_many_small_pieces_are_due_when_a_large_one_is():
    large, small = Direction(bits_per_s=1e8), Direction(bits_per_s=1e8)
    # They arrive faster than the link sends them.
    dues = [small.due(1000, now=1.0 + 1e-5 * number) for number in range(3000)]
    assert dues[-1] == pytest.approx(large.due(3_000_000, now=1.0), rel=1e-9)


async def test_shaped_bytes_never_come_before_they_are_due():
    async with proxied() as (proxy, (_, writer), (server_reader, _)):
        proxy.requests.bits_per_s, proxy.requests.delay_s = 8e6, 0.05
        data, begin = bytes(range(256)) * 400, time.monotonic()
        writer.write(data)
        assert await server_reader.readexactly(len(data)) == data
        assert time.monotonic() - begin >= 0.1024 + 0.05


async def test_a_sender_waits_for_a_link_that_is_behind():
    async with proxied() as (proxy, (_, writer), (server_reader, _)):
        proxy.requests.bits_per_s = 8e6
        writer.transport.set_write_buffer_limits(0)
        writer.write(bytes(40_000_000))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.drain(), 0.1)
        # A second of the link's time is a megabyte; what came is what it has sent, and the backlog.
        assert proxy.requests.free_at - time.monotonic() <= MAX_BACKLOG_S + 2 * 65536 / 1e6
        assert len(await server_reader.read(1 << 20)) > 0
