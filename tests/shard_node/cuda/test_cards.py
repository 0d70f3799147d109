"""What the engine relies on, of cards of every kind."""

from __future__ import annotations

import ctypes
import gc
import threading

import numpy as np
import pytest
import torch

from shard_node.errors import MemoryBudgetError
from shardrank_testing.card_bytes import KernelCopy, from_card, numbers, on_card, pinned_with

PIECE = 4096


def test_cards_are_numbered_and_say_what_they_have(cards):
    made = cards(3)
    assert [card.number for card in made.cards] == [0, 1, 2]
    assert made.peer_access
    assert made.name
    for card in made.cards:
        assert 0 < card.free_bytes() <= card.total_bytes
        assert card.device_index == (card.torch_device.index if card.torch_device.type == "cuda" else card.number)


def test_bytes_come_back_as_they_went_up(cards):
    made = cards(2)
    for card in made.cards:
        stream, array = card.stream(), numbers(PIECE, card.number)
        memory = on_card(card, made, array, stream)
        np.testing.assert_array_equal(from_card(card, made, memory.address, PIECE, np.float32, stream), array)
        # Parts, at both ends.
        pinned = pinned_with(made, np.arange(64, dtype=np.uint8))
        card.copy_to_card(memory.address + 100, pinned, 8, 16, stream)
        card.copy_to_host(pinned, 32, memory.address + 104, 8, stream)
        stream.synchronize()
        np.testing.assert_array_equal(pinned.array[32:40], np.arange(12, 20))
        np.testing.assert_array_equal(pinned.array[40:], np.arange(40, 64))


def test_memory_begins_at_a_multiple_of_256(cards):
    made = cards(1)
    some = [made.cards[0].allocate(size) for size in (1, 3, 17, 100_000)]
    assert all(memory.address and memory.address % 256 == 0 for memory in some)
    assert made.allocate_pinned(5).address % 16 == 0


def test_zeroed_bytes_are_zero_and_their_neighbours_are_not(cards):
    made = cards(1)
    card, stream = made.cards[0], made.cards[0].stream()
    memory = on_card(card, made, np.full(64, 7, np.uint8), stream)
    card.zero(memory.address + 5, 9, stream)
    expected = np.full(64, 7, np.uint8)
    expected[5:14] = 0
    np.testing.assert_array_equal(from_card(card, made, memory.address, 64, np.uint8, stream), expected)


def test_a_kernel_reads_and_writes_the_memory_of_every_other_card_and_of_the_host(cards):
    made = cards(3)
    size = 4 * PIECE
    for worker in made.cards:
        for owner in made.cards:
            stream, wanted = worker.stream(), numbers(PIECE, owner.number)
            there, host = owner.allocate(size), made.allocate_pinned(size)
            sent = pinned_with(made, wanted)
            up = KernelCopy.of(made, worker, sent.address, there.address, size)
            down = KernelCopy.of(made, worker, there.address, host.address, size)
            up.launch(worker, stream)
            down.launch(worker, stream)
            stream.synchronize()
            np.testing.assert_array_equal(host.array.view(np.float32), wanted)


def test_structures_of_a_launch_are_copied_at_once(cards):
    made = cards(1)
    card, stream = made.cards[0], made.cards[0].stream()
    source, out = on_card(card, made, numbers(4), stream), card.allocate(16)
    copy = KernelCopy.of(made, card, source.address, out.address, 16)
    copy.launch(card, stream)
    for params in copy.params:
        ctypes.memset(ctypes.byref(params), 0, ctypes.sizeof(params))
    np.testing.assert_array_equal(from_card(card, made, out.address, 4, np.float32, stream), numbers(4))


def test_a_stream_that_waits_for_an_event_sees_the_work_before_it(cards):
    made = cards(2)
    size = 1 << 20
    for writer, reader in ((0, 1), (1, 0), (0, 0)):
        first, second = made.cards[writer], made.cards[reader]
        before, after = first.stream(), second.stream()
        memory, down = first.allocate(size), made.allocate_pinned(size)
        up = pinned_with(made, np.full(size, 3, np.uint8))
        # A chain that goes to and fro: written, read by the other, overwritten only then.
        first.copy_to_card(memory.address, up, 0, size, before)
        after.wait(before.record())
        second.copy_to_host(down, 0, memory.address, size, after)
        before.wait(after.record())
        first.zero(memory.address, size, before)
        before.synchronize()
        after.synchronize()
        assert (down.array == 3).all()
        assert not from_card(first, made, memory.address, size, np.uint8, before).any()


def test_an_event_that_nobody_holds_any_more_still_holds_back_who_waits_for_it(cards):
    made = cards(1)
    card, size = made.cards[0], 1 << 20
    before, after, other = card.stream(), card.stream(), card.stream()
    memory, down = card.allocate(size), made.allocate_pinned(size)
    for turn in range(20):
        up = pinned_with(made, np.full(size, turn, np.uint8))
        card.copy_to_card(memory.address, up, 0, size, before)
        after.wait(before.record())
        for _ in range(3):  # Handles that are free by now are recorded elsewhere.
            other.record()
        card.copy_to_host(down, 0, memory.address, size, after)
        after.synchronize()
        assert (down.array == turn).all()


def test_an_event_is_done_when_it_was_waited_for(cards):
    made = cards(1)
    card = made.cards[0]
    for low_priority in (False, True):
        stream = card.stream(low_priority=low_priority)
        memory, pinned = card.allocate(PIECE), made.allocate_pinned(PIECE)
        card.copy_to_card(memory.address, pinned, 0, PIECE, stream)
        event = stream.record()
        event.synchronize()
        assert event.done


def test_a_thread_that_never_met_cuda_can_use_every_card(cards):
    made = cards(2)
    found = {}

    def use():
        for card in made.cards:
            stream, array = card.stream(), numbers(PIECE, card.number)
            memory = on_card(card, made, array, stream)
            found[card.number] = np.array_equal(from_card(card, made, memory.address, PIECE, np.float32, stream), array)
            with card.torch_stream(stream):
                found[card.number] &= torch.ones(3, device=card.torch_device).sum().item() == 3
            memory.free()

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert found == {0: True, 1: True}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.float16, torch.bfloat16])
def test_a_tensor_is_a_view_of_memory(cards, dtype):
    made = cards(2)
    for card in made.cards:
        stream = card.stream()
        memory = on_card(card, made, np.zeros(256, np.uint8), stream)
        with card.torch_stream(stream):
            view = card.tensor(memory, 16, (2, 3), dtype)
            assert (view.dtype, view.shape, view.device) == (dtype, (2, 3), card.torch_device)
            assert view.is_contiguous()
            assert view.data_ptr() == memory.address + 16
            view.copy_(torch.arange(1, 7, dtype=dtype).view(2, 3))
        found = from_card(card, made, memory.address, 256, np.uint8, stream)
        expected = np.zeros(256, np.uint8)
        expected[16 : 16 + 6 * dtype.itemsize] = torch.arange(1, 7, dtype=dtype).view(torch.uint8).numpy()
        np.testing.assert_array_equal(found, expected)


def test_a_tensor_of_nothing_has_its_shape(cards):
    made = cards(1)
    card = made.cards[0]
    view = card.tensor(card.allocate(16), 16, (0, 5), torch.float32)
    assert (view.shape, view.device) == ((0, 5), card.torch_device)


def test_a_view_outside_of_its_memory_is_refused(cards):
    made = cards(1)
    card = made.cards[0]
    memory = card.allocate(64)
    for first, count in ((0, 17), (64, 1), (-4, 1), (2, 4)):
        with pytest.raises(Exception, match="byte"):
            card.tensor(memory, first, (count,), torch.float32)


def test_a_copy_outside_of_pinned_memory_is_refused(cards):
    made = cards(1)
    card, stream = made.cards[0], made.cards[0].stream()
    memory, pinned = card.allocate(64), made.allocate_pinned(32)
    for first, size in ((0, 33), (32, 1), (-1, 4)):
        with pytest.raises(Exception, match="bytes"):
            card.copy_to_card(memory.address, pinned, first, size, stream)
        with pytest.raises(Exception, match="bytes"):
            card.copy_to_host(pinned, first, memory.address, size, stream)


def test_torch_and_copies_are_in_order_on_one_stream(cards):
    made = cards(1)
    card, stream = made.cards[0], made.cards[0].stream()
    count = 1 << 18
    memory, down = card.allocate(4 * count), made.allocate_pinned(4 * count)
    view = card.tensor(memory, 0, (count,), torch.float32)
    up = pinned_with(made, np.full(count, 2, np.float32))
    for _ in range(3):
        card.copy_to_card(memory.address, up, 0, 4 * count, stream)
        with card.torch_stream(stream):
            view.mul_(view).add_(1)
        card.copy_to_host(down, 0, memory.address, 4 * count, stream)
    stream.synchronize()
    assert (down.array.view(np.float32) == 5).all()


def test_more_than_a_device_has_is_refused_with_the_numbers(cards):
    made = cards(1)
    card = made.cards[0]
    with pytest.raises(MemoryBudgetError, match=str(card.total_bytes + 1)):
        card.allocate(card.total_bytes + 1)
    assert card.allocate(64).address


def test_what_torch_keeps_for_later_is_given_to_who_asks_for_it(cards):
    made = cards(1)
    card = made.cards[0]
    card.give_back_unused()
    size = int(0.6 * card.free_bytes())
    stream = card.stream()
    with card.torch_stream(stream):
        kept = torch.empty(size, dtype=torch.uint8, device=card.torch_device)
    del kept
    stream.synchronize()
    memory = card.allocate(size)
    assert memory.size_bytes == size
    memory.free()


def test_memory_that_is_given_back_is_free_again_and_may_be_given_back_twice(cards):
    made = cards(1)
    card, size = made.cards[0], 256 << 20
    free = card.free_bytes()
    memory = card.allocate(size)
    held = card.free_bytes()
    memory.free()
    memory.free()
    assert held <= free - size
    assert card.free_bytes() >= held + size
    pinned = made.allocate_pinned(64)
    pinned.free()
    pinned.free()


def test_memory_that_nobody_holds_is_given_back(cards):
    made = cards(1)
    card, size = made.cards[0], 256 << 20
    memory = card.allocate(size)
    held = card.free_bytes()
    del memory
    gc.collect()
    assert card.free_bytes() >= held + size


def test_nothing_can_be_allocated_and_copied(cards):
    made = cards(1)
    card, stream = made.cards[0], made.cards[0].stream()
    memory, pinned = card.allocate(0), made.allocate_pinned(0)
    assert pinned.array.shape == (0,)
    card.copy_to_card(memory.address, pinned, 0, 0, stream)
    card.zero(memory.address, 0, stream)
    stream.synchronize()
    memory.free()
    pinned.free()
