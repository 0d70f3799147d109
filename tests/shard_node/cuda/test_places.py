"""Every row has exactly one place: the slots of an owner are used up, and nothing is placed twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_node.cuda import places as placer_module
from shard_node.cuda.kernel_params import (
    MAX_CARDS,
    NOT_HERE,
    encode_places,
    hot_owner,
    max_slots,
    owners_of,
    pinned_owner,
    slots_of,
)
from shard_node.cuda.places import Placer
from shard_node.errors import MemoryBudgetError
from shard_node.partition import Partition
from shard_node.planning import card_plan
from shard_node.planning.card_plan import CardBudget, CardPlan, TableSplit
from shard_node.planning.hotness import Hotness
from shardrank_testing.card_plans import make_plan, one_table_layout, plan_inputs, strides
from shardrank_testing.snapshots import num_buckets, plain_buckets


@given(inputs=plan_inputs(), piece_rows=st.integers(1, 700))
def test_every_row_has_its_planned_owner_and_the_next_slot(inputs, piece_rows):
    plan = make_plan(inputs)
    placer = Placer(plan)
    for number, table in enumerate(plan.layout.tables):
        places = placer.places(number)
        assert (places.dtype, places.shape) == (np.uint32, (table.num_embeddings,))
        owners = owners_of(places, plan.num_cards)
        for owner in range(plan.num_cards + 2):
            slots = slots_of(places[owners == owner], plan.num_cards)
            assert slots.tolist() == list(range(plan.slots[number, owner]))
        card = plan.partition.card_of_bucket[number][plain_buckets(table)]
        np.testing.assert_array_equal(places == NOT_HERE, card < 0)
        on_card = owners < plan.num_cards
        np.testing.assert_array_equal(owners[on_card], card[on_card])
        hot, pinned = (owners == hot_owner(plan.num_cards)).sum(), (owners == pinned_owner(plan.num_cards)).sum()
        assert plan.splits[number] == TableSplit(hot, on_card.sum(), pinned)
        if (only := plan.places[number].only_owner) is not None:
            assert (owners == only).all()
            assert slots_of(places, plan.num_cards).tolist() == list(range(table.num_embeddings))
        pieces = list(placer.pieces(number, piece_rows))
        assert [first for first, _ in pieces] == list(range(0, table.num_embeddings, piece_rows))
        np.testing.assert_array_equal(np.concatenate([piece for _, piece in pieces]), places)


@given(inputs=plan_inputs())
def test_planned_bytes_are_those_of_the_placed_rows(inputs):
    plan = make_plan(inputs)
    placer = Placer(plan)
    row_strides = strides(plan.layout)
    placed = np.zeros(plan.num_cards + 3, np.int64)
    for number, stride in enumerate(row_strides):
        placed += stride * np.bincount(owners_of(placer.places(number), plan.num_cards), minlength=plan.num_cards + 3)
    for card in range(plan.num_cards):
        assert plan.bytes(card).card == placed[card]
        assert plan.bytes(card).hot == placed[hot_owner(plan.num_cards)]
        assert plan.bytes(card).places == sum(least_places_bytes(plan, number) for number in range(len(row_strides)))
    assert plan.pinned_bytes == placed[pinned_owner(plan.num_cards)]
    for owner in range(plan.num_cards + 2):
        assert sum(placer.rows_bytes(group)[owner] for group in plan.layout.groups) == placed[owner]


def least_places_bytes(plan, number):
    """None for a table at one owner; else 4 for each row, or 4 for each row here and 8 for each bucket."""
    if plan.places[number].only_owner is not None:
        return 0
    table = plan.layout.tables[number]
    here = int((plan.partition.card_of_bucket[number][plain_buckets(table)] >= 0).sum())
    return min(4 * table.num_embeddings, 4 * here + 8 * num_buckets(table))


@pytest.mark.parametrize("num_cards", range(1, MAX_CARDS + 1))
def test_no_place_is_a_code(num_cards):
    owners = np.arange(num_cards + 2)
    places = encode_places(owners, np.full(owners.size, max_slots(num_cards) - 1, np.int64), num_cards)
    assert places.max() < NOT_HERE - 1  # which kernels use too
    np.testing.assert_array_equal(owners_of(places, num_cards), owners)
    assert set(slots_of(places, num_cards).tolist()) == {max_slots(num_cards) - 1}
    assert owners_of(np.array([NOT_HERE], np.uint32), num_cards).tolist() == [num_cards + 2]


def test_rows_beyond_the_slots_of_a_place_go_to_pinned_memory():
    rows = 2**30 + 5
    layout = one_table_layout(rows)
    partition = Partition(1, (np.zeros(4096, np.int16),))
    hotness = Hotness()
    with pytest.raises(MemoryBudgetError, match=r"6 rows are left over.* at most 1073741823 rows of one table"):
        CardPlan.make(layout, partition, CardBudget((2**40,), 0), hotness)
    plan = CardPlan.make(layout, partition, CardBudget((2**40,), 2**40), hotness)
    assert plan.splits == (TableSplit(0, 2**30 - 1, 6),)


@given(inputs=plan_inputs(), limit=st.integers(300, 1500))
def test_no_owner_exceeds_the_slots_of_a_place(inputs, limit):
    layout, partition, budget, hotness = inputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card_plan, "max_slots", lambda num_cards: limit)
        try:
            plan = CardPlan.make(layout, partition, budget, hotness)
        except MemoryBudgetError:  # more rows than cards and pinned memory have slots for
            return
    assert plan.slots.max() <= limit
    assert all(plan.bytes(card).total <= budget.card_bytes[card] for card in range(plan.num_cards))


def test_row_numbers_near_2_to_the_32_are_placed():
    # Only some rows are asked for. The last ones count as the first of their level, which are on cards.
    rows = 2**32 - 1
    layout = one_table_layout(rows, bucketing="hash")
    # Every second row is on this node.
    buckets = np.arange(256)
    partition = Partition(64, (np.where(buckets % 2, -1, buckets // 2 % 64).astype(np.int16),))
    budget = CardBudget((4 * 2**31 + 8 * 256 + 16 * 2**25,) * 64, 2**40, 16 * 2**18)
    plan = CardPlan.make(layout, partition, budget, Hotness(zipf=1.05))
    card_rows = 64 * (2**25 - 2**18)
    assert plan.splits == (TableSplit(2**18, card_rows, 2**31 - 2**18 - card_rows),)
    walk = placer_module._Walk(plan, 0)
    for first, is_hot in ((0, True), (2**24, False), (rows - 1001, False)):
        places = walk.place(first, first + 1000)
        own = np.arange(first, first + 1000, 2) // 2 % 64
        assert (places[1::2] == NOT_HERE).all()
        assert (owners_of(places[::2], 64) == (hot_owner(64) if is_hot else own)).all()
