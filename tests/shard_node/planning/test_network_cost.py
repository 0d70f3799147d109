"""Bytes that sharded lookups send: closed forms, frames of real splits, and where shares and hot rows come from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.snapshot.tables import TableSpec
from shard_node import split as split_module
from shard_node.answer import Answer, Forms, travel_as_stored
from shard_node.bags import KeyedBags
from shard_node.planning import network_cost
from shard_node.planning.cost_model import BagLoad
from shard_node.planning.hotness import Head, Hotness
from shard_node.planning.network_cost import (
    AskedShards,
    BatchBags,
    NearRows,
    Network,
    NetworkBytes,
    NetworkTime,
    SentLookups,
    WireForm,
    crossover_hit_rate,
    moved_bytes,
    shards_hit,
)
from shard_node.split import split, whole
from shard_node.wire import messages
from shard_node.wire.messages import encode_answer, encode_pool
from shardrank_testing.card_plans import hotnesses, layout_of, layouts, one_table_layout
from shardrank_testing.snapshots import num_buckets

MODEL = "shop"
LOOKUPS, ROW_BYTES = 65_536 * 40, 512


def layout_like(*tables, rows=10_000):
    return layout_of(
        [
            TableSpec(name=f"t{number}", num_embeddings=rows, embedding_dim=dim, dtype=dtype, feature_names=(f"f{number}",))  # noqa: E501
            for number, (dim, dtype) in enumerate(tables)
        ]
    )  # fmt: skip


@pytest.mark.parametrize(("shards", "ids", "hit_rate"), [(1, 7, 0), (4, 1, 0), (4, 40, 0.9), (16, 20, 0.5), (3, 5, 1)])
def test_shards_hit_by_a_bag_are_those_of_random_bags(shards, ids, hit_rate):
    rng = np.random.default_rng(5)
    drawn = np.where(rng.random((20_000, ids)) < hit_rate, -1, rng.integers(0, shards, (20_000, ids)))
    hit = np.mean([(drawn == shard).any(axis=1) for shard in range(shards)]) * shards
    assert shards_hit(shards, ids, hit_rate) == pytest.approx(hit, rel=0.02)


def sent_evenly(num_tables, num_shards, hit_rate=0.0):
    """The lookups of every table, but for those that hot rows answer, divided evenly."""
    shares = np.full((num_tables, num_shards), (1 - hit_rate) / num_shards)
    return SentLookups(shares, np.zeros(num_tables, np.bool_))


def drawn_bags(layout, rng, hotness, num_bags, *, ragged):
    lengths = [rng.integers(0 if ragged else ids, ids + 1, num_bags) for ids in hotness]
    counts = np.full(len(lengths), num_bags)
    flat = np.concatenate(lengths)
    values = rng.integers(0, layout.tables[0].num_embeddings, int(flat.sum()))
    return lengths, KeyedBags.from_lengths(np.arange(len(lengths), dtype=np.int32), counts, flat, values)


def answer_of(layout, bags, forms):
    """An answer of the shape that an engine gives, without its rows."""
    sums, stored = [], []
    dtype = np.float16 if forms.float16 else np.float32
    for group in layout.groups:
        here = (bags.keys >= group.first_table) & (bags.keys < group.end_table)
        values, counts = bags.values_per_key()[here], bags.bags_per_key[here]
        is_stored = travel_as_stored(group, values, counts) & forms.stored
        sums.append(np.zeros((int(counts[~is_stored].sum()), group.embedding_dim), dtype))
        stored.append(np.zeros((int(values[is_stored].sum()), group.row_bytes), np.uint8))
    return Answer(sums, stored if forms.stored else None)


def frame_bytes(buffers):
    return sum(len(one) for one in buffers)


TABLES = {
    "one": [(128, "int8")],
    "int8 of two dims": [(16, "int8"), (64, "int8"), (64, "int8")],
    "many": [(32, "int8")] * 20,
    "all dtypes": [(64, "int4"), (64, "int8"), (32, "fp16"), (16, "fp32")],
}


@pytest.mark.parametrize("forms", [Forms(stored=True, float16=True), Forms(stored=True), Forms(float16=True)])
@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize(("shards", "hotness"), [(1, 1), (2, 20), (4, 2), (8, 20)])
@pytest.mark.parametrize("ragged", [False, True])
def test_estimated_bytes_are_those_of_real_frames(shards, hotness, tables, forms, ragged):
    layout = layout_like(*TABLES[tables])
    rng, num_draws = np.random.default_rng(17), 6
    out, back, all_lengths = 0, 0, []
    for _ in range(num_draws):
        lengths, bags = drawn_bags(layout, rng, [hotness] * len(layout.tables), 150, ragged=ragged)
        all_lengths.append(lengths)
        parts = [whole(bags)]
        if shards > 1:
            bags = bags.with_values(bags.values.astype(np.int32), None)
            parts = split(bags, rng.integers(0, shards, bags.num_values).astype(np.uint8), range(shards))
        for part in parts:
            out += frame_bytes(encode_pool(1, 0, MODEL, 3, part.bags, forms))
            back += frame_bytes(encode_answer(1, answer_of(layout, part.bags, forms)))
    form = WireForm(2 if forms.float16 else 4, forms.stored, model_bytes=len(MODEL))
    batch = BatchBags.counted([np.concatenate(of_table) for of_table in zip(*all_lengths, strict=True)], num_draws)
    estimated = NetworkBytes.of(layout, batch, sent_evenly(len(layout.tables), shards), form)
    assert estimated.out.sum() == pytest.approx(out / num_draws, rel=0.01)
    # With ragged bags some tables are near to where rows travel as stored, on either side of it from batch to batch.
    assert estimated.back.sum() == pytest.approx(back / num_draws, rel=0.06 if ragged else 0.015)


def test_constants_and_the_textbooks_step():
    for name in ("MAX_MASKED_OWNERS", "MANY_VALUES", "NEARLY_ALL"):
        assert getattr(network_cost, name) == getattr(split_module, name)
    assert network_cost.SMALL_ARRAY_BYTES == messages.SMALL_ARRAY_BYTES
    for hit_rate, megabytes in ((0, 1342.2), (0.5, 671.1), (0.85, 201.3), (0.99, 13.4)):
        moved = moved_bytes(LOOKUPS, ROW_BYTES, hit_rate)
        assert round(moved / 1e6, 1) == megabytes
        assert NetworkTime.of(0, moved, Network(gb_per_s=100, latency_us=0)).alone_us == pytest.approx(moved / 1e5)
    # The textbook's step is divided evenly: 16 shards, 40 ids a bag.
    layout = one_table_layout(10_000, 128, "fp32")
    batch = BatchBags.of([BagLoad(LOOKUPS, 65_536, 40)])
    step = NetworkBytes.of(layout, batch, sent_evenly(1, 16, 0.85), WireForm(4, stored=False))
    assert step.shards_hit == pytest.approx(shards_hit(16, 40, 0.85))
    assert step.sums.sum() == pytest.approx(65_536 * shards_hit(16, 40, 0.85) * 512)
    assert step.ids.sum() == pytest.approx(4 * LOOKUPS * 0.15)


def hotness_of(layout, zipf=0.0, head=None, lookups=None):
    return Hotness(zipf=zipf, head=head, lookups_per_sample=lookups or {}).of(layout)


def owners_of(layout, num_shards):
    return tuple((np.arange(num_buckets(one)) % num_shards).astype(np.int16) for one in layout.tables)


def sent_of(rows, owners, num_shards, hot=None):
    by_shard = [one.rows_by_owner(of_table, num_shards) for one, of_table in zip(rows, owners, strict=True)]
    return SentLookups.of(rows, owners, by_shard, hot)


@given(layout=layouts(), data=st.data())
def test_every_lookup_goes_to_one_shard_or_the_router(layout, data):
    rows = data.draw(hotnesses(layout, np.random.default_rng(3))).of(layout)
    shards = data.draw(st.integers(1, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    owners = [rng.integers(0, shards, num_buckets(one)).astype(np.int16) for one in layout.tables]
    owners[0] = np.full_like(owners[0], -1)
    hot = NearRows.choose(layout, rows, size_bytes=data.draw(st.integers(0, 10_000)))
    sent = sent_of(rows, owners, shards, hot)
    assert sent.takes_turns.tolist() == [True] + [False] * (len(owners) - 1)
    looked_up = [one.lookups.any() for one in rows]
    np.testing.assert_allclose(sent.hits[looked_up], hot.hit_rates[looked_up], atol=1e-9)


def test_a_replicated_table_is_sent_to_one_shard_a_batch():
    layout = layout_like((8, "int8"), (8, "int8"))
    rows = hotness_of(layout)
    owners = owners_of(layout, 4)
    sent = sent_of(rows, (np.full_like(owners[0], -1), owners[1]), 4)
    batch = BatchBags.of([BagLoad(1000, 100, 10)] * 2)
    asked = AskedShards.of(batch, sent)
    np.testing.assert_allclose(asked.values.sum(axis=1), 1000)
    assert asked.hit[0].sum() == pytest.approx(100)
    assert asked.is_there[0].sum() == pytest.approx(1)
    assert asked.hit[1].sum() == pytest.approx(100 * shards_hit(4, 10), rel=1e-3)
    assert [load.values for load in asked.loads(2, [BagLoad(1000, 100, 10)] * 2)] == pytest.approx([250, 250], rel=1e-2)


def test_hot_rows_are_the_hottest_for_their_bytes():
    layout = layout_like((8, "int8"), (128, "int8"), rows=100)
    counts = {"t0": np.arange(100, dtype=np.uint32), "t1": np.arange(100, dtype=np.uint32)}
    rows = Hotness(counts).of(layout)
    by_rows = NearRows.choose(layout, rows, num_rows=10)
    # Rows of t1 have 136 bytes, of t0 16.
    assert by_rows.rows.tolist() == [10, 0]
    assert by_rows.size_bytes == 160
    assert by_rows.hit_rate == pytest.approx(sum(range(90, 100)) / 4950 / 2, rel=0.01)
    assert NearRows.choose(layout, rows, size_bytes=0).hit_rate == 0
    everything = NearRows.choose(layout, rows, size_bytes=100 * (16 + 136))
    assert everything.hit_rate == pytest.approx(1)
    assert all((one == 0).all() for one in everything.missed)
    half = NearRows.choose(layout, rows, hit_rate=0.5)
    assert half.hit_rate == pytest.approx(0.5)
    assert half.size_bytes < everything.size_bytes / 8


@pytest.mark.parametrize("rows", [100, 1000, 5000])
def test_a_head_has_its_share_of_the_lookups(rows):
    layout = one_table_layout(2_000_000_000, 128, "fp32")
    found = NearRows.choose(layout, hotness_of(layout, 1.1, Head(5000, 0.85)), num_rows=rows)
    harmonic = np.cumsum(np.arange(1, 5001) ** -1.1)
    assert found.hit_rate == pytest.approx(0.85 * harmonic[rows - 1] / harmonic[-1] + 0.15 * rows / 2e9, abs=1e-5)


def test_the_crossover_is_where_both_take_as_long():
    for limit, hit_rate in ((30, 0.75), (200, 0), (5, None)):
        assert crossover_hit_rate(lambda rate: 100 * (1 - rate) + 5, limit) == pytest.approx(hit_rate)
