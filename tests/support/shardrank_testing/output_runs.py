"""Where bags are written to on cards: random runs, and what must stand there, by a loop over bags."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shard_node.bags import KeyedBags, TableLayout
from shard_node.cuda.batch import BatchSize, OutputRuns
from shard_node.cuda.kernel_params import MODES, OutDtype
from shardrank_testing.bags import bags_of_random_rows, by_bag, pool_by_definition


def runs_in_columns(
    layout: TableLayout, tables: Sequence[int], modes: Sequence[str], size: BatchSize, out_dtype: OutDtype = "fp32"
) -> OutputRuns:
    """Runs of a matrix: key k has its own columns, with three unused elements behind them; bag i is in row i."""
    dims = np.array([layout.tables[table].embedding_dim for table in tables], np.int64)
    ends = np.cumsum(dims + 3)
    numbers = np.array([MODES[mode] for mode in modes], np.int64)
    most = np.where(numbers == MODES["none"], size.num_values, size.bags_per_key)
    num_columns = int(ends[-1])
    return OutputRuns(
        tables=np.array(tables, np.int64),
        modes=numbers,
        out_offsets=ends - dims - 3,
        out_strides=np.full(dims.size, num_columns, np.int64),
        out_dtype=out_dtype,
        out_elements=num_columns * max(1, int(most.max())),
    )


def feature_bags(
    rng: np.random.Generator, layout: TableLayout, runs: OutputRuns, size: BatchSize, weighted: bool = False
) -> KeyedBags:
    """Bags for every run, at most as many as the size says, some of them empty; values are rows."""
    bags_per_key = rng.integers(0, size.bags_per_key + 1)
    lengths = rng.integers(0, 7, int(bags_per_key.sum()))
    lengths[np.cumsum(lengths) > size.num_values] = 0
    limits = [layout.tables[table].num_embeddings for table in runs.tables.tolist()]
    keys = np.arange(runs.tables.size, dtype=np.int32)
    return bags_of_random_rows(rng, keys, bags_per_key, lengths, limits, weighted)


def expected_output(rows: Sequence[np.ndarray], bags: KeyedBags, runs: OutputRuns) -> np.ndarray:
    """float64 [out_elements]; NaN where nothing is written.

    Args:
        rows: float32 [num_embeddings, embedding_dim] of each table, in layout order.
        bags: one key for each run.
        runs: where they go.
    """
    out = np.full(runs.out_elements, np.nan)
    modes = {number: mode for mode, number in MODES.items()}
    for key, table in enumerate(runs.tables.tolist()):
        weights = None if bags.weights is None else by_bag(bags.weights, bags, key)
        pooled = pool_by_definition(rows[table], by_bag(bags.values, bags, key), modes[int(runs.modes[key])], weights)
        for number, row in enumerate(pooled):
            first = int(runs.out_offsets[key]) + number * int(runs.out_strides[key])
            out[first : first + row.size] = row
    return out
