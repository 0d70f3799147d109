"""Where each row of a node lies: from (table, row) to (arena, slot), by a fixed number of vector operations.

Every table is a run of cells, one for each bucket (of each row file, if the table is left in the mapped snapshot).
A cell says which arena holds its rows and at which slot they begin:

    cell = first_cell[table] + ((row >> file_shift) << 8) + ((row >> bucket_shift) & 255)
    arena, slot = cell_arena[cell], cell_base[cell] + (row >> slot_shift)

A table that one card holds whole is laid out in row order there, so its slot is just base + row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shard_node.bags import Int64Array, KeyedBags
from shard_node.errors import InvalidBagsError
from shard_node.table_layout import TableLayout

NOT_HERE = np.uint16(2**16 - 1)
NO_FILES_SHIFT = 63
FAR = np.int64(-(2**62))


@dataclass(frozen=True, slots=True, eq=False)
class TablePlace:
    """Where one table's rows lie.

    Attributes:
        file_shift: log2 of the rows in a cell row of 256 cells; 63 if the table is not cut by files.
        bucket_shift: bucket = (row >> bucket_shift) & 255.
        slot_shift: slot = base + (row >> slot_shift).
        cell_arena: uint16 [cells], `NOT_HERE` for rows of another node.
        cell_base: int64 [cells].
    """

    file_shift: int
    bucket_shift: int
    slot_shift: int
    cell_arena: npt.NDArray[np.uint16]
    cell_base: Int64Array

    @property
    def whole(self) -> bool:
        """True if one arena holds all rows in row order."""
        return (
            self.slot_shift == 0
            and self.cell_arena[0] != NOT_HERE
            and bool((self.cell_arena == self.cell_arena[0]).all())
            and bool((self.cell_base == self.cell_base[0]).all())
        )


class Placement:
    """The places of all tables of a node, merged into flat arrays.

    Args:
        layout: the tables.
        places: one for each table, in layout order.
    """

    def __init__(self, layout: TableLayout, places: list[TablePlace]) -> None:
        self._layout = layout
        sizes = [place.cell_arena.size for place in places]
        self._first_cell = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        self._cell_arena = np.concatenate([place.cell_arena for place in places])
        self._cell_base = np.concatenate([place.cell_base for place in places])
        # Where there is only one arena to look in, a place that is not here is told by a base below all that is added.
        self._base_or_far = np.where(self._cell_arena == NOT_HERE, FAR, self._cell_base)
        self._file_shift = np.array([place.file_shift for place in places], np.int64)
        self._bucket_shift = np.array([place.bucket_shift for place in places], np.int64)
        self._slot_shift = np.array([place.slot_shift for place in places], np.int64)
        self._cut_by_files = bool((self._file_shift < NO_FILES_SHIFT).any())
        # For tables held whole (by group) the row needs only its table's base.
        self._whole = np.array([place.whole for place in places])
        self._whole_base = np.array([place.cell_base[0] for place in places], np.int64)
        self._whole_tables_begin_at_0 = not self._whole_base.any()

    def is_whole(self, first_table: int, end_table: int) -> bool:
        """True if each of these tables lies in row order in one arena."""
        return bool(self._whole[first_table:end_table].all())

    def slots_in_whole(self, bags: KeyedBags, values_per_key: Int64Array) -> Int64Array:
        """int64 [n], the slots of rows whose tables lie whole in their group's arena."""
        if self._whole_tables_begin_at_0:
            return bags.values
        base = self._whole_base[bags.keys]
        if not base.any():
            return bags.values
        return bags.values + (base if base.size == 1 else np.repeat(base, values_per_key))

    def locate(self, bags: KeyedBags, values_per_key: Int64Array) -> tuple[npt.NDArray[np.uint16], Int64Array]:
        """Finds the arena (uint16 [n]) and the slot (int64 [n]) of each row.

        Raises:
            InvalidBagsError: for a row that another node holds.
        """
        rows = bags.values
        cell = self._cells(bags, values_per_key)
        arena = self._cell_arena.take(cell)
        is_elsewhere = arena == NOT_HERE
        if is_elsewhere.any():
            raise self._not_here(bags, values_per_key, int(is_elsewhere.argmax()))
        slots = self._cell_base.take(cell)
        slots += rows >> self._per_value(self._slot_shift, bags, values_per_key)
        return arena, slots

    def slots_in_one(self, bags: KeyedBags, values_per_key: Int64Array) -> Int64Array:
        """int64 [n], the slot of each row, where one arena has all rows that these tables have here.

        Raises:
            InvalidBagsError: for a row that another node holds.
        """
        slots = self._base_or_far.take(self._cells(bags, values_per_key))
        slots += bags.values >> self._per_value(self._slot_shift, bags, values_per_key)
        if slots.size and np.minimum.reduce(slots) < 0:
            raise self._not_here(bags, values_per_key, int((slots < 0).argmax()))
        return slots

    def _cells(self, bags: KeyedBags, values_per_key: Int64Array) -> Int64Array:
        rows = bags.values
        cell = (rows >> self._per_value(self._bucket_shift, bags, values_per_key)) & 255
        if self._cut_by_files and (self._file_shift[bags.keys] < NO_FILES_SHIFT).any():
            cell += (rows >> self._per_value(self._file_shift, bags, values_per_key)) << 8
        first = self._per_value(self._first_cell, bags, values_per_key)
        if first.size > 1 or first.any():
            cell += first
        return cell

    def _not_here(self, bags: KeyedBags, values_per_key: Int64Array, position: int) -> InvalidBagsError:
        segment = int(np.searchsorted(np.cumsum(values_per_key), position, side="right"))
        table = self._layout.tables[int(bags.keys[segment])].name
        return InvalidBagsError(f"row {int(bags.values[position])} of table {table!r} is not on this node")

    def locate_rows(self, table: int, rows: Int64Array) -> tuple[npt.NDArray[np.uint16], Int64Array]:
        """Finds the arena (uint16 [n], `NOT_HERE` for another node's) and the slot (int64 [n]) of one table's rows.

        Args:
            table: its number in the layout.
            rows: int64 [n], rows of that table.
        """
        cell = (rows >> self._bucket_shift[table]) & 255
        if self._file_shift[table] < NO_FILES_SHIFT:
            cell += (rows >> self._file_shift[table]) << 8
        cell += self._first_cell[table]
        slots = self._cell_base[cell]
        slots += rows >> self._slot_shift[table]
        return self._cell_arena[cell], slots

    def _per_value(self, by_table: Int64Array, bags: KeyedBags, values_per_key: Int64Array) -> Int64Array:
        # Most models treat all tables alike; then one number serves all values and nothing is repeated.
        chosen = by_table[bags.keys]
        if chosen.size == 1 or (chosen.size and (chosen == chosen[0]).all()):
            return chosen[:1]
        return np.repeat(chosen, values_per_key)
