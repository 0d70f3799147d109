"""What ranking has cost one version since it is here, summed up: the numbers behind `ModelStatistics`.

Times are of requests: a batch's time counts for each request in it, since each has waited for all of it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from serving.pending import Pending


@dataclass(frozen=True, slots=True)
class InferenceTotals:
    """Sums over rank requests, whatever API they came by.

    Attributes:
        succeeded, succeeded_s: requests that were answered, from arrival to answer.
        failed, failed_s: requests that were not, after their version was chosen.
        executed: requests that have been in a batch with an answer, to which the following belong.
        queue_s: waiting for a replica.
        input_s: joined with others of their batch.
        infer_s: rows looked up, candidates scored.
        output_s: scores checked and sorted, answers made.
        batches: in which they were; one in which some request failed counts for those that were answered.
        last: when the last one ended, monotonic seconds; None if there was none.
    """

    succeeded: int = 0
    succeeded_s: float = 0.0
    failed: int = 0
    failed_s: float = 0.0
    executed: int = 0
    queue_s: float = 0.0
    input_s: float = 0.0
    infer_s: float = 0.0
    output_s: float = 0.0
    batches: int = 0
    last: float | None = None


class InferenceCounter:
    """Counts of one version in this process; they only grow. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._succeeded = self._failed = self._executed = 0
        self._succeeded_s = self._failed_s = 0.0
        self._queue_s = self._input_s = self._infer_s = self._output_s = 0.0
        self._batches = 0.0
        self._last: float | None = None

    def ended(self, seconds: float, now: float, *, is_answered: bool) -> None:
        """Counts one rank request.

        Args:
            seconds: from its arrival to its end.
            now: monotonic seconds.
            is_answered: with scores.
        """
        with self._lock:
            self._last = now
            if is_answered:
                self._succeeded += 1
                self._succeeded_s += seconds
            else:
                self._failed += 1
                self._failed_s += seconds

    def executed(self, pending: Pending) -> None:
        """Counts what an answered request's batch has cost; nothing if it does not know its batch."""
        times = pending.batch
        if times is None:
            return
        infer_s = sum(times.seconds()) - times.merge_s - times.answer_s
        with self._lock:
            self._executed += 1
            self._queue_s += pending.queue_s
            self._input_s += times.merge_s
            self._infer_s += infer_s
            self._output_s += times.answer_s
            # Each request of a batch is its share of it.
            self._batches += 1 / times.num_requests

    def totals(self) -> InferenceTotals:
        """All sums as of one moment."""
        with self._lock:
            return InferenceTotals(
                succeeded=self._succeeded,
                succeeded_s=self._succeeded_s,
                failed=self._failed,
                failed_s=self._failed_s,
                executed=self._executed,
                queue_s=self._queue_s,
                input_s=self._input_s,
                infer_s=self._infer_s,
                output_s=self._output_s,
                batches=round(self._batches),
                last=self._last,
            )
