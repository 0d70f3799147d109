"""Memory of a fleet's processes, from the kernel's own accounts, and whether it grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import psutil

BYTES_PER_MB = 1e6
MIN_SAMPLES = 20


@dataclass(frozen=True, slots=True)
class MemorySample:
    """What the processes of a fleet hold at one moment.

    Attributes:
        after_swaps: how many swaps were done by then.
        rss_mb: by process name, resident memory; pages that processes share count in each.
        uss_mb: likewise, what would be free if that process ended; shared pages do not count.
    """

    after_swaps: int
    rss_mb: Mapping[str, float]
    uss_mb: Mapping[str, float]

    @property
    def total_rss_mb(self) -> float:
        """Of all processes."""
        return sum(self.rss_mb.values())

    @property
    def total_uss_mb(self) -> float:
        """Of all processes."""
        return sum(self.uss_mb.values())


def sample_memory(after_swaps: int, process_ids: Mapping[str, int]) -> MemorySample:
    """Reads the memory of running processes.

    Args:
        after_swaps: kept in the sample.
        process_ids: by name.

    Raises:
        psutil.NoSuchProcess: one of them has ended.
    """
    infos = {name: psutil.Process(pid).memory_full_info() for name, pid in process_ids.items()}
    return MemorySample(
        after_swaps,
        {name: info.rss / BYTES_PER_MB for name, info in infos.items()},
        {name: info.uss / BYTES_PER_MB for name, info in infos.items()},
    )


def slope_mb_per_swap(samples: Sequence[MemorySample]) -> float | None:
    """How much the sum of all processes' RSS grows from swap to swap: least squares over the later half of the samples.

    In the first swaps of a process its allocator grows to what a swap needs. None for fewer than `MIN_SAMPLES`.
    """
    if len(samples) < MIN_SAMPLES:
        return None
    later = samples[len(samples) // 2 :]
    swaps = np.array([one.after_swaps for one in later], np.float64)
    totals = np.array([one.total_rss_mb for one in later])
    return float(np.polyfit(swaps, totals, 1)[0])
