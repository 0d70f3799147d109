"""The handlers of the gRPC API."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from serving.call import Call
from serving.errors import MalformedRequestError
from serving.grpc_api.call_stream import CallStream, Method
from serving.grpc_api.encode import encode_lookup, encode_model, encode_rank
from serving.grpc_api.unary import UnaryMethod, limit_deadline
from serving.parse_proto import check_model
from serving.proto.shardrank.v1 import ranking_pb2
from serving.read_proto import read_lookup, read_rank
from serving.service import RankingService

SERVICE_NAME = ranking_pb2.DESCRIPTOR.services_by_name["RankingService"].full_name


class Handlers:
    """`shardrank.v1.RankingService` over one service."""

    def __init__(self, service: RankingService) -> None:
        self._service = service

    def by_path(self) -> dict[bytes, Method]:
        """Its methods."""
        answers = {"Rank": ("rank", self._rank), "Lookup": ("lookup", self._lookup), "GetModel": ("model", self._model)}
        return {
            f"/{SERVICE_NAME}/{method}".encode(): UnaryMethod(self._service, "grpc", name, answer)
            for method, (name, answer) in answers.items()
        }

    async def _rank(self, call: Call, data: bytes, stream: CallStream) -> bytes:
        request = self._service.parse_rank_message(call, read_rank(data))
        call.parsed = self._service.clock()
        limit_deadline(self._service, request, stream)
        answer = await self._service.rank(request)
        answered = self._service.clock()
        encoded = encode_rank(answer)
        self._service.metrics.answer_encoded(call, request, answered, self._service.clock())
        return encoded

    async def _lookup(self, call: Call, data: bytes, stream: CallStream) -> bytes:
        request = self._service.parse_lookup_message(call, read_lookup(data))
        call.parsed = self._service.clock()
        limit_deadline(self._service, request, stream)
        answer = await self._service.lookup(request)
        answered = self._service.clock()
        encoded = encode_lookup(answer)
        self._service.metrics.answer_encoded(call, request, answered, self._service.clock())
        return encoded

    async def _model(self, call: Call, data: bytes, stream: CallStream) -> bytes:
        del stream
        try:
            request = ranking_pb2.GetModelRequest.FromString(data)
        except DecodeError as error:
            name = ranking_pb2.GetModelRequest.DESCRIPTOR.full_name
            raise MalformedRequestError("", f"the message is not a {name}: {error}") from error
        check_model(request.model)
        description = self._service.describe(request.model, request.version if request.HasField("version") else None)
        call.model = description.model
        return encode_model(description)
