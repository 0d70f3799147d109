"""Where the time of requests goes: the account of stages, and the file that it is written to."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from router.router import LookupTimes
from serving.errors import ProfileFileError
from serving.observe.calls import AFTER_BATCH, BEFORE_BATCH, IN_BATCH, STAGES, BatchTimes, Call
from serving.observe.metrics import ServingMetrics
from serving.observe.profile import Document, ProfileFile, StageAccount, profiled
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


def test_on_cards_a_lookup_is_a_part_of_ranking() -> None:
    account = StageAccount()
    times = BatchTimes(merge_s=1.0, lookup_s=0.5, rank_s=1.5, answer_s=3.0)
    account.add(call_of(JSON, (0.0,) * 4, times, (0.0, 0.0)), 6.0)
    (told,) = account.accounts()
    assert seconds(told) | {"merge": 1, "rank": 2, "answer": 3} == seconds(told)
    assert told["unaccounted_s"] == 0


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


def add_one(account: StageAccount) -> None:
    account.add(Call("http", "rank", 0.0, "films", batch=BatchTimes(rank_s=1.0)), 1.0)


def test_a_file_always_has_the_whole_account(tmp_path) -> None:
    account, path = StageAccount(), tmp_path / "profile.json"
    now = 100.0
    file = ProfileFile(path, account, clock=lambda: now, wall_clock=lambda: 1_700_000_000.0)
    for requests in (1, 2):
        add_one(account)
        now += 2.5
        file.write()
        document = json.loads(path.read_bytes())
        assert document["seconds"] == 2.5 * requests
        assert document["began_at"] == "2023-11-14T22:13:20+00:00"
        (told,) = document["accounts"]
        assert (told["requests"], told["whole_s"]) == (requests, requests)
    assert [one.name for one in tmp_path.iterdir()] == ["profile.json"]


def test_a_thread_that_has_ended_is_still_told(tmp_path) -> None:
    file = ProfileFile(tmp_path / "profile.json", StageAccount())
    may_end, has_worked = threading.Event(), threading.Event()

    def work() -> None:
        sum(number * number for number in range(2_000_000))
        has_worked.set()
        may_end.wait()

    thread = threading.Thread(target=work, name="works")
    thread.start()
    has_worked.wait()
    seen = file.document()["cpu_s_by_thread"]["works"]
    assert seen > 0
    may_end.set()
    thread.join()
    for _ in range(2):
        assert file.document()["cpu_s_by_thread"]["works"] == seen
    document = file.document()
    assert document["cpu_s"] >= seen
    assert sum(document["cpu_s_by_thread"].values()) >= document["cpu_s"] - 1e-6


def test_the_account_is_kept_for_the_time_of_the_block_alone(tmp_path) -> None:
    metrics, path = ServingMetrics(), tmp_path / "profile.json"
    with profiled(path, metrics):
        assert json.loads(path.read_text())["accounts"] == []
        assert metrics.on_answered is not None
        metrics.on_answered(Call("http", "rank", 0.0, "films", batch=BatchTimes(rank_s=1.0)), 1.0)
    assert metrics.on_answered is None
    assert json.loads(path.read_text())["accounts"][0]["requests"] == 1
    with profiled(None, metrics):
        assert metrics.on_answered is None


def test_a_folder_that_goes_away_ends_the_file_and_not_the_serving(tmp_path, caplog) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with profiled(folder / "profile.json", ServingMetrics()):
        (folder / "profile.json").unlink()
        folder.rmdir()
    assert "No such file or directory" in caplog.text
    again = profiled(folder / "profile.json", ServingMetrics())
    with pytest.raises(ProfileFileError, match=r"--profile .*profile\.json: No such file"), again:
        pass
