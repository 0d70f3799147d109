"""The objects below one URL, by obstore: the one file that imports it.

obstore (Rust's object_store) retries with exponential backoff and jitter, and takes credentials as the clouds' own
libraries do, from the environment or the machine's identity. What it raises becomes the package's errors here.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from loader.errors import (
    SnapshotCorruptError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
    StoreUrlError,
    cut,
)

try:
    import obstore
    from obstore import exceptions as refusals
    from obstore.store import from_url
except ImportError as missing:
    raise StoreUrlError(f"a store at a URL needs obstore: pip install 'shardrank[stores]' ({missing})") from missing

_VARIABLES: Final = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
# Of the client, not of the cloud; obstore drops the environment's as soon as it is given any.
_CLIENT_KEYS: Final = (
    "allow_http",
    "allow_invalid_certificates",
    "proxy_url",
    "proxy_ca_certificate",
    "proxy_excludes",
)
_MAX_RETRIES: Final = 1000
"""Time is what bounds them."""
_LONGEST_CONNECT_S: Final = 5.0
_UPLOADS_AT_A_TIME: Final = 4
"""Of one file, in parts of 5 MB."""
_STATUS: Final = re.compile(r"status code: (\d{3})")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object: its path below the URL, bytes, ETag (None where the store has none) and age of the last write."""

    path: str
    size_bytes: int
    etag: str | None
    age_s: float


class ObjectFolder:
    """The objects below a URL. Thread-safe; holds connections, and nothing else.

    Every call raises StoreUnavailableError if the store does not answer within `timeout_s`, StoreAccessError if it
    refuses.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        """Open it; nothing is asked yet. Raises StoreUrlError if what the URL needs is not set."""
        self.url = url
        self._timeout_s = timeout_s
        # A request is tried three times at least, unless the store holds each as long as it may.
        request_s = timeout_s / 3
        scheme = url.partition("://")[0]
        client: dict[str, Any] = {
            "timeout": timedelta(seconds=request_s),
            "connect_timeout": timedelta(seconds=min(request_s, _LONGEST_CONNECT_S)),
        }
        for key in _CLIENT_KEYS:
            if (value := os.environ.get(f"{_VARIABLES[scheme]}_{key.upper()}")) is not None:
                client[key] = value.lower() in ("1", "true") if key.startswith("allow") else value
        backoff = {"init_backoff": timedelta(seconds=min(0.1, timeout_s / 100)), "max_backoff": timedelta(seconds=5)}
        retries = {
            "max_retries": _MAX_RETRIES,
            "retry_timeout": timedelta(seconds=timeout_s - request_s),
            "backoff": backoff,
        }
        try:
            self._store: Any = from_url(url, client_options=client, retry_config=retries)  # type: ignore[call-overload]
        except (refusals.BaseError, ValueError) as error:
            raise StoreUrlError(f"store {url}: {_first_line(error)}") from error

    def listed(self, prefix: str) -> list[ObjectInfo]:
        """List all objects below a folder, sorted by path; none if there is no such folder."""
        with self._translated("listed", prefix):
            found = [one for chunk in obstore.list(self._store, prefix) for one in chunk]
        now = time.time()
        infos = [
            ObjectInfo(one["path"], one["size"], one["e_tag"], now - one["last_modified"].timestamp()) for one in found
        ]
        return sorted(infos, key=lambda one: one.path)

    def folders(self) -> list[str]:
        """Return the names of the folders right below the URL, sorted."""
        with self._translated("listed", ""):
            found = obstore.list_with_delimiter(self._store)["common_prefixes"]
        return sorted(one.rstrip("/") for one in found)

    def read(self, path: str, max_bytes: int) -> bytes | None:
        """Return a small object; None if there is none. Raises SnapshotCorruptError if it is larger."""
        with self._translated("read", path):
            try:
                found = obstore.get(self._store, path)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise StoreAccessError(f"{self.url}/{path}: {_first_line(error)}: NoSuchBucket") from error
                return None
            if (size := found.meta["size"]) > max_bytes:
                raise SnapshotCorruptError(f"{self.url}/{path}: {size} bytes, at most {max_bytes} are read")
            return bytes(found.bytes())

    async def read_range(self, path: str, begin: int, end: int, etag: str | None) -> memoryview:
        """Return bytes [begin, end) of an object that still is the one of that ETag.

        Raises SnapshotCorruptError if it is another one by now, or is gone.
        """
        options: dict[str, Any] = {"range": (begin, end)} | ({} if etag is None else {"if_match": etag})
        async with self._within_time(path):
            try:
                found = await obstore.get_async(self._store, path, options=options)  # type: ignore[arg-type]
                content = memoryview(await found.bytes_async())
            except (refusals.PreconditionError, FileNotFoundError) as error:
                raise SnapshotCorruptError(f"{self.url}/{path}: changed or went away while it was fetched") from error
        if len(content) != end - begin:
            raise SnapshotCorruptError(f"{self.url}/{path}: {len(content)} bytes of [{begin}, {end})")
        return content

    def write(self, path: str, content: bytes | Path) -> None:
        """Write an object, in place of one that is there; a large file goes in parts, and appears as a whole."""
        with self._translated("written", path):
            obstore.put(self._store, path, content, max_concurrency=_UPLOADS_AT_A_TIME)

    def create(self, path: str, content: bytes) -> bool:
        """Write a small object unless there is one already; tell whether it was written."""
        with self._translated("written", path):
            try:
                obstore.put(self._store, path, content, mode="create", use_multipart=False)
            except refusals.AlreadyExistsError:
                return False
        return True

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; those that are gone already are no error."""
        with self._translated("deleted", paths[0] if paths else ""):
            try:
                obstore.delete(self._store, list(paths))
            except FileNotFoundError:
                for path in paths:
                    self._delete_one(path)

    def _delete_one(self, path: str) -> None:
        try:
            obstore.delete(self._store, path)
        except FileNotFoundError:
            return

    @contextmanager
    def _translated(self, action: str, path: str) -> Iterator[None]:
        try:
            yield
        except (refusals.BaseError, OSError) as error:
            raise self._error(action, path, error) from error

    @asynccontextmanager
    async def _within_time(self, path: str) -> AsyncIterator[None]:
        """Bound what obstore bounds by request: a store may drip a body, or answer each try at the last moment."""
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except (refusals.BaseError, OSError) as error:  # TimeoutError is an OSError
            raise self._error("read", path, error) from error

    def _error(self, action: str, path: str, error: BaseException) -> StoreError:
        where = f"{self.url}/{path}" if path else self.url
        if isinstance(error, TimeoutError):
            return StoreUnavailableError(f"{where}: can't be {action}: no answer within {self._timeout_s:g} s")
        told = f"{where}: can't be {action}: {_first_line(error)}"
        status = _STATUS.search(str(error))
        refused = status is not None and status[1].startswith("4") and status[1] not in ("408", "429")
        if refused or isinstance(error, refusals.PermissionDeniedError | refusals.UnauthenticatedError):
            return StoreAccessError(told)
        return StoreUnavailableError(told)


def _first_line(error: BaseException) -> str:
    """Leave out the account of itself that obstore gives below the first line."""
    return cut(str(error).partition("\n")[0], 400)
