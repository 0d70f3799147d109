"""Processor time of this process over a part of a run."""

from __future__ import annotations

import asyncio
import time


async def cpu_between(begin: float, end: float) -> float:
    """Waits until `end`; seconds of processor time that this process used since `begin`.

    Args:
        begin: CLOCK_MONOTONIC seconds.
        end: likewise.
    """
    await asyncio.sleep(max(begin - time.monotonic(), 0))
    used_s = time.process_time()
    await asyncio.sleep(max(end - time.monotonic(), 0))
    return time.process_time() - used_s
