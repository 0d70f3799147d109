"""A shard with several replicas: who is asked, and who is refused."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from pathlib import Path

import numpy as np
import pytest

from loader.snapshot.reader import Snapshot
from router.errors import ShardUnavailableError
from router.outliers import ReplicaEvents, ReplicaPolicy
from router.plan import Plan
from router.replicas import ReplicatedShard
from shard_node.answer import Answer, Forms
from shard_node.bags import KeyedBags
from shard_node.errors import DeadlineExceededError
from shard_node.node import ShardNode
from shard_node.wire.address import Address
from shard_node.wire.client import ShardClient
from shard_node.wire.server import NodeServer
from shardrank_testing.snapshots import one_table_spec, write_snapshot
from shardrank_testing.topologies import Topology, make_node

BAGS = KeyedBags.from_lengths(
    np.array([0], np.int32), np.array([2], np.int64), np.array([1, 2]), np.array([5, 6, 7], np.int64)
)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory) -> Snapshot:
    path, _ = write_snapshot(tmp_path_factory.mktemp("store"), one_table_spec(100), seed=1)
    return Snapshot.open(path)


class Fleet:
    """Nodes behind Unix sockets that can be stopped and started again on the same address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: dict[int, NodeServer] = {}

    def address(self, number: int) -> Address:
        return Address.parse(f"unix:{self._folder}/{number}.sock")

    async def start(self, number: int, node: ShardNode) -> None:
        self._servers[number] = NodeServer(node)
        await self._servers[number].start([self.address(number)])

    async def stop(self, number: int) -> None:
        await self._servers.pop(number).close()

    async def stop_all(self) -> None:
        for number in list(self._servers):
            await self.stop(number)


def shard_over(
    fleet: Fleet, snapshot: Snapshot, plan: Plan, *numbers: int, **policy: float
) -> tuple[ReplicatedShard, list[str]]:
    """A shard that keeps who is ejected and sends no hedge; what it retried, denied (`no ...`), ejected (`!...`)."""
    told: list[str] = []
    clients = [ShardClient(fleet.address(number)) for number in numbers]
    events = ReplicaEvents(
        retried=told.append,
        denied=lambda kind: told.append(f"no {kind}"),
        ejected=lambda shard, reason: told.append(f"!{reason}"),
        out=lambda shard, more: told.extend(["in again"] if more < 0 else []),
    )
    lasting = ReplicaPolicy.model_validate(
        {"base_ejection_s": 600, "max_ejection_s": 600, "hedge_after_ms": 60_000} | policy
    )
    return ReplicatedShard(plan, 0, snapshot.identity, clients, events, policy=lasting), told


async def ask(shard: ReplicatedShard, snapshot: Snapshot, timeout_s: float = 30.0) -> np.ndarray:
    answer = await shard.pool(snapshot.spec.model, snapshot.version, BAGS, time.monotonic() + timeout_s)
    return answer.sums[0]


def run(scenario, folder: Path) -> None:
    async def main() -> None:
        fleet = Fleet(folder)
        try:
            await scenario(fleet)
        finally:
            await fleet.stop_all()

    asyncio.run(main())


def test_with_one_of_two_replicas_gone_every_call_is_answered(snapshot, tmp_path):
    plan = Topology().plan(snapshot.spec)
    expected = make_node(snapshot, plan, 0).pool(snapshot.spec.model, snapshot.version, BAGS)[0]

    async def scenario(fleet: Fleet) -> None:
        for number in (0, 1):
            await fleet.start(number, make_node(snapshot, plan, 0))
        shard, retries = shard_over(fleet, snapshot, plan, 0, 1)
        for _ in range(4):
            np.testing.assert_array_equal(await ask(shard, snapshot), expected)
        assert retries == []
        await fleet.stop(0)
        for _ in range(20):
            np.testing.assert_array_equal(await ask(shard, snapshot), expected)
        assert set(retries) <= {"node_unavailable"}
        await shard.close()

    run(scenario, tmp_path)


def test_with_no_replica_the_error_says_what_each_said_and_service_resumes_by_itself(snapshot, tmp_path):
    plan = Topology().plan(snapshot.spec)

    async def scenario(fleet: Fleet) -> None:
        shard, _ = shard_over(fleet, snapshot, plan, 0, 1)
        with pytest.raises(ShardUnavailableError, match=r"shard 0 of 1: no replica answered \(.*0\.sock.*; .*1\.sock"):
            await ask(shard, snapshot)
        await fleet.start(1, make_node(snapshot, plan, 0))
        answered = False
        give_up = time.monotonic() + 5.0
        while not answered and time.monotonic() < give_up:
            try:
                await ask(shard, snapshot)
                answered = True
            except ShardUnavailableError:
                await asyncio.sleep(0.01)
        assert answered
        await shard.close()

    run(scenario, tmp_path)


def test_a_node_of_another_shard_is_refused(snapshot, tmp_path):
    plan = Topology(shards=2).plan(snapshot.spec)

    async def scenario(fleet: Fleet) -> None:
        await fleet.start(0, make_node(snapshot, plan, 1))
        shard, retries = shard_over(fleet, snapshot, plan, 0)
        with pytest.raises(ShardUnavailableError, match=r"the node is shard 1 of 2 \(hash\), wanted is 0 of 2"):
            await ask(shard, snapshot)
        assert retries == ["!unfit"]
        await shard.close()

    run(scenario, tmp_path)


def test_a_node_that_divides_by_another_plan_is_refused(snapshot, tmp_path):
    plan = Topology(shards=2).plan(snapshot.spec)
    other = Topology(shards=2, replicate_bytes=1 << 20).plan(snapshot.spec)

    async def scenario(fleet: Fleet) -> None:
        await fleet.start(0, make_node(snapshot, other, 0))
        shard, _ = shard_over(fleet, snapshot, plan, 0)
        with pytest.raises(ShardUnavailableError, match="by another plan"):
            await ask(shard, snapshot)
        await shard.close()

    run(scenario, tmp_path)


def test_a_node_restarted_with_another_snapshot_of_the_same_version_is_refused(snapshot, tmp_path):
    plan = Topology().plan(snapshot.spec)
    path, _ = write_snapshot(tmp_path / "other", snapshot.spec, seed=2)
    other = Snapshot.open(path)

    async def scenario(fleet: Fleet) -> None:
        await fleet.start(0, make_node(snapshot, plan, 0))
        shard, _ = shard_over(fleet, snapshot, plan, 0)
        await ask(shard, snapshot)
        await fleet.stop(0)
        await fleet.start(0, make_node(other, plan, 0))
        refused = ""
        give_up = time.monotonic() + 5.0
        while "another snapshot" not in refused and time.monotonic() < give_up:
            try:
                await ask(shard, snapshot)
                pytest.fail("a node with another snapshot was believed")
            except ShardUnavailableError as error:
                refused = str(error)
                await asyncio.sleep(0.01)
        assert "another snapshot" in refused
        await shard.close()

    run(scenario, tmp_path)


def test_a_node_that_accepts_and_never_answers_costs_the_deadline_and_no_more(snapshot, tmp_path):
    plan = Topology().plan(snapshot.spec)

    async def scenario(fleet: Fleet) -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_unix_server(silent, fleet.address(0).path)
        shard, _ = shard_over(fleet, snapshot, plan, 0)
        with pytest.raises(DeadlineExceededError, match="while asking the node what it serves"):
            await ask(shard, snapshot, timeout_s=0.05)
        await shard.close()
        server.close()

    run(scenario, tmp_path)


class SilentNode:
    """Accepts connections and answers nothing; counts the frames that it is sent."""

    def __init__(self) -> None:
        self.frames = 0

    async def start(self, address: Address) -> asyncio.AbstractServer:
        return await asyncio.start_unix_server(self._read, address.path)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            self.frames += 1
        writer.close()


class SlowLink:
    """A Unix socket that leads to a node, whose answers are held back for `delay_s`."""

    def __init__(self, fleet: Fleet, number: int, node_number: int, delay_s: float) -> None:
        self._here, self._node = fleet.address(number).path, fleet.address(node_number).path
        self._writers: list[asyncio.StreamWriter] = []
        self.delay_s = delay_s

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._connected, self._here)

    def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_node, to_node = await asyncio.open_unix_connection(self._node)
        self._writers += [writer, to_node]
        await asyncio.gather(self._pass_on(reader, to_node), self._pass_on(from_node, writer, holds_back=True))

    async def _pass_on(self, source, to: asyncio.StreamWriter, *, holds_back: bool = False) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                if holds_back:
                    await asyncio.sleep(self.delay_s)
                to.write(data)


def test_a_slow_replica_is_ejected_and_once_it_is_fast_again_let_in(snapshot, tmp_path):
    plan = Topology().plan(snapshot.spec)

    async def scenario(fleet: Fleet) -> None:
        for number in (1, 2):
            await fleet.start(number, make_node(snapshot, plan, 0))
        # Far more than a busy machine makes of the other one's answers.
        link = SlowLink(fleet, 0, 2, delay_s=0.3)
        await link.start()
        policy = {"min_answers": 4, "base_ejection_s": 0.3, "max_ejection_s": 0.3, "probes": 2, "slow_excess_ms": 20}
        shard, told = shard_over(fleet, snapshot, plan, 0, 1, **policy)
        give_up = time.monotonic() + 30.0
        while "!slow" not in told and time.monotonic() < give_up:
            await ask(shard, snapshot)
        link.delay_s = 0.0
        while "in again" not in told and time.monotonic() < give_up:
            await ask(shard, snapshot)
        assert set(told) == {"!slow", "in again"}
        await shard.close()
        link.cut()

    run(scenario, tmp_path)


def test_every_call_that_is_in_flight_when_a_node_dies_is_answered_by_another_one(snapshot, tmp_path):
    plan = Topology().plan(snapshot.spec)

    async def scenario(fleet: Fleet) -> None:
        for number in (1, 2):
            await fleet.start(number, make_node(snapshot, plan, 0))
        link = SlowLink(fleet, 0, 2, delay_s=0.0)
        await link.start()
        shard, told = shard_over(fleet, snapshot, plan, 0, 1)
        for _ in range(2):
            await ask(shard, snapshot)
        link.delay_s = 600.0
        calls = [asyncio.create_task(ask(shard, snapshot)) for _ in range(40)]
        for answered in itertools.islice(asyncio.as_completed(calls), 20):
            await answered
        link.cut()
        assert all(answer.shape == (2, 8) for answer in await asyncio.gather(*calls))
        # Half of them were with the one that died; once is enough to know that it is gone.
        assert told.count("node_unavailable") == 20
        assert not [one for one in told if one.startswith("no ")]
        await shard.close()

    run(scenario, tmp_path)


def test_when_the_budget_is_spent_a_late_answer_is_waited_for_and_a_failure_is_final(snapshot, tmp_path):
    plan = Topology().plan(snapshot.spec)

    async def scenario(fleet: Fleet) -> None:
        silent = SilentNode()
        server = await silent.start(fleet.address(0))
        await fleet.start(1, make_node(snapshot, plan, 0))
        policy = {"hedge_after_ms": 5, "budget_reserve": 2, "budget_share": 0, "budget_per_s": 0, "failures": 1000}
        shard, told = shard_over(fleet, snapshot, plan, 0, 1, **policy)
        answered = 0
        for _ in range(8):
            with contextlib.suppress(DeadlineExceededError):
                await ask(shard, snapshot, timeout_s=0.2)
                answered += 1
        assert told == ["late", "late", "no late", "no late"]
        assert answered == 6
        await shard.close()
        server.close()
        await fleet.start(2, ShardNode(plan.identity(0)))
        policy = {"budget_reserve": 0.5}
        shard, told = shard_over(fleet, snapshot, plan, 2, 1, **policy)
        with pytest.raises(ShardUnavailableError, match=r"no version .*; others are not asked: the budget of hedges"):
            await ask(shard, snapshot)
        # Whoever has not the version comes last.
        await ask(shard, snapshot)
        assert told == ["!unfit", "no generation_not_found"]
        await shard.close()

    run(scenario, tmp_path)


def test_a_retry_after_which_nothing_had_been_sent_costs_nothing(snapshot, tmp_path):
    plan = Topology().plan(snapshot.spec)

    async def scenario(fleet: Fleet) -> None:
        await fleet.start(1, make_node(snapshot, plan, 0))
        shard, told = shard_over(fleet, snapshot, plan, 0, 1, budget_reserve=0)
        for _ in range(3):
            await ask(shard, snapshot)
        assert told == ["node_unavailable"]
        await shard.close()

    run(scenario, tmp_path)


def test_a_replica_that_hangs_is_overtaken_three_times_and_then_asked_last(snapshot, tmp_path):
    plan = Topology().plan(snapshot.spec)

    async def scenario(fleet: Fleet) -> None:
        silent = SilentNode()
        server = await silent.start(fleet.address(0))
        await fleet.start(1, make_node(snapshot, plan, 0))
        shard, retries = shard_over(fleet, snapshot, plan, 0, 1, hedge_after_ms=50)
        began = time.monotonic()
        for _ in range(20):
            # A long deadline must not mean a long wait: the other replica is asked beside the silent one.
            assert (await ask(shard, snapshot, timeout_s=600.0)).shape == (2, 8)
        assert time.monotonic() - began < 60.0
        assert retries == ["late", "late", "late", "!failures"]
        assert silent.frames == 3
        await shard.close()
        server.close()

    run(scenario, tmp_path)


def test_of_many_calls_at_once_only_one_is_a_probe(snapshot, tmp_path):
    plan = Topology().plan(snapshot.spec)

    async def scenario(fleet: Fleet) -> None:
        server = await SilentNode().start(fleet.address(0))
        await fleet.start(1, make_node(snapshot, plan, 0))
        policy = {"failures": 1, "hedge_after_ms": 500, "base_ejection_s": 0.1, "max_ejection_s": 600}
        shard, told = shard_over(fleet, snapshot, plan, 0, 1, **policy)
        for _ in range(2):
            await ask(shard, snapshot)
        assert told == ["late", "!failures"]
        await asyncio.sleep(0.2)
        await asyncio.gather(*(ask(shard, snapshot) for _ in range(10)))
        assert told == ["late", "!failures"] * 2
        await shard.close()
        server.close()

    run(scenario, tmp_path)


def test_when_all_replicas_hang_the_deadline_ends_it(snapshot, tmp_path):
    plan = Topology().plan(snapshot.spec)

    async def scenario(fleet: Fleet) -> None:
        servers = [await SilentNode().start(fleet.address(number)) for number in (0, 1)]
        shard, _ = shard_over(fleet, snapshot, plan, 0, 1)
        with pytest.raises(DeadlineExceededError):
            await ask(shard, snapshot, timeout_s=0.1)
        await shard.close()
        for server in servers:
            server.close()

    run(scenario, tmp_path)


def test_every_replica_tells_of_itself_and_one_that_hangs_holds_up_nobody(snapshot, tmp_path):
    plan = Topology().plan(snapshot.spec)

    async def scenario(fleet: Fleet) -> None:
        server = await SilentNode().start(fleet.address(0))
        for number in (1, 2):
            await fleet.start(number, make_node(snapshot, plan, 0))
        shard, _ = shard_over(fleet, snapshot, plan, 0, 1, 2)
        infos = await shard.infos()
        assert [address for address, _ in infos] == [str(fleet.address(number)) for number in (1, 2)]
        assert all(info.identity == plan.identity(0) for _, info in infos)
        await shard.close()
        server.close()

    run(scenario, tmp_path)


def test_a_replica_without_the_version_is_asked_once_and_then_last(snapshot, tmp_path):
    plan = Topology().plan(snapshot.spec)

    async def scenario(fleet: Fleet) -> None:
        await fleet.start(0, ShardNode(plan.identity(0)))
        await fleet.start(1, make_node(snapshot, plan, 0))
        shard, retries = shard_over(fleet, snapshot, plan, 0, 1)
        for _ in range(20):
            await ask(shard, snapshot)
        assert retries == ["!unfit", "generation_not_found"]
        await shard.close()

    run(scenario, tmp_path)


class ForgetfulNode(ShardNode):
    """Holds the right rows, and leaves the last bag out of its answers."""

    def __init__(self, node: ShardNode) -> None:
        super().__init__(node.identity)
        self.generations = node.generations

    def answer(self, model: str, version: int, bags: KeyedBags, forms: Forms) -> Answer:
        answer = super().answer(model, version, bags, forms)
        return Answer([sums[:-1] for sums in answer.sums], answer.stored)


def test_an_answer_that_does_not_fit_the_bags_is_refused_and_another_replica_asked(snapshot, tmp_path):
    plan = Topology().plan(snapshot.spec)
    expected = make_node(snapshot, plan, 0).pool(snapshot.spec.model, snapshot.version, BAGS)[0]

    async def scenario(fleet: Fleet) -> None:
        await fleet.start(0, ForgetfulNode(make_node(snapshot, plan, 0)))
        alone, retries = shard_over(fleet, snapshot, plan, 0)
        with pytest.raises(ShardUnavailableError, match=r"sums of group 0 are \[1, 8\], not \[2, 8\]"):
            await ask(alone, snapshot)
        assert retries == []
        await alone.close()
        await fleet.start(1, make_node(snapshot, plan, 0))
        shard, retries = shard_over(fleet, snapshot, plan, 0, 1)
        for _ in range(4):
            np.testing.assert_array_equal(await ask(shard, snapshot), expected)
        assert set(retries) == {"remote"}
        await shard.close()

    run(scenario, tmp_path)


def lagging(snapshot: Snapshot, plan: Plan, sequence: int) -> ShardNode:
    """A node that has applied so many deltas, and no more."""
    node = make_node(snapshot, plan, 0)
    node.generations.payload(snapshot.spec.model, snapshot.version).deltas.applied(sequence, 0.0, 1, 0.0)
    return node


def test_a_replica_whose_rows_are_too_old_is_asked_last_for_a_while(snapshot, tmp_path):
    plan = Topology().plan(snapshot.spec)

    async def scenario(fleet: Fleet) -> None:
        for number, sequence in enumerate((2, 3)):
            await fleet.start(number, lagging(snapshot, plan, sequence))
        shard, retries = shard_over(fleet, snapshot, plan, 0, 1)
        shard.min_sequence = 3
        for _ in range(6):
            answer = await shard.pool(snapshot.spec.model, snapshot.version, BAGS, time.monotonic() + 30)
            assert answer.sequence == 3
        assert retries == ["!unfit", "replica_lags"]
        await shard.close()

    run(scenario, tmp_path)


@pytest.mark.parametrize("count", [1, 2])
def test_where_all_replicas_lag_one_of_them_answers_and_tells_so(snapshot, tmp_path, count):
    plan = Topology().plan(snapshot.spec)

    async def scenario(fleet: Fleet) -> None:
        for number in range(count):
            await fleet.start(number, lagging(snapshot, plan, 2))
        shard, retries = shard_over(fleet, snapshot, plan, *range(count))
        shard.min_sequence = 3
        answer = await shard.pool(snapshot.spec.model, snapshot.version, BAGS, time.monotonic() + 30)
        assert answer.sequence == 2
        assert retries.count("replica_lags") == count - 1
        await shard.close()

    run(scenario, tmp_path)


def test_a_shard_without_replicas_is_refused(snapshot):
    with pytest.raises(ShardUnavailableError, match="shard 0 has no replica"):
        ReplicatedShard(Topology().plan(snapshot.spec), 0, snapshot.identity, [])
