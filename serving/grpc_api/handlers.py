"""The handlers of the gRPC API."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from serving.errors import MalformedRequestError
from serving.formats.codecs import message_codec
from serving.formats.messages import encode_model
from serving.grpc_api.call_stream import CallStream, Method
from serving.grpc_api.unary import RoadMethod, UnaryMethod
from serving.observe.times import Call
from serving.proto.shardrank.v1 import ranking_pb2
from serving.rank.service import RankingService

SERVICE_NAME = ranking_pb2.DESCRIPTOR.services_by_name["RankingService"].full_name


class Handlers:
    """`shardrank.v1.RankingService` over one service."""

    def __init__(self, service: RankingService) -> None:
        self._service = service

    def by_path(self) -> dict[bytes, Method]:
        """Its methods."""
        methods: dict[str, Method] = {
            "Rank": RoadMethod(self._service, message_codec("rank")),
            "Lookup": RoadMethod(self._service, message_codec("lookup")),
            "GetModel": UnaryMethod(self._service, "grpc", "model", self._model),
        }
        return {f"/{SERVICE_NAME}/{name}".encode(): method for name, method in methods.items()}

    async def _model(self, call: Call, data: bytes, stream: CallStream) -> bytes:
        del stream
        try:
            request = ranking_pb2.GetModelRequest.FromString(data)
        except DecodeError as error:
            name = ranking_pb2.GetModelRequest.DESCRIPTOR.full_name
            raise MalformedRequestError("", f"the message is not a {name}: {error}") from error
        description = self._service.describe(request.model, request.version if request.HasField("version") else None)
        call.model = description.model
        return encode_model(description)
