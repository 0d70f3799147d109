"""Metrics of calls and batches, and what a version counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Histogram

from loader.errors import DeadlineExceededError, OverloadedError, UnavailableError
from loader.registry.fleet import LATENCY_BOUNDS_MS
from router.hot_keeper import HotStatus
from router.router import LookupTimes
from serving.errors import InternalError, InvalidRequestError, limit_exceeded
from serving.observe.calls import BatchTimes, Call, VersionCounter, outcome_of
from serving.observe.metrics import MAX_KEPT, ServingMetrics, observe_all

BATCH = BatchTimes(3, 300, merge_s=0.25, lookup=LookupTimes(0.5, 1.0, 2.0, 4.0), answer_s=7.0)
MERGE = {"model": "films", "stage": "merge", "method": "rank"}


def read(metrics: ServingMetrics, name: str, labels: dict[str, str]) -> float:
    return metrics._registry.get_sample_value(name, labels) or 0.0


def in_four_threads(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work) for _ in range(4)]:
            done.result()


def test_stages_of_batches_are_in_their_histogram_once_it_is_read_or_there_are_many() -> None:
    metrics = ServingMetrics()
    metrics.batch_ended("films", BATCH, "rank")
    assert read(metrics, "shardrank_stage_seconds_count", MERGE) == 0
    metrics.render()
    assert read(metrics, "shardrank_stage_seconds_count", MERGE) == 1
    seconds = {"merge": 0.25, "map": 0.5, "split": 1.0, "shard_wait": 2.0, "add": 4.0, "answer": 7.0}
    for stage, expected in seconds.items():
        assert read(metrics, "shardrank_stage_seconds_sum", MERGE | {"stage": stage}) == expected
    for _ in range(MAX_KEPT):
        metrics.batch_ended("films", BATCH, "rank")
    assert read(metrics, "shardrank_stage_seconds_count", MERGE) > MAX_KEPT // 2
    metrics.render()
    assert read(metrics, "shardrank_stage_seconds_count", MERGE) == MAX_KEPT + 1
    assert read(metrics, "shardrank_stage_seconds_sum", MERGE) == 0.25 * (MAX_KEPT + 1)


@given(st.lists(st.one_of(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.5]), st.floats(0, 1e9)), min_size=1, max_size=40))
def test_many_at_once_are_as_many_one_by_one(values: list[float]) -> None:
    at_once, one_by_one = (Histogram("seconds", "", buckets=(0.5, 1.0, 2.0), registry=None) for _ in range(2))
    observe_all(at_once, values)
    for value in values:
        one_by_one.observe(value)
    found, expected = (
        {(sample.name, *sample.labels.values()): sample.value for sample in histogram.collect()[0].samples}
        for histogram in (at_once, one_by_one)
    )
    assert found["seconds_count",] == len(values)
    assert found | {("seconds_created",): 0} == pytest.approx(expected | {("seconds_created",): 0})


def test_threads_lose_no_batch() -> None:
    metrics = ServingMetrics()
    in_four_threads(lambda: [metrics.batch_ended("films", BATCH, "rank") for _ in range(2000)])
    metrics.render()
    assert read(metrics, "shardrank_stage_seconds_count", MERGE) == 8000


def ended(counter: VersionCounter, outcome: str, seconds: float) -> None:
    counter.ended(Call("http", "rank", 0.0, "films", 1, counter), outcome, seconds)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InternalError("x", kind="model_output"), "error"),
        (UnavailableError("x", kind="shard_unavailable"), "error"),
        (DeadlineExceededError("x"), "error"),
        # With a lease only this is left of it: the version's replicas have ended.
        (UnavailableError("x", kind="shutting_down"), "error"),
        (ValueError("a defect"), "error"),
        (InvalidRequestError("film", "x", kind="unknown_id"), None),
        (InvalidRequestError("top_k", "x", kind="invalid_field"), None),
        (limit_exceeded("candidates", "max_candidates", 1, 2, "candidates"), None),
        (OverloadedError("x"), None),
        (InvalidRequestError("", "x", kind="client_gone"), None),
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


def test_threads_lose_no_request():
    counter = VersionCounter()

    def work() -> None:
        for number in range(500):
            ended(counter, "error" if number % 2 else "ok", 0.001)
            counter.scored(np.ones(3, np.float32))

    in_four_threads(work)
    stats = counter.stats()
    assert (stats.requests, stats.errors, sum(stats.latency_counts)) == (2000, 1000, 2000)
    assert (stats.score_count, stats.score_sum, stats.score_square_sum) == (6000, 6000.0, 6000.0)


def test_hot_rows_are_counted_by_table_and_their_gauges_go_with_their_version():
    metrics = ServingMetrics()
    for _ in range(2):
        counts = np.array([5, 0]), np.array([3, 0])
        metrics.hot_rows(HotStatus("m", 1, ("a", "b"), 7, 700, 9, *counts))
    text = metrics.render().decode()
    assert 'shardrank_hot_lookups_total{model="m",table="a"} 10.0' in text
    assert 'shardrank_hot_hits_total{model="m",table="a"} 6.0' in text
    assert 'table="b"' not in text
    for name, value in (("rows", "7.0"), ("bytes", "700.0"), ("sequence", "9.0")):
        assert f'shardrank_hot_{name}{{model="m",version="1"}} {value}' in text
    metrics.set_version("dtype_fallback", "m", 1, 0)
    metrics.set_version("wire_fallback", "m", 1, 0)
    for version in (1, 2):
        metrics.count("keys", "m", version, "films", "film", "true", by=3)
    metrics.forget_version("m", 1)
    text = metrics.render().decode()
    assert "shardrank_hot_rows{" not in text
    keys = [line for line in text.splitlines() if line.startswith("shardrank_keys_total{")]
    assert keys == ['shardrank_keys_total{feature="film",found="true",model="m",table="films",version="2"} 3.0']
    assert "shardrank_hot_lookups_total{" in text


def test_what_happens_with_replicas_is_counted_and_who_is_out_is_told():
    metrics = ServingMetrics()
    events = metrics.replica_events("films")
    events.retried("late")
    events.denied("late")
    for more in (1, 1, -1):
        events.ejected_change(2, more)
    events.ejected(2, "slow")
    text = metrics.render().decode()
    assert 'shardrank_shard_retries_total{kind="late",model="films"} 1.0' in text
    assert 'shardrank_shard_retries_denied_total{kind="late",model="films"} 1.0' in text
    assert 'shardrank_replica_ejections_total{model="films",reason="slow",shard="2"} 1.0' in text
    assert 'shardrank_replicas_ejected{model="films",shard="2"} 1.0' in text
