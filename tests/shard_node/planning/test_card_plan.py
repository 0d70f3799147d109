"""Plans: within their budgets, as full as these allow, and the hottest rows nearest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given

from loader.snapshot.tables import TableSpec
from shard_node.cuda.kernel_params import hot_owner, owners_of, pinned_owner
from shard_node.cuda.places import Placer
from shard_node.errors import InvalidBagsError, MemoryBudgetError
from shard_node.partition import Partition
from shard_node.planning import card_plan
from shard_node.planning.card_plan import CARD, HOST, HOT, CardBudget, CardPlan, TableSplit
from shard_node.planning.hotness import Hotness
from shardrank_testing.card_plans import (
    layout_of,
    make_plan,
    one_table_layout,
    places_bytes,
    plan_inputs,
    round_robin,
    strides,
)
from shardrank_testing.snapshots import num_buckets, plain_buckets

ROW = 16  # bytes of an int8 row of dim 8 on a card

TEN_ROWS = one_table_layout(10)
TWO_TABLES = layout_of(
    [TableSpec(name=name, num_embeddings=10, embedding_dim=8, feature_names=(f"f.{name}",)) for name in ("a", "b")]
)


def one_table_plan(rows, card_rows, pinned_rows, *, num_cards=1, counts=None, **more):
    """The plan of one table, with budgets in rows."""
    layout = one_table_layout(rows)
    hotness = Hotness() if counts is None else Hotness({"items": counts})
    card_bytes = (places_bytes(layout) + ROW * card_rows,) * num_cards
    budget = CardBudget(card_bytes, ROW * pinned_rows, **{"peer_access": True} | more)
    return CardPlan.make(layout, round_robin(layout, num_cards), budget, hotness)


@given(inputs=plan_inputs())
def test_budgets_are_never_exceeded(inputs):
    _, _, budget, _ = inputs
    plan = make_plan(inputs)
    for card, card_bytes in enumerate(budget.card_bytes):
        assert plan.bytes(card).total <= card_bytes
        assert budget.hot_bytes is None or plan.bytes(card).hot <= budget.hot_bytes
    assert plan.pinned_bytes <= budget.pinned_bytes


@given(inputs=plan_inputs())
def test_cards_are_filled_to_the_last_row_before_pinned_memory_is_used(inputs):
    layout, _, budget, _ = inputs
    plan = make_plan(inputs)
    largest = max(strides(layout))
    if plan.num_cards == 1 or budget.peer_access:
        for card in range(plan.num_cards):
            if plan.tier_rows[:, card, HOST:].any():
                assert budget.card_bytes[card] - plan.bytes(card).total < largest


@given(inputs=plan_inputs())
def test_no_row_is_in_a_nearer_tier_than_a_hotter_one(inputs):
    plan = make_plan(inputs)
    lookups_per_byte = np.concatenate(
        [
            rows.lookups[rows.levels(0, table.num_embeddings)] / stride
            for rows, table, stride in zip(plan.hotness, plan.layout.tables, strides(plan.layout), strict=True)
        ]
    )
    places = [Placer(plan).places(number) for number in range(len(plan.layout.tables))]
    owners = np.concatenate([owners_of(one, plan.num_cards) for one in places]).astype(int)
    card = np.concatenate(
        [plan.partition.card_of_bucket[number][plain_buckets(table)] for number, table in enumerate(plan.layout.tables)]
    )
    tier = np.select([owners == hot_owner(plan.num_cards), owners < plan.num_cards], [HOT, CARD], default=HOST)

    def coldest(chosen):
        return lookups_per_byte[chosen].min(initial=np.inf)

    def hottest(chosen):
        return lookups_per_byte[chosen].max(initial=-np.inf)

    here = card >= 0
    assert coldest(here & (tier == HOT)) >= hottest(here & (tier > HOT))
    for one in range(plan.num_cards):
        of_card = here & (card == one)
        assert coldest(of_card & (tier == CARD)) >= hottest(of_card & (tier > CARD))


@given(inputs=plan_inputs())
def test_within_a_level_the_lower_row_of_a_card_is_nearer(inputs):
    plan = make_plan(inputs)
    placer = Placer(plan)
    for number, table in enumerate(plan.layout.tables):
        levels = plan.hotness[number].levels(0, table.num_embeddings).astype(int)
        owners = owners_of(placer.places(number), plan.num_cards).astype(int)
        rows = np.arange(table.num_embeddings)
        buckets = plain_buckets(table)
        # Owners from the nearest on: hot, its own, pinned, none.
        rank = {hot_owner(plan.num_cards): 0, pinned_owner(plan.num_cards): 2, plan.num_cards + 2: 3}
        tier = np.array([rank.get(int(owner), 1) for owner in owners])
        for card in range(plan.num_cards):
            of_card = plan.partition.card_of_bucket[number][buckets] == card
            in_order = np.lexsort((rows[of_card], levels[of_card]))
            assert (np.diff(tier[of_card][in_order]) >= 0).all()


@given(inputs=plan_inputs())
def test_rows_are_on_cards_alone_if_all_fit(inputs):
    layout, partition, _, hotness = inputs
    total = sum(table.num_embeddings * stride for table, stride in zip(layout.tables, strides(layout), strict=True))
    enough = CardBudget((places_bytes(layout) + total,) * partition.num_cards, 0)
    assert CardPlan.make(layout, partition, enough, hotness).pinned_bytes == 0


@given(inputs=plan_inputs())
def test_without_peer_access_no_row_is_on_only_one_of_several_cards(inputs):
    layout, partition, budget, hotness = inputs
    assume(partition.num_cards > 1)
    alone = CardBudget(budget.card_bytes, budget.pinned_bytes, budget.hot_bytes, peer_access=False)
    plan = CardPlan.make(layout, partition, alone, hotness)
    assert not plan.tier_rows[:, :, CARD].any()


@given(inputs=plan_inputs())
def test_nothing_is_hot_on_one_card(inputs):
    layout, partition, budget, hotness = inputs
    one = Partition(1, tuple(np.minimum(cards, 0) for cards in partition.card_of_bucket))
    plan = CardPlan.make(layout, one, CardBudget(budget.card_bytes[:1], budget.pinned_bytes, budget.hot_bytes), hotness)
    assert not plan.tier_rows[:, :, HOT].any()


def test_the_hottest_rows_are_hot_then_on_their_card_then_pinned():
    counts = np.random.default_rng(0).permutation(60).astype(np.uint32)
    plan = one_table_plan(60, 12, 40, num_cards=2, counts=counts, hot_bytes=4 * ROW)
    owners = owners_of(Placer(plan).places(0), 2)
    assert plan.splits == (TableSplit(4, 16, 40),)
    assert sorted(counts[owners == 2]) == [56, 57, 58, 59]
    for card in range(2):
        own = counts[(np.arange(60) % 2 == card) & (counts < 56)]
        assert sorted(counts[owners == card]) == sorted(own)[-8:]
    assert (owners < 3).sum() == 20
    assert (owners == 3).sum() == 40


def test_what_stays_free_beside_all_rows_is_for_hot_ones():
    # 40 rows on each card, room for 60: of x hot rows, half are this card's already, so x / 2 more fit.
    plan = one_table_plan(80, 60, 0, num_cards=2, counts=np.arange(80, dtype=np.uint32)[::-1].copy())
    assert plan.splits == (TableSplit(40, 40, 0),)
    assert [plan.bytes(card) for card in range(2)] == [(40 * ROW, 20 * ROW, 4 * 80)] * 2


def test_copies_drive_no_row_off_the_cards_even_where_a_table_may_not_be_hot_as_a_whole(monkeypatch):
    monkeypatch.setattr(card_plan, "max_slots", lambda num_cards: 70)
    layout = one_table_layout(100, bucketing="hash")
    # Rows 0 to 59 are card 0's.
    partition = Partition(2, (np.where(np.arange(256) < 60, 0, 1).astype(np.int16),))
    budget = CardBudget((places_bytes(layout) + 74 * ROW, places_bytes(layout) + 200 * ROW), 0)
    plan = CardPlan.make(layout, partition, budget, Hotness())
    assert plan.splits[0].hot_rows > 14
    assert plan.bytes(0).total > budget.card_bytes[0] - 3 * ROW


def test_a_sixteenth_of_a_card_is_hot_if_not_all_rows_fit():
    plan = one_table_plan(10_000, 1600, 3900, num_cards=4)
    assert plan.splits == (TableSplit(100, 6000, 3900),)


def test_without_peer_access_cards_are_filled_with_copies():
    assert one_table_plan(1000, 300, 700, num_cards=4, peer_access=False).splits == (TableSplit(300, 0, 700),)


def test_rows_that_were_never_looked_up_are_not_copied():
    counts = np.zeros(100, np.uint32)
    counts[7] = 1
    assert one_table_plan(100, 100, 0, num_cards=4, counts=counts).splits == (TableSplit(1, 99, 0),)


def test_of_tables_alike_the_one_with_more_lookups_per_byte_is_nearer():
    def table(name, rows, dim, features=1):
        names = tuple(f"{name}.{number}" for number in range(features))
        return TableSpec(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=names)

    layout = layout_of([table("wide", 100, 120), table("small", 100, 8), table("shared", 300, 8, 5)])
    # Only one of them is divided, and has places.
    budget = CardBudget((4 * 100 + 350 * ROW,), 1000 * ROW)
    plan = CardPlan.make(layout, round_robin(layout, 1), budget, Hotness())
    of = {one.name: split for one, split in zip(layout.tables, plan.splits, strict=True)}
    assert of == {
        "shared": TableSplit(0, 300, 0),
        "small": TableSplit(0, 50, 50),
        "wide": TableSplit(0, 0, 100),
    }
    plan = CardPlan.make(layout, round_robin(layout, 1), budget, Hotness(lookups_per_sample={"wide": 1000.0}))
    assert plan.splits[layout.index["wide"]] == TableSplit(0, 43, 57)


def test_two_thousand_million_rows_are_planned_without_one_being_looked_at():
    layout = one_table_layout(2_000_000_000, 128)
    budget = CardBudget((50 * 10**9,) * 8, 0)
    plan = CardPlan.make(layout, round_robin(layout, 8), budget, Hotness(zipf=1.05))
    assert plan.tier_rows.sum() == 2_000_000_000
    for card in range(8):
        assert 50 * 10**9 - 4 * 144 < plan.bytes(card).total <= 50 * 10**9


def test_the_same_inputs_give_the_same_plan():
    counts = np.random.default_rng(3).integers(0, 9, 5000).astype(np.uint32)
    one, other = (one_table_plan(5000, 300, 5000, num_cards=3, counts=counts) for _ in range(2))
    np.testing.assert_array_equal(Placer(one).places(0), Placer(other).places(0))


def test_rows_that_do_not_fit_are_refused_with_the_numbers():
    layout = one_table_layout(1000)
    budget = CardBudget((4000 + 160, 4000 + 160), 1600)
    with pytest.raises(
        MemoryBudgetError,
        match=r"rows take 16000 bytes, beside 0 of places .* \[4160, 4160\] and pinned memory 1600: 6336 bytes of "
        "396 rows are left over",
    ):
        CardPlan.make(layout, round_robin(layout, 2), budget, Hotness())


@given(inputs=plan_inputs())
def test_a_plan_takes_just_the_pinned_memory_that_it_needs_and_is_refused_with_less(inputs):
    layout, partition, budget, hotness = inputs
    plan = make_plan(inputs)
    exact = replace(budget, pinned_bytes=plan.pinned_bytes)
    np.testing.assert_array_equal(CardPlan.make(layout, partition, exact, hotness).tier_rows, plan.tier_rows)
    assume(plan.pinned_bytes)
    with pytest.raises(MemoryBudgetError, match=f"and pinned memory {plan.pinned_bytes - 1}: .* are left over"):
        CardPlan.make(layout, partition, replace(exact, pinned_bytes=plan.pinned_bytes - 1), hotness)


def test_rows_left_over_beside_more_hot_copies_fit_once_places_have_taken_their_room():
    small = TableSpec(name="a", num_embeddings=2, embedding_dim=2, feature_names=("f.a",))
    large = TableSpec(name="b", num_embeddings=124, embedding_dim=2, feature_names=("f.b",), bucketing="range")
    layout = layout_of([small, large])
    rng = np.random.default_rng(5152601)
    partition = Partition(7, tuple(rng.integers(-1, 7, num_buckets(one)).astype(np.int16) for one in layout.tables))
    budget = CardBudget((548, 527, 555, 512, 519, 535, 589), 1600, hot_bytes=16, peer_access=True)
    plan = CardPlan.make(layout, partition, budget, Hotness(lookups_per_sample={"a": 40.0}))
    # With places of the larger table alone a row is hot, and two more are left over than there is pinned memory for.
    assert plan.pinned_bytes == 1600
    assert plan.tier_rows.sum(axis=1).tolist() == [[0, 1, 1], [0, 11, 99]]


def test_a_card_without_room_for_places_is_refused_with_the_numbers():
    layout = one_table_layout(1000)
    with pytest.raises(MemoryBudgetError, match="card 1 may take 3999 bytes, but places take 4000"):
        CardPlan.make(layout, round_robin(layout, 2), CardBudget((4000, 3999), 600 * ROW), Hotness())


@pytest.mark.parametrize(
    ("partition", "budget", "message"),
    [
        (round_robin(TWO_TABLES, 2), CardBudget((10**6,) * 2, 0), "the partition is for 2 tables, the model has 1"),
        (round_robin(TEN_ROWS, 2), CardBudget((10**6,), 0), "card_bytes is for 1 cards, the partition for 2"),
        (round_robin(TEN_ROWS, 1), CardBudget((10**6,), -1), "bytes can't be negative"),
        (round_robin(TEN_ROWS, 1), CardBudget((10**6,), 0, -1), "bytes can't be negative"),
    ],
)
def test_a_plan_of_parts_that_do_not_fit_each_other_is_refused(partition, budget, message):
    with pytest.raises(InvalidBagsError, match=message):
        CardPlan.make(TEN_ROWS, partition, budget, Hotness())


def test_more_cards_than_the_kernel_knows_are_refused():
    layout = one_table_layout(10)
    with pytest.raises(MemoryBudgetError, match="65 cards; allowed: 1 to 64"):
        CardPlan.make(layout, round_robin(layout, 65), CardBudget((10**6,) * 65, 0), Hotness())
