"""The way up to cards: buffers that batches and rows pass through, and the row updates of an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from shard_node.bags import Int64Array
from shard_node.cuda.card_rows import ArenaOnCards, CardRows
from shard_node.cuda.kernel_params import ByteArray, round_up
from shard_node.engine.keyed_tables import RowWrite
from shard_node.errors import InvalidBagsError

if TYPE_CHECKING:
    from shard_node.cuda.cupy_cards import Card, Cards, Event, Memory, Stream

SMALLEST_BYTES = 1 << 16
FIRST_CAPACITY_BYTES = 1 << 20
NUM_UPLOADS = 2


def capacity_for(size_bytes: int) -> int:
    """Return the power of two that a size is rounded up to, so that buffers grow a few times and then never again."""
    return max(SMALLEST_BYTES, 1 << (size_bytes - 1).bit_length())


class Upload:
    """Pinned memory, and as much on each of some cards: packed once, sent to the same byte of each. Not thread-safe.

    `on` are the cards, and the stream of each on which bytes are sent and used. With `capacity_bytes` 0 there are no
    buffers before the first `reserve`. Raises MemoryBudgetError if a card or the host has not as much; nothing is
    allocated then.
    """

    def __init__(self, cards: Cards, on: Sequence[tuple[Card, Stream]], capacity_bytes: int = 0) -> None:
        self._cards = cards
        self._on = tuple(on)
        self._events: list[Event] = []
        self._pinned: Memory | None = None
        self._on_card: list[Memory] = []
        if capacity_bytes:
            self._allocate(capacity_bytes)

    def reserve(self, size_bytes: int) -> ByteArray:
        """Wait until what was sent before was used, without the interpreter lock. Return uint8 [size_bytes], pinned.

        Raises MemoryBudgetError: it must grow and there is no memory; nothing is allocated then, and the next may fit.
        """
        self._wait()
        pinned = self._pinned
        if pinned is None or pinned.size_bytes < size_bytes:
            self._release()
            pinned = self._allocate(capacity_for(size_bytes))
        return pinned.array[:size_bytes]

    def send(self, number: int, first: int, size_bytes: int, target: int | None = None) -> int:
        """Send bytes of what was reserved, from `first` on, to a card by its number among those of this, on its stream.

        `target` is the address that they go to; None for byte `first` of the buffer on the card. Returns the address.
        What uses it is put on the same stream.
        """
        assert self._pinned is not None
        card, stream = self._on[number]
        if target is None:
            target = self._on_card[number].address + first
        if size_bytes:
            card.copy_to_card(target, self._pinned, first, size_bytes, stream)
        return target

    def used(self, number: int) -> None:
        """Note that all that uses what was sent to a card since the last `reserve` has been put on its stream."""
        self._events.append(self._on[number][1].record())

    def free(self) -> None:
        """Wait, and give the memory back. Idempotent."""
        self._wait()
        self._release()

    def _allocate(self, capacity_bytes: int) -> Memory:
        self._pinned = self._cards.allocate_pinned(capacity_bytes)
        try:
            for card, _ in self._on:
                self._on_card.append(card.allocate(capacity_bytes))
        except BaseException:
            self._release()
            raise
        return self._pinned

    def _wait(self) -> None:
        events, self._events = self._events, []
        for event in events:
            event.synchronize()

    def _release(self) -> None:
        memories = self._on_card if self._pinned is None else [*self._on_card, self._pinned]
        self._on_card, self._pinned = [], None
        for memory in memories:
            memory.free()


class Uploads:
    """`NUM_UPLOADS` of them, used in turn, so that the bus is busy while the next rows are packed. As `Upload`."""

    def __init__(self, cards: Cards, on: Sequence[tuple[Card, Stream]], capacity_bytes: int) -> None:
        self._uploads: list[Upload] = []
        try:
            for _ in range(NUM_UPLOADS):
                self._uploads.append(Upload(cards, on, capacity_bytes))
        except BaseException:
            self.free()
            raise

    def next(self) -> Upload:
        """Return the one that was sent the longest ago."""
        self._uploads.append(self._uploads.pop(0))
        return self._uploads[-1]

    def free(self) -> None:
        """Wait for what is under way, and free the buffers. Idempotent."""
        for upload in self._uploads:
            upload.free()


class RowWriter:
    """Writes rows of an engine wherever they are: on one card, on all, or in pinned memory.

    Rows are packed once and sent to all cards, which take those that are theirs: a delta is small, and the host keeps
    no places. Raises MemoryBudgetError if there is no room for the first buffers; nothing is held then.
    """

    def __init__(self, rows: CardRows) -> None:
        self._rows = rows
        self._writing = threading.Lock()
        on = list(zip(rows.cards.cards, rows.order.streams, strict=True))
        self._uploads = Uploads(rows.cards, on, FIRST_CAPACITY_BYTES)

    def write(self, table: int | tuple[int, ...], rows: Int64Array, stored: ByteArray) -> int:
        """As `Engine.write_rows`."""
        checks = self._rows.checks
        parts = list[RowWrite]()
        for number, of_table in checks.layout.rows_by_table(table, rows, stored):
            is_local = checks.local(number, rows)
            if is_local.all():
                parts.append((number, rows, of_table))
            elif is_local.any():
                parts.append((number, rows[is_local], of_table[is_local]))
        if parts and rows.size:
            with self._writing:
                self._write(parts)
        return sum(numbers.size for _, numbers, _ in parts)

    def update_keys(self, tables: Sequence[int], keys: Int64Array, stored: ByteArray | None) -> tuple[int, int]:
        """As `Engine.update_keys`. The cards have memory for all rows that there may be."""
        if self._rows.keyed is None:
            raise InvalidBagsError("no table of the model has keys")
        with self._writing:
            return self._rows.keyed.update(tables, keys, stored, self._write)

    def free(self) -> None:
        """Wait for what is under way, and free the buffers. Idempotent."""
        self._uploads.free()

    def _write(self, parts: Sequence[RowWrite], calls: Sequence[Callable[[], object]] = ()) -> None:
        """Put writes of rows on the streams, and make the calls, with no lookup between."""
        shapes, order = self._rows.shapes, self._rows.order
        placed: list[tuple[ArenaOnCards, int, int, int]] = []
        size_bytes = 0
        # Of each part the rows' numbers, then the rows; all are multiples of 16 bytes.
        for table, rows, _ in parts:
            arena = self._rows.arenas[int(shapes.arena_of_table[table])]
            stored_at = size_bytes + round_up(4 * rows.size)
            placed.append((arena, int(shapes.table_in_arena[table]), size_bytes, stored_at))
            size_bytes = stored_at + rows.size * arena.format.stride
        upload = self._uploads.next()
        array = upload.reserve(size_bytes)
        for (arena, _, rows_at, stored_at), (_, rows, stored) in zip(placed, parts, strict=True):
            np.copyto(array[rows_at : rows_at + 4 * rows.size].view(np.uint32), rows, casting="unsafe")
            stride = arena.format.stride
            arena.format.relay(stored, array[stored_at : stored_at + rows.size * stride].reshape(rows.size, stride))
        addresses = [upload.send(card, 0, size_bytes) for card in range(len(order.streams))]

        def put() -> None:
            for card, (address, stream) in enumerate(zip(addresses, order.streams, strict=True)):
                for (arena, number, rows_at, stored_at), (_, rows, _) in zip(placed, parts, strict=True):
                    at = address + rows_at, address + stored_at
                    arena.write(card, number, *at, rows.size, stream, writes_host=card == 0)
            for call in calls:
                call()

        try:
            order.write(put)
        finally:
            for card in range(len(addresses)):
                upload.used(card)
