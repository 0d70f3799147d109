"""Random bags and the tolerance with which engines are compared."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import strategies as st

from shard_node.bags import Bags, TableLayout

RELATIVE_TOLERANCE = 1e-5


def bags_of(rows: Mapping[int, Sequence[Sequence[int]]], weights: Sequence[float] | None = None) -> Bags:
    """Bags of rows, by key."""
    bags = [bag for of_key in rows.values() for bag in of_key]
    return Bags.from_lengths(
        np.array(list(rows), np.int32),
        np.array([len(of_key) for of_key in rows.values()], np.int64),
        np.array([len(bag) for bag in bags], np.int64),
        np.array([row for bag in bags for row in bag], np.int64),
        None if weights is None else np.array(weights, np.float32),
    )


def random_table_bags(
    rng: np.random.Generator, layout: TableLayout, max_bags: int, max_hotness: int, weighted: bool = False
) -> Bags:
    """Bags of valid rows for a random subset of the tables, with empty bags and duplicate rows."""
    keys = np.flatnonzero(rng.random(len(layout.tables)) < 0.8).astype(np.int32)
    bags_per_key = rng.integers(0, max_bags + 1, keys.size).astype(np.int64)
    lengths = rng.integers(0, max_hotness + 1, int(bags_per_key.sum()))
    lengths[rng.random(lengths.size) < 0.2] = 0
    return bags_of_random_rows(
        rng, keys, bags_per_key, lengths, [layout.tables[key].num_embeddings for key in keys], weighted
    )


def bags_of_random_rows(
    rng: np.random.Generator,
    keys: np.ndarray,
    bags_per_key: np.ndarray,
    lengths: np.ndarray,
    num_rows: Sequence[int],
    weighted: bool = False,
) -> Bags:
    """Bags of these lengths whose rows are below the number of each key."""
    bags = Bags.from_lengths(keys, bags_per_key, lengths, np.zeros(int(lengths.sum()), np.int64))
    limits = np.repeat(np.array(num_rows, np.int64), bags.values_per_key())
    values = (rng.random(bags.num_values) * limits).astype(np.int64)
    return bags.with_values(values, rng.normal(size=values.size).astype(np.float32) if weighted else None)


def pool_by_definition(
    table: np.ndarray, bags: Sequence[Sequence[int]], mode: str, weights: Sequence[Sequence[float]] | None = None
) -> np.ndarray:
    """One table's bags, float64 [bags, dim], or for mode `none` each of their rows."""
    pooled: list[np.ndarray] = []
    for number, bag in enumerate(bags):
        rows = table[np.array(bag, np.int64)].astype(np.float64)
        if weights is not None:
            rows *= np.array(weights[number], np.float64)[:, None]
        total = rows.sum(axis=0)
        pooled += {"none": list(rows), "sum": [total], "mean": [total / max(1, len(bag))]}[mode]
    return np.array(pooled).reshape(-1, table.shape[1])


def by_bag(array: np.ndarray, bags: Bags, key: int) -> list[np.ndarray]:
    """What an array by value has for each bag of the key at this position."""
    starts = bags.bag_starts()
    edges = bags.offsets[starts[key] : starts[key + 1] + 1].tolist()
    return [array[first:end] for first, end in itertools.pairwise(edges)]


def assert_blocks_equal(actual: list[np.ndarray], expected: list[np.ndarray], scale: float) -> None:
    """Blocks agree within 1e-5 of the size of the sums' terms (a sum near zero has no relative error of its own)."""
    assert [block.shape for block in actual] == [block.shape for block in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=RELATIVE_TOLERANCE, atol=RELATIVE_TOLERANCE * scale)


@st.composite
def small_bags(draw: st.DrawFn, num_keys: int = 5, max_bags: int = 4, max_hotness: int = 6) -> Bags:
    """Hypothesis strategy: arbitrary small bags with values in 0..999, some weighted."""
    rows = st.lists(st.lists(st.integers(0, 999), max_size=max_hotness), max_size=max_bags)
    of_key = {key: draw(rows) for key in sorted(draw(st.sets(st.integers(0, num_keys - 1))))}
    size = sum(len(bag) for bags in of_key.values() for bag in bags)
    quarters = st.integers(-8, 8).map(lambda number: number / 4)
    return bags_of(of_key, draw(st.none() | st.lists(quarters, min_size=size, max_size=size)))
