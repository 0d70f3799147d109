"""Keep a registry in the memory of one process, which is the only member of its fleet: it ends with the process."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from threading import Lock

from loader.errors import RegistryConflictError, StreamSequenceError
from loader.registry.directory import MAX_STREAM_BYTES
from loader.registry.fleet import FleetRegistry, PublishedVersion, WantedModel, version_key, wanted_key
from loader.registry.registry import Entry, StreamBounds, StreamEntry, check_key, check_stream


class _Stream:
    """The entries of a stream, ascending, and the highest number that was ever appended; 0 before the first."""

    def __init__(self) -> None:
        self.entries: list[StreamEntry] = []
        self.last = 0

    @property
    def bounds(self) -> StreamBounds:
        first = self.entries[0].sequence if self.entries else self.last + 1
        return StreamBounds(first if self.last else 0, self.last)


class MemoryRegistry:
    """A `Registry` in memory, which several event loops of a process may use. Closing it changes nothing."""

    def __init__(
        self, name: str, keys: Mapping[str, bytes] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Make a registry with these keys; `name` is for logs and the status page, `clock` returns seconds."""
        self.url = self.name = name
        self._clock = clock
        self._lock = Lock()
        self._revision = 1
        self._keys = {key: Entry(value, self._revision) for key, value in (keys or {}).items()}
        self._announced: dict[str, tuple[float, bytes]] = {}
        self._owners: dict[str, tuple[float, str]] = {}
        self._streams: dict[str, _Stream] = {}

    async def get(self, key: str) -> Entry | None:
        return self._keys.get(check_key(key))

    async def entries(self, prefix: str) -> dict[str, Entry]:
        check_key(prefix, "prefix")
        with self._lock:
            return {key: self._keys[key] for key in sorted(self._keys) if key.startswith(prefix)}

    async def put(self, key: str, value: bytes, expected_revision: int) -> int:
        check_key(key, value=value)
        with self._lock:
            self._expect(key, expected_revision)
            self._revision += 1
            self._keys[key] = Entry(value, self._revision)
            return self._revision

    async def delete(self, key: str, expected_revision: int) -> None:
        with self._lock:
            if check_key(key) in self._keys:
                self._expect(key, expected_revision)
                del self._keys[key]

    async def announce(self, key: str, value: bytes, ttl_s: float) -> None:
        check_key(key, value=value, ttl_s=ttl_s)
        with self._lock:
            self._announced[key] = self._clock() + ttl_s, value

    async def withdraw(self, key: str) -> None:
        with self._lock:
            self._announced.pop(check_key(key), None)

    async def announced(self, prefix: str) -> dict[str, bytes]:
        check_key(prefix, "prefix")
        with self._lock:
            now = self._clock()
            self._announced = {key: kept for key, kept in self._announced.items() if kept[0] > now}
            return {key: value for key, (_, value) in sorted(self._announced.items()) if key.startswith(prefix)}

    async def acquire(self, key: str, owner: str, ttl_s: float) -> bool:
        check_key(key, owner=owner, ttl_s=ttl_s)
        with self._lock:
            is_free = self._owner(key) in (None, owner)
            if is_free:
                self._owners[key] = self._clock() + ttl_s, owner
            return is_free

    async def release(self, key: str, owner: str) -> None:
        check_key(key, owner=owner)
        with self._lock:
            if self._owner(key) == owner:
                del self._owners[key]

    async def holder(self, key: str) -> str | None:
        with self._lock:
            return self._owner(check_key(key))

    async def append(self, stream: str, sequence: int, payload: bytes) -> None:
        check_stream(stream, sequence=sequence, payload=payload)
        with self._lock:
            appended = self._streams.setdefault(stream, _Stream())
            if (last := appended.last) and sequence != last + 1:
                raise StreamSequenceError(f"stream {stream}: sequence {sequence} after {last}; {last + 1} is next")
            appended.entries.append(StreamEntry(sequence, payload))
            appended.last = sequence

    async def read(
        self, stream: str, after: int, max_entries: int = 256, max_bytes: int = 16 << 20
    ) -> list[StreamEntry]:
        check_stream(stream, max_entries=max_entries, max_bytes=max_bytes)
        with self._lock:
            entries = self._streams.get(stream, _Stream()).entries
            first = bisect_right(entries, after, key=lambda entry: entry.sequence)
            selected = entries[first : first + max_entries]
        size_bytes = 0
        for count, entry in enumerate(selected):
            size_bytes += len(entry.payload)
            if count and size_bytes > max_bytes:
                return selected[:count]
        return selected

    async def bounds(self, stream: str) -> StreamBounds:
        with self._lock:
            return self._streams.get(check_stream(stream), _Stream()).bounds

    async def stream_bytes(self, stream: str) -> int:
        with self._lock:
            return sum(len(entry.payload) for entry in self._streams.get(check_stream(stream), _Stream()).entries)

    async def max_stream_bytes(self) -> float:
        return MAX_STREAM_BYTES

    async def trim(self, stream: str, before: int) -> None:
        with self._lock:
            trimmed = self._streams.get(check_stream(stream), _Stream())
            trimmed.entries = [entry for entry in trimmed.entries if entry.sequence >= before]

    async def close(self) -> None:
        """Do nothing: who else has opened it goes on."""

    def _expect(self, key: str, revision: int) -> None:
        known = self._keys[key].revision if key in self._keys else 0
        if known != revision:
            raise RegistryConflictError(f"{key} has revision {known}, not {revision}")

    def _owner(self, key: str) -> str | None:
        until, owner = self._owners.get(key, (float("-inf"), None))
        return owner if until > self._clock() else None


def single_process_fleet(name: str, version: PublishedVersion) -> FleetRegistry:
    """Return a fleet in memory whose only process shall serve that version, and applies no deltas to it."""
    only = (version.version,)
    desired = WantedModel(model=version.model, epoch=1, live=version.version, hold=only, serve=only)
    records = {version_key(version.model, version.version): version, wanted_key(version.model): desired}
    encoded = {key: record.model_dump_json().encode() for key, record in records.items()}
    return FleetRegistry(MemoryRegistry(name, encoded))
