"""The drills' TCP proxy in front of a Redis, or in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Iterator

from loadtest.drill.proxy import TcpProxy, tcp_proxy
from shardrank_testing.registries import RedisServer

_LOOK_S = 0.005


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
