"""Which bucket of its table a row is in, and where in a file the rows of a bucket lie: closed forms, no index.

A plan gives whole buckets to shards and cards, so any number of them can load just its share of a snapshot.

| bucketing | buckets | bucket of a row | number of the row within it |
|---|---|---|---|
| mixed | 4,096 | `(row ^ h(row >> 12)) & 4095` | `row >> 12` |
| range | 256 | `row >> s`, s the smallest that leaves 256 buckets | `row - (bucket << s)` |
| by key | 4,096 | `splitmix64(key) & 4095` | its place among the file's keys of that bucket, ascending |

`h` is a 64-bit mix (multiply, shift, multiply) with a seed for each table, the XXH3 of its name. So each run of 4,096
rows has one row of every bucket, and which row that is changes from run to run: rows in order of popularity are spread
evenly however buckets are divided. docs/snapshot-format.md has an example. File i of a table holds rows
[i * rows_per_file, (i + 1) * rows_per_file) in bucket order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from loader.snapshot.tables import NUM_BUCKETS, Bucketing, TableSpec

Int64Array = npt.NDArray[np.int64]

MIXED_BITS = 12
RANGE_BITS = 8
# Of a murmur finaliser: odd numbers whose products spread every bit.
MIX_FACTORS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
FILE_BYTES = 256 << 20
MIN_ROWS_PER_FILE = 256


def starts_of(sizes: npt.NDArray[np.integer] | npt.NDArray[np.bool_]) -> Int64Array:
    """Return where runs of these sizes, [n], begin if they lie one after the other, and the end: int64 [n + 1]."""
    starts = np.zeros(sizes.size + 1, np.int64)
    np.add.accumulate(sizes, dtype=np.int64, out=starts[1:])
    return starts


def ranges(firsts: Int64Array, sizes: Int64Array) -> Int64Array:
    """Return the numbers [first, first + size) of each, one after the other: int64 [sizes.sum()]."""
    starts = starts_of(sizes)
    numbers = np.arange(int(starts[-1]))
    numbers += np.repeat(firsts - starts[:-1], sizes)
    return numbers


def splitmix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finaliser of Steele, Lea and Flood's SplitMix64 (OOPSLA 2014), a bijection of uint64."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def key_buckets(keys: npt.NDArray[np.integer[Any]]) -> Int64Array:
    """Return the bucket of each key, int64 or int32 [n]: the low 12 bits of its `splitmix64`, int64 [n]."""
    mixed = splitmix64(keys.astype(np.int64, copy=False).view(np.uint64))
    mixed &= np.uint64(NUM_BUCKETS["mixed"] - 1)
    return mixed.view(np.int64)


def mix(blocks: Int64Array, seed: int) -> Int64Array:
    """Mix the numbers of runs of 4,096 rows, int64 [n], with a table's seed: int64 [n], each below 4,096."""
    mixed = blocks.astype(np.uint64)
    mixed += np.uint64(seed)
    mixed *= np.uint64(MIX_FACTORS[0])
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(MIX_FACTORS[1])
    mixed >>= np.uint64(64 - MIXED_BITS)
    return mixed.view(np.int64)


@dataclass(frozen=True, slots=True)
class RowBuckets:
    """The buckets of one table's rows. Made by `RowBuckets.of`.

    Attributes:
        count: buckets; a power of two.
        bucket_shift: bucket = ((row ^ mix) >> bucket_shift) & (count - 1).
        slot_shift: (row >> slot_shift) counts the rows of a bucket, from `first_slots` on.
        seed: of the mix, the XXH3 (64 bits) of the table's name; None where there is none.
        by_key: whether rows are named by keys, of which there are at most `num_rows`.
    """

    num_rows: int
    count: int
    bucket_shift: int
    slot_shift: int
    seed: int | None
    by_key: bool = False

    @classmethod
    def of(cls, table: TableSpec) -> Self:
        """Return the buckets of a table."""
        if table.keys is not None:
            return cls(table.num_embeddings, NUM_BUCKETS["mixed"], 0, 0, None, by_key=True)
        seed = xxhash.xxh3_64_intdigest(table.name.encode()) if table.bucketing == "mixed" else None
        return cls._cached(table.bucketing, table.num_embeddings, seed)

    @classmethod
    @lru_cache(maxsize=4096)
    def _cached(cls, bucketing: Bucketing, num_rows: int, seed: int | None) -> Self:
        if bucketing == "range":
            return cls(num_rows, NUM_BUCKETS["range"], max(0, (num_rows - 1).bit_length() - RANGE_BITS), 0, None)
        return cls(num_rows, NUM_BUCKETS[bucketing], 0, MIXED_BITS, seed)

    def of_rows(self, rows: Int64Array) -> Int64Array:
        """Return the bucket of each row, or key, int64 [n]."""
        if self.by_key:
            return key_buckets(rows)
        mixed = rows if self.seed is None else rows ^ mix(rows >> MIXED_BITS, self.seed)
        return (mixed >> self.bucket_shift) & (self.count - 1)

    def rows_below(self, edges: Int64Array) -> Int64Array:
        """Count, for each edge, int64 [m], the rows below it in each bucket: int64 [m, count]."""
        buckets = np.arange(self.count, dtype=np.int64)
        if self.by_key:
            # An even share each.
            return np.diff(np.arange(self.count + 1) * edges[:, None] // self.count, axis=1)
        if self.seed is None:
            # Where there are fewer rows than buckets a shift of 0 leaves one for each bucket.
            return np.clip(edges[:, None] - (buckets << self.bucket_shift), 0, 1 << self.bucket_shift)
        # Complete runs of buckets below each edge, and which rows of the run that it is in.
        runs, rows_in_run = edges >> self.slot_shift, (edges & (self.count - 1)).astype(np.int16)
        mixes = mix(runs, self.seed).astype(np.int16)
        is_below = (np.arange(self.count, dtype=np.int16) ^ mixes[:, None]) < rows_in_run[:, None]
        return runs[:, None] + is_below

    def rows_per_bucket(self) -> Int64Array:
        """Count the rows of each bucket, int64 [count]."""
        return self.rows_below(np.array([self.num_rows])).reshape(-1)

    def first_slots(self) -> Int64Array:
        """Return what (row >> slot_shift) is for the first row of each bucket, int64 [count]."""
        if self.slot_shift:
            return np.zeros(self.count, np.int64)
        return np.arange(self.count, dtype=np.int64) << self.bucket_shift

    def of_keys(self, first_row: int, keys: Int64Array, ranks: Int64Array | None = None) -> FileOrder:
        """Return the order of a file whose rows have these keys, int64 [n]; not in order, they have places `ranks`."""
        starts = starts_of(np.bincount(key_buckets(keys), minlength=self.count))
        return FileOrder(self, first_row, keys.size, starts, ranks)

    def in_file(self, rows_per_file: int, file_index: int) -> FileOrder:
        """Return the order of the rows in one of the table's files, of one without keys."""
        first_row = file_index * rows_per_file
        num_rows = min(rows_per_file, self.num_rows - first_row)
        below = self.rows_below(np.array([first_row, first_row + num_rows]))
        return FileOrder(self, first_row, num_rows, starts_of(below[1] - below[0]))


@dataclass(frozen=True, slots=True, eq=False)
class FileOrder:
    """The order of one row file. Made by `RowBuckets.in_file`.

    Attributes:
        buckets: of the table.
        first_row, num_rows: of the file.
        starts: int64 [count + 1], the position of the first row of each bucket, then `num_rows`.
        ranks: int64 [num_rows], of rows with keys their positions; None where these follow from the rows.
    """

    buckets: RowBuckets
    first_row: int
    num_rows: int
    starts: Int64Array
    ranks: Int64Array | None = None

    def positions(self, local_rows: Int64Array) -> Int64Array:
        """Find the positions of rows, int64 [n], that are counted from the file's first row in row order."""
        if self.ranks is not None:
            return self.ranks[local_rows]
        if self.buckets.seed is None:
            return local_rows
        positions: Int64Array = self.starts.take(self.buckets.of_rows(local_rows + self.first_row))
        positions += local_rows >> self.buckets.slot_shift
        return positions

    def positions_of(self, chosen: npt.NDArray[np.bool_]) -> Int64Array:
        """Return the positions of all rows of the chosen buckets, bool [count], ascending: int64 [n]."""
        return ranges(self.starts[:-1][chosen], np.diff(self.starts)[chosen])

    def rows_at(self, positions: Int64Array) -> Int64Array:
        """Find the row at each position, int64 [n], ascending."""
        buckets = self.buckets
        if buckets.seed is None:
            return positions + self.first_row
        bucket = np.repeat(np.arange(buckets.count), np.diff(positions.searchsorted(self.starts)))
        block = positions - self.starts.take(bucket)
        block += self.first_row >> buckets.slot_shift
        rows = block << buckets.slot_shift
        rows += bucket ^ mix(block, buckets.seed)
        return rows


def default_rows_per_file(table: TableSpec, row_bytes: int, num_rows: int | None = None) -> int:
    """Return the largest power of two whose rows fit 256 MiB; at most what one file of all rows needs.

    Each file begins with a complete run of buckets, so it has at least as many rows as there are buckets.
    """
    # Large enough for few files, small enough for one to be in memory, and to be redone after an interruption.
    least = NUM_BUCKETS[table.bucketing]
    fitting = 1 << ((FILE_BYTES // row_bytes).bit_length() - 1)
    return max(least, min(fitting, 1 << ((num_rows or table.num_embeddings) - 1).bit_length()))
