"""Card plans: within their budgets, as full as these allow, the hottest rows nearest; and evenly dealt buckets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shard_node.buckets import Partition
from shard_node.cuda.kernel_params import owners_of
from shard_node.errors import MemoryBudgetError
from shard_node.planning import card_plan
from shard_node.planning.card_plan import CARD, HOST, HOT, CardBudget, CardPlan, Owners, deal
from shard_node.planning.hotness import Head, Hotness, PartOfRanks, RankedRows, ranked_share
from shardrank_testing.card_plans import (
    hotnesses,
    layout_of,
    layouts,
    one_table_layout,
    places_bytes,
    places_of,
    plan_inputs,
    round_robin,
    strides,
)
from shardrank_testing.snapshots import num_buckets, one_table_spec, plain_buckets, table_of

ROW = 16  # bytes of an int8 row of dim 8 on a card


def one_table_plan(rows, card_rows, pinned_rows, *, num_cards=1, counts=None, **more):
    """The plan of one table, with budgets in rows."""
    layout = one_table_layout(rows)
    hotness = Hotness() if counts is None else Hotness({"items": counts})
    card_bytes = (places_bytes(layout) + ROW * card_rows,) * num_cards
    budget = CardBudget(card_bytes, ROW * pinned_rows, **{"peer_access": True} | more)
    return CardPlan.make(layout, round_robin(layout, num_cards), budget, hotness)


@given(inputs=plan_inputs())
def test_budgets_are_used_up_and_never_exceeded(inputs):
    """Cards are filled to the last row before pinned memory is used."""
    layout, partition, budget, hotness = inputs
    plan = CardPlan.make(*inputs)
    largest = max(strides(layout))
    for card, card_bytes in enumerate(budget.card_bytes):
        assert plan.bytes(card).total <= card_bytes
        assert budget.hot_bytes is None or plan.bytes(card).hot <= budget.hot_bytes
        if (plan.num_cards == 1 or budget.peer_access) and plan.tier_rows[:, card, HOST:].any():
            assert card_bytes - plan.bytes(card).total < largest
    assert plan.pinned_bytes <= budget.pinned_bytes
    if plan.num_cards == 1:
        assert not plan.tier_rows[:, :, HOT].any()
    elif not budget.peer_access:
        assert not plan.tier_rows[:, :, CARD].any()
    total = sum(table.num_embeddings * stride for table, stride in zip(layout.tables, strides(layout), strict=True))
    enough = CardBudget((places_bytes(layout) + total,) * partition.num_cards, 0)
    assert CardPlan.make(layout, partition, enough, hotness).pinned_bytes == 0
    again = CardPlan.make(*inputs)
    np.testing.assert_array_equal(again.tier_rows, plan.tier_rows)


@given(inputs=plan_inputs())
def test_no_row_is_in_a_nearer_tier_than_a_hotter_one(inputs):
    plan = CardPlan.make(*inputs)
    lookups_per_byte = np.concatenate(
        [
            rows.lookups[rows.levels(0, table.num_embeddings)] / stride
            for rows, table, stride in zip(plan.hotness, plan.layout.tables, strides(plan.layout), strict=True)
        ]
    )
    places = [places_of(plan, number) for number in range(len(plan.layout.tables))]
    owners = np.concatenate([owners_of(one, plan.num_cards) for one in places]).astype(int)
    card = np.concatenate(
        [plan.partition.card_of_bucket[number][plain_buckets(table)] for number, table in enumerate(plan.layout.tables)]
    )
    tier = np.select([owners == plan.num_cards, owners < plan.num_cards], [HOT, CARD], default=HOST)

    def coldest(chosen):
        return lookups_per_byte[chosen].min(initial=np.inf)

    def hottest(chosen):
        return lookups_per_byte[chosen].max(initial=-np.inf)

    here = card >= 0
    assert coldest(here & (tier == HOT)) >= hottest(here & (tier > HOT))
    for one in range(plan.num_cards):
        of_card = here & (card == one)
        assert coldest(of_card & (tier == CARD)) >= hottest(of_card & (tier > CARD))


@pytest.mark.parametrize(
    ("plan", "split"),
    [
        # 40 rows on each card, room for 60: of x hot rows, half are this card's already, so x / 2 more fit.
        ({"rows": 80, "card_rows": 60, "pinned_rows": 0, "num_cards": 2, "counts": np.arange(80)}, (40, 40, 0)),
        # A sixteenth of a card is hot if not all rows fit.
        ({"rows": 10_000, "card_rows": 1600, "pinned_rows": 3900, "num_cards": 4}, (100, 6000, 3900)),
        # Without peer access cards are filled with copies.
        ({"rows": 1000, "card_rows": 300, "pinned_rows": 700, "num_cards": 4, "peer_access": False}, (300, 0, 700)),
        # Rows that were never looked up are not copied.
        ({"rows": 100, "card_rows": 100, "pinned_rows": 0, "num_cards": 4, "counts": np.arange(100) == 7}, (1, 99, 0)),
    ],
)
def test_how_many_rows_are_hot(plan, split):
    counts = plan.get("counts")
    made = one_table_plan(**plan | {"counts": None if counts is None else counts.astype(np.uint32)})
    assert made.tier_rows.sum(axis=1).tolist() == [list(split)]


def test_copies_drive_no_row_off_the_cards(monkeypatch):
    monkeypatch.setattr(card_plan, "max_slots", lambda num_cards: 70)
    layout = one_table_layout(100, bucketing="range")
    # Rows 0 to 59 are card 0's.
    partition = Partition(2, (np.where(np.arange(256) < 60, 0, 1).astype(np.int16),))
    budget = CardBudget((places_bytes(layout) + 74 * ROW, places_bytes(layout) + 200 * ROW), 0)
    plan = CardPlan.make(layout, partition, budget, Hotness())
    assert plan.tier_rows[0, :, HOT].sum() > 14
    assert plan.bytes(0).total > budget.card_bytes[0] - 3 * ROW


@given(inputs=plan_inputs())
def test_a_plan_with_less_pinned_memory_is_refused(inputs):
    layout, partition, budget, hotness = inputs
    plan = CardPlan.make(*inputs)
    exact = replace(budget, pinned_bytes=plan.pinned_bytes)
    np.testing.assert_array_equal(CardPlan.make(layout, partition, exact, hotness).tier_rows, plan.tier_rows)
    assume(plan.pinned_bytes)
    with pytest.raises(MemoryBudgetError, match=f"and pinned memory {plan.pinned_bytes - 1}: .* are left over"):
        CardPlan.make(layout, partition, replace(exact, pinned_bytes=plan.pinned_bytes - 1), hotness)


def test_places_are_counted_before_hot_copies():
    layout = layout_of([table_of("a", 2, 2), table_of("b", 124, 2, bucketing="range")])
    rng = np.random.default_rng(5152601)
    partition = Partition(7, tuple(rng.integers(-1, 7, num_buckets(one)).astype(np.int16) for one in layout.tables))
    budget = CardBudget((548, 527, 555, 512, 519, 535, 589), 1600, hot_bytes=16, peer_access=True)
    plan = CardPlan.make(layout, partition, budget, Hotness(lookups_per_sample={"a": 40.0}))
    # With places of the larger table alone a row is hot, and two more are left over than there is pinned memory for.
    assert plan.pinned_bytes == 1600
    assert plan.tier_rows.sum(axis=1).tolist() == [[0, 1, 1], [0, 11, 99]]


@pytest.mark.parametrize(
    ("num_cards", "budget", "message"),
    [
        (65, CardBudget((10**6,) * 65, 0), "65 cards; allowed: 1 to 64"),
        (
            2,
            CardBudget((4160, 4160), 1600),
            r"rows take 16000 bytes, beside 0 of places .* \[4160, 4160\] and pinned memory 1600: 6336 bytes of 396",
        ),
        (2, CardBudget((4000, 3999), 9600), "card 1 may take 3999 bytes, but places take 4000"),
    ],
)
def test_impossible_plans_are_refused(num_cards, budget, message):
    layout = one_table_layout(1000)
    with pytest.raises(MemoryBudgetError, match=message):
        CardPlan.make(layout, round_robin(layout, num_cards), budget, Hotness())


@st.composite
def levels_of_tables(draw):
    layout = draw(layouts())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return layout, draw(hotnesses(layout, rng))


@given(inputs=levels_of_tables(), data=st.data())
def test_levels_are_counted_row_by_row(inputs, data):
    layout, hotness = inputs
    for table, rows in zip(layout.tables, hotness.of(layout), strict=True):
        levels = rows.levels(0, table.num_embeddings)
        assert (levels.dtype, levels.shape) == (np.uint16, (table.num_embeddings,))
        first = data.draw(st.integers(0, table.num_embeddings))
        end = data.draw(st.integers(first, table.num_embeddings))
        np.testing.assert_array_equal(rows.levels(first, end), levels[first:end])
        owner_of_bucket = np.random.default_rng(end).integers(-1, 3, num_buckets(table)).astype(np.int16)
        for owners in (owner_of_bucket, np.zeros_like(owner_of_bucket), np.full_like(owner_of_bucket, -1)):
            expected = np.zeros((rows.lookups.size, 4), np.int64)
            np.add.at(expected, (levels.astype(int), owners[plain_buckets(table)]), 1)
            np.testing.assert_array_equal(rows.rows_by_owner(owners, 3), expected[:, :3])
        np.testing.assert_array_equal(rows.rows(), np.bincount(levels, minlength=rows.lookups.size))
        assert (np.diff(rows.lookups) <= 0).all()
        assert (rows.lookups >= 0).all()


@given(counts=st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 200), min_size=1, max_size=200))
def test_a_level_has_the_counts_of_nearly_one_size(counts):
    layout = one_table_layout(len(counts))
    rows = Hotness({"items": np.array(counts, np.uint32)}).of(layout)[0]
    levels = rows.levels(0, len(counts))
    lookups = rows.lookups[levels]
    for count, lookup in zip(counts, lookups.tolist(), strict=True):
        if count < 64:
            assert lookup == count
        else:
            assert lookup == pytest.approx(count, rel=0.017)
    # A higher count is never on a colder level.
    order = np.argsort(counts, kind="stable")
    assert (np.diff(levels[order].astype(int)) <= 0).all()
    assert sorted(set(levels.tolist())) == list(range(rows.lookups.size))


@given(rows=st.integers(1, 20_000), exponent=st.sampled_from([0.0, 0.3, 1.0, 1.05, 2.0]))
def test_levels_of_a_power_law_hold_all_lookups(rows, exponent):
    layout = one_table_layout(rows)
    of_table = Hotness(lookups_per_sample={"items": 7.0}, zipf=exponent).of(layout)[0]
    levels = of_table.levels(0, rows).astype(int)
    assert (np.diff(levels) >= 0).all()
    lookups = of_table.lookups[levels]
    assert lookups.sum() == pytest.approx(7.0)
    mass = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    np.testing.assert_allclose(np.cumsum(lookups)[:4], 7 * np.cumsum(mass)[:4] / mass.sum(), rtol=0.05)
    # Each level has its ranks' share.
    share = np.bincount(levels, weights=mass) / mass.sum()
    np.testing.assert_allclose(np.bincount(levels, weights=lookups), 7 * share, rtol=1e-6)


@pytest.mark.parametrize("head", [None, Head(1200, 0.7), Head(900, 0.7)])
@pytest.mark.parametrize("zipf", [0.0, 1.05])
def test_rows_of_a_part_rank_after_hotter_parts(zipf, head):
    before, rows, num_rows = 1000, 500, 2000
    part = RankedRows(one_table_spec(rows).tables[0], 50.0, zipf, head, PartOfRanks(before, num_rows))
    first = num_rows if head is None else head.rows
    each = np.arange(1, num_rows + 1) ** -zipf * (np.arange(num_rows) < first)
    each /= each.sum()
    if head is not None:
        each = head.share * each + (1 - head.share) / num_rows
    own = each[before : before + rows]
    share = ranked_share(np.array([before, before + rows]), num_rows, zipf, head)
    assert float(np.diff(share)[0]) == pytest.approx(own.sum())
    expected = np.add.reduceat(own, np.cumsum([0, *part.rows()[:-1]])) * 50 / own.sum()
    np.testing.assert_allclose(part.lookups * part.rows(), expected, rtol=1e-6)


def test_tables_without_counts_use_lookups_per_sample():
    layout = layout_of([table_of("counted", 100), table_of("other", 100)])
    # 600 lookups in the counted table, 3 a sample: 200 samples, which look up the other 2 * 200 times.
    counts = np.full(100, 6, np.uint32)
    hotness = Hotness({"counted": counts}, {"counted": 3.0, "other": 2.0})
    by_name = {rows.table.name: rows.lookups.tolist() for rows in hotness.of(layout)}
    assert by_name["counted"] == [6.0]
    assert by_name["other"] == pytest.approx([4.0])


buckets = st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 1000)), min_size=1, max_size=64)


@given(
    tables=st.lists(buckets, min_size=1, max_size=4),
    num_owners=st.integers(1, 9),
)
def test_every_bucket_has_one_owner(tables, num_owners):
    loads = [np.array([load for load, _ in table]) for table in tables]
    sizes = [np.array([size for _, size in table], np.int64) for table in tables]
    owners = Owners.empty([10**9] * num_owners)
    given_to = deal(loads, sizes, owners, range(num_owners))
    assert [one.size for one in given_to] == [one.size for one in loads]
    assert all((one >= 0).all() and (one < num_owners).all() for one in given_to)
    used = np.zeros(num_owners, np.int64)
    for owner, size in zip(given_to, sizes, strict=True):
        used += np.bincount(owner, size, num_owners).astype(np.int64)
    assert owners.used.tolist() == used.tolist()
    assert owners.free.tolist() == (10**9 - used).tolist()
    again = deal(loads, sizes, Owners.empty([10**9] * num_owners), range(num_owners))
    assert all((one == other).all() for one, other in zip(given_to, again, strict=True))


@given(
    seed=st.integers(0, 2**32),
    num_owners=st.integers(1, 40),
    num_tables=st.integers(1, 5),
    count=st.sampled_from([256, 4096]),
)
def test_no_owner_exceeds_the_mean_by_more_than_one_bucket(seed, num_owners, num_tables, count):
    rng = np.random.default_rng(seed)
    loads = [rng.pareto(1.05, count) * rng.random() for _ in range(num_tables)]
    sizes = [np.full(count, int(rng.integers(1, 10_000)), np.int64) for _ in range(num_tables)]
    owners = Owners.empty([1 << 60] * num_owners)
    deal(loads, sizes, owners, range(num_owners))
    largest = max(float(one.max()) for one in loads)
    assert owners.load.max() <= owners.load.mean() + largest


def test_many_tables_are_even_in_load_and_bytes():
    rng = np.random.default_rng(1)
    loads, sizes = [], []
    for _ in range(200):
        load = rng.pareto(1.05, 4096)
        loads.append(load * (rng.random() / load.sum()))
        sizes.append(np.full(4096, int(rng.integers(1, 5000)) * 144, np.int64))
    owners = Owners.empty([int(sum(size.sum() for size in sizes) / 32 * 1.05)] * 32)
    deal(loads, sizes, owners, range(32))
    assert owners.load.max() <= 1.01 * owners.load.mean()
    assert owners.free.min() >= 0
    # What owners have already counts.
    owners = Owners.empty([1 << 40] * 2)
    owners.give(0, 100.0, 0)
    deal([np.ones(256)], [np.ones(256, np.int64)], owners, range(2))
    assert owners.load.tolist() == [211.0, 145.0]


def test_buckets_without_rows_have_an_owner_that_has_rows():
    sizes = np.array([5, 5, 5, 0, 0], np.int64)
    (owner,) = deal([np.zeros(5)], [sizes], Owners.empty([5, 5, 5]), range(3))
    assert sorted(owner[:3].tolist()) == [0, 1, 2]
    assert owner[3] == owner[4] == owner[2]


@pytest.mark.parametrize("loads", [np.zeros(4), np.full(4, 10.0)])
def test_what_does_not_fit_is_refused(loads):
    with pytest.raises(MemoryBudgetError, match="left over"):
        deal([loads], [np.full(4, 10, np.int64)], Owners.empty([15, 15, 9]), range(3))
