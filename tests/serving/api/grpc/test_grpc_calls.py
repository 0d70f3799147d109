"""Calls as gRPC's own client makes them, beyond what the generated stubs do."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from serving.limits import RequestLimits
from serving.proto.shardrank.v1 import ranking_pb2
from shardrank_testing.serving_api import MODEL, api_request, api_service, rank_message, run, running_api


@pytest.fixture(scope="module")
def service(api_model):
    with api_service(api_model) as service:
        yield service


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_compressed_message_is_answered_like_a_plain_one(api_model, service, compression):
    async def main() -> None:
        async with running_api(service) as api:
            answer = await api.stub.Rank(rank_message(api_request(3)), compression=compression)
            np.testing.assert_allclose(answer.scores, api_model.scores(api_request(3)), rtol=1e-5)

    run(main())


def test_a_message_of_many_windows_is_answered_and_so_is_a_large_answer(api_model):
    async def main() -> None:
        limits = RequestLimits(max_bags_per_feature=400_000, max_ids_per_request=500_000, max_lookup_floats=2**22)
        with api_service(api_model, limits) as service:
            async with running_api(service) as api:
                count = 400_000
                ids = np.arange(count) % 777
                message = ranking_pb2.LookupRequest(model=MODEL, timeout_ms=30_000)
                message.sparse["film"].ids.extend(ids.tolist())
                message.sparse["film"].lengths.extend([1] * count)
                message.request_id = "large"
                options = [("grpc.max_receive_message_length", -1)]
                async with grpc.aio.insecure_channel(
                    f"{api.listening.host}:{api.listening.grpc_port}", options=options
                ) as channel:
                    lookup = channel.unary_unary(
                        "/shardrank.v1.RankingService/Lookup",
                        ranking_pb2.LookupRequest.SerializeToString,
                        ranking_pb2.LookupResponse.FromString,
                    )
                    answer = await lookup(message)
                values = np.asarray(answer.embeddings["film"].values, np.float32).reshape(count, 8)
                np.testing.assert_array_equal(values[777 * 3 : 777 * 4], values[:777])
                np.testing.assert_allclose(values[:777], api_model.tables["films"].astype(np.float32), atol=1e-5)

    run(main())


def test_a_method_that_is_not_there_is_unimplemented(service):
    async def main() -> None:
        async with running_api(service) as api:
            for path in ("/shardrank.v1.RankingService/Guess", "/other/Rank", "/"):
                with pytest.raises(grpc.aio.AioRpcError, match="there is no method") as refusal:
                    await api.channel.unary_unary(path)(b"")
                assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(main())


def test_health_says_what_it_does_not_know_and_ends_a_watch_when_the_server_stops(api_model):
    async def main() -> None:
        with api_service(api_model) as service:
            async with running_api(service) as api:
                stub = health_pb2_grpc.HealthStub(api.channel)
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await stub.Check(health_pb2.HealthCheckRequest(service="no"))
                assert refusal.value.code() is grpc.StatusCode.NOT_FOUND
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await stub.List(health_pb2.HealthListRequest())
                assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
                late = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=0.2)
                assert (await late.read()).status == health_pb2.HealthCheckResponse.SERVING
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await late.read()
                assert refusal.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                channel = grpc.aio.insecure_channel(f"{api.listening.host}:{api.listening.grpc_port}")
                watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError, match="the server stops") as refusal:
                await watch.read()
            assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
            await channel.close()

    run(main())


def test_a_streamed_request_that_is_too_long_or_none_at_all_is_refused(service):
    async def main() -> None:
        async with running_api(service) as api:
            info = reflection_pb2_grpc.ServerReflectionStub(api.channel).ServerReflectionInfo()
            await info.write(reflection_pb2.ServerReflectionRequest(file_by_filename="x" * 70_000))
            with pytest.raises(grpc.aio.AioRpcError, match="65536") as refusal:
                await info.read()
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            check = api.channel.stream_unary("/grpc.health.v1.Health/Check")()
            await check.done_writing()
            with pytest.raises(grpc.aio.AioRpcError, match="no request message"):
                await check

    run(main())
