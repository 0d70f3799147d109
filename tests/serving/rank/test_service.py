from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from loader.errors import DeadlineExceededError
from serving.embedded import ModelSource, load_served_model
from serving.formats.json_reader import JsonCodec
from serving.rank.service import RankingService, answer
from shardrank_testing.errors import raises_kind
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


@pytest.fixture
def gated(api_model) -> Iterator[tuple[RankingService, Gate]]:
    """A service of one replica that waits at the gate, and the gate."""
    gate = Gate()
    with gated_service(api_model, gate) as service:
        yield service, gate


def metric(service: RankingService, line: str) -> float:
    found = [one for one in service.metrics.render().decode().splitlines() if one.startswith(line + " ")]
    return float(found[0].rsplit(" ", 1)[1]) if found else 0.0


async def test_while_the_replica_is_busy_requests_are_joined(api_model, gated):
    """Each gets its own scores; of those with an unknown id, only these fail."""
    service, gate = gated
    first = asyncio.create_task(ask(service, api_request(0)))
    await gate.wait_until_busy()
    requests = [api_request(seed, count) for seed, count in ((1, 3), (2, 5), (3, 1), (4, 5), (5, 7))]
    requests[1]["candidates"]["sparse"]["film"][4] = 999
    requests[3]["context"]["sparse"]["user"] = [1000]
    others = [asyncio.create_task(ask(service, request)) for request in requests]
    await asyncio.sleep(0)
    assert service.generations.all()[0].payload.batcher.num_waiting == 5
    gate.open.set()
    outcomes = await asyncio.gather(first, *others, return_exceptions=True)
    assert str(outcomes.pop(4)).startswith("context.sparse.user[0]: 1000 has no row")
    assert str(outcomes.pop(2)).startswith("candidates.sparse.film[4][0]: 999 has no row")
    for request, found in zip([api_request(0), requests[0], requests[2], requests[4]], outcomes, strict=True):
        np.testing.assert_allclose(found.scores, api_model.scores(request), rtol=1e-5)
        assert found.order.tolist() == np.argsort(-found.scores, kind="stable").tolist()
    assert metric(service, 'shardrank_batch_requests_bucket{le="1.0",model="films"}') == 1
    assert metric(service, 'shardrank_batch_requests_count{model="films"}') == 2
    assert metric(service, 'shardrank_batch_candidates_sum{model="films"}') == 5 + 3 + 5 + 1 + 5 + 7
    assert leases(service) == [0]


async def test_top_k_cuts_the_order_and_not_the_scores(api_service):
    whole = await ask(api_service, api_request(1, 9))
    cut = await ask(api_service, api_request(1, 9) | {"top_k": 4})
    more = await ask(api_service, api_request(1, 9) | {"top_k": 100})
    assert cut.order.tolist() == whole.order.tolist()[:4]
    assert cut.scores.tolist() == more.scores.tolist() == whole.scores.tolist()
    assert more.order.size == 9


async def test_a_lease_lasts_beyond_the_deadline(gated):
    service, gate = gated
    with pytest.raises(DeadlineExceededError):
        await ask(service, api_request(0) | {"timeout_ms": 20})
    assert leases(service) == [1]
    gate.open.set()
    await ask(service, api_request(1))
    assert leases(service) == [0]


async def test_what_expires_or_is_left_in_the_queue_is_never_run(gated):
    service, gate = gated
    first = asyncio.create_task(ask(service, api_request(0)))
    await gate.wait_until_busy()
    with pytest.raises(DeadlineExceededError):
        await ask(service, api_request(1) | {"timeout_ms": 20})
    cancelled = asyncio.create_task(ask(service, api_request(2)))
    leave = []
    gone = asyncio.create_task(ask(service, api_request(3), watch=leave.append))
    await asyncio.sleep(0)
    cancelled.cancel()
    leave[0]()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    with raises_kind("client_gone"):
        await gone
    gate.open.set()
    await first
    await ask(service, api_request(4))
    assert metric(service, 'shardrank_batch_requests_sum{model="films"}') == 2
    assert metric(service, 'shardrank_errors_total{api="embedded",kind="client_gone",method="rank"}') == 2
    assert leases(service) == [0]


async def test_requests_of_the_old_version_end_on_it(tmp_path, api_model, gated):
    service, gate = gated
    newer = write_api_model(tmp_path, version=2, seed=9)
    old = asyncio.create_task(ask(service, api_request(0)))
    await gate.wait_until_busy()
    pinned = asyncio.create_task(ask(service, api_request(1) | {"version": 1}))
    await asyncio.sleep(0)
    before = service.generations.all()[0]
    threads = ranking_threads()
    service.install(load_served_model(ModelSource(snapshot=newer.path, dtype="float32"), service))
    answer = await ask(service, api_request(0))
    assert answer.version == 2
    np.testing.assert_allclose(answer.scores, newer.scores(api_request(0)), rtol=1e-5)
    assert before.state == "draining"
    gate.open.set()
    for task, seed in ((old, 0), (pinned, 1)):
        answer = await task
        assert answer.version == 1
        np.testing.assert_allclose(answer.scores, api_model.scores(api_request(seed)), rtol=1e-5)
    await asyncio.to_thread(before.retired.wait)
    with raises_kind("model_not_found", match="version 1 is not served here; served are"):
        await ask(service, api_request(1) | {"version": 1})
    assert ranking_threads() == threads  # one more for version 2, one less for version 1


async def test_the_deadline_is_counted_from_arrival(gated):
    service, _ = gated

    async def late() -> bytes:
        await asyncio.sleep(0.05)
        return json.dumps(api_request(0) | {"timeout_ms": 40}).encode()

    with pytest.raises(DeadlineExceededError):
        await answer(service, service.admit("http", "rank", None), JsonCodec("rank", MODEL), late(), Waiting())
    # It had no time left when it was complete, so it was never run.
    assert metric(service, 'shardrank_batch_requests_sum{model="films"}') == 0
