"""Times of batches: closed forms by hand, and which way they go when a bandwidth does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_node.planning.card_plan import CardBudget, CardPlan
from shard_node.planning.cost_model import SYSTEMS, BagLoad, Traffic, batch_time
from shard_node.planning.hotness import Hotness
from shardrank_testing.card_plans import make_plan, one_table_layout, plan_inputs, round_robin

H100 = SYSTEMS["h100"]
AMPLE = 1 << 40


def plan_of(num_cards, *, card_bytes=AMPLE, pinned=0, hot=0, zipf=0.0, rows=256 * 1000):
    layout = one_table_layout(rows, 128)
    budget = CardBudget((card_bytes,) * num_cards, pinned, hot)
    return CardPlan.make(layout, round_robin(1, num_cards), budget, Hotness(zipf=zipf))


def test_one_card_that_has_all_rows_takes_what_its_memory_takes():
    load = BagLoad(1e7, 1e5, 100.0)
    time = batch_time(Traffic.of(plan_of(1), [load], H100), H100)
    hbm_us = (1e7 * (160 + 36) + 1e5 * (4 + 256)) / 3015e3
    assert time.hbm_us == pytest.approx(hbm_us)
    assert time.bound == "card memory"
    # Rows of int8 are so short that ids over PCIe take longer than rows from the card's memory.
    assert time.busy_bound == "host link"
    upload_us = 4 * (1e7 + 1e5) * (1 + 20 / 128) / 63e3
    assert time.alone_us == pytest.approx(hbm_us + upload_us + 2.5 + 4)
    assert time.lookups_per_s == pytest.approx(1e7 / max(hbm_us, upload_us) * 1e6)


def test_uniform_ids_without_copies_are_bound_by_nvlink():
    time = batch_time(Traffic.of(plan_of(8), [BagLoad(1e6, 1e4, 100.0)], H100), H100)
    assert time.peer_us == pytest.approx(0.875e6 * 224 / 450e3)
    assert time.bound == time.busy_bound == "peers"
    assert time.busy_us == pytest.approx(time.peer_us)
    assert time.batches_per_s == pytest.approx(8e6 / time.peer_us)


def test_the_card_that_owns_the_hottest_rows_is_the_bound_of_all():
    skewed = Traffic.of(plan_of(8, zipf=1.2), [BagLoad(1e6, 1e4, 100.0)], H100)
    time = batch_time(skewed, H100)
    served = skewed.peer_bytes.sum(axis=0).max()
    assert served > 2 * skewed.peer_bytes.sum(axis=1).max()
    assert time.busy_us == pytest.approx(served * 224 / 160 / 450e3)
    with_copies = batch_time(Traffic.of(plan_of(8, zipf=1.2, hot=10_000_000), [BagLoad(1e6, 1e4, 100.0)], H100), H100)
    assert with_copies.busy_us < time.busy_us / 3


def test_pinned_rows_share_the_hosts_memory_and_the_link_with_ids():
    # Only places fit on the cards.
    plan = plan_of(8, card_bytes=4 * 256_000, pinned=AMPLE)
    time = batch_time(Traffic.of(plan, [BagLoad(1e6, 1e4, 100.0)], H100), H100)
    assert time.host_us == pytest.approx(1e6 * 200 / 63e3)
    assert time.busy_bound == "host link"
    ids_us = 4 * (1e6 + 1e4) * (1 + 20 / 128) / 63e3
    assert time.busy_us == pytest.approx(max(time.host_us + ids_us, 8 * 1e6 * 160 / 614.4e3))


def test_a_short_batch_with_a_long_bag_is_bound_by_latency():
    time = batch_time(Traffic.of(plan_of(1), [BagLoad(100.0, 1.0, 100.0)], H100), H100)
    assert time.bound == "latency"
    assert time.latency_us == pytest.approx(2 * 0.7 + 25 * 0.7)


def test_a_batch_that_asks_for_nothing_takes_only_what_calls_take():
    time = batch_time(Traffic.of(plan_of(2), [BagLoad(0, 0, 0)], H100), H100)
    assert time.alone_us == H100.host.latency_us
    assert time.batches_per_s == time.lookups_per_s == 0


@settings(deadline=None)
@given(inputs=plan_inputs(), way=st.sampled_from(["hbm", "peer", "host", "memory"]), factor=st.floats(1.0, 16.0))
def test_a_faster_way_never_makes_a_batch_slower(inputs, way, factor):
    plan = make_plan(inputs)
    if way == "hbm":
        change = {"hbm_gb_per_s": H100.hbm_gb_per_s * factor}
    elif way == "memory":
        change = {"host_memory_gb_per_s": H100.host_memory_gb_per_s * factor}
    else:
        link = getattr(H100, way)
        change = {way: link.model_copy(update={"gb_per_s": link.gb_per_s * factor})}
    faster = H100.model_copy(update=change)
    loads = [BagLoad(1e5, 1e3, 50.0)] * len(plan.layout.tables)
    before, after = (batch_time(Traffic.of(plan, loads, one), one) for one in (H100, faster))
    assert after.alone_us <= before.alone_us * (1 + 1e-12)
    assert after.busy_us <= before.busy_us * (1 + 1e-12)


@settings(deadline=None)
@given(inputs=plan_inputs(), factor=st.floats(1.0, 100.0))
def test_more_lookups_never_take_less_time(inputs, factor):
    plan = make_plan(inputs)
    few = [BagLoad(1e3, 1e2, 10.0)] * len(plan.layout.tables)
    many = [BagLoad(1e3 * factor, 1e2 * factor, 10.0)] * len(plan.layout.tables)
    before, after = (batch_time(Traffic.of(plan, loads, H100), H100) for loads in (few, many))
    assert after.alone_us >= before.alone_us * (1 - 1e-12)
    np.testing.assert_allclose(after.busy_us, before.busy_us * factor)


def test_systems_are_named_by_their_keys():
    assert all(name == one.name for name, one in SYSTEMS.items())
