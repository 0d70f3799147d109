"""Keys that training inserts and deletes, through real registries: in order, once, on every shard and replica."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from loader.deltas.publisher import AsyncDeltaPublisher
from loader.errors import DeltaFormatError
from loader.registry import open_registry
from loader.registry.fleet import FleetRegistry, NodeRecord, VersionReport, delta_stream
from router.router import Router
from shard_node.agent.delta_follower import FollowerConfig
from shardrank_testing import deltas
from shardrank_testing.card_engines import OnCards
from shardrank_testing.errors import raises_kind
from shardrank_testing.keyed_tables import CAPACITY, KeyedModel, random_keys
from shardrank_testing.registries import REGISTRY_KINDS, registry_of
from shardrank_testing.snapshots import random_rows
from shardrank_testing.topologies import Topology, local_router, lookup

CONFIG = FollowerConfig(poll_s=0.002, retry_s=0.002)


async def follow(registry, model: KeyedModel, router: Router, until: int) -> list[int]:
    """Bring the rows of every shard up to a delta; returns how many keys were to be deleted and were not there."""
    tables = [shard.node.generations.payload("m", model.snapshot.version) for shard in router._shards]
    followers = [deltas.follow(registry, model.snapshot, one, config=CONFIG) for one in tables]
    await asyncio.gather(*(follower.run(until=until) for follower in followers))
    assert [one.deltas.sequence for one in tables] == [until] * len(tables)
    return [one.deltas.now.absent for one in tables]


async def train(publisher: AsyncDeltaPublisher, model: KeyedModel) -> int:
    """Upsert some keys of every table, new ones among them, then delete some, of which some are not there."""
    sequence = 0
    for name, table in model.keyed.items():
        known = np.array(list(model.rows[name]), np.int64)
        keys = np.unique(np.concatenate([model.rng.choice(known, 20), random_keys(model.rng, 15)]))
        values = random_rows(model.rng, keys.size, table.embedding_dim)
        model.put(name, keys, values)
        order = model.rng.permutation(keys.size)
        # A trainer's unsigned numbers are taken by their bits.
        await publisher.upsert(name, keys[order].view(np.uint64), values[order])
        gone = np.concatenate([model.rng.choice(keys, 12, replace=False), random_keys(model.rng, 3)])
        model.delete(name, gone)
        sequence = await publisher.delete(name, gone)
    return sequence


@pytest.mark.parametrize("kind", REGISTRY_KINDS)
async def test_all_shards_and_replicas_have_what_was_published(kind, tmp_path):
    model = KeyedModel(tmp_path / "store")
    with registry_of(kind, tmp_path) as url:
        registry = open_registry(url)
        await deltas.register_version(registry, model.snapshot)
        publisher = AsyncDeltaPublisher(registry, "m", model.snapshot.version)
        routers = [local_router(model.snapshot, Topology(shards=shards)) for shards in (3, 3, 1)]
        routers.append(
            local_router(model.snapshot, Topology(cards=2, on=OnCards(2, "every tier", "as late as can be")))
        )
        for _ in range(3):
            sequence = await train(publisher, model)
            absent = [await follow(registry, model, router, sequence) for router in routers]
            assert sum(absent[0]) == sum(absent[1]) >= sum(absent[2]) == sum(absent[3]) > 0
            for router in routers:
                bags = model.bags()
                model.check(bags, await lookup(router, model.snapshot, bags))
        # Applied once: what is read again changes nothing.
        await follow(registry, model, routers[0], sequence)
        await registry.close()


async def test_a_snapshot_exported_meanwhile_replays_what_it_lacks(tmp_path):
    model = KeyedModel(tmp_path / "store")
    registry = open_registry(tmp_path / "registry")
    await deltas.register_version(registry, model.snapshot)
    publisher = AsyncDeltaPublisher(registry, "m", model.snapshot.version)
    contained = await train(publisher, model)
    model.export(tmp_path / "store", delta_base=model.snapshot.version, last_delta=contained)
    sequence = await train(publisher, model)
    router = local_router(model.snapshot, Topology(shards=3))
    await follow(registry, model, router, sequence)
    for _ in range(5):
        bags = model.bags()
        model.check(bags, await lookup(router, model.snapshot, bags))
    await registry.close()


async def test_a_delta_beyond_the_capacity_stops_the_follower_and_tells_the_publisher(tmp_path):
    model = KeyedModel(tmp_path / "store", num_keys=CAPACITY - 5)
    registry = open_registry(tmp_path / "registry")
    await deltas.register_version(registry, model.snapshot)
    publisher = AsyncDeltaPublisher(registry, "m", model.snapshot.version)
    router, keys = local_router(model.snapshot, Topology()), np.arange(1000, 1006)
    sequence = await publisher.upsert("wide", keys, np.ones((6, 12)))
    tables = router._shards[0].node.generations.payload("m", model.snapshot.version)
    await deltas.follow(registry, model.snapshot, tables, config=CONFIG).run(until=sequence)
    now = tables.deltas.now
    assert (now.sequence, now.refusal) == (0, "key_capacity")
    assert f"{CAPACITY + 1} keys with 6 new ones" in now.reason
    bags = model.bags()
    model.check(bags, await lookup(router, model.snapshot, bags))
    # What the node announces by then.
    report = VersionReport(model="m", version=1, state="ready", reason=now.reason, delta_refusal=now.refusal)
    node = NodeRecord(
        node_id="n", kind="shard", process_id=1, address="a", delta_format=2, num_shards=1, versions=(report,)
    )
    await FleetRegistry(registry).announce_node(node, 60)
    with raises_kind("key_capacity", r"node n follows no further: .*capacity 400: export it with more"):
        await publisher.delete("wide", keys)
    await registry.close()


@pytest.mark.parametrize(
    ("publish", "says"),
    [
        (lambda one: one.publish("films", [1], np.ones((1, 8))), "table 'films' has keys: upsert or delete them"),
        (lambda one: one.upsert("plain", [1], np.ones((1, 8))), "no table 'plain' with keys; such tables: .'films'"),
        (lambda one: one.delete("films", [[1]]), r"table 'films': keys: expected integers \[n\]"),
        (lambda one: one.delete("films", [0.5]), r"expected integers \[n\] of at most 64 bits, got float64"),
        (lambda one: one.upsert("films", [2**64], np.ones((1, 8))), "table 'films': keys: "),
        (lambda one: one.upsert("films", [1], np.full((1, 8), np.nan)), "row 1 holds NaN"),
    ],
)
async def test_what_is_no_update_of_keys_is_refused(publish, says, tmp_path):
    model = KeyedModel(tmp_path / "store", num_keys=20)
    registry = open_registry(tmp_path / "registry")
    await deltas.register_version(registry, model.snapshot)
    with pytest.raises(DeltaFormatError, match=says):
        await publish(AsyncDeltaPublisher(registry, "m", 1))
    assert (await registry.bounds(delta_stream("m", 1))).last == 0
    await registry.close()
