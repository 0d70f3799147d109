r"""The keys, announcements and locks of a `DirectoryRegistry`, one small file each. All of this blocks.

```
keys/<key>=             "<revision>\n", then the value; durable
keys/~revision          the last revision that was given
announced/<key>=        "<deadline> <ttl_s>\n", then the value
locks/<key>=            "<deadline> <ttl_s>\n", then the owner
```
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from loader.errors import RegistryConflictError, RegistryRecordError
from loader.registry.directory_files import Area, file_of, keys_below, read_file
from loader.registry.registry import Entry


class KeyFiles:
    """Keys with revisions. Each file is replaced by one rename, so that readers need no lock."""

    def __init__(self, path: Path, clock: Callable[[], float], lock_timeout_s: float) -> None:
        self._path = path
        self._clock = clock
        self._area = Area(path, durable=True, lock_timeout_s=lock_timeout_s)
        # Not durable: whoever loses it goes on with the clock.
        self._last = Area(path, durable=False, lock_timeout_s=lock_timeout_s)

    def get(self, key: str) -> Entry | None:
        """A key's value and revision."""
        path = file_of(self._path, key)
        content = read_file(path)
        if content is None:
            return None
        revision, separator, value = content.partition(b"\n")
        if not separator or not revision.isdigit():
            raise RegistryRecordError(f"{path}: it does not begin with a line that holds a revision")
        return Entry(value, int(revision))

    def entries(self, prefix: str) -> dict[str, Entry]:
        """All below a prefix."""
        found = ((key, self.get(key)) for key in keys_below(self._path, prefix))
        return {key: entry for key, entry in found if entry is not None}

    def put(self, key: str, value: bytes, expected_revision: int) -> int:
        """Writes if the revision is the expected one."""
        with self._area.locked():
            revision = self._next_revision(self._check(key, expected_revision))
            self._area.write(file_of(self._path, key), b"%d\n%b" % (revision, value))
            return revision

    def delete(self, key: str, expected_revision: int) -> None:
        """Deletes if the revision is the expected one."""
        with self._area.locked():
            self._check(key, expected_revision)
            self._area.remove(file_of(self._path, key))

    def _check(self, key: str, expected_revision: int) -> int:
        entry = self.get(key)
        revision = entry.revision if entry is not None else 0
        if revision != expected_revision:
            raise RegistryConflictError(f"{key} has revision {revision}, not {expected_revision}")
        return revision

    def _next_revision(self, revision: int) -> int:
        # The clock's microseconds are above all that was ever given, also if the folder was emptied or set back.
        path = self._path / "~revision"
        last = read_file(path) or b""
        given = max(revision, int(last) if last.isdigit() else 0)
        following = max(given + 1, int(self._clock() * 1e6))
        self._last.write(path, b"%d" % following)
        return following


class ExpiringFiles:
    """Values with a deadline on the wall clock; none of them has to survive a loss of power."""

    def __init__(self, path: Path, clock: Callable[[], float], lock_timeout_s: float) -> None:
        self._path = path
        self._clock = clock
        self._area = Area(path, durable=False, lock_timeout_s=lock_timeout_s)

    def get(self, key: str) -> bytes | None:
        """A value that has not expired."""
        content = read_file(file_of(self._path, key))
        return _alive(content, self._clock()) if content is not None else None

    def all_below(self, prefix: str) -> dict[str, bytes]:
        """All below a prefix that have not expired. Files of the others are removed."""
        found = {key: self.get(key) for key in keys_below(self._path, prefix)}
        expired = [key for key, value in found.items() if value is None]
        if expired:
            self._sweep(expired)
        return {key: value for key, value in found.items() if value is not None}

    def set(self, key: str, value: bytes, ttl_s: float) -> None:
        """Writes a value, whatever is there."""
        with self._area.locked():
            self._write(key, value, ttl_s)

    def set_if(self, key: str, value: bytes, ttl_s: float) -> bool:
        """Writes a value if there is none, or the same one."""
        with self._area.locked():
            if self.get(key) not in (None, value):
                return False
            self._write(key, value, ttl_s)
            return True

    def remove(self, key: str, value: bytes | None = None) -> None:
        """Removes a value; with `value`, only that one."""
        with self._area.locked():
            if value is None or self.get(key) == value:
                self._area.remove(file_of(self._path, key))

    def _write(self, key: str, value: bytes, ttl_s: float) -> None:
        deadline = self._clock() + ttl_s
        self._area.write(file_of(self._path, key), b"%r %r\n%b" % (deadline, ttl_s, value))

    def _sweep(self, keys: list[str]) -> None:
        with self._area.locked():
            for key in keys:
                # It may have been announced again since it was read.
                if self.get(key) is None:
                    self._area.remove(file_of(self._path, key))


def _alive(content: bytes, now: float) -> bytes | None:
    head, _, value = content.partition(b"\n")
    try:
        deadline, ttl_s = map(float, head.split())
    except ValueError:
        # Cut off by a loss of power. Whoever wrote it is gone, or writes it again.
        return None
    # A deadline further off than it can be: the clock was set back. Whoever lives writes it again.
    return value if 0.0 < deadline - now <= 2 * ttl_s else None
