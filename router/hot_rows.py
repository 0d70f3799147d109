"""Hot rows: copies, at the router, of the rows that are looked up most. They are pooled here; all others fan out.

A `HotSet` never changes which rows it has: keys are found by one hash index, and pooled by an engine in which every
table has only these rows. `HotRows` is the tier of one served version: the set that is in use, the one that is being
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
from loader.snapshot.tables import Frozen
from shard_node.access_counts import TABLE_SHIFT, LookupSampler
from shard_node.answer import Answer, ReplyEncoding, StoredRows
from shard_node.bags import Bags, CheckedBags, Int64Array, TableLayout
from shard_node.buckets import ALL_BITS
from shard_node.engine.arena import Arena, Placement, TablePlace
from shard_node.engine.base import write_pieces
from shard_node.engine.cpu import CpuEngine
from shard_node.node import DeltaPosition
from shard_node.split import Part

BoolArray: TypeAlias = npt.NDArray[np.bool_]
HotPolicy: TypeAlias = Literal["learning", "static"]

ROW_OVERHEAD_BYTES: Final = 57
"""Of a set for each row, at most: its key, whether it is filled, and four entries of the index."""
_EMPTY: Final = -1
# Multiply-shift (Dietzfelbinger et al., 1997); the golden ratio spreads rows that follow one another evenly.
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)


class HotRowsConfig(Frozen):
    """A tier of hot rows.

    Attributes:
        size_bytes: that the tier of one version takes at most: rows, index, what it learns, and a set that is built.
        policy: `static` holds those that the snapshot's access counts name; `learning` those looked up most of late.
    """

    size_bytes: int = Field(ge=1)
    policy: HotPolicy = "learning"


class HotIndex:
    """Finds keys exactly: open addressing with linear probing, at most half full, in rounds of vector operations.

    Keys are in the order of their home places, so no key is farther from its home than the longest probe, which ends
    every search. `keys`, int64 [n], are not negative, none twice; a key's number is its position there, which
    `numbers`, int32, has at the key's place here.
    """

    def __init__(self, keys: Int64Array) -> None:
        bits = max(1, (2 * keys.size - 1).bit_length())
        self._shift = np.uint64(64 - bits)
        home = self._homes(keys)
        order = np.argsort(home, kind="stable")
        in_order, steps = home.take(order), np.arange(keys.size)
        # Each as near to its home as those before it allow.
        at = np.maximum.accumulate(in_order - steps) + steps
        self._longest = int((at - in_order).max(initial=0))
        size = max(1 << bits, int(at.max(initial=-1)) + 1) + 1
        self._entries = np.full(size, _EMPTY, np.int64)
        self._entries[at] = keys.take(order)
        self.numbers = np.zeros(size, np.int32)
        self.numbers[at] = order
        self.size_bytes = self._entries.nbytes + self.numbers.nbytes

    def find(self, keys: Int64Array) -> tuple[Int64Array, BoolArray]:
        """Find keys, int64 [n]: their places here, int64 [n], and whether each is here at all, bool [n]."""
        at = self._homes(keys)
        entries = self._entries.take(at)
        is_hit = entries == keys
        left = ((entries != _EMPTY) & ~is_hit).nonzero()[0]
        sought, places = keys.take(left), at.take(left)
        for _ in range(self._longest):
            if not left.size:
                break
            places += 1
            entries = self._entries.take(places)
            is_match = entries == sought
            at[left[is_match]] = places[is_match]
            is_hit[left[is_match]] = True
            go_on = ((entries != _EMPTY) & ~is_match).nonzero()[0]
            left, sought, places = left.take(go_on), sought.take(go_on), places.take(go_on)
        return at, is_hit

    def _homes(self, keys: Int64Array) -> Int64Array:
        homes = keys.view(np.uint64) * _FACTOR
        homes >>= self._shift
        return homes.view(np.int64)


class HotSet:
    """Copies of some rows. Which they are never changes; what they hold is written by `HotRows`.

    Args:
        layout: the model's tables.
        keys: int64 [n], ascending, none twice.

    Attributes:
        keys: as given.
        size_bytes: memory that it uses.
        users: lookups that use it now; counted by `HotRows`.
        is_filled: bool [n], which rows were written.
    """

    def __init__(self, layout: TableLayout, keys: Int64Array) -> None:
        self.keys, self.users = keys, 0
        self.is_filled = np.zeros(keys.size, np.bool_)
        self._index = HotIndex(keys)
        # The first number of each table, then n.
        self._starts: Int64Array = keys.searchsorted(np.arange(len(layout.tables) + 1, dtype=np.int64) << TABLE_SHIFT)
        self._group_starts = self._starts[[*(group.first_table for group in layout.groups), -1]]
        # An engine of tables that have these rows alone, undivided and in order.
        sizes = zip(layout.tables, np.maximum(np.diff(self._starts), 1).tolist(), strict=True)
        tables = (table.model_copy(update={"num_embeddings": size}) for table, size in sizes)
        self._layout = replace(layout, tables=tuple(tables))
        self._arenas: list[Arena] = []
        places: list[TablePlace] = []
        for number, (group, count) in enumerate(zip(layout.groups, np.diff(self._group_starts).tolist(), strict=True)):
            rows = allocate_rows(max(1, count), group.row_bytes)  # Torch can't view an array without rows.
            self._arenas.append(Arena(group.dtype, group.embedding_dim, rows, {0: rows.nbytes}, "ram"))
            for start in self._starts[group.first_table : group.end_table] - self._group_starts[number]:
                places.append(TablePlace(ALL_BITS, 0, np.full((1, 1), number, np.uint16), np.full((1, 1), start)))
        arenas = [range(number, number + 1) for number in range(len(layout.groups))]
        placement = Placement(self._layout, places)
        self._engine = CpuEngine(self._layout, self._arenas, arenas, placement, ["ram"] * len(places))
        rows_bytes = sum(use.size_bytes for use in self._engine.memory())
        self.size_bytes = rows_bytes + self._index.size_bytes + keys.nbytes + self.is_filled.nbytes

    def find(self, bags: Bags) -> HotLookup:
        """Find which values of bags of tables are here."""
        keys = np.repeat(bags.keys.astype(np.int64) << TABLE_SHIFT, bags.values_per_key())
        keys += bags.values
        if self._layout.has_keys:
            # Of tables with keys there are no copies, and a key may be as large as any other table's row is here.
            keys[self._layout.is_keyed[bags.keys].repeat(bags.values_per_key())] = _EMPTY
        at, is_hit = self._index.find(keys)
        if self._layout.has_keys:
            is_hit &= keys != _EMPTY
        return HotLookup(self, keys, at, is_hit)

    def answer(self, part: Part, at: Int64Array, forms: ReplyEncoding) -> Answer:
        """Pool a part of a batch, in the forms that the caller takes; `at` are its values' places in the index."""
        bags = part.bags
        numbers = self._index.numbers.take(at)
        firsts = self._starts.take(bags.keys).astype(np.int32)
        if firsts.any():
            numbers -= np.repeat(firsts, bags.values_per_key())
        # Numbers and offsets have one dtype.
        offsets = bags.offsets.astype(np.int32, copy=False)
        checked = CheckedBags(bags.keys, bags.bags_per_key, offsets, numbers, bags.weights, layout=self._layout)  # type: ignore[arg-type]
        return self._engine.answer(checked, stored=forms.stored)

    def write_rows(self, rows: Int64Array, of_tables: Sequence[tuple[int, StoredRows]]) -> int:
        """Replace those rows that are here, of several tables together: tables, each with the rows as stored."""
        writes: list[tuple[int, Int64Array, StoredRows]] = []
        for table, stored in of_tables:
            at, is_hit = self._index.find(rows + (np.int64(table) << TABLE_SHIFT))
            numbers = self._index.numbers.take(at[is_hit]).astype(np.int64)
            self.is_filled[numbers] = True
            writes.append((table, numbers - self._starts[table], stored[is_hit]))
        return self._engine.write_together(writes) if any(rows.size for _, rows, _ in writes) else 0

    def read(self, numbers: Int64Array) -> list[StoredRows]:
        """Copy rows by the numbers of their keys, int64 [m], ascending: those of each group. Nobody may write."""
        edges = numbers.searchsorted(self._group_starts).tolist()
        pieces = zip(self._arenas, self._group_starts, pairwise(edges), strict=False)
        return [arena.take(numbers[first:end] - start) for arena, start, (first, end) in pieces]

    def fill(self, numbers: Int64Array, stored: Sequence[StoredRows]) -> None:
        """Write rows that were not written yet: as those of `read`. Nobody may pool from it, or write."""
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
    """What of one batch is in a set: its values' keys, int64 [n], their places, int64 [n], and which are hits, bool."""

    hot: HotSet
    keys: Int64Array
    at: Int64Array
    is_hit: BoolArray


class HotRows:
    """The hot rows of one served version. Thread-safe; one keeper changes what it holds.

    Args:
        layout: the model's tables.
        learned: counts all lookups, for a keeper that learns; None if nobody does.

    Attributes:
        current: the set in use.
        access: how often each row was looked up here; nodes never hear of these lookups.
        deltas: how far its rows are along their stream of deltas.
    """

    def __init__(self, layout: TableLayout, learned: AccessCounter | None = None) -> None:
        self.layout, self.learned = layout, learned
        self.access = LookupSampler(layout)
        self.deltas = DeltaPosition()
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._empty = HotSet(layout, np.empty(0, np.int64))
        # In use, being filled, and used before: each may be the same as another.
        self.current = self._pending = self._retired = self._empty
        self._written: tuple[Int64Array, Sequence[tuple[int, StoredRows]]] = self._empty.keys, ()
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
        values_per_key = bags.values_per_key()
        with self._lock:
            self._counts[0, bags.keys] += values_per_key
            if hits is not None:
                self._counts[1, hits.bags.keys] += hits.bags.values_per_key()
        learned = self.learned  # a keeper that ends by itself sets it to None at any moment
        if learned is not None and not learned.is_full:
            learned.add(lookup.keys[lookup.keys != _EMPTY] if self.layout.has_keys else lookup.keys)
        if hits is not None:
            self.access.observe(hits.bags.keys, hits.bags.values_per_key(), hits.bags.values)

    def write_rows(self, table: int | tuple[int, ...], rows: Int64Array, stored: StoredRows) -> int:
        """As `Engine.write_rows`, to the rows in use and to those that are being filled in."""
        written, update = 0, (rows, self.layout.rows_by_table(table, rows, stored))
        for piece in write_pieces(stored):
            of_tables = self.layout.rows_by_table(table, rows[piece], stored[piece])
            with self._writing:
                self._written = update
                if self._pending is not self.current:
                    self._pending.write_rows(rows[piece], of_tables)
                written += self.current.write_rows(rows[piece], of_tables)
        return written

    def update_keys(self, tables: Sequence[int], keys: Int64Array, stored: StoredRows | None) -> tuple[int, int]:
        """Do nothing: of tables with keys there are no copies."""
        return 0, 0

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
            pending.fill(numbers[is_known], self.current.read(at))

    def fill(self, pending: HotSet, numbers: Int64Array, stored: Sequence[StoredRows]) -> None:
        """Fill in rows of a set that has begun. A row update that came meanwhile counts, and not what was read."""
        with self._writing:
            pending.fill(numbers, stored)

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
