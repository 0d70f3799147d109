"""What rows take of the cards' devices: counted before it is taken, over all versions, and given back with them.

Logical cards of one device share its memory, so claims are counted by device. Host memory that cards read in place is
counted by `RowMemory`, together with the rows of CPU engines.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from shard_node.cuda.cards import Card, Cards
from shard_node.errors import MemoryBudgetError

RESERVE_DIVISOR = 8
"""Of a device, 1/8 is not for rows, if nothing else is said, but for dense models, batches, graphs and the driver."""
KEPT_FREE_DIVISOR = 4
"""Of that, 1/4 has to be free still when rows have come: what the version beside them needs next."""


class CardClaim:
    """The right to so many bytes of each card, until it is given back. Made by `CardMemory.take`.

    Attributes:
        card_bytes: by card.
    """

    def __init__(self, memory: CardMemory, card_bytes: tuple[int, ...]) -> None:
        self._memory = memory
        self.card_bytes = card_bytes

    def filled(self) -> None:
        """It is allocated: the device counts it as used by now."""
        self._memory.end_filling(self)

    def give_back(self) -> None:
        """Ends it. Idempotent."""
        self._memory.forget(self)


class CardMemory:
    """Claims on the memory of devices, of several stagings at once. Thread-safe.

    Args:
        cards: whose memory. What is free now is what all versions may share.
        reserve_bytes: of each device, what is left for everything else; None for 1/8 of it.
    """

    def __init__(self, cards: Cards, reserve_bytes: int | None = None) -> None:
        self._cards = cards.cards
        self._by_device: dict[int, tuple[Card, ...]] = {}
        for card in self._cards:
            self._by_device[card.device_index] = (*self._by_device.get(card.device_index, ()), card)
        self._reserve_bytes = {
            device: its[0].total_bytes // RESERVE_DIVISOR if reserve_bytes is None else reserve_bytes
            for device, its in self._by_device.items()
        }
        self._free_at_first = {device: its[0].free_bytes() for device, its in self._by_device.items()}
        self._lock = threading.Lock()
        self._claims: set[CardClaim] = set()
        self._filling: set[CardClaim] = set()

    @property
    def held_bytes(self) -> tuple[int, ...]:
        """By card, of all claims, filled or not."""
        with self._lock:
            return tuple(_on([card], self._claims) for card in self._cards)

    def share_bytes(self, num_versions: int) -> tuple[int, ...]:
        """By card: what each of so many versions may take, so that all of them fit beside the reserve.

        It does not depend on what is loaded by now, so a version gets the same place whenever it is staged.
        """
        shares = {
            device: max(0, free - self._reserve_bytes[device]) // (len(self._by_device[device]) * num_versions)
            for device, free in self._free_at_first.items()
        }
        return tuple(shares[card.device_index] for card in self._cards)

    def take(self, card_bytes: Sequence[int]) -> CardClaim:
        """Claims memory that is about to be allocated.

        Args:
            card_bytes: by card.

        Raises:
            MemoryBudgetError: with the numbers, if a device has not as much.
        """
        claim = CardClaim(self, tuple(card_bytes))
        with self._lock:
            for device, cards in self._by_device.items():
                wanted = _on(cards, [claim])
                filling = _on(cards, self._filling)
                free, kept = cards[0].free_bytes(), self._reserve_bytes[device] // KEPT_FREE_DIVISOR
                if wanted and wanted + filling > free - kept:
                    # Of versions that are gone, torch keeps what their batches and graphs took.
                    cards[0].give_back_unused()
                    free = cards[0].free_bytes()
                if wanted and wanted + filling > free - kept:
                    raise MemoryBudgetError(
                        f"rows take {wanted} bytes of device {device} ({_names(cards)}), but {free} are free and "
                        f"{kept} are kept free; versions that are here take {_on(cards, self._claims) - filling}, "
                        f"others that are being staged {filling}. Give less card memory to leave more rows in pinned "
                        "host memory, or roll replica by replica"
                    )
            self._claims.add(claim)
            self._filling.add(claim)
        return claim

    def end_filling(self, claim: CardClaim) -> None:
        """Called by `CardClaim.filled`."""
        with self._lock:
            self._filling.discard(claim)

    def forget(self, claim: CardClaim) -> None:
        """Called by `CardClaim.give_back`."""
        with self._lock:
            self._claims.discard(claim)
            self._filling.discard(claim)


def _on(cards: Sequence[Card], claims: Sequence[CardClaim] | set[CardClaim]) -> int:
    return sum(claim.card_bytes[card.number] for claim in claims for card in cards)


def _names(cards: Sequence[Card]) -> str:
    if len(cards) == 1:
        return f"card {cards[0].number}"
    return f"cards {', '.join(str(card.number) for card in cards)}"
