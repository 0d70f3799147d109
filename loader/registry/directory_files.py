"""Small files that are whole or not there, and locks between processes that end with them.

A writer holds the lock of its area, so there is one temporary file per area: what a killed writer leaves there is
overwritten by the next one, and nothing has to be cleaned up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from loader.durable import fsync_path
from loader.errors import RegistryUnavailableError

VALUE_SUFFIX: Final = "="
"""Ends the name of a key's file. No key has this character, so "a" and "a/b" can both be keys."""
_WRITING: Final = "~writing"
_LOCK: Final = "~lock"
_FIRST_PAUSE_S: Final = 0.0005
_LONGEST_PAUSE_S: Final = 0.01


class Area:
    """A folder whose files are changed by one writer at a time."""

    def __init__(self, path: Path, *, durable: bool, lock_timeout_s: float) -> None:
        """An area at `path`, made when it is first written to.

        Args:
            path: its folder.
            durable: whether a write has to survive a loss of power.
            lock_timeout_s: after which a lock that another process does not give back is a RegistryUnavailableError.
        """
        self.path = path
        self._durable = durable
        self._lock_timeout_s = lock_timeout_s

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else, in this process or in another one, writes here meanwhile. A process that ends lets go of it."""
        make_folder(self.path)
        descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._wait_for(descriptor)
            yield
        finally:
            os.close(descriptor)

    def write(self, path: Path, content: bytes) -> None:
        """Puts a file in place at once. Only while `locked`."""
        make_folder(path.parent)
        work = self.path / _WRITING
        descriptor = os.open(work, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if self._durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        work.rename(path)
        if self._durable:
            fsync_path(path.parent)

    def remove(self, path: Path) -> None:
        """Removes a file, if it is there. Only while `locked`."""
        path.unlink(missing_ok=True)
        if self._durable and path.parent.is_dir():
            fsync_path(path.parent)

    def _wait_for(self, descriptor: int) -> None:
        # Not a wait in the kernel: the holder may be a stopped process, and such a wait could not be given up.
        deadline = time.monotonic() + self._lock_timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise RegistryUnavailableError(
                        f"registry {self.path}: another process has held its lock for {self._lock_timeout_s:g} s"
                    ) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def make_folder(path: Path) -> None:
    """Makes a folder and those above it, durably."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        return
    fsync_path(path.parent)


def read_file(path: Path) -> bytes | None:
    """A file's content, or None if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def file_of(area: Path, key: str) -> Path:
    """Where a key's value lies."""
    return area / f"{key}{VALUE_SUFFIX}"


def keys_below(area: Path, prefix: str) -> list[str]:
    """The keys below a prefix that have a file, sorted."""
    found: list[str] = []
    waiting = [prefix]
    while waiting:
        above = waiting.pop()
        try:
            with os.scandir(area / above) as folder:
                for entry in folder:
                    if entry.name.endswith(VALUE_SUFFIX):
                        found.append(above + entry.name[: -len(VALUE_SUFFIX)])
                    elif not entry.name.startswith("~"):
                        waiting.append(f"{above}{entry.name}/")
        except FileNotFoundError:
            continue
    return sorted(found)
