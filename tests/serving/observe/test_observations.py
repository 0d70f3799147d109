"""Observations that are made together."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Histogram

from router.router import LookupTimes
from serving.errors import HistogramLayoutError
from serving.observe import metrics as metrics_module
from serving.observe.calls import BatchTimes
from serving.observe.metrics import MAX_KEPT, ServingMetrics, observe_all

BATCH = BatchTimes(3, 300, merge_s=0.25, lookup=LookupTimes(0.5, 1.0, 2.0, 4.0))
MERGE = {"model": "films", "stage": "merge", "method": "rank"}


def read(metrics: ServingMetrics, name: str, labels: dict[str, str]) -> float:
    return metrics._registry.get_sample_value(name, labels) or 0.0


def test_they_are_in_their_histogram_once_they_are_read_and_by_themselves_when_there_are_many() -> None:
    metrics = ServingMetrics()
    metrics.batch_ended("films", BATCH, "rank")
    assert read(metrics, "shardrank_stage_seconds_count", MERGE) == 0
    metrics.render()
    assert read(metrics, "shardrank_stage_seconds_count", MERGE) == 1
    for _ in range(MAX_KEPT):
        metrics.batch_ended("films", BATCH, "rank")
    assert read(metrics, "shardrank_stage_seconds_count", MERGE) > MAX_KEPT // 2
    metrics.render()
    assert read(metrics, "shardrank_stage_seconds_count", MERGE) == MAX_KEPT + 1
    assert read(metrics, "shardrank_stage_seconds_sum", MERGE) == 0.25 * (MAX_KEPT + 1)


@given(st.lists(st.one_of(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.5]), st.floats(0, 1e9)), min_size=1, max_size=40))
def test_many_at_once_are_as_many_one_by_one(values: list[float]) -> None:
    told = []
    for observe in (observe_all, lambda histogram, all_of_them: [histogram.observe(one) for one in all_of_them]):
        histogram = Histogram("seconds", "", buckets=(0.5, 1.0, 2.0), registry=None)
        observe(histogram, values)
        (metric,) = histogram.collect()
        told.append(
            {(one.name, *one.labels.values()): one.value for one in metric.samples if "created" not in one.name}
        )
    assert told[0] == pytest.approx(told[1])
    assert told[0]["seconds_count",] == len(values)


@pytest.mark.parametrize("field", ["_upper_bounds", "_buckets", "_sum"])
def test_a_library_whose_histograms_are_made_otherwise_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    # A class attribute that keeps instances from having their own: what they are given is dropped.
    monkeypatch.setattr(Histogram, field, property(lambda _: [], lambda *_: None), raising=False)
    with pytest.raises(HistogramLayoutError, match="prometheus_client"):
        ServingMetrics()


def test_a_library_whose_histograms_count_otherwise_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    observe = Histogram.observe
    monkeypatch.setattr(Histogram, "observe", lambda self, amount: observe(self, 2 * amount))
    with pytest.raises(HistogramLayoutError, match="prometheus_client"):
        ServingMetrics()


def test_none_is_lost_and_none_counted_twice_by_several_threads() -> None:
    metrics = ServingMetrics()

    def observe() -> None:
        for _ in range(2000):
            metrics.batch_ended("films", BATCH, "rank")

    threads = [threading.Thread(target=observe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    metrics.render()
    assert read(metrics, "shardrank_stage_seconds_count", MERGE) == 8000


def test_without_a_reader_they_are_made_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "KEEP_UP_S", 0.0)
    metrics = ServingMetrics()
    metrics.batch_ended("films", BATCH, "rank")

    async def main() -> None:
        keeping_up = asyncio.create_task(metrics.keep_up())
        for _ in range(3):
            await asyncio.sleep(0)
        keeping_up.cancel()

    asyncio.run(main())
    assert read(metrics, "shardrank_batch_requests_sum", {"model": "films"}) == 3
