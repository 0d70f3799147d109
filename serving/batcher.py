"""The queue between the APIs and the ranking replicas of one model version.

A request goes at once to a replica that is idle. While all are busy requests wait, and the next free replica takes as
many of them as fit a batch; so batches grow with the load, and no request ever waits for others to join it. All
requests in a batcher are for one version, so a batch can't mix versions.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from serving.errors import OverloadedError, ShuttingDownError
from serving.limits import RequestLimits
from serving.pending import Answer, Pending, finish
from serving.request import LookupRequest
from shard_node.errors import DeadlineExceededError

Wake: TypeAlias = Callable[[], None]


class Batcher:
    """A bounded queue with batching. Thread-safe.

    Args:
        limits: `max_queue`, `max_batch_requests`, `max_batch_candidates`.
        clock: monotonic seconds.
    """

    def __init__(self, limits: RequestLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._queue: deque[Pending] = deque()
        self._idle: list[Wake] = []
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def submit(self, pending: Pending) -> None:
        """Queues a request and wakes an idle replica, if there is one.

        Raises:
            OverloadedError: if the queue is full. The request was not taken: its lease is the caller's.
            ShuttingDownError: if the batcher is closed.
        """
        with self._lock:
            if self._is_closed:
                raise ShuttingDownError("this model version is being unloaded")
            if len(self._queue) >= self._limits.max_queue:
                raise OverloadedError(
                    f"{len(self._queue)} requests wait, the limit max_queue = {self._limits.max_queue}"
                )
            self._queue.append(pending)
            wake = self._idle.pop() if self._idle else None
        if wake is not None:
            wake()

    def take(self, wake: Wake) -> list[Pending] | None:
        """The next batch for a replica that is free; never blocks.

        Args:
            wake: called once, from any thread, when there may be work, if there is none now. A replica gives it again
                with its next call.

        Returns:
            Rank requests that fit a batch, or one lookup; empty if there is nothing to do; None if the batcher is
            closed. Requests whose deadline has passed, or that nobody waits for any more, are dropped on the way.
        """
        dropped: list[Pending] = []
        with self._lock:
            batch = self._take_batch(dropped)
            if not batch:
                if self._is_closed:
                    return None
                self._idle.append(wake)
        if dropped:
            finish([(pending, _expired()) for pending in dropped])
        return batch

    def close(self) -> None:
        """Refuses what waits and what comes, and lets the replicas end."""
        with self._lock:
            self._is_closed = True
            left = list(self._queue)
            self._queue.clear()
            idle, self._idle = self._idle, []
        refusals: list[tuple[Pending, Answer | BaseException]] = [
            (pending, ShuttingDownError("this model version is being unloaded")) for pending in left
        ]
        finish(refusals)
        for wake in idle:
            wake()

    def _take_batch(self, dropped: list[Pending]) -> list[Pending]:
        queue, now = self._queue, self._clock()
        batch: list[Pending] = []
        num_candidates = 0
        while queue and len(batch) < self._limits.max_batch_requests:
            head = queue[0]
            if head.abandoned or head.request.deadline <= now:
                dropped.append(queue.popleft())
                continue
            if batch and num_candidates + head.num_candidates > self._limits.max_batch_candidates:
                break
            if isinstance(head.request, LookupRequest):
                return batch or [queue.popleft()]
            batch.append(queue.popleft())
            num_candidates += head.num_candidates
        return batch


def _expired() -> DeadlineExceededError:
    return DeadlineExceededError("the deadline passed while the request waited for a ranking replica")
