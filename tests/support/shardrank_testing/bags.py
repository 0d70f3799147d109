"""Random keyed bags and the tolerance with which engines are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import strategies as st

from shard_node.bags import KeyedBags, TableLayout

RELATIVE_TOLERANCE = 1e-5


def bags_of(rows: Mapping[int, Sequence[Sequence[int]]], weights: Sequence[float] | None = None) -> KeyedBags:
    """Bags of rows, by key."""
    bags = [bag for of_key in rows.values() for bag in of_key]
    return KeyedBags.from_lengths(
        np.array(list(rows), np.int32),
        np.array([len(of_key) for of_key in rows.values()], np.int64),
        np.array([len(bag) for bag in bags], np.int64),
        np.array([row for bag in bags for row in bag], np.int64),
        None if weights is None else np.array(weights, np.float32),
    )


def random_table_bags(
    rng: np.random.Generator, layout: TableLayout, max_bags: int, max_hotness: int, weighted: bool = False
) -> KeyedBags:
    """Bags of valid rows for a random subset of the tables, with empty bags and duplicate rows."""
    keys = np.flatnonzero(rng.random(len(layout.tables)) < 0.8).astype(np.int32)
    bags_per_key = rng.integers(0, max_bags + 1, keys.size).astype(np.int64)
    lengths = rng.integers(0, max_hotness + 1, int(bags_per_key.sum()))
    lengths[rng.random(lengths.size) < 0.2] = 0
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.concatenate([[0], np.cumsum(bags_per_key)])
    values_per_key = np.diff(offsets[starts])
    limits = np.repeat([layout.tables[key].num_embeddings for key in keys], values_per_key)
    values = (rng.random(int(offsets[-1])) * limits).astype(np.int64)
    weights = rng.normal(size=values.size).astype(np.float32) if weighted else None
    return KeyedBags.from_lengths(keys, bags_per_key, lengths, values, weights)


def assert_blocks_equal(actual: list[np.ndarray], expected: list[np.ndarray], scale: float) -> None:
    """Blocks agree within 1e-5 of the size of the sums' terms (a sum near zero has no relative error of its own)."""
    assert [block.shape for block in actual] == [block.shape for block in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=RELATIVE_TOLERANCE, atol=RELATIVE_TOLERANCE * scale)


@st.composite
def keyed_bags(draw: st.DrawFn, num_keys: int = 5, max_bags: int = 4, max_hotness: int = 6) -> KeyedBags:
    """Hypothesis strategy: arbitrary small keyed bags with values in 0..999, some weighted."""
    rows = st.lists(st.lists(st.integers(0, 999), max_size=max_hotness), max_size=max_bags)
    of_key = {key: draw(rows) for key in sorted(draw(st.sets(st.integers(0, num_keys - 1))))}
    size = sum(len(bag) for bags in of_key.values() for bag in bags)
    quarters = st.integers(-8, 8).map(lambda number: number / 4)
    return bags_of(of_key, draw(st.none() | st.lists(quarters, min_size=size, max_size=size)))
