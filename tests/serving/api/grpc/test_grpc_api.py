"""The gRPC API by gRPC's own client: what it answers, how it bounds what clients take, and that no good call fails."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import numpy as np
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from serving.api.grpc.wire import PREFACE
from serving.limits import RequestLimits
from serving.proto.shardrank.v1 import ranking_pb2
from shardrank_testing.http2_peer import SETTINGS, Http2Peer, data
from shardrank_testing.serving_api import (
    MODEL,
    api_request,
    gated_api,
    rank_message,
    refused_call,
    served_api,
    until,
)

SERVICE = "shardrank.v1.RankingService"
RANK = f"/{SERVICE}/Rank"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def limits():
    return RequestLimits(receive_timeout_s=0.4)


async def test_a_model_describes_itself(api):
    model = await api.stub.GetModel(ranking_pb2.GetModelRequest(model=MODEL))
    assert (model.model, model.version, len(model.identity)) == (MODEL, 1, 64)
    features = {feature.name: (feature.side, feature.pooling, feature.table) for feature in model.features}
    assert features["history"] == ("context", "none", "films")
    assert {table.name: table.num_embeddings for table in model.tables}["films"] == 777
    assert (model.dense_inputs.context, model.dense_inputs.candidate) == (2, 3)
    assert model.dense_model.dtype == "float32"
    assert model.limits["max_candidates"] == 4096
    with refused_call(StatusCode.NOT_FOUND, says="version 5 is not served here"):
        await api.stub.GetModel(ranking_pb2.GetModelRequest(model=MODEL, version=5))


async def test_health_follows_readiness_and_ends_with_the_server(api_model):
    async with contextlib.AsyncExitStack() as server:
        api = await server.enter_async_context(served_api(api_model))
        channel = grpc.aio.insecure_channel(api.grpc_address)
        stub = health_pb2_grpc.HealthStub(api.channel)
        with refused_call(StatusCode.NOT_FOUND):
            await stub.Check(health_pb2.HealthCheckRequest(service="no"))
        with refused_call(StatusCode.UNIMPLEMENTED):
            await stub.List(health_pb2.HealthListRequest())
        for name in ("", SERVICE):
            late = stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=0.2)
            assert (await late.read()).status == SERVING
            with refused_call(StatusCode.DEADLINE_EXCEEDED):
                await late.read()
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
        assert (await watch.read()).status == SERVING
        api.service.watch.begin_shutdown()
        assert (await watch.read()).status == NOT_SERVING
    with refused_call(StatusCode.UNAVAILABLE, says="the server stops"):
        await watch.read()
    await channel.close()


async def test_reflection_lists_the_services_and_their_methods(api):
    call = reflection_pb2_grpc.ServerReflectionStub(api.channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    assert {service.name for service in (await call.read()).list_services_response.service} == {
        SERVICE,
        "inference.GRPCInferenceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE))
    described = await call.read()
    assert b"RankRequest" in described.file_descriptor_response.file_descriptor_proto[0]
    await call.done_writing()


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
async def test_a_streamed_call_holds_no_message_that_is_answered(api, compression):
    call = reflection_pb2_grpc.ServerReflectionStub(api.channel).ServerReflectionInfo(compression=compression)
    for _ in range(3):
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol="x" * 20_000))
        await call.read()
        await until(lambda: api.service.buffers.buffered == 0)
    await call.done_writing()


async def test_an_upload_that_gives_way_frees_its_bytes_at_once(api_model):
    """So the small call that it gives way to is answered, and no other upload has to."""
    sent = b"\0" + (900_000).to_bytes(4, "big") + bytes(500_000)
    async with served_api(api_model) as api, contextlib.AsyncExitStack() as stack:
        assert len((await api.stub.Rank(rank_message(api_request(0)))).scores) > 0
        buffers, address = api.service.buffers, (api.listening.host, api.listening.grpc_port)
        for _ in range(2):
            peer = Http2Peer(*await asyncio.open_connection(*address))
            stack.callback(peer.close)
            peer.begin()
            pieces = [sent[at : at + 16_000] for at in range(0, len(sent), 16_000)]
            peer.send(peer.call(1, RANK), *(data(1, piece) for piece in pieces))
        await until(lambda: buffers.buffered == 2 * len(sent))
        buffers.max_bytes = buffers.buffered
        assert len((await api.stub.Rank(rank_message(api_request(0)))).scores) > 0
        await until(lambda: buffers.buffered == len(sent))


async def test_the_calls_own_deadline_counts(api_model):
    async with gated_api(api_model) as api:
        with refused_call(StatusCode.DEADLINE_EXCEEDED):
            await api.stub.Rank(rank_message(api_request(0)), timeout=0.1)
        with refused_call(StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded", "deadline passed"):
            await api.stub.Rank(rank_message(api_request(0) | {"timeout_ms": 20}), timeout=30)


async def test_a_cancelled_call_is_dropped_from_the_queue(api_model):
    async with gated_api(api_model) as api:
        first = asyncio.ensure_future(api.stub.Rank(rank_message(api_request(0))))
        await api.gate.wait_until_busy()
        second = api.stub.Rank(rank_message(api_request(1)))
        served = api.service.generations.all()[0].payload
        await until(lambda: served.batcher.num_waiting == 1)
        second.cancel()
        await until(lambda: api.service.in_flight == 1)
        api.gate.open.set()
        await first
        await until(lambda: not api.service.in_flight)
        text = api.service.metrics.render().decode()
        assert 'shardrank_batch_requests_sum{model="films"} 1.0' in text
        assert 'shardrank_requests_total{api="grpc",method="rank",model="films",status="client_gone"} 1.0' in text


@pytest.mark.parametrize(
    "sent",
    [b"", PREFACE[:16], PREFACE + SETTINGS, PREFACE + SETTINGS + b"\x00\x00\x50\x01\x04\x00\x00"],
    ids=["nothing", "half a preface", "only settings", "half a headers frame"],
)
async def test_a_connection_that_stalls_is_closed(api, sent):
    reader, writer = await asyncio.open_connection(api.listening.host, api.listening.grpc_port)
    writer.write(sent)
    # Reads whatever the server says, settings and pings, and answers nothing.
    await asyncio.wait_for(reader.read(), 20)
    writer.close()


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_compressed_message_is_answered_like_a_plain_one(api_model, api, compression):
    answer = await api.stub.Rank(rank_message(api_request(3)), compression=compression)
    np.testing.assert_allclose(answer.scores, api_model.scores(api_request(3)), rtol=1e-5)


async def test_a_message_and_an_answer_of_many_windows(api_model):
    limits = RequestLimits(max_bags_per_feature=400_000, max_ids_per_request=500_000, max_lookup_floats=2**22)
    count = 400_000
    message = ranking_pb2.LookupRequest(model=MODEL, timeout_ms=30_000, request_id="large")
    message.sparse["film"].ids.extend((np.arange(count) % 777).tolist())
    message.sparse["film"].lengths.extend([1] * count)
    unbounded = [("grpc.max_receive_message_length", -1)]
    async with (
        served_api(api_model, limits) as api,
        grpc.aio.insecure_channel(api.grpc_address, options=unbounded) as channel,
    ):
        types = ranking_pb2.LookupRequest.SerializeToString, ranking_pb2.LookupResponse.FromString
        answer = await channel.unary_unary(f"/{SERVICE}/Lookup", *types)(message)
    values = np.asarray(answer.embeddings["film"].values, np.float32).reshape(count, 8)
    np.testing.assert_array_equal(values[777 * 3 : 777 * 4], values[:777])
    np.testing.assert_allclose(values[:777], api_model.tables["films"].astype(np.float32), atol=1e-5)


@pytest.mark.parametrize("path", [f"/{SERVICE}/Guess", "/other/Rank", "/"])
async def test_a_method_that_is_not_there_is_unimplemented(api, path):
    with refused_call(StatusCode.UNIMPLEMENTED, says="there is no method"):
        await api.channel.unary_unary(path)(b"")


async def test_a_streamed_request_that_is_too_long_or_none_is_refused(api):
    info = reflection_pb2_grpc.ServerReflectionStub(api.channel).ServerReflectionInfo()
    await info.write(reflection_pb2.ServerReflectionRequest(file_by_filename="x" * 70_000))
    with refused_call(StatusCode.INVALID_ARGUMENT, says="65536"):
        await info.read()
    check = api.channel.stream_unary("/grpc.health.v1.Health/Check")()
    await check.done_writing()
    with pytest.raises(grpc.aio.AioRpcError, match="no request message"):
        await check


async def test_calls_beyond_the_stream_limit_wait_their_turn(api_model):
    async with served_api(api_model, RequestLimits(max_concurrent_streams=64, max_queue=1000)) as api:
        message = rank_message(api_request(0) | {"timeout_ms": 30_000})
        answers = await asyncio.gather(*(api.stub.Rank(message, wait_for_ready=True) for _ in range(300)))
        assert len(answers) == 300


async def test_calls_that_send_nothing_shut_nobody_out(api_model):
    async with served_api(api_model, RequestLimits(max_in_flight=2, max_receiving=5)) as api:
        silent = [api.channel.stream_unary(RANK)() for _ in range(4)]
        await until(lambda: api.service.in_flight == 4)
        await api.stub.Rank(rank_message(api_request(0)))
        silent.append(api.channel.stream_unary(RANK)())
        await until(lambda: api.service.in_flight == 5)
        with refused_call(StatusCode.RESOURCE_EXHAUSTED, says="max_receiving = 5"):
            await api.stub.Rank(rank_message(api_request(0)))
        for call in silent:
            call.cancel()
        await until(lambda: not api.service.in_flight)
        await api.stub.Rank(rank_message(api_request(0)))


async def test_an_old_connection_is_replaced_without_failing_a_call(api_model):
    async with served_api(api_model, RequestLimits(max_connection_age_s=0.2)) as api:
        message = rank_message(api_request(0))
        await api.stub.Rank(message)
        replaced = asyncio.create_task(api.channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
        while not replaced.done():
            await api.stub.Rank(message)
        await api.stub.Rank(message)
