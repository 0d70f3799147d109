"""All vocabularies of a model in one flat index, so that a batch's ids are looked up together.

Entries (table, id) are sorted by a 64-bit mix; the top bits of the mix pick a short run of them, which is compared
step by step for all ids at once. With about one entry to a run, a few steps find every id or show that it is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from router.hashing import splitmix64
from shard_node.bags import Int64Array

UNKNOWN = -1


class VocabularyIndex:
    """Finds the row of (table, id).

    Args:
        ids: table number to its ids, int64 [V], all different; an id's position is its row.
    """

    def __init__(self, ids: Mapping[int, Int64Array]) -> None:
        tables = [np.full(entry.size, table, np.int32) for table, entry in ids.items()]
        rows = [np.arange(entry.size, dtype=np.int64) for entry in ids.values()]
        table = np.concatenate(tables) if tables else np.zeros(0, np.int32)
        flat_ids = np.concatenate(list(ids.values())) if ids else np.zeros(0, np.int64)
        mix = _mix(table, flat_ids)
        order = np.argsort(mix)
        self._ids = flat_ids[order]
        self._table = table[order]
        self._rows = (np.concatenate(rows) if rows else np.zeros(0, np.int64))[order]
        run_bits = max(1, int(flat_ids.size).bit_length())
        self._run_shift = np.uint64(64 - run_bits)
        self._run_starts = np.searchsorted(mix[order] >> self._run_shift, np.arange((1 << run_bits) + 1))

    def rows(self, table: npt.NDArray[np.int32], ids: Int64Array) -> Int64Array:
        """Finds rows.

        Args:
            table: int32 [n], the table of each id.
            ids: int64 [n].

        Returns:
            int64 [n], the row, or `UNKNOWN`.
        """
        run = _mix(table, ids) >> self._run_shift
        position, end = self._run_starts[run], self._run_starts[run + np.uint64(1)]
        rows = np.full(ids.size, UNKNOWN, np.int64)
        pending = np.flatnonzero(position < end)
        while pending.size:
            at = position[pending]
            found = (self._ids[at] == ids[pending]) & (self._table[at] == table[pending])
            rows[pending[found]] = self._rows[at[found]]
            position[pending] += 1
            pending = pending[~found & (at + 1 < end[pending])]
        return rows


def _mix(table: npt.NDArray[np.int32], ids: Int64Array) -> npt.NDArray[np.uint64]:
    return splitmix64(ids.view(np.uint64) ^ splitmix64(table.astype(np.uint64)))
