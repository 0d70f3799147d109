"""Levels of hotness: from counts, from power laws, and what makes tables comparable."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_node.errors import InvalidBagsError
from shard_node.planning.hotness import Head, Hotness, PartOfRanks, RankedRows, power_law_sums, ranked_share
from shardrank_testing.card_plans import hotnesses, layout_of, layouts, one_table_layout
from shardrank_testing.snapshots import num_buckets, one_table_spec, plain_buckets


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


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.05, 2.0])
def test_power_law_sums_are_the_sums(exponent):
    ranks = np.array([0, 1, 2, 4095, 4096, 4097, 10_000, 300_000])
    exact = np.concatenate([[0.0], np.cumsum(np.arange(1, 300_001, dtype=np.float64) ** -exponent)])
    np.testing.assert_allclose(power_law_sums(ranks, exponent), exact[ranks], rtol=1e-9)


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
    specs = [one_table_spec(100).tables[0].model_copy(update={"name": name}) for name in ("counted", "other")]
    layout = layout_of([table.model_copy(update={"feature_names": (table.name,)}) for table in specs])
    # 600 lookups in the counted table, 3 a sample: 200 samples, which look up the other 2 * 200 times.
    counts = np.full(100, 6, np.uint32)
    hotness = Hotness({"counted": counts}, {"counted": 3.0, "other": 2.0})
    by_name = {rows.table.name: rows.lookups.tolist() for rows in hotness.of(layout)}
    assert by_name["counted"] == [6.0]
    assert by_name["other"] == pytest.approx([4.0])


@pytest.mark.parametrize(
    "counts", [np.zeros(9, np.uint32), np.zeros(11, np.uint32), np.zeros(10, np.int64), np.zeros((10, 1), np.uint32)]
)
def test_counts_of_another_shape_or_dtype_are_refused(counts):
    layout = one_table_layout(10)
    with pytest.raises(InvalidBagsError, match=r"table 'items': access counts must be uint32 \[10\], got"):
        Hotness({"items": counts}).of(layout)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_numbers_that_are_no_amounts_are_refused(value):
    layout = one_table_layout(10)
    with pytest.raises(InvalidBagsError, match=r"table 'items': lookups per sample is .*; it must be a finite number"):
        Hotness(lookups_per_sample={"items": value}).of(layout)
    with pytest.raises(InvalidBagsError, match=r"table 'items': zipf is .*; it must be a finite number"):
        Hotness(zipf=value).of(layout)
