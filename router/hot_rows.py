"""Hot rows: copies, at the router, of the rows that are looked up most. They are pooled here; all others fan out.

A `HotSet` never changes which rows it has: they are found by one hash index, and pooled by an engine in which every
table has only these rows. Of tables that name rows by keys it has keys, and remembers which of them were deleted.
`HotRows` is the tier of one served version: the set that is in use, the one that is being
filled, and what was counted. `router.hot_keeper` decides which rows there are, and keeps them up to date.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from loader.access_counts import AccessCounter
from loader.memory import allocate_rows
from loader.snapshot.tables import NUM_BUCKETS, Frozen
from shard_node.access_counts import TABLE_SHIFT, LookupSampler
from shard_node.answer import NONE_MISSING, Answer, ReplyEncoding, StoredRows
from shard_node.bags import Bags, CheckedBags, Int64Array, TableLayout
from shard_node.buckets import ALL_BITS
from shard_node.engine.arena import Arena, Placement, TablePlace
from shard_node.engine.base import write_pieces
from shard_node.engine.cpu import CpuEngine
from shard_node.engine.key_index import ABSENT, KeyIndex
from shard_node.engine.keyed_tables import MAX_KEYS, KeyedTables
from shard_node.node import DeltaPosition
from shard_node.split import Part

BoolArray: TypeAlias = npt.NDArray[np.bool_]
HotPolicy: TypeAlias = Literal["learning", "static"]
RowUpdate: TypeAlias = tuple[Int64Array, Sequence[tuple[int, StoredRows | None]]]
"""Rows, or keys, and for tables the rows as stored; None if they are deleted."""

ROW_OVERHEAD_BYTES: Final = 38
"""Of a set for each row: what it is counted by, it or its key, two marks, and its entries of the index."""


class HotRowsConfig(Frozen):
    """A tier of hot rows.

    Attributes:
        size_bytes: that the tier of one version takes at most: rows, index, what it learns, and a set that is built.
        policy: `static` holds those that the snapshot's access counts name; `learning` those looked up most of late.
        is_default: nobody chose it; `router.hot_keeper.reason_off` says which versions do without.
    """

    size_bytes: int = Field(ge=1)
    policy: HotPolicy = "learning"
    is_default: bool = False


class KeyNumbers:
    """Numbers for the keys of tables that name rows by them, so that all rows are counted by table << 32 | number.

    A key gets its number, up to `max_keys` of each table, when it is first asked for. One thread uses it.
    """

    def __init__(self, layout: TableLayout, max_keys: int) -> None:
        tables = [table.model_copy(update={"num_embeddings": min(max_keys, MAX_KEYS)}) for table in layout.tables]
        self._is_keyed, keyed = layout.is_keyed, layout.is_keyed.nonzero()[0].tolist()
        all_buckets = dict.fromkeys(keyed, np.ones(NUM_BUCKETS["mixed"], np.bool_))
        self._numbers = KeyedTables(replace(layout, tables=tuple(tables)), all_buckets) if keyed else None
        self._keys = {table: np.zeros(tables[table].num_embeddings + 1, np.int64) for table in keyed}

    def counted(self, tables: npt.NDArray[np.integer], rows: Int64Array) -> Int64Array:
        """Return what rows or keys of tables, integers [n] each, are counted by, without keys that have no number."""
        counted = (tables.astype(np.int64) << TABLE_SHIFT) + np.where(self._is_keyed[tables], 0, rows)
        for table in self._keys:
            at = (tables == table).nonzero()[0]
            numbers = self._number(table, rows[at])
            counted[at] = np.where(numbers == ABSENT, ABSENT, counted[at] + numbers)
        return np.extract(counted != ABSENT, counted)

    def rows(self, counted: Int64Array) -> Int64Array:
        """Return the rows, or keys, int64 [n], of what they are counted by."""
        tables, rows = counted >> TABLE_SHIFT, counted & ((1 << TABLE_SHIFT) - 1)
        for table, keys in self._keys.items():
            is_of = tables == table
            rows[is_of] = keys[rows[is_of]]
        return rows

    def keep(self, *counted: Int64Array) -> None:
        """Forget the numbers of all others, if more than half are given."""
        for table, keys in self._keys.items():
            assert self._numbers is not None
            if 2 * self._numbers.num_keys(table) > keys.size:
                kept = [part[part >> TABLE_SHIFT == table] - (table << TABLE_SHIFT) for part in counted]
                others = np.setdiff1d(np.arange(keys.size), np.concatenate(kept))
                is_given = self._numbers.find(table, keys[others]) == others
                self._numbers.remove(table, keys[others[is_given]])

    def _number(self, table: int, keys: Int64Array) -> Int64Array:
        assert self._numbers is not None
        different, places = np.unique(keys, return_inverse=True)
        numbers = self._numbers.find(table, different)
        new = (numbers == ABSENT).nonzero()[0][: self._numbers.capacity[table] - self._numbers.num_keys(table)]
        planned = self._numbers.plan_upsert(table, different[new])
        self._numbers.insert(table, different[new], planned)
        numbers[new], self._keys[table][planned.rows] = planned.rows, different[new]
        return numbers[places]


class HotSet:
    """Copies of some rows. Which they are never changes; what they hold is written by `HotRows`.

    Args:
        layout: the model's tables.
        keys: what rows are counted by, table << 32 | number: int64 [n], ascending, none twice.
        rows: the rows, or keys of tables, int64 [n]; by default the numbers are the rows.

    Attributes:
        keys, rows: as given.
        size_bytes: memory that it uses.
        users: lookups that use it now; counted by `HotRows`.
        is_filled: bool [n], which rows were written, or deleted.
    """

    def __init__(self, layout: TableLayout, keys: Int64Array, rows: Int64Array | None = None) -> None:
        self.keys, self.users = keys, 0
        self.rows = keys & ((1 << TABLE_SHIFT) - 1) if rows is None else rows
        self.is_filled, self._is_gone = np.zeros((2, keys.size), np.bool_)
        self._has_gone = False
        # The first number of each table, then n.
        self._starts: Int64Array = keys.searchsorted(np.arange(len(layout.tables) + 1, dtype=np.int64) << TABLE_SHIFT)
        self._index = KeyIndex(np.diff(self._starts).tolist())
        for number, (first, end) in enumerate(pairwise(self._starts.tolist())):
            self._index.insert(number, self.rows[first:end], np.arange(end - first))
        self._group_starts = self._starts[[*(group.first_table for group in layout.groups), -1]]
        # An engine of tables that have these rows alone, undivided and in order.
        sizes = zip(layout.tables, np.maximum(np.diff(self._starts), 1).tolist(), strict=True)
        tables = (table.model_copy(update={"num_embeddings": size, "keys": None}) for table, size in sizes)
        self._layout = replace(layout, tables=tuple(tables))
        self._arenas: list[Arena] = []
        places: list[TablePlace] = []
        for number, (group, count) in enumerate(zip(layout.groups, np.diff(self._group_starts).tolist(), strict=True)):
            stored = allocate_rows(max(1, count), group.row_bytes)  # Torch can't view an array without rows.
            self._arenas.append(Arena(group.dtype, group.embedding_dim, stored, {0: stored.nbytes}))
            for start in self._starts[group.first_table : group.end_table] - self._group_starts[number]:
                places.append(TablePlace(ALL_BITS, 0, np.full((1, 1), number, np.uint16), np.full((1, 1), start)))
        arenas = [range(number, number + 1) for number in range(len(layout.groups))]
        placement = Placement(self._layout, places)
        self._engine = CpuEngine(self._layout, self._arenas, arenas, placement, ["ram"] * len(places))
        rows_bytes = sum(use.size_bytes for use in self._engine.memory())
        self.size_bytes = rows_bytes + self._index.size_bytes + 2 * (keys.nbytes + self.is_filled.nbytes)

    def find(self, bags: Bags) -> HotLookup:
        """Find which values of bags of tables are here."""
        counts = bags.values_per_key()
        numbers = self._index.find(bags.keys, counts, bags.values.astype(np.int64, copy=False))
        is_hit = numbers != ABSENT
        if self._has_gone:
            is_hit &= ~self._is_gone.take(numbers + self._starts.take(bags.keys).repeat(counts), mode="clip")
        return HotLookup(self, numbers, is_hit)

    def answer(self, part: Part, numbers: Int64Array, forms: ReplyEncoding) -> Answer:
        """Pool a part of a batch, in the forms that the caller takes, by the numbers of its values."""
        bags = part.bags
        # Numbers and offsets have one dtype.
        offsets, values = (array.astype(np.int32, copy=False) for array in (bags.offsets, numbers))
        checked = CheckedBags(bags.keys, bags.bags_per_key, offsets, values, bags.weights, layout=self._layout)  # type: ignore[arg-type]
        return self._engine.answer(checked, stored=forms.stored)

    def write_rows(self, rows: Int64Array, of_tables: Sequence[tuple[int, StoredRows | None]]) -> int:
        """Replace those rows that are here, or take them out, of several tables together; see `RowUpdate`."""
        writes: list[tuple[int, Int64Array, StoredRows]] = []
        marks = list[tuple[Int64Array, bool]]()
        for table, stored in of_tables:
            numbers = self._index.find(np.array([table]), np.array([rows.size]), rows)
            is_hit = numbers != ABSENT
            marks.append((numbers[is_hit] + self._starts[table], stored is None))
            if stored is not None:
                writes.append((table, numbers[is_hit], stored[is_hit]))
        written = self._engine.write_together(writes) if any(rows.size for _, rows, _ in writes) else 0
        # A row that comes back is found once it is written.
        for at, is_gone in marks:
            self.is_filled[at], self._is_gone[at] = True, is_gone
            self._has_gone |= is_gone and at.size > 0
        return written

    def read(self, numbers: Int64Array) -> list[StoredRows]:
        """Copy rows by the numbers of their keys, int64 [m], ascending: those of each group. Nobody may write."""
        edges = numbers.searchsorted(self._group_starts).tolist()
        pieces = zip(self._arenas, self._group_starts, pairwise(edges), strict=False)
        return [arena.take(numbers[first:end] - start) for arena, start, (first, end) in pieces]

    def gone(self, numbers: Int64Array) -> Int64Array:
        """Return the positions of those that were deleted, of the numbers of keys, int64 [m]."""
        return self._is_gone[numbers].nonzero()[0]

    def fill(self, numbers: Int64Array, stored: Sequence[StoredRows], gone: npt.NDArray[np.integer]) -> None:
        """Write rows that were not written yet, as those of `read` and `gone`. Nobody may pool from it, or write."""
        deleted = numbers[gone]
        self._is_gone[deleted[~self.is_filled[deleted]]] = True
        self._has_gone |= gone.size > 0
        edges = numbers.searchsorted(self._group_starts).tolist()
        for number, (first, end) in enumerate(pairwise(edges)):
            of_group = numbers[first:end]
            is_open = ~self.is_filled.take(of_group)
            self._arenas[number].write(of_group[is_open] - self._group_starts[number], stored[number][is_open])
        self.is_filled[numbers] = True

    def close(self) -> None:
        """Free the rows. Nobody may use it; one without rows may be used again."""
        if self.keys.size:
            self._engine.close()


@dataclass(frozen=True, slots=True, eq=False)
class HotLookup:
    """What of one batch is in a set: its values' numbers in their tables, int64 [n], and which are hits, bool [n]."""

    hot: HotSet
    numbers: Int64Array
    is_hit: BoolArray


class HotRows:
    """The hot rows of one served version. Thread-safe; one keeper changes what it holds.

    Args:
        layout: the model's tables.
        learned: counts all lookups, for a keeper that learns; None if nobody does.
        max_keys: of each table with keys, that lookups are counted of.

    Attributes:
        current: the set in use.
        access: how often each row was looked up here; nodes never hear of these lookups.
        numbers: what `learned` counts keys by.
        deltas: how far its rows are along their stream of deltas.
    """

    def __init__(self, layout: TableLayout, learned: AccessCounter | None = None, max_keys: int = 0) -> None:
        self.layout, self.learned, self.numbers = layout, learned, KeyNumbers(layout, max_keys)
        self.access = LookupSampler(layout)
        self.deltas = DeltaPosition()
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._empty = HotSet(layout, np.empty(0, np.int64))
        # In use, being filled, and used before: each may be the same as another.
        self.current = self._pending = self._retired = self._empty
        self._written: RowUpdate = self._empty.keys, ()
        self._counts = np.zeros((2, len(layout.tables)), np.int64)

    def counts(self) -> tuple[Int64Array, Int64Array]:
        """Return lookups of each table since the last call, int64 [tables], and those that found their row."""
        with self._lock:
            counts, self._counts = self._counts, np.zeros_like(self._counts)
        return counts[0], counts[1]

    @contextmanager
    def used(self) -> Iterator[tuple[HotSet, int, int]]:
        """Yield the set for one batch of lookups, the delta of its rows and their age; it stays while the block runs.

        All are of one moment: of deltas that are applied after another set is in use, this one never hears.
        """
        with self._lock:
            hot, progress = self.current, self.deltas.now
            hot.users += 1
        try:
            yield hot, progress.sequence, progress.age_ms(time.time())
        finally:
            with self._lock:
                hot.users -= 1

    def looked_up(self, bags: Bags, lookup: HotLookup, hits: Part | None) -> None:
        """Count a batch that was answered, and queue its keys to be learned from if there is room for them."""
        values_per_key, size = bags.values_per_key(), bags.num_values
        with self._lock:
            self._counts[0, bags.keys] += values_per_key
            if hits is not None:
                self._counts[1, hits.bags.keys] += hits.bags.values_per_key()
        learned = self.learned  # a keeper that ends by itself sets it to None at any moment
        if learned is not None and not learned.is_full:
            learned.add_later(lambda: self.numbers.counted(bags.keys.repeat(values_per_key), bags.values), size)
        if hits is not None:
            self.access.observe(hits.bags.keys, hits.bags.values_per_key(), hits.bags.values)

    def write_rows(self, table: int | tuple[int, ...], rows: Int64Array, stored: StoredRows) -> int:
        """As `Engine.write_rows`, to the rows in use and to those that are being filled in."""
        update = rows, self.layout.rows_by_table(table, rows, stored)
        pieces = ((rows[of], self.layout.rows_by_table(table, rows[of], stored[of])) for of in write_pieces(stored))
        return sum(self._write(update, piece) for piece in pieces)

    def update_keys(self, tables: Sequence[int], keys: Int64Array, stored: StoredRows | None) -> tuple[int, int]:
        """Replace, or take out, copies of keys of several tables together; returns how many were replaced, and 0."""
        if stored is not None:
            return self.write_rows(tuple(tables), keys, stored), 0
        gone = keys, [(table, None) for table in tables]
        return self._write(gone, gone), 0

    def _write(self, update: RowUpdate, piece: RowUpdate) -> int:
        with self._writing:
            self._written = update
            if self._pending is not self.current:
                self._pending.write_rows(*piece)
            return self.current.write_rows(*piece)

    def begin(self, pending: HotSet) -> None:
        """Have a set, which is going to be filled, get the last row update, which may be half done, and later ones."""
        with self._writing:
            self._pending = pending
            if pending is not self.current:
                pending.write_rows(*self._written)

    def copy(self, pending: HotSet, numbers: Int64Array) -> None:
        """Fill in what the set in use has of rows of a set that has begun: numbers of keys, int64 [m], ascending."""
        keys = pending.keys.take(numbers)
        is_known = np.isin(keys, self.current.keys, assume_unique=True)
        at = self.current.keys.searchsorted(keys[is_known])
        with self._writing:
            pending.fill(numbers[is_known], self.current.read(at), self.current.gone(at))

    def fill(
        self,
        pending: HotSet,
        numbers: Int64Array,
        stored: Sequence[StoredRows],
        missing: npt.NDArray[np.integer] = NONE_MISSING,
    ) -> None:
        """Fill in rows of a set that has begun, and positions of missing keys.

        A row update that came meanwhile counts, and not what was read.
        """
        with self._writing:
            pending.fill(numbers, stored, missing)

    def use(self, pending: HotSet | None) -> HotSet:
        """Put a set that is filled in use, or none. Return the one before, to be closed once it has no users."""
        with self._writing, self._lock:
            self._retired, self.current = self.current, pending or self._empty
            self._written = self._written if pending else (self._empty.keys, ())
            self._pending = self.current
        return self._retired

    def retired(self) -> None:
        """Free the set that was in use before, which no lookup uses any more."""
        self._retired.close()
        self._retired = self._empty

    def close(self) -> None:
        """Free all rows, and what was learned. No lookup, and nobody who writes, may be left."""
        for hot in (self._pending, self._retired, self.use(None)):
            hot.close()
        self._retired, self.learned = self._empty, None
