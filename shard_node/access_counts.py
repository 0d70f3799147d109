"""How often rows are looked up, observed while they are served: for the placement of the next version.

One batch in 256 is counted, and of a large one a random part, so that it costs the batch well under a millisecond.
Memory is bounded: the smallest tables have one counter for each row; the largest share a count-min sketch (Cormode and
Muthukrishnan, 2005), in which a row has two counters by two hashes, of which the smaller one is nearer the truth. What
other rows added by chance, in the mean, is taken off, so that what is hardly ever looked up counts as nothing.

Every engine has its `AccessCounts`. Whoever answers lookups in an engine's place, as a tier of hot rows before it does,
observes those in one of its own, by `AccessCounts.observe`: no count is of all lookups, only their sum is.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loader.errors import cut
from shard_node.bags import Int64Array, TableLayout
from shard_node.errors import InvalidBagsError
from shard_node.planning.hotness import RowCounts

UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]
Float64Array = npt.NDArray[np.float64]

SAMPLE_EVERY = 256
MAX_VALUES = 4_096
"""Values of one batch that are counted."""
MAX_BYTES = 64 << 20
MAX_PART_ROWS = 1 << 18
"""Rows whose counts are told at a time: a megabyte, and a few milliseconds in which no batch is counted."""
MIN_SKETCH_COUNTERS = 1 << 10

_COUNTER_BYTES = 4
_HALVE_AT = 2**31
_LINE_ROWS = 16
# Odd numbers for multiply-shift hashing (Dietzfelbinger et al., 1997): golden ratio, and a constant of splitmix64.
_FACTORS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))


class _Sketch:
    """Two rows of counters, by two hashes. Sixteen rows that follow one another share a cache line, a `line`, in both.

    Args:
        counters: uint32 [2, 2^k], contiguous.
        total: of all that was added.
    """

    def __init__(self, counters: UInt32Array, total: int = 0) -> None:
        self.counters = counters
        self.total = total
        self._lines = counters.reshape(2, -1, _LINE_ROWS)
        self._shift = np.uint64(65 - self._lines.shape[1].bit_length())

    def add(self, table: Int64Array, rows: Int64Array, amount: int) -> None:
        """Add to rows, int64 [n], of tables, int64 [n]."""
        at = (rows % _LINE_ROWS).astype(np.uint64)
        for counters, line in zip(self.counters, self._hashes(_lines_of(table, rows // _LINE_ROWS)), strict=True):
            # By one index: `add.at` is several times slower by two.
            np.add.at(counters, line * np.uint64(_LINE_ROWS) + at, np.uint32(amount))
        self.total += amount * rows.size

    def read(self, table: int, first_row: int, end_row: int) -> UInt32Array:
        """uint32 [n], nearly what was added to each of a table's rows."""
        first_line, end_line = first_row // _LINE_ROWS, -(-end_row // _LINE_ROWS)
        lines = _lines_of(np.array(table), np.arange(first_line, end_line))
        one, other = (counters[line] for counters, line in zip(self._lines, self._hashes(lines), strict=True))
        found: UInt32Array = np.minimum(one, other).reshape(-1)[first_row - first_line * _LINE_ROWS :]
        found = found[: end_row - first_row]
        found -= np.minimum(found, np.uint32(min(self.total // self.counters.shape[1], 2**32 - 1)))
        return found

    def copy(self) -> _Sketch:
        return _Sketch(self.counters.copy(), self.total)

    def _hashes(self, lines: UInt64Array) -> list[UInt64Array]:
        return [(lines * factor) >> self._shift for factor in _FACTORS]


def _lines_of(table: npt.NDArray[np.int64], line: Int64Array) -> UInt64Array:
    """One number for each line of each table, from 1 on: 0 would be hashed to 0 by both."""
    lines: UInt64Array = ((table << 32) + line + 1).astype(np.uint64)
    return lines


class SketchedCounts:
    """Estimates for the rows of one table: read like an array uint32 [num_embeddings], by slices with step 1."""

    def __init__(self, sketch: _Sketch, table: int, num_rows: int) -> None:
        self._sketch = sketch
        self._table = table
        self.shape = (num_rows,)
        self.dtype = np.dtype(np.uint32)

    def __getitem__(self, rows: slice) -> UInt32Array:
        first, end, _ = rows.indices(self.shape[0])
        return self._sketch.read(self._table, first, max(first, end))


@dataclass(frozen=True, slots=True)
class CountedPart:
    """How often some rows of a table that follow one another were looked up, as counted in one place.

    Attributes:
        table: its name.
        num_tables: of the model, numbered in layout order.
        num_embeddings: rows of this one.
        first_row: of the part.
        counts: uint32 [n], of its rows.
        lookups: values that this place was told of, of all tables.
        total: what was counted of them: a count stands for `lookups / total` lookups.
    """

    table: str
    num_tables: int
    num_embeddings: int
    first_row: int
    counts: UInt32Array
    lookups: int
    total: int


def merged_lookups(parts: Sequence[CountedPart]) -> Float64Array:
    """Add what was counted of the same rows in several places: of shards, of replicas, of tiers of hot rows.

    Places count different shares of their batches, and halve their counts at times of their own, so each count is
    taken for the lookups that it stands for.

    Args:
        parts: of one table, from the same row on; at least one.

    Returns:
        float64 [n], lookups of each row that all parts have.

    Raises:
        InvalidBagsError: parts of different tables or rows.
    """
    whose = {(one.table, one.num_tables, one.num_embeddings, one.first_row) for one in parts}
    if len(whose) > 1:
        raise InvalidBagsError(f"counts of different rows can't be added: {cut(sorted(whose))}")
    num_rows = min(one.counts.size for one in parts)
    merged = np.zeros(num_rows, np.float64)
    for one in parts:
        merged += one.counts[:num_rows] * (one.lookups / max(one.total, 1))
    return merged


class AccessCounts:
    """Counts of one generation's lookups, by row. Thread-safe.

    Args:
        layout: the tables.
        rng: chooses batches, and values of large ones; None for chance from the system.
        sample_every: batches of which one is counted.
        max_values: values of one batch that are counted; of more, as many at random, each for its share.
        max_bytes: of all counters. Half of them are for counters by row, the smallest tables first, unless all fit.

    Raises:
        InvalidBagsError: a number that is not positive, or too few bytes for a sketch.
    """

    def __init__(
        self,
        layout: TableLayout,
        rng: np.random.Generator | None = None,
        *,
        sample_every: int = SAMPLE_EVERY,
        max_values: int = MAX_VALUES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        smallest = 4 * MIN_SKETCH_COUNTERS * _COUNTER_BYTES
        if sample_every < 1 or max_values < 1 or max_bytes < smallest:
            raise InvalidBagsError(
                f"sample_every {sample_every} and max_values {max_values} must be at least 1, "
                f"max_bytes {max_bytes} at least {smallest}"
            )
        self._layout = layout
        self._rng = rng or np.random.default_rng()
        self._sample_every = sample_every
        self._max_values = max_values
        self._turn = threading.Lock()
        self._counting = threading.Lock()
        self._position = self._chosen = 0
        self._lookups = 0
        rows = np.array([table.num_embeddings for table in layout.tables], np.int64)
        self._by_row = _counted_by_row(rows, max_bytes // _COUNTER_BYTES)
        ends = np.cumsum(np.where(self._by_row, rows, 0))
        self._first = ends - np.where(self._by_row, rows, 0)
        self._counters = _zeros(int(ends[-1]))
        width = 1 << ((max_bytes // _COUNTER_BYTES // 4).bit_length() - 1)
        self._sketch = None if self._by_row.all() else _Sketch(_zeros(2, width))
        self._total = 0

    @property
    def size_bytes(self) -> int:
        """Of all counters."""
        return self._counters.nbytes + (0 if self._sketch is None else self._sketch.counters.nbytes)

    @property
    def total(self) -> int:
        """Of all counts. Halved whenever the counters are."""
        return self._total

    @property
    def lookups(self) -> int:
        """Values of all batches that were told of, counted or not: `lookups / total` is what a count stands for."""
        return self._lookups

    def observe(
        self, tables: npt.NDArray[np.integer], values_per_key: Int64Array, values: npt.NDArray[np.integer]
    ) -> None:
        """Tell of a batch, which is counted or not. Never waits for another thread's batch to be counted.

        Tell of every batch, a small one too: what is left out is missing in `lookups`.

        Args:
            tables: integers [S], the table of each key, by its number in the layout; one may be there twice.
            values_per_key: int64 [S].
            values: integers [n], the rows, key by key; the caller has checked that they are in their tables.
        """
        if not self._is_chosen(values.size) or not values.size or not self._counting.acquire(blocking=False):
            return
        try:
            amount = 1
            rows, ends = values, np.cumsum(values_per_key)
            if values.size > self._max_values:
                # A whole number that is right in the mean.
                amount = int(values.size / self._max_values + self._rng.random())
                at = self._rng.integers(0, values.size, self._max_values)
                rows, table = values[at], tables[np.searchsorted(ends, at, side="right")]
            else:
                table = np.repeat(tables, values_per_key)
            self._count(table.astype(np.int64, copy=False), rows, amount)
        finally:
            self._counting.release()

    def counts(self) -> dict[str, RowCounts]:
        """By table, how often each row was counted: copies, so that counting goes on."""
        with self._counting:
            counters = self._counters.copy()
            sketch = None if self._sketch is None else self._sketch.copy()
        found: dict[str, RowCounts] = {}
        for number, table in enumerate(self._layout.tables):
            if sketch is not None and not self._by_row[number]:
                found[table.name] = SketchedCounts(sketch, number, table.num_embeddings)
            else:
                found[table.name] = counters[self._first[number] :][: table.num_embeddings]
        return found

    def part(self, table: int, first_row: int, max_rows: int = MAX_PART_ROWS) -> CountedPart:
        """Return what was counted of at most so many rows of a table, by its number; counting goes on meanwhile.

        Raises:
            InvalidBagsError: no such table or row, or a number of rows that is not within 1 to MAX_PART_ROWS.
        """
        tables = self._layout.tables
        if not 0 <= table < len(tables):
            raise InvalidBagsError(f"table {table} is not within 0..{len(tables) - 1}")
        name, num_rows = tables[table].name, tables[table].num_embeddings
        if not 0 <= first_row < num_rows:
            raise InvalidBagsError(f"table {name!r}: first row {first_row} is not within 0..{num_rows - 1}")
        if not 1 <= max_rows <= MAX_PART_ROWS:
            raise InvalidBagsError(f"table {name!r}: {max_rows} rows are not within 1..{MAX_PART_ROWS}")
        end_row = min(first_row + max_rows, num_rows)
        with self._counting:
            lookups, total = self._lookups, self._total
            if self._sketch is not None and not self._by_row[table]:
                counts = self._sketch.read(table, first_row, end_row)
            else:
                counts = self._counters[self._first[table] :][first_row:end_row].copy()
        return CountedPart(name, len(tables), num_rows, first_row, counts, lookups, total)

    def _is_chosen(self, num_values: int) -> bool:
        """One batch of each `sample_every`, at a random place: a fixed one would meet periodic traffic out of step."""
        with self._turn:
            self._lookups += num_values
            if self._position == 0:
                self._chosen = int(self._rng.integers(self._sample_every))
            chosen = self._position == self._chosen
            self._position = (self._position + 1) % self._sample_every
            return chosen

    def _count(self, table: Int64Array, rows: npt.NDArray[np.integer], amount: int) -> None:
        self._total += amount * rows.size
        if self._total >= _HALVE_AT:
            # No counter can pass 32 bits, and what was long ago counts for less.
            self._counters >>= np.uint32(1)
            self._total //= 2
            if self._sketch is not None:
                self._sketch.counters >>= np.uint32(1)
                self._sketch.total //= 2
        by_row = self._by_row[table]
        at = self._first[table[by_row]] + rows[by_row].astype(np.int64)
        np.add.at(self._counters, at, np.uint32(amount))
        if self._sketch is not None:
            self._sketch.add(table[~by_row], rows[~by_row].astype(np.int64), amount)


def _counted_by_row(rows: Int64Array, max_counters: int) -> npt.NDArray[np.bool_]:
    """Tables, bool [tables], that have a counter for each row: all if they fit, else the smallest that fit half."""
    if int(rows.sum()) <= max_counters:
        return np.ones(rows.size, bool)
    order = np.argsort(rows, kind="stable")
    by_row = np.zeros(rows.size, bool)
    by_row[order] = np.cumsum(rows[order]) <= max_counters // 2
    return by_row


def _zeros(*shape: int) -> UInt32Array:
    """Zeros that are in memory already: else the first batches would wait for thousands of page faults.

    Mapped, so that all of it goes back to the system with its version: among what is allocated for a moment while the
    next version is loaded, it would keep holes in the heap.
    """
    count = math.prod(shape)
    memory = mmap.mmap(-1, max(1, _COUNTER_BYTES * count), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    zeros = np.frombuffer(memory, np.uint32, count).reshape(shape)
    zeros.fill(0)
    return zeros
