"""Rows on their way to cards: one pinned buffer, and behind it one of the same size on each card.

What lies at a byte of the pinned buffer is sent to the same byte of a card's buffer, so one packing serves all cards.
Two of them, used in turn, keep the bus busy while the next rows are packed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shard_node.cuda.cards import Cards, Event, Memory, Stream


class RowUpload:
    """A buffer whose bytes can be packed again as soon as all that was made of them is done. Not thread-safe.

    Args:
        cards: all cards.
        streams: one of each card, on which bytes are sent and used.
        capacity_bytes: of the buffer on the host and of that on each card.

    Raises:
        MemoryBudgetError: a card or the host has not as much; nothing is held then.
    """

    def __init__(self, cards: Cards, streams: Sequence[Stream], capacity_bytes: int) -> None:
        self._cards = cards.cards
        self._streams = tuple(streams)
        self._events: list[Event] = []
        self.capacity_bytes = capacity_bytes
        self._pinned = cards.allocate_pinned(capacity_bytes)
        self._on_card: list[Memory] = []
        try:
            for card in self._cards:
                self._on_card.append(card.allocate(capacity_bytes))
        except BaseException:
            self.free()
            raise

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """uint8 [capacity_bytes], pinned. Written only after `wait`."""
        return self._pinned.array

    def wait(self) -> None:
        """Blocks, without the interpreter lock, until nothing uses the bytes that were sent before."""
        events, self._events = self._events, []
        for event in events:
            event.synchronize()

    def send(self, card: int, first: int, size_bytes: int, target: int | None = None) -> int:
        """Sends array[first : first + size_bytes] to a card, on its stream.

        Args:
            card: its number.
            first: byte of `array`.
            size_bytes: how many.
            target: the address that they go to; None for byte `first` of the buffer on the card.

        Returns:
            The address that they went to. What uses it is put on the same stream.
        """
        if target is None:
            target = self._on_card[card].address + first
        if size_bytes:
            self._cards[card].copy_to_card(target, self._pinned, first, size_bytes, self._streams[card])
        return target

    def used(self, card: int) -> None:
        """All that uses what was sent to a card since the last `wait` has been put on its stream."""
        self._events.append(self._streams[card].record())

    def free(self) -> None:
        """Waits, and gives the memory back. Idempotent."""
        self.wait()
        for memory in self._on_card:
            memory.free()
        self._on_card.clear()
        self._pinned.free()
