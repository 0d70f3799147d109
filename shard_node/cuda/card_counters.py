"""What kernels count of values that have no row: a pair of numbers on each card."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from shard_node.cuda.card_rows import COUNTER_BYTES
from shard_node.cuda.cards import Cards, Memory, Stream


class CardCounters:
    """uint64 [2] on each card, zero at first: values outside their table, and values whose row is not here.

    Args:
        cards: all cards.
        streams: one of each card, on which they are zeroed and read.

    Attributes:
        memories: of each card.
    """

    def __init__(self, cards: Cards, streams: Sequence[Stream]) -> None:
        self._cards = cards.cards
        self._streams = tuple(streams)
        self._lock = threading.Lock()
        self._pinned = cards.allocate_pinned(COUNTER_BYTES * len(self._cards))
        self._last = (0, 0)
        memories: list[Memory] = []
        try:
            for card in self._cards:
                memories.append(card.allocate(COUNTER_BYTES))
            for card, memory, stream in zip(self._cards, memories, self._streams, strict=True):
                card.zero(memory.address, COUNTER_BYTES, stream)
            for stream in self._streams:
                stream.synchronize()
        except BaseException:
            for held in (*memories, self._pinned):
                held.free()
            raise
        self.memories: tuple[Memory, ...] = tuple(memories)

    def read(self) -> tuple[int, int]:
        """The sums over all cards. Blocks for what it takes to read a few bytes; after `free`, what was read last."""
        with self._lock:
            if self.memories:
                for number, (card, memory) in enumerate(zip(self._cards, self.memories, strict=True)):
                    card.copy_to_host(
                        self._pinned, number * COUNTER_BYTES, memory.address, COUNTER_BYTES, self._streams[number]
                    )
                for stream in self._streams:
                    stream.synchronize()
                outside, not_here = self._pinned.array.view(np.uint64).reshape(-1, 2).sum(axis=0).tolist()
                self._last = (outside, not_here)
            return self._last

    def free(self) -> None:
        """Gives the memory back. Idempotent."""
        with self._lock:
            memories, self.memories = self.memories, ()
        for memory in memories:
            memory.free()
        if memories:
            self._pinned.free()
