"""The agent of a shard node stages, follows and retires real versions, and frees their memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from loader.registry.fleet import FleetRecord, WantedModel, delta_stream
from loader.snapshot.codecs import codec_for
from loader.snapshot.publishing import register
from loader.snapshot.reader import Snapshot
from shard_node.agent.node_agent import join_fleet
from shard_node.errors import FleetMismatchError
from shardrank_testing.agents import NodeUnderTest, run, running_node
from shardrank_testing.bags import bags_of, random_table_bags
from shardrank_testing.deltas import make_batch
from shardrank_testing.nodes import until
from shardrank_testing.snapshots import make_spec, one_table_spec, write_snapshot


@pytest.fixture
def url(tmp_path) -> str:
    return str(tmp_path / "registry")


@pytest.fixture
def store(tmp_path) -> Path:
    return tmp_path / "store"


async def publish(under: NodeUnderTest, store: Path, version: int) -> Snapshot:
    snapshot = Snapshot.open(write_snapshot(store, make_spec(), seed=version, version=version)[0])
    await register(under.fleet, snapshot, clock=time.time)
    return snapshot


def answer(under: NodeUnderTest, version: int) -> list[np.ndarray]:
    bags = random_table_bags(np.random.default_rng(5), under.node.table_layout("films", version), 200, 5)
    return under.node.pool("films", version, bags)


def test_a_node_stages_and_retires_what_is_desired(url, store):
    async def main():
        async with running_node(url, store) as under:
            first, second = await publish(under, store, 1), await publish(under, store, 2)
            await under.want("films", hold=(1,), live=1)
            await under.announced("films", 1, "ready")
            await under.want("films", hold=(1, 2))
            report = await under.announced("films", 2, "ready")
            assert report.identity == second.identity
            assert report.memory_bytes == sum(use.size_bytes for use in under.node.info().memory if use.version == 2)
            tiers = {use.tier for use in under.node.info().memory}
            assert (report.memory_tiers.keys(), sum(report.memory_tiers.values())) == (tiers, report.memory_bytes)
            await under.want("films", hold=(2,), live=2)
            assert (await under.announced("films", 1, "draining")).identity == first.identity
            await under.announced("films", 1, None)
            assert [(one.version, one.state) for one in under.node.info().versions] == [(2, "live")]
            record = (await under.fleet.nodes())[0]
            assert (record.kind, record.shard_index, record.num_shards) == ("shard", 0, 1)
            assert 0 < record.memory_available_bytes <= record.memory_total_bytes
            await under.want("films", hold=(2, 9))
            assert (await under.announced("films", 9, "refused")).reason.startswith("SnapshotNotFoundError: ")

    run(main())


def test_a_version_without_room_is_refused_until_another_goes(url, store):
    async def main():
        tables = make_spec().tables
        size = sum(one.num_embeddings * codec_for(one.dtype, one.embedding_dim).row_bytes for one in tables)
        async with running_node(url, store, memory_cap_bytes=2 * size - 1) as under:
            await publish(under, store, 1)
            await publish(under, store, 2)
            await under.want("films", hold=(1,), live=1)
            await under.announced("films", 1, "ready")
            await under.want("films", hold=(1, 2))
            report = await under.announced("films", 2, "refused")
            assert f"rows take {size} bytes beside {size} of the versions that are here" in report.reason
            assert f"at most {2 * size - 1} are allowed" in report.reason
            await under.want("films", hold=(1,))
            await under.announced("films", 2, None)
            await under.want("films", node_hold={"node": (2,)})
            await under.announced("films", 2, "ready")
            await under.announced("films", 1, None)

    run(main())


async def append(under: NodeUnderTest, sequence: int) -> None:
    """A delta that makes all of user 3's row the sequence number."""
    batch = make_batch(make_spec(), "user", sequence, [3], np.full((1, 16), float(sequence), np.float32))
    await under.fleet.registry.append(delta_stream("films", 1), sequence, batch.encode())


def user_3(under: NodeUnderTest) -> list[float]:
    user = under.node.table_layout("films", 1).index["user"]
    blocks = under.node.pool("films", 1, bags_of({user: [[3]]}))
    return next(block for block in blocks if block.size)[0].tolist()


def test_deltas_reach_only_versions_that_follow(url, store):
    async def main():
        async with running_node(url, store) as under:
            await publish(under, store, 1)
            await under.want("films", hold=(1,), live=1)
            await under.announced("films", 1, "ready")
            await append(under, 1)
            assert user_3(under) != [1.0] * 16
            await under.want("films", follow=(1,))
            await reached(under, 1)
            assert user_3(under) == [1.0] * 16
            await under.want("films", follow=())
            await until(lambda: "deltas films 1" not in {task.get_name() for task in asyncio.all_tasks()})
            await append(under, 2)
            assert (await under.announced("films", 1, "ready")).delta_sequence == 1
            assert user_3(under) == [1.0] * 16
            # It goes on where it was.
            await under.want("films", follow=(1,))
            await reached(under, 2)
            assert user_3(under) == [2.0] * 16

    run(main())


@pytest.mark.parametrize("lost", [False, True])
def test_a_followed_version_is_staged_with_its_deltas(url, store, lost, caplog):
    """A node that comes back must not answer with old rows; if deltas are lost, it may be the only one and does."""

    async def main():
        async with running_node(url, store) as under:
            under.agent_runs.cancel()
            await asyncio.wait([under.agent_runs])
            await publish(under, store, 1)
            for sequence in (1, 2, 3):
                await append(under, sequence)
            if lost:
                await under.fleet.registry.trim(delta_stream("films", 1), 3)
            desired = WantedModel(model="films", epoch=1, live=1, hold=(1,), follow=(1,))
            await under.actions.stage("films", 1, desired, lambda fraction: None)
            report = under.actions.reports()[0]
            assert (report.state, report.delta_sequence) == ("ready", 0 if lost else 3)
            if not lost:
                assert user_3(under) == [3.0] * 16
                # From now on it follows as any other does.
                await under.actions.settle(desired)
                await append(under, 4)
                await reached(under, 4)

    run(main())
    assert ("version 1 of films is staged without deltas 1 to 3" in caplog.text) == lost


async def reached(under: NodeUnderTest, sequence: int) -> None:
    await until(lambda: under.actions.reports()[0].delta_sequence == sequence)


@pytest.mark.parametrize(("live", "state"), [(None, "refused"), (1, "ready")])
def test_a_version_with_a_gap_is_refused_unless_live(url, store, live, state):
    async def main():
        async with running_node(url, store) as under:
            await publish(under, store, 1)
            for sequence in (1, 2, 3):
                await append(under, sequence)
            await under.fleet.registry.trim(delta_stream("films", 1), 3)
            await under.want("films", hold=(1,), live=live)
            await under.announced("films", 1, "ready")
            before = answer(under, 1)
            await under.want("films", follow=(1,))
            while not (report := await under.announced("films", 1, state)).reason:
                pass
            assert "needs delta 1, but deltas/films/1 begins with 3" in report.reason
            assert report.delta_sequence == 0
            for actual, expected in zip(answer(under, 1), before, strict=True):
                np.testing.assert_array_equal(actual, expected)

    run(main())


def test_a_node_that_divides_rows_otherwise_is_refused(url, store):
    async def main():
        async with running_node(url, store) as under:
            await join_fleet(under.fleet, FleetRecord(num_shards=2, sharding="hash", replicate_bytes=0))
            with pytest.raises(FleetMismatchError, match=r"num_shards 3, .* its fleet in .* has 2, 'hash', 0"):
                await join_fleet(under.fleet, FleetRecord(num_shards=3, sharding="hash", replicate_bytes=0))
            # Of the number that a wanted version is divided over still: it restarts while a fleet goes to another one.
            await under.fleet.update_wanted("other", lambda _: WantedModel(model="other", epoch=1, num_shards={1: 3}))
            await join_fleet(under.fleet, FleetRecord(num_shards=3, sharding="hash", replicate_bytes=0))
            with pytest.raises(FleetMismatchError, match="replicate_bytes 9"):
                await join_fleet(under.fleet, FleetRecord(num_shards=3, sharding="hash", replicate_bytes=9))

    run(main())


PROGRAM = """
import sys, time
from pathlib import Path
from loader.snapshot.reader import Snapshot
from loader.registry.fleet import PublishedVersion
from shard_node.node import ShardNode
from shard_node.partition import NodeIdentity
from shard_node.engine.memory import RowMemory
from shard_node.agent.node_agent import stage_tables
from router.plan import Plan

def plan_of(snapshot):
    plan = Plan.make(snapshot.spec, cards_per_shard=2)
    return plan.partition(0), plan.digest

def rss_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

folder, memory = Path(sys.argv[1]), RowMemory()
identity = Snapshot.open(folder, verify=False).identity
record = PublishedVersion(
    model="small", version=1, identity=identity, delta_base=1, last_delta=0, rows_bytes=0, published_at=0.0)
node = ShardNode(NodeIdentity(shard_index=0, num_shards=1, num_cards=2, sharding="hash"))
seen = []
for version in range(1, 5):
    node.stage("small", version, stage_tables(folder, record, plan_of, memory=memory))
    node.flip("small", version)
    both = rss_mb()
    if version > 1:
        assert node.retire("small", version - 1).retired.wait(30)
    seen.append((both, rss_mb()))
print(*(f"{both:.1f},{one:.1f}" for both, one in seen))
node.close()
"""


def test_each_swap_frees_the_memory_of_a_version(tmp_path):
    spec = one_table_spec(200_000, 64)
    folder, _ = write_snapshot(tmp_path, spec, seed=1, version=1)
    size_mb = 200_000 * 72 / 1e6
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=True, timeout=120
    )
    seen = [tuple(map(float, pair.split(","))) for pair in done.stdout.split()]
    first = seen[0][1]
    for both, one in seen[1:]:
        assert both > first + 0.8 * size_mb
        assert one < first + 0.2 * size_mb


# Each child goes its way to the interpreter's end; the parent, which only loads the modules, waits for all.
ENDING_PROGRAM = """
import os
import sys
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from shard_node.engine.loading import load_tables
from shard_node.node import ShardNode

for _ in range(5):
    if not os.fork():
        break
    _, status = os.wait()
    if status:
        sys.exit(f"a child ended with {os.waitstatus_to_exitcode(status)}")
else:
    print("5 ended")
    sys.exit()

snapshot = Snapshot.open(sys.argv[1])
plan = Plan.make(snapshot.spec, sharding="table", cards_per_shard=4)
node = ShardNode(plan.identity(0))
for version in range(1, 20):
    node.stage("films", version, load_tables(snapshot, plan.partition(0), plan.digest))
node.close()
"""


@pytest.mark.nightly
def test_closing_a_node_at_the_end_of_a_process_never_aborts(tmp_path: Path):
    path, _ = write_snapshot(tmp_path, make_spec(), seed=1)
    done = subprocess.run(
        [sys.executable, "-c", ENDING_PROGRAM, str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "5 ended\n", "")
