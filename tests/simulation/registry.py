"""A registry that replicates behind its clients' backs, as Redis does, and one in files of which a crash keeps some.

`Keyspace` is what one server holds; its answers are those of `loader.registry.registry.Registry`, and tests of all
registries hold it to them. A failover makes the replica the server, without what had not reached it yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from loader.errors import PublisherSupersededError, RegistryConflictError, RegistryUnavailableError, StreamSequenceError
from loader.registry import registry as interface
from loader.registry.directory import DirectoryRegistry, DiskFiles
from loader.registry.registry import ANYBODY, Entry, Publisher, StreamBounds, StreamEntry
from tests.simulation.loop import PROCESS, SimulatedLoop
from tests.simulation.network import Network
from tests.simulation.processes import EPOCH_S

T = TypeVar("T")
SERVER = "registry"
WAIT_S = 1.0
"""How long a commit waits for replicas."""


class _Stream:
    def __init__(self) -> None:
        self.entries: dict[int, tuple[bytes, bytes]] = {}
        self.first = self.last = 0
        self.has_commits = False
        self.tokens: dict[str, int] = {}

    def is_there(self, entry: StreamEntry, by: Publisher) -> bool:
        if self.last == entry.sequence and self.entries.get(self.last, (None,))[0] == entry.payload:
            return True
        if by.name and (given := self.tokens.get(by.name, 0)) != by.token:
            if given > by.token:
                raise PublisherSupersededError(f"publisher {by.name!r} began again, with token {given}")
            self.tokens[by.name] = by.token
        return False

    def add(self, entry: StreamEntry, rows: bytes) -> None:
        self.entries[entry.sequence] = entry.payload, rows
        self.first, self.last = self.first or entry.sequence, entry.sequence


class Keyspace:
    """Everything that one server has. `now` of each call is the server's clock."""

    def __init__(self) -> None:
        self.keys: dict[str, Entry] = {}
        self.revision = 0
        self.announcements: dict[str, tuple[float, bytes]] = {}
        self.locks: dict[str, tuple[float, str]] = {}
        self.streams: dict[str, _Stream] = {}

    def get(self, now: float, key: str) -> Entry | None:
        return self.keys.get(key)

    def entries(self, now: float, prefix: str) -> dict[str, Entry]:
        return {key: self.keys[key] for key in sorted(self.keys) if key.startswith(prefix)}

    def put(self, now: float, key: str, value: bytes, expected_revision: int) -> int:
        self._check(key, expected_revision)
        self.revision = max(self.revision + 1, expected_revision + 1, int(now * 1e6))
        self.keys[key] = Entry(value, self.revision)
        return self.revision

    def delete(self, now: float, key: str, expected_revision: int) -> None:
        if key in self.keys:
            self._check(key, expected_revision)
            del self.keys[key]

    def _check(self, key: str, expected: int) -> None:
        there = self.keys[key].revision if key in self.keys else 0
        if there != expected:
            raise RegistryConflictError(f"{key} has revision {there}, not {expected}")

    def announce(self, now: float, key: str, value: bytes, ttl_s: float) -> None:
        self.announcements[key] = now + ttl_s, value

    def withdraw(self, now: float, key: str) -> None:
        self.announcements.pop(key, None)

    def announced(self, now: float, prefix: str) -> dict[str, bytes]:
        there = sorted(self.announcements.items())
        return {key: value for key, (until, value) in there if key.startswith(prefix) and until > now}

    def acquire(self, now: float, key: str, owner: str, ttl_s: float) -> bool:
        if is_free := self.holder(now, key) in (None, owner):
            self.locks[key] = now + ttl_s, owner
        return is_free

    def release(self, now: float, key: str, owner: str) -> None:
        if self.holder(now, key) == owner:
            del self.locks[key]

    def holder(self, now: float, key: str) -> str | None:
        until, owner = self.locks.get(key, (now, ""))
        return owner if until > now else None

    def append(self, now: float, stream: str, sequence: int, payload: bytes, by: Publisher) -> None:
        there, entry = self._stream(stream), StreamEntry(sequence, payload)
        if there.is_there(entry, by):
            return
        if there.has_commits:
            raise StreamSequenceError(f"stream {stream} ends with {there.last}: format 1 is over")
        if there.last and sequence != there.last + 1:
            follows = f"{sequence} was to follow {sequence - 1}"
            raise StreamSequenceError(f"stream {stream} ends with {there.last}: {follows}")
        there.add(entry, b"")

    def commit(
        self, now: float, stream: str, entry: StreamEntry, rows: bytes, after: StreamEntry | None, by: Publisher
    ) -> None:
        there, expected = self._stream(stream), after or StreamEntry(0, b"")
        if there.is_there(entry, by):
            return
        last = there.entries.get(there.last, (b"",))[0]
        if there.last != expected.sequence or (expected.payload and last != expected.payload):
            follows = f"{entry.sequence} was to follow {expected.sequence}"
            raise StreamSequenceError(f"stream {stream} ends with {there.last}: {follows}")
        there.has_commits = True
        there.add(entry, rows)

    def next_token(self, now: float, stream: str, publisher: str) -> int:
        there = self._stream(stream)
        token = max(there.tokens.get("", 0) + 1, int(now * 1e6))
        there.tokens[""] = there.tokens[publisher] = token
        return token

    def read_rows(self, now: float, stream: str, ranges: Sequence[tuple[int, int, int]]) -> list[bytes]:
        entries = self._stream(stream).entries
        return [entries.get(sequence, (b"", b""))[1][begin:end] for sequence, begin, end in ranges]

    def read(self, now: float, stream: str, after: int, max_entries: int, max_bytes: int) -> list[StreamEntry]:
        entries, found, size = self._stream(stream).entries, list[StreamEntry](), 0
        for sequence in sorted(number for number in entries if number > after)[:max_entries]:
            payload = entries[sequence][0]
            size += len(payload)
            if found and size > max_bytes:
                break
            found.append(StreamEntry(sequence, payload))
        return found

    def bounds(self, now: float, stream: str) -> StreamBounds:
        there = self._stream(stream)
        return StreamBounds(there.first, there.last)

    def stream_size(self, now: float, stream: str) -> tuple[int, int]:
        entries = self._stream(stream).entries.values()
        return len(entries), sum(len(payload) + len(rows) for payload, rows in entries)

    def trim(self, now: float, stream: str, before: int) -> None:
        there = self._stream(stream)
        if there.last:
            there.first = max(there.first, min(before, there.last + 1))
            there.entries = {number: entry for number, entry in there.entries.items() if number >= there.first}

    def _stream(self, stream: str) -> _Stream:
        return self.streams.setdefault(stream, _Stream())


WRITES = frozenset(
    ("put", "delete", "announce", "withdraw", "acquire", "release", "append", "commit", "next_token", "trim")
)


class RegistryServer:
    """A server and its replica, which is `lag_s` behind. `on_write` is called after each write that took place."""

    def __init__(self, loop: SimulatedLoop, random: Random, on_write: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._loop, self._random, self._on_write = loop, random, on_write
        self.lag_s = 0.0
        self.is_up = self.is_synced = True
        self.primary, self.replica, self.term = Keyspace(), Keyspace(), 0
        self._log: list[tuple[str, tuple[Any, ...], float]] = []
        self._replicated = 0
        self._arrives_at = 0.0

    def now(self) -> float:
        """Return its clock."""
        return EPOCH_S + self._loop.now

    def do(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Do a call. Raises ConnectionError while it is down."""
        if not self.is_up:
            raise ConnectionRefusedError("the registry is down")
        answer = getattr(self.primary, name)(self.now(), *arguments)
        if name in WRITES:
            self._log.append((name, arguments, self.now()))
            at = self._arrives_at = max(self._arrives_at, self._loop.now + self._random.uniform(0.5, 1.5) * self.lag_s)
            self._loop.call_at(at, self._replicate, len(self._log), self.replica)
            self._on_write(name, arguments)
        return answer

    async def replicated(self) -> None:
        """Wait until the replica has all writes so far. Raises RegistryUnavailableError if it takes too long."""
        number = len(self._log)
        for _ in range(20):
            if self._replicated >= number:
                return
            await asyncio.sleep(WAIT_S / 20)
        raise RegistryUnavailableError("too few replicas have it")

    def _replicate(self, until: int, replica: Keyspace) -> None:
        if replica is not self.replica:
            return
        for name, arguments, now in self._log[self._replicated : until]:
            with contextlib.suppress(RegistryConflictError, StreamSequenceError, PublisherSupersededError):
                getattr(replica, name)(now, *arguments)
        self._replicated, self.is_synced = max(self._replicated, until), True

    def record(self, key: str) -> bytes | None:
        """Return a record."""
        entry = self.primary.keys.get(key)
        return None if entry is None else entry.value

    def stream(self, name: str) -> dict[int, tuple[bytes, bytes]]:
        """Return a stream: payloads and rows by number."""
        there = self.primary.streams.get(name)
        return {} if there is None else there.entries

    def fail_over(self) -> int:
        """Go on with what the replica has; return how many writes are lost. A new replica copies everything."""
        if not self.is_synced:
            return 0  # no replica may take over yet
        lost, self.is_synced = len(self._log) - self._replicated, False
        self.primary, self.term = self.replica, self.term + 1
        self.replica = Keyspace()
        self._log, self._replicated = self._log[: self._replicated], 0
        self._loop.call_later(self.lag_s, self._replicate, len(self._log), self.replica)
        return lost


class RegistryClient:
    """A `Registry` over the network, for the process that makes it."""

    def __init__(self, server: RegistryServer, network: Network) -> None:
        self._server, self._network = server, network
        self.url = self.name = "simulated"

    async def _do(self, name: str, *arguments: Any) -> Any:
        process, server = PROCESS.get(), self._server
        source = "" if process is None else process.name
        try:
            return await self._network.call(source, SERVER, lambda: server.do(name, arguments))
        except ConnectionError as error:
            raise RegistryUnavailableError(f"registry {self.name}: {error}") from error

    async def append(self, stream: str, sequence: int, payload: bytes, by: Publisher = ANYBODY) -> None:
        interface.check_entry(stream, StreamEntry(sequence, payload))
        await self._acknowledged(by, "append", stream, sequence, payload, by)

    async def commit(
        self, stream: str, entry: StreamEntry, rows: bytes, after: StreamEntry | None, by: Publisher = ANYBODY
    ) -> None:
        interface.check_entry(stream, entry, rows, after)
        await self._acknowledged(by, "commit", stream, entry, rows, after, by)

    async def _acknowledged(self, by: Publisher, name: str, *arguments: Any) -> None:
        term = self._server.term
        await self._do(name, *arguments)
        if by.min_replicas:
            await self._server.replicated()
            if self._server.term != term:
                raise RegistryUnavailableError("the connection was lost in a failover")

    async def read(
        self, stream: str, after: int, max_entries: int = 256, max_bytes: int = 16 << 20
    ) -> list[StreamEntry]:
        interface.check_stream(stream, max_entries=max_entries, max_bytes=max_bytes)
        return await self._do("read", stream, after, max_entries, max_bytes)

    async def max_stream_bytes(self) -> float:
        return 1e9

    async def close(self) -> None:
        pass


CALLS = """
get key, entries prefix, put key value expected_revision, delete key expected_revision, announce key value ttl_s,
withdraw key, announced prefix, acquire key owner ttl_s, release key owner, holder key, next_token stream publisher,
read_rows stream ranges, bounds stream, stream_size stream, trim stream before
"""
"""What clients ask as it is, and with what."""


def _method(name: str, fields: list[str]) -> Any:
    async def method(client: RegistryClient, *arguments: Any, **named: Any) -> Any:
        given = dict(zip(fields, (*arguments, *named.values()), strict=True))
        checked = {field: value for field, value in given.items() if field in ("value", "owner", "ttl_s")}
        interface.check_key(given[fields[0]], fields[0], **checked)
        interface.check_publisher(given.get("publisher", ""))
        return await client._do(name, *given.values())

    return method


for _name, *_fields in map(str.split, CALLS.split(",")):
    setattr(RegistryClient, _name, _method(_name, _fields))


class CrashableFiles(DiskFiles):
    """Files of a machine in memory, and what of them a loss of power keeps: all that was synced, and some of the rest.

    `fails` is called before each access, and may raise OSError.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._contents: dict[str, bytes] = {}
        self._synced: dict[str, bytes] = {}
        self.fails: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def locked(self, folder: Path, timeout_s: float) -> Iterator[None]:
        yield

    def read(self, path: Path) -> bytes | None:
        self.fails()
        return self._contents.get(str(path))

    def write(self, path: Path, content: bytes, work: Path, *, durable: bool) -> None:
        self.fails()
        self._contents[str(path)] = content
        if durable:
            self._synced[str(path)] = content

    def remove(self, path: Path) -> None:
        self._contents.pop(str(path), None)

    def sync(self, folder: Path) -> None:
        below = f"{folder}/"
        for path in [path for path in self._synced if path.startswith(below) and path not in self._contents]:
            del self._synced[path]

    def names(self, folder: Path) -> list[str]:
        return sorted({path.partition("/")[0] for path in self.sizes(folder)})

    def sizes(self, folder: Path) -> dict[str, int]:
        self.fails()
        below = f"{folder}/"
        found = sorted(path for path in self._contents if path.startswith(below))
        return {path[len(below) :]: len(self._contents[path]) for path in found}

    def record(self, key: str) -> bytes | None:
        """Return a record of the registry in these files."""
        content = self._contents.get(f"/registry/keys/{key}=")
        return None if content is None else content.partition(b"\n")[2]

    def stream(self, name: str) -> dict[int, tuple[bytes, bytes]]:
        """Return a stream of the registry in these files: payloads and rows by number."""
        folder = f"/registry/streams/{name}=/"
        paths = [path for path in self._contents if path.startswith(folder) and Path(path).name.isdigit()]
        return {int(Path(path).name): (self._contents[path], self._contents.get(f"{path}.rows", b"")) for path in paths}

    def lose_power(self) -> None:
        """Keep what is on the disk."""
        unsynced = sorted(set(self._contents) - set(self._synced))
        kept = {path: self._contents[path] for path in unsynced if self._random.random() < 0.5}
        self._contents = {**kept, **self._synced}
        self._synced = dict(self._contents)


class FilesRegistry(DirectoryRegistry):
    """The registry in a folder, over `CrashableFiles`. `on_write` is called after each call that may have written."""

    def __init__(self, files: CrashableFiles, clock: Callable[[], float], loop: SimulatedLoop, on_write: Any) -> None:
        super().__init__("/registry", clock=clock, files=files)
        self._loop, self._on_write, self._number = loop, on_write, itertools.count()

    async def _call(self, work: Callable[[], T]) -> T:
        await asyncio.sleep(self._loop.work_s())
        try:
            answer = work()
        except OSError as error:
            raise RegistryUnavailableError(f"registry {self.name}: {error}") from error
        name = work.func.__name__  # type: ignore[attr-defined]
        if name in WRITES:
            self._on_write(name, work.args[1:])  # type: ignore[attr-defined]
        return answer
