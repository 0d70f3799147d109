"""Observed access counts: right in the mean, bounded in memory and time, and of use to placement."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.access_counts import AccessCounter, merged_by_table
from shard_node.access_counts import HALF_LIFE, MAX_ROWS, MIN_QUEUED, TABLE_SHIFT, LookupSampler, hottest_rows
from shard_node.bags import TableLayout
from shardrank_testing.card_plans import one_table_layout
from shardrank_testing.snapshots import make_spec


def counting_all(layout, max_keys=MAX_ROWS, half_life=HALF_LIFE, min_queued=MIN_QUEUED, **more):
    counter = AccessCounter(max_keys, min_queued, half_life)
    return LookupSampler(layout, np.random.default_rng(0), **{"sample_every": 1, "counter": counter} | more)


def observe_rows(counts, rows, table=0):
    counts.observe(np.array([table]), np.array([len(rows)]), np.asarray(rows))


@given(data=st.data())
def test_every_value_is_counted_at_its_row(data):
    layout = TableLayout.of(make_spec())
    counts = counting_all(layout)
    expected = [np.zeros(table.num_embeddings, np.int64) for table in layout.tables]
    for _ in range(data.draw(st.integers(1, 3))):
        tables = np.array(data.draw(st.lists(st.integers(0, 4), max_size=6)), np.int64)
        values = [data.draw(st.lists(st.integers(0, layout.tables[t].num_embeddings - 1), max_size=8)) for t in tables]
        for table, rows in zip(tables, values, strict=True):
            np.add.at(expected[table], rows, 1)
        lengths = np.array([len(rows) for rows in values], np.int64)
        counts.observe(tables, lengths, np.array([row for rows in values for row in rows], np.int64))
    found = counts.counts()
    assert bool(found) == any(of_table.any() for of_table in expected)
    for table, of_table in zip(layout.tables, expected, strict=True):
        if found:
            np.testing.assert_array_equal(found[table.name][:], of_table)


@pytest.mark.parametrize("sample_every", [1, 3, 64])
def test_one_batch_in_so_many_is_counted(sample_every):
    layout = one_table_layout(10)
    counts = counting_all(layout, sample_every=sample_every)
    for window in range(1, 6):
        for _ in range(sample_every):
            observe_rows(counts, [4])
        assert counts.counts()["items"][:].tolist() == [0, 0, 0, 0, window, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("num_values", [1000, 1001, 1499, 2500, 40_000])
def test_a_large_batch_is_counted_by_a_sample(num_values):
    layout = one_table_layout(4)
    counts = counting_all(layout, max_values=1000)
    # A quarter row 0, in an order that any stride would meet out of step.
    rows = np.arange(num_values) % 4
    for _ in range(50):
        observe_rows(counts, rows)
    seen = counts.counts()["items"][:]
    assert seen.sum() == pytest.approx(50 * num_values, rel=0.15)
    np.testing.assert_allclose(seen / seen.sum(), [0.25] * 4, atol=0.01)


def test_the_hot_rows_of_a_large_table_keep_their_counts():
    rows = 10_000_000
    counts = counting_all(one_table_layout(rows), max_keys=50_000, max_values=100_000)
    rng = np.random.default_rng(5)
    hot = rng.choice(rows, 100, replace=False)
    for _ in range(20):
        observe_rows(counts, np.concatenate([rng.integers(0, rows, 20_000), np.repeat(hot, 100)]))
        counts.counts()
    found = counts.counts()["items"]
    assert (found.shape, found[:1].dtype, found.keys.size) == ((rows,), np.uint32, 50_000)
    by_row = found[0:rows]
    np.testing.assert_allclose(by_row[hot], 2000, atol=2)
    assert np.delete(by_row, hot).max() <= 4
    np.testing.assert_array_equal(found[7_000_000:7_000_500], by_row[7_000_000:7_000_500])
    assert found[rows:].size == 0


def test_estimated_lookups_of_several_places_add_up():
    layout = one_table_layout(4)
    # One place counts one batch in four, one all and forgets most of them, one was never asked.
    sampled, idle = counting_all(layout, sample_every=4), counting_all(layout)
    aged = counting_all(layout, half_life=1000)
    for _ in range(400):
        observe_rows(sampled, [0] * 3 + [1])
        observe_rows(aged, [2] * 9 + [1])
        aged.counts()
    assert aged._counter.total < 2000
    merged = merged_by_table(place.estimated_lookups() for place in (sampled, aged, idle))
    np.testing.assert_allclose(merged["items"][:], [1200, 800, 3600, 0], rtol=0.1)
    assert (sampled.lookups, aged.lookups, idle.lookups) == (1600, 4000, 0)


def test_a_full_queue_is_counted_on_a_thread():
    """What comes while the queue is full is not counted, but its lookups are."""
    counts = counting_all(one_table_layout(100), min_queued=4096)
    while not counts._counter.total:
        observe_rows(counts, [7] * 1000)
    assert 4096 <= counts._counter.total <= counts.lookups
    assert counts.estimated_lookups()["items"].total == counts.lookups


@given(st.lists(st.lists(st.integers(0, 2000), min_size=1, max_size=60), min_size=1, max_size=3), st.integers(0, 4000))
def test_the_hottest_rows_that_fit_have_the_most_lookups_for_a_byte(tables, max_bytes):
    """As by sorting all rows, but for those whose counts differ by less than a thousandth."""
    counted = {number: (np.array(counts, np.uint32), 8.0 * (number + 1)) for number, counts in enumerate(tables)}
    hottest = hottest_rows(counted, max_bytes, lambda table, rows: rows % 7 != 3)
    keys = {number << TABLE_SHIFT | row for number, of in enumerate(tables) for row in range(len(of)) if row % 7 != 3}
    assert hottest.tolist() == sorted(set(hottest.tolist()))
    assert set(hottest.tolist()) <= keys

    def density(key: int) -> float:
        counts, row_bytes = counted[key >> TABLE_SHIFT]
        return float(counts[key & 0xFFFFFFFF]) / row_bytes

    used = sum(counted[key >> TABLE_SHIFT][1] for key in hottest.tolist())
    others = [key for key in keys - set(hottest.tolist()) if density(key)]
    assert used <= max_bytes
    if others and hottest.size:
        assert min(map(density, hottest.tolist())) >= 0.999 * max(map(density, others)) or used + 24 > max_bytes
    assert not others or used + counted[max(others) >> TABLE_SHIFT][1] + 24 > max_bytes


def test_without_room_or_counts_no_row_is_hot():
    assert hottest_rows({}, 100).tolist() == []
    assert hottest_rows({0: (np.zeros(5, np.uint32), 8.0)}, 100).tolist() == []
    assert hottest_rows({0: (np.array([3, 1], np.uint32), 8.0)}, 7).tolist() == []
    assert hottest_rows({1: (np.array([0, 1, 9], np.uint32), 8.0)}, 8).tolist() == [(1 << TABLE_SHIFT) + 2]
