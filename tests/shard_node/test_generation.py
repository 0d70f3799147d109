"""A version stays until it is retired; leases keep it alive; rows are read together and written alone."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from functools import partial

import pytest

from loader.errors import RolloutError
from loader.progress import BACKGROUND_NICENESS
from shard_node.errors import GenerationNotFoundError
from shard_node.generation import Generations, RowLock

TIMEOUT_S = 30.0


def make(*versions: int) -> tuple[Generations[str], list[str]]:
    freed: list[str] = []
    generations: Generations[str] = Generations(freed.append)
    for version in versions:
        generations.stage("films", version, f"v{version}")
    return generations, freed


def test_a_lease_keeps_its_version_over_a_flip():
    generations, freed = make(1, 2)
    generations.flip("films", 1)
    lease = generations.lease("films")
    generations.flip("films", 2)
    assert lease.payload == "v1"
    assert generations.lease("films").payload == "v2"
    # A router that has not flipped yet asks for version 1, and a rollback needs it.
    assert generations.lease("films", 1).payload == "v1"
    generations.flip("films", 1)
    assert generations.lease("films").payload == "v1"
    assert [(one.version, one.state) for one in generations.all()] == [(1, "live"), (2, "staged")]
    assert freed == []
    lease.release()
    with pytest.raises(RolloutError, match="released twice"):
        lease.release()
    with pytest.raises(GenerationNotFoundError, match=r"here: films 1 \(live\), films 2 \(staged\)"):
        generations.flip("films", 7)


def test_a_retired_version_is_freed_with_its_last_lease():
    """It is reported until then."""
    generations, freed = make(1, 2)
    assert generations.live_versions() == {}
    generations.flip("films", 1)
    generations.flip("films", 1)
    assert generations.live_versions() == {"films": 1}
    first, second = generations.lease("films"), generations.lease("films", 1)
    retiring = generations.retire("films", 1)
    assert generations.live_versions() == {}
    with pytest.raises(GenerationNotFoundError, match="model 'films' is not here"):
        generations.lease("films")
    generations.flip("films", 2)
    for refused in (lambda: generations.lease("films", 1), lambda: generations.flip("films", 1)):
        with pytest.raises(GenerationNotFoundError, match=r"version 1 of model 'films' is not here; here: films 1"):
            refused()
    with pytest.raises(RolloutError, match=r"already here \(draining\)"):
        generations.stage("films", 1, "again")
    first.release()
    assert not retiring.retired.is_set()
    assert generations.has("films", 1)
    second.release()
    assert retiring.retired.wait(TIMEOUT_S)
    assert freed == ["v1"]
    assert (generations.has("films", 1), generations.has("films", 2)) == (False, True)
    generations.stage("films", 1, "again")
    for version in (1, 2):
        assert generations.retire("films", version).retired.wait(TIMEOUT_S)
    assert generations.live() == generations.all() == []


@pytest.mark.parametrize("state", ["live", "staged"])
def test_replaced_payloads_serve_new_leases_and_old_ones_end(state):
    generations, freed = make(1)
    if state == "live":
        generations.flip("films", 1)
    lease = generations.lease("films", 1)
    before = generations.replace("films", 1, "mended")
    assert generations.lease("films", 1 if state == "staged" else None).payload == "mended"
    assert (lease.payload, freed) == ("v1", [])
    assert [(each.version, each.state) for each in generations.all()] == [(1, state)]
    lease.release()
    assert before.retired.wait(TIMEOUT_S)
    assert freed == ["v1"]
    assert generations.payload("films", 1) == "mended"
    with pytest.raises(GenerationNotFoundError):
        generations.replace("films", 2, "nothing")


def test_a_payload_that_can_not_be_freed_is_logged(caplog):
    def fail(payload: str) -> None:
        raise OSError(f"{payload} is stuck")

    generations: Generations[str] = Generations(fail)
    generations.stage("films", 1, "v1")
    with caplog.at_level(logging.ERROR):
        assert generations.retire("films", 1).retired.wait(TIMEOUT_S)
    assert "freeing version 1 of model 'films' failed" in caplog.text


def in_thread(work) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)


def test_concurrent_leases_and_flips_free_each_payload_once():
    leased: Counter[str] = Counter()
    lock, stop = threading.Lock(), threading.Event()
    freed: list[str] = []
    faults: list[str] = []

    def free(payload: str) -> None:
        with lock:
            if leased[payload]:
                faults.append(f"{payload} was freed while leased")
            freed.append(payload)

    generations: Generations[str] = Generations(free)
    generations.stage("films", 1, "v1")
    generations.flip("films", 1)

    def use() -> None:
        while not stop.is_set():
            with generations.lease("films") as lease:
                with lock:
                    if lease.payload in freed:
                        faults.append(f"{lease.payload} was leased after it was freed")
                    leased[lease.payload] += 1
                with lock:
                    leased[lease.payload] -= 1

    threads = [in_thread(use) for _ in range(4)]
    retiring = []
    for version in range(2, 200):
        generations.stage("films", version, f"v{version}")
        generations.flip("films", version)
        retiring.append(generations.retire("films", version - 1))
    stop.set()
    join(threads)
    assert all(one.retired.wait(TIMEOUT_S) for one in retiring)
    assert faults == []
    assert sorted(freed) == sorted(f"v{version}" for version in range(1, 199))


def test_a_reader_is_let_in_while_a_writer_is_patient():
    lock = RowLock(patience_s=TIMEOUT_S)
    lock.begin_read()
    thread = in_thread(lambda: (lock.begin_write(), lock.end_write()))
    while not lock._writer_waits:
        pass
    lock.begin_read()  # would wait for ever otherwise: only this thread ends what it began
    lock.end_read()
    lock.end_read()
    join([thread])


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
    join([writer, reader])
    assert order == ["write", "read"]


def test_readers_and_writers_never_meet():
    lock = RowLock(patience_s=1e-5)
    inside: Counter[str] = Counter()
    count = threading.Lock()
    wrong = []

    def work(kind: str) -> None:
        begin, end = (lock.begin_write, lock.end_write) if kind == "writer" else (lock.begin_read, lock.end_read)
        for _ in range(300):
            begin()
            with count:
                inside[kind] += 1
                if inside["writer"] > 1 or (inside["writer"] and inside["reader"]):
                    wrong.append(dict(inside))
            with count:
                inside[kind] -= 1
            end()

    join([in_thread(partial(work, kind)) for kind in ["writer"] * 2 + ["reader"] * 4])
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


def test_freeing_has_a_lower_priority():
    """Unless it is work in Python."""
    normal, priorities = os.getpriority(os.PRIO_PROCESS, 0), []
    for low_priority in (True, False):
        generations: Generations[str] = Generations(
            lambda _: priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())),
            low_priority=low_priority,
        )
        generations.stage("films", 1, "v1")
        assert generations.retire("films", 1).retired.wait(TIMEOUT_S)
    assert priorities == [min(19, BACKGROUND_NICENESS), normal] or normal >= BACKGROUND_NICENESS
