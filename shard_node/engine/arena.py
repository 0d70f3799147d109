"""Arenas: contiguous rows of one (embedding_dim, dtype), pooled by one torch call.

An arena is RAM, in huge pages where the kernel gives them (random rows of a 2 GB table cost a third less), for the
cards of one CPU node alike. What memory has no room for is in `shard_node.engine.tiered_rows`, whose slots are
positions in the snapshot's row files.

A placement tells where each row lies: from (table, row) to (arena, slot), by a fixed number of vector operations.
Every table is a run of cells, one for each bucket (of each row file, if the table is on disk). A cell says which
arena holds its rows and at which slot they begin:

    arena, slot = cell_arena[cell], cell_base[cell] + (row >> slot_shift)

A table that a node holds whole is laid out in row order there: it has one cell, and its slot is base + row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loader.memory import HUGE_PAGE_BYTES, give_back
from loader.snapshot.tables import RowDtype
from shard_node.bags import Bags, Float32Array, Int64Array, TableLayout
from shard_node.buckets import ALL_BITS, BucketCells, per_value
from shard_node.engine.base import Tier
from shard_node.engine.kernels import as_tensor, pool_rows
from shard_node.errors import InvalidBagsError


class Arena:
    """Rows of one width and dtype in RAM, and the call that pools them.

    `rows`, uint8 [slots, row_bytes], contiguous, are kept and not copied. `bytes_of_cards` says whose they are.
    """

    tier: Tier = "ram"

    def __init__(
        self,
        dtype: RowDtype,
        embedding_dim: int,
        rows: npt.NDArray[np.uint8],
        bytes_of_cards: Mapping[int, int],
    ) -> None:
        self.bytes_of_cards = bytes_of_cards
        self._dtype: RowDtype = dtype
        self._embedding_dim = embedding_dim
        self._bytes = rows
        # One item per row: NumPy copies such whole, several times faster than bytes.
        self._items = rows.view(f"V{rows.shape[1]}").reshape(-1)
        self._rows = as_tensor(dtype, rows)

    def pool(self, slots: Int64Array, offsets: Int64Array, weights: Float32Array | None) -> Float32Array:
        """Sum the rows of each bag as `pool_rows`: float32 [b, embedding_dim]. Slots are positions in this arena."""
        if not slots.size:
            return np.zeros((offsets.size - 1, self._embedding_dim), np.float32)
        return pool_rows(self._dtype, self._rows, slots, offsets, weights)

    def take(self, slots: Int64Array) -> npt.NDArray[np.uint8]:
        """Copy rows as they are stored, uint8 [n, row_bytes], from int64 [n] slots that the caller has checked."""
        return self._items.take(slots).view(np.uint8).reshape(slots.size, self._bytes.shape[1])

    def write(self, slots: Int64Array, stored: npt.NDArray[np.uint8]) -> None:
        """Replace the rows at int64 [n] slots by uint8 [n, row_bytes], contiguous. Nobody may pool meanwhile."""
        self._items[slots] = stored.view(self._items.dtype).reshape(-1)

    def free(self) -> None:
        """Give the rows' memory back, a piece at a time and without the interpreter lock. Nobody may need them."""
        if self._bytes.nbytes >= HUGE_PAGE_BYTES:
            give_back(self._bytes)


NOT_HERE = np.uint16(2**16 - 1)
FAR = np.int64(-(2**62))
NARROW_FAR = -(2**30)


@dataclass(frozen=True, slots=True, eq=False)
class TablePlace:
    """Where one table's rows lie.

    Attributes:
        files_shift: log2 of the rows of a file, if there are cells for each file; `ALL_BITS` if not.
        slot_shift: slot = base + (row >> slot_shift).
        cell_arena: uint16 [files, cells], `NOT_HERE` for rows of another node. One cell if the table lies whole and in
            row order in one arena, else one for each bucket.
        cell_base: int64 [files, cells].
    """

    files_shift: int
    slot_shift: int
    cell_arena: npt.NDArray[np.uint16]
    cell_base: Int64Array

    @property
    def is_undivided(self) -> bool:
        """Whether one arena has all rows in row order."""
        return self.cell_arena.size == 1


class Placement:
    """The places of all tables of a node, one for each in layout order, merged into flat arrays."""

    def __init__(self, layout: TableLayout, places: list[TablePlace]) -> None:
        self._layout = layout
        # For undivided tables (by group) the row needs only its table's base.
        self._is_undivided = np.array([place.is_undivided for place in places])
        self._cells = BucketCells(layout, self._is_undivided, [place.cell_arena.shape[0] for place in places])
        arenas = [place.cell_arena.reshape(-1) for place in places]
        bases = [place.cell_base.reshape(-1) for place in places]
        self._cell_arena = self._cells.spread(arenas, int(NOT_HERE), np.uint16)
        self._cell_base = self._cells.spread(bases, 0, np.int64)
        # Where there is only one arena to look in, a place that is not here is told by a base below all that is added.
        self._base_or_far = np.where(self._cell_arena == NOT_HERE, FAR, self._cell_base)
        # Rows that travel as int32 stay so, if all slots fit.
        self._narrow_base = None
        if int(self._cell_base.max(initial=0)) + max(table.num_embeddings for table in layout.tables) < -NARROW_FAR:
            self._narrow_base = np.maximum(self._base_or_far, NARROW_FAR).astype(np.int32)
        self._files_shift = np.array([place.files_shift for place in places], np.int64)
        self._cells_per_file = np.array([place.cell_arena.shape[1] for place in places], np.int64)
        self._slot_shift = np.array([place.slot_shift for place in places], np.int64)
        self._cut_by_files = bool((self._files_shift < ALL_BITS).any())
        self._undivided_base = np.array([place.cell_base[0, 0] for place in places], np.int64)

    def order_of(self, tables: slice) -> tuple[bool, bool]:
        """Return whether each of these tables is in row order in one arena, and whether rows are slots then."""
        is_undivided = bool(self._is_undivided[tables].all())
        return is_undivided, is_undivided and not self._undivided_base[tables].any()

    def slots_of_undivided(self, bags: Bags, values_per_key: Int64Array) -> Int64Array:
        """Find the slots (int64 [n]) of rows whose tables are undivided in their group's arena."""
        base = self._undivided_base[bags.keys]
        return bags.values + (base if base.size == 1 else np.repeat(base, values_per_key))

    def locate(self, bags: Bags, values_per_key: Int64Array) -> tuple[npt.NDArray[np.uint16], Int64Array]:
        """Find each row's arena (uint16 [n]) and slot (int64 [n]). Raises InvalidBagsError if it is not here."""
        cell = self._cell_of(bags, values_per_key)
        arena = self._cell_arena.take(cell)
        is_elsewhere = arena == NOT_HERE
        if is_elsewhere.any():
            raise self._not_here(bags, values_per_key, int(is_elsewhere.argmax()))
        slots = self._cell_base.take(cell)
        slots += bags.values >> per_value(self._slot_shift, bags, values_per_key)
        return arena, slots

    def slots_in_arena(self, bags: Bags, values_per_key: Int64Array) -> Int64Array:
        """Find the slots as `locate`, where one arena has all rows that these tables have here."""
        base = self._base_or_far
        if bags.values.dtype != base.dtype:
            if self._narrow_base is None:
                bags = bags.wide()
            else:
                base = self._narrow_base
        slots = base.take(self._cell_of(bags, values_per_key), mode="wrap")
        slots += bags.values >> per_value(self._slot_shift, bags, values_per_key)
        if slots.size and np.minimum.reduce(slots) < 0:
            raise self._not_here(bags, values_per_key, int((slots < 0).argmax()))
        return slots

    def _cell_of(self, bags: Bags, values_per_key: Int64Array) -> Int64Array:
        cell = self._cells.of(bags, values_per_key)
        if self._cut_by_files and (self._files_shift[bags.keys] < ALL_BITS).any():
            file = bags.values >> per_value(self._files_shift, bags, values_per_key)
            cell += file * per_value(self._cells_per_file, bags, values_per_key)
        return cell

    def _not_here(self, bags: Bags, values_per_key: Int64Array, position: int) -> InvalidBagsError:
        segment = int(np.searchsorted(np.cumsum(values_per_key), position, side="right"))
        table = self._layout.tables[int(bags.keys[segment])].name
        return InvalidBagsError(f"row {int(bags.values[position])} of table {table!r} is not on this node")

    def locate_rows(self, table: int, rows: Int64Array) -> tuple[npt.NDArray[np.uint16], Int64Array]:
        """Find the arena (uint16 [n], `NOT_HERE` for another node's) and slot (int64 [n]) of rows of one table."""
        cell = self._cells.of_rows(table, rows)
        if self._files_shift[table] < ALL_BITS:
            cell += (rows >> self._files_shift[table]) * self._cells_per_file[table]
        slots = self._cell_base[cell]
        slots += rows >> self._slot_shift[table]
        return self._cell_arena[cell], slots
