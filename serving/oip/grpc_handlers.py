"""The handlers of `inference.GRPCInferenceService`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from serving.errors import RepositoryControlError
from serving.formats.codecs import infer_grpc_codec
from serving.grpc_api.call_stream import CallStream, Method
from serving.grpc_api.unary import Answer, RoadMethod, UnaryMethod
from serving.observe.times import Call
from serving.oip import documents
from serving.proto.inference import open_inference_pb2 as messages
from serving.rank.service import RankingService

SERVICE_NAME = messages.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name

Fields = dict[str, Any]


class InferHandlers:
    """`inference.GRPCInferenceService` over one service.

    Args:
        service: answers.
    """

    def __init__(self, service: RankingService) -> None:
        self._service = service

    def by_path(self) -> dict[bytes, Method]:
        """Its methods."""
        service, m = self._service, messages
        methods = {
            "ModelInfer": RoadMethod(service, infer_grpc_codec()),
            "ServerLive": self._probe(m.ServerLiveRequest, m.ServerLiveResponse, lambda request: {"live": True}),
            "ServerReady": self._probe(
                m.ServerReadyRequest, m.ServerReadyResponse, lambda request: {"ready": not service.watch.problems()}
            ),
            "ModelReady": self._probe(m.ModelReadyRequest, m.ModelReadyResponse, self._model_ready),
            "ServerMetadata": self._tell(
                m.ServerMetadataRequest, m.ServerMetadataResponse, lambda request: documents.server_metadata()
            ),
            "ModelMetadata": self._tell(m.ModelMetadataRequest, m.ModelMetadataResponse, self._metadata),
            "ModelConfig": self._tell(m.ModelConfigRequest, m.ModelConfigResponse, self._config),
            "ModelStatistics": self._tell(m.ModelStatisticsRequest, m.ModelStatisticsResponse, self._statistics),
            "RepositoryIndex": self._tell(m.RepositoryIndexRequest, m.RepositoryIndexResponse, self._index),
            "RepositoryModelLoad": self._tell(m.RepositoryModelLoadRequest, m.RepositoryModelLoadResponse, _refuse),
            "RepositoryModelUnload": self._tell(
                m.RepositoryModelUnloadRequest, m.RepositoryModelUnloadResponse, _refuse
            ),
        }
        return {f"/{SERVICE_NAME}/{name}".encode(): method for name, method in methods.items()}

    def _model_ready(self, request: messages.ModelReadyRequest) -> Fields:
        return {"ready": documents.model_is_ready(self._service, request.name, request.version)}

    def _metadata(self, request: messages.ModelMetadataRequest) -> Fields:
        return documents.model_metadata(self._service, request.name, request.version)

    def _config(self, request: messages.ModelConfigRequest) -> Fields:
        return {"config": documents.model_config(self._service, request.name, request.version)}

    def _statistics(self, request: messages.ModelStatisticsRequest) -> Fields:
        return documents.model_statistics(self._service, request.name, request.version)

    def _index(self, request: messages.RepositoryIndexRequest) -> Fields:
        return {"models": documents.repository_index(self._service, ready_only=request.ready)}

    def _method(self, name: str, answer: Answer, *, is_probe: bool = False) -> Method:
        return UnaryMethod(self._service, "oip_grpc", name, answer, is_probe)

    def _probe(self, takes: type[Message], gives: type[Message], fields: Callable[[Any], Fields]) -> Method:
        return self._method("model", _answer(takes, gives, fields), is_probe=True)

    def _tell(self, takes: type[Message], gives: type[Message], fields: Callable[[Any], Fields]) -> Method:
        return self._method("model", _answer(takes, gives, fields))


def _answer(takes: type[Message], gives: type[Message], fields: Callable[[Any], Fields]) -> Answer:
    async def answer(call: Call, data: bytes, stream: CallStream) -> bytes:
        del call, stream
        made: Message = gives(**fields(takes.FromString(data)))
        return made.SerializeToString()

    return answer


def _refuse(request: Message) -> Fields:
    del request
    raise RepositoryControlError()
