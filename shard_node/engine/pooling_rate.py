"""How fast a core of this machine pools rows: what `shardrank plan --measure` measures."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from loader.errors import ConfigError
from loader.memory import allocate_rows
from shard_node.bags import TableLayout
from shard_node.engine.arena import Arena

CALLS, CALL_IDS = 100, 16_384
ROW_BYTE = 0x3C
"""Of all rows: a number near 1 as float16, and a small one as float32, in no format a denormal one."""


def measured_rows_per_s(layout: TableLayout, values: Sequence[float], bags: Sequence[float], max_bytes: int) -> float:
    """Return how many rows a second one core pools, of each dim and dtype as many as a batch looks up.

    `values` and `bags` are a batch's, by table. Ids are random, the worst case for caches; an arena has the rows of all
    its tables, but at most `max_bytes`. Raises ConfigError if nothing is looked up.
    """
    torch.set_num_threads(1)
    rng, num_ids, seconds = np.random.default_rng(0), 0.0, 0.0
    for group in layout.groups:
        tables = slice(group.first_table, group.end_table)
        if not (lookups := sum(values[tables])):
            continue
        num_rows = sum(table.num_embeddings for table in layout.tables[tables])
        rows = allocate_rows(max(1, min(num_rows, max_bytes // group.row_bytes)), group.row_bytes)
        rows.fill(ROW_BYTE)
        arena = Arena(group.dtype, group.embedding_dim, rows, {})
        offsets = np.arange(0, CALL_IDS + 1, min(CALL_IDS, max(1, round(lookups / sum(bags[tables])))))
        times = []
        for _ in range(CALLS):
            ids = rng.integers(0, rows.shape[0], offsets[-1])
            started_at = time.perf_counter()
            arena.pool(ids, offsets, None)
            times.append(time.perf_counter() - started_at)
        num_ids, seconds = num_ids + lookups, seconds + lookups * float(np.median(times)) / float(offsets[-1])
    if not seconds:
        raise ConfigError("nothing can be measured: a batch looks up no row")
    return num_ids / seconds
