"""Which devices the rows go to, by a word of the command line: `cpu`, `auto`, `cuda`, `cuda:0`, `cuda:0,1`."""

from __future__ import annotations

import importlib
import logging
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, TypeAlias

from shard_node.cuda.cards import Cards
from shard_node.cuda.kernel_params import MAX_CARDS
from shard_node.errors import CardsUnavailableError, DeviceChoiceError

logger = logging.getLogger(__name__)

DeviceKind: TypeAlias = Literal["cpu", "auto", "cuda"]

ALLOWED = "'cpu', 'auto', 'cuda', 'cuda:I' or 'cuda:I,J,...'"
INSTALL = "pip install 'shardrank[cuda]'"

_NAMED = re.compile(r"cuda:(\d{1,4}(?:,\d{1,4})*)")


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What was asked for. `str()` gives a form that `parse` takes back.

    Attributes:
        kind: `cpu`: no card. `cuda`: cards, or an error. `auto`: cards if this process can use a GPU for each, else
            none, and why is logged.
        devices: with `cuda`, those that were named, each once, in this order; empty for all there are.
    """

    kind: DeviceKind
    devices: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> DeviceChoice:
        """Reads `cpu`, `auto`, `cuda`, `cuda:I` or `cuda:I,J,...`.

        Raises:
            DeviceChoiceError: naming the text and what is allowed.
        """
        if text == "cpu":
            return cls("cpu")
        if text == "auto":
            return cls("auto")
        if text == "cuda":
            return cls("cuda")
        match = _NAMED.fullmatch(text)
        if match is None:
            raise DeviceChoiceError(f"device {text!r} is none of {ALLOWED}")
        devices = tuple(int(number) for number in match[1].split(","))
        if len(set(devices)) != len(devices):
            raise DeviceChoiceError(
                f"device {text!r} names a device twice; several cards of one device are logical cards: "
                "name the device once and ask for more cards"
            )
        return cls("cuda", devices)

    def __str__(self) -> str:
        return f"cuda:{','.join(map(str, self.devices))}" if self.devices else self.kind


def devices_of_cards(choice: DeviceChoice, num_cards: int | None, num_devices: int) -> tuple[int, ...]:
    """The device of every card.

    Named devices take the cards in turn, so that one may hold several (logical cards). Without names there is one
    card on each device, as many as asked for from device 0 on.

    Args:
        choice: of kind `cuda` or `auto`.
        num_cards: 1..64, or None for one a device.
        num_devices: there are, at least 1.

    Raises:
        DeviceChoiceError: naming the devices, the number of cards and what is allowed.
    """
    if num_cards is not None and not 1 <= num_cards <= MAX_CARDS:
        raise DeviceChoiceError(f"cards {num_cards} is not within 1..{MAX_CARDS}")
    if choice.devices:
        missing = [device for device in choice.devices if device >= num_devices]
        if missing:
            raise DeviceChoiceError(
                f"device {str(choice)!r}: there is no device {missing[0]}; this process sees 0..{num_devices - 1}"
            )
        cards = len(choice.devices) if num_cards is None else num_cards
        if cards < len(choice.devices):
            raise DeviceChoiceError(
                f"device {str(choice)!r} names {len(choice.devices)} devices for {cards} cards: at most one a card"
            )
        return tuple(choice.devices[card % len(choice.devices)] for card in range(cards))
    cards = min(num_devices, MAX_CARDS) if num_cards is None else num_cards
    if cards > num_devices:
        raise DeviceChoiceError(
            f"device {str(choice)!r}: {cards} cards, but this process sees {num_devices} devices; for several logical "
            "cards on one device name it, as in 'cuda:0'"
        )
    return tuple(range(cards))


def open_cards(choice: DeviceChoice, num_cards: int | None = None) -> Cards | None:
    """Opens the cards that were chosen; None for the CPU.

    Args:
        choice: of devices.
        num_cards: as for `devices_of_cards`.

    Raises:
        CardsUnavailableError: if `cuda` was chosen and this process can't use a GPU.
        DeviceChoiceError: if `cuda` was chosen and the devices do not fit the cards.
        CardError: if CUDA fails at opening them.
    """
    if choice.kind == "cpu":
        return None
    try:
        shim = _shim()
        num_devices: int = shim.usable_devices()
        cards: Cards = shim.open_cupy_cards(devices_of_cards(choice, num_cards, num_devices))
    except (CardsUnavailableError, DeviceChoiceError) as reason:
        if choice.kind == "cuda":
            if isinstance(reason, CardsUnavailableError):
                raise CardsUnavailableError(f"device {str(choice)!r}: {reason}") from reason
            raise
        logger.info("device 'auto' is the CPU: %s", reason)
        return None
    logger.info("device %r is %s", str(choice), cards.name)
    return cards


def _shim() -> ModuleType:
    """What opens cards: imported only when it is asked for, as it takes CuPy.

    Raises:
        CardsUnavailableError: if CuPy can't be imported.
    """
    try:
        return importlib.import_module("shard_node.cuda.cupy_cards")
    except ImportError as error:
        raise CardsUnavailableError(f"CuPy can't be imported ({error}): {INSTALL}") from error
    except OSError as error:
        raise CardsUnavailableError(
            f"CuPy can't be imported: {error}. It keeps compiled kernels in a folder that it must be able to write: "
            "set CUPY_CACHE_DIR"
        ) from error
