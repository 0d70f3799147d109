"""What one version has done since it is here: the numbers by which a canary is compared with the live version.

A request counts for the version whose lease it took, also when it fails.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from loader.errors import ShardrankError
from loader.registry.records import LATENCY_BOUNDS_MS, VersionStats
from serving.errors import (
    CountMismatchError,
    InvalidIdError,
    MissingFeatureError,
    OverloadedError,
    UnknownFeatureError,
    UnknownIdError,
)
from serving.observe.times import Call
from shard_node.bags import Float32Array

Outcome: TypeAlias = Literal["ok", "error"]

# These say that a request and a version do not fit, and that may be the version's fault: it lacks a row or a feature
# that the one before it has, or wants one more, another width, or ids of another type.
_DO_NOT_FIT = (UnknownIdError, UnknownFeatureError, MissingFeatureError, CountMismatchError, InvalidIdError)
_SERVER_FAULT = 500


def outcome_of(error: BaseException | None) -> Outcome | None:
    """What a request counts as for its version; None if it tells nothing of it.

    Args:
        error: what it ended with; None for an answer. An exception that is no ShardrankError is a defect of ours.
    """
    if error is None:
        return "ok"
    if isinstance(error, _DO_NOT_FIT):
        return "error"
    # A client that leaves, by closing its connection or by cancelling, is no Exception or has a status below 500.
    # What is shed was not begun. (A version that is shutting down is not shed: while it is leased, only the end of all
    # its replicas can bring that about.)
    if isinstance(error, OverloadedError) or not isinstance(error, Exception):
        return None
    is_fault = not isinstance(error, ShardrankError) or error.http_status >= _SERVER_FAULT
    return "error" if is_fault else None


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


class VersionCounter:
    """Counts of one version in this process; they only grow. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors = 0
        self._latency_counts = [0] * (len(LATENCY_BOUNDS_MS) + 1)
        self._score_count = 0
        self._score_sum = 0.0
        self._score_square_sum = 0.0
        self._succeeded = self._failed = self._executed = 0
        self._succeeded_s = self._failed_s = 0.0
        self._queue_s = self._input_s = self._infer_s = self._output_s = 0.0
        self._batches = 0.0
        self._last: float | None = None

    def ended(self, call: Call, outcome: str | None, now: float, *, is_answered: bool) -> None:
        """Count a call whose version was chosen.

        Args:
            call: as it ended.
            outcome: from `outcome_of`.
            now: monotonic seconds.
            is_answered: with scores or embeddings.
        """
        # Bounds are upper ones, and inclusive.
        bucket = bisect_left(LATENCY_BOUNDS_MS, 1000.0 * (now - call.leased))
        seconds, batch = now - call.began, call.batch
        with self._lock:
            if outcome is not None:
                self._errors += outcome == "error"
                self._latency_counts[bucket] += 1
            if call.method != "rank":
                return
            self._last = now
            if not is_answered:
                self._failed += 1
                self._failed_s += seconds
                return
            self._succeeded += 1
            self._succeeded_s += seconds
            if batch is not None:
                self._executed += 1
                self._queue_s += call.queue_s
                self._input_s += batch.merge_s
                self._infer_s += batch.lookup_s + batch.rank_s
                self._output_s += batch.answer_s
                # Each request of a batch is its share of it.
                self._batches += 1 / batch.num_requests

    def scored(self, scores: Float32Array) -> None:
        """Adds the scores of a batch.

        Args:
            scores: float32 [N], all finite; only those that are answered.
        """
        # float32 sums of millions of scores would lose the last ones.
        exact = scores.astype(np.float64)
        total, square = float(exact.sum()), float(exact @ exact)
        with self._lock:
            self._score_count += exact.size
            self._score_sum += total
            self._score_square_sum += square

    def stats(self) -> VersionStats:
        """All counts as of one moment."""
        with self._lock:
            requests = sum(self._latency_counts)
            return VersionStats(
                requests=requests,
                errors=self._errors,
                latency_counts=tuple(self._latency_counts) if requests else (),
                score_count=self._score_count,
                score_sum=self._score_sum,
                score_square_sum=self._score_square_sum,
            )

    def totals(self) -> InferenceTotals:
        """Sums over rank requests as of one moment."""
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
