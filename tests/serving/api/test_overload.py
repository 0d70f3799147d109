"""A server with too much to do refuses before it reads, says when to come again, and goes on. On real sockets."""

from __future__ import annotations

import asyncio
import gc

import grpc
import pytest

from serving.client import AsyncClient, OverloadedError, RetryPolicy
from serving.errors import OverloadedError as ServingOverloadedError
from shardrank_testing.serving_api import MODEL, Gate, api_request, ask, gated_service, run, running_api

PATH = f"/v1/models/{MODEL}:rank"
NO_REQUEST = b"this was not read"


def test_over_every_api_what_would_wait_in_vain_is_refused_unread_and_told_when_to_come_again(api_model):
    gate = Gate()

    async def main() -> None:
        with gated_service(api_model, gate) as service:
            async with running_api(service) as api:
                served = service.generations.all()[0].payload
                # As after full batches of 1000 s: one of a single request is expected to take 16 s.
                served._batcher._pace.full_s = 1000.0
                ranked = [asyncio.create_task(api.http.post(PATH, json=api_request(0)))]
                await gate.wait_until_busy()
                ranked.append(asyncio.create_task(api.http.post(PATH, json=api_request(1))))
                while served.num_waiting < 1:  # noqa: ASYNC110  # the queue tells nobody
                    await asyncio.sleep(0.001)

                answer = await api.http.post(PATH, content=NO_REQUEST)
                assert (answer.status_code, answer.json()["error"]["kind"]) == (503, "overloaded")
                assert "1 requests wait" in answer.json()["error"]["message"]
                assert answer.headers["retry-after"] == "1"
                answer = await api.http.post(f"/v2/models/{MODEL}/infer", content=NO_REQUEST)
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                call = api.channel.unary_unary("/shardrank.v1.RankingService/Rank")
                with pytest.raises(grpc.RpcError) as refusal:
                    await call(NO_REQUEST)
                assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert dict(refusal.value.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
                for port, scheme in ((api.listening.http_port, "http"), (api.listening.grpc_port, "grpc")):
                    address, never = f"{scheme}://{api.listening.host}:{port}", RetryPolicy(max_attempts=1)
                    async with AsyncClient(address, retry=never, timeout_ms=2000) as client:
                        with pytest.raises(OverloadedError) as error:
                            await client.rank(MODEL, context={}, candidates={"film": [1]})
                        assert error.value.retry_after_s == 1.0

                gate.open.set()
                assert [(await one).status_code for one in ranked] == [200, 200]
                assert (await api.http.post(PATH, json=api_request(2))).status_code == 200
                metrics = (await api.http.get("/metrics")).text
                shed = f'shardrank_requests_total{{api="http",method="rank",model="{MODEL}",status="overloaded"}}'
                assert f"{shed} 2.0" in metrics

    run(main())


def test_refusals_leave_no_cycles_that_only_the_collector_could_free(api_model):
    gate = Gate()

    async def main() -> None:
        with gated_service(api_model, gate) as service:
            served = service.generations.all()[0].payload
            served._batcher._pace.full_s = 1000.0
            ranked = [asyncio.create_task(ask(service, api_request(0)))]
            await gate.wait_until_busy()
            ranked.append(asyncio.create_task(ask(service, api_request(1))))
            while served.num_waiting < 1:  # noqa: ASYNC110  # the queue tells nobody
                await asyncio.sleep(0.001)

            async def refused() -> None:
                try:
                    await ask(service, api_request(2))
                except ServingOverloadedError:
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
            gate.open.set()
            await asyncio.gather(*ranked)

    run(main())
