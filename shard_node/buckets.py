"""Which rows a node holds, by bucket, and where per-bucket values are kept.

Cells are one number for each bucket of each table of a layout, and for each value of a batch.

What is said of buckets (an owner, a place) is kept in flat arrays by cell. A table of which all buckets are alike has a
single cell, so that of its rows nothing is worked out.

    cell = mixed_first_cell[first_block[table] + (row >> block_shift)] ^ ((row >> bucket_shift) & mask)

`mixed_first_cell` has, for each run of 4,096 rows of a `mixed` table, the table's first cell with the run's mix in its
low bits, which are free since a table's first cell is a multiple of its buckets. Other tables have one such entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from loader.snapshot.buckets import MIXED_BITS, RowBuckets, key_buckets, mix
from shard_node.bags import Bags, Int64Array, TableLayout
from shard_node.errors import InvalidBagsError

Sharding = Literal["hash", "range", "table"]
# A row shifted by so much is 0.
ALL_BITS = 63


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """The rows that one node holds, by bucket.

    `card_of_bucket`, int16 [buckets] for each table in layout order, is the card that holds a bucket, -1 for another
    node's.
    """

    num_cards: int
    card_of_bucket: tuple[npt.NDArray[np.int16], ...]

    def __post_init__(self) -> None:
        for cards in self.card_of_bucket:
            if cards.min() < -1 or cards.max() >= self.num_cards:
                raise InvalidBagsError(f"card_of_bucket must be within -1..{self.num_cards - 1}")


class Message(BaseModel):
    """What processes tell each other: unknown keys are let pass, so that releases can differ during an upgrade."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class NodeIdentity(Message):
    """Which shard of how many a node is. Fixed for its life."""

    shard_index: int = Field(ge=0)
    num_shards: int = Field(ge=1)
    num_cards: int = Field(ge=1)
    sharding: Sharding


class BucketCells:
    """The cells of a layout's tables.

    Args:
        layout: the tables.
        single: which tables have one cell for all rows, bool [tables]; none if it is left out.
        copies: how many runs of cells each table has, one behind the other; one if it is left out.

    Attributes:
        first: int64 [tables], the first cell of each table; the others follow by bucket.
        counts: int64 [tables], cells of each table.
        size: cells of all tables; some are nobody's.
    """

    def __init__(
        self, layout: TableLayout, single: npt.NDArray[np.bool_] | None = None, copies: Sequence[int] | None = None
    ) -> None:
        self._buckets = [RowBuckets.of(table) for table in layout.tables]
        num_tables = len(self._buckets)
        self._single = np.zeros(num_tables, np.bool_) if single is None else single
        width = np.where(self._single, 1, [one.count for one in self._buckets])
        self.counts: Int64Array = width * np.array([1] * num_tables if copies is None else copies, np.int64)
        # The widest first: then each begins at a multiple of its width.
        order = np.argsort(-width, kind="stable")
        ends = np.cumsum(self.counts[order])
        self.first = np.empty(num_tables, np.int64)
        self.first[order] = ends - self.counts[order]
        self.size = int(ends[-1])
        self._is_by_key = np.array([one.by_key for one in self._buckets])
        self._has_keys = bool(self._is_by_key.any())
        is_mixed = ~self._single & np.array([one.seed is not None for one in self._buckets])
        self._mask = width - 1
        self._bucket_shift = np.where(self._single, 0, [one.bucket_shift for one in self._buckets])
        self._block_shift = np.where(is_mixed, MIXED_BITS, ALL_BITS)
        blocks = np.where(is_mixed, [-(-one.num_rows >> MIXED_BITS) for one in self._buckets], 1)
        self._first_block: Int64Array = np.cumsum(blocks) - blocks
        self._mixed_first_cell = np.repeat(self.first, blocks)
        for number in np.flatnonzero(is_mixed).tolist():
            seed, begin, count = self._buckets[number].seed, int(self._first_block[number]), int(blocks[number])
            assert seed is not None
            self._mixed_first_cell[begin : begin + count] += mix(np.arange(count), seed)
        self._narrow_first_cell = self._mixed_first_cell.astype(np.int32)

    def of(self, bags: Bags, values_per_key: Int64Array) -> Int64Array:
        """Return the cell of each value, [n], as wide as the values but of keys, for which it is int64.

        Keys of the bags are tables, values rows of them, or their keys.
        """
        rows = self._with_buckets_of_keys(bags, values_per_key) if self._has_keys else bags.values
        dtype = rows.dtype
        cells = self._mixed_first_cell if dtype == np.int64 else self._narrow_first_cell
        shift = per_value(self._bucket_shift, bags, values_per_key)
        low = (rows >> shift if shift.any() else rows) & per_value(self._mask, bags, values_per_key)
        block = rows >> per_value(self._block_shift, bags, values_per_key)
        block += per_value(self._first_block, bags, values_per_key)
        # All are within bounds, which `wrap` does not look at.
        low ^= cells.take(block, mode="wrap")
        return low

    def _with_buckets_of_keys(self, bags: Bags, values_per_key: Int64Array) -> Int64Array:
        by_key, single = self._is_by_key[bags.keys], self._single[bags.keys]
        if by_key.all() and not single.any():
            return key_buckets(bags.values)
        rows = bags.values.astype(np.int64)
        # Of a single cell nothing is asked of the keys, which may be negative.
        rows[(by_key & single).repeat(values_per_key)] = 0
        at = (by_key & ~single).repeat(values_per_key).nonzero()[0]
        rows[at] = key_buckets(rows[at])
        return rows

    def of_rows(self, table: int, rows: Int64Array) -> Int64Array:
        """Return the cell of each row of one table, int64 [n]."""
        if self._single[table]:
            return np.full(rows.size, self.first[table])
        cells = self._buckets[table].of_rows(rows)
        cells += self.first[table]
        return cells

    def spread(self, by_table: Sequence[npt.NDArray[np.generic]], fill: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Put what is known by bucket, [buckets] for each table, by cell: [size]. A single cell has its first."""
        flat = np.full(self.size, fill, dtype)
        for first, count, values in zip(self.first.tolist(), self.counts.tolist(), by_table, strict=True):
            flat[first : first + count] = values[:count]
        return flat


def per_value(by_table: Int64Array, bags: Bags, values_per_key: Int64Array) -> Int64Array:
    """Give each value what is known by table, as wide as the values: [n], or [1] if it is the same for all."""
    # Most models treat all tables alike; then one number serves all values and nothing is repeated.
    chosen = by_table[bags.keys].astype(bags.values.dtype, copy=False)
    if chosen.size == 1 or (chosen.size and (chosen == chosen[0]).all()):
        return chosen[:1]
    return np.repeat(chosen, values_per_key)
