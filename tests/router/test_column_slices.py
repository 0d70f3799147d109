"""Features of sliced tables: the router gives their slices side by side, however rows and columns are divided."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader.snapshot.manifest import ModelSpec
from loader.snapshot.tables import RowDtype, TableSpec
from router.plan import Plan
from shard_node.bags import KeyedBags
from shard_node.node import LocalShard
from shardrank_testing.card_engines import OnCards
from shardrank_testing.snapshots import make_spec, sharding_of, with_slices
from shardrank_testing.topologies import (
    StoredModel,
    Topology,
    local_router,
    lookup,
    make_node,
    make_router,
    remote_router,
)


@st.composite
def sliced_specs(draw: st.DrawFn) -> ModelSpec:
    """The model that has one of everything, of one dtype and bucketing, with random tables cut at random."""
    dtype: RowDtype = draw(st.sampled_from(["int8", "int4", "fp16", "fp32"]))
    spec = make_spec(dtype=dtype, bucketing=draw(st.sampled_from(["mixed", "hash", "range"])))
    unit = 2 if dtype == "int4" else 1
    names = draw(st.sets(st.sampled_from([table.name for table in spec.tables]), min_size=1))
    dims = st.lists(st.integers(1, 12).map(lambda dim: dim * unit), min_size=2, max_size=5).map(tuple)
    return with_slices(spec, {name: draw(dims) for name in sorted(names)})


@given(
    spec=sliced_specs(),
    shards=st.sampled_from([1, 3, 4]),
    cards=st.sampled_from([1, 4]),
    sharding=st.sampled_from([None, "table"]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(suppress_health_check=list(HealthCheck))
def test_any_slicing_gives_the_references_answer(spec, shards, cards, sharding, seed):
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        stored = StoredModel(Path(folder), spec, seed)
        topology = Topology(shards, cards, sharding, replicate_bytes=4096 if seed % 2 else 0)
        router = local_router(stored.snapshot, topology)
        count = len(stored.schema.features)
        some = sorted(rng.choice(count, int(rng.integers(0, count + 1)), replace=False).tolist())
        for features in (None, some):
            bags = stored.bags(rng, features=features)
            stored.check(bags, asyncio.run(lookup(router, stored.snapshot, bags)))
        asyncio.run(router.close())


MIXED = with_slices(make_spec(), {"film": (10, 3, 3), "genre": (5, 3), "tag": (6, 2), "city": (1, 3)})


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("cards", [OnCards(1, "peers"), OnCards(4, "every tier")], ids=str)
def test_slices_on_cards_give_the_references_answer(tmp_path, shards, cards):
    stored = StoredModel(tmp_path, MIXED)
    plan = Plan.make(MIXED, shards, "table" if shards > 1 else sharding_of(MIXED), cards_per_shard=cards.num_cards)
    nodes = [make_node(stored.snapshot, plan, shard, card_set=cards.card_set(MIXED)) for shard in range(shards)]
    router = make_router(stored.snapshot, plan, [LocalShard(node) for node in nodes])
    for seed, features in enumerate((None, None, [1, 2, 5])):
        bags = stored.bags(np.random.default_rng(seed), features=features)
        stored.check(bags, asyncio.run(lookup(router, stored.snapshot, bags)))


def test_slices_behind_sockets_give_the_references_answer(tmp_path):
    stored = StoredModel(tmp_path, MIXED)

    async def scenario():
        topology = Topology(3, 2, "table", replicate_bytes=4096)
        async with remote_router(stored.snapshot, topology, tmp_path) as router:
            for most in (1, 6):  # One row a bag travels as stored, more as sums.
                bags = stored.bags(np.random.default_rng(most), 7, most)
                stored.check(bags, await lookup(router, stored.snapshot, bags))

    asyncio.run(scenario())


def test_ids_of_sliced_tables_are_mapped_once(tmp_path):
    mappings = {
        "film": {"id_mapping": {"kind": "vocabulary"}, "unknown_id": "skip"},
        "user": {"id_mapping": {"kind": "hash", "seed": 4}},
        "genre": {"unknown_id": "default_row", "default_row": 2},
    }
    sliced = with_slices(make_spec(dtype="fp32"), {"film": (9, 7), "user": (4, 4, 8), "genre": (3, 5)})
    ids = {"user": [[10**15]], "film": [[7, 8], []], "history": [[14, 700, 21]], "genre": [[18, 900]]}
    answers = []
    for folder, changes in (("sliced", {}), ("plain", {"column_dims": ()})):
        tables = [TableSpec(**{**dict(one), **mappings.get(one.name, {}), **changes}) for one in sliced.tables]
        spec = ModelSpec(**{**dict(sliced), "tables": tables})
        stored = StoredModel(tmp_path / folder, spec, vocabularies={"film": np.arange(100) * 7})
        bags = [ids.get(feature.name, [[]]) for feature in stored.schema.features]
        keyed = KeyedBags.from_lengths(
            np.arange(len(bags), dtype=np.int32),
            np.array([len(of_feature) for of_feature in bags]),
            np.array([len(bag) for of_feature in bags for bag in of_feature]),
            np.array([one for of_feature in bags for bag in of_feature for one in bag]),
        )
        router = local_router(stored.snapshot, Topology(shards=3, sharding="table"))
        embeddings = asyncio.run(lookup(router, stored.snapshot, keyed))
        assert embeddings.lengths(stored.schema.index["history"]).tolist() == [2]
        answers.append({name: embeddings.feature(key) for name, key in stored.schema.index.items()})
    for name, feature in answers[0].items():
        np.testing.assert_array_equal(feature, answers[1][name], err_msg=name)
