"""Kernels find every row of a node and no other, by formula or place, for reading and for writing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loader.snapshot.codecs import codec_for
from loader.snapshot.manifest import FeatureSpec, ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import TableSpec
from router.plan import Plan
from shard_node.cuda.card_engine import CardEngine
from shard_node.cuda.card_loading import CardTableLoad
from shard_node.cuda.card_set import CardOptions, CardSet
from shard_node.engine.memory import RowMemory
from shard_node.partition import Partition
from shardrank_testing.card_plans import DTYPES
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.kernel_arena import Pooled, Run, pool_bags
from shardrank_testing.snapshots import DEFAULT_DENSE_MODEL, num_buckets, plain_buckets, write_snapshot


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
def test_rows_of_a_node_are_found_and_others_counted(spec, data):
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
            written = codec.encode(rng.standard_normal((table.num_embeddings, 8)).astype(np.float32))
            for stored in (snapshot.read_rows(table.name, 0, table.num_embeddings), written):
                if stored is written:
                    assert engine.write_rows(number, every, stored) == here.sum()
                pooled = pool_rows(engine, card, number, rows)
                expected = np.where(here[:, None], codec.decode(stored), 0)
                np.testing.assert_allclose(pooled.out, expected[rows], rtol=1e-6, atol=1e-6)
                assert (pooled.outside, pooled.not_here) == (0, np.count_nonzero(~here))
        engine.close()
