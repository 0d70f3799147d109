"""Any sequence of calls answers as a dict and a list would: against a directory and against a real Redis."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader.errors import RegistryConflictError, StreamSequenceError
from loader.registry.opening import open_registry
from loader.registry.registry import StreamBounds, StreamEntry
from shardrank_testing.registries import with_open

KEYS = ("a", "a/b", "a/c", "b")
STREAMS = ("a", "a/b")
VALUES = st.binary(max_size=12)
CALLS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(KEYS), VALUES, st.sampled_from(["known", "older", "none"])),
    st.tuples(st.just("delete"), st.sampled_from(KEYS), st.sampled_from(["known", "older", "none"])),
    st.tuples(st.just("entries"), st.sampled_from(["", "a/", "b/"])),
    st.tuples(st.just("announce"), st.sampled_from(KEYS), VALUES),
    st.tuples(st.just("withdraw"), st.sampled_from(KEYS)),
    st.tuples(st.just("acquire"), st.sampled_from(KEYS), st.sampled_from(["one", "two"])),
    st.tuples(st.just("release"), st.sampled_from(KEYS), st.sampled_from(["one", "two"])),
    # Offsets from the stream's end; a block of the directory's ends at 255.
    st.tuples(st.just("append"), st.sampled_from(STREAMS), st.sampled_from([1, 1, 1, 1, 0, 2, -3]), VALUES),
    st.tuples(st.just("read"), st.sampled_from(STREAMS), st.integers(-8, 2), st.integers(1, 5), st.integers(1, 40)),
    st.tuples(st.just("trim"), st.sampled_from(STREAMS), st.integers(-6, 3)),
    st.tuples(st.just("reopen")),
)


class Model:
    """What a registry shall do, in the plainest way."""

    def __init__(self, registry, first_sequence):
        self.registry = registry
        self.first_sequence = first_sequence
        self.keys: dict[str, tuple[bytes, int]] = {}
        self.revisions: dict[str, list[int]] = {key: [] for key in KEYS}
        self.announced: dict[str, bytes] = {}
        self.owners: dict[str, str] = {}
        self.streams: dict[str, tuple[int, list[bytes]]] = {}

    def _revision(self, key, which):
        if which == "none":
            return 0
        known = self.keys[key][1] if key in self.keys else 0
        older = [revision for revision in self.revisions[key] if revision != known]
        return older[-1] if which == "older" and older else known

    async def put(self, key, value, which):
        expected = self._revision(key, which)
        now = self.keys[key][1] if key in self.keys else 0
        try:
            revision = await self.registry.put(key, value, expected)
        except RegistryConflictError:
            assert expected != now
            return
        assert expected == now
        assert revision > max(self.revisions[key], default=0)
        self.keys[key] = (value, revision)
        self.revisions[key].append(revision)

    async def delete(self, key, which):
        expected = self._revision(key, which)
        now = self.keys[key][1] if key in self.keys else 0
        try:
            await self.registry.delete(key, expected)
        except RegistryConflictError:
            assert expected != now
            return
        assert expected == now
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
        assert list((await self.registry.announced("")).items()) == sorted(self.announced.items())

    async def acquire(self, key, owner):
        expected = self.owners.setdefault(key, owner) == owner
        assert await self.registry.acquire(key, owner, 3600.0) == expected

    async def release(self, key, owner):
        await self.registry.release(key, owner)
        if self.owners.get(key) == owner:
            del self.owners[key]
        assert await self.registry.holder(key) == self.owners.get(key)

    async def append(self, stream, step, payload):
        first, kept = self.streams.get(stream, (self.first_sequence, []))
        sequence = max(first + len(kept) - 1 + step, 1)
        fits = stream not in self.streams or sequence == first + len(kept)
        try:
            await self.registry.append(stream, sequence, payload)
        except StreamSequenceError:
            assert not fits
            return
        assert fits
        self.streams[stream] = (first if stream in self.streams else sequence, [*kept, payload])
        await self._same_bounds(stream)

    async def read(self, stream, step, max_entries, max_bytes):
        first, kept = self.streams.get(stream, (self.first_sequence, []))
        after = max(first + len(kept) - 1 + step, 0)
        everything = [StreamEntry(first + place, payload) for place, payload in enumerate(kept)]
        expected: list[StreamEntry] = []
        for entry in everything:
            size = sum(len(one.payload) for one in expected) + len(entry.payload)
            if entry.sequence <= after:
                continue
            if len(expected) == max_entries or (expected and size > max_bytes):
                break
            expected.append(entry)
        assert await self.registry.read(stream, after, max_entries, max_bytes) == expected

    async def trim(self, stream, step):
        first, kept = self.streams.get(stream, (self.first_sequence, []))
        before = first + len(kept) + step
        await self.registry.trim(stream, before)
        if stream in self.streams:
            dropped = min(max(before - first, 0), len(kept))
            self.streams[stream] = (first + dropped, kept[dropped:])
        await self._same_bounds(stream)

    async def _same_bounds(self, stream):
        first, kept = self.streams.get(stream, (0, []))
        expected = StreamBounds(first, first + len(kept) - 1) if stream in self.streams else StreamBounds(0, 0)
        assert await self.registry.bounds(stream) == expected

    async def reopen(self):
        url = self.registry.url
        await self.registry.close()
        self.registry = open_registry(url)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(CALLS, max_size=25), first_sequence=st.sampled_from([1, 250, 2**40]))
def test_any_sequence_of_calls_answers_as_a_dict_and_a_list_would(new_url, calls, first_sequence):
    async def scenario(registry):
        model = Model(registry, first_sequence)
        try:
            for name, *arguments in calls:
                await getattr(model, name)(*arguments)
            await model.entries("")
            for stream in STREAMS:
                await model.read(stream, -(2**50), 1000, 10_000)
        finally:
            await model.registry.close()

    with_open(new_url(), scenario)
