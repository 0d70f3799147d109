"""What rows take of devices is counted before it is taken, over all versions and logical cards."""

from __future__ import annotations

import contextlib
import logging
import threading

import pytest
from pydantic import ValidationError

from shard_node.cuda.card_set import CardMemory, CardOptions, CardSet
from shard_node.errors import MemoryBudgetError, PeerAccessError
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
