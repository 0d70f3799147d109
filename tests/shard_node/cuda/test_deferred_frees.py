"""Frees beside captures: deferred, done in order and once, by a thread that can, and none left behind."""

from __future__ import annotations

import logging
import threading

import pytest

from shard_node.cuda.cards import DeferredFrees
from shard_node.errors import CardError

FAR_S = 30
"""How long a thread that does not end is waited for."""


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
        frees.settle()
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


def test_a_capture_within_a_capture_is_refused():
    frees, done = DeferredFrees(), []
    with frees.alone():
        with pytest.raises(CardError, match="while a graph is captured"), frees.alone():
            pass
        frees.free(lambda: done.append(1))
        assert done == []
    assert done == [1]


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
