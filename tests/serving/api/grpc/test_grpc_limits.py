"""How the gRPC API bounds what clients take, and that it fails no good call for it."""

from __future__ import annotations

import asyncio
import time

import grpc
import numpy as np
import pytest

from serving.limits import RequestLimits
from serving.proto.shardrank.v1 import ranking_pb2
from serving.rank.service import RankingService
from serving.versions.loading import ModelSource, load_served_model
from shardrank_testing.serving_api import MODEL, api_request, api_service, rank_message, run, running_api

RANK = "/shardrank.v1.RankingService/Rank"


def test_calls_beyond_the_stream_limit_of_a_connection_wait_their_turn(api_model):
    limits = RequestLimits(max_concurrent_streams=64, max_queue=1000)

    async def main() -> None:
        with api_service(api_model, limits) as service:
            async with running_api(service) as api:
                message = rank_message(api_request(0) | {"timeout_ms": 30_000})
                answers = await asyncio.gather(
                    *(api.stub.Rank(message, wait_for_ready=True) for _ in range(300)), return_exceptions=True
                )
                assert [answer for answer in answers if isinstance(answer, Exception)] == []

    run(main())


def test_the_calls_deadline_is_counted_from_when_the_message_was_read(api_model):
    late_s = 0.0

    async def main() -> None:
        nonlocal late_s
        service = RankingService(expected_models=[MODEL], clock=lambda: time.monotonic() + late_s)
        service.install(load_served_model(ModelSource(snapshot=api_model.path, dtype="float32"), service))
        async with running_api(service) as api:
            call = api.channel.stream_unary(RANK, response_deserializer=ranking_pb2.RankResponse.FromString)(timeout=10)
            while not service.in_flight:  # noqa: ASYNC110  # the counter tells nobody
                await asyncio.sleep(0.001)
            late_s = 20.0
            await call.write(rank_message(api_request(0) | {"timeout_ms": 60_000}).SerializeToString())
            await call.done_writing()
            np.testing.assert_allclose((await call).scores, api_model.scores(api_request(0)), rtol=1e-5)
        await asyncio.to_thread(service.close)

    run(main())


def test_calls_that_send_nothing_shut_nobody_out(api_model):
    async def main() -> None:
        with api_service(api_model, RequestLimits(max_in_flight=2, max_receiving=5)) as service:
            async with running_api(service) as api:
                silent = [api.channel.stream_unary(RANK)() for _ in range(4)]
                while service.in_flight < len(silent):  # noqa: ASYNC110  # the counter tells nobody
                    await asyncio.sleep(0.001)
                await api.stub.Rank(rank_message(api_request(0)))
                silent.append(api.channel.stream_unary(RANK)())
                while service.in_flight < len(silent):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                with pytest.raises(grpc.aio.AioRpcError, match="max_receiving = 5") as refusal:
                    await api.stub.Rank(rank_message(api_request(0)))
                assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                for call in silent:
                    call.cancel()
                while service.in_flight:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                await api.stub.Rank(rank_message(api_request(0)))

    run(main())


def test_a_connection_of_great_age_is_replaced_without_failing_a_call(api_model):
    async def main() -> None:
        with api_service(api_model, RequestLimits(max_connection_age_s=0.2)) as service:
            async with running_api(service) as api:
                message = rank_message(api_request(0))
                await api.stub.Rank(message)
                replaced = asyncio.create_task(api.channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
                while not replaced.done():
                    await api.stub.Rank(message)
                await api.stub.Rank(message)

    run(main())


@pytest.mark.parametrize("method", ["Rank", "Lookup", "GetModel"])
def test_a_message_without_a_model_is_invalid_and_says_which_field(api_model, method):
    async def main() -> None:
        with api_service(api_model) as service:
            async with running_api(service) as api:
                with pytest.raises(grpc.aio.AioRpcError, match="model: it is empty") as refusal:
                    await api.channel.unary_unary(f"/shardrank.v1.RankingService/{method}")(b"")
                assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(main())
