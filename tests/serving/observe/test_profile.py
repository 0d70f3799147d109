"""Where the time of requests goes: the account of stages, and the file that it is written to."""

from __future__ import annotations

import asyncio

import pytest

from router.router import LookupTimes
from serving.observe.calls import AFTER_BATCH, BEFORE_BATCH, IN_BATCH, STAGES, BatchTimes, Call
from serving.observe.metrics import ServingMetrics
from serving.observe.profile import Document, StageAccount
from serving.rank.service import RankingService
from shardrank_testing.serving_api import Gate, api_request, ask, gated_service

JSON, GRPC = "http", "grpc"


def seconds(account: Document) -> dict[str, float]:
    return {one["stage"]: one["seconds"] for one in account["stages"]}


def busy(account: Document) -> dict[str, float]:
    return {one["stage"]: one["busy_s"] for one in account["stages"]}


def batch_of(num_requests: int) -> BatchTimes:
    return BatchTimes(num_requests, 3, 1.0, LookupTimes(2.0, 3.0, 4.0, 5.0), 14.0, 6.0, 7.0)


def call_of(api: str, before: tuple[float, ...], batch: BatchTimes, after: tuple[float, ...]) -> Call:
    receive, decode, parse, queue = before
    hand_back, encode = after
    answered = batch.ended + hand_back
    return Call(
        *(api, "rank", 0.0, "films"),
        received=receive,
        leased=receive + decode,
        parsed=receive + decode + parse,
        queue_s=queue,
        batch=batch,
        answered=answered,
        encoded=answered + encode,
    )


def test_every_stage_stands_in_its_place() -> None:
    account = StageAccount()
    account.add(call_of(JSON, (10.0, 11.0, 12.0, 13.0), batch_of(1), (14.0, 15.0)), 105.0)
    (told,) = account.accounts()
    before, after = {"receive": 10, "decode": 11, "parse": 12, "queue": 13}, {"hand_back": 14, "encode": 15}
    inside = {"merge": 1, "map": 2, "split": 3, "shard_wait": 4, "add": 5, "rank": 6, "answer": 7}
    assert seconds(told) == before | inside | after
    assert tuple(seconds(told)) == STAGES == BEFORE_BATCH + IN_BATCH + AFTER_BATCH
    assert busy(told) == seconds(told)
    assert {one["stage"] for one in told["stages"] if one["per"] == "batch"} == set(IN_BATCH)
    assert (told["whole_s"], told["mean_ms"]) == (105.0, 105_000.0)
    assert (told["unaccounted_s"], told["unaccounted_share"]) == (pytest.approx(2.0), pytest.approx(2 / 105))
    assert sum(one["share"] for one in told["stages"]) == pytest.approx(103 / 105)


def test_a_batch_s_time_is_waited_for_by_each_request_and_worked_once() -> None:
    account, batch = StageAccount(), batch_of(4)
    for api in (JSON, JSON, JSON, GRPC):
        account.add(call_of(api, (0.5,) * 4, batch, (0.25,) * 2), 30.5)
    grpc, json = account.accounts()
    assert (grpc["api"], grpc["requests"], grpc["batches"]) == ("grpc", 1, 0.25)
    assert (json["api"], json["requests"], json["batches"]) == ("http", 3, 0.75)
    assert seconds(json)["rank"] == 18.0
    assert busy(json)["rank"] == 4.5
    assert busy(json)["rank"] + busy(grpc)["rank"] == 6.0
    assert busy(json)["queue"] == seconds(json)["queue"] == 1.5
    assert json["unaccounted_s"] == pytest.approx(0.0)


def test_requests_of_one_batch_have_its_times_and_each_its_own_wait(api_model) -> None:
    gate = Gate()
    calls: list[Call] = []

    async def rank(service: RankingService, seed: int) -> None:
        await ask(service, api_request(seed))

    async def main() -> None:
        with gated_service(api_model, gate) as service:
            service.metrics.on_answered = lambda call, whole_s: calls.append(call)
            first = asyncio.create_task(rank(service, 0))
            await gate.wait_until_busy()
            others = [asyncio.create_task(rank(service, seed)) for seed in (1, 2, 3)]
            served = service.generations.all()[0].payload
            while served.num_waiting < len(others):  # noqa: ASYNC110  # the queue tells nobody
                await asyncio.sleep(0.001)
            gate.open.set()
            await asyncio.gather(first, *others)

    asyncio.run(main())
    alone, *together = calls
    assert alone.batch is not None
    assert together[0].batch is not None
    assert alone.batch.num_requests == 1
    # The gate is in the shard.
    assert alone.batch.lookup is not None
    assert alone.batch.lookup.shard_wait_s > 0
    assert together[0].batch is together[1].batch is together[2].batch
    assert together[0].batch.num_requests == 3
    assert min(together[0].batch.seconds()) >= 0
    assert together[0].queue_s >= together[1].queue_s >= together[2].queue_s > 0
    assert alone.batch.ended < together[0].batch.ended


def test_stages_of_batches_are_in_the_metrics_without_an_account() -> None:
    metrics = ServingMetrics()
    metrics.batch_ended("films", batch_of(2), "rank")
    text = metrics.render().decode()
    for stage, value in {"merge": 1.0, "map": 2.0, "split": 3.0, "shard_wait": 4.0, "add": 5.0, "answer": 7.0}.items():
        assert f'shardrank_stage_seconds_sum{{method="rank",model="films",stage="{stage}"}} {value}' in text
