"""Keep a registry in the memory of one process, which is the only member of its fleet: it ends with the process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import TypeVar

from loader.registry.directory import DirectoryRegistry, DiskFiles
from loader.registry.fleet import FleetRegistry, PublishedVersion, WantedModel, version_key, wanted_key

_T = TypeVar("_T")


class _MemoryFiles(DiskFiles):
    def __init__(self) -> None:
        self._contents: dict[Path, bytes] = {}
        self._lock = Lock()

    @contextlib.contextmanager
    def locked(self, folder: Path, timeout_s: float) -> Iterator[None]:
        with self._lock:
            yield

    def read(self, path: Path) -> bytes | None:
        return self._contents.get(path)

    def write(self, path: Path, content: bytes, work: Path, *, durable: bool) -> None:
        self._contents[path] = content

    def remove(self, path: Path) -> None:
        self._contents.pop(path, None)

    def sync(self, folder: Path) -> None:
        pass

    def names(self, folder: Path) -> list[str]:
        return list({path.partition("/")[0] for path in self.sizes(folder)})

    def sizes(self, folder: Path) -> dict[str, int]:
        files = self._contents.copy().items()
        return {str(path.relative_to(folder)): len(content) for path, content in files if folder in path.parents}


class MemoryRegistry(DirectoryRegistry):
    """A `Registry` in memory, which several event loops of a process may use. Closing it changes nothing."""

    def __init__(
        self, name: str, keys: Mapping[str, bytes] | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """Make a registry with these keys; `name` is for logs and the status page, `clock` as of the base."""
        super().__init__("/", clock=clock, files=_MemoryFiles())
        self.url = self.name = name
        for key, value in (keys or {}).items():
            self._keys.write(self._keys.file_of(key), b"1\n%b" % value)

    async def close(self) -> None:
        """Do nothing: who else has opened it goes on."""

    async def _call(self, work: Callable[[], _T]) -> _T:
        return work()


def single_process_fleet(name: str, version: PublishedVersion) -> FleetRegistry:
    """Return a fleet in memory whose only process shall serve that version, and applies no deltas to it."""
    only = (version.version,)
    desired = WantedModel(model=version.model, epoch=1, live=version.version, hold=only, serve=only)
    keys = {version_key(version.model, version.version): version.encode(), wanted_key(version.model): desired.encode()}
    return FleetRegistry(MemoryRegistry(name, keys))
