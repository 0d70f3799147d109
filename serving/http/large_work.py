"""Parsing of long bodies and writing of long answers, away from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from serving.request import LookupRequest, RankRequest

LARGE_BODY_BYTES = 256 * 2**10
# A float32 takes about 12 characters, so this is about as long.
LARGE_ANSWER_FLOATS = LARGE_BODY_BYTES // 12
THREADS = 2

Request = TypeVar("Request", RankRequest, LookupRequest)
Encoded = TypeVar("Encoded")


class LargeWork:
    """A few threads for what would hold the event loop up. What waits for them is bounded by `max_in_flight`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="large-json")

    async def parse(self, body_bytes: int, parse: Callable[[], Request]) -> Request:
        """Parses here if the body is short, else in a thread.

        If the caller is cancelled meanwhile, the lease of what is parsed in vain is released. Raises what `parse` does.
        """
        if body_bytes <= LARGE_BODY_BYTES:
            return parse()
        future = self._pool.submit(parse)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_release)
            raise

    async def encode(self, num_floats: int, encode: Callable[[], Encoded]) -> Encoded:
        """Encodes here if the answer is short, else in a thread."""
        if num_floats <= LARGE_ANSWER_FLOATS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._pool, encode)

    def close(self) -> None:
        """Lets the threads end when they have done what they are doing."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _release(future: Future[RankRequest] | Future[LookupRequest]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().lease.release()
