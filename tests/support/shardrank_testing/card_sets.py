"""Cards of every kind that a test can run on."""

from __future__ import annotations

from typing import Protocol

import pytest

from shard_node.cuda.card_set import DeviceChoice, open_cards
from shard_node.cuda.cards import Cards
from shard_node.cuda.kernel_params import KernelSwitches
from shard_node.errors import CardsUnavailableError, DeviceChoiceError
from shardrank_testing.emulated_cards import DEFAULT_TOTAL_BYTES as TOTAL_BYTES
from shardrank_testing.emulated_cards import EmulatedCards


class CardFactory(Protocol):
    """Makes cards, or skips the test if there are none such here."""

    def __call__(self, num_cards: int, *, peer_access: bool = True, total_bytes: int = TOTAL_BYTES) -> Cards: ...


def card_factory(kind: str, switches: KernelSwitches | None = None) -> CardFactory:
    """Of `emulated` cards, that work at once or are `deferred`; or of real ones.

    Real ones are `logical` cards of device 0, or `devices` of their own.
    """
    if kind in ("logical", "devices"):
        return _Real(kind, switches)
    return _Emulated(kind == "deferred", switches)


class _Emulated:
    def __init__(self, deferred: bool, switches: KernelSwitches | None) -> None:
        self._deferred = deferred
        self._switches = switches

    def __call__(self, num_cards: int, *, peer_access: bool = True, total_bytes: int = TOTAL_BYTES) -> EmulatedCards:
        return EmulatedCards(num_cards, peer_access, total_bytes, deferred=self._deferred, switches=self._switches)


class _Real:
    def __init__(self, kind: str, switches: KernelSwitches | None) -> None:
        self._switches = switches
        self._choice = DeviceChoice.parse("cuda:0" if kind == "logical" else "cuda")

    def __call__(self, num_cards: int, *, peer_access: bool = True, total_bytes: int = TOTAL_BYTES) -> Cards:
        if not peer_access or total_bytes != TOTAL_BYTES:
            pytest.skip("real cards are as they are: only emulated ones can be made without peer access or with less")
        if not self._choice.devices and num_cards == 1:
            pytest.skip("one card on a device of its own is the one logical card of device 0")
        try:
            cards = open_cards(self._choice, num_cards, self._switches)
        except (CardsUnavailableError, DeviceChoiceError) as reason:
            pytest.skip(str(reason))
        assert cards is not None
        if not cards.peer_access:
            pytest.skip(f"{cards.name}: without access to each other's memory")
        return cards
