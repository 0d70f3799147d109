"""Cards of every kind that a test can run on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import pytest

from shard_node.cuda.card_set import DeviceChoice, open_cards
from shard_node.cuda.cards import Cards
from shard_node.cuda.kernel_params import KernelSwitches
from shard_node.errors import CardsUnavailableError, DeviceChoiceError
from shardrank_testing.emulated_cards import EmulatedCards

Kind = Literal["emulated", "as late as can be", "no peer access", "logical", "devices"]
"""Emulated cards, which work at once, only when somebody waits for it, or without access to each other's memory; or
real ones: logical cards of device 0, or devices of their own."""
CardFactory = Callable[[int], Cards]
"""Makes so many cards, or skips the test if there are none such here."""


def card_factory(kind: Kind, switches: KernelSwitches | None = None) -> CardFactory:
    """Return what makes cards of this kind."""
    return partial(_make, kind, switches)


def _make(kind: Kind, switches: KernelSwitches | None, num_cards: int) -> Cards:
    if kind not in ("logical", "devices"):
        deferred, peer_access = kind == "as late as can be", kind != "no peer access"
        return EmulatedCards(num_cards, peer_access, deferred=deferred, switches=switches)
    if kind == "devices" and num_cards == 1:
        pytest.skip("one card on a device of its own is the one logical card of device 0")
    try:
        cards = open_cards(DeviceChoice.parse("cuda:0" if kind == "logical" else "cuda"), num_cards, switches)
    except (CardsUnavailableError, DeviceChoiceError) as reason:
        pytest.skip(str(reason))
    assert cards is not None
    if not cards.peer_access:
        pytest.skip(f"{cards.name}: without access to each other's memory")
    return cards
