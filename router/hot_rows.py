"""Hot rows: copies, at the router, of the rows that are looked up most. They are pooled here; all others fan out.

A `HotSet` never changes which rows it has: keys are found by one hash index, and pooled by an engine in which every
table has only these rows. `HotRows` is the tier of one served version: the set that is in use, the one that is being
filled, and what was counted. `router.hot_keeper` decides which rows there are, and keeps them up to date.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from loader.access_counts import AccessCounter
from loader.snapshot.tables import Frozen
from shard_node.access_counts import HALF_LIFE, MAX_ROWS, MAX_VALUES, MIN_QUEUED, TABLE_SHIFT, LookupSampler
from shard_node.answer import Answer, Forms
from shard_node.bags import CheckedBags, Int32Array, Int64Array, KeyedBags, TableLayout
from shard_node.buckets import ALL_BITS
from shard_node.engine.arena import Arena, Placement, TablePlace, allocate_rows
from shard_node.engine.cpu import CpuEngine
from shard_node.node import DeltaPosition
from shard_node.split import Part

BoolArray: TypeAlias = npt.NDArray[np.bool_]
StoredRows: TypeAlias = npt.NDArray[np.uint8]
HotPolicy: TypeAlias = Literal["learning", "static"]

COPY_BYTES: Final = 512 << 10
"""Of rows that are copied while row updates wait."""
ROW_OVERHEAD_BYTES: Final = 13
"""Of a set beside row and index: its key, a counter of its lookups, whether it is filled."""
_EMPTY: Final = -1
_ENTRY_BYTES: Final = 12
# Multiply-shift (Dietzfelbinger et al., 1997); the golden ratio spreads rows that follow one another evenly.
_FACTORS: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_LONG_PROBE: Final = 32


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

    Keys lie in the order of their home places, so no key is farther from its own than the longest probe, which ends
    every search. `keys`, int64 [n], are not negative, none twice; a key's number is its position there.
    """

    def __init__(self, keys: Int64Array) -> None:
        self._shift = np.uint64(64 - _index_bits(keys.size))
        for number, factor in enumerate(_FACTORS):
            self._factor = np.uint64(factor)
            home = self._homes(keys)
            order = np.argsort(home, kind="stable")
            in_order = home.take(order)
            steps = np.arange(keys.size)
            # Each as near to its home as those before it allow.
            place = np.maximum.accumulate(in_order - steps) + steps
            self._longest = int((place - in_order).max(initial=0))
            if self._longest <= _LONG_PROBE or number == len(_FACTORS) - 1:
                break
        size = max(1 << _index_bits(keys.size), int(place.max(initial=-1)) + 1) + 1
        self._entries = np.full(size, _EMPTY, np.int64)
        self._entries[place] = keys.take(order)
        self._numbers = np.zeros(size, np.int32)
        self._numbers[place] = order

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        return self._entries.nbytes + self._numbers.nbytes

    def find(self, keys: Int64Array) -> tuple[Int64Array, BoolArray]:
        """Find keys, int64 [n]: their places here, int64 [n], and whether each is here at all, bool [n]."""
        at = self._homes(keys)
        held = self._entries.take(at)
        is_here = held == keys
        left = ((held != _EMPTY) & ~is_here).nonzero()[0]
        sought, places = keys.take(left), at.take(left)
        for _ in range(self._longest):
            if not left.size:
                break
            places += 1
            held = self._entries.take(places)
            found = held == sought
            at[left[found]] = places[found]
            is_here[left[found]] = True
            go_on = ((held != _EMPTY) & ~found).nonzero()[0]
            left, sought, places = left.take(go_on), sought.take(go_on), places.take(go_on)
        return at, is_here

    def numbers(self, at: Int64Array) -> Int32Array:
        """Return the numbers of keys that are here, int32 [m], by their places."""
        return self._numbers.take(at)

    def _homes(self, keys: Int64Array) -> Int64Array:
        homes = keys.view(np.uint64) * self._factor
        homes >>= self._shift
        return homes.view(np.int64)


def _index_bits(num_keys: int) -> int:
    return max(1, (2 * num_keys - 1).bit_length())


def index_bytes(num_keys: int) -> int:
    """Count the bytes of an index at most, but for the few that keys at its end may take."""
    return _ENTRY_BYTES << _index_bits(num_keys)


def set_bytes(num_rows: int, rows_bytes: int) -> int:
    """Count the bytes of a set of so many rows, which take `rows_bytes` themselves."""
    return rows_bytes + ROW_OVERHEAD_BYTES * num_rows + index_bytes(num_rows)


class HotSet:
    """Copies of some rows. Which they are never changes; what they hold is written by `HotRows`.

    Args:
        layout: the model's tables.
        keys: int64 [n], ascending, none twice.

    Attributes:
        keys: as given.
        users: lookups that use it now; counted by `HotRows`.
        is_filled: bool [n], which rows were written.
    """

    def __init__(self, layout: TableLayout, keys: Int64Array) -> None:
        self.keys = keys
        self.users = 0
        self.is_filled = np.zeros(keys.size, np.bool_)
        self._index = HotIndex(keys)
        # The first key of each table, then n.
        self._starts: Int64Array = keys.searchsorted(np.arange(len(layout.tables) + 1, dtype=np.int64) << TABLE_SHIFT)
        self._arenas: list[Arena] = []
        places: list[TablePlace] = []
        for number, group in enumerate(layout.groups):
            first, end = int(self._starts[group.first_table]), int(self._starts[group.end_table])
            # Torch can't view an array without rows.
            rows = allocate_rows(max(1, end - first), group.row_bytes)
            self._arenas.append(Arena(group.dtype, group.embedding_dim, rows, {0: rows.nbytes}, "ram"))
            for start in self._starts[group.first_table : group.end_table].tolist():
                arena = np.full((1, 1), number, np.uint16)
                places.append(TablePlace(ALL_BITS, 0, arena, np.full((1, 1), start - first, np.int64)))
        # An engine of tables that have these rows alone, whole and in order: a row's number there counts those below.
        counts = np.diff(self._starts).tolist()
        self._layout = replace(
            layout,
            tables=tuple(
                table.model_copy(update={"num_embeddings": max(1, count)})
                for table, count in zip(layout.tables, counts, strict=True)
            ),
        )
        arenas = [range(number, number + 1) for number in range(len(layout.groups))]
        tiers = ["ram"] * len(places)
        self._engine = CpuEngine(self._layout, self._arenas, arenas, Placement(self._layout, places), tiers)  # type: ignore[arg-type]
        self._first_of_group = self._starts[[group.first_table for group in layout.groups]]

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        rows = sum(use.size_bytes for use in self._engine.memory())
        return rows + self._index.size_bytes + ROW_OVERHEAD_BYTES * self.keys.size

    def find(self, bags: KeyedBags) -> HotLookup:
        """Find which values of bags of tables are here."""
        keys = np.repeat(bags.keys.astype(np.int64) << TABLE_SHIFT, bags.values_per_key())
        keys += bags.values
        at, is_hit = self._index.find(keys)
        return HotLookup(self, keys, at, is_hit)

    def answer(self, part: Part, at: Int64Array, forms: Forms) -> Answer:
        """Pool a part of a batch, in the forms that the caller takes; `at` are its values' places in the index."""
        bags = part.bags
        numbers = self._index.numbers(at)
        firsts = self._starts.take(bags.keys).astype(np.int32)
        if firsts.any():
            numbers -= np.repeat(firsts, bags.values_per_key())
        # Numbers and offsets have one dtype.
        offsets = bags.offsets.astype(np.int32, copy=False)
        checked = CheckedBags(bags.keys, bags.bags_per_key, offsets, numbers, bags.weights, layout=self._layout)  # type: ignore[arg-type]
        return self._engine.answer(checked) if forms.stored else Answer(self._engine.pool(checked))

    def write_rows(self, rows: Int64Array, of_tables: Sequence[tuple[int, StoredRows]]) -> int:
        """Replace those rows that are here, of several tables together: tables, each with the rows as stored."""
        writes: list[tuple[int, Int64Array, StoredRows]] = []
        for table, stored in of_tables:
            at, is_here = self._index.find(rows + (np.int64(table) << TABLE_SHIFT))
            numbers = self._index.numbers(at[is_here]).astype(np.int64)
            self.is_filled[numbers] = True
            writes.append((table, numbers - self._starts[table], stored[is_here]))
        return self._engine.write_together(writes) if any(rows.size for _, rows, _ in writes) else 0

    def take(self, group: int, numbers: Int64Array) -> StoredRows:
        """Copy rows of one group by the numbers of their keys, int64 [m]: uint8 [m, row_bytes]. Nobody may write."""
        return self._arenas[group].take(numbers - self._first_of_group[group])

    def put(self, group: int, numbers: Int64Array, stored: StoredRows) -> None:
        """Fill in rows of one group that are not written yet. Nobody may pool from it, or write."""
        is_open = ~self.is_filled.take(numbers)
        numbers, stored = numbers[is_open], stored[is_open]
        self._arenas[group].write(numbers - self._first_of_group[group], stored)
        self.is_filled[numbers] = True

    def groups_of(self, numbers: Int64Array) -> Iterator[tuple[int, Int64Array]]:
        """Divide numbers of keys, ascending, by group."""
        edges = [*numbers.searchsorted(self._first_of_group).tolist(), numbers.size]
        for group, (first, end) in enumerate(pairwise(edges)):
            if first < end:
                yield group, numbers[first:end]

    def close(self) -> None:
        """Free the rows. Nobody may use it."""
        self._engine.close()


@dataclass(frozen=True, slots=True, eq=False)
class HotLookup:
    """What of one batch is in a set.

    Attributes:
        hot: the set.
        keys: int64 [n], of all values.
        at: int64 [n], the place of each that is here.
        is_hit: bool [n], whether it is.
    """

    hot: HotSet
    keys: Int64Array
    at: Int64Array
    is_hit: BoolArray


class HotRows:
    """The hot rows of one served version. Thread-safe; one keeper changes what it holds.

    Args:
        layout: the model's tables.
        max_counted: rows whose hits are counted.
        learned: counts all lookups, for a keeper that learns; None if nobody does.

    Attributes:
        access: how often each row was looked up here; nodes never hear of these lookups.
        learned: as given.
        deltas: how far its rows are along their stream of deltas.
    """

    def __init__(self, layout: TableLayout, max_counted: int = MAX_ROWS, learned: AccessCounter | None = None) -> None:
        self.layout, self.learned = layout, learned
        counter = AccessCounter(max_counted, min(max(max_counted, MAX_VALUES), MIN_QUEUED), HALF_LIFE)
        self.access = LookupSampler(layout, counter=counter)
        self.deltas = DeltaPosition()
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self.current = HotSet(layout, np.empty(0, np.int64))
        self._pending: HotSet | None = None
        self._counts = np.zeros((2, len(layout.tables)), np.int64)

    @property
    def engine(self) -> HotRows:
        """Itself: where a follower of deltas writes rows."""
        return self

    def counts(self) -> tuple[Int64Array, Int64Array]:
        """Return all lookups of each table, int64 [tables], and those that found their row, int64 [tables]."""
        with self._lock:
            lookups, hits = self._counts.copy()
        return lookups, hits

    @contextmanager
    def used(self) -> Iterator[tuple[HotSet, int]]:
        """Give the set for one batch of lookups, and a delta that all of its rows have: they stay while the block runs.

        Both are of one moment: of deltas that are applied after another set is in use, this one never hears.
        """
        with self._lock:
            hot, sequence = self.current, self.deltas.sequence
            hot.users += 1
        try:
            yield hot, sequence
        finally:
            with self._lock:
                hot.users -= 1

    def looked_up(self, bags: KeyedBags, found: HotLookup, hits: Part | None) -> None:
        """Count a batch that was answered, and queue its keys to be learned from if there is room for them."""
        values_per_key = bags.values_per_key()
        with self._lock:
            self._counts[0, bags.keys] += values_per_key
            if hits is not None:
                self._counts[1, hits.bags.keys] += hits.bags.values_per_key()
        if self.learned is not None and not self.learned.is_full:
            self.learned.add(found.keys)
        if hits is not None:
            self.access.observe(hits.bags.keys, hits.bags.values_per_key(), hits.bags.values)

    def write_rows(self, table: int | tuple[int, ...], rows: Int64Array, stored: StoredRows) -> int:
        """As `Engine.write_rows`, to the rows in use and to those that are being filled in."""
        of_tables = self.layout.rows_by_table(table, rows, stored)
        with self._writing:
            if self._pending is not None:
                self._pending.write_rows(rows, of_tables)
            return self.current.write_rows(rows, of_tables)

    def begin(self, keys: Int64Array) -> HotSet:
        """Begin to fill a set with rows, int64 [n] keys, ascending. What the set in use has of them is copied."""
        pending, current = HotSet(self.layout, keys), self.current
        with self._writing:
            self._pending = pending
        numbers = np.flatnonzero(np.isin(keys, current.keys, assume_unique=True))
        for group, of_group in pending.groups_of(numbers):
            step = max(1, COPY_BYTES // self.layout.groups[group].row_bytes)
            for first in range(0, of_group.size, step):
                piece = of_group[first : first + step]
                with self._writing:
                    stored = current.take(group, current.keys.searchsorted(keys.take(piece)))
                    pending.put(group, piece, stored)
        return pending

    def put(self, pending: HotSet, group: int, numbers: Int64Array, stored: StoredRows) -> None:
        """Fill in rows of a set that has begun. A row update that came meanwhile counts, and not what was read."""
        with self._writing:
            pending.put(group, numbers, stored)

    def use(self, pending: HotSet) -> HotSet:
        """Put a set that is filled in use. Returns the one before, which must be closed once it has no users."""
        with self._writing, self._lock:
            before, self.current, self._pending = self.current, pending, None
        return before

    def drop(self) -> None:
        """Free the set that is being filled, if there is one."""
        with self._writing:
            pending, self._pending = self._pending, None
        if pending is not None:
            pending.close()

    def close(self) -> None:
        """Free all rows. No lookup, and nobody who writes, may be left."""
        self.drop()
        self.use(HotSet(self.layout, np.empty(0, np.int64))).close()
