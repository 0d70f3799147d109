"""The folder that versions of stores at URLs are fetched into, bounded in bytes and shared by a machine's processes.

```
<cache>/lock                                      held (flock) while room is made
<cache>/<identity>/lock                           held, shared, by who uses the version; its time: the last use
<cache>/<identity>/<model>/<version>/             the snapshot: a file that is there was checked against the manifest
<cache>/<identity>/parts/                         files that are being fetched (`loader.stores.remote`)
```

The identity is the SHA-256 of the manifest, which has those of all other files: what lies under it was right when it
came, from whichever store, and a version that was replaced in its store is another one here. Locks end with their
processes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeAlias

import xxhash

from loader.errors import StoreCacheError
from loader.progress import Progress
from loader.snapshot.manifest import FileEntry
from loader.snapshot.store import fsync_path, hash_file, make_folders

IDENTITY = re.compile(r"[0-9a-f]{64}")
_LOOK_S = 0.05
_PARTS = "parts"

_log = logging.getLogger(__name__)

Tick: TypeAlias = Callable[[], None]
"""Called while something is waited for; raises to give up."""


@dataclass(slots=True)
class CacheEntry:
    """A version in the cache, which stays there until `close`."""

    root: Path
    folder: Path
    _lock: IO[str]
    _damaged: dict[str, os.stat_result] = field(default_factory=dict)

    def part_path(self, entry: FileEntry) -> Path:
        """Return where a file lies while it is fetched."""
        return self.root / _PARTS / xxhash.xxh3_128_hexdigest(entry.path.encode())

    def missing(self, entries: Sequence[FileEntry]) -> list[FileEntry]:
        """Return the files that are not here yet, or are those that `check` found damaged."""
        return [one for one in entries if not self._is_here(one)]

    def check(self, entries: Sequence[FileEntry], progress: Progress) -> None:
        """Find files that are no longer what they were when they were fetched: they are missing until replaced.

        They stay in their places until then, and are not counted in the bound: others may be about to open them, or
        replace them first.
        """
        here = [one for one in entries if self._is_here(one)]
        done, total = 0, sum(one.size_bytes for one in here)

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            progress("checking SHA-256", done, total)

        for one in here:
            path = self.folder / one.path
            # Looked at before: what takes its place from now on is another file.
            seen = path.stat()
            if hash_file(path, on_bytes) != one.sha256:
                _log.warning("%s is not what was fetched: it is fetched again", path)
                self._damaged[one.path] = seen

    def close(self) -> None:
        """Let it go. Idempotent."""
        if not self._lock.closed:
            with suppress(OSError):
                os.utime(self._lock.fileno())
            self._lock.close()

    def _is_here(self, entry: FileEntry) -> bool:
        try:
            found = (self.folder / entry.path).stat()
        except FileNotFoundError:
            return False
        damaged = self._damaged.get(entry.path)
        # Whoever replaced it has checked it.
        return found.st_size == entry.size_bytes and (damaged is None or not os.path.samestat(found, damaged))


class SnapshotCache:
    """Versions by their identity. Holds nothing open; every process of a machine may have one of the same folder."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes

    def take(
        self,
        identity: str,
        model: str,
        version: int,
        texts: Mapping[str, bytes],
        entries: Sequence[FileEntry],
        tick: Tick,
    ) -> CacheEntry:
        """Return a version's place, with room for these files of it; versions that nobody uses make it.

        Args:
            identity: of the snapshot.
            model: its name.
            version: its number.
            texts: small files that are written at once if they are not there: the manifest and its checksum.
            entries: files that are to be here.
            tick: called while other processes make room.

        Raises:
            StoreCacheError: there is no room, as what is used stays; or the folder can't be written.
        """
        root = self.folder / identity
        folder = root / model / str(version)
        try:
            make_folders(self.folder)
            with self._making_room(tick):
                folder.mkdir(parents=True, exist_ok=True)
                (root / _PARTS).mkdir(exist_ok=True)
                lock = _shared(root / "lock")
                try:
                    entry = CacheEntry(root, folder, lock)
                    os.utime(lock.fileno())
                    wanted = [one for one in entry.missing(entries) if not entry.part_path(one).exists()]
                    self._make_room(root, sum(one.size_bytes for one in wanted), f"{model} version {version}")
                    for name, content in texts.items():
                        _write(folder / name, content)
                    for one in wanted:
                        # From here on its bytes are counted, whoever else makes room.
                        with entry.part_path(one).open("wb") as file:
                            file.truncate(one.size_bytes)
                except BaseException:
                    lock.close()
                    raise
        except OSError as error:
            raise StoreCacheError(f"store cache {self.folder}: {error}") from error
        return entry

    @contextmanager
    def _making_room(self, tick: Tick) -> Iterator[None]:
        with (self.folder / "lock").open("w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    tick()
                    time.sleep(_LOOK_S)
            yield

    def _make_room(self, own: Path, needed_bytes: int, what: str) -> None:
        """Drop versions that nobody uses, the longest unused first. Raises StoreCacheError if it is too little."""
        if not needed_bytes:
            return
        others = [one for one in self.folder.iterdir() if IDENTITY.fullmatch(one.name) and one != own]
        sizes = {one: _tree_bytes(one) for one in others}
        held = _tree_bytes(own) + sum(sizes.values())
        for root in sorted(others, key=_used_at):
            if held + needed_bytes <= self.max_bytes:
                break
            if _drop(root):
                held -= sizes[root]
        if held + needed_bytes > self.max_bytes:
            raise StoreCacheError(
                f"store cache {self.folder}: {needed_bytes} bytes of {what} are needed, {held} bytes are in use, "
                f"and it may hold {self.max_bytes} (--store-cache-gb)"
            )


def _shared(path: Path) -> IO[str]:
    file = path.open("a")
    # Whoever drops a version holds the cache's lock, as we do: nobody has this one alone.
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def _drop(root: Path) -> bool:
    """Delete a version unless somebody uses it."""
    with (root / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # Killed in between, it is a version of which fewer files are here.
        shutil.rmtree(root)
    return True


def _used_at(root: Path) -> float:
    try:
        return (root / "lock").stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _tree_bytes(root: Path) -> int:
    """Bytes of all files, those included that are being fetched, whose room is taken from the start."""
    found = 0
    for folder, _, names in os.walk(root):
        for name in names:
            # A file that was fetched meanwhile is counted where it is now, or a moment ago: nothing else is removed.
            found += max(0, _size(Path(folder, name)))
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _write(path: Path, content: bytes) -> None:
    if _size(path) == len(content) and path.read_bytes() == content:
        return
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_bytes(content)
    fsync_path(unfinished)
    unfinished.rename(path)
    fsync_path(path.parent)
