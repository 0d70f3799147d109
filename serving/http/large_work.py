"""Parsing of long bodies and writing of long answers, away from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from serving.formats.requests import LookupRequest, RankRequest

# So much is parsed in some 1.3 ms, most of it in one step that no other thread gets into. Handing it over and the two
# threads' taking turns cost a tenth of that.
LARGE_BODY_BYTES = 512 * 2**10
# These take about as long to write.
LARGE_ANSWER_FLOATS = 20_000
THREADS = 2

Request = TypeVar("Request", RankRequest, LookupRequest)
Encoded = TypeVar("Encoded")


def is_long_text(body_bytes: int) -> bool:
    """Whether parsing so much would hold the event loop up."""
    return body_bytes > LARGE_BODY_BYTES


def is_long_answer(num_floats: int) -> bool:
    """Whether encoding so many would."""
    return num_floats > LARGE_ANSWER_FLOATS


class LargeWork:
    """A few threads for what would hold the event loop up. What waits for them is bounded by `max_in_flight`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="large-json")

    async def parse(self, parse: Callable[[], Request]) -> Request:
        """Parses in a thread.

        If the caller is cancelled meanwhile, the lease of what is parsed in vain is released. Raises what `parse` does.
        """
        future = self._pool.submit(parse)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_release)
            raise

    async def encode(self, encode: Callable[[], Encoded]) -> Encoded:
        """Encodes in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, encode)

    def close(self) -> None:
        """Lets the threads end when they have done what they are doing."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _release(future: Future[RankRequest] | Future[LookupRequest]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result()
