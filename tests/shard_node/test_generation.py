"""A version stays until it is retired; leases keep it alive; it is freed once, and no request waits for that."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from loader.progress import BACKGROUND_NICENESS
from shard_node.errors import GenerationNotFoundError, GenerationStateError
from shard_node.generation import Generations

WAIT_S = 30.0


def make(*versions: int) -> tuple[Generations[str], list[str]]:
    freed: list[str] = []
    generations: Generations[str] = Generations(freed.append)
    for version in versions:
        generations.stage("films", version, f"v{version}")
    return generations, freed


def test_a_request_keeps_its_version_over_a_flip_and_others_can_still_ask_for_it():
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


def test_a_retired_version_gives_no_new_lease_and_is_freed_when_the_last_one_ends():
    generations, freed = make(1, 2)
    generations.flip("films", 1)
    first, second = generations.lease("films"), generations.lease("films", 1)
    generations.flip("films", 2)
    retiring = generations.retire("films", 1)
    for refused in (lambda: generations.lease("films", 1), lambda: generations.flip("films", 1)):
        with pytest.raises(GenerationNotFoundError, match=r"version 1 of model 'films' is not here; here: films 1"):
            refused()
    with pytest.raises(GenerationStateError, match=r"already here \(draining\)"):
        generations.stage("films", 1, "again")
    first.release()
    assert not retiring.retired.is_set()
    second.release()
    assert retiring.retired.wait(WAIT_S)
    assert freed == ["v1"]
    generations.stage("films", 1, "again")


def test_what_is_live_and_what_is_here_is_told_until_it_is_freed():
    generations, _ = make(1, 2)
    assert generations.live_versions() == {}
    generations.flip("films", 2)
    generations.flip("films", 2)
    assert generations.live_versions() == {"films": 2}
    assert [one.state for one in generations.all()] == ["staged", "live"]
    lease = generations.lease("films")
    retiring = generations.retire("films", 2)
    assert generations.live_versions() == {}
    assert generations.has("films", 2)
    lease.release()
    assert retiring.retired.wait(WAIT_S)
    assert not generations.has("films", 2)
    assert generations.has("films", 1)
    assert not generations.has("books", 1)


def test_freeing_has_a_lower_priority_unless_it_is_work_in_python():
    normal, found = os.getpriority(os.PRIO_PROCESS, 0), []
    for low_priority in (True, False):
        generations: Generations[str] = Generations(
            lambda _: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())),
            low_priority=low_priority,
        )
        generations.stage("films", 1, "v1")
        assert generations.retire("films", 1).retired.wait(WAIT_S)
    assert found == [min(19, BACKGROUND_NICENESS), normal] or normal >= BACKGROUND_NICENESS


def test_a_version_that_nobody_uses_is_freed_at_once():
    generations, freed = make(1)
    assert generations.retire("films", 1).retired.wait(WAIT_S)
    assert freed == ["v1"]
    assert generations.all() == []


def test_retiring_the_live_version_leaves_none_live():
    generations, _ = make(1)
    generations.flip("films", 1)
    generations.retire("films", 1)
    with pytest.raises(GenerationNotFoundError, match="model 'films' is not here"):
        generations.lease("films")
    assert generations.models() == []


def test_freeing_does_not_hold_up_whoever_gave_the_last_lease_back():
    proceed = threading.Event()
    generations: Generations[str] = Generations(lambda payload: proceed.wait(WAIT_S) and None)
    generations.stage("films", 1, "v1")
    lease = generations.lease("films", 1)
    retiring = generations.retire("films", 1)
    lease.release()
    assert not retiring.retired.is_set()
    proceed.set()
    assert retiring.retired.wait(WAIT_S)


def test_a_payload_that_can_not_be_freed_is_logged_and_waited_for_no_longer(caplog):
    def fail(payload: str) -> None:
        raise OSError(f"{payload} is stuck")

    generations: Generations[str] = Generations(fail)
    generations.stage("films", 1, "v1")
    with caplog.at_level(logging.ERROR):
        assert generations.retire("films", 1).retired.wait(WAIT_S)
    assert "freeing version 1 of model 'films' failed" in caplog.text


def test_retire_all_returns_what_is_still_used():
    generations, freed = make(1, 2)
    generations.flip("films", 1)
    lease = generations.lease("films")
    left = {one.version: one for one in generations.retire_all()}
    assert left[2].retired.wait(WAIT_S)
    assert not left[1].retired.is_set()
    lease.release()
    assert left[1].retired.wait(WAIT_S)
    assert sorted(freed) == ["v1", "v2"]


def test_a_version_can_not_be_staged_twice_and_a_lease_not_released_twice():
    generations, _ = make(1)
    with pytest.raises(GenerationStateError, match=r"version 1 of model 'films' is already here \(staged\)"):
        generations.stage("films", 1, "again")
    lease = generations.lease("films", 1)
    lease.release()
    with pytest.raises(GenerationStateError, match="released twice"):
        lease.release()


def test_an_unknown_version_can_not_be_flipped_to():
    generations, _ = make()
    with pytest.raises(GenerationNotFoundError, match="here: nothing"):
        generations.flip("films", 7)


def test_under_concurrent_leases_and_flips_every_payload_is_freed_once_and_never_while_leased():
    leased: dict[str, int] = {}
    lock = threading.Lock()
    freed: list[str] = []
    faults: list[str] = []

    def free(payload: str) -> None:
        with lock:
            if leased.get(payload, 0):
                faults.append(f"{payload} was freed while leased")
            freed.append(payload)

    generations: Generations[str] = Generations(free)
    generations.stage("films", 1, "v1")
    generations.flip("films", 1)
    stop = threading.Event()

    def use() -> None:
        while not stop.is_set():
            with generations.lease("films") as lease:
                with lock:
                    if lease.payload in freed:
                        faults.append(f"{lease.payload} was leased after it was freed")
                    leased[lease.payload] = leased.get(lease.payload, 0) + 1
                with lock:
                    leased[lease.payload] -= 1

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    retiring = []
    for version in range(2, 200):
        generations.stage("films", version, f"v{version}")
        generations.flip("films", version)
        retiring.append(generations.retire("films", version - 1))
    stop.set()
    for thread in threads:
        thread.join()
    assert all(one.retired.wait(WAIT_S) for one in retiring)
    assert faults == []
    assert sorted(freed) == sorted(f"v{version}" for version in range(1, 199))
