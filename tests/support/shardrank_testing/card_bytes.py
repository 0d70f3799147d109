"""Bytes on their way to cards and back, and a launch that copies, for tests of cards themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shard_node.cuda.cards import Card, Cards, Memory, PinnedMemory, Stream
from shard_node.cuda.kernel_params import (
    CHUNK_BYTES,
    THREADS_PER_BLOCK,
    WRITE_KERNEL,
    ArenaParams,
    TableParams,
    WriteParams,
    owner_bits,
)


def pinned_with(cards: Cards, array: npt.NDArray[Any]) -> PinnedMemory:
    """Pinned memory that holds the bytes of an array."""
    content = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    pinned = cards.allocate_pinned(content.nbytes)
    pinned.array[:] = content
    return pinned


def send(cards: Cards, card: Card, array: npt.NDArray[Any], stream: Stream | None = None) -> Memory:
    """Return memory of a card that holds the bytes of an array."""
    stream = stream or card.stream()
    memory, pinned = card.allocate(array.nbytes), pinned_with(cards, array)
    card.copy_to_card(memory.address, pinned, 0, array.nbytes, stream)
    stream.synchronize()
    return memory


def fetch_at(
    cards: Cards, card: Card, address: int, size_bytes: int, stream: Stream | None = None
) -> npt.NDArray[np.uint8]:
    """Return the bytes at an address as a card sees them, after all that is on the stream."""
    stream = stream or card.stream()
    pinned = cards.allocate_pinned(size_bytes)
    card.copy_to_host(pinned, 0, address, size_bytes, stream)
    stream.synchronize()
    content = pinned.array.copy()
    pinned.free()
    return content


def fetch(cards: Cards, card: Card, memory: Memory, stream: Stream | None = None) -> npt.NDArray[np.uint8]:
    """Return all bytes of memory of a card."""
    return fetch_at(cards, card, memory.address, memory.size_bytes, stream)


def numbers(count: int, seed: int = 0) -> np.ndarray:
    """float32 [count], random."""
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


@dataclass
class KernelCopy:
    """A launch of `write_rows` that copies `size_bytes`, a multiple of 16, on a card.

    Attributes:
        params: what the kernel takes.
        held: memory on the card that the launch reads.
    """

    size_bytes: int
    params: tuple[ArenaParams, WriteParams]
    held: list[Memory]

    @classmethod
    def of(cls, cards: Cards, card: Card, source: int, target: int, size_bytes: int) -> KernelCopy:
        """Copies between two addresses; either may be on another card, or on the host."""
        num_rows = size_bytes // CHUNK_BYTES
        rows = np.arange(num_rows, dtype=np.uint32)
        table = np.frombuffer(bytes(TableParams(num_rows=num_rows)), np.uint8)
        held = [
            send(cards, card, array)
            for array in (rows << np.uint32(owner_bits(1)), table, np.zeros(3, np.uint64), rows)
        ]
        places, tables, starts, numbers = (memory.address for memory in held)
        arena = ArenaParams(
            places=places,
            tables=tables,
            starts=starts,
            num_tables=1,
            num_cards=1,
            owner_bits=owner_bits(1),
            row_stride=CHUNK_BYTES,
            embedding_dim=CHUNK_BYTES // 4,
        )
        arena.rows[0] = target
        return cls(size_bytes, (arena, WriteParams(numbers=numbers, stored=source, num_rows=num_rows)), held)

    def launch(self, card: Card, stream: Stream) -> None:
        """Puts it on a stream of the card."""
        blocks = -(-self.size_bytes // (CHUNK_BYTES * THREADS_PER_BLOCK))
        card.launch(WRITE_KERNEL, (blocks, 1), self.params, stream)
