"""What every registry keeps to: each test runs against a directory and against a real Redis."""

from __future__ import annotations

import asyncio
import time

import pytest

from loader.errors import RegistryConflictError, RegistryRecordError, RegistryUnavailableError
from loader.registry.opening import open_registry
from loader.registry.registry import MAX_VALUE_BYTES, StreamBounds, StreamEntry
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
async def test_a_key_that_was_never_written_is_not_there(registry):
    assert await registry.get("wanted/a") is None
    assert await registry.entries("wanted/") == {}
    assert await registry.entries("") == {}


@contract
async def test_each_write_gives_a_higher_revision(registry):
    revisions = [await registry.put("a", b"0", 0)]
    for value in (b"1", b"", b"\x00\n\xff" * 100):
        revisions.append(await registry.put("a", value, revisions[-1]))
        entry = await registry.get("a")
        assert (entry.value, entry.revision) == (value, revisions[-1])
    assert revisions == sorted(set(revisions))
    assert revisions[0] > 0


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


@contract
async def test_a_key_that_is_written_again_after_its_end_gets_a_higher_revision(registry):
    first = await registry.put("a", b"1", 0)
    await registry.delete("a", first)
    assert await registry.get("a") is None
    assert await registry.entries("") == {}
    with pytest.raises(RegistryConflictError):
        await registry.delete("a", first)
    with pytest.raises(RegistryConflictError):
        await registry.put("a", b"2", first)
    assert await registry.put("a", b"2", 0) > first


@contract
async def test_a_key_and_keys_below_it_are_different_keys(registry):
    for key in ("a", "a/b", "a/b/c", "ab", ".a/b", "a-"):
        await registry.put(key, key.encode(), 0)
    assert {key: entry.value for key, entry in (await registry.entries("a/")).items()} == {
        "a/b": b"a/b",
        "a/b/c": b"a/b/c",
    }
    assert list(await registry.entries("a/b/")) == ["a/b/c"]
    assert list(await registry.entries("")) == sorted(["a", "a/b", "a/b/c", "ab", ".a/b", "a-"])


@contract
async def test_entries_are_sorted_by_key_and_have_the_revisions_to_write_them(registry):
    names = [f"versions/m/{number:020d}" for number in (10, 9, 100, 1)]
    revisions = {name: await registry.put(name, name.encode(), 0) for name in names}
    found = await registry.entries("versions/")
    assert list(found) == sorted(names)
    assert {key: entry.revision for key, entry in found.items()} == revisions
    for key, entry in found.items():
        await registry.delete(key, entry.revision)
    assert await registry.entries("versions/") == {}


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


@pytest.mark.parametrize("prefix", ["a", "/", "a//", "../", "a/./", "ä/"])
def test_a_prefix_that_is_none_is_refused(url, prefix):
    async def scenario(registry):
        with pytest.raises(RegistryRecordError, match="prefix"):
            await registry.entries(prefix)
        with pytest.raises(RegistryRecordError, match="prefix"):
            await registry.announced(prefix)

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


@contract
async def test_many_announcements_are_all_listed(registry):
    expected = {f"nodes/{number:04d}": b"%d" % number for number in range(300)}
    for key, value in expected.items():
        await registry.announce(key, value, 60.0)
    assert await registry.announced("nodes/") == expected


@contract
async def test_a_key_an_announcement_a_lock_and_a_stream_of_one_name_are_four_things(registry):
    await registry.put("a/b", b"key", 0)
    await registry.announce("a/b", b"announcement", 60.0)
    assert await registry.acquire("a/b", "owner", 60.0)
    await registry.append("a/b", 7, b"entry")
    assert {key: entry.value for key, entry in (await registry.entries("")).items()} == {"a/b": b"key"}
    assert await registry.announced("") == {"a/b": b"announcement"}
    assert await registry.holder("a/b") == "owner"
    assert await registry.read("a/b", 0) == [StreamEntry(7, b"entry")]


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 3601.0, float("nan")])
def test_a_time_to_live_that_is_none_is_refused(url, ttl_s):
    async def scenario(registry):
        with pytest.raises(RegistryRecordError, match="ttl_s"):
            await registry.announce("a", b"", ttl_s)
        with pytest.raises(RegistryRecordError, match="ttl_s"):
            await registry.acquire("a", "me", ttl_s)

    with_open(url, scenario)


# Locks


@contract
async def test_a_lock_has_one_owner_until_it_is_given_back(registry):
    assert await registry.holder("locks/a") is None
    assert await registry.acquire("locks/a", "one", 60.0)
    assert await registry.acquire("locks/a", "one", 60.0)
    assert not await registry.acquire("locks/a", "two", 60.0)
    await registry.release("locks/a", "two")
    assert await registry.holder("locks/a") == "one"
    assert await registry.acquire("locks/b", "two", 60.0)
    await registry.release("locks/a", "one")
    assert await registry.holder("locks/a") is None
    assert await registry.acquire("locks/a", "two", 60.0)


@contract
async def test_a_lock_that_is_not_renewed_is_free_again(registry):
    assert await registry.acquire("locks/a", "one", 0.02)

    async def is_held():
        return not await registry.acquire("locks/a", "two", 60.0)

    await until_gone(is_held)
    assert await registry.holder("locks/a") == "two"
    assert not await registry.acquire("locks/a", "one", 60.0)


@contract
async def test_of_many_that_want_a_lock_one_gets_it(registry):
    taken = await asyncio.gather(*(registry.acquire("locks/a", f"owner-{number}", 60.0) for number in range(20)))
    assert taken.count(True) == 1
    assert await registry.holder("locks/a") == f"owner-{taken.index(True)}"


@pytest.mark.parametrize("owner", ["", "a\nb", "x" * 401])
def test_an_owner_that_is_no_short_text_is_refused(url, owner):
    async def scenario(registry):
        with pytest.raises(RegistryRecordError, match="owner"):
            await registry.acquire("locks/a", owner, 1.0)

    with_open(url, scenario)


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


def test_its_own_url_opens_it_again(url):
    async def write(registry):
        await registry.put("a", b"value", 0)
        return registry.url

    async def read(registry):
        return (await registry.get("a")).value

    assert with_open(with_open(url, write), read) == b"value"


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
