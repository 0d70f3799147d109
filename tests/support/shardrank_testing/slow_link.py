"""A Unix socket in front of a shard node that delays its answers, or holds them back."""

from __future__ import annotations

import asyncio
import contextlib

from shard_node.wire.address import Address


class SlowLink:
    """A Unix socket in front of a node; without a node, a peer that is silent.

    Attributes:
        delay_s: answers arrive so much later.
        opened: set while answers pass.
        requests: pieces that were received from the client.
    """

    def __init__(self, node: Address | None) -> None:
        self._node = node
        self._writers: list[asyncio.StreamWriter] = []
        self.delay_s, self.requests, self.connected, self.opened = 0.0, 0, asyncio.Event(), asyncio.Event()
        self.opened.set()

    async def start(self, address: Address) -> None:
        self._server = await asyncio.start_unix_server(self._connected, address.path)

    def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self.connected.set()
        if self._node is None:
            await reader.read()
            return
        from_node, to_node = await asyncio.open_unix_connection(self._node.path)
        self._writers.append(to_node)
        await asyncio.gather(self._forward(reader, to_node), self._forward(from_node, writer, is_late=True))

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, is_late: bool = False) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                if is_late:
                    await asyncio.sleep(self.delay_s)
                    await self.opened.wait()
                else:
                    self.requests += 1
                target.write(data)
