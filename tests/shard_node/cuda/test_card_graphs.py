"""Graphs on cards of every kind: what they repeat, on which stream, and what may go on meanwhile."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
import torch

from shard_node.cuda.deferred_frees import DeferredFrees
from shard_node.errors import CardError
from shardrank_testing.card_bytes import KernelCopy, numbers
from shardrank_testing.emulated_memory import EmulationError

FAR_S = 30
"""How long a thread that does not end is waited for."""


class Doubling:
    """Work that a graph can hold: a copy up, a launch, torch, a copy down; and its buffers."""

    def __init__(self, made, card, stream, count=1000):
        self.card, self.stream, self.count = card, stream, count
        self.up, self.down = made.allocate_pinned(4 * count), made.allocate_pinned(4 * count)
        self.first, self.second = card.allocate(4 * count), card.allocate(4 * count)
        self.copy = KernelCopy.of(made, card, self.first.address, self.second.address, 4 * count)
        self.view = card.tensor(self.second, 0, (count,), torch.float32)

    def __call__(self):
        self.card.copy_to_card(self.first.address, self.up, 0, self.first.size_bytes, self.stream)
        self.copy.launch(self.card, self.stream)
        with self.card.torch_stream(self.stream):
            self.view.copy_(self.view * 2)
        self.card.copy_to_host(self.down, 0, self.second.address, self.second.size_bytes, self.stream)

    def check(self, work, seed):
        """Put work on the stream that doubles new numbers."""
        self.up.array.view(np.float32)[:] = numbers(self.count, seed)
        work()
        self.stream.synchronize()
        np.testing.assert_array_equal(self.down.array.view(np.float32), numbers(self.count, seed) * 2)


def test_graphs_of_a_stream_are_independent(cards):
    made = cards(1)
    card, stream = made.cards[0], made.cards[0].stream()
    # A graph knows addresses: the memory there must be kept, which the doubling does.
    doublings = {count: Doubling(made, card, stream, count) for count in (300, 1000, 20)}
    graphs = {}
    for count, doubling in doublings.items():
        doubling.check(doubling, 9)
        graphs[count] = card.capture(stream, doubling)
    with pytest.raises(Exception, match="must be replayed on the stream that it was captured on"):
        graphs[20].replay(card.stream())
    for seed, count in enumerate((20, 1000, 300, 1000, 20)):
        doublings[count].check(lambda count=count: graphs[count].replay(stream), seed)
        if seed == 3:
            del graphs[1000]


def test_matrix_products_survive_the_end_of_another_graph(cards):
    """Their workspaces, which torch gives back then, must not be anybody else's."""
    made = cards(1)
    card, stream = made.cards[0], made.cards[0].stream()
    # Few sums of many products, which cuBLAS splits, and adds up in a workspace.
    short, long = 64, 8192
    memory = card.allocate(2 * (2 * short * long + short * short))
    left = card.tensor(memory, 0, (short, long), torch.bfloat16)
    right = card.tensor(memory, 2 * short * long, (long, short), torch.bfloat16)
    out = card.tensor(memory, 4 * short * long, (short, short), torch.bfloat16)

    def work():
        with card.torch_stream(stream):
            torch.mm(left, right, out=out)

    with card.torch_stream(stream):
        left.fill_(1)
        right.fill_(2)
    work()
    stream.synchronize()
    ending, graph = card.capture(stream, work), card.capture(stream, work)
    del ending
    with card.torch_stream(stream):
        # Takes what was given back, and is looked at afterwards.
        taken = [torch.full((4 << 20,), 7.0, device=card.torch_device) for _ in range(4)]
        out.zero_()
    card.give_back_unused()
    graph.replay(stream)
    stream.synchronize()
    with card.torch_stream(stream):
        assert bool((out == 2 * long).all())
        assert all(bool((one == 7).all()) for one in taken)


def test_other_threads_work_during_a_capture(cards):
    made = cards(1)
    card = made.cards[0]
    stream = card.stream()
    doubling, elsewhere = Doubling(made, card, stream), Doubling(made, card, card.stream())
    doubling.check(doubling, 3)
    elsewhere.up.array.view(np.float32)[:] = numbers(1000, 1)
    inside, outside = threading.Event(), threading.Event()

    def work_elsewhere():
        inside.wait()
        elsewhere()
        elsewhere.stream.record().synchronize()
        outside.set()

    def work_meanwhile():
        doubling()
        inside.set()
        assert outside.wait(FAR_S)

    thread = threading.Thread(target=work_elsewhere)
    thread.start()
    graph = card.capture(stream, work_meanwhile)
    thread.join()
    np.testing.assert_array_equal(elsewhere.down.array.view(np.float32), numbers(1000, 1) * 2)
    doubling.check(lambda: graph.replay(stream), 2)


@pytest.mark.parametrize("in_another_thread", [False, True])
def test_what_ends_during_a_capture_is_freed_after_it(cards, in_another_thread):
    """By a call or as nobody holds it any more, in the capturing thread or in one that this waits for."""
    made = cards(1)
    card, stream, size = made.cards[0], made.cards[0].stream(), 256 << 20
    doubling = Doubling(made, card, stream)
    doubling.check(doubling, 3)
    ending = [card.allocate(size), card.capture(stream, doubling), made.allocate_pinned(1 << 20), card.allocate(size)]
    called = ending[-1]
    held = card.free_bytes()

    def ends():
        called.free()
        ending.clear()

    def work_meanwhile():
        doubling()
        if in_another_thread:
            thread = threading.Thread(target=ends)
            thread.start()
            thread.join()
        else:
            ends()
        doubling()

    graph = card.capture(stream, work_meanwhile)
    assert card.free_bytes() >= held + 2 * size
    doubling.check(lambda: graph.replay(stream), 4)


@pytest.mark.parametrize("cause", ["work", "CUDA", "free"])
def test_a_capture_that_fails_leaves_the_stream_usable(cards, cause):
    made = cards(1)
    card, stream = made.cards[0], made.cards[0].stream()
    doubling = Doubling(made, card, stream)
    doubling.check(doubling, 1)

    def fail():
        doubling()
        if cause == "CUDA":
            stream.synchronize()
        if cause == "free":
            card.give_back_unused()
        raise KeyError("not a CUDA error")

    expected = {"work": KeyError, "CUDA": (CardError, EmulationError), "free": Exception}[cause]
    with pytest.raises(expected, match="can't be done while a graph is captured" if cause == "free" else None):
        card.capture(stream, fail)
    card.give_back_unused()
    doubling.check(doubling, 3)
    graph = card.capture(stream, doubling)
    doubling.check(lambda: graph.replay(stream), 4)


def test_frees_within_a_capture_are_done_after_it_in_order(caplog):
    frees, done = DeferredFrees(), []

    def fail():
        raise CardError("device 0: freeing 64 bytes: cudaErrorIllegalAddress")

    def first():
        done.append(1)
        # Comes while frees are being done: after those that wait.
        frees.free(lambda: done.append(3))
        assert done == [0, 1]

    frees.free(lambda: done.append(0))
    assert done == [0]
    with caplog.at_level(logging.ERROR), frees.alone():
        frees.free(fail)
        frees.free(first)
        frees.free(lambda: done.append(2))
        frees.flush()
        assert done == [0]
    assert done == [0, 1, 2, 3]
    assert "cudaErrorIllegalAddress" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_failed_capture_leaves_no_free_undone(error):
    """A free that is interrupted leaves those after it to the next capture."""
    frees, done = DeferredFrees(), []

    def fail():
        raise error

    def capture():
        with frees.alone():
            if error is KeyboardInterrupt:
                frees.free(fail)
            frees.free(lambda: done.append(1))
            if error is ZeroDivisionError:
                fail()

    with pytest.raises(error):
        capture()
    with frees.alone():
        assert done == [1]
        with pytest.raises(CardError, match="while a graph is captured"), frees.alone():
            pass


def test_captures_and_frees_of_many_threads_exclude_each_other():
    frees, num_threads, turns = DeferredFrees(), 6, 300
    captures, beside, done = [], [], [[] for _ in range(num_threads)]

    def use(thread):
        for turn in range(turns):
            if turn % 7 == thread:
                with frees.alone():
                    captures.append(thread)
                    beside.append(len(captures) > 1)
                    frees.free(lambda turn=turn: freed(thread, turn))
                    captures.pop()
            else:
                frees.free(lambda turn=turn: freed(thread, turn))

    def freed(thread, turn):
        beside.append(bool(captures))
        done[thread].append(turn)

    threads = [threading.Thread(target=use, args=(number,), daemon=True) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FAR_S)
    assert not any(thread.is_alive() for thread in threads)
    assert done == [list(range(turns))] * num_threads
    assert not any(beside)
