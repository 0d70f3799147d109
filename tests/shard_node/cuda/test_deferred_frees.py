"""Frees beside captures: deferred, done in order and once, by a thread that can, and none left behind."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import pytest

from shard_node.cuda.cards import DeferredFrees
from shard_node.errors import CardError

FAR_S = 30
"""How long a thread that does not end is waited for."""


def in_a_thread(work):
    """Runs it to its end; fails if there is none."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(FAR_S)
    assert not thread.is_alive()


def test_a_free_is_done_at_once_where_nothing_is_captured():
    frees, done = DeferredFrees(), []
    frees.free(lambda: done.append(1))
    assert done == [1]


def test_a_free_within_a_capture_of_the_same_thread_is_done_after_it():
    frees, done = DeferredFrees(), []
    with frees.alone():
        frees.free(lambda: done.append(1))
        frees.free(lambda: done.append(2))
        frees.settle()
        assert done == []
    assert done == [1, 2]


def test_a_free_that_a_reference_count_triggers_within_a_capture_is_done_after_it():
    class Thing:
        pass

    frees, done, things = DeferredFrees(), [], [Thing(), Thing()]
    for number, thing in enumerate(things):
        weakref.finalize(thing, frees.free, lambda number=number: done.append(number))
    in_a_cycle = things.pop()
    in_a_cycle.itself = in_a_cycle
    del in_a_cycle, thing
    with frees.alone():
        things.clear()
        gc.collect()
        assert done == []
    assert done == [0, 1]


def test_a_free_of_another_thread_waits_for_no_capture_and_is_done_by_the_capturing_thread():
    frees, done = DeferredFrees(), []
    with frees.alone():
        in_a_thread(lambda: frees.free(lambda: done.append(threading.get_ident())))
        assert done == []
    assert done == [threading.get_ident()]


def test_frees_are_done_in_the_order_in_which_they_came_before_a_new_capture_begins():
    frees, done = DeferredFrees(), []

    def first():
        done.append("first")
        # Comes while frees are being done: behind those that wait.
        frees.free(lambda: done.append("third"))
        assert done == ["first"]

    with frees.alone():
        frees.free(first)
        frees.free(lambda: done.append("second"))
    assert done == ["first", "second", "third"]
    with frees.alone():
        assert done == ["first", "second", "third"]


def test_what_was_left_in_the_queue_is_done_before_a_capture_begins():
    frees, done = DeferredFrees(), []

    def interrupted():
        raise KeyboardInterrupt

    def capture():
        with frees.alone():
            frees.free(interrupted)
            frees.free(lambda: done.append(1))

    with pytest.raises(KeyboardInterrupt):
        capture()
    assert done == []
    with frees.alone():
        assert done == [1]


def test_a_capture_that_fails_is_followed_by_its_frees():
    frees, done = DeferredFrees(), []

    def capture():
        with frees.alone():
            frees.free(lambda: done.append(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        capture()
    assert done == [1]
    with frees.alone():
        pass


def test_a_free_that_fails_is_logged_and_those_behind_it_are_done(caplog):
    frees, done = DeferredFrees(), []

    def fails():
        raise CardError("device 0: freeing 64 bytes: cudaErrorIllegalAddress")

    with caplog.at_level(logging.ERROR), frees.alone():
        frees.free(fails)
        frees.free(lambda: done.append(1))
    assert done == [1]
    assert "cudaErrorIllegalAddress" in caplog.text


def test_a_capture_within_a_capture_of_the_same_thread_is_refused_and_the_first_goes_on():
    frees, done = DeferredFrees(), []
    with frees.alone():
        with pytest.raises(CardError, match="while a graph is captured"), frees.alone():
            pass
        frees.free(lambda: done.append(1))
        assert done == []
    assert done == [1]


def test_captures_and_frees_of_many_threads_exclude_each_other_and_nothing_is_left_behind():
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
