"""Bytes and times of lookups, on cards and between shards: the textbook's figures, closed forms, and real frames."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shard_node.cuda
from shard_node import split as split_module
from shard_node.answer import Answer, Forms, travel_as_stored
from shard_node.bags import KeyedBags
from shard_node.cuda.kernel_params import RowFormat, hot_owner, owners_of, pinned_owner
from shard_node.cuda.places import Placer
from shard_node.errors import InvalidBagsError
from shard_node.planning import network_cost
from shard_node.planning.card_plan import CARD, HOST, HOT, CardBudget, CardPlan
from shard_node.planning.cost_model import (
    ROWS_IN_FLIGHT,
    SYSTEMS,
    BagLoad,
    Traffic,
    batch_time,
    sector_bytes,
    table_sizes,
    tier_shares,
)
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
from shardrank_testing.card_plans import hotnesses, layout_of, layouts, one_table_layout, plan_inputs, round_robin
from shardrank_testing.snapshots import num_buckets, table_of

H100 = SYSTEMS["h100"]
BILLIONS = 2_000_000_000
AMPLE = 1 << 40


def loads_of(layout, values=1000.0, bags=100.0, longest=20.0):
    return [BagLoad(values, bags, longest)] * len(layout.tables)


@pytest.mark.parametrize(
    ("dtype", "codes", "rows", "on_cards"),
    [("fp32", 1024e9, 1024e9, 1024e9), ("int8", 256e9, 272e9, 288e9), ("int4", 128e9, 136e9, 160e9)],
)
def test_bytes_of_two_billion_rows_of_128(dtype, codes, rows, on_cards):
    """Rows have a scale and a bias, on cards padding; places take 4 bytes."""
    assert table_sizes(BILLIONS, 128, dtype) == (codes, rows, on_cards, 8e9)


@given(layout=layouts(max_rows=600), data=st.data())
def test_shares_are_those_of_counting_every_row(layout, data):
    num_cards = data.draw(st.integers(1, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    # Counts below 64 are levels of their own, so that nothing is averaged.
    counts = {one.name: rng.integers(0, 64, one.num_embeddings, np.uint32) for one in layout.tables}
    partition = round_robin(layout, num_cards)
    for cards in partition.card_of_bucket:
        cards[::7] = -1
    total = sum(table_sizes(one.num_embeddings, one.embedding_dim, one.dtype).on_cards for one in layout.tables)
    room = 4 * sum(one.num_embeddings for one in layout.tables)
    budget = CardBudget((room + total // (2 * num_cards),) * num_cards, total, total // 20)
    plan = CardPlan.make(layout, partition, budget, Hotness(counts))
    shares = tier_shares(plan)
    placer = Placer(plan)
    for number, table in enumerate(layout.tables):
        owners = owners_of(placer.places(number), num_cards)
        of_owner = np.bincount(owners, weights=counts[table.name], minlength=num_cards + 3)
        all_counts = max(1, counts[table.name].sum())
        if not counts[table.name].any():
            continue
        tiers = shares[number].sum(axis=0) * all_counts
        assert tiers[HOT] == pytest.approx(of_owner[hot_owner(num_cards)])
        assert tiers[HOST] == pytest.approx(of_owner[pinned_owner(num_cards)])
        np.testing.assert_allclose(shares[number, :, CARD] * all_counts, of_owner[:num_cards], atol=1e-6)


@given(inputs=plan_inputs(), item_bytes=st.sampled_from([2, 4]))
def test_every_lookup_and_its_bytes_are_counted_once(inputs, item_bytes):
    plan = CardPlan.make(*inputs)
    layout = plan.layout
    loads = loads_of(layout)
    traffic = Traffic.of(plan, loads, H100, item_bytes)
    here = tier_shares(plan).sum(axis=(1, 2))
    counted = traffic.hot + traffic.own + traffic.peer + traffic.host
    np.testing.assert_allclose(counted, 1000.0 * here.sum())
    sectors = np.array([sector_bytes(RowFormat.of(one.dtype, one.embedding_dim)) for one in layout.tables])
    beyond = traffic.peer_bytes.sum(axis=1) + traffic.host_bytes
    assert (traffic.peer_line_bytes >= traffic.peer_bytes.sum(axis=1) - 1e-6).all()
    assert (np.diag(traffic.peer_bytes) == 0).all()
    dims = sum(one.embedding_dim for one in layout.tables)
    ids = 4 * 1000.0 * here.sum() + 4 * 100 * len(layout.tables)
    rows = 1000.0 * (here @ sectors)
    placed = 32 * 1000.0 * here[[one.only_owner is None for one in plan.places]].sum()
    np.testing.assert_allclose(traffic.hbm_bytes + beyond, rows + ids + placed + item_bytes * 100 * dims)


def test_uniform_ids_are_at_peers_but_for_one_of_n():
    layout = one_table_layout(256 * 100, 128)
    plan = CardPlan.make(layout, round_robin(layout, 8), CardBudget((AMPLE,) * 8, 0, 0), Hotness())
    traffic = Traffic.of(plan, [BagLoad(8000.0, 400.0, 20.0)], H100)
    np.testing.assert_allclose(traffic.own, 1000)
    np.testing.assert_allclose(traffic.peer, 7000)
    np.testing.assert_allclose(traffic.peer_bytes.sum(axis=1), 7000 * 160)
    np.testing.assert_allclose(traffic.peer_line_bytes, 7000 * 224)
    np.testing.assert_allclose(traffic.hbm_bytes, 1000 * 160 + 8000 * (32 + 4) + 400 * (4 + 2 * 128))
    assert traffic.upload_bytes == 4 * 8000 + 4 * 400
    # Five waits of four rows each, all but surely with one at a peer among them, after the ids and places.
    wait = 0.7 + (1 - (1 / 8) ** 4) * 0.8
    np.testing.assert_allclose(traffic.chain_us, 2 * 0.7 + 5 * wait)


def test_a_table_without_lookups_costs_nothing():
    layout = one_table_layout(1000, 16)
    hotness = Hotness(lookups_per_sample={"items": 0})
    plan = CardPlan.make(layout, round_robin(layout, 2), CardBudget((AMPLE,) * 2, 0), hotness)
    traffic = Traffic.of(plan, [BagLoad(0, 0, 0)], H100)
    assert traffic.hbm_bytes.sum() == traffic.peer_bytes.sum() == traffic.upload_bytes == traffic.launches == 0
    time = batch_time(traffic, H100)
    assert time.alone_us == H100.host.latency_us
    assert time.batches_per_s == time.lookups_per_s == 0
    with pytest.raises(InvalidBagsError, match="2 loads for 1 tables"):
        Traffic.of(plan, loads_of(layout) * 2, H100)


def test_rows_in_flight_are_those_of_the_kernel():
    source = (Path(shard_node.cuda.__file__).parent / "kernels.cu").read_text(encoding="utf-8")
    (number,) = re.findall(r"ROWS_IN_FLIGHT = (\d+);", source)
    assert int(number) == ROWS_IN_FLIGHT


def plan_of(num_cards, *, card_bytes=AMPLE, pinned=0, hot=0, zipf=0.0, rows=256 * 1000):
    layout = one_table_layout(rows, 128)
    budget = CardBudget((card_bytes,) * num_cards, pinned, hot)
    return CardPlan.make(layout, round_robin(layout, num_cards), budget, Hotness(zipf=zipf))


def test_one_card_is_bound_by_its_memory():
    load = BagLoad(1e7, 1e5, 100.0)
    time = batch_time(Traffic.of(plan_of(1), [load], H100), H100)
    # Its only table lies in row order: no place is read.
    hbm_us = (1e7 * (160 + 4) + 1e5 * (4 + 256)) / 3015e3
    assert time.hbm_us == pytest.approx(hbm_us)
    assert time.bound == "card memory"
    # Rows of int8 are so short that ids over PCIe take longer than rows from the card's memory.
    assert time.busy_bound == "host link"
    upload_us = 4 * (1e7 + 1e5) * (1 + 20 / 128) / 63e3
    assert time.alone_us == pytest.approx(hbm_us + upload_us + 2.5 + 4)
    assert time.lookups_per_s == pytest.approx(1e7 / max(hbm_us, upload_us) * 1e6)


def test_pinned_rows_share_the_host_link_with_ids():
    # Only places fit on the cards.
    plan = plan_of(8, card_bytes=4 * 256_000, pinned=AMPLE)
    time = batch_time(Traffic.of(plan, [BagLoad(1e6, 1e4, 100.0)], H100), H100)
    assert time.host_us == pytest.approx(1e6 * 200 / 63e3)
    assert time.busy_bound == "host link"
    ids_us = 4 * (1e6 + 1e4) * (1 + 20 / 128) / 63e3
    assert time.busy_us == pytest.approx(max(time.host_us + ids_us, 8 * 1e6 * 160 / 614.4e3))


def test_a_short_batch_is_bound_by_latency():
    time = batch_time(Traffic.of(plan_of(1), [BagLoad(100.0, 1.0, 100.0)], H100), H100)
    assert time.bound == "latency"
    assert time.latency_us == pytest.approx(2 * 0.7 + 25 * 0.7)


MODEL = "shop"
LOOKUPS, ROW_BYTES = 65_536 * 40, 512


def layout_like(*tables, rows=10_000):
    return layout_of([table_of(f"t{n}", rows, dim, dtype=dtype) for n, (dim, dtype) in enumerate(tables)])


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
            out += sum(map(len, encode_pool(1, 0, MODEL, 3, part.bags, forms)))
            back += sum(map(len, encode_answer(1, answer_of(layout, part.bags, forms))))
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


def owners_by_shard(layout, num_shards):
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
    rows = Hotness().of(layout)
    owners = owners_by_shard(layout, 4)
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
    found = NearRows.choose(layout, Hotness(zipf=1.1, head=Head(5000, 0.85)).of(layout), num_rows=rows)
    harmonic = np.cumsum(np.arange(1, 5001) ** -1.1)
    assert found.hit_rate == pytest.approx(0.85 * harmonic[rows - 1] / harmonic[-1] + 0.15 * rows / 2e9, abs=1e-5)


def test_the_crossover_is_where_both_take_as_long():
    for limit, hit_rate in ((30, 0.75), (200, 0), (5, None)):
        assert crossover_hit_rate(lambda rate: 100 * (1 - rate) + 5, limit) == pytest.approx(hit_rate)
