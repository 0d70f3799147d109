"""Rows named by keys, over shards and cards: what a dict gives, while keys come and go."""

from __future__ import annotations

import functools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from loader.errors import DeltaError
from loader.snapshot.buckets import key_buckets
from loader.snapshot.codecs import RowCodec
from loader.snapshot.manifest import FeatureSpec
from loader.snapshot.reader import Snapshot
from router.router import Router
from shard_node.engine.base import Engine
from shard_node.errors import InvalidBagsError
from shardrank_testing.bags import bags_of
from shardrank_testing.card_engines import OnCards
from shardrank_testing.keyed_tables import CAPACITY, KeyedModel, random_keys
from shardrank_testing.snapshots import model_of, table_of, write_snapshot
from shardrank_testing.topologies import Topology, local_router, lookup, make_node, remote_router

TOPOLOGIES = [
    Topology(),
    Topology(cards=4),
    Topology(shards=3),
    Topology(shards=4, cards=4),
    Topology(on=OnCards(1, "peers")),
    Topology(cards=4, on=OnCards(4, "peers")),
    Topology(cards=3, on=OnCards(3, "every tier", "as late as can be")),
    Topology(shards=3, cards=2, on=OnCards(2, "pinned")),
]
ENGINES = [Topology(), Topology(on=OnCards(1, "peers")), Topology(cards=4, on=OnCards(4, "every tier"))]


def engines_at(router: Router, snapshot: Snapshot) -> list[Engine]:
    return [shard.node.generations.payload("m", snapshot.version).engine for shard in router._shards]


def engines_of(router: Router, model: KeyedModel) -> list[Engine]:
    return engines_at(router, model.snapshot)


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


@pytest.mark.parametrize(
    "topology",
    [
        Topology(shards=3, sharding="table"),
        Topology(shards=2, replicate_bytes=1 << 30),
        Topology(shards=2, replicate_bytes=3000),
        Topology(shards=3, cards=2, sharding="table", on=OnCards(2, "peers")),
    ],
    ids=["by table", "replicated", "some replicated", "by table, on cards"],
)
async def test_tables_that_one_shard_has_or_every_shard(tmp_path, topology):
    """Of a table with one owner no bucket is asked for, whatever the key's sign."""
    model = KeyedModel(tmp_path, seed=9)
    router = local_router(model.snapshot, topology)
    for _ in range(20):
        bags = model.bags(max_bags=8)
        model.check(bags, await lookup(router, model.snapshot, bags))


async def test_slices_that_miss_different_keys_leave_them_out_together(tmp_path):
    """A delta that one slice's shard has applied, and the other's not yet: no row is made of two keys' halves."""
    pooling = {"pooling": "none", "missing": "skip", "column_dims": (4, 4)}
    spec = model_of([table_of("wide", 50, 8, "wide", keys="int64", **pooling), table_of("z", 20, 4, "z")])
    spec = spec.model_copy(update={"features": tuple(FeatureSpec(name=name, side="context") for name in ("wide", "z"))})
    keys, rows = np.array([10, 11]), np.arange(16, dtype=np.float32).reshape(2, 8)
    tables = {"wide": rows, "z": np.full((20, 4), -1, np.float32)}
    path, _ = write_snapshot(tmp_path, spec, tables=tables, keys={"wide": keys})
    snapshot = Snapshot.open(path)
    router = local_router(snapshot, Topology(shards=2, sharding="table"))
    layout, schema = router.schema.layout, router.schema
    for number in layout.slices["wide"]:
        of_slice = layout.tables[number]
        for engine in engines_at(router, snapshot):
            stored = RowCodec(of_slice.dtype, 4).encode(np.full((1, 4), 9.0, np.float32))
            if engine.update_keys((number,), np.array([50]), stored)[0]:
                break
        bags = bags_of({schema.index["wide"]: [[10, 50, 11]], schema.index["z"]: [[3]]})
        found = await lookup(router, snapshot, bags)
        complete = number == layout.slices["wide"][-1]
        expected = [rows[0], np.full(8, 9.0), rows[1]] if complete else [rows[0], rows[1]]
        np.testing.assert_allclose(found.feature(schema.index["wide"]), expected, atol=0.1)
        np.testing.assert_allclose(found.feature(schema.index["z"]), [[-1] * 4], atol=0.01)
        assert found.missing.id.tolist() == ([] if complete else [50])


@pytest.mark.parametrize("on", [None, OnCards(2, "peers")], ids=str)
async def test_a_node_is_asked_for_its_own_keys_alone(tmp_path, on):
    model = KeyedModel(tmp_path)
    plan = Topology(shards=2, cards=2).plan(model.spec)
    node = make_node(model.snapshot, plan, 0, card_set=None if on is None else on.card_set(model.spec))
    number = model.schema.layout.index["films"]
    others = [key for key in range(99) if plan.shard_of_bucket[number][key_buckets(np.array([key]))[0]] == 1]
    with pytest.raises(InvalidBagsError, match=rf"key {others[0]} of table 'films' is not on this node"):
        node.pool("m", model.snapshot.version, bags_of({number: [[others[0]]]}))


async def test_shards_behind_sockets_tell_which_keys_are_missing(tmp_path):
    model = KeyedModel(tmp_path / "store")
    async with remote_router(model.snapshot, Topology(shards=3), tmp_path) as router:
        for _ in range(20):
            bags = model.bags(max_bags=12)
            model.check(bags, await lookup(router, model.snapshot, bags))


@pytest.mark.parametrize("topology", ENGINES, ids=str)
async def test_a_delta_beyond_the_capacity_changes_nothing(tmp_path, topology):
    model = KeyedModel(tmp_path, num_keys=CAPACITY - 10)
    router = local_router(model.snapshot, topology)
    (engine,) = engines_of(router, model)
    assert (engine.cards() is None) == (topology.on is None)
    numbers = model.schema.layout.slices["wide"]
    keys = np.setdiff1d(random_keys(model.rng, 50), np.array(list(model.rows["wide"])))[:11]
    stored = np.zeros((11, 12 + 2 * 8), np.uint8)
    with pytest.raises(DeltaError, match=f"'wide.c0': {CAPACITY + 1} keys with 11 new ones, but at most {CAPACITY}"):
        engine.update_keys(numbers, keys, stored)
    bags = model.bags()
    model.check(bags, await lookup(router, model.snapshot, bags))
    assert engine.update_keys(numbers, keys, None) == (11, 0)
    # Full: a table's last row is written too, and is another key's once it is freed.
    for at in (slice(0, 10), slice(1, 11)):
        stored = model.upsert("wide", keys[at])
        assert engine.update_keys(numbers, keys[at], stored) == (10, 9 if at.start else 0)
        bags = bags_of({model.schema.index["wide"]: [[key] for key in keys.tolist()]}, np.ones(11))
        found = (await lookup(router, model.snapshot, bags)).feature(model.schema.index["wide"])
        expected = [model.rows["wide"].get(key, np.zeros(12)) for key in keys.tolist()]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-3)
        engine.update_keys(numbers, keys[:1], None)
        model.delete("wide", keys[:1])


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param(Topology(), marks=pytest.mark.nightly),
        pytest.param(Topology(cards=3, on=OnCards(3, "every tier", "emulated")), marks=pytest.mark.nightly),
        Topology(cards=3, on=OnCards(3, "every tier", "as late as can be")),
    ],
    ids=str,
)
async def test_a_row_that_another_key_gets_is_never_read_for_the_one_before(tmp_path, topology, request):
    """Two keys have the only free row in turn, while threads look both up: none is given the other's."""
    request.addfinalizer(functools.partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-5)
    model = KeyedModel(tmp_path, "fp32", num_keys=CAPACITY - 1)
    (engine,) = engines_of(local_router(model.snapshot, topology), model)
    number = model.schema.layout.index["films"]
    group = next(at for at, one in enumerate(engine.layout.groups) if one.first_table <= number < one.end_table)
    keys = np.setdiff1d(random_keys(model.rng, 50), np.array(list(model.rows["films"])))[:2]
    bags, codec = bags_of({number: [[key] for key in keys.tolist()]}), RowCodec("fp32", 8)
    ended, seen = threading.Event(), list[tuple[int, ...]]()

    def look_up() -> None:
        while not ended.is_set():
            answer = engine.answer(bags, stored=False)
            values = np.where(np.isin([0, 1], answer.missing), 0, [1, 2])
            np.testing.assert_array_equal(answer.sums[group], np.repeat(values[:, None], 8, axis=1))
            seen.append(tuple(answer.missing.tolist()))

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(look_up) for _ in range(2)]
        try:
            swaps = 0
            # Both have come up by then, however slow the machine.
            while (swaps < 300 or {(0,), (1,)} - set(seen)) and not any(reader.done() for reader in readers):
                swaps += 1
                for at in range(2):
                    stored = codec.encode(np.full((1, 8), 1 + at, np.float32))
                    assert engine.update_keys((number,), keys[at : at + 1], stored) == (1, 0)
                    assert engine.update_keys((number,), keys[at : at + 1], None) == (1, 1)
        finally:
            ended.set()
        for reader in readers:
            reader.result()
    assert {(0,), (1,)} <= set(seen)


async def test_a_node_with_cards_reports_the_memory_of_its_keys(tmp_path):
    model = KeyedModel(tmp_path)
    (on_cpu,), (on_cards,) = (engines_of(local_router(model.snapshot, one), model) for one in ENGINES[:2])
    keys = on_cards._rows.keyed
    used = {(use.card, use.tier): use.size_bytes for use in on_cards.memory()}
    assert used[0, "ram"] == keys.size_bytes == on_cpu._keyed.size_bytes
    # Rows of all keys that there may be, and one for missing keys, of four tables, one of them in two slices.
    assert on_cards.plan.slots.sum() == 5 * (1 + CAPACITY) + CAPACITY
