"""Several processes at one registry, and processes that are killed while they write."""

from __future__ import annotations

import itertools
import os
import random

import pytest

from loader.registry.registry import StreamBounds
from shardrank_testing.registries import with_open
from shardrank_testing.registry_writers import (
    LOOP_KEY,
    LOOP_STREAM,
    add_many,
    die_at_call,
    enter_many,
    publish_many,
    start_writer,
    write_until_killed,
)

WAIT_S = 60.0


def results_of(work, *arguments, processes=3):
    """Runs the same in several processes at once, and gives what each one told."""
    started = [start_writer(work, *arguments) for _ in range(processes)]
    results = []
    for process, told in started:
        assert told.poll(WAIT_S), "a writer told nothing"
        results.append(told.recv())
        process.join(WAIT_S)
        assert process.exitcode == 0
    return results


def everything_told(told):
    """What a process that was killed has told before."""
    found = []
    try:
        while told.poll(WAIT_S):
            found.append(told.recv())
    except EOFError:
        return found
    raise AssertionError("the writer did not end")


def test_no_write_of_several_processes_is_lost(url):
    revisions = results_of(add_many, url, "counter", 40)

    async def scenario(registry):
        return await registry.get("counter")

    entry = with_open(url, scenario)
    assert entry.value == b"120"
    assert all(one == sorted(one) for one in revisions)
    together = sorted(itertools.chain.from_iterable(revisions))
    assert len(set(together)) == 120
    assert entry.revision == together[-1]


def test_entries_of_several_publishers_have_no_gap_and_no_number_twice(url):
    sequences = results_of(publish_many, url, "deltas/m/1", 40)

    async def scenario(registry):
        return await registry.read("deltas/m/1", 0)

    entries = with_open(url, scenario)
    assert [entry.sequence for entry in entries] == list(range(1, 121))
    assert sorted(itertools.chain.from_iterable(sequences)) == list(range(1, 121))
    assert all(int(entry.payload.split()[1]) == entry.sequence for entry in entries)


def test_a_lock_lets_one_process_in_at_a_time(url, tmp_path):
    assert results_of(enter_many, url, "locks/a", 25, str(tmp_path)) == [0, 0, 0]


def test_a_writer_that_is_killed_again_and_again_leaves_nothing_half_done(url):
    """kill -9 at random moments: what was acknowledged is there, and at most one write more."""
    moments = random.Random(7)
    put = appended = 0

    async def look(registry):
        entry = await registry.get(LOOP_KEY)
        bounds = await registry.bounds(LOOP_STREAM)
        entries = await registry.read(LOOP_STREAM, 0)
        assert [one.sequence for one in entries] == list(range(max(bounds.first, 1), bounds.last + 1))
        assert all(one.payload == b"%d" % one.sequence * 300 for one in entries)
        for value in (await registry.announced("nodes/")).values():
            number = value[: len(value) // 300]
            assert value == number * 300
        return int(entry.value) if entry is not None else 0, bounds.last

    for _ in range(20):
        process, told = start_writer(write_until_killed, url)
        heard = []
        for _ in range(moments.randint(6, 24)):
            assert told.poll(WAIT_S)
            heard.append(told.recv())
        # Into whatever it does now, not always the moment after it told something.
        process.join(moments.uniform(0.0, 0.003))
        process.kill()
        process.join(WAIT_S)
        heard += everything_told(told)
        put = max([put, *(number for what, number in heard if what == "is put")])
        appended = max([appended, *(number for what, number in heard if what == "is appended")])
        value, last = with_open(url, look)
        assert value in (put, put + 1)
        assert last in (appended, appended + 1)
        put, appended = value, last
    assert put > 20


STEPS = [
    "put",
    "replaced",
    "appended 255",
    "appended 256",
    "appended 257",
    "trimmed",
    "deleted",
    "announced",
    "acquired",
]


async def state_of(registry):
    """All that a registry holds."""
    entry = await registry.get("a/b")
    return (
        entry.value if entry is not None else None,
        await registry.bounds("s"),
        [one.sequence for one in await registry.read("s", 0)],
        await registry.announced(""),
        await registry.holder("locks/l"),
    )


NOTHING = (None, StreamBounds(0, 0), [], {}, None)
AFTER = {
    "put": (b"1", StreamBounds(0, 0), [], {}, None),
    "replaced": (b"2", StreamBounds(0, 0), [], {}, None),
    "appended 255": (b"2", StreamBounds(255, 255), [255], {}, None),
    "appended 256": (b"2", StreamBounds(255, 256), [255, 256], {}, None),
    "appended 257": (b"2", StreamBounds(255, 257), [255, 256, 257], {}, None),
    "trimmed": (b"2", StreamBounds(257, 257), [257], {}, None),
    "deleted": (None, StreamBounds(257, 257), [257], {}, None),
    "announced": (None, StreamBounds(257, 257), [257], {"nodes/n": b"here"}, None),
    "acquired": (None, StreamBounds(257, 257), [257], {"nodes/n": b"here"}, "me"),
}


async def use_after(registry):
    """Every kind of write works, whatever was left there."""
    entry = await registry.get("a/b")
    await registry.put("a/b", b"3", entry.revision if entry is not None else 0)
    bounds = await registry.bounds("s")
    await registry.append("s", bounds.last + 1, b"next")
    await registry.trim("s", bounds.last + 1)
    await registry.announce("nodes/n", b"there", 3600.0)
    await registry.release("locks/l", "me")
    assert await registry.acquire("locks/l", "you", 3600.0)
    return await state_of(registry), bounds.last + 1


def files_below(path):
    return {os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names}


@pytest.mark.timeout(300)
def test_a_kill_before_any_call_into_the_file_system_leaves_the_state_before_or_after_a_step(tmp_path):
    for fatal_call in itertools.count(1):
        path = tmp_path / str(fatal_call)
        process, told = start_writer(die_at_call, str(path), fatal_call)
        heard = everything_told(told)
        process.join(WAIT_S)
        ended = [step for step in heard if step in AFTER]
        assert ended == STEPS[: len(ended)]
        before = AFTER[ended[-1]] if ended else NOTHING
        following = AFTER[STEPS[len(ended)]] if len(ended) < len(STEPS) else before
        assert with_open(str(path), state_of) in (before, following), (fatal_call, ended)
        state, last = with_open(str(path), use_after)
        assert state == (b"3", StreamBounds(last, last), [last], {"nodes/n": b"there"}, "you")
        # Whatever a killed writer left is written over or known: one work file and one lock for each area at most.
        assert len(files_below(path)) <= 14
        if heard and heard[-1] == "end":
            assert process.exitcode == 0
            break
        assert process.exitcode == -9
    assert fatal_call > 100
