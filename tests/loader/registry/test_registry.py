"""What every registry keeps to: each test runs against a directory, a real Redis, and the memory of a process."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from loader.errors import (
    PublisherSupersededError,
    RegistryConflictError,
    RegistryRecordError,
    RegistryUnavailableError,
    StreamSequenceError,
)
from loader.registry import open_registry
from loader.registry.directory import DirectoryRegistry
from loader.registry.memory import MemoryRegistry
from loader.registry.registry import MAX_VALUE_BYTES, Publisher, StreamBounds, StreamEntry
from shardrank_testing.registries import every_call, with_open
from tests.simulation.registry import Keyspace, RegistryClient

WAIT_S = 60.0
KEYS = ("a", "a/b", "a/c", "b")
STREAMS = ("a", "a/b")
PREFIXES = ("", "a/", "b/")
VALUES = st.binary(max_size=12)
CALLS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(KEYS), VALUES, st.sampled_from(["known", "older", "none"])),
    st.tuples(st.just("delete"), st.sampled_from(KEYS), st.sampled_from(["known", "older", "none"])),
    st.tuples(st.just("entries"), st.sampled_from(PREFIXES)),
    st.tuples(st.just("announce"), st.sampled_from(KEYS), VALUES),
    st.tuples(st.just("withdraw"), st.sampled_from(KEYS)),
    st.tuples(st.just("acquire"), st.sampled_from(KEYS), st.sampled_from(["one", "two"])),
    st.tuples(st.just("release"), st.sampled_from(KEYS), st.sampled_from(["one", "two"])),
    # Offsets from the stream's end; a block of the directory's ends at 255.
    st.tuples(st.just("append"), st.sampled_from(STREAMS), st.sampled_from([1, 1, 1, 1, 0, 2, -3]), VALUES),
    st.tuples(
        *(st.just("commit"), st.sampled_from(STREAMS), st.sampled_from([1, 1, 1, 3, 0]), VALUES, VALUES),
        st.sampled_from([0, 0, 0, 1, -1]),
    ),
    st.tuples(st.just("read"), st.sampled_from(STREAMS), st.integers(-8, 2), st.integers(1, 5), st.integers(1, 40)),
    st.tuples(st.just("trim"), st.sampled_from(STREAMS), st.integers(-6, 3)),
    st.tuples(st.just("reopen")),
)
OVER_A_BLOCKS_END = [
    *[("append", "a", 1, b"twelve bytes")] * 12,
    *(("read", "a", -8, 4, 1000), ("read", "a", -8, 5, 30), ("read", "a", -8, 5, 1), ("append", "a", 0, b"")),
    *(("trim", "a", -4), ("trim", "a", -8), ("trim", "a", 3), ("trim", "a", 3), ("reopen",)),
    *(("append", "a", 0, b""), ("append", "a", 1, b"\x00\n"), ("read", "a", -8, 5, 40)),
]
COMMIT_WHERE_ALL_IS_TRIMMED = [("append", "a", 1, b""), ("trim", "a", 0), ("commit", "a", 3, b"", b"", 0)]
COMMITS_AFTER_APPENDS = [
    *(("append", "a", 1, b"1"), ("append", "a", 1, b"2"), ("commit", "a", 1, b"3", b"three", -1)),
    *(("commit", "a", 1, b"3", b"three", 0), ("commit", "a", 0, b"3", b"three", -1), ("append", "a", 1, b"4")),
    *(("commit", "a", 5, b"8", b"eight", 0), ("commit", "a", 1, b"9", b"", 0), ("read", "a", -9, 4, 40)),
    *(("trim", "a", -5), ("read", "a", -9, 4, 40), ("reopen",), ("trim", "a", 3), ("commit", "a", 1, b"", b"", 0)),
    *(("commit", "a/b", 1, b"1", b"one", 0), ("append", "a/b", 1, b"2"), ("read", "a/b", -9, 4, 40)),
]
EVERY_REFUSAL_OF_KEYS = [
    *(("put", "a/b", b"1", "none"), ("put", "a/b", b"2", "known"), ("put", "a/b", b"", "older")),
    *(("put", "a/b", b"", "none"), ("delete", "a/b", "older"), ("delete", "a/b", "none"), ("reopen",)),
    *(("delete", "a/b", "known"), ("delete", "a/b", "known"), ("put", "a/b", b"", "older")),
    *(("announce", "a/b", b"1"), ("announce", "b", b"2"), ("withdraw", "a/b"), ("withdraw", "a/b")),
    *(("acquire", "a", "one"), ("acquire", "a", "two"), ("release", "a", "two"), ("release", "a", "one")),
]


async def refused(call, error, message):
    with pytest.raises(error, match=message):
        await call


@dataclass(frozen=True)
class Kept:
    """A stream: its entries, each a number, a payload, and what lies beside it."""

    first: int
    last: int
    entries: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    is_committed: bool = False


class Model:
    """What a registry shall do, in the plainest way."""

    def __init__(self, registry, first_sequence):
        self.registry = registry
        self.first_sequence = first_sequence
        self.keys: dict[str, tuple[bytes, int]] = {}
        self.revisions: dict[str, list[int]] = {key: [] for key in KEYS}
        self.announced: dict[str, bytes] = {}
        self.owners: dict[str, str] = {}
        self.streams: dict[str, Kept] = {}

    def _revisions(self, key, which):
        """The revision that a write states, and the one that the key has."""
        known = self.keys[key][1] if key in self.keys else 0
        older = [revision for revision in self.revisions[key] if revision != known]
        return {"none": 0, "known": known, "older": older[-1] if older else known}[which], known

    async def put(self, key, value, which):
        expected, now = self._revisions(key, which)
        write = self.registry.put(key, value, expected)
        if expected != now:
            await refused(write, RegistryConflictError, f"{key} has revision {now}, not {expected}")
            return
        revision = await write
        assert revision > max(self.revisions[key], default=0)
        self.keys[key] = (value, revision)
        self.revisions[key].append(revision)

    async def delete(self, key, which):
        expected, now = self._revisions(key, which)
        write = self.registry.delete(key, expected)
        if key in self.keys and expected != now:
            await refused(write, RegistryConflictError, f"{key} has revision {now}, not {expected}")
            return
        await write
        self.keys.pop(key, None)

    async def entries(self, prefix):
        found = await self.registry.entries(prefix)
        expected = {key: self.keys[key] for key in sorted(self.keys) if key.startswith(prefix)}
        assert list(found) == list(expected)
        assert {key: (entry.value, entry.revision) for key, entry in found.items()} == expected
        for key in KEYS:
            entry = await self.registry.get(key)
            assert (entry and (entry.value, entry.revision)) == self.keys.get(key)

    async def announce(self, key, value):
        await self.registry.announce(key, value, 3600.0)
        self.announced[key] = value
        await self._same_announcements()

    async def withdraw(self, key):
        await self.registry.withdraw(key)
        self.announced.pop(key, None)
        await self._same_announcements()

    async def _same_announcements(self):
        for prefix in PREFIXES:
            expected = [(key, value) for key, value in sorted(self.announced.items()) if key.startswith(prefix)]
            assert list((await self.registry.announced(prefix)).items()) == expected

    async def acquire(self, key, owner):
        expected = self.owners.setdefault(key, owner) == owner
        assert await self.registry.acquire(key, owner, 3600.0) == expected

    async def release(self, key, owner):
        await self.registry.release(key, owner)
        if self.owners.get(key) == owner:
            del self.owners[key]
        assert await self.registry.holder(key) == self.owners.get(key)

    def _stream(self, stream):
        return self.streams.get(stream, Kept(self.first_sequence, self.first_sequence - 1))

    async def append(self, stream, step, payload):
        kept = self._stream(stream)
        sequence = max(kept.last + step, 1)
        write = self.registry.append(stream, sequence, payload)
        repeated = kept.entries[-1:] == [(sequence, payload, b"")]
        if stream in self.streams and not repeated and (sequence != kept.last + 1 or kept.is_committed):
            message = "format 1 is over" if kept.is_committed else f"{sequence} was to follow {sequence - 1}"
            await refused(write, StreamSequenceError, message)
            return
        await write
        if not repeated:
            await self._added(stream, kept, (sequence, payload, b""))

    async def commit(self, stream, step, payload, rows, after):
        kept = self._stream(stream)
        end = kept.last if stream in self.streams else 0
        sequence, after, known = max(kept.last + step, 1), max(end + after, 0), kept.entries[-1:]
        payload_after = known[0][1] if known and after == end else b""
        expected, entry = StreamEntry(after, payload_after) if after else None, StreamEntry(sequence, payload)
        if known and kept.is_committed and after == end and sequence > end:
            # The same number, but of another stream.
            other = self.registry.commit(stream, entry, rows, StreamEntry(end, b"other entry"))
            await refused(other, StreamSequenceError, f"ends with {end}")
        write = self.registry.commit(stream, entry, rows, expected)
        if sequence <= after:
            await refused(write, StreamSequenceError, f"allowed is {after + 1} to")
        elif kept.entries and kept.entries[-1][:2] == (sequence, payload):
            await write
        elif after != end:
            await refused(write, StreamSequenceError, f"ends with {end}")
        else:
            await write
            await self._added(stream, kept, (sequence, payload, rows), is_committed=True)

    async def _added(self, stream, kept, entry, is_committed=False):
        # The directory has the first entry's number, Redis what was trimmed up to.
        is_first = not kept.entries and isinstance(self.registry, DirectoryRegistry)
        first = kept.first if stream in self.streams and not is_first else entry[0]
        self.streams[stream] = Kept(first, entry[0], [*kept.entries, entry], is_committed or kept.is_committed)
        await self._same_bounds(stream)

    async def read(self, stream, step, max_entries, max_bytes):
        kept = self._stream(stream)
        after = max(kept.last + step, 0)
        expected: list[StreamEntry] = []
        for entry in [StreamEntry(sequence, payload) for sequence, payload, _ in kept.entries]:
            size = sum(len(before.payload) for before in expected) + len(entry.payload)
            if entry.sequence <= after:
                continue
            if len(expected) == max_entries or (expected and size > max_bytes):
                break
            expected.append(entry)
        assert await self.registry.read(stream, after, max_entries, max_bytes) == expected
        # What lies beside them, whole and the last bytes but one; of an entry that is gone there is nothing.
        ranges = [(sequence, begin, end) for sequence, _, _ in kept.entries for begin, end in ((0, 20), (1, 3))]
        beside = {sequence: rows for sequence, _, rows in kept.entries}
        pieces = [beside[sequence][begin:end] for sequence, begin, end in ranges]
        assert await self.registry.read_rows(stream, [*ranges, (kept.first - 1, 0, 20)]) == [*pieces, b""]

    async def trim(self, stream, step):
        kept = self._stream(stream)
        before = kept.last + 1 + step
        await self.registry.trim(stream, before)
        if stream in self.streams:
            first = max(kept.first, min(before, kept.last + 1))
            entries = [entry for entry in kept.entries if entry[0] >= first]
            if entries and isinstance(self.registry, DirectoryRegistry):
                first = entries[0][0]
            self.streams[stream] = Kept(first, kept.last, entries, kept.is_committed)
        await self._same_bounds(stream)

    async def _same_bounds(self, stream):
        kept = self.streams.get(stream)
        expected = StreamBounds(0, 0) if kept is None else StreamBounds(kept.first, kept.last)
        assert await self.registry.bounds(stream) == expected

    async def reopen(self):
        if isinstance(self.registry, MemoryRegistry | SimulatedRegistry):
            return
        url = self.registry.url
        await self.registry.close()
        self.registry = open_registry(url)


async def play(registry, calls, first_sequence):
    """Make calls, and compare each answer with that of a dict and a list."""
    model = Model(registry, first_sequence)
    try:
        for name, *arguments in calls:
            await getattr(model, name)(*arguments)
        await model.entries("")
        for stream in STREAMS:
            await model.read(stream, -(2**50), 1000, 10_000)
    finally:
        await model.registry.close()


ANY_CALLS = given(calls=st.lists(CALLS, max_size=25), first_sequence=st.sampled_from([1, 250, 2**40]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(calls=OVER_A_BLOCKS_END, first_sequence=250)
@example(calls=COMMITS_AFTER_APPENDS, first_sequence=254)
@example(calls=EVERY_REFUSAL_OF_KEYS, first_sequence=1)
@example(calls=COMMIT_WHERE_ALL_IS_TRIMMED, first_sequence=1)
@ANY_CALLS
def test_any_sequence_of_calls_answers_as_a_dict_and_a_list(new_url, calls, first_sequence):
    with_open(new_url(), lambda registry: play(registry, calls, first_sequence))


@example(calls=OVER_A_BLOCKS_END, first_sequence=250)
@example(calls=COMMITS_AFTER_APPENDS, first_sequence=254)
@example(calls=EVERY_REFUSAL_OF_KEYS, first_sequence=1)
@ANY_CALLS
def test_any_sequence_of_calls_is_answered_in_memory(calls, first_sequence):
    asyncio.run(play(MemoryRegistry("memory"), calls, first_sequence))


class SimulatedRegistry(RegistryClient):
    """The simulation's registry, without its network."""

    def __init__(self):
        self._keyspace, self.url, self.name = Keyspace(), "simulated", "simulated"

    async def _do(self, name, *arguments):
        return getattr(self._keyspace, name)(time.time(), *arguments)

    async def _acknowledged(self, by, name, *arguments):
        await self._do(name, *arguments)


@example(calls=OVER_A_BLOCKS_END, first_sequence=250)
@example(calls=COMMITS_AFTER_APPENDS, first_sequence=254)
@example(calls=EVERY_REFUSAL_OF_KEYS, first_sequence=1)
@ANY_CALLS
def test_any_sequence_of_calls_is_answered_by_the_registry_of_the_simulation(calls, first_sequence):
    asyncio.run(play(SimulatedRegistry(), calls, first_sequence))


BAD_KEYS = ["", "/a", "a/", "a//b", ".", "..", "a/../b", "a b", "ä", "a\n", "a=", "a~", "a" * 201, "a/" * 300 + "a"]


@pytest.mark.parametrize("key", BAD_KEYS)
async def test_every_method_refuses_a_bad_key(any_registry, key):
    for call in every_call(any_registry, key):
        await refused(call, RegistryRecordError, "allowed are at most 512 characters")
    assert await any_registry.entries("") == {}


TOO_LONG = b"x" * (MAX_VALUE_BYTES + 1)


@pytest.mark.parametrize(
    ("method", "arguments", "error", "message"),
    [
        *(("announce", ("a", b"", ttl_s), RegistryRecordError, "ttl_s") for ttl_s in (0.0, -1.0, 3601.0, float("nan"))),
        *(("acquire", ("a", "me", ttl_s), RegistryRecordError, "ttl_s") for ttl_s in (0.0, -1.0, 3601.0, float("nan"))),
        *(("append", ("a", number, b""), StreamSequenceError, "allowed is 1 to") for number in (0, -1, 2**53)),
        ("read", ("a", 0, 0), RegistryRecordError, "must be at least 1"),
        ("read", ("a", 0, 1, 0), RegistryRecordError, "must be at least 1"),
        ("put", ("a", TOO_LONG, 0), RegistryRecordError, f"a value of {MAX_VALUE_BYTES + 1} bytes; at most"),
        ("announce", ("a", TOO_LONG, 1.0), RegistryRecordError, f"at most {MAX_VALUE_BYTES}"),
        ("append", ("a", 1, TOO_LONG), RegistryRecordError, f"at most {MAX_VALUE_BYTES}"),
        ("next_token", ("a", "b/c"), RegistryRecordError, "publisher 'b/c': allowed is what a part of a key may be"),
    ],
)
async def test_arguments_out_of_range_are_refused(any_registry, method, arguments, error, message):
    await refused(getattr(any_registry, method)(*arguments), error, message)
    assert (await any_registry.entries(""), await any_registry.announced("")) == ({}, {})
    assert (await any_registry.bounds("a"), await any_registry.holder("a")) == (StreamBounds(0, 0), None)


async def test_the_longest_value_is_stored(any_registry):
    await any_registry.put("a", TOO_LONG[1:], 0)
    await any_registry.append("a", 1, TOO_LONG[1:])
    assert (await any_registry.get("a")).value == TOO_LONG[1:]
    assert [entry.payload for entry in await any_registry.read("a", 0)] == [TOO_LONG[1:]]


async def test_a_publisher_that_began_again_supersedes_itself_and_nobody_else(any_registry):
    before, other = await any_registry.next_token("a", "trainer"), await any_registry.next_token("a", "other")
    first, second, third = (StreamEntry(number, b"%d" % number) for number in (1, 2, 3))
    await any_registry.commit("a", first, b"", None, Publisher("trainer", before))
    since = await any_registry.next_token("a", "trainer")
    assert 0 < before < other < since < await any_registry.next_token("a", "")
    await any_registry.commit("a", second, b"", first, Publisher("other", other))
    late = any_registry.commit("a", third, b"", second, Publisher("trainer", before))
    await refused(late, PublisherSupersededError, f"'trainer' began again, with token {since}; {before} is superseded")
    await any_registry.commit("a", third, b"", second, Publisher("trainer", since))
    assert await any_registry.bounds("a") == StreamBounds(1, 3)


async def test_an_announcement_expires_and_the_others_stay(any_registry):
    await any_registry.announce("nodes/a", b"1", 0.02)
    await any_registry.announce("nodes/b", b"2", 60.0)
    deadline = time.monotonic() + WAIT_S
    while "nodes/a" in await any_registry.announced("nodes/"):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert await any_registry.announced("nodes/") == {"nodes/b": b"2"}
    await any_registry.announce("nodes/a", b"3", 60.0)
    assert await any_registry.announced("nodes/") == {"nodes/a": b"3", "nodes/b": b"2"}


async def test_writers_of_one_registry_lose_no_write_and_share_no_lock(url):
    """Each has opened the registry for itself, as processes do."""
    inside: set[int] = set()

    async def write(writer, registry):
        revisions, sequences = [], []
        while len(revisions) < 40:
            entry = await registry.get("counter")
            value, revision = (int(entry.value), entry.revision) if entry is not None else (0, 0)
            with suppress(RegistryConflictError):
                revisions.append(await registry.put("counter", b"%d" % (value + 1), revision))
        while len(sequences) < 40:
            last = (await registry.bounds("stream")).last
            after = StreamEntry(last, b"") if last else None
            with suppress(StreamSequenceError):
                await registry.commit("stream", StreamEntry(last + 1, b"%d" % writer), b"%d" % (last + 1), after)
                sequences.append(last + 1)
        for _ in range(40):
            while not await registry.acquire("lock", f"writer-{writer}", 60.0):
                pass
            assert not inside
            inside.add(writer)
            await asyncio.sleep(0)
            inside.remove(writer)
            await registry.release("lock", f"writer-{writer}")
        assert revisions == sorted(revisions)
        return revisions, sequences

    registries = [open_registry(url) for _ in range(3)]
    revisions, sequences = zip(*await asyncio.gather(*map(write, range(3), registries)), strict=True)
    entry = await registries[0].get("counter")
    assert (entry.value, entry.revision) == (b"120", max(itertools.chain(*revisions)))
    assert len(set(itertools.chain(*revisions))) == 120
    assert sorted(itertools.chain(*sequences)) == list(range(1, 121))
    pieces = await registries[0].read_rows("stream", [(number, 0, 9) for number in range(1, 121)])
    assert pieces == [b"%d" % number for number in range(1, 121)]
    for registry in registries:
        await registry.close()


async def test_a_closed_registry_says_so_and_may_be_closed_again(url):
    registry = open_registry(url)
    await registry.put("a", b"", 0)
    await registry.close()
    await registry.close()
    await refused(registry.get("a"), RegistryUnavailableError, "is closed")
    await open_registry(url).close()
