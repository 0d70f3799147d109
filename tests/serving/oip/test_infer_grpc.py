from __future__ import annotations

import grpc
import numpy as np
import pytest

from serving.proto.inference import open_inference_pb2 as messages
from serving.proto.inference import open_inference_pb2_grpc
from shardrank_testing.inference_requests import message_of, tensors_of
from shardrank_testing.serving_api import MODEL, api_request, rank_message, refused_call, served_api


def stub_of(api) -> open_inference_pb2_grpc.GRPCInferenceServiceStub:
    return open_inference_pb2_grpc.GRPCInferenceServiceStub(api.channel)


def tensors(model, seed=0):
    return tensors_of(model.spec, api_request(seed))


async def test_scores_are_those_of_the_rank_api_bit_by_bit(api_model, api):
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


async def test_outputs_version_parameters_and_id(api_model, api):
    message = message_of(tensors(api_model), MODEL, model_version="1")
    message.outputs.add(name="order")
    message.parameters["top_k"].int64_param = 2
    answer = await stub_of(api).ModelInfer(message)
    assert [(one.name, list(one.shape)) for one in answer.outputs] == [("order", [2])]
    assert len(answer.raw_output_contents) == 1
    assert answer.id


async def test_errors_have_the_status_and_the_kind_of_the_other_apis(api_model, api):
    cases = [
        (message_of(tensors(api_model), "no"), grpc.StatusCode.NOT_FOUND, "model_not_found"),
        (message_of(tensors(api_model), MODEL, model_version="9"), grpc.StatusCode.NOT_FOUND, "model_not_found"),
        (message_of(tensors(api_model), MODEL, model_version="x"), grpc.StatusCode.INVALID_ARGUMENT, "invalid_field"),
        (message_of(tensors(api_model)[1:], MODEL), grpc.StatusCode.INVALID_ARGUMENT, "missing_feature"),
    ]

    for message, status, kind in cases:
        with refused_call(status, kind):
            await stub_of(api).ModelInfer(message)
    with refused_call(grpc.StatusCode.UNIMPLEMENTED, "no_such_route"):
        await stub_of(api).RepositoryModelLoad(messages.RepositoryModelLoadRequest(model_name=MODEL))


async def test_metadata_configuration_index_and_statistics(api_model):
    async with served_api(api_model) as api:
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
        for request in (messages.ModelStatisticsRequest(), messages.ModelStatisticsRequest(name=MODEL, version="1")):
            (stats,) = (await stub.ModelStatistics(request)).model_stats
            assert (stats.inference_count, stats.execution_count) == (3, 3)
            assert stats.inference_stats.success.count == stats.inference_stats.queue.count == 3
        with pytest.raises(grpc.aio.AioRpcError, match="version 4"):
            await stub.ModelStatistics(messages.ModelStatisticsRequest(name=MODEL, version="4"))
