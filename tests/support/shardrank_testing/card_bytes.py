"""Bytes on their way to cards and back, and a kernel that adds, for tests of cards themselves."""

from __future__ import annotations

import numpy as np

from shard_node.cuda.cards import Card, Cards, Memory, PinnedMemory, Stream
from shard_node.cuda.kernel_params import OUT_DTYPES, AddParams


def pinned_with(cards: Cards, array: np.ndarray) -> PinnedMemory:
    """Pinned memory that holds the bytes of an array."""
    pinned = cards.allocate_pinned(array.nbytes)
    pinned.array[:] = array.view(np.uint8).reshape(-1)
    return pinned


def on_card(card: Card, cards: Cards, array: np.ndarray, stream: Stream) -> Memory:
    """Memory of a card that holds the bytes of an array."""
    memory, pinned = card.allocate(array.nbytes), pinned_with(cards, array)
    card.copy_to_card(memory.address, pinned, 0, array.nbytes, stream)
    stream.synchronize()
    return memory


def from_card(
    card: Card, cards: Cards, address: int, count: int, dtype: type[np.generic], stream: Stream
) -> np.ndarray:
    """The numbers that lie there, after all that is on the stream."""
    pinned = cards.allocate_pinned(count * np.dtype(dtype).itemsize)
    card.copy_to_host(pinned, 0, address, pinned.size_bytes, stream)
    stream.synchronize()
    return pinned.array.view(dtype).copy()


def numbers(count: int, seed: int = 0) -> np.ndarray:
    """float32 [count], random."""
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def add_params(positions: Memory, sums: Memory, out: int, num_bags: int, dim: int) -> AddParams:
    """`out[positions[bag] + column] += sums[bag, column]`, of float32."""
    return AddParams(positions.address, sums.address, out, num_bags, dim, OUT_DTYPES["fp32"], 0)
