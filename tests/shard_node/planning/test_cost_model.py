"""Bytes and times of lookups on cards: closed forms, and every lookup counted once."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shard_node.cuda
from shard_node.cuda.kernel_params import RowFormat, owners_of
from shard_node.planning.card_plan import CARD, HOST, HOT, CardBudget, CardPlan
from shard_node.planning.cost_model import (
    ROWS_IN_FLIGHT,
    SYSTEMS,
    Traffic,
    batch_time,
    sector_bytes,
    tier_shares,
)
from shard_node.planning.hotness import Hotness
from shardrank_testing.card_plans import layouts, one_table_layout, places_of, plan_inputs, round_robin

H100 = SYSTEMS["h100"]
AMPLE = 1 << 40


def loads_of(layout, values=1000.0, bags=100.0, longest=20.0):
    return np.array([[values, bags, longest]] * len(layout.tables))


@given(layout=layouts(max_rows=600), data=st.data())
def test_shares_are_those_of_counting_every_row(layout, data):
    num_cards = data.draw(st.integers(1, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    # Counts below 64 are levels of their own, so that nothing is averaged.
    counts = {one.name: rng.integers(0, 64, one.num_embeddings, np.uint32) for one in layout.tables}
    partition = round_robin(layout, num_cards)
    for cards in partition.card_of_bucket:
        cards[::7] = -1
    total = sum(one.num_embeddings * RowFormat.of(one.dtype, one.embedding_dim).stride for one in layout.tables)
    room = 4 * sum(one.num_embeddings for one in layout.tables)
    budget = CardBudget((room + total // (2 * num_cards),) * num_cards, total, total // 20)
    plan = CardPlan.make(layout, partition, budget, Hotness(counts))
    shares = tier_shares(plan)
    for number, table in enumerate(layout.tables):
        owners = owners_of(places_of(plan, number), num_cards)
        of_owner = np.bincount(owners, weights=counts[table.name], minlength=num_cards + 3)
        all_counts = max(1, counts[table.name].sum())
        if not counts[table.name].any():
            continue
        tiers = shares[number].sum(axis=0) * all_counts
        assert tiers[HOT] == pytest.approx(of_owner[num_cards])
        assert tiers[HOST] == pytest.approx(of_owner[num_cards + 1])
        np.testing.assert_allclose(shares[number, :, CARD] * all_counts, of_owner[:num_cards], atol=1e-6)


@given(inputs=plan_inputs())
def test_every_lookup_and_its_bytes_are_counted_once(inputs):
    plan = CardPlan.make(*inputs)
    layout = plan.layout
    loads = loads_of(layout)
    traffic = Traffic.of(plan, loads, H100)
    here = tier_shares(plan).sum(axis=(1, 2))
    counted = traffic.hot + traffic.local + traffic.peer + traffic.host
    np.testing.assert_allclose(counted, 1000.0 * here.sum())
    sectors = np.array([sector_bytes(RowFormat.of(one.dtype, one.embedding_dim)) for one in layout.tables])
    beyond = traffic.peer_bytes.sum(axis=1) + traffic.host_bytes
    assert (traffic.peer_line_bytes >= traffic.peer_bytes.sum(axis=1) - 1e-6).all()
    assert (np.diag(traffic.peer_bytes) == 0).all()
    dims = sum(one.embedding_dim for one in layout.tables)
    ids = 4 * 1000.0 * here.sum() + 4 * 100 * len(layout.tables)
    rows = 1000.0 * (here @ sectors)
    placed = 32 * 1000.0 * here[[one.only_owner is None for one in plan.places]].sum()
    np.testing.assert_allclose(traffic.hbm_bytes + beyond, rows + ids + placed + 2 * 100 * dims)


def test_uniform_ids_are_at_peers_but_for_one_of_n():
    layout = one_table_layout(256 * 100, 128)
    plan = CardPlan.make(layout, round_robin(layout, 8), CardBudget((AMPLE,) * 8, 0, 0), Hotness())
    traffic = Traffic.of(plan, np.array([[8000.0, 400.0, 20.0]]), H100)
    np.testing.assert_allclose(traffic.local, 1000)
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
    traffic = Traffic.of(plan, np.zeros((1, 3)), H100)
    assert traffic.hbm_bytes.sum() == traffic.peer_bytes.sum() == traffic.upload_bytes == traffic.launches == 0
    time = batch_time(traffic, H100)
    assert time.alone_us == H100.host.latency_us
    assert time.batches_per_s == time.lookups_per_s == 0


def test_rows_in_flight_are_those_of_the_kernel():
    source = (Path(shard_node.cuda.__file__).parent / "kernels.cu").read_text(encoding="utf-8")
    (number,) = re.findall(r"ROWS_IN_FLIGHT = (\d+);", source)
    assert int(number) == ROWS_IN_FLIGHT


def plan_of(num_cards, *, card_bytes=AMPLE, pinned=0, hot=0, zipf=0.0, rows=256 * 1000):
    layout = one_table_layout(rows, 128)
    budget = CardBudget((card_bytes,) * num_cards, pinned, hot)
    return CardPlan.make(layout, round_robin(layout, num_cards), budget, Hotness(zipf=zipf))


def test_one_card_is_bound_by_its_memory():
    time = batch_time(Traffic.of(plan_of(1), np.array([[1e7, 1e5, 100.0]]), H100), H100)
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
    time = batch_time(Traffic.of(plan, np.array([[1e6, 1e4, 100.0]]), H100), H100)
    assert time.host_us == pytest.approx(1e6 * 200 / 63e3)
    assert time.busy_bound == "host link"
    ids_us = 4 * (1e6 + 1e4) * (1 + 20 / 128) / 63e3
    assert time.busy_us == pytest.approx(max(time.host_us + ids_us, 8 * 1e6 * 160 / 614.4e3))


def test_a_short_batch_is_bound_by_latency():
    time = batch_time(Traffic.of(plan_of(1), np.array([[100.0, 1.0, 100.0]]), H100), H100)
    assert time.bound == "latency"
    assert time.latency_us == pytest.approx(2 * 0.7 + 25 * 0.7)
