"""Kernels find every row of a node and no other, by formula or place, for reading and for writing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.snapshot.codecs import codec_for
from loader.snapshot.manifest import FeatureSpec, ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import TableSpec
from router.plan import Plan
from shard_node.bags import KeyedBags
from shard_node.cuda.card_engine import POOLS_PER_CARD, CardEngine
from shard_node.cuda.card_loading import CardTableLoad
from shard_node.cuda.card_set import CardOptions, CardSet
from shard_node.cuda.kernel_params import hot_owner, pinned_owner
from shard_node.engine.memory import RowMemory
from shard_node.partition import Partition
from shardrank_testing.card_plans import DTYPES
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.host_kernels import host_kernels
from shardrank_testing.kernel_arena import Pooled, Run, pool_bags
from shardrank_testing.snapshots import DEFAULT_DENSE_MODEL, num_buckets, plain_buckets, write_snapshot

# 1 GB; no model here comes near it.
AMPLE = CardOptions(card_memory_gb=1.0, hot_gb=0.0, pinned_memory_gb=1.0)


def model_of(*tables: TableSpec) -> ModelSpec:
    features = tuple(FeatureSpec(name=one.feature_names[0], side="candidate") for one in tables)
    return ModelSpec(model="m", tables=tables, features=features, dense_model=DEFAULT_DENSE_MODEL)


def table_of(name: str, rows: int, **more) -> TableSpec:
    return TableSpec(name=name, num_embeddings=rows, embedding_dim=8, feature_names=(f"f.{name}",), **more)


def load(snapshot: Snapshot, partition: Partition, options: CardOptions) -> CardEngine:
    card_set = CardSet(EmulatedCards(partition.num_cards), options)
    one = CardTableLoad(snapshot, partition, "", card_set, upload_bytes=1 << 14)
    engine = one.run(one.take(RowMemory())).engine
    assert isinstance(engine, CardEngine)
    return engine


def pool_rows(engine: CardEngine, card: int, table: int, rows: np.ndarray) -> Pooled:
    """Each row alone, asked of the kernel, past the checks that an engine makes before."""
    (arena,) = (one for one in engine._arenas if one.group.first_table <= table < one.group.end_table)
    run = Run(table - arena.group.first_table, [rows], "none")
    return pool_bags(engine.card_set.cards, card, arena.params[card], arena.format, [run])


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    return model_of(
        *(
            table_of(
                f"t{number}",
                draw(st.integers(1, 1500) | st.integers(4097, 9000)),
                dtype=draw(st.sampled_from(DTYPES)),
                bucketing=draw(st.sampled_from(["mixed", "hash", "range"])),
            )
            for number in range(draw(st.integers(1, 3)))
        )
    )


@given(spec=models(), data=st.data())
def test_every_row_of_a_node_is_found_and_rewritten_and_those_of_others_are_counted(spec, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    num_cards = data.draw(st.integers(1, 4))
    # Some of the buckets, all, or those of one card.
    first, last = data.draw(st.sampled_from([(-1, num_cards), (0, num_cards), (-1, 1), (0, 1), (-1, 0)]))
    rows_bytes = sum(48 * one.num_embeddings for one in spec.tables)
    options = CardOptions(
        card_memory_gb=(rows_bytes * data.draw(st.sampled_from([0.0, 0.2, 0.5, 3.0])) + (1 << 16)) / 1e9,
        hot_gb=data.draw(st.sampled_from([0.0, rows_bytes / 20e9, rows_bytes / 1e9, None])),
        pinned_memory_gb=1.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        snapshot = Snapshot.open(write_snapshot(Path(folder), spec, seed=1, rows_per_file=4096)[0])
        layout_tables = Plan.make(spec).layout.tables
        cards = tuple(rng.integers(first, last, num_buckets(one)).astype(np.int16) for one in layout_tables)
        engine = load(snapshot, Partition(num_cards, cards), options)
        card = data.draw(st.integers(0, num_cards - 1))
        for number, table in enumerate(layout_tables):
            codec = codec_for(table.dtype, table.embedding_dim)
            every, rows = np.arange(table.num_embeddings), rng.permutation(table.num_embeddings)
            here = cards[number][plain_buckets(table)] >= 0
            for stored in (
                snapshot.read_rows(table.name, 0, table.num_embeddings),
                codec.encode(rng.standard_normal((table.num_embeddings, 8)).astype(np.float32)),
            ):
                assert engine.write_rows(number, every, stored) == here.sum()
                pooled = pool_rows(engine, card, number, rows)
                expected = np.where(here[:, None], codec.decode(stored), 0)
                np.testing.assert_allclose(pooled.out, expected[rows], rtol=1e-6, atol=1e-6)
                assert (pooled.outside, pooled.not_here) == (0, np.count_nonzero(~here))
        engine.close()


def test_rows_are_found_as_loaded_before_anything_is_written(tmp_path):
    spec = model_of(table_of("m", 9000), table_of("h", 9000, bucketing="hash"), table_of("r", 9000, bucketing="range"))
    snapshot = Snapshot.open(write_snapshot(tmp_path, spec, seed=1, rows_per_file=4096)[0])
    for num_cards, options in (
        (3, AMPLE),
        (3, CardOptions(card_memory_gb=1e-4, hot_gb=1e-5, pinned_memory_gb=1.0)),
    ):
        tables = Plan.make(spec).layout.tables
        cards = tuple((np.arange(num_buckets(one)) % 5 - 2).astype(np.int16) for one in tables)
        cards = tuple(np.maximum(one, -1).astype(np.int16) for one in cards)
        engine = load(snapshot, Partition(num_cards, cards), options)
        for number, table in enumerate(tables):
            codec = codec_for(table.dtype, 8)
            here = cards[number][plain_buckets(table)] >= 0
            expected = np.where(here[:, None], codec.decode(snapshot.read_rows(table.name, 0, 9000)), 0)
            pooled = pool_rows(engine, 1, number, np.arange(9000))
            np.testing.assert_allclose(pooled.out, expected, rtol=1e-6, atol=1e-6)
            assert (pooled.outside, pooled.not_here) == (0, np.count_nonzero(~here))
        engine.close()


def loads_of_places(engine: CardEngine, table: int, rows: np.ndarray) -> int:
    """How many places of an engine's only arena the kernel reads to pool rows, each alone."""
    (arena,) = engine._arenas
    size_bytes = 4 * sum(one.rows for one in engine.plan.places)
    begin = arena.places_address(0, 0)
    return host_kernels().loads_from(begin, size_bytes, lambda: pool_rows(engine, 0, table, rows))


def loads_by_lookups(engine: CardEngine, table: int, rows: np.ndarray) -> tuple[int, int]:
    """How many places, and how many of the bytes at which rows begin, kernels read to pool rows, through the engine."""
    (arena,) = engine._arenas
    num_cards = engine.plan.num_cards
    bags = KeyedBags(
        np.array([table], np.int32), np.array([rows.size]), np.arange(rows.size + 1), rows.astype(np.int64)
    )
    # The engine's own lanes take turns, and each card has its own places.
    turns = POOLS_PER_CARD * num_cards

    def loads_from(addresses: list[int], size_bytes: int) -> int:
        def every_lane() -> None:
            for _ in range(turns):
                engine.pool(bags)

        loads = sum(host_kernels().loads_from(address, size_bytes, every_lane) for address in addresses)
        assert loads % turns == 0
        return loads // turns

    return (
        loads_from(
            [arena.places_address(card, 0) for card in range(num_cards)],
            4 * sum(one.rows for one in engine.plan.places),
        ),
        loads_from([params.starts for params in arena.params], 8 * len(engine.layout.tables) * (num_cards + 2)),
    )


@pytest.mark.parametrize("owner", ["card", "hot", "pinned"])
def test_neither_place_nor_start_is_read_of_a_table_that_lies_whole_at_one_owner(tmp_path, owner):
    spec = model_of(table_of("whole", 600), table_of("divided", 5000))
    snapshot = Snapshot.open(write_snapshot(tmp_path, spec, seed=1, rows_per_file=4096)[0])
    tables = Plan.make(spec).layout.tables
    owners = {"whole": np.zeros(4096), "divided": np.arange(4096) % 2}
    cards = tuple(owners[one.name].astype(np.int16) for one in tables)
    options, wanted = {
        "card": (AMPLE, 0),
        # Rows of both tables are looked up equally often, as far as is known: those of the smaller one more each.
        "hot": (CardOptions(card_memory_gb=1.0, hot_gb=600 * 16 / 1e9, pinned_memory_gb=1.0), hot_owner(2)),
        "pinned": (CardOptions(card_memory_gb=4 * 5000 / 1e9, hot_gb=0.0, pinned_memory_gb=1.0), pinned_owner(2)),
    }[owner]
    engine = load(snapshot, Partition(2, cards), options)
    whole = [one.name for one in tables].index("whole")
    assert engine.plan.places[whole].only_owner == wanted
    rows = np.arange(0, 600, 7)
    # A row of one chunk is one thread's.
    assert loads_by_lookups(engine, whole, rows) == (0, 0)
    if (divided := engine.plan.places[1 - whole]).only_owner is None:
        assert divided.rows == 5000
        places, starts = loads_by_lookups(engine, 1 - whole, rows)
        assert (places, starts >= rows.size) == (rows.size, True)
    engine.close()


def test_a_shard_keeps_places_of_its_own_rows_by_bucket_where_that_is_less(tmp_path):
    spec = model_of(table_of("t", 50_000))
    snapshot = Snapshot.open(write_snapshot(tmp_path, spec, seed=1, rows_per_file=16_384)[0])
    owners = np.arange(4096) % 8 - 6  # buckets 6 and 7 of 8 are here, on two cards
    cards = np.maximum(owners, -1).astype(np.int16)
    engine = load(snapshot, Partition(2, (cards,)), AMPLE)
    here = cards[plain_buckets(spec.tables[0])] >= 0
    assert engine.plan.places_bytes == 4 * int(here.sum()) + 8 * 4096
    rows = np.arange(0, 50_000, 11)
    assert loads_of_places(engine, 0, rows) == here[rows].sum()
    pooled = pool_rows(engine, 1, 0, rows)
    codec = codec_for("int8", 8)
    expected = np.where(here[:, None], codec.decode(snapshot.read_rows("t", 0, 50_000)), 0)[rows]
    np.testing.assert_allclose(pooled.out, expected, rtol=1e-6, atol=1e-6)
    assert (pooled.outside, pooled.not_here) == (0, np.count_nonzero(~here[rows]))
    engine.close()
