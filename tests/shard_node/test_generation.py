"""Leases keep a version alive; the last one of a draining version frees it, exactly once."""

from __future__ import annotations

import threading

import pytest

from shard_node.errors import GenerationNotFoundError, GenerationStateError
from shard_node.generation import Generations


def make() -> tuple[Generations[str], list[str]]:
    retired: list[str] = []
    return Generations(retired.append), retired


def test_a_lease_keeps_its_version_after_a_flip_and_the_last_release_retires_it():
    generations, retired = make()
    generations.stage("films", 1, "one")
    generations.flip("films", 1)
    lease = generations.lease("films")
    generations.stage("films", 2, "two")
    generations.flip("films", 2)
    assert lease.payload == "one"
    assert generations.lease("films").payload == "two"
    assert generations.lease("films", 1).payload == "one"
    assert retired == []


def test_a_version_is_freed_when_its_last_lease_ends_and_is_gone_then():
    generations, retired = make()
    generations.stage("films", 1, "one")
    generations.flip("films", 1)
    first, second = generations.lease("films"), generations.lease("films")
    generations.stage("films", 2, "two")
    generations.flip("films", 2)
    first.release()
    assert retired == []
    second.release()
    assert retired == ["one"]
    with pytest.raises(
        GenerationNotFoundError, match=r"version 1 of model 'films' is not here; here: films 2 \(live\)"
    ):
        generations.lease("films", 1)


def test_flipping_back_to_a_draining_version_keeps_it():
    generations, retired = make()
    for version, payload in ((1, "one"), (2, "two")):
        generations.stage("films", version, payload)
    generations.flip("films", 1)
    with generations.lease("films"):
        generations.flip("films", 2)
        generations.flip("films", 1)
    assert generations.lease("films").version == 1
    assert retired == ["two"]


def test_removing_the_live_version_gives_no_new_lease():
    generations, retired = make()
    generations.stage("films", 1, "one")
    generations.flip("films", 1)
    lease = generations.lease("films")
    removed = generations.remove("films", 1)
    with pytest.raises(GenerationNotFoundError, match="model 'films' is not here"):
        generations.lease("films")
    assert not removed.drained.is_set()
    lease.release()
    assert removed.drained.is_set()
    assert retired == ["one"]


def test_a_version_can_not_be_staged_twice_and_a_lease_not_released_twice():
    generations, _ = make()
    generations.stage("films", 1, "one")
    with pytest.raises(GenerationStateError, match="already here"):
        generations.stage("films", 1, "again")
    lease = generations.lease("films", 1)
    lease.release()
    with pytest.raises(GenerationStateError, match="released twice"):
        lease.release()


def test_an_unknown_version_can_not_be_flipped_to():
    generations, _ = make()
    with pytest.raises(GenerationNotFoundError, match="here: nothing"):
        generations.flip("films", 7)


def test_under_concurrent_leases_and_flips_every_payload_is_retired_once_and_never_while_leased():
    leased: dict[str, int] = {}
    lock = threading.Lock()
    retired: list[str] = []

    def retire(payload: str) -> None:
        with lock:
            assert leased.get(payload, 0) == 0
            retired.append(payload)

    generations: Generations[str] = Generations(retire)
    generations.stage("films", 1, "v1")
    generations.flip("films", 1)
    stop = threading.Event()

    def use() -> None:
        while not stop.is_set():
            with generations.lease("films") as lease:
                with lock:
                    assert lease.payload not in retired
                    leased[lease.payload] = leased.get(lease.payload, 0) + 1
                with lock:
                    leased[lease.payload] -= 1

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for version in range(2, 200):
        generations.stage("films", version, f"v{version}")
        generations.flip("films", version)
    stop.set()
    for thread in threads:
        thread.join()
    assert sorted(retired) == sorted(f"v{version}" for version in range(1, 199))
