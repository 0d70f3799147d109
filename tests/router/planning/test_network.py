"""Bytes and times of lookups between shards: the textbook's figures, closed forms, and real frames."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.plan import Plan
from router.planning import inputs, network
from router.planning.inputs import ANY_NETWORK, NetworkOptions, TableLookups
from router.planning.network import (
    FleetLookups,
    NearRows,
    NetworkTime,
    ShardLookups,
    StoredLookups,
)
from shard_node import answer
from shard_node import split as split_module
from shard_node.answer import Answer, group_keys, rounded, travel_as_stored
from shard_node.bags import Bags
from shard_node.planning.hotness import Head, Hotness
from shard_node.split import split, whole
from shard_node.wire import messages
from shard_node.wire.messages import encode_answer, encode_pool
from shardrank_testing.card_plans import hotnesses, layout_of, layouts, one_table_layout
from shardrank_testing.snapshots import num_buckets, table_of


def layout_like(*tables, rows=10_000):
    return layout_of([table_of(f"t{n}", rows, dim, dtype=dtype) for n, (dim, dtype) in enumerate(tables)])


@pytest.mark.parametrize(("shards", "ids"), [(1, 7), (4, 1), (16, 20), (3, 5)])
def test_shards_hit_by_a_bag_are_those_of_random_bags(shards, ids):
    drawn = np.random.default_rng(5).integers(0, shards, (20_000, ids))
    hit = sum((drawn == shard).any(axis=1).sum() for shard in range(shards))
    assert TableLookups(0, 0, 0, ((ids, 20_000),)).bags_hit(shards) == pytest.approx(hit, rel=0.02)


def sent_evenly(layout, lookups, num_shards, *forms, hit_rate=0.0):
    """The lookups of every table, but for those that hot rows answer, divided evenly."""
    shares = np.full((len(lookups), num_shards), (1 - hit_rate) / num_shards)
    rows = Hotness().of(layout)
    stored = StoredLookups(layout, lookups, rows, NearRows.choose(layout, rows, "bytes", 0), *forms)
    return ShardLookups.of(stored, shares, np.zeros(len(lookups), np.bool_))


def drawn_bags(layout, rng, hotness, num_bags, *, ragged):
    lengths = [rng.integers(0 if ragged else ids, ids + 1, num_bags) for ids in hotness]
    counts = np.full(len(lengths), num_bags)
    flat = np.concatenate(lengths)
    values = rng.integers(0, layout.tables[0].num_embeddings, int(flat.sum()))
    return lengths, Bags.from_lengths(np.arange(len(lengths), dtype=np.int32), counts, flat, values)


def answer_of(layout, bags, sums="float16", *, stored=False):
    """A reply of the shape that cards give, or shards on CPUs, without its rows."""
    sums_of_groups, rows_of_groups = [], []
    for group, first, end in group_keys(layout, bags):
        counts, values = bags.bags_per_key[first:end], bags.values_per_key()[first:end]
        is_stored = travel_as_stored(group, values, counts) & stored
        pooled = np.zeros((int(counts @ ~is_stored), group.embedding_dim), np.float32)
        sums_of_groups.append(rounded(pooled, sums))
        rows_of_groups.append(np.zeros((int(values @ is_stored), group.row_bytes), np.uint8))
    return Answer(sums_of_groups, rows_of_groups if stored else None)


def lookups_of(lengths, batches):
    """Bags, int64 [bags] for each table, of so many batches together, as the mean of one."""
    counted = [np.unique(of_table, return_counts=True) for of_table in lengths]
    return [TableLookups(0, 0, 0, tuple(zip(ids, bags / batches, strict=True))) for ids, bags in counted]


TABLES = {
    "one": [(128, "int8")],
    "int8 of two dims": [(16, "int8"), (64, "int8"), (64, "int8")],
    "many": [(32, "int8")] * 20,
    "all dtypes": [(64, "int4"), (64, "int8"), (32, "fp16"), (16, "fp32")],
}


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize(("shards", "hotness"), [(2, 1), (2, 20), (4, 2), (8, 20)])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("sums", "stored"), [("float16", False), ("float16", True), ("int8", False)])
def test_estimated_bytes_are_those_of_real_frames(shards, hotness, tables, ragged, sums, stored):
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
            out += sum(map(len, encode_pool(1, 0, "", 3, part.bags)))
            back += sum(map(len, encode_answer(1, answer_of(layout, part.bags, sums, stored=stored))))
    lookups = lookups_of([np.concatenate(of_table) for of_table in zip(*all_lengths, strict=True)], num_draws)
    estimated = sent_evenly(layout, lookups, shards, ANY_NETWORK.model_copy(update={"sums": sums}), stored)
    assert estimated.requests.sum() == pytest.approx(out / num_draws, rel=0.01)
    # With ragged bags a shard is sent all bags of some batches, and only those with a value there of others.
    assert estimated.replies.sum() == pytest.approx(back / num_draws, rel=0.06 if ragged else 0.015)


def test_constants_are_those_of_split_and_messages():
    for name in ("MAX_MASKED_OWNERS", "MANY_VALUES", "NEARLY_ALL"):
        assert getattr(network, name) == getattr(split_module, name)
    assert network.SMALL_ARRAY_BYTES == messages.SMALL_ARRAY_BYTES
    assert get_args(inputs.SumFormat) == get_args(answer.SumFormat)


@pytest.mark.parametrize("sums", get_args(answer.SumFormat))
@pytest.mark.parametrize("dim", [4, 8, 9, 128])
def test_bytes_of_a_sum_are_those_of_its_format(sums, dim):
    pooled = answer.rounded(np.ones((3, dim), np.float32), sums)
    line = NetworkOptions(gb_per_s=1, latency_us=0, sums=sums)
    assert line.sum_bytes(dim) == pooled.nbytes / 3


@pytest.mark.parametrize(
    ("router_gb", "shard_gb", "expected_us"),
    [(1.0, None, (4.0, 8.0)), (1.0, 0.5, (6.0, 8.0)), (10.0, 0.5, (6.0, 6.0)), (10.0, 100.0, (0.4, 0.8))],
)
def test_the_slower_of_router_and_busiest_shard_binds(router_gb, shard_gb, expected_us):
    sizes = {"requests": np.array([1000.0, 3000.0]), "replies": np.array([2000.0, 3000.0, 3000.0])}
    sent = ShardLookups(*[np.zeros((1, 3))] * 2, np.ones(1, np.int64), 1.0, {}, **sizes)
    time = NetworkTime.of(sent, NetworkOptions(gb_per_s=router_gb, shard_gb_per_s=shard_gb, latency_us=7))
    assert (time.out_us, time.back_us) == pytest.approx(expected_us)
    assert time.alone_us == pytest.approx(sum(expected_us) + 7)
    assert time.busy_us == pytest.approx(max(expected_us))


def test_rows_travel_as_stored_from_cpus_where_that_takes_no_more():
    layout = layout_like((128, "int8"), (128, "int8"))
    lookups = [TableLookups(600, 600, 1, ((1.0, 600.0),)), TableLookups(6000, 600, 10, ((10.0, 600.0),))]
    sent = sent_evenly(layout, lookups, 2, ANY_NETWORK, True)
    assert sent.parts["stored"].sum() == pytest.approx(600 * 136)
    assert sent.parts["sums"].sum() == pytest.approx(1200 * 256, rel=0.01)
    assert sent_evenly(layout, lookups, 2).parts["stored"].sum() == 0


def fleet_of(layout, rows, owners, num_shards, lookups=None):
    lookups = lookups or [TableLookups(0, 0, 0, ((1.0, 1.0),))] * len(rows)
    stored = StoredLookups(layout, lookups, rows, NearRows.choose(layout, rows, "bytes", 0))
    return FleetLookups(Plan(layout, num_shards, 1, "hash", owners), stored)


@given(layout=layouts(), data=st.data())
def test_every_lookup_goes_to_one_shard_or_the_router(layout, data):
    rows = data.draw(hotnesses(layout, np.random.default_rng(3))).of(layout)
    shards = data.draw(st.integers(1, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    owners = [rng.integers(0, shards, num_buckets(one)).astype(np.int16) for one in layout.tables]
    owners[0] = np.full_like(owners[0], -1)
    hot = NearRows.choose(layout, rows, "bytes", data.draw(st.integers(0, 10_000)))
    sent = fleet_of(layout, rows, owners, shards).sent(hot)
    assert sent.turns.tolist() == [shards] + [1] * (len(owners) - 1)
    looked_up = [one.lookups.any() for one in rows]
    np.testing.assert_allclose(1 - sent.values.sum(axis=1)[looked_up], hot.hit_rates[looked_up], atol=1e-9)


def test_a_replicated_table_is_sent_to_one_shard_a_batch():
    layout = layout_like((8, "int8"), (8, "int8"))
    rows = Hotness().of(layout)
    buckets = num_buckets(layout.tables[0])
    lookups = [TableLookups(1000, 100, 10, ((10, 100),))] * 2
    fleet = fleet_of(layout, rows, (np.full(buckets, -1), np.arange(buckets) % 4), 4, lookups)
    sent = fleet.sent(fleet.stored.near)
    np.testing.assert_allclose(sent.values.sum(axis=1), 1000)
    assert sent.hit[0].sum() == pytest.approx(100)
    # Of the second table, four shards are sent its number and its number of bags.
    assert sent.parts["keys"].sum() == pytest.approx(12 * (1 + 4))
    assert sent.hit[1].sum() == pytest.approx(lookups[1].bags_hit(4), rel=1e-3)
    np.testing.assert_allclose(sent.values[:, 2], 250, rtol=1e-2)
    np.testing.assert_allclose(fleet.part(2, sent)[0], [250, 25, 10])


def test_hot_rows_are_the_hottest_for_their_bytes():
    layout = layout_like((8, "int8"), (128, "int8"), rows=100)
    counts = {"t0": np.arange(100, dtype=np.uint32), "t1": np.arange(100, dtype=np.uint32)}
    rows = Hotness(counts).of(layout)
    by_rows = NearRows.choose(layout, rows, "bytes", 160)
    # Rows of t1 have 136 bytes, of t0 16.
    assert by_rows.num_rows == 10
    assert by_rows.size_bytes == 160
    assert by_rows.hit_rate == pytest.approx(sum(range(90, 100)) / 4950 / 2, rel=0.01)
    assert NearRows.choose(layout, rows, "bytes", 0).hit_rate == 0
    everything = NearRows.choose(layout, rows, "bytes", 100 * (16 + 136))
    assert everything.hit_rate == pytest.approx(1)
    assert all((one == 0).all() for one in everything.missed)
    half = NearRows.choose(layout, rows, "hit rate", 0.5)
    assert half.hit_rate == pytest.approx(0.5)
    assert half.size_bytes < everything.size_bytes / 8


@pytest.mark.parametrize("rows", [100, 1000, 5000])
def test_a_head_has_its_share_of_the_lookups(rows):
    layout = one_table_layout(2_000_000_000, 128, "fp32")
    found = NearRows.choose(layout, Hotness(zipf=1.1, head=Head(5000, 0.85)).of(layout), "bytes", rows * 512)
    harmonic = np.cumsum(np.arange(1, 5001) ** -1.1)
    assert found.hit_rate == pytest.approx(0.85 * harmonic[rows - 1] / harmonic[-1] + 0.15 * rows / 2e9, abs=1e-5)
