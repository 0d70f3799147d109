"""What one version has done since it is here: the numbers by which a canary is compared with the live version.

A request counts for the version whose lease it took, also when it fails.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
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
from serving.inference_counter import InferenceCounter
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


class VersionCounter:
    """Counts of one version in this process; they only grow. Thread-safe.

    Attributes:
        inference: what ranking has cost.
    """

    def __init__(self) -> None:
        self.inference = InferenceCounter()
        self._lock = threading.Lock()
        self._errors = 0
        self._latency_counts = [0] * (len(LATENCY_BOUNDS_MS) + 1)
        self._score_count = 0
        self._score_sum = 0.0
        self._score_square_sum = 0.0

    def count(self, outcome: Outcome, seconds: float) -> None:
        """Counts one request.

        Args:
            outcome: from `outcome_of`.
            seconds: from its lease to its answer or error.
        """
        # Bounds are upper ones, and inclusive.
        bucket = bisect_left(LATENCY_BOUNDS_MS, 1000.0 * seconds)
        with self._lock:
            self._errors += outcome == "error"
            self._latency_counts[bucket] += 1

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
