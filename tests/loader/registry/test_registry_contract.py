"""What every registry keeps to: each test runs against a directory and against a real Redis."""

from __future__ import annotations

import asyncio
import time

import pytest

from loader.errors import RegistryConflictError, RegistryRecordError, RegistryUnavailableError
from loader.registry.opening import open_registry
from loader.registry.registry import MAX_VALUE_BYTES, StreamBounds
from shardrank_testing.registries import contract, with_open

WAIT_S = 20.0


async def until_gone(ask):
    """Waits for what expires by itself."""
    deadline = time.monotonic() + WAIT_S
    while await ask():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


# Keys


@contract
async def test_a_write_with_another_revision_changes_nothing(registry):
    first = await registry.put("a", b"1", 0)
    second = await registry.put("a", b"2", first)
    for wrong in (0, first, second + 1):
        with pytest.raises(RegistryConflictError, match=f"a has revision {second}, not {wrong}"):
            await registry.put("a", b"3", wrong)
        with pytest.raises(RegistryConflictError, match=f"a has revision {second}, not {wrong}"):
            await registry.delete("a", wrong)
    assert (await registry.get("a")).value == b"2"
    with pytest.raises(RegistryConflictError, match="has revision 0"):
        await registry.put("b", b"", first)


BAD_KEYS = ["", "/a", "a/", "a//b", ".", "..", "a/../b", "a b", "ä", "a\n", "a=", "a~", "a" * 201, "a/" * 300 + "a"]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_key_that_is_none_is_refused_by_every_method(url, key):
    async def scenario(registry):
        for call in (
            registry.get(key),
            registry.put(key, b"", 0),
            registry.delete(key, 0),
            registry.announce(key, b"", 1.0),
            registry.withdraw(key),
            registry.acquire(key, "me", 1.0),
            registry.release(key, "me"),
            registry.holder(key),
            registry.append(key, 1, b""),
            registry.read(key, 0),
            registry.bounds(key),
            registry.trim(key, 1),
        ):
            with pytest.raises(RegistryRecordError, match="allowed are at most 512 characters"):
                await call
        assert await registry.entries("") == {}

    with_open(url, scenario)


@contract
async def test_a_value_that_is_too_long_is_refused_and_the_longest_one_is_not(registry):
    longest = b"x" * MAX_VALUE_BYTES
    with pytest.raises(RegistryRecordError, match=f"a value of {MAX_VALUE_BYTES + 1} bytes; at most {MAX_VALUE_BYTES}"):
        await registry.put("a", longest + b"x", 0)
    with pytest.raises(RegistryRecordError):
        await registry.announce("a", longest + b"x", 1.0)
    with pytest.raises(RegistryRecordError):
        await registry.append("a", 1, longest + b"x")
    await registry.put("a", longest, 0)
    await registry.append("a", 1, longest)
    assert (await registry.get("a")).value == longest
    assert [entry.payload for entry in await registry.read("a", 0)] == [longest]


@contract
async def test_of_writers_that_know_the_same_revision_one_wins(registry):
    known = await registry.put("a", b"", 0)
    results = await asyncio.gather(
        *(registry.put("a", b"%d" % writer, known) for writer in range(20)), return_exceptions=True
    )
    won = [writer for writer, result in enumerate(results) if isinstance(result, int)]
    assert len(won) == 1
    assert sum(isinstance(result, RegistryConflictError) for result in results) == 19
    entry = await registry.get("a")
    assert (entry.value, entry.revision) == (b"%d" % won[0], results[won[0]])


# Announcements


@contract
async def test_an_announcement_is_there_until_it_is_withdrawn(registry):
    await registry.announce("nodes/b", b"1", 60.0)
    await registry.announce("nodes/a", b"2", 60.0)
    await registry.announce("other/a", b"3", 60.0)
    await registry.announce("nodes/b", b"4", 60.0)
    found = await registry.announced("nodes/")
    assert list(found.items()) == [("nodes/a", b"2"), ("nodes/b", b"4")]
    await registry.withdraw("nodes/a")
    await registry.withdraw("nodes/a")
    await registry.withdraw("nodes/never-there")
    assert await registry.announced("nodes/") == {"nodes/b": b"4"}
    assert list(await registry.announced("")) == ["nodes/b", "other/a"]


@contract
async def test_an_announcement_that_is_not_repeated_disappears_and_the_others_stay(registry):
    await registry.announce("nodes/a", b"1", 0.02)
    await registry.announce("nodes/b", b"2", 60.0)

    async def is_there():
        return "nodes/a" in await registry.announced("nodes/")

    await until_gone(is_there)
    assert await registry.announced("nodes/") == {"nodes/b": b"2"}
    await registry.announce("nodes/a", b"3", 60.0)
    assert await registry.announced("nodes/") == {"nodes/a": b"3", "nodes/b": b"2"}


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 3601.0, float("nan")])
def test_a_time_to_live_that_is_none_is_refused(url, ttl_s):
    async def scenario(registry):
        with pytest.raises(RegistryRecordError, match="ttl_s"):
            await registry.announce("a", b"", ttl_s)
        with pytest.raises(RegistryRecordError, match="ttl_s"):
            await registry.acquire("a", "me", ttl_s)

    with_open(url, scenario)


# Locks


# Opening and closing


def test_what_was_written_is_there_after_it_is_opened_again(url):
    async def write(registry):
        await registry.append("s", 4, b"entry")
        await registry.append("s", 5, b"entry")
        await registry.trim("s", 6)
        return await registry.put("a", b"value", 0)

    async def read(registry):
        assert await registry.bounds("s") == StreamBounds(6, 5)
        entry = await registry.get("a")
        return entry.value, entry.revision

    revision = with_open(url, write)
    assert with_open(url, read) == (b"value", revision)


def test_a_closed_registry_says_so_and_may_be_closed_again(url):
    async def program():
        registry = open_registry(url)
        await registry.put("a", b"", 0)
        await registry.close()
        await registry.close()
        with pytest.raises(RegistryUnavailableError, match="is closed"):
            await registry.get("a")
        never_used = open_registry(url)
        await never_used.close()

    asyncio.run(program())
