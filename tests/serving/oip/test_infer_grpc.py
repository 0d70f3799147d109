from __future__ import annotations

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from serving.limits import RequestLimits
from serving.proto.inference import open_inference_pb2 as messages
from serving.proto.inference import open_inference_pb2_grpc
from shardrank_testing.inference_requests import message_of, tensors_of
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

SERVICE = "inference.GRPCInferenceService"


def stub_of(api) -> open_inference_pb2_grpc.GRPCInferenceServiceStub:
    return open_inference_pb2_grpc.GRPCInferenceServiceStub(api.channel)


@pytest.fixture(scope="module")
def service(api_model):
    """Shared: it is used by one server after the other, so it is not ready after the first."""
    with api_service(api_model) as service:
        yield service


def tensors(model, seed=0):
    return tensors_of(model.spec, api_request(seed))


def test_scores_are_those_of_the_rank_api_bit_by_bit_and_always_raw(api_model, service):
    async def main() -> None:
        async with running_api(service) as api:
            for seed in range(4):
                request = api_request(seed)
                expected = await api.stub.Rank(rank_message(request))
                for raw in (True, False):
                    answer = await stub_of(api).ModelInfer(
                        message_of(tensors_of(api_model.spec, request), MODEL, raw=raw, id="mine")
                    )
                    assert (answer.model_name, answer.model_version, answer.id) == (MODEL, "1", "mine")
                    shapes = [(one.name, one.datatype, list(one.shape)) for one in answer.outputs]
                    assert shapes == [("scores", "FP32", [5]), ("order", "INT64", [5])]
                    assert not any(one.HasField("contents") for one in answer.outputs)
                    scores, order = answer.raw_output_contents
                    assert np.frombuffer(scores, "<f4").tolist() == list(expected.scores)
                    assert np.frombuffer(order, "<i8").tolist() == list(expected.order)

    run(main())


def test_outputs_version_parameters_and_id(api_model, service):
    async def main() -> None:
        async with running_api(service) as api:
            message = message_of(tensors(api_model), MODEL, model_version="1")
            message.outputs.add(name="order")
            message.parameters["top_k"].int64_param = 2
            answer = await stub_of(api).ModelInfer(message)
            assert [(one.name, list(one.shape)) for one in answer.outputs] == [("order", [2])]
            assert len(answer.raw_output_contents) == 1
            assert answer.id

    run(main())


def test_errors_have_the_status_and_the_kind_of_the_other_apis(api_model, service):
    cases = [
        (message_of(tensors(api_model), "no"), grpc.StatusCode.NOT_FOUND, "model_not_found"),
        (message_of(tensors(api_model), MODEL, model_version="9"), grpc.StatusCode.NOT_FOUND, "model_not_found"),
        (message_of(tensors(api_model), MODEL, model_version="x"), grpc.StatusCode.INVALID_ARGUMENT, "invalid_field"),
        (message_of(tensors(api_model)[1:], MODEL), grpc.StatusCode.INVALID_ARGUMENT, "missing_feature"),
    ]

    async def main() -> None:
        async with running_api(service) as api:
            for message, status, kind in cases:
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await stub_of(api).ModelInfer(message)
                assert refusal.value.code() is status
                assert dict(refusal.value.trailing_metadata())["shardrank-error-kind"] == kind
            for load in (
                stub_of(api).RepositoryModelLoad(messages.RepositoryModelLoadRequest(model_name=MODEL)),
                stub_of(api).RepositoryModelUnload(messages.RepositoryModelUnloadRequest(model_name=MODEL)),
            ):
                with pytest.raises(grpc.aio.AioRpcError, match="rollouts") as refusal:
                    await load
                assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    run(main())


def test_metadata_configuration_index_and_statistics(api_model):
    async def main() -> None:
        with api_service(api_model) as service:
            async with running_api(service) as api:
                stub = stub_of(api)
                server = await stub.ServerMetadata(messages.ServerMetadataRequest())
                assert (server.name, "statistics" in server.extensions) == ("shardrank", True)
                metadata = await stub.ModelMetadata(messages.ModelMetadataRequest(name=MODEL))
                over_http = (await api.http.get(f"/v2/models/{MODEL}")).json()
                assert [(one.name, one.datatype, list(one.shape)) for one in metadata.inputs] == [
                    (one["name"], one["datatype"], one["shape"]) for one in over_http["inputs"]
                ]
                config = (await stub.ModelConfig(messages.ModelConfigRequest(name=MODEL))).config
                assert (config.max_batch_size, config.output[0].data_type) == (0, messages.TYPE_FP32)
                assert [one.name for one in config.input] == [one.name for one in metadata.inputs]
                index = await stub.RepositoryIndex(messages.RepositoryIndexRequest(ready=True))
                assert [(one.name, one.version, one.state) for one in index.models] == [(MODEL, "1", "READY")]
                for _ in range(3):
                    await stub.ModelInfer(message_of(tensors(api_model), MODEL))
                for request in (
                    messages.ModelStatisticsRequest(),
                    messages.ModelStatisticsRequest(name=MODEL, version="1"),
                ):
                    (stats,) = (await stub.ModelStatistics(request)).model_stats
                    assert (stats.inference_count, stats.execution_count) == (3, 3)
                    assert stats.inference_stats.success.count == stats.inference_stats.queue.count == 3
                with pytest.raises(grpc.aio.AioRpcError, match="version 4"):
                    await stub.ModelStatistics(messages.ModelStatisticsRequest(name=MODEL, version="4"))

    run(main())


def test_liveness_and_readiness_are_told_also_by_a_full_process(api_model):
    gate = Gate()

    async def main() -> None:
        with gated_service(api_model, gate, RequestLimits(max_in_flight=1)) as service:
            async with running_api(service) as api:
                stub = stub_of(api)
                first = stub.ModelInfer(message_of(tensors(api_model), MODEL))
                await gate.wait_until_busy()
                with pytest.raises(grpc.aio.AioRpcError, match="max_in_flight = 1"):
                    await stub.ModelInfer(message_of(tensors(api_model), MODEL))
                assert (await stub.ServerLive(messages.ServerLiveRequest())).live
                assert (await stub.ServerReady(messages.ServerReadyRequest())).ready
                assert (await stub.ModelReady(messages.ModelReadyRequest(name=MODEL, version="1"))).ready
                assert not (await stub.ModelReady(messages.ModelReadyRequest(name="no"))).ready
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await stub.ModelInfer(message_of(tensors(api_model), MODEL), timeout=0.05)
                assert refusal.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
                gate.open.set()
                await first
                service.watch.begin_shutdown()
                assert not (await stub.ServerReady(messages.ServerReadyRequest())).ready
                assert (await stub.ServerLive(messages.ServerLiveRequest())).live

    run(main())


def test_health_and_reflection_know_the_service(api_model):
    async def main() -> None:
        with api_service(api_model) as service:
            async with running_api(service) as api:
                health = await health_pb2_grpc.HealthStub(api.channel).Check(
                    health_pb2.HealthCheckRequest(service=SERVICE)
                )
                assert health.status == health_pb2.HealthCheckResponse.SERVING
                call = reflection_pb2_grpc.ServerReflectionStub(api.channel).ServerReflectionInfo()
                for symbol in (SERVICE, "shardrank.v1.RankingService", "grpc.health.v1.Health"):
                    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
                    (described,) = (await call.read()).file_descriptor_response.file_descriptor_proto
                    proto = FileDescriptorProto.FromString(described)
                    assert f"{proto.package}.{proto.service[0].name}" == symbol
                await call.done_writing()

    run(main())


def test_another_definition_of_the_protocol_fits_beside_ours_in_one_process():
    # Ours is not in the default pool, so the file of any other client can be.
    with pytest.raises(KeyError):
        DescriptorPool().FindMessageTypeByName("inference.ModelInferRequest")
    from google.protobuf import descriptor_pool

    other = FileDescriptorProto(name="grpc_service.proto", package="inference", syntax="proto3")
    other.message_type.add(name="ModelInferRequest")
    added = descriptor_pool.Default().AddSerializedFile(other.SerializeToString())
    theirs = added.message_types_by_name["ModelInferRequest"]
    assert theirs is not messages.ModelInferRequest.DESCRIPTOR
    assert messages.ModelInferRequest(model_name="x").SerializeToString() == b"\n\x01x"
