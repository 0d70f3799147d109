"""The cards of a process, shared by all versions: which are chosen, what versions may take of them and do take."""

from __future__ import annotations

import importlib
import logging
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from pydantic import Field

from loader.snapshot.tables import Frozen
from shard_node.cuda.kernel_params import MAX_CARDS
from shard_node.engine.memory import Claim
from shard_node.errors import CardsUnavailableError, DeviceChoiceError, MemoryBudgetError

if TYPE_CHECKING:
    from shard_node.cuda.cupy_cards import Card, Cards

logger = logging.getLogger(__name__)

VERSIONS_SIDE_BY_SIDE = 2
"""A version is staged beside the live one, so by itself it takes half of what there is."""
RESERVE_DIVISOR = 8
"""Of a device, 1/8 is not for rows, if nothing else is said, but for dense models, batches, graphs and the driver."""
KEPT_FREE_DIVISOR = 4
"""Of that, 1/4 has to be free still when rows have come: what the version beside them needs next."""
DeviceKind: TypeAlias = Literal["cpu", "auto", "cuda"]

ALLOWED = "'cpu', 'auto', 'cuda', 'cuda:I' or 'cuda:I,J,...'"
INSTALL = "pip install 'shardrank[cuda]'"

_NAMED = re.compile(r"cuda:(\d{1,4}(?:,\d{1,4})*)")


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
    pinned_memory_gb: float = Field(default=16.0, ge=0)
    hot_gb: float | None = Field(default=None, ge=0)
    require_peer_access: bool = False


class CardSet:
    """One per process; versions come and go on it, and may take `card_bytes` of each card. Thread-safe.

    Raises CardsUnavailableError if peer access is required, and not all pairs of cards have it.
    """

    def __init__(self, cards: Cards, options: CardOptions | None = None, memory: CardMemory | None = None) -> None:
        self.cards = cards
        self.options = options or CardOptions()
        self.memory = memory or CardMemory(cards)
        if not cards.peer_access:
            problem = f"not every one of {cards.name} can read the memory of every other (peer access)"
            if self.options.require_peer_access:
                problem += ", and require_peer_access is set"
                statuses = {"http_status": 409, "grpc_status": "FAILED_PRECONDITION"}
                raise CardsUnavailableError(problem, kind="peer_access", **statuses)  # type: ignore[arg-type]
            logger.warning("%s: every row will be on all cards, or in pinned host memory", problem)
        self.card_bytes = self.memory.share_bytes(VERSIONS_SIDE_BY_SIDE)
        if self.options.card_memory_gb is not None:
            self.card_bytes = (int(self.options.card_memory_gb * 1e9),) * len(cards.cards)

    @classmethod
    def open(cls, device: str, num_cards: int, options: CardOptions | None = None) -> CardSet | None:
        """Open the cards that `device` chooses; None for the CPU. Raises as `DeviceChoice.parse` and `open_cards`."""
        cards = open_cards(DeviceChoice.parse(device), num_cards)
        return None if cards is None else cls(cards, options)


class CardMemory:
    """Claims on the memory of devices, of several stagings at once. Thread-safe.

    What is free when it is made is what all versions may share, less `reserve_bytes` of each device, None for 1/8.
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
        self._claims: list[Claim] = []

    @property
    def held_bytes(self) -> tuple[int, ...]:
        """By card, of all claims, filled or not."""
        with self._lock:
            active = [claim for claim in self._claims if claim.is_active]
        return tuple(_on([card], active) for card in self._cards)

    def share_bytes(self, num_versions: int) -> tuple[int, ...]:
        """By card: what each of so many versions may take, so that all of them fit beside the reserve.

        It does not depend on what is loaded by now, so a version gets the same place whenever it is staged.
        """
        shares = {
            device: max(0, free - self._reserve_bytes[device]) // (len(self._by_device[device]) * num_versions)
            for device, free in self._free_at_first.items()
        }
        return tuple(shares[card.device_index] for card in self._cards)

    def take(self, card_bytes: Sequence[int], *, is_temporary: bool = False) -> Claim:
        """Claim memory of each card that is about to be allocated. Raises MemoryBudgetError, with the numbers."""
        claim = Claim(card_bytes, is_temporary=is_temporary)
        with self._lock:
            self._claims = [other for other in self._claims if other.is_active]
            for device, cards in self._by_device.items():
                needed = _on(cards, [claim])
                filling = _on(cards, [other for other in self._claims if other.is_filling])
                free, kept = cards[0].free_bytes(), self._reserve_bytes[device] // KEPT_FREE_DIVISOR
                if needed and needed + filling > free - kept:
                    # Of versions that are gone, torch keeps what their batches and graphs took.
                    cards[0].give_back_unused()
                    free = cards[0].free_bytes()
                if needed and needed + filling > free - kept:
                    names = f"card{'s' if len(cards) > 1 else ''} {', '.join(str(card.number) for card in cards)}"
                    raise MemoryBudgetError(
                        f"rows take {needed} bytes of device {device} ({names}), but {free} are free and "
                        f"{kept} are kept free; versions that are here take {_on(cards, self._claims) - filling}, "
                        f"others that are being staged {filling}. Give less card memory to leave more rows in pinned "
                        "host memory, or roll replica by replica"
                    )
            self._claims.append(claim)
        return claim


def _on(cards: Sequence[Card], claims: Sequence[Claim]) -> int:
    return sum(claim.sizes[card.number] for claim in claims for card in cards)


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The devices that were named with `cuda`, in this order; empty for all. `str()` gives what `parse` takes back.

    `cpu`: no card. `cuda`: cards, or an error. `auto`: cards if this process can use a GPU for each, else none, and why
    is logged.
    """

    kind: DeviceKind
    devices: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> DeviceChoice:
        """Read `cpu`, `auto`, `cuda`, `cuda:I` or `cuda:I,J,...`. Raises DeviceChoiceError."""
        if text in ("cpu", "auto", "cuda"):
            return cls(cast(DeviceKind, text))
        if (match := _NAMED.fullmatch(text)) is None:
            raise DeviceChoiceError(f"device {text!r} is none of {ALLOWED}")
        devices = tuple(int(number) for number in match[1].split(","))
        if len(set(devices)) != len(devices):
            advice = "several cards of one device are logical cards: name the device once and ask for more cards"
            raise DeviceChoiceError(f"device {text!r} names a device twice; {advice}")
        return cls("cuda", devices)

    def __str__(self) -> str:
        return f"cuda:{','.join(map(str, self.devices))}" if self.devices else self.kind


def devices_of_cards(choice: DeviceChoice, num_cards: int | None, num_devices: int) -> tuple[int, ...]:
    """Return the device of every card.

    Named devices take the cards in turn, so that one may hold several (logical cards). Without names there is one
    card on each device, as many as asked for from device 0 on. `num_cards` is 1..64, or None for one a device. Raises
    DeviceChoiceError.
    """
    if num_cards is not None and not 1 <= num_cards <= MAX_CARDS:
        raise DeviceChoiceError(f"cards {num_cards} is not within 1..{MAX_CARDS}")
    named, count = f"device {str(choice)!r}", len(choice.devices)
    if not choice.devices:
        cards = min(num_devices, MAX_CARDS) if num_cards is None else num_cards
        if cards > num_devices:
            seen = f"{cards} cards, but this process sees {num_devices} devices"
            raise DeviceChoiceError(f"{named}: {seen}; for several logical cards on one device name it, as in 'cuda:0'")
        return tuple(range(cards))
    if missing := [device for device in choice.devices if device >= num_devices]:
        raise DeviceChoiceError(f"{named}: there is no device {missing[0]}; this process sees 0..{num_devices - 1}")
    cards = count if num_cards is None else num_cards
    if cards < count:
        raise DeviceChoiceError(f"{named} names {count} devices for {cards} cards: at most one a card")
    return tuple(choice.devices[card % count] for card in range(cards))


def open_cards(choice: DeviceChoice, num_cards: int | None = None) -> Cards | None:
    """Open the cards that were chosen; None for the CPU. `num_cards` is as of `devices_of_cards`.

    Raises CardsUnavailableError if `cuda` was chosen and this process can't use a GPU, DeviceChoiceError if the devices
    do not fit the cards, CardError if CUDA fails.
    """
    if choice.kind == "cpu":
        return None
    try:
        shim = _cupy_cards()
        cards: Cards = shim.open_cupy_cards(devices_of_cards(choice, num_cards, shim.usable_devices()))
    except (CardsUnavailableError, DeviceChoiceError) as reason:
        if choice.kind == "auto":
            logger.info("device 'auto' is the CPU: %s", reason)
            return None
        if isinstance(reason, DeviceChoiceError):
            raise
        raise CardsUnavailableError(f"device {str(choice)!r}: {reason}") from reason
    logger.info("device %r is %s", str(choice), cards.name)
    return cards


def _cupy_cards() -> ModuleType:
    # Imported only when it is needed, as it takes CuPy.
    try:
        return importlib.import_module("shard_node.cuda.cupy_cards")
    except ImportError as error:
        raise CardsUnavailableError(f"CuPy can't be imported ({error}): {INSTALL}") from error
    except OSError as error:
        advice = "It keeps compiled kernels in a folder that it must be able to write: set CUPY_CACHE_DIR"
        raise CardsUnavailableError(f"CuPy can't be imported: {error}. {advice}") from error
