"""A way up to one card that is as large as what went through it: pinned memory, and as much on the card."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shard_node.cuda.cards import Card, Cards, Event, Memory, PinnedMemory, Stream

SMALLEST_BYTES = 1 << 16


def capacity_for(size_bytes: int) -> int:
    """The class that a size belongs to: a power of two, so that buffers grow a few times and then never again."""
    return max(SMALLEST_BYTES, 1 << (size_bytes - 1).bit_length())


class UploadBuffer:
    """Bytes that are packed on the host and used on a card, one lot after the other. Not thread-safe.

    Args:
        cards: for pinned memory.
        card: where the bytes are used.
        stream: of the card, on which they are sent and used.
    """

    def __init__(self, cards: Cards, card: Card, stream: Stream) -> None:
        self._cards = cards
        self._card = card
        self._stream = stream
        self._pinned: PinnedMemory | None = None
        self._on_card: Memory | None = None
        self._event: Event | None = None

    def reserve(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Waits until what was sent before has been used, and gives room for the next lot.

        Returns:
            uint8 [size_bytes], pinned.

        Raises:
            MemoryBudgetError: it must grow and there is no memory; nothing is held then, and the next lot may fit.
        """
        self._wait()
        if self._pinned is None or self._on_card is None or self._pinned.size_bytes < size_bytes:
            self._release()
            capacity = capacity_for(size_bytes)
            self._pinned = self._cards.allocate_pinned(capacity)
            try:
                self._on_card = self._card.allocate(capacity)
            except BaseException:
                self._release()
                raise
        return self._pinned.array[:size_bytes]

    def send(self, size_bytes: int) -> int:
        """Sends the first bytes of what was reserved; tells the address on the card that they get."""
        if self._pinned is None or self._on_card is None:
            raise ValueError("nothing was reserved")
        self._card.copy_to_card(self._on_card.address, self._pinned, 0, size_bytes, self._stream)
        return self._on_card.address

    def used(self) -> None:
        """All that uses what was sent has been put on the stream."""
        self._event = self._stream.record()

    def free(self) -> None:
        """Waits, and gives the memory back. Idempotent."""
        self._wait()
        self._release()

    def _wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    def _release(self) -> None:
        pinned, on_card, self._pinned, self._on_card = self._pinned, self._on_card, None, None
        if on_card is not None:
            on_card.free()
        if pinned is not None:
            pinned.free()
