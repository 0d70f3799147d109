"""The queue between the APIs and the ranking replicas of one model version.

A request goes at once to a replica that is idle. While all are busy requests wait, and the next free replica takes as
many of them as fit a batch; so batches grow with the load, and no request ever waits for others to join it. All
requests in a batcher are for one version, so a batch can't mix versions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from serving.errors import OverloadedError, ShuttingDownError
from serving.formats.requests import LookupRequest
from serving.limits import RequestLimits
from serving.pending import Pending, finish
from shard_node.errors import DeadlineExceededError

logger = logging.getLogger(__name__)

Wake: TypeAlias = Callable[[], None]


class Batcher:
    """A bounded queue with batching. Thread-safe.

    Args:
        limits: `max_queue` and the `max_batch_` ones.
        clock: monotonic seconds.
    """

    def __init__(self, limits: RequestLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._queue: deque[Pending] = deque()
        self._idle: list[Wake] = []
        self._closed_because = ""

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
        dropped: list[Pending] = []
        try:
            with self._lock:
                if self._closed_because:
                    raise self._refusal()
                if len(self._queue) >= self._limits.max_queue:
                    self._drop_dead(dropped)
                if len(self._queue) >= self._limits.max_queue:
                    raise OverloadedError(
                        f"{len(self._queue)} requests wait, the limit max_queue = {self._limits.max_queue}"
                    )
                self._queue.append(pending)
        finally:
            finish([(one, _expired()) for one in dropped])
        self._wake_one()

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
                if self._closed_because:
                    return None
                self._idle.append(wake)
        if dropped:
            finish([(pending, _expired()) for pending in dropped])
        return batch

    def close(self, reason: str = "it is being unloaded") -> None:
        """Refuses what waits and what comes, telling why, and lets the replicas end."""
        with self._lock:
            self._closed_because = reason
            left = list(self._queue)
            self._queue.clear()
            idle, self._idle = self._idle, []
        finish([(pending, self._refusal()) for pending in left])
        for wake in idle:
            _wake(wake)

    def _refusal(self) -> ShuttingDownError:
        return ShuttingDownError(f"this model version does not answer any more: {self._closed_because}")

    def _wake_one(self) -> None:
        while True:
            with self._lock:
                wake = self._idle.pop() if self._idle else None
            if wake is None or _wake(wake):
                return

    def _drop_dead(self, dropped: list[Pending]) -> None:
        # Each is asked once: it may be abandoned at any moment, and must end up in one of the two.
        now, waiting = self._clock(), self._queue
        self._queue = deque()
        for pending in waiting:
            (dropped if pending.is_dead(now) else self._queue).append(pending)

    def _take_batch(self, dropped: list[Pending]) -> list[Pending]:
        queue, now = self._queue, self._clock()
        limits, batch = self._limits, list[Pending]()
        num_candidates = num_ids = longest_sequence = 0
        while queue and len(batch) < limits.max_batch_requests:
            head = queue[0]
            if head.is_dead(now):
                dropped.append(queue.popleft())
                continue
            request = head.request
            if isinstance(request, LookupRequest):
                return batch or [queue.popleft()]
            num_candidates += request.num_candidates
            num_ids += request.bags.num_values
            # Sequences are padded to the longest, so one long one makes all candidates dear.
            longest_sequence = max(longest_sequence, head.longest_sequence)
            fits = (
                num_candidates <= limits.max_batch_candidates
                and num_ids <= limits.max_batch_ids
                and num_candidates * longest_sequence <= limits.max_batch_pairs
            )
            if batch and not fits:
                break
            batch.append(queue.popleft())
        return batch


def _wake(wake: Wake) -> bool:
    """Wakes a replica, unless it has ended: then its loop is closed, and readiness tells of it."""
    try:
        wake()
    except RuntimeError as error:
        logger.warning("a ranking replica can't be woken: %s", error)
        return False
    return True


def _expired() -> DeadlineExceededError:
    return DeadlineExceededError("the deadline passed while the request waited for a ranking replica")
