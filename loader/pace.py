"""Background work that leaves room for requests: a share of one core, a rate of bytes, a low priority."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from loader.progress import Progress, no_progress

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 4 << 20
"""Paced work tells its progress at least this often: it is what it does between two rests."""
BACKGROUND_NICENESS: Final = 10
BACKGROUND_SWITCH_INTERVAL_S: Final = 0.0005
"""For `sys.setswitchinterval`, where requests share an interpreter with background work: how long they wait for it."""
_SHORTEST_REST_S: Final = 0.002
_LONGEST_REST_S: Final = 5.0


class Pace:
    """Rests between pieces of work. Told the progress, it passes that on; of one thread's work at a time.

    Args:
        cpu_share: of the time that work takes part in, 0 to 1. Time in which the work itself waits for a disk or a core
            counts as work, so that a busy machine slows it further down.
        bytes_per_s: what is read; None for no limit.
        clock: monotonic seconds.
        sleep: rests. To end work from outside, let it raise, or `progress`.
    """

    def __init__(
        self,
        cpu_share: float = 1.0,
        bytes_per_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if not 0 < cpu_share <= 1:
            raise ValueError(f"cpu_share: {cpu_share}, allowed is above 0 and at most 1")
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s: {bytes_per_s}, allowed is above 0")
        self._cpu_share = cpu_share
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep

    def over(self, progress: Progress = no_progress) -> Progress:
        """A progress that rests after each piece, beginning now; `done` and `total` must be bytes."""
        began_at = self._clock()
        size_bytes = 0
        done_before: dict[str, int] = {}

        def paced(what: str, done: int, total: int) -> None:
            nonlocal began_at, size_bytes
            progress(what, done, total)
            size_bytes += done - done_before.get(what, 0)
            done_before[what] = done
            worked_s = self._clock() - began_at
            rest_s = worked_s / self._cpu_share - worked_s
            if self._bytes_per_s is not None:
                rest_s = max(rest_s, size_bytes / self._bytes_per_s - worked_s)
            if rest_s >= _SHORTEST_REST_S or (rest_s > 0 and done == total):
                self._sleep(min(rest_s, _LONGEST_REST_S))
                began_at, size_bytes = self._clock(), 0

        return paced


def lower_own_priority(niceness: int = BACKGROUND_NICENESS) -> None:
    """Has the calling thread, and those that it starts, run when others leave time. It can't be taken back.

    Linux gives each thread a niceness of its own (setpriority(2), "C library/kernel differences").
    """
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    except OSError as error:
        logger.warning("background work keeps its priority: %s", error)
