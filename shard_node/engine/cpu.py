"""The CPU engine: rows in arenas, one torch call per arena and batch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shard_node.bags import Float32Array, Int64Array, KeyedBags, TableLayout
from shard_node.engine.arena import NOT_HERE, Arena, Placement
from shard_node.engine.base import CardsUse, LookupCount, MemoryUse, Tier
from shard_node.generation import RowLock
from shard_node.split import add, split


@dataclass(frozen=True, slots=True)
class _GroupPlace:
    """A group's arenas. With a single arena nothing is split; if its tables are whole, nothing is looked up either."""

    first_table: int
    end_table: int
    embedding_dim: int
    arenas: range
    whole: bool


class CpuEngine:
    """Pools bags from arenas on this machine. Implements `Engine`.

    Each pooling call runs in the caller's thread with one intra-op thread; several may run at once, since torch lets
    go of the interpreter lock while it reads rows. Rows are written while no call pools.

    `group_arenas` has, for each group of the layout, the numbers of the arenas that hold its rows; `tiers` are those of
    the tables.
    """

    def __init__(
        self,
        layout: TableLayout,
        arenas: Sequence[Arena],
        group_arenas: Sequence[range],
        placement: Placement,
        tiers: Sequence[Tier],
    ) -> None:
        self._layout = layout
        self._arenas = list(arenas)
        self._placement = placement
        self._tiers = tuple(tiers)
        self._groups = tuple(
            _GroupPlace(
                group.first_table,
                group.end_table,
                group.embedding_dim,
                numbers,
                len(numbers) == 1 and placement.is_whole(group.first_table, group.end_table),
            )
            for group, numbers in zip(layout.groups, group_arenas, strict=True)
        )
        self._num_tables = len(layout.tables)
        self._counts = np.zeros(self._num_tables, np.int64)
        self._counts_lock = threading.Lock()
        self._row_lock = RowLock()
        self._one_writer = threading.Lock()

    @property
    def layout(self) -> TableLayout:
        """The tables in layout order."""
        return self._layout

    def pool(self, bags: KeyedBags) -> list[Float32Array]:
        """As `Engine.pool`."""
        self._layout.check(bags)
        values_per_key = bags.values_per_key()
        self._row_lock.begin_read()
        try:
            if len(self._groups) == 1 and bags.offsets.size > 1:
                blocks = [self._pool_group(self._groups[0], bags, values_per_key)]
            else:
                blocks = self._pool_groups(bags, values_per_key)
        finally:
            self._row_lock.end_read()
        with self._counts_lock:
            if bags.keys.size == self._num_tables:
                self._counts += values_per_key
            else:
                self._counts[bags.keys] += values_per_key
        return blocks

    def write_rows(self, table: int, rows: Int64Array, stored: npt.NDArray[np.uint8]) -> int:
        """As `Engine.write_rows`. What takes long, finding the rows and their pages, is done before anybody waits."""
        self._layout.check_rows(table, rows, stored)
        arena, slots = self._placement.locate_rows(table, rows)
        parts: list[tuple[Arena, Int64Array, npt.NDArray[np.uint8]]] = []
        for number in np.unique(arena).tolist():
            if number == NOT_HERE:
                continue
            here = arena == number
            whole = bool(here.all())
            parts.append((self._arenas[number], slots if whole else slots[here], stored if whole else stored[here]))
        with self._one_writer:
            for part, part_slots, _ in parts:
                part.touch(part_slots)
            self._row_lock.begin_write()
            try:
                for part, part_slots, part_stored in parts:
                    part.write(part_slots, part_stored)
            finally:
                self._row_lock.end_write()
        return sum(part_slots.size for _, part_slots, _ in parts)

    def _pool_groups(self, bags: KeyedBags, values_per_key: Int64Array) -> list[Float32Array]:
        bag_starts = bags.bag_starts()
        blocks = []
        for group in self._groups:
            first, end = np.searchsorted(bags.keys, (group.first_table, group.end_table)).tolist()
            first_bag, end_bag = int(bag_starts[first]), int(bag_starts[end])
            if first_bag == end_bag:
                blocks.append(np.zeros((0, group.embedding_dim), np.float32))
                continue
            part = _slice_keys(bags, first, end, first_bag, end_bag)
            blocks.append(self._pool_group(group, part, values_per_key[first:end]))
        return blocks

    def _pool_group(self, group: _GroupPlace, bags: KeyedBags, values_per_key: Int64Array) -> Float32Array:
        if group.whole:
            slots = self._placement.slots_in_whole(bags, values_per_key)
            return self._arenas[group.arenas[0]].pool(slots, bags.offsets, bags.weights)
        if len(group.arenas) == 1:
            slots = self._placement.slots_in_one(bags, values_per_key)
            return self._arenas[group.arenas[0]].pool(slots, bags.offsets, bags.weights)
        arena, slots = self._placement.locate(bags, values_per_key)
        placed = KeyedBags(bags.keys, bags.bags_per_key, bags.offsets, slots, bags.weights)
        parts = split(placed, arena, group.arenas)
        pooled = [
            (part.bag_index, self._arenas[part.owner].pool(part.bags.values, part.bags.offsets, part.bags.weights))
            for part in parts
        ]
        share_no_bag = all(part.shares_no_bag for part in parts)
        return add(pooled, bags.num_bags, group.embedding_dim, share_no_bag=share_no_bag)

    def memory(self) -> tuple[MemoryUse, ...]:
        """As `Engine.memory`."""
        totals: dict[tuple[int, Tier], int] = {}
        for arena in self._arenas:
            totals[arena.card, arena.tier] = totals.get((arena.card, arena.tier), 0) + arena.size_bytes
        return tuple(MemoryUse(card, tier, size) for (card, tier), size in sorted(totals.items()))

    def rows_looked_up(self) -> tuple[LookupCount, ...]:
        """As `Engine.rows_looked_up`."""
        with self._counts_lock:
            counts = self._counts.tolist()
        return tuple(
            LookupCount(table.name, tier, count)
            for table, tier, count in zip(self._layout.tables, self._tiers, counts, strict=True)
        )

    def cards(self) -> CardsUse | None:
        """Return None: it pools on the CPU."""
        return None

    def close(self) -> None:
        """As `Engine.close`."""
        arenas, self._arenas = self._arenas, []
        for arena in arenas:
            arena.free()


def _slice_keys(bags: KeyedBags, first: int, end: int, first_bag: int, end_bag: int) -> KeyedBags:
    # Keys of other groups must go even if they have no bags: what follows counts by key.
    if first == 0 and end == bags.keys.size:
        return bags
    first_value, end_value = int(bags.offsets[first_bag]), int(bags.offsets[end_bag])
    return KeyedBags(
        bags.keys[first:end],
        bags.bags_per_key[first:end],
        bags.offsets[first_bag : end_bag + 1] - first_value,
        bags.values[first_value:end_value],
        None if bags.weights is None else bags.weights[first_value:end_value],
    )
