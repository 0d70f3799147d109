"""The embedded registry: a directory that the processes of one machine share.

Writers lock, readers don't; a file is replaced by one rename. A process may be killed at any point: the operating
system takes its locks back, and what it wrote is there in whole or not at all. What has to last is on disk before a
method returns. Not for network file systems: locks and renames must be those of one machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from loader.errors import RegistryUnavailableError
from loader.registry.checks import (
    check_key,
    check_owner,
    check_prefix,
    check_read,
    check_sequence,
    check_ttl,
    check_value,
)
from loader.registry.directory_keys import ExpiringFiles, KeyFiles
from loader.registry.directory_streams import StreamFiles
from loader.registry.registry import Entry, StreamBounds, StreamEntry

LOCK_TIMEOUT_S: Final = 5.0
_THREADS: Final = 4

_P = ParamSpec("_P")
_T = TypeVar("_T")


class DirectoryRegistry:
    """A `Registry` in a directory. Between calls it holds no file open, so the directory may be emptied or replaced."""

    def __init__(
        self, path: str | Path, *, clock: Callable[[], float] = time.time, lock_timeout_s: float = LOCK_TIMEOUT_S
    ) -> None:
        """A registry at `path`, which is made when it is first written to.

        Args:
            path: the directory; one of a local file system.
            clock: seconds since the epoch, the same for all processes.
            lock_timeout_s: how long a write waits for another process' write before it is a RegistryUnavailableError.
        """
        self.path = Path(path).absolute()
        self._keys = KeyFiles(self.path / "keys", clock, lock_timeout_s)
        self._announced = ExpiringFiles(self.path / "announced", clock, lock_timeout_s)
        self._locks = ExpiringFiles(self.path / "locks", clock, lock_timeout_s)
        self._streams = StreamFiles(self.path / "streams", lock_timeout_s)
        # Its own threads: those of the event loop may all be busy with loads, and a heartbeat must not wait for these.
        self._threads: ThreadPoolExecutor | None = ThreadPoolExecutor(_THREADS, thread_name_prefix="registry")

    @property
    def url(self) -> str:
        """Its URL."""
        return self.path.as_uri()

    @property
    def name(self) -> str:
        """Its path."""
        return str(self.path)

    async def get(self, key: str) -> Entry | None:
        """See `Registry.get`."""
        return await self._run(self._keys.get, check_key(key))

    async def entries(self, prefix: str) -> dict[str, Entry]:
        """See `Registry.entries`."""
        return await self._run(self._keys.entries, check_prefix(prefix))

    async def put(self, key: str, value: bytes, expected_revision: int) -> int:
        """See `Registry.put`."""
        check_value(check_key(key), value)
        return await self._run(self._keys.put, key, value, expected_revision)

    async def delete(self, key: str, expected_revision: int) -> None:
        """See `Registry.delete`."""
        await self._run(self._keys.delete, check_key(key), expected_revision)

    async def announce(self, key: str, value: bytes, ttl_s: float) -> None:
        """See `Registry.announce`."""
        check_value(check_key(key), value)
        check_ttl(key, ttl_s)
        await self._run(self._announced.set, key, value, ttl_s)

    async def withdraw(self, key: str) -> None:
        """See `Registry.withdraw`."""
        await self._run(self._announced.remove, check_key(key))

    async def announced(self, prefix: str) -> dict[str, bytes]:
        """See `Registry.announced`."""
        return await self._run(self._announced.all_below, check_prefix(prefix))

    async def acquire(self, key: str, owner: str, ttl_s: float) -> bool:
        """See `Registry.acquire`."""
        check_owner(check_key(key), owner)
        check_ttl(key, ttl_s)
        return await self._run(self._locks.set_if, key, owner.encode(), ttl_s)

    async def release(self, key: str, owner: str) -> None:
        """See `Registry.release`."""
        check_owner(check_key(key), owner)
        await self._run(self._locks.remove, key, owner.encode())

    async def holder(self, key: str) -> str | None:
        """See `Registry.holder`."""
        owner = await self._run(self._locks.get, check_key(key))
        return owner.decode() if owner is not None else None

    async def append(self, stream: str, sequence: int, payload: bytes) -> None:
        """See `Registry.append`."""
        check_value(check_key(stream, "stream"), payload)
        check_sequence(stream, sequence)
        await self._run(self._streams.append, stream, sequence, payload)

    async def read(
        self, stream: str, after: int, max_entries: int = 256, max_bytes: int = 16 << 20
    ) -> list[StreamEntry]:
        """See `Registry.read`."""
        check_read(check_key(stream, "stream"), max_entries, max_bytes)
        return await self._run(self._streams.read, stream, after, max_entries, max_bytes)

    async def bounds(self, stream: str) -> StreamBounds:
        """See `Registry.bounds`."""
        return await self._run(self._streams.bounds, check_key(stream, "stream"))

    async def trim(self, stream: str, before: int) -> None:
        """See `Registry.trim`."""
        await self._run(self._streams.trim, check_key(stream, "stream"), before)

    async def close(self) -> None:
        """Ends its threads, once what they do is done."""
        threads, self._threads = self._threads, None
        if threads is not None:
            await asyncio.to_thread(threads.shutdown)

    async def _run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if self._threads is None:
            raise RegistryUnavailableError(f"registry {self.name} is closed")
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, lambda: work(*args, **kwargs))
        except OSError as error:
            raise RegistryUnavailableError(f"registry {self.name}: {error}") from error
