from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from serving.limits import RequestLimits
from serving.proto.shardrank.v1 import ranking_pb2
from shardrank_testing.serving_api import (
    MODEL,
    Gate,
    api_request,
    api_service,
    gated_service,
    rank_message,
    run,
    running_api,
)

SERVICE = "shardrank.v1.RankingService"
LIMITS = RequestLimits(receive_timeout_s=0.4)


@pytest.fixture(scope="module")
def service(api_model):
    with api_service(api_model, LIMITS) as service:
        yield service


def failure(call) -> grpc.aio.AioRpcError:
    return pytest.raises(grpc.aio.AioRpcError, match=call)


def test_a_model_describes_itself(service):
    async def main() -> None:
        async with running_api(service) as api:
            model = await api.stub.GetModel(ranking_pb2.GetModelRequest(model=MODEL))
            assert (model.model, model.version, len(model.identity)) == (MODEL, 1, 64)
            assert {one.name: (one.side, one.pooling, one.table) for one in model.features}["history"] == (
                "context",
                "none",
                "films",
            )
            assert {one.name: one.num_embeddings for one in model.tables}["films"] == 777
            assert (model.dense_inputs.context, model.dense_inputs.candidate) == (2, 3)
            assert model.dense_model.dtype == "float32"
            assert model.limits["max_candidates"] == 4096
            with failure("version 5 is not served here") as refusal:
                await api.stub.GetModel(ranking_pb2.GetModelRequest(model=MODEL, version=5))
            assert refusal.value.code() is grpc.StatusCode.NOT_FOUND

    run(main())


def test_health_follows_readiness(api_model):
    async def main() -> None:
        with api_service(api_model) as service:
            async with running_api(service) as api:
                stub = health_pb2_grpc.HealthStub(api.channel)
                for name in ("", SERVICE):
                    watch = stub.Watch(health_pb2.HealthCheckRequest(service=name))
                    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
                service.watch.begin_shutdown()
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
                watch.cancel()

    run(main())


def test_reflection_lists_the_services_and_their_methods(service):
    async def main() -> None:
        async with running_api(service) as api:
            call = reflection_pb2_grpc.ServerReflectionStub(api.channel).ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            listed = await call.read()
            names = {one.name for one in listed.list_services_response.service}
            others = {
                "grpc.health.v1.Health",
                "grpc.reflection.v1.ServerReflection",
                "grpc.reflection.v1alpha.ServerReflection",
            }
            assert names == {SERVICE, "inference.GRPCInferenceService"} | others
            await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE))
            described = await call.read()
            assert b"RankRequest" in described.file_descriptor_response.file_descriptor_proto[0]
            await call.done_writing()

    run(main())


def test_the_calls_own_deadline_counts(api_model):
    gate = Gate()

    async def main() -> None:
        with gated_service(api_model, gate) as service:
            async with running_api(service) as api:
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await api.stub.Rank(rank_message(api_request(0)), timeout=0.1)
                assert refusal.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                with failure("deadline passed") as refusal:
                    await api.stub.Rank(rank_message(api_request(0) | {"timeout_ms": 20}), timeout=30)
                assert refusal.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                assert dict(refusal.value.trailing_metadata())["shardrank-error-kind"] == "deadline_exceeded"

    run(main())


def test_a_cancelled_call_is_dropped_from_the_queue(api_model):
    gate = Gate()

    async def main() -> None:
        with gated_service(api_model, gate) as service:
            async with running_api(service) as api:
                first = asyncio.ensure_future(api.stub.Rank(rank_message(api_request(0))))
                await gate.wait_until_busy()
                second = api.stub.Rank(rank_message(api_request(1)))
                served = service.generations.all()[0].payload
                while served.num_waiting < 1:  # noqa: ASYNC110  # the queue tells nobody
                    await asyncio.sleep(0.001)
                second.cancel()
                while service.in_flight > 1:  # noqa: ASYNC110  # nor does the counter
                    await asyncio.sleep(0.001)
                gate.open.set()
                await first
            text = service.metrics.render().decode()
            assert 'shardrank_batch_requests_sum{model="films"} 1.0' in text
            assert 'shardrank_requests_total{api="grpc",method="rank",model="films",status="client_gone"} 1.0' in text

    run(main())


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"PRI * HTTP/2.0\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\x00\x00\x50\x01\x04\x00\x00",
    ],
    ids=["nothing", "half a preface", "only settings", "half a headers frame"],
)
def test_a_connection_that_stalls_is_closed(service, sent):
    async def main() -> None:
        async with running_api(service) as api:
            reader, writer = await asyncio.open_connection(api.listening.host, api.listening.grpc_port)
            writer.write(sent)
            # Reads whatever the server says, settings and pings, and answers nothing.
            await asyncio.wait_for(reader.read(), 20)
            writer.close()

    run(main())
