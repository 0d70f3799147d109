"""A store at a URL: versions are fetched into a local cache and read from there; new ones are put up whole.

What lies at the URL is laid out as in a folder. There is no rename, so the manifest is what makes a version exist: it
is written last, and only if there is none. Who writes a version claims it first, so that files of two never mix:

```
<url>/<model>/<version>/tables/...     files of a snapshot
<url>/<model>/<version>/manifest.json  written last
<url>/<model>/.export-<version>        who writes that version now: the identity of the snapshot
<url>/<model>/.trash-<version>         out of sight, to be deleted
```

Files are fetched into the cache in parts, several at a time, each complete file checked before it is in place. A
journal alongside says in its first line which object is fetched (ETag, size), then for each part that is written its
checksum. A fetch that was killed reads what is on the disk against it and fetches only the rest. The process that
fetches a file holds it (flock); others fetch other files, or wait.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

import xxhash

from loader.errors import (
    ExportError,
    SnapshotCorruptError,
    SnapshotError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StoreCacheError,
)
from loader.progress import Progress, all_or_first_error, ended, no_progress
from loader.snapshot.manifest import (
    CHECKSUM_NAME,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    check_manifest_checksum,
    check_relative_path,
    parse_manifest,
    read_manifest,
    snapshot_file,
)
from loader.snapshot.store import (
    MODEL_NAME,
    TRASH_PREFIX,
    WORK_FOLDER_PREFIX,
    HeldSnapshot,
    Store,
    StoredFile,
    fsync_path,
    hash_file,
    manifest_texts_of,
    version_numbers,
)
from loader.stores.cache import IDENTITY, CacheEntry, SnapshotCache
from loader.stores.objects import ObjectFolder, ObjectInfo
from loader.stores.place import FETCHING, StoreUrl

PART_BYTES: Final = 8 << 20
"""Of one request. It must come within a third of the store's time limit."""
PARTS_AT_A_TIME: Final = 8
_LOOK_S: Final = 0.1
_MAX_SMALL_BYTES: Final = 4096
_OTHERS_TRASH_S: Final = 3600.0
"""What a run has set aside for longer than that, it did not live to delete."""
_log = logging.getLogger(__name__)


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


class RemoteStore(Store):
    """Finds, fetches and writes snapshots at a URL. Each call asks the store; thread-safe, and blocks.

    Besides what `Store` raises, every call raises StoreUnavailableError or StoreAccessError, as `ObjectFolder`.
    """

    def __init__(self, place: StoreUrl) -> None:
        """Open a store; nothing is asked yet. Raises StoreUrlError if what the URL needs is not set."""
        super().__init__(place.cache)
        self.name = place.url
        self.objects = ObjectFolder(place.url, place.timeout_s)
        self._aside: dict[str, set[int]] = {}
        self.cache = SnapshotCache(place.cache, place.cache_bytes)

    def check_exists(self) -> None:
        """Raise SnapshotNotFoundError if there is no version of any model."""
        if not self.models():
            raise SnapshotNotFoundError(f"store {self.name} has no model{self._told_unfinished()}")

    def unfinished(self) -> list[tuple[str, int]]:
        """As `Store.unfinished`: the versions that are claimed."""
        return [
            (model, version)
            for model in self.objects.folders()
            if MODEL_NAME.fullmatch(model)
            for version in version_numbers(self._listed(model), WORK_FOLDER_PREFIX)
        ]

    def models(self) -> list[str]:
        """As `Store.models`."""
        return [name for name in self.objects.folders() if MODEL_NAME.fullmatch(name) and self.versions(name)]

    def versions(self, model: str) -> list[int]:
        """As `Store.versions`: those with a manifest."""
        if not MODEL_NAME.fullmatch(model):
            return []
        paths = self._listed(model)
        found = [one.removesuffix(f"/{MANIFEST_NAME}") for one in paths if one.endswith(f"/{MANIFEST_NAME}")]
        return sorted(set(version_numbers(found)) - set(version_numbers(paths, TRASH_PREFIX)))

    def manifest(self, model: str, version: int) -> tuple[Manifest, str] | None:
        """As `Store.manifest`."""
        texts = self._manifest_texts(model, version)
        if texts is None:
            return None
        where, content = f"{self.name}/{model}/{version}/{MANIFEST_NAME}", texts[MANIFEST_NAME]
        return parse_manifest(where, content), hashlib.sha256(content).hexdigest()

    def hold(
        self,
        model: str,
        version: int | None = None,
        *,
        identity: str | None = None,
        with_rows: bool = True,
        verify: bool = True,
        progress: Progress = no_progress,
    ) -> HeldSnapshot:
        """As `Store.hold`: fetches what is missing in the cache. Every file was checked against the manifest.

        With an `identity` of which all is in the cache, the store is not asked. Not to be called on an event loop.

        Raises also StoreCacheError: the cache has no room, or its disk fails.
        """
        if version is not None and not MODEL_NAME.fullmatch(model):
            raise self.no_version(model, version)
        if version is not None and identity is not None:
            held = self._held_already(model, version, identity, with_rows=with_rows, verify=verify, progress=progress)
            if held is not None:
                return held
        version = self.latest(model) if version is None else version
        texts = self._manifest_texts(model, version)
        if texts is None:
            raise self.no_version(model, version)
        where, content = f"{self.name}/{model}/{version}", texts[MANIFEST_NAME]
        manifest, found = parse_manifest(f"{where}/{MANIFEST_NAME}", content), hashlib.sha256(content).hexdigest()
        if identity not in (None, found):
            raise SnapshotCorruptError(
                f"{where}: identity (SHA-256 of its manifest) is {found}, published was {identity}"
            )
        entries = _files(where, manifest, with_rows=with_rows)
        objects = self._objects_of(model, version, entries)
        tick = partial(progress, "waiting for the cache", 0, 1)
        entry = self.cache.take(found, model, version, texts, entries, tick)
        try:
            check_manifest_checksum(entry.folder, found)
            if verify:
                entry.check(entries, progress)
            missing = entry.missing(entries)
            if missing:
                size = sum(one.size_bytes for one in missing)
                _log.info("fetching %d files of %s, %d bytes, into %s", len(missing), where, size, entry.folder)
            fetch(self.objects, entry, missing, objects, progress)
            for one in entries:
                snapshot_file(entry.folder, one.path)
        except BaseException:
            entry.close()
            raise
        return HeldSnapshot(entry.folder, entry.close, is_checked=verify)

    def put(self, source: Path, identity: str, progress: Progress = no_progress) -> tuple[str, bool]:
        """As `Store.put`: files first, the manifest last. Who writes another snapshot of that version is refused."""
        texts, manifest = manifest_texts_of(source, identity), read_manifest(source)[0]
        model, version = manifest.spec.model, manifest.version
        where, claim = f"{model}/{version}", f"{model}/{WORK_FOLDER_PREFIX}{version}"
        if version in self._set_aside_versions(model):
            raise ExportError(
                f"{self.name}/{where} is being deleted; if whoever does so died, `shardrank publish --retain` of "
                "another version ends that an hour later"
            )
        if self._is_here(model, version, identity, source):
            self._objects_of(model, version, manifest.files())
            return f"{self.name}/{where}", False
        is_first = self.objects.create(claim, identity.encode())
        if not is_first:
            other = self.objects.read(claim, _MAX_SMALL_BYTES)
            if other is not None and other != identity.encode():
                raise ExportError(
                    f"{self.name}/{claim}: a snapshot of identity {other.decode(errors='replace')} is being published "
                    f"as that version; if nobody does that any more, delete this object"
                )
        # Another one may have been finished between the look and the claim.
        if self._is_here(model, version, identity, source):
            self.objects.delete([claim])
            return f"{self.name}/{where}", False
        # Under this claim only this snapshot's files were put up, each as a whole. What was there before is anybody's.
        there = {} if is_first else {one.path: one.size_bytes for one in self.objects.listed(where)}
        done, total = 0, sum(one.size_bytes for one in manifest.files())
        for one in manifest.files():
            if there.get(f"{where}/{one.path}") != one.size_bytes:
                self.objects.write(f"{where}/{one.path}", snapshot_file(source, one.path))
            done += one.size_bytes
            progress("putting into the store", done, total)
        self.objects.write(f"{where}/{CHECKSUM_NAME}", texts[CHECKSUM_NAME].encode())
        # If an answer was lost, it is there already, and is ours.
        self.objects.create(f"{where}/{MANIFEST_NAME}", texts[MANIFEST_NAME].encode())
        if not self._is_here(model, version, identity, source):
            raise ExportError(f"{self.name}/{where}: deleted while it was put up")
        self.objects.delete([claim])
        return f"{self.name}/{where}", True

    def set_aside(self, model: str, version: int) -> None:
        """As `Store.set_aside`."""
        self.objects.create(f"{model}/{TRASH_PREFIX}{version}", b"")
        self._aside.setdefault(model, set()).add(version)

    def bring_back(self, model: str, version: int) -> None:
        """As `Store.bring_back`."""
        self.objects.delete([f"{model}/{TRASH_PREFIX}{version}"])
        self._aside.get(model, set()).discard(version)

    @contextmanager
    def retaining(self, model: str) -> Iterator[None]:
        """As `Store.retaining`, without a lock: see `delete_set_aside`."""
        yield

    def delete_set_aside(self, model: str, staying: Collection[int]) -> None:
        """As `Store.delete_set_aside`. What another process has set aside of late is left to it."""
        found = self.objects.listed(model)
        old = [one.path.removeprefix(f"{model}/") for one in found if one.age_s >= _OTHERS_TRASH_S]
        for version in sorted({*version_numbers(old, TRASH_PREFIX), *self._aside.pop(model, set())}):
            if version in staying:
                self.bring_back(model, version)
                continue
            # The manifest goes first: without it the rest is no version.
            self.objects.delete([f"{model}/{version}/{MANIFEST_NAME}"])
            if paths := [one.path for one in self.objects.listed(f"{model}/{version}")]:
                self.objects.delete(paths)
            self.objects.delete([f"{model}/{TRASH_PREFIX}{version}"])

    def read_file(self, path: str, max_bytes: int) -> bytes:
        """As `Store.read_file`."""
        content = self.objects.read(path, max_bytes)
        if content is None:
            missing = FileNotFoundError(f"{self.name}/{path}")
            raise SnapshotCorruptError(f"{self.name}/{path}: missing") from missing
        return content

    def write_file(self, path: str, content: bytes) -> None:
        """As `Store.write_file`."""
        self.objects.write(path, content)

    def list_files(self, folder: str) -> list[StoredFile]:
        """As `Store.list_files`."""
        return [StoredFile(one.path, one.age_s) for one in self.objects.listed(folder)]

    def delete_files(self, paths: Sequence[str]) -> None:
        """As `Store.delete_files`."""
        if paths:
            self.objects.delete(paths)

    def _set_aside_versions(self, model: str) -> list[int]:
        return version_numbers(self._listed(model), TRASH_PREFIX) if MODEL_NAME.fullmatch(model) else []

    def _listed(self, model: str) -> list[str]:
        return [one.path.removeprefix(f"{model}/") for one in self.objects.listed(model)]

    def _manifest_texts(self, model: str, version: int) -> dict[str, bytes] | None:
        where = f"{model}/{version}"
        manifest = self.objects.read(f"{where}/{MANIFEST_NAME}", MAX_MANIFEST_BYTES)
        if manifest is None:
            return None
        checksum = self.objects.read(f"{where}/{CHECKSUM_NAME}", _MAX_SMALL_BYTES)
        if checksum is None:
            raise SnapshotCorruptError(f"{self.name}/{where}/{CHECKSUM_NAME}: missing")
        return {MANIFEST_NAME: manifest, CHECKSUM_NAME: checksum}

    def _objects_of(self, model: str, version: int, entries: Sequence[FileEntry]) -> dict[str, ObjectInfo]:
        """Return the object of each file. Raises SnapshotCorruptError for one that is missing or of another size."""
        where = f"{model}/{version}/"
        listed = {one.path.removeprefix(where): one for one in self.objects.listed(where.rstrip("/"))}
        for one in entries:
            if one.path not in listed:
                raise SnapshotCorruptError(f"{self.name}/{where}{one.path}: missing")
            if (size := listed[one.path].size_bytes) != one.size_bytes:
                raise SnapshotCorruptError(
                    f"{self.name}/{where}{one.path}: {size} bytes, the manifest says {one.size_bytes}"
                )
        return listed

    def _held_already(
        self, model: str, version: int, identity: str, *, with_rows: bool, verify: bool, progress: Progress
    ) -> HeldSnapshot | None:
        """Return a version that is in the cache in full; None if it is not."""
        if (
            not IDENTITY.fullmatch(identity)
            or not (self.cache.folder / identity / model / str(version) / MANIFEST_NAME).exists()
        ):
            return None
        entry = self.cache.take(identity, model, version, {}, [], partial(progress, "waiting for the cache", 0, 1))
        try:
            if _is_intact(entry.folder, identity):
                manifest, _ = read_manifest(entry.folder)
                entries = _files(str(entry.folder), manifest, with_rows=with_rows)
                if verify:
                    entry.check(entries, progress)
                if not entry.missing(entries):
                    return HeldSnapshot(entry.folder, entry.close, is_checked=verify)
        except BaseException:
            entry.close()
            raise
        entry.close()
        return None

    def _is_here(self, model: str, version: int, identity: str, source: Path) -> bool:
        """Tell whether the store has that snapshot. Raises SnapshotExistsError if it has another one."""
        there = self.objects.read(f"{model}/{version}/{MANIFEST_NAME}", MAX_MANIFEST_BYTES)
        if there is None:
            return False
        if (found := hashlib.sha256(there).hexdigest()) != identity:
            raise SnapshotExistsError(
                f"{self.name}/{model}/{version} has identity {found}, {source} has {identity}: a version is immutable"
            )
        return True


def _is_intact(folder: Path, identity: str) -> bool:
    """Tell whether manifest and checksum are what was fetched, and were not dropped a moment ago."""
    try:
        check_manifest_checksum(folder, identity)
        return hash_file(folder / MANIFEST_NAME) == identity
    except (OSError, SnapshotError):
        return False


def _files(where: str, manifest: Manifest, *, with_rows: bool) -> list[FileEntry]:
    for one in manifest.files():
        check_relative_path(where, one.path)
    rows = {one.path for files in manifest.tables for one in files.rows}
    # Before anything is written at such a path.
    return [one for one in manifest.files() if with_rows or one.path not in rows]
