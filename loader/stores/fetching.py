"""Fetch a version's files into the cache: in parts, several at a time, each whole file checked before it is in place.

Beside a file that is being fetched lies a journal: its first line says which object (ETag, size), each further one a
part that is written and its checksum. A fetch that was killed reads what is on the disk against it and fetches only
the rest. A file is held (flock) by who fetches it; others fetch other files, or wait.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash

from loader.errors import SnapshotCorruptError, StoreCacheError
from loader.progress import Progress, all_or_first_error, ended
from loader.snapshot.manifest import FileEntry
from loader.snapshot.store import fsync_path, hash_file
from loader.stores.cache import CacheEntry
from loader.stores.objects import ObjectFolder, ObjectInfo
from loader.stores.place import FETCHING

PART_BYTES: Final = 8 << 20
"""Of one request. It must come within a third of the store's time limit."""
PARTS_AT_A_TIME: Final = 8
_LOOK_S: Final = 0.1


class PartFile:
    """A file that is being fetched. Only who has its lock may use it: see `PartFile.open`."""

    def __init__(self, path: Path, descriptor: int, info: ObjectInfo) -> None:
        self.path, self.info, self._descriptor = path, info, descriptor
        self._journal_path = path.with_name(f"{path.name}.journal")
        self.done = self._recover()
        self._journal = self._journal_path.open("a", encoding="utf-8")

    @classmethod
    def open(cls, path: Path, info: ObjectInfo) -> PartFile | None:
        """Take the file's lock and what is there of it; None while another process has it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it may have put it in its place since we opened it.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                os.truncate(descriptor, info.size_bytes)
                return cls(path, descriptor, info)
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    @property
    def missing(self) -> list[int]:
        """The numbers of the parts that are to be fetched."""
        count = -(-self.info.size_bytes // PART_BYTES)
        return [number for number in range(count) if number not in self.done]

    @property
    def done_bytes(self) -> int:
        """Bytes of the parts that are here."""
        return sum(end - begin for begin, end in map(self.bounds, self.done))

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the bytes [begin, end) of a part."""
        return number * PART_BYTES, min((number + 1) * PART_BYTES, self.info.size_bytes)

    def write(self, number: int, content: memoryview) -> None:
        """Put a part in its place, then on record."""
        begin, view = number * PART_BYTES, content
        while view:
            written = os.pwrite(self._descriptor, view, begin)
            begin, view = begin + written, view[written:]
        self._journal.write(f"{json.dumps([number, xxhash.xxh3_128_hexdigest(content)])}\n")
        self._journal.flush()
        self.done.add(number)

    def finish(self, target: Path, entry: FileEntry) -> None:
        """Check the whole file and put it in its place. Raises SnapshotCorruptError, and forgets what is here."""
        if (found := hash_file(self.path)) != entry.sha256:
            self.drop()
            where = f"{target}: fetched from {self.info.path}"
            raise SnapshotCorruptError(f"{where}: SHA-256 is {found}, the manifest says {entry.sha256}")
        os.fsync(self._descriptor)
        target.parent.mkdir(parents=True, exist_ok=True)
        self.path.rename(target)
        fsync_path(target.parent)
        self._journal_path.unlink(missing_ok=True)

    def drop(self) -> None:
        """Forget what is here."""
        self._journal_path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let others have it."""
        self._journal.close()
        os.close(self._descriptor)

    def _recover(self) -> set[int]:
        """Return the parts that are on the disk as the journal says; begin a new one if it is of another object."""
        head = {"etag": self.info.etag, "size_bytes": self.info.size_bytes, "part_bytes": PART_BYTES}
        lines: list[str] = []
        with suppress(FileNotFoundError, UnicodeDecodeError):
            lines = self._journal_path.read_text(encoding="utf-8").split("\n")
        stated: dict[int, str] = {}
        if lines and lines[0] == json.dumps(head):
            with suppress(ValueError, TypeError):  # a damaged line; what follows is fetched again
                for line in lines[1:-1]:  # what follows the last newline is empty, or was not written to its end
                    number, checksum = json.loads(line)
                    stated[int(number)] = str(checksum)
        count = -(-self.info.size_bytes // PART_BYTES)
        done = {number for number, checksum in stated.items() if number < count and self._is(number, checksum)}
        kept = "".join(f"{json.dumps([number, stated[number]])}\n" for number in sorted(done))
        self._journal_path.write_text(f"{json.dumps(head)}\n{kept}", encoding="utf-8")
        return done

    def _is(self, number: int, checksum: str) -> bool:
        begin, end = self.bounds(number)
        return xxhash.xxh3_128_hexdigest(os.pread(self._descriptor, end - begin, begin)) == checksum


class _Fetch:
    """One run of `fetch`, in an event loop of its own."""

    def __init__(
        self, objects: ObjectFolder, place: CacheEntry, found: Mapping[str, ObjectInfo], progress: Progress
    ) -> None:
        self._objects, self._place, self._found, self._progress = objects, place, found, progress
        self._free = asyncio.Semaphore(PARTS_AT_A_TIME)
        self._done = self._total = 0

    async def run(self, entries: Sequence[FileEntry]) -> None:
        self._total = sum(one.size_bytes for one in entries)
        files = iter(entries)
        # As many files as parts at a time: that is enough for small ones, and few stay begun when this is killed.
        tasks = [asyncio.ensure_future(self._files(files)) for _ in range(min(PARTS_AT_A_TIME, len(entries)))]
        await all_or_first_error([*tasks, self._tick(tasks)])

    async def _tick(self, others: Sequence[asyncio.Future[None]]) -> None:
        while not all(one.done() for one in others):
            self._told(0)
            await asyncio.wait(others, timeout=_LOOK_S)

    def _told(self, count: int) -> None:
        self._done += count
        self._progress(FETCHING, self._done, self._total)

    async def _files(self, files: Iterator[FileEntry]) -> None:
        for entry in files:
            await self._file(entry)

    async def _file(self, entry: FileEntry) -> None:
        path, info = self._place.part_path(entry), self._found[entry.path]
        target = self._place.folder / entry.path
        while self._place.missing([entry]):
            part = PartFile.open(path, info)
            if part is None:
                await asyncio.sleep(_LOOK_S)
                continue
            try:
                if not self._place.missing([entry]):
                    part.drop()
                    break
                self._told(part.done_bytes)
                await self._parts(part)
                finishing = asyncio.ensure_future(asyncio.to_thread(part.finish, target, entry))
                try:
                    await asyncio.shield(finishing)
                finally:
                    await ended(finishing)
            finally:
                part.close()
            return
        self._told(entry.size_bytes)

    async def _parts(self, part: PartFile) -> None:
        async def one(number: int) -> None:
            begin, end = part.bounds(number)
            async with self._free:
                content = await self._objects.read_range(part.info.path, begin, end, part.info.etag)
            part.write(number, content)
            self._told(end - begin)

        # It ends them all: nobody writes to a file that is let go.
        await all_or_first_error([one(number) for number in part.missing])


def fetch(
    objects: ObjectFolder,
    place: CacheEntry,
    entries: Sequence[FileEntry],
    found: Mapping[str, ObjectInfo],
    progress: Progress,
) -> None:
    """Fetch files that are missing in the cache. Blocks; not to be called where an event loop runs.

    Args:
        objects: where they are.
        place: where they go; it has room for them.
        entries: the files, with the SHA-256 that each must have.
        found: by path in the snapshot, the object.
        progress: told bytes, from this thread; what it raises ends the fetch, which goes on when it is run again.

    Raises:
        SnapshotCorruptError: a file is not what the manifest says, or changed meanwhile. It is fetched anew next time.
        StoreUnavailableError, StoreAccessError: as `ObjectFolder`.
        StoreCacheError: the disk is full, or fails.
    """
    if not entries:
        return
    try:
        asyncio.run(_Fetch(objects, place, found, progress).run(entries))
    except OSError as error:
        raise StoreCacheError(f"store cache {place.root}: {error}") from error
