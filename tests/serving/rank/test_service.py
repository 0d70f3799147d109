from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from serving.errors import ClientGoneError, ModelNotFoundError
from serving.formats.json_reader import JsonCodec, encode_request
from serving.rank.service import RankingService, answer
from serving.versions.loading import ModelSource, load_served_model
from shard_node.errors import DeadlineExceededError
from shardrank_testing.serving_api import (
    MODEL,
    Gate,
    Waiting,
    api_request,
    ask,
    gated_service,
    write_api_model,
)


def leases(service: RankingService) -> list[int]:
    return [generation.leases for generation in service.generations.all()]


def ranking_threads() -> int:
    return sum(thread.name.startswith("rank-") for thread in threading.enumerate())


async def rank(service: RankingService, request: dict, watch=None):
    return await ask(service, request, watch=watch)


def metric(service: RankingService, line: str) -> float:
    found = [one for one in service.metrics.render().decode().splitlines() if one.startswith(line + " ")]
    return float(found[0].rsplit(" ", 1)[1]) if found else 0.0


async def test_while_the_replica_is_busy_requests_are_joined_and_each_gets_its_own_scores(api_model):
    gate = Gate()

    with gated_service(api_model, gate) as service:
        first = asyncio.create_task(rank(service, api_request(0)))
        await gate.wait_until_busy()
        requests = [api_request(seed, count) for seed, count in ((1, 3), (2, 1), (3, 7))]
        others = [asyncio.create_task(rank(service, request)) for request in requests]
        await asyncio.sleep(0)
        assert service.generations.all()[0].payload.num_waiting == 3
        gate.open.set()
        answers = await asyncio.gather(first, *others)
        for request, answer in zip([api_request(0), *requests], answers, strict=True):
            expected = api_model.scores(request)
            np.testing.assert_allclose(answer.scores, expected, rtol=1e-5)
            assert answer.order.tolist() == np.argsort(-answer.scores, kind="stable").tolist()
        assert metric(service, 'shardrank_batch_requests_bucket{le="1.0",model="films"}') == 1
        assert metric(service, 'shardrank_batch_requests_count{model="films"}') == 2
        assert metric(service, 'shardrank_batch_candidates_sum{model="films"}') == 16
        assert leases(service) == [0]


async def test_in_one_batch_only_the_request_with_an_unknown_id_fails(api_model):
    gate = Gate()
    bad = api_request(2)
    bad["candidates"]["sparse"]["film"][4] = 999
    worse = api_request(4)
    worse["context"]["sparse"]["user"] = [1000]
    requests = [api_request(1), bad, api_request(3), worse, api_request(5)]

    with gated_service(api_model, gate) as service:
        first = asyncio.create_task(rank(service, api_request(0)))
        await gate.wait_until_busy()
        joined = [asyncio.create_task(rank(service, request)) for request in requests]
        await asyncio.sleep(0)
        gate.open.set()
        outcomes = await asyncio.gather(*joined, return_exceptions=True)
        await first
        assert metric(service, 'shardrank_batch_requests_count{model="films"}') == 2
        for number in (0, 2, 4):
            np.testing.assert_allclose(outcomes[number].scores, api_model.scores(requests[number]), rtol=1e-5)
        assert str(outcomes[1]).startswith("candidates.sparse.film[4][0]: 999 has no row")
        assert str(outcomes[3]).startswith("context.sparse.user[0]: 1000 has no row")
        assert leases(service) == [0]


async def test_top_k_cuts_the_order_and_not_the_scores(api_service):
    whole = await rank(api_service, api_request(1, 9))
    cut = await rank(api_service, api_request(1, 9) | {"top_k": 4})
    more = await rank(api_service, api_request(1, 9) | {"top_k": 100})
    assert cut.order.tolist() == whole.order.tolist()[:4]
    assert cut.scores.tolist() == more.scores.tolist() == whole.scores.tolist()
    assert more.order.size == 9


async def test_the_deadline_ends_the_wait_but_the_lease_lasts_until_the_batch_is_done(api_model):
    gate = Gate()

    with gated_service(api_model, gate) as service:
        with pytest.raises(DeadlineExceededError):
            await rank(service, api_request(0) | {"timeout_ms": 20})
        assert leases(service) == [1]
        gate.open.set()
        await rank(service, api_request(1))
        assert leases(service) == [0]


async def test_what_expires_or_is_left_in_the_queue_is_never_run(api_model):
    gate = Gate()

    with gated_service(api_model, gate) as service:
        first = asyncio.create_task(rank(service, api_request(0)))
        await gate.wait_until_busy()
        with pytest.raises(DeadlineExceededError):
            await rank(service, api_request(1) | {"timeout_ms": 20})
        cancelled = asyncio.create_task(rank(service, api_request(2)))
        leave = []
        gone = asyncio.create_task(rank(service, api_request(3), leave.append))
        await asyncio.sleep(0)
        cancelled.cancel()
        leave[0]()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(ClientGoneError):
            await gone
        gate.open.set()
        await first
        await rank(service, api_request(4))
        assert metric(service, 'shardrank_batch_requests_sum{model="films"}') == 2
        assert metric(service, 'shardrank_errors_total{api="embedded",kind="client_gone",method="rank"}') == 2
        assert leases(service) == [0]


async def test_a_new_version_takes_over_and_requests_of_the_old_one_end_on_it(tmp_path, api_model):
    gate = Gate()
    newer = write_api_model(tmp_path, version=2, seed=9)

    with gated_service(api_model, gate) as service:
        old = asyncio.create_task(rank(service, api_request(0)))
        await gate.wait_until_busy()
        pinned = asyncio.create_task(rank(service, api_request(1) | {"version": 1}))
        await asyncio.sleep(0)
        before = service.generations.all()[0]
        threads = ranking_threads()
        service.install(load_served_model(ModelSource(snapshot=newer.path, dtype="float32"), service))
        answer = await rank(service, api_request(0))
        assert answer.version == 2
        np.testing.assert_allclose(answer.scores, newer.scores(api_request(0)), rtol=1e-5)
        assert before.state == "draining"
        gate.open.set()
        for task, seed in ((old, 0), (pinned, 1)):
            answer = await task
            assert answer.version == 1
            np.testing.assert_allclose(answer.scores, api_model.scores(api_request(seed)), rtol=1e-5)
        await asyncio.to_thread(before.retired.wait)
        with pytest.raises(ModelNotFoundError, match="version 1 is not served here; served are"):
            await rank(service, api_request(1) | {"version": 1})
        assert ranking_threads() == threads  # one more for version 2, one less for version 1


async def test_the_deadline_is_counted_from_arrival(api_model):
    gate = Gate()

    async def late() -> bytes:
        await asyncio.sleep(0.05)
        return encode_request(api_request(0) | {"timeout_ms": 40})

    with gated_service(api_model, gate) as service:
        with pytest.raises(DeadlineExceededError):
            await answer(service, JsonCodec("rank", MODEL), late, Waiting())
        # It had no time left when it was complete, so it was never run.
        assert metric(service, 'shardrank_batch_requests_sum{model="films"}') == 0
