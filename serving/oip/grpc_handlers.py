"""The handlers of `inference.GRPCInferenceService`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from serving.call import Call
from serving.grpc_api.call_stream import CallStream, Method
from serving.grpc_api.unary import Answer, UnaryMethod, limit_deadline
from serving.oip import documents
from serving.oip.answer_ids import AnswerIds
from serving.oip.encode import encode_grpc
from serving.oip.errors import RepositoryControlError
from serving.oip.read_grpc import read_infer, read_message
from serving.parse_proto import check_model
from serving.proto.inference import open_inference_pb2 as messages
from serving.service import RankingService

SERVICE_NAME = messages.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name

Fields = dict[str, Any]


class InferHandlers:
    """`inference.GRPCInferenceService` over one service.

    Args:
        service: answers.
        new_id: makes the id of an answer whose request has none; by default `AnswerIds`.
    """

    def __init__(self, service: RankingService, new_id: Callable[[], str] | None = None) -> None:
        self._service = service
        self._new_id = new_id or AnswerIds()

    def by_path(self) -> dict[bytes, Method]:
        """Its methods."""
        service, m = self._service, messages
        methods = {
            "ModelInfer": self._method("rank", self._infer),
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

    async def _infer(self, call: Call, data: bytes, stream: CallStream) -> bytes:
        service = self._service
        read = read_infer(data)
        request = service.parse_infer(call, read)
        call.parsed = service.clock()
        limit_deadline(service, request, stream)
        answer = await service.rank(request)
        answered = service.clock()
        encoded = encode_grpc(read, answer, answer.request_id or self._new_id())
        service.metrics.answer_encoded(call, request, answered, service.clock())
        return encoded

    def _model_ready(self, request: messages.ModelReadyRequest) -> Fields:
        check_model(request.name)
        return {"ready": documents.model_is_ready(self._service, request.name, request.version)}

    def _metadata(self, request: messages.ModelMetadataRequest) -> Fields:
        check_model(request.name)
        return documents.model_metadata(self._service, request.name, request.version)

    def _config(self, request: messages.ModelConfigRequest) -> Fields:
        check_model(request.name)
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
        made: Message = gives(**fields(read_message(data, takes)))
        return made.SerializeToString()

    return answer


def _refuse(request: Message) -> Fields:
    del request
    raise RepositoryControlError()
