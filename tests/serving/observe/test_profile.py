"""Where the time of requests goes: the account of stages, and the file that it is written to."""

from __future__ import annotations

from router.router import LookupTimes
from serving.observe.calls import BatchTimes
from serving.observe.metrics import ServingMetrics
from serving.observe.profile import Document

JSON, GRPC = "http", "grpc"


def seconds(account: Document) -> dict[str, float]:
    return {one["stage"]: one["seconds"] for one in account["stages"]}


def batch_of(num_requests: int) -> BatchTimes:
    return BatchTimes(num_requests, 3, 1.0, LookupTimes(2.0, 3.0, 4.0, 5.0), 14.0, 6.0, 7.0)


def test_stages_of_batches_are_in_the_metrics_without_an_account() -> None:
    metrics = ServingMetrics()
    metrics.batch_ended("films", batch_of(2), "rank")
    text = metrics.render().decode()
    for stage, value in {"merge": 1.0, "map": 2.0, "split": 3.0, "shard_wait": 4.0, "add": 5.0, "answer": 7.0}.items():
        assert f'shardrank_stage_seconds_sum{{method="rank",model="films",stage="{stage}"}} {value}' in text
