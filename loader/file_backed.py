"""Values that are made from files, and made again when the files change: certificates, tokens."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from loader.errors import ShardrankError

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_INTERVAL_S: Final = 1.0


class FileBacked(Generic[T]):
    """A value that `read` makes of files, read again by `get` if they changed. Any thread may call it.

    Files are checked when the value is requested, at most every `interval_s`. While they can't be read (`read` raises
    ShardrankError), the last value stays, and one warning is logged for each state that they are in.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], T],
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = LOOK_INTERVAL_S,
    ) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._clock = clock
        self._interval_s = interval_s
        self._looked_at = clock()
        # Taken before the files are read: what changes while they are is seen at the next look.
        self._stamp = tuple(map(_stamp, self._paths))
        self._value = read()

    def get(self) -> T:
        """Return the value, read again if the files have changed."""
        now = self._clock()
        if now - self._looked_at < self._interval_s:
            return self._value
        self._looked_at = now
        stamp = tuple(map(_stamp, self._paths))
        if stamp == self._stamp:
            return self._value
        self._stamp = stamp
        try:
            self._value = self._read()
        except ShardrankError as error:
            logger.warning("%s; what was read before stays in use", error)
        else:
            logger.info("read again: %s", ", ".join(map(str, self._paths)))
        return self._value


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
