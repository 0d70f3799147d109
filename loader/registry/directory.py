r"""Keep a registry in a directory that the processes of one machine share.

Writers lock, readers don't; a file is replaced by one rename. A process may be killed at any point: the operating
system takes its locks back, and what it wrote is there in whole or not at all. What has to last is on disk before a
method returns. Not for network file systems: locks and renames must be those of one machine.

```
keys/<key>=                         "<revision>\n", then the value; durable
keys/~revision                      the last revision that was given
announced/<key>=                    "<deadline> <ttl_s>\n", then the value
locks/<key>=                        "<deadline> <ttl_s>\n", then the owner
streams/<name>=/ends                "<first> <last>", durable; written before entries are dropped
streams/<name>=/head                the same of a stream with commits, whose `ends` keep out releases that know none
streams/<name>=/token               "<last>", of all publishers; token-<publisher>, of one with a name
streams/<name>=/<block>/<sequence>  one entry's payload; block = sequence // 256, both padded to 20 digits
streams/<name>=/<block>/<sequence>.rows  what lies beside it; durable before the entry is
```

A writer holds the lock of its area, so there is one temporary file per area: what a killed writer leaves there is
overwritten by the next one. A stream's entry is durable before it gets its name; the names say where the stream ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from loader.errors import (
    PublisherSupersededError,
    RegistryConflictError,
    RegistryRecordError,
    RegistryUnavailableError,
    StreamSequenceError,
)
from loader.registry import registry
from loader.registry.registry import MAX_SEQUENCE, Entry, Publisher, StreamBounds, StreamEntry, check_key, check_stream
from loader.snapshot.store import fsync_path, make_folders, replace_file, try_lock

_SUFFIX: Final = "="
"""Ends the name of a key's file. No key has this character, so "a" and "a/b" can both be keys."""
MAX_STREAM_BYTES: Final = 4 << 30
"""Of a stream, unless its publisher says otherwise."""
_ENTRIES_PER_BLOCK: Final = 256

_P = ParamSpec("_P")
_T = TypeVar("_T")


class DiskFiles:
    """The files of a registry, in a file system."""

    @contextlib.contextmanager
    def locked(self, folder: Path, timeout_s: float) -> Iterator[None]:
        """Keep other threads and processes from writing in a folder, which is made. Ends with the process."""
        make_folders(folder)
        with (folder / "~lock").open("a") as lock:
            # Not a wait in the kernel: the process with the lock may be stopped, and such a wait could not be given up.
            deadline, pause_s = time.monotonic() + timeout_s, 0.0005
            while not try_lock(lock):
                if time.monotonic() >= deadline:
                    raise RegistryUnavailableError(
                        f"registry {folder}: another process has held its lock for {timeout_s:g} s"
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.01)
            yield

    def read(self, path: Path) -> bytes | None:
        """Return a file's content, or None."""
        with contextlib.suppress(FileNotFoundError):
            return path.read_bytes()
        return None

    def write(self, path: Path, content: bytes, work: Path, *, durable: bool) -> None:
        """Put a file in place at once, by way of `work`."""
        replace_file(path, content, work, durable=durable)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder without files, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            path.rmdir() if path.is_dir() else path.unlink()

    def sync(self, folder: Path) -> None:
        """Make what was removed from a folder stay so after a loss of power."""
        if folder.is_dir():
            fsync_path(folder)

    def names(self, folder: Path) -> list[str]:
        """Return the names in a folder; none if there is no such folder."""
        with contextlib.suppress(FileNotFoundError):
            return os.listdir(folder)
        return []

    def sizes(self, folder: Path) -> dict[str, int]:
        """Return the bytes of all files below a folder, by their paths there."""

        def on_error(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        sizes = {}
        for at, _, names in os.walk(folder, onerror=on_error):
            for file in (os.path.join(at, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    sizes[os.path.relpath(file, folder)] = os.stat(file).st_size
        return sizes


class _Area:
    """A folder whose files are changed by one writer at a time. Made when it is first written to."""

    def __init__(self, files: DiskFiles, path: Path, lock_timeout_s: float, *, durable: bool = True) -> None:
        self.files, self.path = files, path
        self._lock_timeout_s, self._durable = lock_timeout_s, durable

    def locked(self) -> contextlib.AbstractContextManager[None]:
        return self.files.locked(self.path, self._lock_timeout_s)

    def write(self, path: Path, content: bytes, *, durable: bool | None = None) -> None:
        """Put a file in place at once. Only while `locked`."""
        durable = self._durable if durable is None else durable
        self.files.write(path, content, self.path / "~writing", durable=durable)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there. Only while `locked`."""
        self.files.remove(path)
        if self._durable:
            self.files.sync(path.parent)

    def number(self, name: str) -> int:
        content = self.files.read(self.path / name) or b""
        return int(content) if content.isdigit() else 0

    def file_of(self, key: str) -> Path:
        return self.path / f"{key}{_SUFFIX}"

    def keys_below(self, prefix: str) -> list[str]:
        files = (file for file in self.files.sizes(self.path / prefix) if file.endswith(_SUFFIX))
        return sorted(f"{prefix}{file.removesuffix(_SUFFIX)}" for file in files)


class _Expiring(_Area):
    """Values with a deadline on the wall clock; none of them has to survive a loss of power."""

    def __init__(self, files: DiskFiles, path: Path, lock_timeout_s: float, clock: Callable[[], float]) -> None:
        super().__init__(files, path, lock_timeout_s, durable=False)
        self._clock = clock

    def get(self, key: str) -> bytes | None:
        head, _, value = (self.files.read(self.file_of(key)) or b"").partition(b"\n")
        try:
            deadline, ttl_s = map(float, head.split())
        except ValueError:
            # Not there, or cut off by a loss of power. Its writer is gone, or writes it again.
            return None
        # A deadline further off than it can be: the clock was set back. A writer that lives writes it again.
        return value if 0.0 < deadline - self._clock() <= 2 * ttl_s else None

    def put(self, key: str, value: bytes, ttl_s: float) -> None:
        self.write(self.file_of(key), b"%r %r\n%b" % (self._clock() + ttl_s, ttl_s, value))


class _Stream(_Area):
    def entry(self, sequence: int) -> Path:
        return self.path / f"{sequence // _ENTRIES_PER_BLOCK:020d}" / f"{sequence:020d}"

    def numbers(self, block: int | None = None) -> list[int]:
        """Return the numbers of the blocks, or of the entries in one of them, ascending."""
        folder = self.path if block is None else self.path / f"{block:020d}"
        return sorted(int(name) for name in self.files.names(folder) if name.isdigit())

    def rows(self, sequence: int) -> Path:
        return self.entry(sequence).with_suffix(".rows")

    def ends(self) -> StreamBounds:
        """Return the first number that is kept, and the last when that was written."""
        content = self.files.read(self.path / "head") or self.files.read(self.path / "ends")
        if content is None:
            return StreamBounds(0, 0)
        numbers = content.split()
        if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
            raise RegistryRecordError(f"{self.path / 'ends'}: {content[:40]!r}; two numbers are needed")
        return StreamBounds(int(numbers[0]), int(numbers[1]))

    def bounds(self) -> StreamBounds:
        ends, blocks = self.ends(), self.numbers()

        def kept(block: int) -> list[int]:
            return [sequence for sequence in self.numbers(block) if sequence >= ends.first]

        # A writer that was killed may leave a block without an entry, at either end.
        lowest = next(filter(None, map(kept, blocks)), None)
        highest = next(filter(None, map(kept, reversed(blocks))), None)
        if lowest is None or highest is None:
            return StreamBounds(ends.last + 1, ends.last) if ends.last else StreamBounds(0, 0)
        return StreamBounds(lowest[0], max(highest[-1], ends.last))

    def ends_with(self, last: int, entry: StreamEntry) -> bool:
        return last == entry.sequence and self.files.read(self.entry(last)) == entry.payload

    def drop_below(self, first: int) -> None:
        for block in self.numbers():
            if block > first // _ENTRIES_PER_BLOCK:
                return
            # An entry's rows go first. Rows without an entry, of a writer that was killed, go as well.
            folder = self.path / f"{block:020d}"
            for name in sorted(self.files.names(folder), reverse=True):
                if int(name.removesuffix(".rows")) < first:
                    self.files.remove(folder / name)
            if block < first // _ENTRIES_PER_BLOCK:
                self.files.remove(folder)
        self.files.sync(self.path)


def _in_thread(
    work: Callable[Concatenate[DirectoryRegistry, _P], _T],
) -> Callable[Concatenate[DirectoryRegistry, _P], Coroutine[Any, Any, _T]]:
    """Make a coroutine of a method that waits for files: it runs in the registry's threads."""

    @functools.wraps(work)
    async def run(directory: DirectoryRegistry, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await directory._call(functools.partial(work, directory, *args, **kwargs))

    return run


class DirectoryRegistry:
    """A `Registry` in a directory. Between calls it holds no file open, so the directory may be emptied or replaced."""

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Callable[[], float] = time.time,
        lock_timeout_s: float = 5.0,
        files: DiskFiles | None = None,
    ) -> None:
        """Keep a registry at `path` of a local file system; the folder is made at the first write.

        `clock` returns seconds since the epoch, the same for all processes. A write that waits longer than
        `lock_timeout_s` for another process is a RegistryUnavailableError.
        """
        self.path = Path(path).absolute()
        self.url, self.name = self.path.as_uri(), str(self.path)
        self._clock = clock
        self._lock_timeout_s, self._files = lock_timeout_s, files or DiskFiles()
        self._keys = _Area(self._files, self.path / "keys", lock_timeout_s)
        self._announced = _Expiring(self._files, self.path / "announced", lock_timeout_s, clock)
        self._locks = _Expiring(self._files, self.path / "locks", lock_timeout_s, clock)
        # Its own threads: those of the event loop may all be busy with loads, and a heartbeat must not wait for these.
        self._threads: ThreadPoolExecutor | None = ThreadPoolExecutor(4, thread_name_prefix="registry")

    @_in_thread
    def get(self, key: str) -> Entry | None:
        return self._entry(check_key(key))

    @_in_thread
    def entries(self, prefix: str) -> dict[str, Entry]:
        entries = {key: self._entry(key) for key in self._keys.keys_below(check_key(prefix, "prefix"))}
        return {key: entry for key, entry in entries.items() if entry is not None}

    @_in_thread
    def put(self, key: str, value: bytes, expected_revision: int) -> int:
        check_key(key, value=value)
        with self._keys.locked():
            self._entry(key, expected_revision)
            # The clock's microseconds are above all that was ever given, also if the folder was emptied or set back.
            given = max(expected_revision, self._keys.number("~revision"))
            revision = max(given + 1, int(self._clock() * 1e6))
            # Not durable: if it is lost, the clock goes on.
            self._keys.write(self._keys.path / "~revision", b"%d" % revision, durable=False)
            self._keys.write(self._keys.file_of(key), b"%d\n%b" % (revision, value))
            return revision

    @_in_thread
    def delete(self, key: str, expected_revision: int) -> None:
        path = self._keys.file_of(check_key(key))
        with self._keys.locked():
            if self._entry(key) is not None:
                self._entry(key, expected_revision)
                self._keys.remove(path)

    @_in_thread
    def announce(self, key: str, value: bytes, ttl_s: float) -> None:
        check_key(key, value=value, ttl_s=ttl_s)
        with self._announced.locked():
            self._announced.put(key, value, ttl_s)

    @_in_thread
    def withdraw(self, key: str) -> None:
        path = self._announced.file_of(check_key(key))
        with self._announced.locked():
            self._announced.remove(path)

    @_in_thread
    def announced(self, prefix: str) -> dict[str, bytes]:
        """See `Registry.announced`. Files of what has expired are removed."""
        area = self._announced
        announced = {key: area.get(key) for key in area.keys_below(check_key(prefix, "prefix"))}
        if expired := [key for key, value in announced.items() if value is None]:
            with area.locked():
                for key in expired:
                    # It may have been announced again since it was read.
                    if area.get(key) is None:
                        area.remove(area.file_of(key))
        return {key: value for key, value in announced.items() if value is not None}

    @_in_thread
    def acquire(self, key: str, owner: str, ttl_s: float) -> bool:
        check_key(key, owner=owner, ttl_s=ttl_s)
        with self._locks.locked():
            if is_free := self._locks.get(key) in (None, owner.encode()):
                self._locks.put(key, owner.encode(), ttl_s)
            return is_free

    @_in_thread
    def release(self, key: str, owner: str) -> None:
        check_key(key, owner=owner)
        with self._locks.locked():
            if self._locks.get(key) == owner.encode():
                self._locks.remove(self._locks.file_of(key))

    @_in_thread
    def holder(self, key: str) -> str | None:
        owner = self._locks.get(check_key(key))
        return owner.decode() if owner is not None else None

    @_in_thread
    def append(self, stream: str, sequence: int, payload: bytes, by: Publisher = registry.ANYBODY) -> None:
        registry.check_entry(stream, entry := StreamEntry(sequence, payload))
        entries = self._stream(stream)
        with entries.locked():
            last = entries.bounds().last
            if self._is_there(entries, last, entry, by):
                return
            if self._files.read(entries.path / "head") is not None:
                raise StreamSequenceError(f"stream {stream} ends with {last}: format 1 is over")
            if last and sequence != last + 1:
                raise StreamSequenceError(f"stream {stream} ends with {last}: {sequence} was to follow {sequence - 1}")
            entries.write(entries.entry(sequence), payload)

    @_in_thread
    def commit(
        self, stream: str, entry: StreamEntry, rows: bytes, after: StreamEntry | None, by: Publisher = registry.ANYBODY
    ) -> None:
        registry.check_entry(stream, entry, rows, after)
        entries = self._stream(stream)
        with entries.locked():
            last, expected = entries.bounds().last, after or StreamEntry(0, b"")
            if self._is_there(entries, last, entry, by):
                return
            if last != expected.sequence or (expected.payload and not entries.ends_with(last, expected)):
                follows = f"{entry.sequence} was to follow {expected.sequence}"
                raise StreamSequenceError(f"stream {stream} ends with {last}: {follows}")
            if self._files.read(entries.path / "head") is None:
                entries.write(entries.path / "head", b"%d %d" % (entries.ends().first, last))
            if self._files.read(entries.path / "ends") != (closed := b"%d %d" % (MAX_SEQUENCE, MAX_SEQUENCE)):
                entries.write(entries.path / "ends", closed)
            entries.write(entries.rows(entry.sequence), rows)
            entries.write(entries.entry(entry.sequence), entry.payload)

    @_in_thread
    def next_token(self, stream: str, publisher: str) -> int:
        entries = self._stream(stream)
        names = {"token", f"token-{registry.check_publisher(publisher)}" if publisher else "token"}
        with entries.locked():
            # As high as the time: above all that were given before the folder was emptied.
            token = max(entries.number("token") + 1, int(self._clock() * 1e6))
            for name in names:
                entries.write(entries.path / name, b"%d" % token)
        return token

    @_in_thread
    def read_rows(self, stream: str, ranges: Sequence[tuple[int, int, int]]) -> list[bytes]:
        kept, sequences = self._stream(stream), {sequence for sequence, _, _ in ranges}
        contents = {sequence: self._files.read(kept.rows(sequence)) or b"" for sequence in sequences}
        return [contents[sequence][begin:end] for sequence, begin, end in ranges]

    @_in_thread
    def read(self, stream: str, after: int, max_entries: int = 256, max_bytes: int = 16 << 20) -> list[StreamEntry]:
        """See `Registry.read`. It needs no lock: what is trimmed meanwhile is the lowest entries."""
        kept = self._stream(check_stream(stream, max_entries=max_entries, max_bytes=max_bytes))
        after = max(after, kept.ends().first - 1)
        entries: list[StreamEntry] = []
        size = 0
        blocks = [block for block in kept.numbers() if block >= after // _ENTRIES_PER_BLOCK]
        for sequence in chain.from_iterable(map(kept.numbers, blocks)):
            payload = self._files.read(kept.entry(sequence)) if sequence > after else None
            size += len(payload or b"")
            if entries and (payload is None or size > max_bytes):
                break
            if payload is not None:
                entries.append(StreamEntry(sequence, payload))
            if len(entries) == max_entries:
                break
        return entries

    @_in_thread
    def bounds(self, stream: str) -> StreamBounds:
        entries = self._stream(stream)
        if not self._files.names(entries.path):
            return StreamBounds(0, 0)
        with entries.locked():
            return entries.bounds()

    @_in_thread
    def stream_size(self, stream: str) -> tuple[int, int]:
        """See `Registry.stream_size`. Entries that are trimmed meanwhile may count or not."""
        sizes = self._files.sizes(self._stream(stream).path)
        return sum(os.path.basename(file).isdigit() for file in sizes), sum(sizes.values())

    async def max_stream_bytes(self) -> float:
        return MAX_STREAM_BYTES

    @_in_thread
    def trim(self, stream: str, before: int) -> None:
        """See `Registry.trim`. It also drops the entries that an interrupted trim has left."""
        entries = self._stream(stream)
        if not self._files.names(entries.path):
            return
        with entries.locked():
            now = entries.bounds()
            if now.last == 0:
                return
            first = max(now.first, min(before, now.last + 1))
            path = entries.path / "ends" if self._files.read(entries.path / "head") is None else entries.path / "head"
            entries.write(path, b"%d %d" % (first, now.last))
            entries.drop_below(first)

    async def close(self) -> None:
        """End its threads, once what they do is done."""
        threads, self._threads = self._threads, None
        if threads is not None:
            await asyncio.to_thread(threads.shutdown)

    async def _call(self, work: Callable[[], _T]) -> _T:
        if self._threads is None:
            raise RegistryUnavailableError(f"registry {self.name} is closed")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except OSError as error:
            raise RegistryUnavailableError(f"registry {self.name}: {error}") from error

    def _entry(self, key: str, expected_revision: int | None = None) -> Entry | None:
        """Read a key. Raises RegistryConflictError if it has not the expected revision, 0 for no such key."""
        path = self._keys.file_of(key)
        content = self._files.read(path)
        revision, separator, value = (b"0\n" if content is None else content).partition(b"\n")
        if not separator or not revision.isdigit():
            raise RegistryRecordError(f"{path}: it does not begin with a line that holds a revision")
        if expected_revision not in (None, int(revision)):
            raise RegistryConflictError(f"{key} has revision {int(revision)}, not {expected_revision}")
        return None if content is None else Entry(value, int(revision))

    def _is_there(self, entries: _Stream, last: int, entry: StreamEntry, by: Publisher) -> bool:
        """Return whether an entry is the last one already. Raises for a publisher that must not, or can't, add it."""
        if by.min_replicas:
            raise RegistryRecordError(f"min_replicas {by.min_replicas}: registry {self.name} has none; only Redis has")
        if entries.ends_with(last, entry):
            return True
        if by.name and (given := entries.number(f"token-{by.name}")) != by.token:
            if given > by.token:
                superseded = f"began again, with token {given}; {by.token} is superseded"
                raise PublisherSupersededError(f"publisher {by.name!r} {superseded}")
            # A folder that was set back has an older one.
            entries.write(entries.path / f"token-{by.name}", b"%d" % by.token)
        return False

    def _stream(self, stream: str) -> _Stream:
        return _Stream(self._files, self.path / "streams" / f"{check_stream(stream)}{_SUFFIX}", self._lock_timeout_s)
