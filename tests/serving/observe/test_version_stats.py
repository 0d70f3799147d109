"""The numbers that a canary is judged by."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.registry.fleet import LATENCY_BOUNDS_MS, VersionStats
from router.errors import ShardUnavailableError
from serving.errors import (
    ClientGoneError,
    CountMismatchError,
    InvalidFieldError,
    InvalidIdError,
    LimitExceededError,
    MissingFeatureError,
    ModelOutputError,
    OverloadedError,
    ShuttingDownError,
    UnknownFeatureError,
    UnknownIdError,
)
from serving.observe.calls import Call, VersionCounter, outcome_of
from shard_node.errors import DeadlineExceededError


def ended(counter: VersionCounter, outcome: str, seconds: float) -> None:
    counter.ended(Call("http", "rank", 0.0, "films", 1, counter), outcome, seconds)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ModelOutputError("x"), "error"),
        (ShardUnavailableError("x"), "error"),
        (DeadlineExceededError("x"), "error"),
        # With a lease only this is left of it: the version's replicas have ended.
        (ShuttingDownError("x"), "error"),
        (ValueError("a defect"), "error"),
        (UnknownIdError("film", "x"), "error"),
        (UnknownFeatureError("film", "x"), "error"),
        (MissingFeatureError("film", "x"), "error"),
        (CountMismatchError("dense", "x"), "error"),
        (InvalidIdError("film", "x"), "error"),
        (InvalidFieldError("top_k", "x"), None),
        (LimitExceededError("candidates", "max_candidates", 1, 2, "candidates"), None),
        (OverloadedError("x"), None),
        (ClientGoneError("x"), None),
        (asyncio.CancelledError(), None),
    ],
)
def test_what_a_request_counts_as(error, outcome):
    assert outcome_of(error) == outcome


@given(st.lists(st.tuples(st.sampled_from(["ok", "error"]), st.floats(min_value=0, max_value=200))))
def test_latencies_are_counted_by_their_bounds_whether_a_request_failed_or_not(requests):
    counter = VersionCounter()
    for outcome, seconds in requests:
        ended(counter, outcome, seconds)
    stats = counter.stats()
    assert stats.requests == len(requests)
    assert stats.errors == sum(outcome == "error" for outcome, _ in requests)
    buckets = np.searchsorted(LATENCY_BOUNDS_MS, [1000.0 * seconds for _, seconds in requests], side="left")
    expected = np.bincount(buckets.astype(np.int64), minlength=len(LATENCY_BOUNDS_MS) + 1) if requests else []
    assert list(stats.latency_counts) == list(expected)


def test_a_latency_on_a_bound_is_below_it_and_one_above_all_bounds_has_a_place():
    counter = VersionCounter()
    ended(counter, "ok", LATENCY_BOUNDS_MS[3] / 1000)
    ended(counter, "ok", 1e6)
    counts = counter.stats().latency_counts
    assert [index for index, count in enumerate(counts) if count] == [3, len(LATENCY_BOUNDS_MS)]


@given(st.lists(st.lists(st.floats(min_value=0, max_value=1, width=32)), max_size=10))
def test_scores_are_summed_in_double_precision(batches):
    counter = VersionCounter()
    for batch in batches:
        counter.scored(np.array(batch, np.float32))
    scores = np.array([score for batch in batches for score in batch], np.float64)
    stats = counter.stats()
    assert stats.score_count == scores.size
    np.testing.assert_allclose(stats.score_sum, scores.sum(), rtol=1e-12)
    np.testing.assert_allclose(stats.score_square_sum, (scores**2).sum(), rtol=1e-12)


def test_a_version_that_has_done_nothing_says_so():
    assert VersionCounter().stats() == VersionStats()


def test_threads_lose_no_count():
    counter = VersionCounter()

    def work() -> None:
        for number in range(500):
            ended(counter, "error" if number % 2 else "ok", 0.001)
            counter.scored(np.ones(3, np.float32))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = counter.stats()
    assert (stats.requests, stats.errors, sum(stats.latency_counts)) == (2000, 1000, 2000)
    assert (stats.score_count, stats.score_sum, stats.score_square_sum) == (6000, 6000.0, 6000.0)
