"""The CPU engine: rows in arenas, one torch call per arena and batch."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from loader.snapshot.codecs import RowCodec
from shard_node.access_counts import LookupSampler
from shard_node.answer import NONE_MISSING, Answer, StoredRows, group_keys, travel_as_stored
from shard_node.bags import Bags, Float32Array, Group, Int64Array, TableLayout
from shard_node.engine.arena import NOT_HERE, Arena, Placement
from shard_node.engine.base import CardsUse, DiskUse, LookupCount, MemoryUse, Tier, write_pieces
from shard_node.engine.keyed_tables import KeyedTables, RowWrite, Upsert
from shard_node.engine.tiered_rows import FetchedRows, TieredRows
from shard_node.errors import InvalidBagsError
from shard_node.generation import RowLock
from shard_node.split import add, split

Of = TypeVar("Of")
CLAIM_BYTES: Final = 1 << 20  # For rows on disk that were written, and rows of new keys, at a time.
KEPT_TIMES: Final = 1024  # Of lookups in one tier.

_NO_ROWS: Final = np.zeros(0, np.int64)
Rows: TypeAlias = Sequence[Arena | FetchedRows]
"""By the number of their arena, for one batch."""


class _GroupArenas(NamedTuple):
    group: Group
    arenas: range
    # Whether one arena has all rows in row order; then also, whether rows are its slots.
    is_undivided: bool
    are_slots: bool


class CpuEngine:
    """Pools bags from arenas on this machine. Implements `Engine`.

    Each pooling call runs in the caller's thread with one intra-op thread; several may run at once, since torch lets
    go of the interpreter lock while it reads rows. Rows are written while no call pools.

    `group_arenas` has, for each group of the layout, the numbers of the arenas that hold its rows; `tiers` are those of
    the tables. Rows on disk are read before a batch's rows may not change, so that no writer waits for a disk. `claim`
    claims bytes of memory for rows on disk that are written, and for rows of new keys, or raises MemoryBudgetError.
    `keyed` has the keys of tables that have such.
    """

    def __init__(
        self,
        layout: TableLayout,
        arenas: Sequence[Arena | TieredRows],
        group_arenas: Sequence[range],
        placement: Placement,
        tiers: Sequence[Tier],
        claim: Callable[[int], object] = int,
        keyed: KeyedTables | None = None,
    ) -> None:
        self.layout = layout
        self._keyed = keyed
        self._arenas = list(arenas)
        self._tiered = {number: rows for number, rows in enumerate(arenas) if isinstance(rows, TieredRows)}
        self._placement = placement
        self._tiers = tuple(tiers)
        self._groups: list[_GroupArenas] = []
        for group, numbers in zip(layout.groups, group_arenas, strict=True):
            is_undivided, are_slots = placement.order_of(slice(group.first_table, group.end_table))
            is_single = len(numbers) == 1
            self._groups.append(_GroupArenas(group, numbers, is_single and is_undivided, is_single and are_slots))
        self._num_tables = len(layout.tables)
        self._counts, self._disk_counts = np.zeros((2, self._num_tables), np.int64)
        # Microseconds of lookups with all rows in memory, and of those that waited for the disk.
        self._times_us = [deque[float](maxlen=KEPT_TIMES), deque[float](maxlen=KEPT_TIMES)]
        self._mover = threading.Thread()
        self._counts_lock = threading.Lock()
        self.access = LookupSampler(layout)
        self._row_lock = RowLock()
        self._writing = threading.Lock()
        self._claim, self._private_bytes = claim, 0

    def pool(self, bags: Bags) -> list[Float32Array]:
        """As `Engine.pool`."""
        return self._of_groups(bags, self._pool_group)[0]

    def answer(self, bags: Bags, *, stored: bool = True) -> Answer:
        """As `Engine.answer`: rows of tables that travel as stored, sums of the others."""
        if not stored:
            blocks, missing = self._of_groups(bags, self._pool_group)
            return Answer(blocks, missing=missing)
        answers, missing = self._of_groups(bags, self._answer_group)
        return Answer([sums for sums, _ in answers], [rows for _, rows in answers], missing=missing)

    def write_rows(self, table: int | tuple[int, ...], rows: Int64Array, stored: npt.NDArray[np.uint8]) -> int:
        """As `Engine.write_rows`."""
        by_table = self.layout.rows_by_table(table, rows, stored)
        self._reserve([number for number, _ in by_table if self._tiers[number] == "disk"], rows)
        return sum(
            self.write_together([(number, rows[piece], of_table[piece]) for number, of_table in by_table])
            for piece in write_pieces(stored)
        )

    def update_keys(
        self, tables: Sequence[int], keys: Int64Array, stored: npt.NDArray[np.uint8] | None
    ) -> tuple[int, int]:
        """As `Engine.update_keys`."""
        if self._keyed is None:
            raise InvalidBagsError("no table of the model has keys")
        with self._writing:
            claim = functools.partial(self._claim_rows, self._keyed, tables)
            return self._keyed.update(tables, keys, stored, self._change_keys, claim)

    def check_ids(self, table: int, ids: Int64Array) -> None:
        """Raise InvalidBagsError if a row or key is not of this node, DeltaError if keys are too many for it."""
        name, count = self.layout.tables[table].name, self.layout.tables[table].num_embeddings
        if self._keyed is not None and self.layout.is_keyed[table]:
            is_local = self._keyed.local(table, ids)
            self._keyed.plan_upsert(table, np.unique(ids[is_local]))
        elif (outside := ids[(ids < 0) | (ids >= count)]).size:
            raise InvalidBagsError(f"row {int(outside[0])} of table {name!r} is outside it")
        else:
            is_local = self._placement.locate_rows(table, ids)[0] != NOT_HERE
        if not is_local.all():
            raise InvalidBagsError(f"id {int(ids[is_local.argmin()])} of table {name!r} is not on this node")

    def rows_of_ids(self, table: int, ids: Int64Array) -> Int64Array:
        """Return the rows of keys, int64 [n], `ABSENT` for one that is missing; of a table without keys, `ids`."""
        if self._keyed is None or not self.layout.is_keyed[table]:
            return ids
        return self._keyed.find(table, ids)

    def read_rows(self, table: int, rows: Int64Array) -> npt.NDArray[np.uint8]:
        """Copy rows of one table that are here, int64 [n], as they are stored: uint8 [n, row_bytes].

        For the thread that writes rows: another one may see a row that is half written.
        """
        arena, slots = self._placement.locate_rows(table, rows)
        spec = self.layout.tables[table]
        rows_of = list(cast("list[Arena | FetchedRows]", self._arenas))
        for number, tiered in self._tiered.items():
            rows_of[number] = tiered.fetch(slots[arena == number])
        row_bytes = RowCodec(spec.dtype, spec.embedding_dim).row_bytes
        self._row_lock.begin_read()  # Rows may move meanwhile.
        try:
            return _copied(rows_of, np.unique(arena).tolist(), arena, slots, row_bytes)
        finally:
            self._row_lock.end_read()

    def _change_keys(self, writes: Sequence[RowWrite], calls: Sequence[Callable[[], object]]) -> None:
        self._row_lock.begin_write()
        try:
            for table, rows, stored in writes:
                self._write_keyed(table, rows, stored)
            for call in calls:
                call()
        finally:
            self._row_lock.end_write()

    def _claim_rows(self, keyed: KeyedTables, tables: Sequence[int], plans: Sequence[Upsert]) -> None:
        """Claim the memory that rows take which were never used before."""
        size_bytes = 0
        # Deletions have no plans.
        for table, plan in zip(tables, plans, strict=False):
            spec = self.layout.tables[table]
            fresh = int((plan.rows >= keyed.used[table]).sum())
            size_bytes += fresh * RowCodec(spec.dtype, spec.embedding_dim).row_bytes
        self._count_private(size_bytes)

    def _write_keyed(self, table: int, rows: Int64Array, stored: npt.NDArray[np.uint8]) -> None:
        arena, slots = self._placement.locate_rows(table, rows)
        if slots.size:
            self._arenas[int(arena[0])].write(slots, np.ascontiguousarray(stored))

    def _count_private(self, size_bytes: int) -> None:
        """Count memory as this engine's, claimed some at a time. Raises MemoryBudgetError."""
        total = self._private_bytes + size_bytes
        before, now = (-(-size // CLAIM_BYTES) * CLAIM_BYTES for size in (self._private_bytes, total))
        if now > before:
            self._claim(now - before)
        self._private_bytes = total

    def _reserve(self, tables: Sequence[int], rows: Int64Array) -> None:
        """Make room in memory for rows of tables on disk. Raises MemoryBudgetError."""
        located = [self._placement.locate_rows(table, rows) for table in tables]
        with self._writing:
            for number, tiered in self._tiered.items() if tables else ():
                tiered.reserve(np.concatenate([at[arenas == number] for arenas, at in located]), self._count_private)

    def write_together(self, writes: Sequence[tuple[int, Int64Array, npt.NDArray[np.uint8]]]) -> int:
        """Replace rows of several tables, each with rows of its own, between the same two lookups.

        Each write is a table, its rows, and these as stored, as `Engine.write_rows` takes them, and checked. Returns
        how many are here.
        """
        parts: list[tuple[Arena | TieredRows, Int64Array, npt.NDArray[np.uint8]]] = []
        for table, rows, of_table in writes:
            arena, slots = self._placement.locate_rows(table, rows)
            for number in np.unique(arena).tolist():
                if number != NOT_HERE:
                    chosen = arena == number
                    part = (slots, of_table) if chosen.all() else (slots[chosen], of_table[chosen])
                    parts.append((self._arenas[number], *part))
        with self._writing:
            self._row_lock.begin_write()
            try:
                for of_arena, at, values in parts:
                    of_arena.write(at, values)
            finally:
                self._row_lock.end_write()
        return sum(at.size for _, at, _ in parts)

    def _of_groups(
        self, bags: Bags, work: Callable[[_GroupArenas, Bags, Int64Array, Rows], Of]
    ) -> tuple[list[Of], npt.NDArray[np.integer[Any]]]:
        """Check the bags, and call `work` with each group's, between two writes; return also which keys are missing."""
        self.layout.check(bags)
        values_per_key, started_at = bags.values_per_key(), time.perf_counter()
        requested, missing = bags, cast("npt.NDArray[np.integer[Any]]", NONE_MISSING)
        rows, on_disk = cast("Rows", self._arenas), _NO_ROWS
        if self._tiered:
            rows, on_disk = self._fetched(bags, values_per_key)
        self._row_lock.begin_read()
        try:
            if self._keyed is not None:
                bags, missing = self._keyed.rows_of(bags, values_per_key)
            if len(self._groups) == 1:
                results = [work(self._groups[0], bags, values_per_key, rows)]
            else:
                edges = zip(self._groups, group_keys(self.layout, bags), strict=True)
                results = [
                    work(group, _slice_keys(bags, first, end), values_per_key[first:end], rows)
                    for group, (_, first, end) in edges
                ]
        finally:
            self._row_lock.end_read()
        with self._counts_lock:
            if self._tiered:
                self._times_us[bool(on_disk.any())].append((time.perf_counter() - started_at) * 1e6)
                self._disk_counts += on_disk
            if bags.keys.size == self._num_tables:
                self._counts += values_per_key
            else:
                self._counts[bags.keys] += values_per_key
        self.access.observe(bags.keys, values_per_key, requested.values)
        return results, missing

    def _fetched(self, bags: Bags, values_per_key: Int64Array) -> tuple[Rows, Int64Array]:
        """Read the rows that are on disk, which no write changes, and have rows move if an epoch is over.

        Returns also how many values of each table were on disk, int64 [tables].
        """
        rows: list[Arena | FetchedRows] = list(cast("list[Arena]", self._arenas))
        on_disk = np.zeros(self._num_tables, np.int64)
        for group, (_, first, end) in zip(self._groups, group_keys(self.layout, bags), strict=True):
            number = group.arenas[-1] if group.arenas else -1
            if number not in self._tiered:
                continue
            of_group, counts = _slice_keys(bags, first, end), values_per_key[first:end]
            arenas, at = self._placement.locate(of_group, counts)
            is_tiered = arenas == number
            fetched = rows[number] = self._tiered[number].fetch(at[is_tiered])
            tables = of_group.keys.repeat(counts)[is_tiered][fetched.is_cold]
            on_disk += np.bincount(tables, minlength=self._num_tables)
        due = [tiered for tiered in self._tiered.values() if tiered.is_due()]
        with self._counts_lock:
            if due and not self._mover.is_alive():
                self._mover = threading.Thread(target=due[0].move, args=(self._writing, self._row_lock), daemon=True)
                self._mover.start()
        return rows, on_disk

    def _answer_group(
        self, group: _GroupArenas, bags: Bags, values_per_key: Int64Array, rows: Rows
    ) -> tuple[Float32Array, StoredRows]:
        is_stored = travel_as_stored(group.group, values_per_key, bags.bags_per_key)
        if is_stored.all():
            return np.empty((0, group.group.embedding_dim), np.float32), self._stored(group, bags, values_per_key, rows)
        if not is_stored.any():
            return self._pool_group(group, bags, values_per_key, rows), np.empty((0, group.group.row_bytes), np.uint8)
        stored, others = bags.of_keys(is_stored), bags.of_keys(~is_stored)
        sums = self._pool_group(group, others, others.values_per_key(), rows)
        return sums, self._stored(group, stored, stored.values_per_key(), rows)

    def _stored(self, group: _GroupArenas, bags: Bags, values_per_key: Int64Array, rows: Rows) -> StoredRows:
        """Copy the row of each value as it is stored, uint8 [n, row_bytes]."""
        if len(group.arenas) == 1:
            return rows[group.arenas[0]].take(self._slots(group, bags, values_per_key))
        return _copied(rows, group.arenas, *self._placement.locate(bags, values_per_key), group.group.row_bytes)

    def _slots(self, group: _GroupArenas, bags: Bags, values_per_key: Int64Array) -> Int64Array:
        if group.are_slots:
            return bags.values
        if group.is_undivided:
            return self._placement.slots_of_undivided(bags, values_per_key)
        return self._placement.slots_in_arena(bags, values_per_key)

    def _pool_group(self, group: _GroupArenas, bags: Bags, values_per_key: Int64Array, rows: Rows) -> Float32Array:
        if len(group.arenas) == 1:
            slots = self._slots(group, bags, values_per_key)
            return rows[group.arenas[0]].pool(slots, bags.offsets, bags.weights)
        if not bags.num_bags:
            return np.zeros((0, group.group.embedding_dim), np.float32)
        arena, slots = self._placement.locate(bags, values_per_key)
        placed = Bags(bags.keys, bags.bags_per_key, bags.offsets, slots, bags.weights)
        parts = split(placed, arena, group.arenas)
        pooled = [
            (part.bag_index, rows[part.owner].pool(part.bags.values, part.bags.offsets, part.bags.weights))
            for part in parts
        ]
        share_no_bag = all(part.shares_no_bag for part in parts)
        return add(pooled, bags.num_bags, group.group.embedding_dim, share_no_bag=share_no_bag)

    def memory(self) -> tuple[MemoryUse, ...]:
        """As `Engine.memory`."""
        totals: dict[tuple[int, Tier], int] = {}
        for arena in self._arenas:
            for card, size_bytes in arena.bytes_of_cards.items():
                totals[card, arena.tier] = totals.get((card, arena.tier), 0) + size_bytes
        more = self._private_bytes + sum(tiered.size_bytes for tiered in self._tiered.values())
        if more := more + (0 if self._keyed is None else self._keyed.size_bytes):
            totals[0, "ram"] = totals.get((0, "ram"), 0) + more
        return tuple(MemoryUse(card, tier, size) for (card, tier), size in sorted(totals.items()))

    def rows_looked_up(self) -> tuple[LookupCount, ...]:
        """As `Engine.rows_looked_up`."""
        with self._counts_lock:
            counts, on_disk = self._counts.copy(), self._disk_counts.copy()
        by_tier: dict[Tier, Int64Array] = {"ram": counts - on_disk, "disk": on_disk}
        return tuple(
            LookupCount(table.name, tier, int(rows[number]))
            for number, table in enumerate(self.layout.tables)
            for tier, rows in by_tier.items()
            if tier in ("ram", self._tiers[number])
        )

    def disk_use(self) -> DiskUse | None:
        """As `Engine.disk_use`."""
        if not self._tiered:
            return None
        with self._counts_lock:
            ram, disk = (np.percentile(list(times) or [0.0], [50, 99]).tolist() for times in self._times_us)
        reads, size_bytes, failed = np.sum([rows.files.counts() for rows in self._tiered.values()], axis=0).tolist()
        times = {"ram_p50_us": ram[0], "ram_p99_us": ram[1], "disk_p50_us": disk[0], "disk_p99_us": disk[1]}
        return DiskUse(reads=reads, size_bytes=size_bytes, failed=failed, **times)

    def cards(self) -> CardsUse | None:
        """Return None: it pools on the CPU."""
        return None

    def close(self) -> None:
        """As `Engine.close`."""
        arenas, self._arenas = self._arenas, []
        for arena in arenas:
            arena.free()
        if self._keyed is not None:
            self._keyed.close()


def _copied(
    rows: Rows, numbers: Iterable[int], arena: npt.NDArray[np.uint16], slots: Int64Array, row_bytes: int
) -> StoredRows:
    """Copy rows that are in arenas of these numbers, int64 [n] slots of each row's arena, uint16 [n]."""
    stored = np.empty((slots.size, row_bytes), np.uint8)
    for number in numbers:
        chosen = (arena == number).nonzero()[0]
        stored[chosen] = rows[number].take(slots[chosen])
    return stored


def _slice_keys(bags: Bags, first: int, end: int) -> Bags:
    # Keys of other groups must go even if they have no bags: what follows counts by key.
    if first == 0 and end == bags.keys.size:
        return bags
    first_bag, end_bag = bags.bag_starts()[[first, end]].tolist()
    first_value, end_value = int(bags.offsets[first_bag]), int(bags.offsets[end_bag])
    return Bags(
        bags.keys[first:end],
        bags.bags_per_key[first:end],
        bags.offsets[first_bag : end_bag + 1] - first_value,
        bags.values[first_value:end_value],
        None if bags.weights is None else bags.weights[first_value:end_value],
    )
