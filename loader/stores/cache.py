"""Where a store is, and the folder that versions of stores at URLs are synced into, shared by a machine's processes.

```
<cache>/lock                            held (flock) by the process that makes room and fetches
<cache>/<identity>/lock                 held, shared, by each process that uses the version; its time: the last use
<cache>/<identity>/<model>/<version>/   the snapshot: each file had the manifest's SHA-256 when it was put there
<cache>/<identity>/fetching/            files that are not complete
```

The identity is the SHA-256 of the manifest, which has those of all other files, so a version that was replaced in its
store is another folder here. Locks end with their processes; the file of a lock is never deleted.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

import xxhash
from pydantic import Field, ValidationError, field_validator

from loader.errors import StoreError, cut
from loader.progress import Progress
from loader.registry.registry import local_path, without_password
from loader.snapshot.store import HeldSnapshot, make_folders, try_lock
from loader.snapshot.tables import Frozen, schema_errors

DEFAULT_CACHE_BYTES: Final = 100 * 10**9
FETCHING: Final = "fetching from the store"
"""What a fetch reports its progress of, in bytes."""
_URL: Final = re.compile(r"(s3|gs|az)://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/(?!\.\.?(/|$))[A-Za-z0-9_.=+-]+)*")
_ALLOWED: Final = (
    "allowed is s3://, gs:// or az://BUCKET[/PREFIX], a prefix of letters, digits and _ . = + - between slashes; "
    "file:///PATH, or a path; credentials are taken from the environment"
)


class StoreUrl(Frozen):
    """A store at a URL.

    Attributes:
        url: `s3://BUCKET[/PREFIX]`, `gs://BUCKET[/PREFIX]` or `az://CONTAINER[/PREFIX]`.
        cache: the folder that versions are synced into; processes of one machine may share it.
        cache_bytes: its limit.
        timeout_s: of one request, its retries included.
    """

    url: str
    cache: Path = Field(
        default_factory=lambda: Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "shardrank", "stores")
    )
    cache_bytes: int = Field(default=DEFAULT_CACHE_BYTES, ge=1)
    timeout_s: float = Field(default=60.0, gt=0, le=3600)

    @field_validator("url")
    @classmethod
    def _check(cls, url: str) -> str:
        if not _URL.fullmatch(url):
            # A query may be the signature of a URL that was signed.
            raise ValueError(f"{cut(without_password(url).partition('?')[0])}: {_ALLOWED}")
        return url

    def __str__(self) -> str:
        """Return the URL, which has no secret in it."""
        return self.url

    @property
    def exports(self) -> Path:
        """The folder in which new versions of this store are made; not counted as the cache."""
        return self.cache / "exports" / xxhash.xxh3_64_hexdigest(self.url.encode())


StorePlace: TypeAlias = Path | StoreUrl


def store_place(text: str | Path | StoreUrl, **cache: object) -> StorePlace:
    """Read where a store is: a path, `file:///PATH`, or a URL as `StoreUrl` has it, with its other fields.

    Raises StoreError of the kind `store_url` if it is none of these.
    """
    if not isinstance(text, str):
        return text
    if (path := local_path(text)) is not None:
        return path
    try:
        return StoreUrl.model_validate({"url": text.rstrip("/"), **cache})
    except ValidationError as error:
        problems = "; ".join(map(str, schema_errors(error, [StoreUrl])))
        raise StoreError(f"store: {problems}", kind="store_url") from error


IDENTITY: Final = re.compile(r"[0-9a-f]{64}")
_POLL_S: Final = 0.05
_log = logging.getLogger(__name__)


class SnapshotCache:
    """Versions by their identity. Holds nothing open; the processes of a machine may share its folder."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes

    def hold(self, identity: str, model: str, version: int, *, is_checked: bool) -> HeldSnapshot:
        """Return a version's folder, with the files that were fetched so far; none is deleted before it is closed."""
        root = self.folder / identity
        make_folders(root)
        lock = (root / "lock").open("a")
        fcntl.flock(lock, fcntl.LOCK_SH)

        def close() -> None:
            if not lock.closed:
                os.utime(lock.fileno())
                lock.close()

        return HeldSnapshot(root / model / str(version), close, is_checked)

    @contextmanager
    def locked(self, progress: Progress) -> Iterator[None]:
        """Let no other process make room or fetch. While it waits it calls `progress`, which may raise."""
        with (self.folder / "lock").open("a") as lock:
            while not try_lock(lock):
                progress("waiting for the cache", 0, 1)
                time.sleep(_POLL_S)
            yield

    def make_room(self, needed_bytes: int, folder: Path, keep: Collection[str]) -> None:
        """Delete versions that are not locked until so many bytes of the version at `folder` fit, within `locked`.

        Those whose identity is not in `keep` go first, then by their last use. Raises StoreError (`store_cache`) if
        the bytes do not fit.
        """
        roots = [path for path in self.folder.iterdir() if IDENTITY.fullmatch(path.name) and (path / "lock").exists()]
        sizes = {root: sum(path.lstat().st_size for path in root.rglob("*") if path.is_file()) for root in roots}
        used_bytes = sum(sizes.values())
        for root in sorted(roots, key=lambda path: (path.name in keep, (path / "lock").stat().st_mtime)):
            if used_bytes + needed_bytes <= self.max_bytes:
                return
            with (root / "lock").open("a") as lock:
                if root not in folder.parents and try_lock(lock):
                    for path in [path for path in root.iterdir() if path.is_dir()]:
                        shutil.rmtree(path)
                    used_bytes -= sizes[root]
        if needed_bytes and used_bytes + needed_bytes > self.max_bytes:
            raise StoreError(
                f"store cache {self.folder}: {needed_bytes} bytes of {folder.parent.name} version {folder.name} are "
                f"needed, {used_bytes} bytes are in use, and it may hold {self.max_bytes} (--store-cache-gb)",
                kind="store_cache",
            )
