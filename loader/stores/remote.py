"""A store at a URL: versions are synced into a local cache and read from there; new ones are put up whole.

What lies at the URL is laid out as in a folder. There is no rename, so the manifest is what makes a version exist: it
is written last, and only if there is none. Who writes a version claims it first, so that files of two never mix:

```
<url>/<model>/<version>/tables/...     files of a snapshot
<url>/<model>/<version>/manifest.json  written last
<url>/<model>/.export-<version>        who writes that version now: the identity of the snapshot
<url>/<model>/.trash-<version>         out of sight, to be deleted
```

The cache is a folder that the processes of a machine share:

```
<cache>/lock                            held (flock) by the process that makes room and fetches
<cache>/<identity>/lock                 held, shared, by each process that uses the version; its time: the last use
<cache>/<identity>/<model>/<version>/   the snapshot: each file had the manifest's SHA-256 when it was put there
<cache>/<identity>/fetching/            files that are not complete
```

The identity is the SHA-256 of the manifest, which has those of all other files, so a version that was replaced in its
store is another folder here. Locks end with their processes; the file of a lock is never deleted.

The client is obstore (Rust's object_store), which retries with exponential backoff and jitter, and takes credentials
as the clouds' own libraries do, from the environment or the machine's identity.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from itertools import starmap
from pathlib import Path
from typing import Any, Final

from loader.errors import ExportError, SnapshotCorruptError, SnapshotExistsError, SnapshotNotFoundError, StoreError, cut
from loader.progress import Progress, all_or_first_error, counting, no_progress
from loader.snapshot import manifest as manifests
from loader.snapshot import store
from loader.snapshot.manifest import CHECKSUM_NAME, MANIFEST_NAME, FileEntry, Manifest
from loader.stores.cache import FETCHING, StoreUrl

try:
    import obstore
    from obstore import exceptions as refusals
    from obstore.store import from_url
except ImportError as missing:
    message = f"a store at a URL needs obstore: pip install 'shardrank[stores]' ({missing})"
    raise StoreError(message, kind="store_url") from missing

RANGE_BYTES: Final = 8 << 20
"""Of one request. It must come within a third of the store's time limit."""
FILES_AT_A_TIME: Final = 8
_IDENTITY: Final = re.compile(r"[0-9a-f]{64}")
_POLL_S: Final = 0.1
_MAX_SMALL_BYTES: Final = 4096
_OTHERS_TRASH_S: Final = 3600.0
"""What a run has set aside for longer than that, it did not live to delete."""
_VARIABLES: Final = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
# Of the client, not of the cloud; obstore drops the environment's as soon as it is given any.
_CLIENT_KEYS: Final = "allow_http allow_invalid_certificates proxy_url proxy_ca_certificate proxy_excludes"
_REFUSED: Final = re.compile(r"status code: 4(?!08|29)\d\d|NoSuchBucket")
_log = logging.getLogger(__name__)


def _open_client(address: StoreUrl) -> Any:
    """Open obstore's client of a URL; nothing is asked yet. Raises StoreError if what the URL needs is not set."""
    # A request is tried three times at least, unless the store holds each as long as it may.
    request_s, variables = address.timeout_s / 3, _VARIABLES[address.url.partition("://")[0]]
    given = {key: os.environ.get(f"{variables}_{key.upper()}") for key in _CLIENT_KEYS.split()}
    client: dict[str, Any] = {key: value for key, value in given.items() if value is not None} | {
        "timeout": timedelta(seconds=request_s),
        "connect_timeout": timedelta(seconds=min(request_s, 5.0)),
    }
    retries: dict[str, Any] = {"max_retries": 1000, "retry_timeout": timedelta(seconds=address.timeout_s - request_s)}
    try:
        return from_url(address.url, client_options=client, retry_config=retries)  # type: ignore[call-overload]
    except (refusals.BaseError, ValueError) as error:
        raise StoreError(f"store {address.url}: {_first_line(error)}", kind="store_url") from error


class RemoteStore(store.Store):
    """Snapshots at a URL. Each call asks the store; thread-safe, and blocks.

    In addition to what `Store` raises, every call raises StoreError if the store refuses, or does not answer in time.
    """

    def __init__(self, address: StoreUrl) -> None:
        """Open a store; nothing is requested yet. Raises StoreError if what the URL needs is not set."""
        super().__init__(address.cache)
        self.name = address.url
        self._cache_bytes = address.cache_bytes
        self._timeout_s = address.timeout_s
        self._client = _open_client(address)
        self._aside: dict[str, set[int]] = {}

    def check_exists(self) -> None:
        """Raise SnapshotNotFoundError if there is no version of any model."""
        if not self.models():
            raise SnapshotNotFoundError(f"store {self.name} has no model{self._unfinished_text()}")

    def versions(self, model: str) -> list[int]:
        """As `Store.versions`: those with a manifest."""
        names = self._version_names(model)
        folders = [name.removesuffix(f"/{MANIFEST_NAME}") for name in names if name.endswith(f"/{MANIFEST_NAME}")]
        return sorted(set(store.version_numbers(folders)) - set(store.version_numbers(names, store.TRASH_PREFIX)))

    def manifest(self, model: str, version: int) -> tuple[Manifest, str] | None:
        if (content := self._read_manifest(model, version)) is None:
            return None
        url = f"{self.name}/{model}/{version}/{MANIFEST_NAME}"
        return manifests.parse_manifest(url, content), hashlib.sha256(content).hexdigest()

    def hold(
        self,
        model: str,
        version: int | None = None,
        *,
        identity: str | None = None,
        with_rows: bool = True,
        verify: bool = True,
        progress: Progress = no_progress,
    ) -> store.HeldSnapshot:
        """As `Store.hold`: fetch what is missing in the cache, and check it. Not to be called on an event loop.

        With an `identity` of which all is in the cache, the store is not asked. Raises also StoreError of the kind
        `store_cache`: the cache has no room, or its disk fails.
        """
        version = self.latest(model) if version is None else version
        content = None
        if identity is not None and _IDENTITY.fullmatch(identity) and store.MODEL_NAME.fullmatch(model):
            with suppress(OSError):
                content = (self.path / identity / model / str(version) / MANIFEST_NAME).read_bytes()
        if content is None or hashlib.sha256(content).hexdigest() != identity:
            content = self._read_manifest(model, version)
        if content is None:
            raise self.no_version(model, version)
        url, digest = f"{self.name}/{model}/{version}", hashlib.sha256(content).hexdigest()
        manifest = manifests.parse_manifest(f"{url}/{MANIFEST_NAME}", content)
        if identity not in (None, digest):
            problem = f"identity (SHA-256 of its manifest) is {digest}, published was {identity}"
            raise SnapshotCorruptError(f"{url}: {problem}")
        rows = {entry.path for files in manifest.tables for entry in files.rows}
        small = [
            FileEntry(path=path, size_bytes=len(text), sha256=hashlib.sha256(text).hexdigest())
            for path, text in ((MANIFEST_NAME, content), (CHECKSUM_NAME, manifests.checksum_line(digest).encode()))
        ]
        entries = [*small, *(entry for entry in manifest.files() if with_rows or entry.path not in rows)]
        # Before anything is written at such a path.
        for entry in entries:
            manifests.check_relative_path(url, entry.path)
        try:
            with ExitStack() as undo:
                snapshot = undo.enter_context(self._hold(digest, model, version, is_checked=verify))
                store.missing_files(snapshot.path, small, verify=True)
                if store.missing_files(snapshot.path, entries, verify, progress):
                    # Another process may fetch them meanwhile.
                    with self._locked(progress):
                        if missing := store.missing_files(snapshot.path, entries):
                            self._fetch(snapshot.path, missing, progress)
                undo.pop_all()
        except OSError as error:
            raise StoreError(f"store cache {self.path}: {error}", kind="store_cache") from error
        return snapshot

    def put(
        self, source: Path, identity: str, progress: Progress = no_progress, renumbered: Manifest | None = None
    ) -> tuple[str, bool]:
        """As `Store.put`: files first, the manifest last. Who writes another snapshot of that version is refused."""
        manifest, texts = store.stated_by(source, identity, renumbered)
        model, version, entries = manifest.spec.model, manifest.version, manifest.files()
        folder, claim = f"{model}/{version}", f"{model}/{store.WORK_FOLDER_PREFIX}{version}"
        url = f"{self.name}/{folder}"
        if version in self._set_aside_versions(model):
            raise ExportError(
                f"{url} is being deleted; if whoever does so died, `shardrank publish --retain` of another version "
                "ends that an hour later"
            )
        if self._has(model, version, identity, source):
            self._check_sizes(folder, entries)
            return url, False
        is_first = self._create(claim, identity.encode())
        claimed_by = None if is_first else self._read(claim, _MAX_SMALL_BYTES)
        if claimed_by is not None and claimed_by != identity.encode():
            raise ExportError(
                f"{self.name}/{claim}: a snapshot of identity {claimed_by.decode(errors='replace')} is being published "
                "as that version; if nobody does that any more, delete this object"
            )
        # Another process may have finished it between the first check and the claim.
        if is_new := not self._has(model, version, identity, source):
            # Files that were there before the first claim are anybody's, and may be incomplete.
            sizes = {} if is_first else {meta["path"]: meta["size"] for meta in self._list(folder)}
            add_done = counting(progress, "putting into the store", sum(entry.size_bytes for entry in entries))
            for entry in entries:
                if sizes.get(f"{folder}/{entry.path}") != entry.size_bytes:
                    self.write_file(f"{folder}/{entry.path}", manifests.snapshot_file(source, entry.path))
                add_done(entry.size_bytes)
            self.write_file(f"{folder}/{CHECKSUM_NAME}", texts[CHECKSUM_NAME].encode())
            # If an answer was lost, it is there already, and is ours.
            self._create(f"{folder}/{MANIFEST_NAME}", texts[MANIFEST_NAME].encode())
            if not self._has(model, version, identity, source):
                raise ExportError(f"{url}: deleted while it was put up")
        self.delete_files([claim])
        return url, is_new

    def set_aside(self, model: str, version: int) -> None:
        self._create(f"{model}/{store.TRASH_PREFIX}{version}", b"")
        self._aside.setdefault(model, set()).add(version)

    def bring_back(self, model: str, version: int) -> None:
        self.delete_files([f"{model}/{store.TRASH_PREFIX}{version}"])
        self._aside.get(model, set()).discard(version)

    @contextmanager
    def retaining(self, model: str) -> Iterator[None]:
        """As `Store.retaining`, without a lock: see `delete_set_aside`."""
        yield

    def delete_set_aside(self, model: str, staying: Collection[int]) -> None:
        """As `Store.delete_set_aside`. What another process has set aside recently is left to it."""
        old = [path for path, age_s in self.list_files(model).items() if age_s >= _OTHERS_TRASH_S]
        for version in {*store.version_numbers(old, f"{model}/{store.TRASH_PREFIX}"), *self._aside.pop(model, set())}:
            if version not in staying:
                # The manifest goes first: without it the others are no version.
                self.delete_files([f"{model}/{version}/{MANIFEST_NAME}", *self.list_files(f"{model}/{version}")])
            self.bring_back(model, version)

    def read_file(self, path: str, max_bytes: int) -> bytes:
        if (content := self._read(path, max_bytes)) is None:
            raise SnapshotCorruptError(f"{self.name}/{path}: missing") from FileNotFoundError(path)
        return content

    def write_file(self, path: str, content: bytes | Path) -> None:
        """As `Store.write_file`; a file goes in parts of 5 MB, and appears as a whole."""
        with self._translated("written", path):
            obstore.put(self._client, path, content, max_concurrency=4)

    def list_files(self, folder: str) -> dict[str, float]:
        now = time.time()
        return {meta["path"]: now - meta["last_modified"].timestamp() for meta in self._list(folder)}

    def delete_files(self, paths: Iterable[str]) -> None:
        for path in paths:
            with self._translated("deleted", path), suppress(FileNotFoundError):
                obstore.delete(self._client, path)

    def _model_names(self) -> list[str]:
        with self._translated("listed", ""):
            prefixes = obstore.list_with_delimiter(self._client)["common_prefixes"]
        return sorted(prefix.rstrip("/") for prefix in prefixes)

    def _version_names(self, model: str) -> list[str]:
        paths = self._list(model) if store.MODEL_NAME.fullmatch(model) else []
        return [meta["path"].removeprefix(f"{model}/") for meta in paths]

    def _list(self, folder: str) -> list[Any]:
        with self._translated("listed", folder):
            return [meta for chunk in obstore.list(self._client, folder) for meta in chunk]

    def _read(self, path: str, max_bytes: int) -> bytes | None:
        with self._translated("read", path):
            try:
                response = obstore.get(self._client, path)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None
            if (size := response.meta["size"]) > max_bytes:
                raise SnapshotCorruptError(f"{self.name}/{path}: {size} bytes, at most {max_bytes} are read")
            return bytes(response.bytes())

    def _create(self, path: str, content: bytes) -> bool:
        with self._translated("written", path):
            try:
                obstore.put(self._client, path, content, mode="create", use_multipart=False)
            except refusals.AlreadyExistsError:
                return False
        return True

    def _read_manifest(self, model: str, version: int) -> bytes | None:
        path = f"{model}/{version}/{MANIFEST_NAME}"
        content = self._read(path, manifests.MAX_MANIFEST_BYTES) if store.MODEL_NAME.fullmatch(model) else None
        if content is not None:
            stated = self.read_file(f"{model}/{version}/{CHECKSUM_NAME}", _MAX_SMALL_BYTES)
            if stated != manifests.checksum_line(hashlib.sha256(content).hexdigest()).encode():
                raise SnapshotCorruptError(f"{self.name}/{path}: SHA-256 is not the one in {CHECKSUM_NAME}")
        return content

    def _has(self, model: str, version: int, identity: str, source: Path) -> bool:
        stored = self.manifest(model, version)
        if stored is not None and stored[1] != identity:
            raise SnapshotExistsError(
                f"{self.name}/{model}/{version} has identity {stored[1]}, {source} has {identity}: a version is "
                "immutable"
            )
        return stored is not None

    def _check_sizes(self, folder: str, entries: Sequence[FileEntry]) -> None:
        sizes = {meta["path"]: meta["size"] for meta in self._list(folder)}
        for entry in entries:
            path = f"{folder}/{entry.path}"
            if (size := sizes.get(path)) != entry.size_bytes:
                problem = "missing" if size is None else f"{size} bytes, the manifest says {entry.size_bytes}"
                raise SnapshotCorruptError(f"{self.name}/{path}: {problem}") from (
                    FileNotFoundError(path) if size is None else None
                )

    def _hold(self, identity: str, model: str, version: int, *, is_checked: bool) -> store.HeldSnapshot:
        """Return a version's folder, with the files that were fetched so far; none is deleted before it is closed."""
        root = self.path / identity
        store.make_folders(root)
        lock = (root / "lock").open("a")
        fcntl.flock(lock, fcntl.LOCK_SH)

        def close() -> None:
            if not lock.closed:
                os.utime(lock.fileno())
                lock.close()

        return store.HeldSnapshot(root / model / str(version), close, is_checked)

    @contextmanager
    def _locked(self, progress: Progress) -> Iterator[None]:
        """Let no other process make room or fetch. While it waits it calls `progress`, which may raise."""
        with (self.path / "lock").open("a") as lock:
            while not store.try_lock(lock):
                progress("waiting for the cache", 0, 1)
                time.sleep(_POLL_S)
            yield

    def _make_room(self, needed_bytes: int, folder: Path) -> None:
        """Delete versions that are not locked until so many bytes of the version at `folder` fit, within `_locked`.

        Those that were used least recently go first. Raises StoreError (`store_cache`) if the bytes do not fit.
        """
        roots = [path for path in self.path.iterdir() if _IDENTITY.fullmatch(path.name) and (path / "lock").exists()]
        sizes = {root: sum(path.lstat().st_size for path in root.rglob("*") if path.is_file()) for root in roots}
        used_bytes = sum(sizes.values())
        for root in sorted(roots, key=lambda path: (path / "lock").stat().st_mtime):
            if used_bytes + needed_bytes <= self._cache_bytes:
                return
            with (root / "lock").open("a") as lock:
                if root not in folder.parents and store.try_lock(lock):
                    for path in [path for path in root.iterdir() if path.is_dir()]:
                        shutil.rmtree(path)
                    used_bytes -= sizes[root]
        if needed_bytes and used_bytes + needed_bytes > self._cache_bytes:
            # What other processes hold may be let go.
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if needed_bytes <= self._cache_bytes else None
            raise StoreError(
                f"store cache {self.path}: {needed_bytes} bytes of {folder.parent.name} version {folder.name} are "
                f"needed, {used_bytes} bytes are in use, and it may hold {self._cache_bytes} (--store-cache-gb)",
                kind="store_cache",
            ) from full

    def _fetch(self, folder: Path, entries: Sequence[FileEntry], progress: Progress) -> None:
        """Fetch files of a version into its folder of the cache, which is locked. Raises as `hold`."""
        source, work = f"{folder.parent.name}/{folder.name}", folder.parents[1] / "fetching"
        total, done, slots = sum(entry.size_bytes for entry in entries), 0, asyncio.Semaphore(FILES_AT_A_TIME)
        self._check_sizes(source, entries)
        shutil.rmtree(work, ignore_errors=True)
        self._make_room(total, folder)
        work.mkdir()
        _log.info("fetching %d files, %d bytes, from %s/%s into %s", len(entries), total, self.name, source, folder)

        def move_into_cache(path: Path, target: Path) -> None:
            store.fsync_path(path)
            store.make_folders(target.parent)
            store.rename(path, target)

        async def fetch_file(number: int, entry: FileEntry) -> None:
            nonlocal done
            path, digest, url = work / str(number), hashlib.sha256(), f"{source}/{entry.path}"
            async with slots:
                with path.open("wb") as file:
                    for begin in range(0, entry.size_bytes, RANGE_BYTES):
                        end = min(begin + RANGE_BYTES, entry.size_bytes)
                        # obstore bounds each try: a store may drip a body, or answer each one at the last moment.
                        with self._translated("read", url):
                            async with asyncio.timeout(self._timeout_s):
                                part = await obstore.get_range_async(self._client, url, start=begin, end=end)
                        content = memoryview(part)
                        await asyncio.to_thread(digest.update, content)
                        file.write(content)
                        done += len(content)
                if (sha256 := digest.hexdigest()) != entry.sha256:
                    stated = f"the manifest says {entry.sha256}"
                    raise SnapshotCorruptError(f"{self.name}/{url}: SHA-256 is {sha256}, {stated}")
                await asyncio.to_thread(move_into_cache, path, folder / entry.path)

        async def report() -> None:
            while done < total:
                progress(FETCHING, done, total)
                await asyncio.sleep(_POLL_S)

        asyncio.run(all_or_first_error([report(), *starmap(fetch_file, enumerate(entries))]))
        progress(FETCHING, total, total)

    @contextmanager
    def _translated(self, action: str, path: str) -> Iterator[None]:
        try:
            yield
        except (refusals.BaseError, OSError) as error:
            timeout = f"no answer within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else ""
            is_refused = isinstance(error, refusals.PermissionDeniedError | refusals.UnauthenticatedError)
            raise StoreError(
                f"{self.name}/{path}".rstrip("/") + f": can't be {action}: {timeout or _first_line(error)}",
                kind="store_access" if is_refused or _REFUSED.search(str(error)) else "store_unavailable",
            ) from error


def _first_line(error: BaseException) -> str:
    """Return obstore's message without the account of itself below it, but with the code of an answer of S3."""
    code = re.search(r"<Code>\w+", str(error))
    return cut(str(error).partition("\n")[0], 400) + (f": {code[0].removeprefix('<Code>')}" if code else "")
