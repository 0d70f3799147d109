"""A shard with several replicas: which is sent a call, which is refused, and what happens as nodes join and leave."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from loader.snapshot.reader import Snapshot
from router.errors import ShardUnavailableError
from router.outliers import ReplicaEvents, ReplicaPolicy
from router.replicas import ReplicaSource, ReplicatedShard
from shard_node.answer import Answer, Forms
from shard_node.bags import KeyedBags
from shard_node.engine.loading import load_tables
from shard_node.errors import DeadlineExceededError
from shard_node.node import NodeInfo, ShardNode
from shard_node.wire.address import Address
from shard_node.wire.client import ShardClient
from shard_node.wire.server import NodeServer
from shardrank_testing.snapshots import one_table_spec, write_snapshot
from shardrank_testing.topologies import Topology, make_node

SPEC = one_table_spec(100)
PLAN = Topology().plan(SPEC)
BAGS = KeyedBags.from_lengths(np.array([0], np.int32), np.array([2]), np.array([1, 2]), np.array([5, 6, 7]))
# Ejections last, and no hedge is sent.
LASTING = {"base_ejection_s": 600, "max_ejection_s": 600, "hedge_after_ms": 60_000}
TIMEOUT_S = 60.0


class WatchedClient(ShardClient):
    """A real client that counts calls, and can be held up."""

    def __init__(self, address: Address, gate: asyncio.Event | None = None) -> None:
        super().__init__(address)
        self.gate, self.pools = gate, 0
        self.entered, self.closed, self.reported = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def pool(self, model: str, version: int, bags: KeyedBags, deadline: float, forms: Forms) -> Answer:
        self.pools += 1
        self.entered.set()
        if self.gate is not None:
            await self.gate.wait()
        return await super().pool(model, version, bags, deadline, forms)

    async def info(self) -> NodeInfo:
        info = await super().info()
        self.reported.set()
        return info

    async def close(self) -> None:
        await super().close()
        self.closed.set()


class SilentNode:
    """Accepts connections and answers nothing; counts the frames that it is sent."""

    def __init__(self) -> None:
        self.frames = 0
        self.connected = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected.set()
        while await reader.read(1 << 16):
            self.frames += 1
        writer.close()


class SlowLink:
    """A Unix socket that leads to a node, whose answers are held back for `delay_s`."""

    def __init__(self, address: Address, node: Address, delay_s: float) -> None:
        self._address, self._node = address.path, node.path
        self._writers: list[asyncio.StreamWriter] = []
        self.delay_s = delay_s

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._connected, self._address)

    def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_node, to_node = await asyncio.open_unix_connection(self._node)
        self._writers += [writer, to_node]
        await asyncio.gather(self._forward(reader, to_node, 0.0), self._forward(from_node, writer, None))

    async def _forward(self, source, target: asyncio.StreamWriter, delay_s: float | None) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                await asyncio.sleep(self.delay_s if delay_s is None else delay_s)
                target.write(data)


class Fleet:
    """Nodes behind Unix sockets, shards over them, and the nodes that are announced.

    Attributes:
        events: of shards: what was retried, denied (`no ...`), ejected (`!...`) and let in again.
        clients: by node, those that shards made.
        gates: by node, what holds its clients' calls up.
    """

    def __init__(self, folder: Path, snapshot: Snapshot) -> None:
        self.folder, self.snapshot = folder, snapshot
        self.expected = self.node().pool(SPEC.model, snapshot.version, BAGS)[0]
        self.events: list[str] = []
        self.clients: dict[int, list[WatchedClient]] = {}
        self.gates: dict[int, asyncio.Event] = {}
        self.silent: dict[int, SilentNode] = {}
        self._announced: tuple[int, Sequence[int]] = 0, ()
        self._servers: dict[int, NodeServer] = {}
        self._shards: list[ReplicatedShard] = []
        self._sockets: list[asyncio.AbstractServer] = []

    def address(self, number: int) -> Address:
        return Address(path=f"{self.folder}/{number}.sock")

    def node(self, sequence: int = 0) -> ShardNode:
        """A node with all rows, that has applied so many deltas."""
        node = make_node(self.snapshot, PLAN, 0)
        node.generations.payload(SPEC.model, self.snapshot.version).deltas.applied(sequence, 0.0, 1, 0.0)
        return node

    async def start(self, *numbers: int, node: ShardNode | None = None) -> None:
        for number in numbers:
            self._servers[number] = NodeServer(node or self.node())
            await self._servers[number].start([self.address(number)])

    async def start_silent(self, number: int) -> SilentNode:
        silent = SilentNode()
        self._sockets.append(await asyncio.start_unix_server(silent.serve, self.address(number).path))
        return silent

    async def stop(self, number: int) -> None:
        await self._servers.pop(number).close()

    def announce(self, *numbers: int) -> None:
        self._announced = self._announced[0] + 1, numbers

    def _connect(self, address: Address) -> WatchedClient:
        number = int(Path(address.path).stem)
        client = WatchedClient(address, self.gates.get(number))
        self.clients.setdefault(number, []).append(client)
        return client

    def shard(self, *numbers: int, plan=PLAN, **policy: float) -> ReplicatedShard:
        """A shard over these replicas, or over those that are announced."""
        events = ReplicaEvents(
            retried=self.events.append,
            denied=lambda kind: self.events.append(f"no {kind}"),
            ejected=lambda shard, reason: self.events.append(f"!{reason}"),
            out=lambda shard, more: self.events.extend(["in again"] if more < 0 else []),
        )

        def current() -> tuple[int, list[Address]]:
            epoch, announced = self._announced
            return epoch, [self.address(number) for number in announced]

        source = [self._connect(self.address(number)) for number in numbers]
        self._shards.append(
            ReplicatedShard(
                plan,
                0,
                self.snapshot.identity,
                source or ReplicaSource(current, self._connect),
                events,
                policy=ReplicaPolicy.model_validate(LASTING | policy),
            )
        )
        return self._shards[-1]

    async def answer(self, shard: ReplicatedShard, timeout_s: float = 30.0) -> Answer:
        return await shard.pool(SPEC.model, self.snapshot.version, BAGS, time.monotonic() + timeout_s)

    async def ask(self, shard: ReplicatedShard, times: int = 1, timeout_s: float = 30.0) -> None:
        """Call it; answers must be right."""
        for _ in range(times):
            answer = await self.answer(shard, timeout_s)
            np.testing.assert_array_equal(answer.sums[0], self.expected)

    async def close(self) -> None:
        for shard in self._shards:
            with contextlib.suppress(ShardUnavailableError):
                await shard.close()
        for number in list(self._servers):
            await self.stop(number)
        for server in self._sockets:
            server.close()


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory) -> Snapshot:
    return Snapshot.open(write_snapshot(tmp_path_factory.mktemp("store"), SPEC, seed=1)[0])


@pytest.fixture
def play(snapshot, tmp_path):
    """`play(scenario)` runs it with a fleet."""

    def play(scenario) -> None:
        async def main() -> None:
            fleet = Fleet(tmp_path, snapshot)
            try:
                await asyncio.wait_for(scenario(fleet), TIMEOUT_S)
            finally:
                await fleet.close()

        asyncio.run(main())

    return play


def test_with_one_of_two_replicas_gone_every_call_is_answered(play):
    async def scenario(fleet: Fleet) -> None:
        await fleet.start(0, 1)
        shard = fleet.shard(0, 1)
        await fleet.ask(shard, 4)
        assert fleet.events == []
        await fleet.stop(0)
        await fleet.ask(shard, 20)
        assert set(fleet.events) <= {"node_unavailable"}

    play(scenario)


def test_with_no_replica_the_error_names_all_until_one_is_back(play):
    async def scenario(fleet: Fleet) -> None:
        shard = fleet.shard(0, 1)
        with pytest.raises(ShardUnavailableError, match=r"shard 0 of 1: no replica answered \(.*0\.sock.*; .*1\.sock"):
            await fleet.ask(shard)
        await fleet.start(1)
        while True:
            with contextlib.suppress(ShardUnavailableError):
                return await fleet.ask(shard)
            await asyncio.sleep(0.01)

    play(scenario)
    with pytest.raises(ShardUnavailableError, match="shard 0 has no replica"):
        ReplicatedShard(PLAN, 0, "identity", [])


@pytest.mark.parametrize(
    ("shard_index", "replicate_bytes", "message"),
    [(1, 0, r"the node is shard 1 of 2 \(hash\), wanted is 0 of 2"), (0, 1 << 20, "by another plan")],
)
def test_a_node_of_another_shard_or_plan_is_refused(play, shard_index, replicate_bytes, message):
    async def scenario(fleet: Fleet) -> None:
        other = Topology(shards=2, replicate_bytes=replicate_bytes).plan(SPEC)
        await fleet.start(0, node=make_node(fleet.snapshot, other, shard_index))
        shard = fleet.shard(0, plan=Topology(shards=2).plan(SPEC))
        with pytest.raises(ShardUnavailableError, match=message):
            await fleet.ask(shard)
        assert fleet.events == ["!unfit"]

    play(scenario)


@pytest.mark.parametrize("restart", [True, False])
def test_another_snapshot_of_the_same_version_is_refused(play, restart):
    """After a restart of its node, or over the connection on which the right one was served before."""

    async def scenario(fleet: Fleet) -> None:
        node, (model, version) = fleet.node(), (SPEC.model, fleet.snapshot.version)
        await fleet.start(0, node=node)
        shard = fleet.shard(0)
        await fleet.ask(shard)
        other = Snapshot.open(write_snapshot(fleet.folder / "other", SPEC, seed=2)[0])
        assert other.version == version
        if restart:
            await fleet.stop(0)
            await fleet.start(0, node=make_node(other, PLAN, 0))
        else:
            assert await asyncio.to_thread(node.retire(model, version).retired.wait, 30)
            with pytest.raises(ShardUnavailableError, match="is not here"):
                await fleet.ask(shard)
            node.stage(model, version, load_tables(other, PLAN.partition(0), PLAN.digest))
        refused = ""
        while "another snapshot" not in refused:
            with pytest.raises(ShardUnavailableError) as error:
                await fleet.ask(shard)
            refused = str(error.value)
            await asyncio.sleep(0.01)

    play(scenario)


@pytest.mark.parametrize("count", [1, 2])
def test_silent_nodes_cost_the_deadline_and_no_more(play, count):
    async def scenario(fleet: Fleet) -> None:
        for number in range(count):
            await fleet.start_silent(number)
        with pytest.raises(DeadlineExceededError, match="while asking the node what it serves" if count == 1 else None):
            await fleet.ask(fleet.shard(*range(count)), timeout_s=0.05)
        # Each node reports of itself, and a silent one holds up nobody.
        await fleet.start(8, 9)
        infos = await fleet.shard(0, 8, 9).infos()
        assert [address for address, _ in infos] == [str(fleet.address(number)) for number in (8, 9)]
        assert all(info.identity == PLAN.identity(0) for _, info in infos)

    play(scenario)


def test_a_slow_replica_is_ejected_until_it_is_fast_again(play):
    async def scenario(fleet: Fleet) -> None:
        await fleet.start(1, 2)
        # Far more than a busy machine makes of the other one's answers.
        link = SlowLink(fleet.address(0), fleet.address(2), delay_s=0.2)
        await link.start()
        policy = {"min_answers": 4, "base_ejection_s": 0.2, "max_ejection_s": 0.2, "probes": 2, "slow_excess_ms": 20}
        shard = fleet.shard(0, 1, **policy)
        while "!slow" not in fleet.events:
            await fleet.answer(shard)
        link.delay_s = 0.0
        while "in again" not in fleet.events:
            await fleet.answer(shard)
        assert set(fleet.events) == {"!slow", "in again"}
        link.cut()

    play(scenario)


def test_calls_in_flight_at_a_node_that_dies_are_answered(play):
    async def scenario(fleet: Fleet) -> None:
        await fleet.start(1, 2)
        link = SlowLink(fleet.address(0), fleet.address(2), delay_s=0.0)
        await link.start()
        shard = fleet.shard(0, 1)
        await fleet.ask(shard, 2)
        link.delay_s = 600.0
        calls = [asyncio.create_task(fleet.ask(shard)) for _ in range(40)]
        for answered in itertools.islice(asyncio.as_completed(calls), 20):
            await answered
        link.cut()
        await asyncio.gather(*calls)
        # Half of them were at the one that died; once is enough to know that it is gone.
        assert fleet.events.count("node_unavailable") == 20
        assert not [event for event in fleet.events if event.startswith("no ")]

    play(scenario)


def test_without_budget_a_late_answer_is_waited_for(play):
    """And a failure is final."""

    async def scenario(fleet: Fleet) -> None:
        await fleet.start_silent(0)
        await fleet.start(1)
        policy = {"hedge_after_ms": 5, "budget_reserve": 2, "budget_share": 0, "budget_per_s": 0, "failures": 1000}
        shard, answered = fleet.shard(0, 1, **policy), 0
        for _ in range(8):
            with contextlib.suppress(DeadlineExceededError):
                await fleet.ask(shard, timeout_s=0.2)
                answered += 1
        assert fleet.events == ["late", "late", "no late", "no late"]
        assert answered == 6
        fleet.events.clear()
        await fleet.start(2, node=ShardNode(PLAN.identity(0)))
        shard = fleet.shard(2, 1, budget_reserve=0.5)
        with pytest.raises(ShardUnavailableError, match=r"no version .*; others are not asked: the budget of hedges"):
            await fleet.ask(shard)
        # A replica without the version comes last.
        await fleet.ask(shard)
        assert fleet.events == ["!unfit", "no generation_not_found"]
        # A retry after which nothing had been sent costs nothing.
        fleet.events.clear()
        await fleet.ask(fleet.shard(3, 1, budget_reserve=0), 3)
        assert fleet.events == ["node_unavailable"]

    play(scenario)


def test_a_hanging_replica_is_overtaken_and_then_comes_last(play):
    async def scenario(fleet: Fleet) -> None:
        silent = await fleet.start_silent(0)
        await fleet.start(1)
        shard = fleet.shard(0, 1, hedge_after_ms=50)
        # A long deadline must not mean a long wait: the other replica is called as well.
        await fleet.ask(shard, 20, timeout_s=600.0)
        assert fleet.events == ["late", "late", "late", "!failures"]
        assert silent.frames == 3

    play(scenario)


def test_of_many_calls_at_once_only_one_is_a_probe(play):
    async def scenario(fleet: Fleet) -> None:
        await fleet.start_silent(0)
        await fleet.start(1)
        shard = fleet.shard(0, 1, failures=1, hedge_after_ms=300, base_ejection_s=0.1)
        await fleet.ask(shard, 2)
        assert fleet.events == ["late", "!failures"]
        await asyncio.sleep(0.2)
        await asyncio.gather(*(fleet.ask(shard) for _ in range(10)))
        assert fleet.events == ["late", "!failures"] * 2

    play(scenario)


class ForgetfulNode(ShardNode):
    """Leaves the last bag out of its answers."""

    def answer(self, model: str, version: int, bags: KeyedBags, forms: Forms) -> Answer:
        answer = super().answer(model, version, bags, forms)
        return Answer([sums[:-1] for sums in answer.sums], answer.stored)


def test_an_answer_that_does_not_fit_is_refused_and_retried(play):
    async def scenario(fleet: Fleet) -> None:
        node = ForgetfulNode(PLAN.identity(0))
        node.generations = fleet.node().generations
        await fleet.start(0, node=node)
        with pytest.raises(ShardUnavailableError, match=r"sums of group 0 are \[1, 8\], not \[2, 8\]"):
            await fleet.ask(fleet.shard(0))
        assert fleet.events == []
        await fleet.start(1)
        await fleet.ask(fleet.shard(0, 1), 4)
        assert set(fleet.events) == {"remote"}

    play(scenario)


@pytest.mark.parametrize(
    ("sequences", "answered", "events"),
    [
        ((2, 3), 3, ["!unfit", "replica_lags"]),
        # Where all replicas lag one of them answers, and reports it.
        ((2,), 2, ["!unfit"]),
        ((2, 2), 2, ["!unfit", "replica_lags", "!unfit"]),
        ((None, 3), 3, ["!unfit", "generation_not_found"]),
    ],
)
def test_a_replica_without_version_or_deltas_comes_last(play, sequences, answered, events):
    async def scenario(fleet: Fleet) -> None:
        for number, sequence in enumerate(sequences):
            await fleet.start(number, node=ShardNode(PLAN.identity(0)) if sequence is None else fleet.node(sequence))
        shard = fleet.shard(*range(len(sequences)))
        shard.min_sequence = 3
        for _ in range(6 if answered == 3 else 1):
            assert (await fleet.answer(shard)).sequence == answered
        assert fleet.events == events

    play(scenario)


def test_replicas_are_exchanged_under_load(play):
    async def scenario(fleet: Fleet) -> None:
        await fleet.start(0, 1, 2)
        fleet.announce(0)
        shard, stop, answers = fleet.shard(), asyncio.Event(), 0

        async def load() -> None:
            nonlocal answers
            while not stop.is_set():
                await fleet.ask(shard)
                answers += 1

        callers = [asyncio.create_task(load()) for _ in range(8)]
        for round_number in range(15):
            before = answers
            fleet.announce(*[(0, 1), (1,), (1, 2), (2, 0), (0,)][round_number % 5])
            while answers < before + 16 and not any(caller.done() for caller in callers):  # noqa: ASYNC110
                await asyncio.sleep(0)
        stop.set()
        await asyncio.gather(*callers)
        assert all(sum(client.pools for client in clients) for clients in fleet.clients.values())
        fleet.announce(0)
        await fleet.ask(shard)
        for number in (1, 2):
            await asyncio.gather(*(client.closed.wait() for client in fleet.clients[number]))
        assert not fleet.clients[0][-1].closed.is_set()

    play(scenario)


def test_a_leaving_replica_answers_its_calls_first(play):
    async def scenario(fleet: Fleet) -> None:
        gate = fleet.gates[0] = asyncio.Event()
        await fleet.start(0, 1)
        fleet.announce(0)
        shard = fleet.shard()
        slow = asyncio.create_task(fleet.ask(shard))
        while not fleet.clients.get(0):  # noqa: ASYNC110
            await asyncio.sleep(0)
        (leaving,) = fleet.clients[0]
        await leaving.entered.wait()
        fleet.announce(1)
        await fleet.ask(shard)
        assert not leaving.closed.is_set()
        gate.set()
        await slow
        await leaving.closed.wait()
        assert fleet.clients[1][0].pools == 1

    play(scenario)


def test_no_call_waits_for_a_newcomer(play):
    """One that is silent or has something else gets no call; without any node the error says so."""

    async def scenario(fleet: Fleet) -> None:
        shard = fleet.shard()
        for call in (fleet.ask(shard), shard.infos(), shard.connect(SPEC.model, 1, time.monotonic() + 5)):
            with pytest.raises(ShardUnavailableError, match="no node has told that this version is ready"):
                await call
        await fleet.start(0, 2)
        await fleet.start(3, node=make_node(fleet.snapshot, Topology(shards=2).plan(SPEC), 1))
        await fleet.start_silent(1)
        fleet.announce(0)
        await fleet.ask(shard)
        fleet.announce(0, 1, 2, 3)
        await fleet.ask(shard, 10)
        for number in (2, 3):
            await fleet.clients[number][0].reported.wait()
        await fleet.ask(shard, 10)
        assert fleet.clients[2][0].pools > 0
        assert fleet.clients[1][0].pools == fleet.clients[3][0].pools == 0

    play(scenario)


def test_connecting_beforehand_leaves_nothing_for_the_first_call(play):
    """A node that was restarted is checked again alongside the calls."""

    async def scenario(fleet: Fleet) -> None:
        await fleet.start(0, 1)
        fleet.announce(0, 1, 2)  # one of them is not there
        shard = fleet.shard()
        await shard.connect(SPEC.model, fleet.snapshot.version, time.monotonic() + 5)
        clients = [fleet.clients[number][0] for number in (0, 1)]
        assert [client.connections for client in clients] == [1, 1]
        for client in clients:
            client.reported.clear()
        await fleet.ask(shard, 4)
        assert all(client.pools for client in clients)
        assert not any(client.reported.is_set() for client in clients)
        await fleet.stop(0)
        await fleet.ask(shard, 2)
        await fleet.start(0)
        while not clients[0].reported.is_set():
            await fleet.ask(shard)
            await asyncio.sleep(0.01)
        pools = clients[0].pools
        await fleet.ask(shard, 10)
        assert clients[0].pools > pools

    play(scenario)


def test_closing_closes_a_newcomer_that_left_while_connecting(play):
    async def scenario(fleet: Fleet) -> None:
        await fleet.start(0)
        silent = await fleet.start_silent(1)
        fleet.announce(0, 1)
        shard = fleet.shard()
        await fleet.ask(shard)
        await silent.connected.wait()
        fleet.announce()
        with pytest.raises(ShardUnavailableError):
            await fleet.ask(shard)
        await fleet.clients[0][0].closed.wait()
        assert not fleet.clients[1][0].closed.is_set()
        await shard.close()
        assert fleet.clients[1][0].closed.is_set()

    play(scenario)
