"""Devices are chosen by a word, and what rows take of them is counted before it is taken, over all versions."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shard_node.cuda.card_set import CardMemory, CardOptions, CardSet, DeviceChoice, devices_of_cards, open_cards
from shard_node.errors import CardsUnavailableError, DeviceChoiceError, MemoryBudgetError, PeerAccessError
from shardrank_testing.emulated_cards import EmulatedCards

MIB = 1 << 20
TOTAL = 64 * MIB
RESERVE = TOTAL // 8
KEPT = RESERVE // 4


def memory_of(num_cards: int, num_devices: int) -> CardMemory:
    return CardMemory(EmulatedCards(num_cards, total_bytes=TOTAL, num_devices=num_devices))


def test_logical_cards_of_one_device_share_what_it_has():
    memory = memory_of(4, 2)
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


def test_a_refused_claim_takes_nothing_of_any_device():
    memory = memory_of(2, 2)
    with pytest.raises(MemoryBudgetError, match=r"device 1 \(card 1\)"):
        memory.take([MIB, TOTAL])
    assert memory.held_bytes == (0, 0)
    memory.take([TOTAL - KEPT, TOTAL - KEPT])


def test_what_torch_keeps_of_versions_that_are_gone_is_given_back_before_a_claim_is_refused():
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


def test_what_is_allocated_is_counted_once_when_the_device_counts_it():
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


def test_of_many_that_ask_at_once_only_as_many_get_as_fit():
    memory = memory_of(1, 1)
    granted: list[int] = []

    def ask() -> None:
        with contextlib.suppress(MemoryBudgetError):
            granted.append(memory.take([10 * MIB]).card_bytes[0])

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(granted) == (TOTAL - KEPT) // (10 * MIB)
    assert memory.held_bytes == (sum(granted),)


def test_a_version_takes_half_of_what_was_free_so_that_the_next_one_fits_beside_it():
    cards = EmulatedCards(4, total_bytes=TOTAL, num_devices=2)
    elsewhere = cards.cards[1].allocate(8 * MIB)
    card_set = CardSet(cards)
    first, second = (TOTAL - RESERVE) // 4, (TOTAL - RESERVE - 8 * MIB) // 4
    assert card_set.card_bytes == (first, second, first, second)
    held = [card.allocate(size) for card, size in zip(cards.cards, card_set.card_bytes, strict=True)]
    card_set.memory.take(card_set.card_bytes)
    elsewhere.free()
    assert CardSet(cards, CardOptions(card_memory_gb=0.004)).card_bytes == (4_000_000,) * 4
    assert len(held) == 4


@pytest.mark.parametrize(
    "options", [{"card_memory_gb": 0}, {"pinned_memory_gb": -1}, {"hot_gb": -0.5}, {"card_memory_gb": float("inf")}]
)
def test_an_amount_of_memory_that_can_not_be_is_refused(options):
    with pytest.raises(ValidationError):
        CardOptions(**options)


def test_gigabytes_are_thousands_of_millions_of_bytes():
    options = CardOptions(pinned_memory_gb=1.5, hot_gb=0.25)
    assert (options.pinned_bytes, options.hot_bytes, CardOptions().hot_bytes) == (1_500_000_000, 250_000_000, None)


def test_cards_without_access_to_each_other_are_told_of_or_refused(caplog):
    cards = EmulatedCards(2, peer_access=False)
    with caplog.at_level(logging.WARNING, logger="shard_node.cuda.card_set"):
        CardSet(cards)
    assert "2 x emulated card can read the memory of every other" in caplog.text
    with pytest.raises(PeerAccessError, match=r"2 x emulated card .* require_peer_access is set"):
        CardSet(cards, CardOptions(require_peer_access=True))
    CardSet(EmulatedCards(2), CardOptions(require_peer_access=True))


devices = st.lists(st.integers(0, 9999), min_size=1, max_size=8, unique=True).map(tuple)
choices = st.one_of(
    st.sampled_from([DeviceChoice("cpu"), DeviceChoice("auto"), DeviceChoice("cuda")]),
    devices.map(lambda some: DeviceChoice("cuda", some)),
)


@given(choices)
def test_a_choice_of_devices_is_read_back_as_it_is_written(choice):
    assert DeviceChoice.parse(str(choice)) == choice


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


@pytest.mark.parametrize(
    "text", ["", "gpu", "CPU", "cpu:0", "cuda:", "cuda:-1", "cuda:a", "cuda:0,", "cuda:0 ,1", "cuda:0\n", "cuda:12345"]
)
def test_what_is_no_choice_of_devices_is_refused_with_what_is_allowed(text):
    with pytest.raises(DeviceChoiceError) as error:
        DeviceChoice.parse(text)
    assert str(error.value) == f"device {text!r} is none of 'cpu', 'auto', 'cuda', 'cuda:I' or 'cuda:I,J,...'"


def test_a_device_named_twice_is_refused():
    with pytest.raises(DeviceChoiceError, match="twice"):
        DeviceChoice.parse("cuda:0,1,0")


@given(devices=devices, cards=st.integers(1, 64))
def test_named_devices_take_the_cards_in_turn(devices, cards):
    choice = DeviceChoice("cuda", devices)
    if cards < len(devices):
        with pytest.raises(DeviceChoiceError, match="at most one a card"):
            devices_of_cards(choice, cards, 10_000)
        return
    placed = devices_of_cards(choice, cards, 10_000)
    assert len(placed) == cards
    assert placed[: len(devices)] == devices
    counts = [placed.count(device) for device in devices]
    assert max(counts) - min(counts) <= 1


@given(cards=st.none() | st.integers(1, 64), num_devices=st.integers(1, 100), kind=st.sampled_from(["cuda", "auto"]))
def test_without_names_every_card_has_a_device_of_its_own(cards, num_devices, kind):
    choice = DeviceChoice(kind)
    if cards is not None and cards > num_devices:
        with pytest.raises(DeviceChoiceError, match="'cuda:0'"):
            devices_of_cards(choice, cards, num_devices)
        return
    assert devices_of_cards(choice, cards, num_devices) == tuple(range(cards or min(num_devices, 64)))


def test_a_named_device_holds_as_many_logical_cards_as_are_asked_for():
    assert devices_of_cards(DeviceChoice("cuda", (2,)), 8, 3) == (2,) * 8
    assert devices_of_cards(DeviceChoice("cuda", (2,)), None, 3) == (2,)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(DeviceChoiceError, match=r"there is no device 3; this process sees 0\.\.2"):
        devices_of_cards(DeviceChoice("cuda", (0, 3)), None, 3)


@pytest.mark.parametrize("cards", [0, 65])
def test_more_cards_than_places_can_name_are_refused(cards):
    with pytest.raises(DeviceChoiceError, match=rf"cards {cards} is not within 1\.\.64"):
        devices_of_cards(DeviceChoice("cuda", (0,)), cards, 1)


def test_the_cpu_needs_no_cards():
    assert open_cards(DeviceChoice("cpu"), 8) is None


@pytest.fixture
def no_cupy(monkeypatch):
    """A process that has no CuPy, also where there is one."""
    monkeypatch.delitem(sys.modules, "shard_node.cuda.cupy_cards", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)


def test_cuda_without_cupy_is_refused_with_how_to_install_it(no_cupy):
    with pytest.raises(
        CardsUnavailableError, match=r"device 'cuda': CuPy can't be imported .*pip install 'shardrank\[cuda\]'"
    ):
        open_cards(DeviceChoice("cuda"), 1)


def test_auto_without_cupy_is_the_cpu_and_says_why(no_cupy, caplog):
    caplog.set_level(logging.INFO, logger="shard_node.cuda.card_set")
    assert open_cards(DeviceChoice("auto"), 1) is None
    assert "device 'auto' is the CPU: CuPy can't be imported" in caplog.text
