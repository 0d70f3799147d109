"""A store at a URL: versions are fetched into a local cache and read from there; new ones are put up whole.

What lies at the URL is laid out as in a folder. There is no rename, so the manifest is what makes a version exist: it
is written last, and only if there is none. Who writes a version claims it first, so that files of two never mix:

```
<url>/<model>/<version>/tables/...     files of a snapshot
<url>/<model>/<version>/manifest.json  written last
<url>/<model>/.export-<version>        who writes that version now: the identity of the snapshot
<url>/<model>/.trash-<version>         out of sight, to be deleted
```
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from loader.errors import ExportError, SnapshotCorruptError, SnapshotError, SnapshotExistsError, SnapshotNotFoundError
from loader.progress import Progress, no_progress
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
    hash_file,
    manifest_texts_of,
    version_numbers,
)
from loader.stores.cache import IDENTITY, SnapshotCache
from loader.stores.fetching import fetch
from loader.stores.objects import ObjectFolder, ObjectInfo
from loader.stores.place import StoreUrl

_MAX_SMALL_BYTES: Final = 4096
_OTHERS_TRASH_S: Final = 3600.0
"""What a run has set aside for longer than that, it did not live to delete."""

_log = logging.getLogger(__name__)


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
