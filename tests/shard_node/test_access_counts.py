"""Observed access counts: right in the mean, bounded in memory and time, and of use to placement."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_node import access_counts as access_counts_module
from shard_node.access_counts import MAX_PART_ROWS, AccessCounts, merged_lookups
from shard_node.bags import TableLayout
from shard_node.errors import InvalidBagsError
from shardrank_testing.card_plans import one_table_layout
from shardrank_testing.snapshots import make_spec

SMALLEST_BYTES = 4 * access_counts_module.MIN_SKETCH_COUNTERS * 4


def counting_all(layout, **more):
    return AccessCounts(layout, np.random.default_rng(0), **{"sample_every": 1} | more)


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
    for table, found in zip(layout.tables, expected, strict=True):
        np.testing.assert_array_equal(counts.counts()[table.name], found)


@pytest.mark.parametrize("sample_every", [1, 3, 64])
def test_one_batch_in_so_many_is_counted(sample_every):
    layout = one_table_layout(10)
    counts = counting_all(layout, sample_every=sample_every)
    for window in range(1, 6):
        for _ in range(sample_every):
            observe_rows(counts, [4])
        assert counts.counts()["items"].tolist() == [0, 0, 0, 0, window, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("num_values", [1000, 1001, 1499, 2500, 40_000])
def test_a_large_batch_is_counted_by_a_sample(num_values):
    layout = one_table_layout(4)
    counts = counting_all(layout, max_values=1000)
    # A quarter row 0, in an order that any stride would meet out of step.
    rows = np.arange(num_values) % 4
    for _ in range(50):
        observe_rows(counts, rows)
    seen = counts.counts()["items"]
    assert seen.sum() == pytest.approx(50 * num_values, rel=0.15)
    np.testing.assert_allclose(seen / seen.sum(), [0.25] * 4, atol=0.01)


def test_a_sketch_finds_the_hot_rows_of_a_large_table():
    rows = 10_000_000
    counts = counting_all(one_table_layout(rows), max_bytes=1 << 20, max_values=100_000)
    rng = np.random.default_rng(5)
    hot = rng.choice(rows, 100, replace=False)
    for _ in range(20):
        observe_rows(counts, np.concatenate([rng.integers(0, rows, 20_000), np.repeat(hot, 100)]))
    found = counts.counts()["items"]
    assert found.shape == (rows,)
    assert found.dtype == np.uint32
    by_row = found[0:rows]
    np.testing.assert_allclose(by_row[hot], 2000, atol=40)
    # 400,000 others over 65,536 counters twice: what chance adds is taken off.
    others = np.delete(by_row, hot)
    assert np.percentile(others, 50) <= 1
    assert np.percentile(others, 99.9) <= 20
    np.testing.assert_array_equal(found[7_000_000:7_000_500], by_row[7_000_000:7_000_500])
    assert found[rows:].size == 0


@pytest.mark.parametrize("max_bytes", [SMALLEST_BYTES, 1 << 20])
@pytest.mark.parametrize("max_rows", [1, 333, MAX_PART_ROWS])
def test_parts_of_counts_join_to_all(max_bytes, max_rows):
    layout = one_table_layout(2000 if max_rows == 1 else 20_000)
    counts = counting_all(layout, max_bytes=max_bytes)
    num_rows = layout.tables[0].num_embeddings
    observe_rows(counts, np.random.default_rng(1).integers(0, num_rows, 3000))
    parts = [counts.part(0, first, max_rows) for first in range(0, num_rows, max_rows)]
    np.testing.assert_array_equal(np.concatenate([part.counts for part in parts]), counts.counts()["items"][:])
    assert {(part.table, part.num_tables, part.num_embeddings) for part in parts} == {("items", 1, num_rows)}
    assert {(part.lookups, part.total) for part in parts} == {(3000, 3000)}


def test_merged_counts_are_lookups(monkeypatch):
    monkeypatch.setattr(access_counts_module, "_HALVE_AT", 1000)
    layout = one_table_layout(4)
    # One place counts one batch in four, one all and halves them many times, one was never asked.
    sampled, halved, idle = counting_all(layout, sample_every=4), counting_all(layout), counting_all(layout)
    for _ in range(400):
        observe_rows(sampled, [0] * 3 + [1])
        observe_rows(halved, [2] * 9 + [1])
    merged = merged_lookups([one.part(0, 0) for one in (sampled, halved, idle)])
    np.testing.assert_allclose(merged, [1200, 800, 3600, 0], rtol=0.1)
    assert (sampled.lookups, halved.lookups, idle.lookups) == (1600, 4000, 0)


def test_limits_and_batches_during_another_count():
    with pytest.raises(InvalidBagsError, match=r"sample_every .* max_values .* max_bytes"):
        counting_all(one_table_layout(10), sample_every=0)
    counts = counting_all(one_table_layout(100))
    with counts._counting:
        observe_rows(counts, [7])
    assert not counts.counts()["items"].any()
    with pytest.raises(InvalidBagsError, match="counts of different rows can't be added"):
        merged_lookups([counts.part(0, 0), counting_all(one_table_layout(5)).part(0, 0)])
