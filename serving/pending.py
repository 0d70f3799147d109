"""A request that waits for its answer, whoever waits: a coroutine on an event loop, or a thread.

It holds the lease: a request itself is arrays and nothing else.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serving.formats.requests import Answer, RankRequest, Request
from serving.stages import BatchTimes
from shard_node.generation import Lease

if TYPE_CHECKING:
    from serving.served_model import ServedModel


@dataclass(slots=True, eq=False)
class Pending:
    """One admitted request.

    Attributes:
        request: what is asked.
        lease: on the version that answers; `finish` releases it.
        deadline: when nobody waits any more, monotonic seconds.
        arrived: when it was queued, monotonic seconds.
        future: gets the answer or the error.
        loop: the loop that the future belongs to; None for a `concurrent.futures.Future`.
        longest_sequence: ids in the longest bag of a feature that is not pooled.
        abandoned: set when nobody waits any more; what has not begun by then is dropped.
        queue_s: how long it waited for a replica; set by that.
        batch: where the time of its batch went; set by the replica once it has an answer.
    """

    request: Request
    lease: Lease[ServedModel]
    deadline: float
    arrived: float
    future: asyncio.Future[Any] | concurrent.futures.Future[Any]
    loop: asyncio.AbstractEventLoop | None
    longest_sequence: int = 0
    abandoned: bool = False
    queue_s: float = 0.0
    batch: BatchTimes | None = None

    @property
    def method(self) -> str:
        """`rank` or `lookup`, for metrics."""
        return "rank" if isinstance(self.request, RankRequest) else "lookup"

    @property
    def num_candidates(self) -> int:
        """Candidates that it adds to a batch; a lookup adds none."""
        return self.request.num_candidates if isinstance(self.request, RankRequest) else 0

    def is_dead(self, now: float) -> bool:
        """Whether its answer would come to nobody."""
        return self.abandoned or self.deadline <= now


def finish(outcomes: Iterable[tuple[Pending, Answer | BaseException]]) -> None:
    """Releases the leases and hands out answers and errors: to each event loop in one call.

    Must be called exactly once for each request that was admitted, from any thread, when nothing uses its version's
    payload any more.
    """
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[Any, Answer | BaseException]]] = defaultdict(list)
    for pending, outcome in outcomes:
        pending.lease.release()
        if pending.loop is None:
            _settle(pending.future, outcome)
        else:
            by_loop[pending.loop].append((pending.future, outcome))
    here = asyncio._get_running_loop() if by_loop else None
    for loop, settled in by_loop.items():
        if loop is here:
            _settle_all(settled)
            continue
        try:
            loop.call_soon_threadsafe(_settle_all, settled)
        except RuntimeError:
            # The loop was closed: whoever waited on it is gone, and there is nobody left to tell.
            continue


def _settle_all(settled: list[tuple[Any, Answer | BaseException]]) -> None:
    for future, outcome in settled:
        _settle(future, outcome)


def _settle(future: Any, outcome: Answer | BaseException) -> None:
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
