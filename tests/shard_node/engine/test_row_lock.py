"""Readers together, a writer alone, and nobody waits for ever."""

from __future__ import annotations

import threading

import pytest

from shard_node.generation import RowLock

TIMEOUT_S = 30.0


def in_thread(work) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_reader_is_let_in_while_a_writer_is_patient():
    lock = RowLock(patience_s=TIMEOUT_S)
    lock.begin_read()
    thread = in_thread(lambda: (lock.begin_write(), lock.end_write()))
    while not lock._writer_waits:
        pass
    lock.begin_read()  # would wait for ever otherwise: only this thread ends what it began
    lock.end_read()
    lock.end_read()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_a_writer_without_patience_keeps_new_readers_out():
    lock = RowLock(patience_s=0.0)
    order = []
    lock.begin_read()
    writer = in_thread(lambda: (lock.begin_write(), order.append("write"), lock.end_write()))
    while not lock._closed:
        pass
    reader = in_thread(lambda: (lock.begin_read(), order.append("read"), lock.end_read()))
    while not lock._waiting_readers:
        pass
    assert order == []
    lock.end_read()
    writer.join(TIMEOUT_S)
    reader.join(TIMEOUT_S)
    assert order == ["write", "read"]


def test_readers_and_writers_never_meet():
    lock = RowLock(patience_s=1e-5)
    inside = {"readers": 0, "writers": 0}
    count = threading.Lock()
    wrong = []

    def enter(kind: str) -> None:
        with count:
            inside[kind] += 1
            if inside["writers"] > 1 or (inside["writers"] and inside["readers"]):
                wrong.append(dict(inside))

    def leave(kind: str) -> None:
        with count:
            inside[kind] -= 1

    def work(number: int) -> None:
        writes = number < 2
        begin, end = (lock.begin_write, lock.end_write) if writes else (lock.begin_read, lock.end_read)
        kind = "writers" if writes else "readers"
        for _ in range(300):
            begin()
            enter(kind)
            leave(kind)
            end()

    threads = [in_thread(lambda number=number: work(number)) for number in range(6)]
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert (lock._readers, lock._waiting_readers, lock._closed) == (0, 0, False)


def test_an_interrupted_reader_is_forgotten(monkeypatch):
    lock = RowLock()
    lock.begin_write()

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(lock._may_read, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lock.begin_read()
    lock.end_write()
    lock.begin_write()
    lock.end_write()
