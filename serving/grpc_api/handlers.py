"""The handlers of the gRPC API."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message import DecodeError

from serving.call import Call
from serving.errors import MalformedRequestError
from serving.grpc_api.encode import encode_lookup, encode_model, encode_rank
from serving.grpc_api.unary import Context, UnaryMethods
from serving.parse_proto import check_model
from serving.proto.shardrank.v1 import ranking_pb2
from serving.read_proto import read_lookup, read_rank
from serving.service import RankingService

SERVICE_NAME = ranking_pb2.DESCRIPTOR.services_by_name["RankingService"].full_name


class Handlers:
    """`shardrank.v1.RankingService` over one service."""

    def __init__(self, service: RankingService) -> None:
        self._service = service
        self._methods = UnaryMethods(service, "grpc")

    def generic_handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """What a grpc.aio server is given."""
        methods = {
            "Rank": self._methods.make("rank", self._rank),
            "Lookup": self._methods.make("lookup", self._lookup),
            "GetModel": self._methods.make("model", self._model),
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    async def _rank(self, call: Call, data: bytes, context: Context) -> bytes:
        request = self._service.parse_rank_message(call, read_rank(data))
        call.parsed = self._service.clock()
        self._methods.limit_deadline(request, context)
        answer = await self._service.rank(request)
        answered = self._service.clock()
        encoded = encode_rank(answer)
        self._service.metrics.answer_encoded(call, request, answered, self._service.clock())
        return encoded

    async def _lookup(self, call: Call, data: bytes, context: Context) -> bytes:
        request = self._service.parse_lookup_message(call, read_lookup(data))
        call.parsed = self._service.clock()
        self._methods.limit_deadline(request, context)
        answer = await self._service.lookup(request)
        answered = self._service.clock()
        encoded = encode_lookup(answer)
        self._service.metrics.answer_encoded(call, request, answered, self._service.clock())
        return encoded

    async def _model(self, call: Call, data: bytes, context: Context) -> bytes:
        del context
        try:
            request = ranking_pb2.GetModelRequest.FromString(data)
        except DecodeError as error:
            name = ranking_pb2.GetModelRequest.DESCRIPTOR.full_name
            raise MalformedRequestError("", f"the message is not a {name}: {error}") from error
        check_model(request.model)
        description = self._service.describe(request.model, request.version if request.HasField("version") else None)
        call.model = description.model
        return encode_model(description)
