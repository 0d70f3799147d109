"""The hottest rows are learned from whole batches, in bounded memory, and learned anew after a shift."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import HotRowsError
from router.popularity import CANDIDATES, HALF_LIFE, MIN_EPOCH, Popularity

ROWS = 20_000


def zipf_lookups(rng: np.random.Generator, count: int, row_of_rank: np.ndarray, exponent: float = 1.1) -> np.ndarray:
    ends = np.cumsum(np.arange(1, ROWS + 1) ** -exponent)
    return row_of_rank[np.searchsorted(ends, rng.random(count) * ends[-1])]


def share(keys: np.ndarray, row_of_rank: np.ndarray, exponent: float = 1.1) -> float:
    """Of lookups that go to these keys."""
    chance = np.empty(ROWS)
    chance[row_of_rank] = np.arange(1, ROWS + 1) ** -exponent
    return float(chance[keys].sum() / chance.sum())


@given(st.lists(st.lists(st.integers(0, 40), max_size=200), max_size=20), st.integers(1, 12))
def test_counts_are_exact_while_all_rows_are_candidates(batches, capacity):
    popularity = Popularity(capacity)
    batches = [np.array(rows, np.int64) + (3 << 32) for rows in batches]
    for keys in batches:
        popularity.observe(keys)
    lookups = np.concatenate([np.zeros(0, np.int64), *batches])
    # One epoch at least ended, or nothing is known; counts that waited are not told.
    if lookups.size < MIN_EPOCH:
        assert popularity.top(capacity).size == 0
        return
    # With no more than 41 keys in at most 15 epochs of 256 no fall of the rate is chance, so no order is forgotten.
    ended = lookups[: popularity.epochs * MIN_EPOCH]
    top = popularity.top(41)
    assert set(top) == set(ended)
    assert np.all(top >> 32 == 3)
    if popularity.epochs == 1:
        counts = np.array([(ended == key).sum() for key in top])
        assert np.all(np.diff(counts) <= 0)


@given(st.integers(0, 2**32), st.integers(1, 400), st.integers(0, 6))
def test_batches_of_any_size_make_no_difference(seed, capacity, num_cuts):
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 500, 4000) ** 2
    whole, pieces = Popularity(capacity), Popularity(capacity)
    whole.observe(keys)
    for piece in np.split(keys, np.sort(rng.integers(0, keys.size, num_cuts))):
        pieces.observe(piece)
    np.testing.assert_array_equal(whole.top(capacity), pieces.top(capacity))
    assert (whole.epochs, whole.shifts) == (pieces.epochs, pieces.shifts)


@pytest.mark.parametrize("capacity", [1, 1000])
def test_memory_is_bounded_by_the_capacity(capacity):
    popularity, rng = Popularity(capacity), np.random.default_rng(0)
    popularity.observe(np.zeros(0, np.int64))
    assert popularity.top(8).size == 0
    for _ in range(20):
        popularity.observe(rng.integers(0, 2**40, 3000))
    assert popularity.size_bytes <= (13 * CANDIDATES + 8) * max(capacity + 3, MIN_EPOCH)
    assert popularity.top(2**40).size <= CANDIDATES * max(capacity + 3, MIN_EPOCH)
    assert (popularity.top(capacity).size, popularity.top(0).size) == (capacity, 0)
    with pytest.raises(HotRowsError, match="capacity 0 "):
        Popularity(0)


def test_the_learned_top_is_nearly_the_true_one():
    rng, capacity = np.random.default_rng(1), 500
    row_of_rank, popularity = rng.permutation(ROWS), Popularity(capacity)
    for _ in range(100):
        popularity.observe(zipf_lookups(rng, capacity, row_of_rank))
    assert share(popularity.top(capacity), row_of_rank) > share(row_of_rank[:capacity], row_of_rank) - 0.01
    assert popularity.shifts == 0
    np.testing.assert_array_equal(popularity.top(10), popularity.top(capacity)[:10])
    assert set(popularity.top(3)) == set(row_of_rank[:3])


def test_after_a_shift_the_top_is_learned_anew():
    rng, capacity = np.random.default_rng(2), 500
    before, after, popularity = rng.permutation(ROWS), rng.permutation(ROWS), Popularity(capacity)
    popularity.observe(zipf_lookups(rng, 100 * capacity, before))
    assert share(popularity.top(capacity), after) < 0.2
    lookups = zipf_lookups(rng, 20 * capacity, after)
    popularity.observe(lookups)
    fresh = np.argsort(-np.bincount(lookups, minlength=ROWS), kind="stable")[:capacity]
    assert popularity.shifts == 1
    assert share(popularity.top(capacity), after) > share(fresh, after) - 0.01


def test_old_lookups_count_half_after_the_half_life():
    capacity = 300
    popularity = Popularity(capacity)
    # Nearly all lookups go to row 0, so no shift is seen. Row 2 is half as frequent as 1 was, and overtakes it.
    popular = capacity * HALF_LIFE * 4
    popularity.observe(np.resize(np.repeat([0, 1], [11, 1]), popular))
    popularity.observe(np.zeros(capacity * 10, np.int64))
    assert popularity.top(2).tolist() == [0, 1]
    popularity.observe(np.resize(np.repeat([0, 2], [23, 1]), popular))
    assert popularity.top(3).tolist() == [0, 2, 1]
    assert popularity.shifts == 0
