"""A server with too much to do refuses before it reads, says when to come again, and goes on. On real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from loader.errors import OverloadedError
from serving.api.http import HttpApp
from serving.api.http_messages import Exchange
from serving.client import AsyncClient, RetryPolicy
from serving.rank.service import RankingService
from shardrank_testing.serving_api import MODEL, Gate, api_request, ask, gated_api, gated_service, until

PATH = f"/v1/models/{MODEL}:rank"
NO_REQUEST = b"this was not read"


@contextlib.asynccontextmanager
async def one_waits(service: RankingService, gate: Gate) -> AsyncIterator[Any]:
    """One request is out and one waits, until the end; yields what serves them."""
    served = service.generations.all()[0].payload
    ranked = [asyncio.create_task(ask(service, api_request(0)))]
    await gate.wait_until_busy()
    ranked.append(asyncio.create_task(ask(service, api_request(1))))
    await until(lambda: served.batcher.num_waiting == 1)
    yield served
    gate.open.set()
    assert [len((await answer).scores) for answer in ranked] == [5, 5]


async def test_what_would_wait_in_vain_is_refused_unread(api_model):
    async with gated_api(api_model) as api:
        async with one_waits(api.service, api.gate) as served:
            # As after full batches of 1000 s: one of a single request is expected to take 16 s.
            served.batcher._estimate.full_s = 1000.0
            for close in ({}, {"connection": "close"}):
                answer = await api.http.post(PATH, content=NO_REQUEST, headers={"x-request-id": "r7", **close})
                assert (answer.status_code, answer.json()["error"]["kind"]) == (503, "overloaded")
                assert answer.headers["x-request-id"] == answer.json()["error"]["request_id"] == "r7"
                assert answer.headers.get("connection") == close.get("connection")
                assert "1 requests queued" in answer.json()["error"]["message"]
                assert answer.headers["retry-after"] == "1"
            answer = await api.http.post(f"/v2/models/{MODEL}/infer", content=NO_REQUEST)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            call = api.channel.unary_unary("/shardrank.v1.RankingService/Rank")
            with pytest.raises(grpc.RpcError) as refusal:
                await call(NO_REQUEST)
            assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert dict(refusal.value.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
            never = RetryPolicy(max_attempts=1)
            for address in (f"http://{api.http_address}", f"grpc://{api.grpc_address}"):
                async with AsyncClient(address, retry=never, timeout_ms=2000) as client:
                    with pytest.raises(OverloadedError) as error:
                        await client.rank(MODEL, context={}, candidates={"film": [1]})
                    assert error.value.retry_after_s == 1.0
        assert (await api.http.post(PATH, json=api_request(2))).status_code == 200
        metrics = (await api.http.get("/metrics")).text
        shed = f'shardrank_requests_total{{api="http",method="rank",model="{MODEL}",status="overloaded"}}'
        assert f"{shed} 3.0" in metrics


async def test_heads_count_as_if_those_before_them_were_in_the_queue(api_model):
    gate = Gate()
    with gated_service(api_model, gate) as service:
        app = HttpApp(service)

        def admit(method: str = "POST", path: str = PATH) -> OverloadedError | None:
            return app.admit(Exchange(None, method, path, {}))

        async with one_waits(service, gate) as served:
            # The request that waits may have been queued in this very iteration of the loop, until whose end it counts.
            await asyncio.sleep(0)
            # With two more ahead an answer takes 8/64 of a full batch's time.
            served.batcher._estimate.full_s = served.batcher._longest_s / 2 / 7 * 64
            for _ in range(2):
                assert [admit() for _ in range(2)] == [None, None]
                assert "3 requests queued" in str(admit())
                await asyncio.sleep(0)
            assert [admit() is None for _ in range(3)] == [True, True, False]
            others = [("GET", PATH), ("POST", f"/v1/models/{MODEL}"), ("POST", f"{PATH}\n")]
            assert [admit(*other) for other in others] == [None] * 3


async def test_refusals_leave_no_cycles_to_the_collector(api_model):
    gate = Gate()
    with gated_service(api_model, gate) as service:
        async with one_waits(service, gate) as served:
            served.batcher._estimate.full_s = 1000.0

            async def refused() -> None:
                try:
                    await ask(service, api_request(2))
                except OverloadedError:
                    return
                raise AssertionError("it was not refused")

            await refused()
            gc.collect()
            gc.disable()
            try:
                for _ in range(50):
                    await refused()
                assert gc.collect() < 50
            finally:
                gc.enable()
