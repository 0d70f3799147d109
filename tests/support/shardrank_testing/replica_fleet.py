"""A shard's replicas in tests: nodes behind sockets that a test delays, cuts and exchanges."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from loader.snapshot.reader import Snapshot
from router.outliers import ReplicaEvents, ReplicaPolicy
from router.shard import ReplicaSource, ReplicatedShard
from router.shard_client import ShardClient
from shard_node.answer import Answer, ReplyEncoding
from shard_node.bags import Bags
from shard_node.node import ShardNode
from shard_node.wire.address import Address
from shard_node.wire.server import NodeServer
from shardrank_testing.snapshots import one_table_spec
from shardrank_testing.topologies import Topology, make_node

SPEC = one_table_spec(100)
PLAN = Topology().plan(SPEC)
BAGS = Bags.from_lengths(np.array([0], np.int32), np.array([2]), np.array([1, 2]), np.array([5, 6, 7]))
# Ejections last, and no hedge is sent.
LASTING = {"base_ejection_s": 600, "max_ejection_s": 600, "hedge_after_ms": 60_000}


class WatchedClient(ShardClient):
    """A real client that reports when it is closed."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self.closed = asyncio.Event()

    async def close(self) -> None:
        await super().close()
        self.closed.set()


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


class ReplicaFleet:
    """Nodes behind Unix sockets, shards over them, and the nodes that are announced.

    Attributes:
        events: of shards: what was retried, denied (`no ...`), ejected (`!...`) and let in again.
        clients: by node, those that shards made.
        lookups: by node.
    """

    def __init__(self, folder: Path, snapshot: Snapshot, stack: contextlib.AsyncExitStack) -> None:
        self.folder, self.snapshot = folder, snapshot
        self.expected = self.node().pool(SPEC.model, snapshot.version, BAGS)[0]
        self.events: list[str] = []
        self.clients: dict[int, list[WatchedClient]] = {}
        self.lookups: Counter[int] = Counter()
        self._announced: tuple[int, list[Address]] = 0, []
        self._servers: dict[int, NodeServer] = {}
        self._stack = stack

    def address(self, number: int) -> Address:
        return Address(path=f"{self.folder}/{number}.sock")

    def node(self, sequence: int = 0, age_s: float = 600.0, *, forked: bool = False) -> ShardNode:
        """Return a node with all rows that has applied `sequence` deltas, all that came before an age."""
        node = make_node(self.snapshot, PLAN, 0)
        deltas = node.generations.payload(SPEC.model, self.snapshot.version).deltas
        deltas.now = replace(deltas.now, sequence=sequence, fresh_at=time.time() - age_s, forked=forked)
        return node

    async def start(self, *numbers: int, node: ShardNode | None = None) -> None:
        for number in numbers:
            served = node or self.node()
            served.answer = partial(self._answer, number, served.answer)
            self._servers[number] = NodeServer(served)
            await self._servers[number].start([self.address(number)])
            self._stack.push_async_callback(self._servers[number].close)

    def _answer(self, number: int, answer: Callable[..., Answer], *lookup: Any) -> Answer:
        self.lookups[number] += 1
        return answer(*lookup)

    async def link(self, number: int, to: int | None = None) -> SlowLink:
        """Start a link at a node's address: to another node, or silent."""
        link = SlowLink(None if to is None else self.address(to))
        await link.start(self.address(number))
        self._stack.callback(link.cut)
        return link

    async def stop(self, number: int) -> None:
        await self._servers.pop(number).close()

    def announce(self, *numbers: int) -> None:
        self._announced = self._announced[0] + 1, [self.address(number) for number in numbers]

    def _connect(self, address: Address) -> WatchedClient:
        client = WatchedClient(address)
        self.clients.setdefault(int(Path(address.path).stem), []).append(client)
        return client

    def shard(self, *numbers: int, plan=PLAN, **policy: float) -> ReplicatedShard:
        """Return a shard over these replicas, or over those that are announced."""
        events = ReplicaEvents(
            retried=self.events.append,
            denied=lambda kind: self.events.append(f"no {kind}"),
            ejected=lambda shard, reason: self.events.append(f"!{reason}"),
            ejected_change=lambda shard, more: self.events.extend(["in again"] if more < 0 else []),
        )
        source = ReplicaSource(lambda: self._announced, self._connect)
        if numbers:
            source = ReplicaSource.fixed([self.address(number) for number in numbers], self._connect)
        checked = ReplicaPolicy.model_validate(LASTING | policy)
        shard = ReplicatedShard(plan, 0, self.snapshot, source, events, policy=checked)
        self._stack.push_async_callback(shard.close)
        return shard

    async def connected(self, *numbers: int, **policy: float) -> ReplicatedShard:
        """Return a shard that is connected to these replicas."""
        shard = self.shard(*numbers, **policy)
        await shard.connect(time.monotonic() + 30)
        return shard

    async def answer(self, shard: ReplicatedShard, timeout_s: float = 30.0, bound: Any = None) -> Answer:
        forms = ReplyEncoding(bound=bound)
        return await shard.pool(SPEC.model, self.snapshot.version, BAGS, time.monotonic() + timeout_s, forms)

    async def ask(self, shard: ReplicatedShard, times: int = 1, timeout_s: float = 30.0) -> None:
        """Call it; answers must be right."""
        for _ in range(times):
            answer = await self.answer(shard, timeout_s)
            np.testing.assert_array_equal(answer.sums[0], self.expected)
