"""The cards of a process, and what its versions may take of them: made once, shared by all versions."""

from __future__ import annotations

import logging

from pydantic import Field

from loader.snapshot.manifest import Frozen
from shard_node.cuda.card_memory import CardMemory
from shard_node.cuda.cards import Cards
from shard_node.cuda.device_choice import DeviceChoice, open_cards
from shard_node.errors import InvalidBagsError, PeerAccessError

logger = logging.getLogger(__name__)

DEFAULT_PINNED_GB = 16.0
VERSIONS_SIDE_BY_SIDE = 2
"""A version is staged beside the live one, so by itself it takes half of what there is."""


class CardOptions(Frozen):
    """What the rows of one version may take. 1 GB is 10^9 bytes.

    Attributes:
        card_memory_gb: of each card, for rows and their places. None: half of what was free when the process began,
            less a reserve, divided by the logical cards of a device; so that two versions fit side by side.
        pinned_memory_gb: of the host, for rows that cards read in place. A version with more is refused.
        hot_gb: of each card, for copies of rows that every card has. None: what is left when every row is on a card,
            else a sixteenth.
        require_peer_access: refuse cards that can't read each other's memory, in place of leaving it unused.
    """

    card_memory_gb: float | None = Field(default=None, gt=0)
    pinned_memory_gb: float = Field(default=DEFAULT_PINNED_GB, ge=0)
    hot_gb: float | None = Field(default=None, ge=0)
    require_peer_access: bool = False

    @property
    def pinned_bytes(self) -> int:
        """Of `pinned_memory_gb`."""
        return int(self.pinned_memory_gb * 1e9)

    @property
    def hot_bytes(self) -> int | None:
        """Of `hot_gb`."""
        return None if self.hot_gb is None else int(self.hot_gb * 1e9)


class CardSet:
    """One per process; versions come and go on it. Thread-safe.

    Args:
        cards: the cards.
        options: what a version may take of them.
        memory: takes account of them; None for one that knows of no claim yet.

    Attributes:
        card_bytes: by card, what the rows and places of one version may take.

    Raises:
        PeerAccessError: peer access is required, and not all pairs of cards have it.
    """

    def __init__(self, cards: Cards, options: CardOptions | None = None, memory: CardMemory | None = None) -> None:
        self.cards = cards
        self.options = options or CardOptions()
        self.memory = memory or CardMemory(cards)
        if not cards.peer_access:
            told = f"not every one of {cards.name} can read the memory of every other (peer access)"
            if self.options.require_peer_access:
                raise PeerAccessError(f"{told}, and require_peer_access is set")
            logger.warning("%s: every row will be on all cards, or in pinned host memory", told)
        wanted = self.options.card_memory_gb
        self.card_bytes = (
            self.memory.share_bytes(VERSIONS_SIDE_BY_SIDE)
            if wanted is None
            else (int(wanted * 1e9),) * len(cards.cards)
        )

    @classmethod
    def open(cls, device: str, num_cards: int, options: CardOptions | None = None) -> CardSet | None:
        """Opens the cards that were chosen; None for the CPU.

        Args:
            device: as `DeviceChoice.parse` reads it.
            num_cards: how many.
            options: what a version may take of them.

        Raises:
            DeviceChoiceError: for text that names no device, and for devices that do not fit the cards.
            CardsUnavailableError: GPUs were asked for, and this process can't use one.
            PeerAccessError: peer access is required, and not all pairs of cards have it.
            CardError: CUDA fails at opening them.
        """
        cards = open_cards(DeviceChoice.parse(device), num_cards)
        return None if cards is None else cls(cards, options)

    def check_num_cards(self, num_cards: int) -> None:
        """Raises InvalidBagsError unless a partition for so many cards is for these."""
        if num_cards != len(self.cards.cards):
            raise InvalidBagsError(
                f"the partition is for {num_cards} cards, but there are {len(self.cards.cards)} ({self.cards.name})"
            )
