"""Arenas on cards: the memory of one group's rows on every card and in pinned memory, and the tables that find them.

One arena holds all tables of one (embedding_dim, dtype). On each card lie its own rows, its copies of the hot rows,
the places of all rows (4 bytes each), and, per table, where its places and its rows begin; pinned rows lie on the host
once.
Nothing here decides where a row goes: `Placer` does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from loader.snapshot.manifest import TableSpec
from shard_node.bags import Group
from shard_node.cuda.cards import Card, Cards, Memory, PinnedMemory, Stream
from shard_node.cuda.kernel_params import (
    CHUNK_BYTES,
    THREADS_PER_BLOCK,
    WRITE_KERNEL,
    ArenaParams,
    TableParams,
    WriteParams,
)
from shard_node.cuda.row_format import RowFormat


class ArenaOnCards:
    """One arena on all cards of a process. Memory is taken when it is made, and not zeroed.

    Whoever makes it then uploads every table's places to every card (`places_address`) and writes its rows (`write`).
    Only after that may it be pooled from.

    Args:
        cards: all cards.
        group: of the layout.
        tables: the group's tables, in layout order.
        starts: uint64 [tables, N + 2], `Placer.starts`: the byte of each owner's memory at which a table's slot 0 lies.
        rows_bytes: for each owner (cards 0 .. N - 1, then one card's hot rows, then pinned rows) the bytes of its rows.
        owner_bits: of a place.

    Attributes:
        group: as given.
        tables: as given.
        format: how its rows are laid out on cards.
        params: what the kernels take, for each card.

    Raises:
        MemoryBudgetError: a card or the host has not as much; nothing is held then.
    """

    def __init__(
        self,
        cards: Cards,
        group: Group,
        tables: Sequence[TableSpec],
        starts: npt.NDArray[np.uint64],
        rows_bytes: Sequence[int],
        owner_bits: int,
    ) -> None:
        self.group = group
        self.tables = tuple(tables)
        self.format = RowFormat.of(group.dtype, group.embedding_dim)
        self._cards = cards.cards
        self._rows_bytes = tuple(rows_bytes)
        self._first_place = np.zeros(len(tables) + 1, np.int64)
        np.cumsum([table.num_embeddings for table in tables], out=self._first_place[1:])
        self._rows: list[Memory | None] = []
        self._hot: list[Memory | None] = []
        self._places: list[Memory] = []
        self._finders: list[Memory] = []
        self._host: PinnedMemory | None = None
        self.params: tuple[ArenaParams, ...] = ()
        try:
            self._allocate(cards, rows_bytes)
            self.params = tuple(self._make_params(card, owner_bits) for card in range(len(self._cards)))
            self._upload_finders(cards, starts)
        except BaseException:
            self.free()
            raise

    @property
    def places_bytes(self) -> int:
        """Of the places on one card."""
        return 4 * int(self._first_place[-1])

    def card_bytes(self, card: int) -> int:
        """Of a card's own rows and of the places there. May be asked in any thread, also after `free`."""
        return self.places_bytes + self._rows_bytes[card]

    @property
    def hot_bytes(self) -> int:
        """Of one card's copies of the hot rows. May be asked as `card_bytes`."""
        return self._rows_bytes[len(self._cards)]

    @property
    def pinned_bytes(self) -> int:
        """Of the pinned rows. May be asked as `card_bytes`."""
        return self._rows_bytes[len(self._cards) + 1]

    def places_address(self, card: int, table: int, first_row: int = 0) -> int:
        """Where, on a card, the place (uint32) of a table's row lies; those of its later rows follow.

        Args:
            card: its number.
            table: its number within the group.
            first_row: of the table.
        """
        return self._places[card].address + 4 * (int(self._first_place[table]) + first_row)

    def write(
        self, card: int, table: int, numbers: int, stored: int, num_rows: int, stream: Stream, *, writes_host: bool
    ) -> None:
        """Puts on the stream: of these rows, write those that this card owns, its copies of hot ones, and pinned ones.

        Used by loading and by row updates. Rows of other owners are passed over, so all cards may be given all rows; of
        several cards that are, exactly one writes the pinned rows.

        Args:
            card: its number.
            table: its number within the group.
            numbers: address, on the card, of uint32 [num_rows], rows of the table.
            stored: address, on the card and aligned to 16 bytes, of uint8 [num_rows, format.stride].
            num_rows: how many.
            stream: of the card.
            writes_host: write pinned rows too.
        """
        if not num_rows:
            return
        chunks = self.format.stride // CHUNK_BYTES
        params = WriteParams(numbers, stored, num_rows, table, card, int(writes_host))
        grid = (-(-num_rows * chunks // THREADS_PER_BLOCK), 1)
        self._cards[card].launch(WRITE_KERNEL, grid, (self.params[card], params), stream)

    def free(self) -> None:
        """Gives all memory back. Nothing that uses it may be under way. Idempotent."""
        memories = [*self._rows, *self._hot, *self._places, *self._finders, self._host]
        self._rows, self._hot, self._places, self._finders, self._host = [], [], [], [], None
        for memory in memories:
            if memory is not None:
                memory.free()

    def _allocate(self, cards: Cards, rows_bytes: Sequence[int]) -> None:
        num_cards = len(self._cards)
        for card in self._cards:
            self._places.append(card.allocate(max(4, self.places_bytes)))
            self._rows.append(_allocate_if_any(card, rows_bytes[card.number]))
            self._hot.append(_allocate_if_any(card, rows_bytes[num_cards]))
            self._finders.append(card.allocate(finder_bytes(len(self.tables), num_cards)))
        if rows_bytes[num_cards + 1]:
            self._host = cards.allocate_pinned(rows_bytes[num_cards + 1])

    def _make_params(self, card: int, owner_bits: int) -> ArenaParams:
        num_cards = len(self._cards)
        params = ArenaParams(
            places=self._places[card].address,
            tables=self._finders[card].address,
            starts=self._finders[card].address + len(self.tables) * ctypes.sizeof(TableParams),
            num_tables=len(self.tables),
            num_cards=num_cards,
            owner_bits=owner_bits,
            row_stride=self.format.stride,
            embedding_dim=self.group.embedding_dim,
        )
        for owner, memory in enumerate([*self._rows, self._hot[card], self._host]):
            params.rows[owner] = memory.address if memory is not None else 0
        return params

    def _upload_finders(self, cards: Cards, starts: npt.NDArray[np.uint64]) -> None:
        tables = np.zeros(len(self.tables), np.dtype(TableParams))
        tables["first_place"] = self._first_place[:-1]
        tables["num_rows"] = [table.num_embeddings for table in self.tables]
        content = tables.tobytes() + np.ascontiguousarray(starts, np.uint64).tobytes()
        pinned = cards.allocate_pinned(len(content))
        try:
            pinned.array[:] = np.frombuffer(content, np.uint8)
            for card, finders in zip(self._cards, self._finders, strict=True):
                stream = card.stream()
                card.copy_to_card(finders.address, pinned, 0, len(content), stream)
                stream.synchronize()
        finally:
            pinned.free()


def finder_bytes(num_tables: int, num_cards: int) -> int:
    """What an arena takes of each card beside rows and places: where each table's begin."""
    return num_tables * (ctypes.sizeof(TableParams) + 8 * (num_cards + 2))


def _allocate_if_any(card: Card, size_bytes: int) -> Memory | None:
    return card.allocate(size_bytes) if size_bytes else None
