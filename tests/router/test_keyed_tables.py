"""Rows named by keys, over shards and cards: what a dict gives, while keys come and go."""

from __future__ import annotations

import numpy as np
import pytest

from loader.errors import DeltaError
from router.router import Router
from shard_node.engine.base import Engine
from shardrank_testing.keyed_tables import CAPACITY, KeyedModel, random_keys
from shardrank_testing.topologies import Topology, local_router, lookup, make_node, remote_router

TOPOLOGIES = [Topology(), Topology(cards=4), Topology(shards=3), Topology(shards=4, cards=4)]


def engines_of(router: Router, model: KeyedModel) -> list[Engine]:
    version = model.snapshot.version
    return [shard.node.generations.payload("m", version).engine for shard in router._shards]


def change(model: KeyedModel, engines: list[Engine], table: str) -> None:
    """Upserts, deletions and insertions again, on all nodes, as a follower of deltas would do them."""
    numbers = model.schema.layout.slices[table]
    known = np.array(list(model.rows[table]), np.int64)
    new = random_keys(model.rng, 40)
    upserted = np.unique(np.concatenate([model.rng.choice(known, 20), new]))
    stored = model.upsert(table, upserted)
    here = [engine.update_keys(numbers, upserted, stored) for engine in engines]
    assert sum(count for count, _ in here) == upserted.size * len({id(engine) for engine in engines}) // len(engines)
    assert sum(found for _, found in here) == np.isin(upserted, known).sum()
    gone = np.unique(np.concatenate([model.rng.choice(upserted, 25), random_keys(model.rng, 5)]))
    deleted = [engine.update_keys(numbers, gone, None) for engine in engines]
    assert sum(found for _, found in deleted) == sum(key in model.rows[table] for key in gone.tolist())
    model.delete(table, gone)


@pytest.mark.parametrize("dtype", ["int8", "int4", "fp16", "fp32"])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
async def test_lookups_give_what_a_dict_gives_while_keys_come_and_go(tmp_path, topology, dtype):
    model = KeyedModel(tmp_path, dtype, seed=len(dtype) + topology.shards)
    router = local_router(model.snapshot, topology)
    for _ in range(4):
        for _ in range(5):
            bags = model.bags()
            model.check(bags, await lookup(router, model.snapshot, bags))
        for table in model.keyed:
            change(model, engines_of(router, model), table)
    await router.close()


async def test_shards_behind_sockets_tell_which_keys_are_missing(tmp_path):
    model = KeyedModel(tmp_path / "store")
    async with remote_router(model.snapshot, Topology(shards=3), tmp_path) as router:
        for _ in range(20):
            bags = model.bags(max_bags=12)
            model.check(bags, await lookup(router, model.snapshot, bags))


async def test_a_delta_beyond_the_capacity_changes_nothing(tmp_path):
    model = KeyedModel(tmp_path, num_keys=CAPACITY - 10)
    node = make_node(model.snapshot, Topology().plan(model.spec), 0)
    engine = node.generations.payload("m", model.snapshot.version).engine
    numbers = model.schema.layout.slices["wide"]
    keys = np.setdiff1d(random_keys(model.rng, 50), np.array(list(model.rows["wide"])))[:11]
    stored = np.zeros((11, 12 + 2 * 8), np.uint8)
    with pytest.raises(DeltaError, match=f"'wide.c0': {CAPACITY + 1} keys with 11 new ones, but at most {CAPACITY}"):
        engine.update_keys(numbers, keys, stored)
    assert engine.update_keys(numbers, keys, None) == (11, 0)
    assert engine.update_keys(numbers, keys[:10], stored[:10]) == (10, 0)
