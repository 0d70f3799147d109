"""What the engine relies on, of cards of every kind; and that what is called of CuPy is there."""

from __future__ import annotations

import ast
import ctypes
import gc
import importlib
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import shard_node.cuda
from shard_node.errors import MemoryBudgetError
from shardrank_testing.card_bytes import KernelCopy, fetch, numbers, pinned_with, send

PIECE = 4096


def test_bytes_come_back_as_they_went_up(cards):
    made = cards(2)
    for number, card in enumerate(made.cards):
        assert card.number == number
        stream, array = card.stream(low_priority=bool(number)), numbers(PIECE, number)
        memory = send(made, card, array, stream)
        assert memory.address % 256 == 0
        np.testing.assert_array_equal(fetch(made, card, memory, stream).view(np.float32), array)
        # Parts, at both ends; zeros between.
        pinned = pinned_with(made, np.arange(64, dtype=np.uint8))
        card.copy_to_card(memory.address + 100, pinned, 8, 16, stream)
        card.zero(memory.address + 109, 2, stream)
        card.copy_to_host(pinned, 32, memory.address + 104, 8, stream)
        stream.record().synchronize()
        assert pinned.array[32:40].tolist() == [12, 13, 14, 15, 16, 0, 0, 19]
        assert pinned.array[40:].tolist() == list(range(40, 64))
    nothing, pinned = card.allocate(0), made.allocate_pinned(0)
    card.copy_to_card(nothing.address, pinned, 0, 0, stream)
    assert pinned.array.shape == (0,)


def test_kernels_read_and_write_all_cards_and_the_host(cards):
    made = cards(3)
    assert made.peer_access
    size = 4 * PIECE
    for worker in made.cards:
        for owner in made.cards:
            stream, expected = worker.stream(), numbers(PIECE, owner.number)
            there, host = owner.allocate(size), made.allocate_pinned(size)
            sent = pinned_with(made, expected)
            up = KernelCopy.of(made, worker, sent.address, there.address, size)
            down = KernelCopy.of(made, worker, there.address, host.address, size)
            for copy in (up, down):
                copy.launch(worker, stream)
                # A launch copies its structures at once.
                for params in copy.params:
                    ctypes.memset(ctypes.byref(params), 0, ctypes.sizeof(params))
            stream.synchronize()
            np.testing.assert_array_equal(host.array.view(np.float32), expected)


def test_a_stream_that_waits_sees_the_work_before_the_event(cards):
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
        assert not fetch(made, first, memory, before).view(np.uint8).any()


def test_a_dropped_event_still_holds_back_its_waiters(cards):
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


def test_a_new_thread_can_use_every_card(cards):
    made = cards(2)
    equal = {}

    def use():
        for card in made.cards:
            stream, array = card.stream(), numbers(PIECE, card.number)
            memory = send(made, card, array, stream)
            equal[card.number] = np.array_equal(fetch(made, card, memory, stream).view(np.float32), array)
            with card.torch_stream(stream):
                equal[card.number] &= torch.ones(3, device=card.torch_device).sum().item() == 3
            memory.free()

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert equal == {0: True, 1: True}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bfloat16])
def test_a_tensor_is_a_view_of_memory(cards, dtype):
    made = cards(2)
    for card in made.cards:
        stream = card.stream()
        memory = send(made, card, np.zeros(256, np.uint8), stream)
        with card.torch_stream(stream):
            view = card.tensor(memory, 16, (2, 3), dtype)
            assert (view.dtype, view.shape, view.device) == (dtype, (2, 3), card.torch_device)
            assert view.data_ptr() == memory.address + 16
            view.copy_(torch.arange(1, 7, dtype=dtype).view(2, 3))
        expected = np.zeros(256, np.uint8)
        expected[16 : 16 + 6 * dtype.itemsize] = torch.arange(1, 7, dtype=dtype).view(torch.uint8).numpy()
        np.testing.assert_array_equal(fetch(made, card, memory, stream).view(np.uint8), expected)
    assert card.tensor(memory, 256, (0, 5), dtype).shape == (0, 5)


def test_memory_that_torch_caches_can_be_allocated(cards):
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


@pytest.mark.parametrize("by_call", [True, False])
def test_freed_memory_can_be_allocated_again(cards, by_call):
    """By a call, which may be repeated, or as nobody holds it any more."""
    made = cards(1)
    card, size = made.cards[0], 256 << 20
    before = card.free_bytes()
    with pytest.raises(MemoryBudgetError, match=str(card.total_bytes + 1)):
        card.allocate(card.total_bytes + 1)
    memory, pinned = card.allocate(size), made.allocate_pinned(64)
    in_use = card.free_bytes()
    assert in_use <= before - size
    for _ in range(2 * by_call):
        memory.free()
        pinned.free()
    del memory
    gc.collect()
    assert card.free_bytes() >= in_use + size


SOURCES = sorted(Path(shard_node.cuda.__file__).parent.glob("cupy_*.py"))
ROOTS = {name: f"cupy.cuda.{name}" for name in ("compiler", "driver", "nvrtc", "runtime")} | {"cupy": "cupy"}
"""What the names that the modules import stand for."""


def dotted(node: ast.AST) -> str:
    """`runtime.memGetInfo` of an attribute of a name, or nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (front := dotted(node.value)):
        return f"{front}.{node.attr}"
    return ""


def names_of(roots: set[str]) -> list[str]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES]
    names = {dotted(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return sorted(name for name in names if name.split(".")[0] in roots)


def resolve(name: str) -> object:
    root, *rest = name.split(".")
    package, *path = ROOTS.get(root, root).split(".")
    found = importlib.import_module(package)
    for part in (*path, *rest):
        found = getattr(found, part)
    return found


def test_every_name_of_cupy_is_there():
    pytest.importorskip("cupy", reason="CuPy is not installed; it needs no device for this")
    names = names_of(set(ROOTS))
    assert "driver.launchKernel" in names
    for name in names:
        resolve(name)
