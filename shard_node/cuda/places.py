"""Where each row lies, as the kernel reads it: one uint32 a row, and the byte at which each table's slots begin.

```
place = slot << owner_bits | owner
```

Owners: cards 0 .. N - 1; N, every card (a hot row: each has a copy, at the same slot); N + 1, the host's pinned memory.
Slots count from 0 for each table and owner. The last slot that the bits could say is never used, so that no place is
`NOT_HERE`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shard_node.cuda.kernel_params import MAX_CARDS, NOT_HERE
from shard_node.errors import MemoryBudgetError

UInt8Array = npt.NDArray[np.uint8]
UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]

# Tiers of one card's rows of a table, from the hottest on; then what is not a tier.
HOT, CARD, HOST, ELSEWHERE, SPLIT = range(5)
NUM_TIERS = 3


def owner_bits(num_cards: int) -> int:
    """Low bits of a place that say the owner: the smallest b with 2^b >= num_cards + 3."""
    return (num_cards + 2).bit_length()


def max_slots(num_cards: int) -> int:
    """Slots that one table can have at one owner."""
    return (1 << (32 - owner_bits(num_cards))) - 1


def hot_owner(num_cards: int) -> int:
    """The owner of rows that every card has a copy of."""
    return num_cards


def pinned_owner(num_cards: int) -> int:
    """The owner of rows in the host's pinned memory."""
    return num_cards + 1


def encode_places(owners: npt.NDArray[np.integer], slots: npt.NDArray[np.integer], num_cards: int) -> UInt32Array:
    """Places uint32 [n] of owners [n] and slots [n], both in range."""
    places: UInt32Array = slots.astype(np.uint32)
    places <<= np.uint32(owner_bits(num_cards))
    places |= owners.astype(np.uint32)
    return places


def owners_of(places: UInt32Array, num_cards: int) -> UInt8Array:
    """The owner uint8 [n] of each place; num_cards + 2 for `NOT_HERE`."""
    owners = (places & np.uint32((1 << owner_bits(num_cards)) - 1)).astype(np.uint8)
    owners[places == NOT_HERE] = num_cards + 2
    return owners


def slots_of(places: UInt32Array, num_cards: int) -> UInt32Array:
    """The slot uint32 [n] of each place that is not `NOT_HERE`."""
    slots: UInt32Array = places >> np.uint32(owner_bits(num_cards))
    return slots


def check_num_cards(num_cards: int) -> None:
    """Raises MemoryBudgetError for more cards than the kernel knows."""
    if not 1 <= num_cards <= MAX_CARDS:
        raise MemoryBudgetError(f"{num_cards} cards; allowed: 1 to {MAX_CARDS}")
