"""Cutting a shard's request into pieces that fit the wire: contiguous runs of bags, whose blocks are joined again."""

from __future__ import annotations

import itertools

import numpy as np

from shard_node.bags import Float32Array, Int64Array, KeyedBags
from shard_node.engine.table_layout import TableLayout

# Far below the wire's own limits (64 MiB a frame, 4 Mi values a request), so that a node can work on one piece while
# the next one travels, and no single request takes much of its memory.
PIECE_BYTES = 16 << 20
VALUE_BYTES = 16


class Cutter:
    """Cuts bags of one model.

    Args:
        layout: its tables.
        piece_bytes: ids out and sums back of one piece, about; a single bag may exceed it.
    """

    def __init__(self, layout: TableLayout, piece_bytes: int = PIECE_BYTES) -> None:
        self._row_bytes = np.array([4 * table.embedding_dim for table in layout.tables], np.int64)
        self._most_row_bytes = int(self._row_bytes.max())
        self._piece_bytes = piece_bytes

    def cut(self, bags: KeyedBags) -> list[KeyedBags]:
        """The pieces, in order; the bags themselves if they fit in one."""
        if bags.num_bags * self._most_row_bytes + bags.num_values * VALUE_BYTES <= self._piece_bytes:
            return [bags]
        bag_cost = np.repeat(self._row_bytes[bags.keys], bags.bags_per_key) + bags.lengths * VALUE_BYTES
        end_cost = np.cumsum(bag_cost)
        edges: list[int] = [0]
        while edges[-1] < bags.num_bags:
            spent = int(end_cost[edges[-1] - 1]) if edges[-1] else 0
            edges.append(max(edges[-1] + 1, int(np.searchsorted(end_cost, spent + self._piece_bytes, side="right"))))
        return [_slice(bags, first, end) for first, end in itertools.pairwise(edges)]


def join(pieces: list[list[Float32Array]]) -> list[Float32Array]:
    """The blocks of all pieces: for each group, one after the other."""
    return pieces[0] if len(pieces) == 1 else [np.concatenate(blocks) for blocks in zip(*pieces, strict=True)]


def _slice(bags: KeyedBags, first: int, end: int) -> KeyedBags:
    starts: Int64Array = np.clip(bags.bag_starts(), first, end)
    counts = np.diff(starts)
    has_bags = counts > 0
    value_first, value_end = int(bags.offsets[first]), int(bags.offsets[end])
    return KeyedBags(
        bags.keys[has_bags],
        counts[has_bags],
        bags.offsets[first : end + 1] - value_first,
        bags.values[value_first:value_end],
        None if bags.weights is None else bags.weights[value_first:value_end],
    )
