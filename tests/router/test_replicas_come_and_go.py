"""A shard whose nodes join and leave while it is asked: no call fails, and nobody waits for a newcomer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from loader.snapshot.reader import Snapshot
from router.errors import ShardUnavailableError
from router.replicas import ReplicaSource, ReplicatedShard
from shard_node.answer import Answer, Forms
from shard_node.bags import KeyedBags
from shard_node.engine.loading import load_tables
from shard_node.node import NodeInfo, ShardNode
from shard_node.wire.address import Address
from shard_node.wire.client import ShardClient
from shard_node.wire.server import NodeServer
from shardrank_testing.snapshots import one_table_spec, write_snapshot
from shardrank_testing.topologies import Topology, make_node

BAGS = KeyedBags.from_lengths(
    np.array([0], np.int32), np.array([2], np.int64), np.array([1, 2]), np.array([5, 6, 7], np.int64)
)


class WatchedClient(ShardClient):
    """A real client that a test can look at: what it was asked, and whether it was closed."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self.pools = 0
        self.closed = asyncio.Event()
        self.told = asyncio.Event()

    async def pool(self, model: str, version: int, bags: KeyedBags, deadline: float, forms: Forms) -> Answer:
        self.pools += 1
        return await super().pool(model, version, bags, deadline, forms)

    async def info(self) -> NodeInfo:
        info = await super().info()
        self.told.set()
        return info

    async def close(self) -> None:
        await super().close()
        self.closed.set()


class Fleet:
    """Nodes behind Unix sockets, and a list of those that are announced."""

    def __init__(self, folder: Path, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.plan = Topology().plan(snapshot.spec)
        self.clients: dict[int, list[WatchedClient]] = {}
        self.epoch = 0
        self._folder = folder
        self._servers: list[NodeServer] = []
        self._announced: Sequence[int] = ()

    def address(self, number: int) -> Address:
        return Address(path=f"{self._folder}/{number}.sock")

    async def start(self, number: int, node: ShardNode | None = None) -> NodeServer:
        server = NodeServer(node or make_node(self.snapshot, self.plan, 0))
        await server.start([self.address(number)])
        self._servers.append(server)
        return server

    def announce(self, *numbers: int) -> None:
        self._announced = numbers
        self.epoch += 1

    def shard(self) -> ReplicatedShard:
        def connect(address: Address) -> WatchedClient:
            client = WatchedClient(address)
            self.clients.setdefault(int(Path(address.path).stem), []).append(client)
            return client

        def current() -> tuple[int, list[Address]]:
            return self.epoch, [self.address(number) for number in self._announced]

        return ReplicatedShard(self.plan, 0, self.snapshot.identity, ReplicaSource(current, connect))

    async def ask(self, shard: ReplicatedShard) -> np.ndarray:
        answer = await shard.pool(self.snapshot.spec.model, self.snapshot.version, BAGS, time.monotonic() + 30)
        return answer.sums[0]

    async def close(self) -> None:
        for server in self._servers:
            await server.close()


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory) -> Snapshot:
    path, _ = write_snapshot(tmp_path_factory.mktemp("store"), one_table_spec(100), seed=1)
    return Snapshot.open(path)


def run(scenario, folder: Path, snapshot: Snapshot) -> None:
    async def main() -> None:
        fleet = Fleet(folder, snapshot)
        shard = fleet.shard()
        try:
            await asyncio.wait_for(scenario(fleet, shard), 60)
        finally:
            await shard.close()
            await fleet.close()

    asyncio.run(main())


def test_replicas_are_exchanged_under_load_and_every_call_is_answered(snapshot, tmp_path):
    expected = make_node(snapshot, Topology().plan(snapshot.spec), 0).pool(snapshot.spec.model, snapshot.version, BAGS)[
        0
    ]

    async def scenario(fleet: Fleet, shard: ReplicatedShard) -> None:
        for number in range(3):
            await fleet.start(number)
        fleet.announce(0)
        stop, answers = asyncio.Event(), 0

        async def load() -> None:
            nonlocal answers
            while not stop.is_set():
                np.testing.assert_array_equal(await fleet.ask(shard), expected)
                answers += 1

        callers = [asyncio.create_task(load()) for _ in range(8)]
        for round_number in range(30):
            before = answers
            fleet.announce(*[(0, 1), (1,), (1, 2), (2, 0), (0,)][round_number % 5])
            while answers < before + 16:
                await asyncio.sleep(0)
                if any(caller.done() for caller in callers):
                    break
        stop.set()
        await asyncio.gather(*callers)
        assert all(sum(client.pools for client in clients) for clients in fleet.clients.values())
        fleet.announce(0)
        await fleet.ask(shard)
        for number in (1, 2):
            await asyncio.gather(*(client.closed.wait() for client in fleet.clients[number]))
        assert not fleet.clients[0][-1].closed.is_set()

    run(scenario, tmp_path, snapshot)


def test_a_replica_that_leaves_while_it_is_asked_answers_first(snapshot, tmp_path):
    async def scenario(fleet: Fleet, shard: ReplicatedShard) -> None:
        entered, go_on = asyncio.Event(), asyncio.Event()

        class SlowClient(WatchedClient):
            async def pool(self, model, version, bags, deadline, forms):
                entered.set()
                await go_on.wait()
                return await super().pool(model, version, bags, deadline, forms)

        await fleet.start(0)
        await fleet.start(1)
        clients: dict[Address, WatchedClient] = {}

        def connect(address: Address) -> WatchedClient:
            kind = SlowClient if address == fleet.address(0) else WatchedClient
            return clients.setdefault(address, kind(address))

        source = ReplicaSource(lambda: (fleet.epoch, [fleet.address(fleet.epoch - 1)]), connect)
        shard = ReplicatedShard(fleet.plan, 0, fleet.snapshot.identity, source)
        fleet.announce()
        slow = asyncio.create_task(fleet.ask(shard))
        await entered.wait()
        fleet.announce()
        answer = await fleet.ask(shard)
        leaving = clients[fleet.address(0)]
        assert not leaving.closed.is_set()
        go_on.set()
        np.testing.assert_array_equal(await slow, answer)
        await leaving.closed.wait()
        assert clients[fleet.address(1)].pools == 1
        await shard.close()

    run(scenario, tmp_path, snapshot)


def test_no_request_waits_for_a_newcomer_to_be_connected_and_checked(snapshot, tmp_path):
    async def scenario(fleet: Fleet, shard: ReplicatedShard) -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        await fleet.start(0)
        hanging = await asyncio.start_unix_server(silent, fleet.address(1).path)
        await fleet.start(2)
        fleet.announce(0)
        await fleet.ask(shard)
        fleet.announce(0, 1, 2)
        for _ in range(10):
            await fleet.ask(shard)
        # Nobody was sent to it, though it has the fewest calls in flight; it was only asked what it holds.
        assert fleet.clients[1][0].pools == 0
        await fleet.clients[2][0].told.wait()
        for _ in range(10):
            await fleet.ask(shard)
        assert fleet.clients[2][0].pools > 0
        hanging.close()

    run(scenario, tmp_path, snapshot)


def test_a_newcomer_that_holds_something_else_gets_no_request(snapshot, tmp_path):
    async def scenario(fleet: Fleet, shard: ReplicatedShard) -> None:
        await fleet.start(0)
        await fleet.start(1, make_node(fleet.snapshot, Topology(shards=2).plan(fleet.snapshot.spec), 1))
        fleet.announce(0)
        await fleet.ask(shard)
        fleet.announce(0, 1)
        await fleet.ask(shard)
        await fleet.clients[1][0].told.wait()
        for _ in range(10):
            await fleet.ask(shard)
        assert fleet.clients[1][0].pools == 0

    run(scenario, tmp_path, snapshot)


def test_without_any_node_the_error_says_so_and_the_first_one_to_come_is_asked(snapshot, tmp_path):
    async def scenario(fleet: Fleet, shard: ReplicatedShard) -> None:
        with pytest.raises(ShardUnavailableError, match=r"shard 0 of 1.*no node has told that this version is ready"):
            await fleet.ask(shard)
        with pytest.raises(ShardUnavailableError, match="no node has told"):
            await shard.infos()
        with pytest.raises(ShardUnavailableError, match="no node has told"):
            await shard.connect(fleet.snapshot.spec.model, fleet.snapshot.version, time.monotonic() + 5)
        await fleet.start(0)
        fleet.announce(0)
        assert (await fleet.ask(shard)).shape == (2, 8)

    run(scenario, tmp_path, snapshot)


def test_connecting_beforehand_leaves_nothing_to_do_for_the_first_request(snapshot, tmp_path):
    async def scenario(fleet: Fleet, shard: ReplicatedShard) -> None:
        await fleet.start(0)
        await fleet.start(1)
        fleet.announce(0, 1, 2)  # one of them is not there
        await shard.connect(fleet.snapshot.spec.model, fleet.snapshot.version, time.monotonic() + 5)
        clients = [fleet.clients[number][0] for number in (0, 1)]
        assert [client.connections for client in clients] == [1, 1]
        for client in clients:
            client.told.clear()
        for _ in range(4):
            await fleet.ask(shard)
        assert all(client.pools for client in clients)
        assert not any(client.told.is_set() for client in clients)

    run(scenario, tmp_path, snapshot)


def test_a_node_that_was_restarted_is_checked_again_beside_the_requests(snapshot, tmp_path):
    async def scenario(fleet: Fleet, shard: ReplicatedShard) -> None:
        first = await fleet.start(0)
        await fleet.start(1)
        fleet.announce(0, 1)
        await shard.connect(fleet.snapshot.spec.model, fleet.snapshot.version, time.monotonic() + 5)
        await first.close()
        await fleet.ask(shard)
        await fleet.ask(shard)
        client = fleet.clients[0][0]
        client.told.clear()
        await fleet.start(0)
        while not client.told.is_set():
            await fleet.ask(shard)
            await asyncio.sleep(0.01)
        pools = client.pools
        for _ in range(10):
            await fleet.ask(shard)
        assert client.pools > pools

    run(scenario, tmp_path, snapshot)


def test_closing_closes_a_newcomer_that_left_while_it_was_being_connected_to(snapshot, tmp_path):
    async def scenario(fleet: Fleet, shard: ReplicatedShard) -> None:
        await fleet.start(0)
        connected, end = asyncio.Event(), asyncio.Event()

        async def never_answers(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connected.set()
            await end.wait()
            writer.close()

        silent = await asyncio.start_unix_server(never_answers, str(fleet.address(1).path))
        fleet.announce(0, 1)
        await fleet.ask(shard)
        await connected.wait()
        fleet.announce()
        with pytest.raises(ShardUnavailableError):
            await fleet.ask(shard)
        await fleet.clients[0][0].closed.wait()
        assert not fleet.clients[1][0].closed.is_set()
        await shard.close()
        assert fleet.clients[1][0].closed.is_set()
        end.set()
        silent.close()

    run(scenario, tmp_path, snapshot)


def test_a_version_that_went_and_came_back_as_another_snapshot_is_not_asked(snapshot, tmp_path):
    async def scenario(fleet: Fleet, shard: ReplicatedShard) -> None:
        node = make_node(snapshot, fleet.plan, 0)
        await fleet.start(0, node)
        fleet.announce(0)
        await fleet.ask(shard)
        model, version = snapshot.spec.model, snapshot.version
        assert await asyncio.to_thread(node.retire(model, version).retired.wait, 30)
        with pytest.raises(ShardUnavailableError, match="is not here"):
            await fleet.ask(shard)
        path, _ = write_snapshot(tmp_path / "again", one_table_spec(100), seed=2)
        another = Snapshot.open(path)
        assert another.version == version
        node.stage(model, version, load_tables(another, fleet.plan.partition(0), fleet.plan.digest))
        # Over the same connection, whose node was found to hold the right thing before.
        with pytest.raises(ShardUnavailableError, match="is another snapshot"):
            await fleet.ask(shard)

    run(scenario, tmp_path, snapshot)
