"""That emulated cards are strict where a real card would crash, or be wrong without a word."""

from __future__ import annotations

import numpy as np
import pytest

from shard_node.cuda.kernel_params import WRITE_KERNEL, ArenaParams, WriteParams
from shard_node.errors import MemoryBudgetError
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.emulated_memory import EmulationError


def pinned_with(cards: EmulatedCards, number: int, size: int = 64):
    pinned = cards.allocate_pinned(size)
    pinned.array[:] = number
    return pinned


def seen(card, memory) -> np.ndarray:
    return memory.bytes_of(0, memory.size_bytes)


def test_deferred_work_happens_when_it_is_waited_for_and_not_before():
    cards = EmulatedCards(1, deferred=True)
    card = cards.cards[0]
    stream, memory = card.stream(), card.allocate(64)
    pinned = pinned_with(cards, 5)
    card.copy_to_card(memory.address, pinned, 0, 64, stream)
    first = stream.record()
    card.zero(memory.address, 64, stream)
    assert not first.done
    first.synchronize()
    assert first.done
    assert (seen(card, memory) == 5).all()
    stream.synchronize()
    assert not seen(card, memory).any()


def test_a_deferred_copy_takes_what_is_there_when_it_happens():
    cards = EmulatedCards(1, deferred=True)
    card = cards.cards[0]
    stream, memory, pinned = card.stream(), card.allocate(64), pinned_with(cards, 1)
    card.copy_to_card(memory.address, pinned, 0, 64, stream)
    pinned.array[:] = 2
    stream.synchronize()
    assert (seen(card, memory) == 2).all()


def test_a_stream_that_does_not_wait_overtakes_and_one_that_waits_does_not():
    cards = EmulatedCards(2, deferred=True)
    writer, reader = cards.cards
    memory, up, down = writer.allocate(64), pinned_with(cards, 9), cards.allocate_pinned(64)
    first, second = writer.stream(), reader.stream()
    writer.copy_to_card(memory.address, up, 0, 64, first)
    reader.copy_to_host(down, 0, memory.address, 64, second)
    second.synchronize()
    assert not (down.array == 9).any()
    second.wait(first.record())
    reader.copy_to_host(down, 0, memory.address, 64, second)
    second.synchronize()
    assert (down.array == 9).all()


@pytest.mark.parametrize("deferred", [False, True])
def test_a_captured_graph_does_nothing_until_it_is_replayed(deferred):
    cards = EmulatedCards(1, deferred=deferred)
    card = cards.cards[0]
    stream, memory, pinned = card.stream(), card.allocate(64), pinned_with(cards, 3)
    card.zero(memory.address, 64, stream)
    graph = card.capture(stream, lambda: card.copy_to_card(memory.address, pinned, 0, 64, stream))
    stream.synchronize()
    assert not seen(card, memory).any()
    for number in (3, 4):
        pinned.array[:] = number
        graph.replay(stream)
        stream.synchronize()
        assert (seen(card, memory) == number).all()


def test_a_replay_that_differs_from_what_was_captured_is_refused():
    cards = EmulatedCards(1)
    card = cards.cards[0]
    stream, memory = card.stream(), card.allocate(64)
    sizes = [64]
    graph = card.capture(stream, lambda: [card.zero(memory.address, size, stream) for size in sizes])
    graph.replay(stream)
    sizes[:] = [32]
    with pytest.raises(EmulationError, match="piece 0 of a graph is not what was captured"):
        graph.replay(stream)
    sizes[:] = [64, 64]
    with pytest.raises(EmulationError, match="piece 1 of a graph is not what was captured"):
        graph.replay(stream)
    sizes[:] = []
    with pytest.raises(EmulationError, match="of a graph's 1 pieces of work a replay put 0"):
        graph.replay(stream)


def test_what_a_capture_may_not_do_is_refused():
    cards = EmulatedCards(1)
    card = cards.cards[0]
    stream, other, memory = card.stream(), card.stream(), card.allocate(64)
    event = stream.record()
    for forbidden in (
        stream.synchronize,
        event.synchronize,
        stream.record,
        lambda: stream.wait(event),
        lambda: card.allocate(1),
        lambda: cards.allocate_pinned(1),
        lambda: card.zero(memory.address, 64, other),
        lambda: card.capture(stream, lambda: None),
    ):
        with pytest.raises(EmulationError):
            card.capture(stream, forbidden)
    card.zero(memory.address, 64, stream)


def test_work_outside_live_memory_is_refused():
    cards = EmulatedCards(1)
    card = cards.cards[0]
    stream, memory, pinned = card.stream(), card.allocate(64), pinned_with(cards, 0)
    for address, size in ((memory.address + 1, 64), (memory.address - 1, 1), (8, 8)):
        with pytest.raises(EmulationError, match="not in any live allocation"):
            card.zero(address, size, stream)
        with pytest.raises(EmulationError, match="not in any live allocation"):
            card.copy_to_card(address, pinned, 0, size, stream)
    for first, size in ((0, 65), (64, 1), (-1, 4)):
        with pytest.raises(EmulationError, match="do not exist"):
            card.copy_to_card(memory.address, pinned, first, size, stream)
    memory.free()
    memory.free()
    with pytest.raises(EmulationError, match="not in any live allocation"):
        card.zero(memory.address, 64, stream)


def test_memory_that_is_freed_before_a_copy_of_it_happened_is_found():
    cards = EmulatedCards(1, deferred=True)
    card = cards.cards[0]
    stream, memory, pinned = card.stream(), card.allocate(64), pinned_with(cards, 1)
    card.copy_to_card(memory.address, pinned, 0, 64, stream)
    pinned.free()
    with pytest.raises(EmulationError, match="not in any live allocation"):
        stream.synchronize()


def test_a_launch_with_a_dangling_address_or_other_structures_is_refused():
    cards = EmulatedCards(1)
    card = cards.cards[0]
    stream, memory = card.stream(), card.allocate(64)
    memory.free()
    with pytest.raises(EmulationError, match="not in any live allocation"):
        card.launch(WRITE_KERNEL, (1, 1), [ArenaParams(row_stride=16), WriteParams(stored=memory.address)], stream)
    with pytest.raises(EmulationError, match="takes structures of"):
        card.launch(WRITE_KERNEL, (1, 1), [ArenaParams()], stream)
    with pytest.raises(EmulationError, match="can't be launched"):
        card.launch(WRITE_KERNEL, (0, 1), [ArenaParams(), WriteParams()], stream)


def test_the_memory_of_a_peer_without_access_is_refused():
    memories = {}
    for peer_access in (True, False):
        cards = EmulatedCards(2, peer_access=peer_access)
        memories[peer_access] = cards.cards[1].allocate(64)
        params = (ArenaParams(row_stride=16), WriteParams(stored=memories[peer_access].address))
        stream = cards.cards[0].stream()
        if peer_access:
            cards.cards[0].launch(WRITE_KERNEL, (1, 1), params, stream)
            continue
        with pytest.raises(EmulationError, match="card 0 has no access to the memory of device 1"):
            cards.cards[0].launch(WRITE_KERNEL, (1, 1), params, stream)


def test_logical_cards_of_one_device_share_its_memory():
    cards = EmulatedCards(4, total_bytes=1000, num_devices=2)
    assert [card.device_index for card in cards.cards] == [0, 1, 0, 1]
    held = cards.cards[0].allocate(600)
    assert [card.free_bytes() for card in cards.cards] == [400, 1000, 400, 1000]
    with pytest.raises(MemoryBudgetError, match="emulated device 0: 401 bytes wanted, 400 of 1000 free"):
        cards.cards[2].allocate(401)
    held.free()
    assert cards.cards[2].free_bytes() == 1000
    with pytest.raises(MemoryBudgetError, match="pinned memory: 2 bytes wanted, 1 of 1 free"):
        EmulatedCards(1, pinned_bytes=1).allocate_pinned(2)
