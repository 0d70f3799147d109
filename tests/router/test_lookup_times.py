"""Where a lookup says that its time went."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from loader.snapshot.reader import Snapshot
from router.errors import ShardUnavailableError
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper, MappedBags
from router.router import Router
from shard_node.bags import Float32Array, KeyedBags
from shard_node.node import LocalShard, ShardNode
from shardrank_testing.snapshots import make_spec, write_snapshot
from shardrank_testing.topologies import Topology, lookup, make_node


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SlowMapper(IdMapper):
    """Takes 2 s."""

    def __init__(self, schema: FeatureSchema, clock: Clock) -> None:
        super().__init__(schema, {})
        self._clock = clock

    def map(self, bags: KeyedBags) -> MappedBags:
        self._clock.now += 2.0
        return super().map(bags)


class SlowShard(LocalShard):
    """Takes 5 s, and then fails as often as it is told to."""

    def __init__(self, node: ShardNode, clock: Clock, failures: int = 0) -> None:
        super().__init__(node)
        self._clock = clock
        self._failures = failures

    async def pool(self, model: str, version: int, bags: KeyedBags, deadline: float) -> list[Float32Array]:
        self._clock.now += 5.0
        if self._failures:
            self._failures -= 1
            raise ShardUnavailableError("no replica answered")
        return await super().pool(model, version, bags, deadline)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    return Snapshot.open(write_snapshot(tmp_path_factory.mktemp("store"), make_spec(bucketing="hash"), seed=3)[0])


def slow_router(snapshot: Snapshot, topology: Topology, failures: int = 0) -> Router:
    clock, plan = Clock(), topology.plan(snapshot.spec)
    schema = FeatureSchema.of(snapshot.spec)
    shards = [
        SlowShard(make_node(snapshot, plan, shard), clock, failures if shard else 0) for shard in range(topology.shards)
    ]
    return Router(schema, SlowMapper(schema, clock), plan, shards, clock)


def bags_of(snapshot: Snapshot, feature: str, count: int) -> KeyedBags:
    key = FeatureSchema.of(snapshot.spec).index[feature]
    ones = np.ones(count, np.int64)
    return KeyedBags.from_lengths(np.array([key], np.int32), np.array([count]), ones, np.arange(count))


@pytest.mark.parametrize(("shards", "wait_s"), [(1, 5.0), (2, 10.0)])
def test_mapping_and_waiting_are_told_apart(snapshot, shards, wait_s) -> None:
    router = slow_router(snapshot, Topology(shards=shards))
    times = asyncio.run(lookup(router, snapshot, bags_of(snapshot, "film", 256))).times
    assert (times.map_s, times.split_s, times.shard_wait_s, times.add_s) == (2.0, 0.0, wait_s, 0.0)


def test_waiting_for_a_shard_that_failed_counts_too(snapshot) -> None:
    router = slow_router(snapshot, Topology(shards=2, replicate_bytes=1 << 30), failures=1)
    # Tables that all shards have take turns over them, so one of two lookups begins at the failing one.
    waits = [asyncio.run(lookup(router, snapshot, bags_of(snapshot, "film", 8))).times.shard_wait_s for _ in range(2)]
    assert sorted(waits) == [5.0, 10.0]


def test_real_times_are_above_zero_and_no_lookup_has_anothers(snapshot) -> None:
    plan = Topology(shards=2).plan(snapshot.spec)
    schema = FeatureSchema.of(snapshot.spec)
    shards = [LocalShard(make_node(snapshot, plan, shard)) for shard in range(2)]
    router = Router(schema, IdMapper(schema, {}), plan, shards)
    bags = bags_of(snapshot, "film", 256)
    first, second = (asyncio.run(lookup(router, snapshot, bags)).times for _ in range(2))
    assert first is not second
    assert min(first.map_s, first.split_s, first.shard_wait_s, first.add_s) > 0
