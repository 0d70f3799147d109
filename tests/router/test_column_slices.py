"""Features of sliced tables: the router gives their slices side by side, however rows and columns are divided."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader.snapshot.manifest import ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import RowDtype, TableSpec
from router.feature_schema import FeatureSchema
from router.plan import Plan
from router.router import Router
from shard_node.bags import Float32Array, KeyedBags
from shard_node.node import LocalShard
from shardrank_testing.card_engines import OnCards
from shardrank_testing.snapshots import make_spec, random_tables, sharding_of, with_slices, write_snapshot
from shardrank_testing.topologies import (
    Topology,
    decoded_tables,
    expected_feature,
    local_router,
    lookup,
    make_node,
    make_router,
    remote_router,
)

# A row's error once stored is at most this much of the range of the slice's values: half a step; for int4 also what
# float16 scale and bias round away, of range and largest value.
HALF_STEP = {"int8": 0.5 / 255 * 1.01, "int4": 0.5 / 15 * 1.05, "fp16": 0.0, "fp32": 0.0}
RELATIVE = {"int8": 1e-6, "int4": 2e-3, "fp16": 2**-11, "fp32": 0.0}


class Stored:
    """A snapshot of a spec, its float32 rows, and what rows are worth once stored."""

    def __init__(self, folder: Path, spec: ModelSpec, seed: int = 3) -> None:
        self.spec = spec
        path, self.rows = write_snapshot(folder, spec, seed=seed, rows_per_file=256)
        self.snapshot = Snapshot.open(path)
        self.decoded = decoded_tables(spec, self.rows)
        self.schema = FeatureSchema.of(spec)

    def bags(self, rng: np.random.Generator, features: list[int], max_bags: int = 5, most: int = 5) -> KeyedBags:
        """Rows for some features, by flat index."""
        keys = np.array(features, np.int32)
        bags_per_key = rng.integers(0, max_bags + 1, keys.size)
        lengths = rng.integers(0, most + 1, int(bags_per_key.sum()))
        values_per_key = np.diff(np.append(0, np.cumsum(lengths))[np.append(0, np.cumsum(bags_per_key))])
        limits = [self.spec.table_of(self.schema.features[key].name).num_embeddings for key in features]
        values = (rng.random(int(lengths.sum())) * np.repeat(limits, values_per_key)).astype(np.int64)
        weighted = np.repeat([self.schema.features[key].weighted for key in features], values_per_key)
        weights = np.where(weighted, rng.normal(size=values.size), 1.0).astype(np.float32)
        return KeyedBags.from_lengths(keys, bags_per_key, lengths, values, weights)

    def check(self, router: Router, bags: KeyedBags) -> None:
        """Compare an answer with the float64 sums of rows as stored, and with those of the float32 rows."""
        embeddings = asyncio.run(lookup(router, self.snapshot, bags))
        starts = bags.bag_starts()
        for segment, key in enumerate(bags.keys.tolist()):
            name = self.schema.features[key].name
            edges = bags.offsets[starts[segment] : starts[segment + 1] + 1].tolist()
            ids = [bags.values[a:b].tolist() for a, b in itertools.pairwise(edges)]
            weights = [bags.weights[a:b].tolist() for a, b in itertools.pairwise(edges)]
            actual = embeddings.feature(key)
            expected = expected_feature(self.spec, self.decoded, name, ids, weights)
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-5 * max([1, *map(len, ids)]), err_msg=name)
            true = expected_feature(self.spec, self.rows, name, ids, weights)
            # An error is pooled like a row, by the weights' sizes.
            error = {one.name: row_bounds(one, self.rows[one.name]) for one in self.spec.tables}
            sizes = [np.abs(one).tolist() for one in weights]
            bound = expected_feature(self.spec, error, name, ids, sizes) + 2e-5 * max([1, *map(len, ids)])
            assert (np.abs(actual - true) <= bound).all(), name
            assert embeddings.lengths(key).tolist() == [len(one) for one in ids]


def row_bounds(table: TableSpec, rows: Float32Array) -> Float32Array:
    """The most that each stored element may differ: by the range of its own slice, not of the whole row."""
    bounds, first = np.empty_like(rows), 0
    for dim in table.slice_dims:
        part = rows[:, first : first + dim]
        span = part.max(axis=1, keepdims=True) - part.min(axis=1, keepdims=True)
        largest = np.abs(part).max(axis=1, keepdims=True)
        bounds[:, first : first + dim] = HALF_STEP[table.dtype] * span + RELATIVE[table.dtype] * (largest + span)
        first += dim
    return bounds


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
def test_any_slicing_on_any_shards_and_cards_gives_the_references_answer(spec, shards, cards, sharding, seed):
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        stored = Stored(Path(folder), spec, seed)
        topology = Topology(shards, cards, sharding, replicate_bytes=4096 if seed % 2 else 0)
        router = local_router(stored.snapshot, topology)
        count = len(stored.schema.features)
        stored.check(router, stored.bags(rng, list(range(count))))
        some = sorted(rng.choice(count, int(rng.integers(0, count + 1)), replace=False).tolist())
        stored.check(router, stored.bags(rng, some))
        asyncio.run(router.close())


MIXED = with_slices(make_spec(), {"film": (10, 3, 3), "genre": (5, 3), "tag": (6, 2), "city": (1, 3)})


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("on", [OnCards(1, "peers"), OnCards(4, "every tier")], ids=str)
def test_slices_on_emulated_cards_give_the_references_answer(tmp_path, shards, on):
    stored = Stored(tmp_path, MIXED)
    plan = Plan.make(MIXED, shards, "table" if shards > 1 else sharding_of(MIXED), cards_per_shard=on.num_cards)
    nodes = [make_node(stored.snapshot, plan, shard, card_set=on.card_set(MIXED)) for shard in range(shards)]
    router = make_router(stored.snapshot, plan, [LocalShard(node) for node in nodes])
    for seed in range(3):
        stored.check(router, stored.bags(np.random.default_rng(seed), list(range(len(stored.schema.features)))))
    stored.check(router, stored.bags(np.random.default_rng(9), [1, 2, 5]))


def test_slices_behind_sockets_give_the_references_answer(tmp_path):
    stored = Stored(tmp_path, MIXED)
    features = list(range(len(stored.schema.features)))

    async def scenario():
        topology = Topology(3, 2, "table", replicate_bytes=4096)
        async with remote_router(stored.snapshot, topology, tmp_path) as router:
            for most in (1, 6):  # One row a bag travels as stored, more as sums.
                bags = stored.bags(np.random.default_rng(most), features, 7, most)
                local = await lookup(local_router(stored.snapshot, Topology()), stored.snapshot, bags)
                remote = await lookup(router, stored.snapshot, bags)
                for key in features:
                    np.testing.assert_allclose(remote.feature(key), local.feature(key), rtol=1e-5, atol=1e-5)

    asyncio.run(scenario())


def test_ids_are_mapped_once_and_their_rows_asked_of_every_slice(tmp_path):
    mappings = {
        "film": {"id_mapping": {"kind": "vocabulary"}, "unknown_id": "skip"},
        "user": {"id_mapping": {"kind": "hash", "seed": 4}},
        "genre": {"unknown_id": "default_row", "default_row": 2},
    }
    spec = with_slices(make_spec(), {"film": (9, 7), "user": (4, 4, 8), "genre": (3, 5)})
    tables = [TableSpec(**{**dict(one), **mappings.get(one.name, {})}) for one in spec.tables]
    spec = ModelSpec(**{**dict(spec), "tables": tables})
    whole = ModelSpec(**{**dict(spec), "tables": [TableSpec(**{**dict(one), "column_dims": ()}) for one in tables]})
    found = []
    for number, as_given in enumerate((spec, whole)):
        # Stored exactly, so that slices make no difference but where they are.
        exact = [TableSpec(**{**dict(table), "dtype": "fp32"}) for table in as_given.tables]
        one = ModelSpec(**{**dict(as_given), "tables": exact})
        path, _ = write_snapshot(tmp_path / str(number), one, vocabularies={"film": np.arange(100) * 7})
        snapshot = Snapshot.open(path)
        schema = FeatureSchema.of(one)
        lengths = {"user": [1], "film": [2, 0], "history": [3], "genre": [2], "tag": [0], "liked_tag": [0], "city": [0]}
        values = {"user": [10**15], "film": [7, 8], "history": [14, 700, 21], "genre": [18, 900]}
        names = [feature.name for feature in schema.features]
        bags = KeyedBags.from_lengths(
            np.arange(len(names), dtype=np.int32),
            np.array([len(lengths[name]) for name in names]),
            np.array([length for name in names for length in lengths[name]]),
            np.array([value for name in names for value in values.get(name, [])]),
        )
        router = local_router(snapshot, Topology(shards=3, sharding="table"))
        embeddings = asyncio.run(lookup(router, snapshot, bags))
        assert embeddings.lengths(schema.index["history"]).tolist() == [2]
        found.append({name: embeddings.feature(schema.index[name]) for name in names})
    for name in found[0]:
        np.testing.assert_array_equal(found[0][name], found[1][name], err_msg=name)


def test_slices_of_int8_are_no_further_from_the_rows_than_whole_ones(tmp_path):
    plain = make_spec(dtype="int8")
    sliced = with_slices(plain, {"user": (8, 8), "film": (4, 12), "genre": (4, 4)})
    rows = random_tables(plain, 7)
    # A part of the columns much smaller than the others: what one scale for all loses.
    rows["user"][:, :8] *= 0.01
    errors = [
        {name: np.abs(one[name].astype(np.float64) - rows[name]) for name in ("user", "film", "genre")}
        for one in (decoded_tables(plain, rows), decoded_tables(sliced, rows))
    ]
    for name in ("user", "film", "genre"):
        whole, parts = errors[0][name], errors[1][name]
        assert (row_bounds(sliced.table_of(name), rows[name]) <= row_bounds(plain.table_of(name), rows[name])).all()
        assert np.sqrt((parts**2).mean()) <= np.sqrt((whole**2).mean())
    assert errors[1]["user"][:, :8].mean() < 0.1 * errors[0]["user"][:, :8].mean()


def test_lookups_are_the_features_where_nothing_is_sliced():
    schema = FeatureSchema.of(make_spec())
    lookups = schema.lookups
    assert lookups.feature.tolist() == list(range(len(schema.features)))
    assert lookups.table.tolist() == schema.table_index.tolist()
    assert lookups.of_feature == tuple((number,) for number in range(len(schema.features)))
    assert not lookups.column.any()
