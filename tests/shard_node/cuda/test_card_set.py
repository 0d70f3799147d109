"""Devices are chosen by a word, and what rows take of them is counted before it is taken, over all versions."""

from __future__ import annotations

import logging
import sys

import pytest
from pydantic import ValidationError

from shard_node.cuda.card_set import CardMemory, CardOptions, CardSet, DeviceChoice, devices_of_cards, open_cards
from shard_node.errors import CardsUnavailableError, DeviceChoiceError, MemoryBudgetError
from shardrank_testing.emulated_cards import EmulatedCards

MIB = 1 << 20
TOTAL = 64 * MIB
RESERVE = TOTAL // 8
KEPT = RESERVE // 4


def test_logical_cards_share_the_memory_of_their_device():
    memory = CardMemory(EmulatedCards(4, total_bytes=TOTAL, num_devices=2))
    with pytest.raises(MemoryBudgetError, match=r"device 1 \(cards 1, 3\)"):
        memory.take([MIB, TOTAL, 0, 0])
    assert memory.held_bytes == (0, 0, 0, 0)
    each = (TOTAL - KEPT) // 2
    claim = memory.take([each, each, each, each])
    assert memory.held_bytes == (each, each, each, each)
    with pytest.raises(
        MemoryBudgetError,
        match=rf"rows take 1 bytes of device 1 \(cards 1, 3\), but {TOTAL} are free and {KEPT} are kept free; "
        rf"versions that are here take 0, others that are being staged {2 * each}",
    ):
        memory.take([0, 0, 0, 1])
    claim.give_back()
    claim.give_back()
    assert memory.held_bytes == (0, 0, 0, 0)
    memory.take([0, 0, 0, 1])


def test_unused_memory_of_torch_is_freed_before_a_refusal():
    cards = EmulatedCards(3, total_bytes=TOTAL, num_devices=2)
    memory = CardMemory(cards)
    for device in range(2):
        cards.kept_for_later[device] = [cards.cards[device].allocate(30 * MIB)]
    memory.take([MIB, MIB, MIB])
    assert sorted(cards.kept_for_later) == [0, 1]
    memory.take([0, 40 * MIB, 0])
    assert sorted(cards.kept_for_later) == [0]
    with pytest.raises(MemoryBudgetError, match=f"rows take {TOTAL} bytes of device 0 .* but {TOTAL} are free"):
        memory.take([TOTAL, 0, 0])


def test_allocated_bytes_are_counted_once():
    cards = EmulatedCards(1, total_bytes=TOTAL)
    memory = CardMemory(cards)
    claim = memory.take([40 * MIB])
    with pytest.raises(MemoryBudgetError):
        memory.take([23 * MIB])
    rows = cards.cards[0].allocate(40 * MIB)
    claim.filled()
    second = memory.take([20 * MIB])
    with pytest.raises(
        MemoryBudgetError,
        match=f"but {24 * MIB} are free and {KEPT} are kept free; versions that are here take {40 * MIB}, "
        f"others that are being staged {20 * MIB}",
    ):
        memory.take([3 * MIB])
    rows.free()
    claim.give_back()
    second.give_back()
    assert memory.held_bytes == (0,)


def test_by_default_a_version_takes_half_of_the_free_memory():
    cards = EmulatedCards(4, total_bytes=TOTAL, num_devices=2)
    elsewhere = cards.cards[1].allocate(8 * MIB)
    first, second = (TOTAL - RESERVE) // 4, (TOTAL - RESERVE - 8 * MIB) // 4
    assert CardSet(cards).card_bytes == (first, second, first, second)
    elsewhere.free()
    assert CardSet(cards, CardOptions(card_memory_gb=0.004)).card_bytes == (4_000_000,) * 4


@pytest.mark.parametrize(
    "options", [{"card_memory_gb": 0}, {"pinned_memory_gb": -1}, {"hot_gb": -0.5}, {"card_memory_gb": float("inf")}]
)
def test_impossible_amounts_of_memory_are_refused(options):
    with pytest.raises(ValidationError):
        CardOptions(**options)


def test_cards_without_peer_access_warn_or_are_refused(caplog):
    cards = EmulatedCards(2, peer_access=False)
    with caplog.at_level(logging.WARNING, logger="shard_node.cuda.card_set"):
        CardSet(cards)
    assert "2 x emulated card can read the memory of every other" in caplog.text
    with pytest.raises(CardsUnavailableError, match=r"2 x emulated card .* require_peer_access is set") as refused:
        CardSet(cards, CardOptions(require_peer_access=True))
    assert (refused.value.kind, refused.value.http_status) == ("peer_access", 409)
    CardSet(EmulatedCards(2), CardOptions(require_peer_access=True))


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("cpu", DeviceChoice("cpu")),
        ("auto", DeviceChoice("auto")),
        ("cuda", DeviceChoice("cuda")),
        ("cuda:3", DeviceChoice("cuda", (3,))),
        ("cuda:1,0", DeviceChoice("cuda", (1, 0))),
    ],
)
def test_devices_are_chosen_by_a_word_or_by_number(text, choice):
    assert DeviceChoice.parse(text) == choice
    assert str(choice) == text


@pytest.mark.parametrize(
    "text", ["", "gpu", "CPU", "cpu:0", "cuda:", "cuda:-1", "cuda:a", "cuda:0,", "cuda:0 ,1", "cuda:0\n", "cuda:12345"]
)
def test_other_devices_are_refused(text):
    with pytest.raises(DeviceChoiceError) as error:
        DeviceChoice.parse(text)
    assert str(error.value) == f"device {text!r} is none of 'cpu', 'auto', 'cuda', 'cuda:I' or 'cuda:I,J,...'"


@pytest.mark.parametrize(
    ("device", "cards", "num_devices", "devices"),
    [
        ("cuda:2", 8, 3, (2,) * 8),
        ("cuda:2", None, 3, (2,)),
        ("cuda:5,1", 5, 8, (5, 1, 5, 1, 5)),
        ("cuda", None, 3, (0, 1, 2)),
        ("cuda", None, 100, tuple(range(64))),
        ("auto", 2, 3, (0, 1)),
        ("auto", 4, 3, "'cuda:0'"),
        ("cuda:0,1,2", 2, 3, "at most one a card"),
        ("cuda:0,3", None, 3, r"there is no device 3; this process sees 0\.\.2"),
        ("cuda:0", 0, 1, r"cards 0 is not within 1\.\.64"),
        ("cuda:0", 65, 1, r"cards 65 is not within 1\.\.64"),
        ("cuda:0,1,0", 3, 2, "twice"),
    ],
)
def test_cards_are_dealt_to_devices(device, cards, num_devices, devices):
    if isinstance(devices, tuple):
        assert devices_of_cards(DeviceChoice.parse(device), cards, num_devices) == devices
        return
    with pytest.raises(DeviceChoiceError, match=devices):
        devices_of_cards(DeviceChoice.parse(device), cards, num_devices)


def test_without_cupy_cuda_is_refused_and_auto_is_the_cpu(monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "shard_node.cuda.cupy_cards", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(
        CardsUnavailableError, match=r"device 'cuda': CuPy can't be imported .*pip install 'shardrank\[cuda\]'"
    ):
        open_cards(DeviceChoice("cuda"), 1)
    caplog.set_level(logging.INFO, logger="shard_node.cuda.card_set")
    assert open_cards(DeviceChoice("auto"), 1) is None
    assert "device 'auto' is the CPU: CuPy can't be imported" in caplog.text
    assert open_cards(DeviceChoice("cpu"), 8) is None
