"""The streams of a `DirectoryRegistry`. All of this blocks.

```
streams/<name>=/ends                        "<first> <last>", durable; written before entries are dropped
streams/<name>=/<block>/<sequence>          one entry's payload; block = sequence // 256, both padded to 20 digits
```

An entry is made durable before it gets its name, so there is no half one; the names say where the stream ends.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from loader.durable import fsync_path
from loader.errors import RegistryRecordError, StreamSequenceError
from loader.registry.directory_files import Area, file_of, read_file
from loader.registry.registry import StreamBounds, StreamEntry

ENTRIES_PER_BLOCK: Final = 256


class StreamFiles:
    """Streams, each with a lock of its own."""

    def __init__(self, path: Path, lock_timeout_s: float) -> None:
        self._path = path
        self._lock_timeout_s = lock_timeout_s

    def append(self, stream: str, sequence: int, payload: bytes) -> None:
        """Appends if it is the next one."""
        area = self._area(stream)
        with area.locked():
            last = _bounds(area.path).last
            if last and sequence != last + 1:
                raise StreamSequenceError(f"stream {stream}: sequence {sequence} after {last}; {last + 1} is next")
            area.write(_entry_path(area.path, sequence), payload)

    def read(self, stream: str, after: int, max_entries: int, max_bytes: int) -> list[StreamEntry]:
        """Entries above `after`. Needs no lock: what is trimmed meanwhile is the lowest ones."""
        folder = self._area(stream).path
        after = max(after, _read_ends(folder).first - 1)
        found: list[StreamEntry] = []
        size = 0
        for block in _numbers(folder):
            if block < after // ENTRIES_PER_BLOCK:
                continue
            for sequence in _numbers(folder / f"{block:020d}"):
                if sequence <= after:
                    continue
                payload = read_file(_entry_path(folder, sequence))
                if payload is None and found:
                    return found
                if payload is None:
                    continue
                size += len(payload)
                if found and size > max_bytes:
                    return found
                found.append(StreamEntry(sequence, payload))
                if len(found) == max_entries:
                    return found
        return found

    def bounds(self, stream: str) -> StreamBounds:
        """Where it begins and ends."""
        area = self._area(stream)
        if not area.path.is_dir():
            return StreamBounds(0, 0)
        with area.locked():
            return _bounds(area.path)

    def trim(self, stream: str, before: int) -> None:
        """Drops the entries below `before`, and those that an interrupted trim has left."""
        area = self._area(stream)
        if not area.path.is_dir():
            return
        with area.locked():
            now = _bounds(area.path)
            if now.last == 0:
                return
            first = max(now.first, min(before, now.last + 1))
            area.write(area.path / "ends", b"%d %d" % (first, now.last))
            _drop_below(area.path, first)

    def _area(self, stream: str) -> Area:
        return Area(file_of(self._path, stream), durable=True, lock_timeout_s=self._lock_timeout_s)


def _bounds(folder: Path) -> StreamBounds:
    ends = _read_ends(folder)
    blocks = _numbers(folder)
    # A writer that was killed may leave a block without an entry, at either end.
    lowest = next((found[0] for block in blocks if (found := _entries(folder, block, ends.first))), None)
    highest = next((found[-1] for block in reversed(blocks) if (found := _entries(folder, block, ends.first))), None)
    if lowest is None or highest is None:
        return StreamBounds(ends.last + 1, ends.last) if ends.last else StreamBounds(0, 0)
    return StreamBounds(lowest, max(highest, ends.last))


def _entries(folder: Path, block: int, first: int) -> list[int]:
    return [number for number in _numbers(folder / f"{block:020d}") if number >= first]


def _drop_below(folder: Path, first: int) -> None:
    for block in _numbers(folder):
        if block > first // ENTRIES_PER_BLOCK:
            return
        path = folder / f"{block:020d}"
        for sequence in _numbers(path):
            if sequence < first:
                (path / f"{sequence:020d}").unlink(missing_ok=True)
        if block < first // ENTRIES_PER_BLOCK:
            with contextlib.suppress(FileNotFoundError):
                path.rmdir()
    fsync_path(folder)


def _read_ends(folder: Path) -> StreamBounds:
    content = read_file(folder / "ends")
    if content is None:
        return StreamBounds(0, 0)
    numbers = content.split()
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        raise RegistryRecordError(f"{folder / 'ends'}: {content[:40]!r}; two numbers are needed")
    return StreamBounds(int(numbers[0]), int(numbers[1]))


def _entry_path(folder: Path, sequence: int) -> Path:
    return folder / f"{sequence // ENTRIES_PER_BLOCK:020d}" / f"{sequence:020d}"


def _numbers(folder: Path) -> list[int]:
    """The names in a folder that are numbers, ascending."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isdigit())
