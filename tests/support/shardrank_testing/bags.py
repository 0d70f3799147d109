"""Random keyed bags and the tolerance with which engines are compared."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from shard_node.bags import KeyedBags, TableLayout

RELATIVE_TOLERANCE = 1e-5


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
    keys = sorted(draw(st.sets(st.integers(0, num_keys - 1))))
    bags_per_key = [draw(st.integers(0, max_bags)) for _ in keys]
    total = sum(bags_per_key)
    lengths = draw(st.lists(st.integers(0, max_hotness), min_size=total, max_size=total))
    size = sum(lengths)
    values = draw(st.lists(st.integers(0, 999), min_size=size, max_size=size))
    weights = None
    if draw(st.booleans()):
        weights = np.array(draw(st.lists(st.integers(-8, 8), min_size=size, max_size=size)), np.float32) / 4
    return KeyedBags.from_lengths(
        np.array(keys, np.int32),
        np.array(bags_per_key, np.int64),
        np.array(lengths, np.int64),
        np.array(values, np.int64),
        weights,
    )
