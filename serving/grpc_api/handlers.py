"""The handlers of the gRPC API.

Messages come and go as bytes: a request that can't be decoded is answered by this code, not by the library. Methods are
unary for clients; on this side they read their one message themselves, which is what lets a client that never sends it
be timed out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from loader.errors import ShardrankError
from serving.errors import BodyTooLargeError, MalformedRequestError, RequestTimeoutError
from serving.grpc_api.encode import encode_lookup, encode_model, encode_rank
from serving.parse_proto import read_lookup, read_rank
from serving.proto.shardrank.v1 import ranking_pb2
from serving.request import LookupRequest, RankRequest
from serving.service import Call, RankingService

logger = logging.getLogger(__name__)

SERVICE_NAME = ranking_pb2.DESCRIPTOR.services_by_name["RankingService"].full_name
ERROR_KIND_METADATA = "shardrank-error-kind"

Context = grpc.aio.ServicerContext[Any, Any]


class Handlers:
    """`shardrank.v1.RankingService` over one service."""

    def __init__(self, service: RankingService) -> None:
        self._service = service

    def generic_handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """What a grpc.aio server is given."""
        methods = {
            "Rank": self._method("rank", self._rank),
            "Lookup": self._method("lookup", self._lookup),
            "GetModel": self._method("model", self._model),
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    def _method(
        self, name: str, answer: Callable[[Call, bytes, Context], Awaitable[bytes]]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        async def handle(requests: object, context: Context) -> bytes:
            del requests
            try:
                with self._service.call("grpc", name) as call:
                    return await answer(call, await self._read(context), context)
            except ShardrankError as error:
                failure = error
            except Exception:
                logger.exception("gRPC method %s failed", name)
                failure = ShardrankError("internal error; the server's log says more")
            await context.abort(
                grpc.StatusCode[failure.grpc_status], str(failure), ((ERROR_KIND_METADATA, failure.kind),)
            )
            raise AssertionError("abort always raises")

        return grpc.stream_unary_rpc_method_handler(handle)

    async def _read(self, context: Context) -> bytes:
        limits = self._service.limits
        try:
            async with asyncio.timeout(limits.receive_timeout_s):
                data = await context.read()
        except TimeoutError:
            raise RequestTimeoutError(
                f"the request was not complete after receive_timeout_s = {limits.receive_timeout_s} s"
            ) from None
        if data is grpc.aio.EOF:  # type: ignore[attr-defined]  # absent from the stubs
            raise MalformedRequestError("", "the call has no request message")
        if len(data) > limits.max_body_bytes:
            raise BodyTooLargeError("", "max_body_bytes", limits.max_body_bytes, len(data), "bytes in the message")
        return bytes(data)

    async def _rank(self, call: Call, data: bytes, context: Context) -> bytes:
        request = self._service.parse_rank_message(call, read_rank(data))
        _limit_deadline(call, request, context)
        answer = await self._service.rank(request)
        began = self._service.clock()
        encoded = encode_rank(answer)
        self._service.metrics.stage(call.model, "encode", self._service.clock() - began)
        return encoded

    async def _lookup(self, call: Call, data: bytes, context: Context) -> bytes:
        request = self._service.parse_lookup_message(call, read_lookup(data))
        _limit_deadline(call, request, context)
        answer = await self._service.lookup(request)
        began = self._service.clock()
        encoded = encode_lookup(answer)
        self._service.metrics.stage(call.model, "encode", self._service.clock() - began)
        return encoded

    async def _model(self, call: Call, data: bytes, context: Context) -> bytes:
        del context
        try:
            request = ranking_pb2.GetModelRequest.FromString(data)
        except DecodeError as error:
            raise MalformedRequestError("", f"the message is not a GetModelRequest: {error}") from error
        description = self._service.describe(request.model, request.version if request.HasField("version") else None)
        call.model = description.model
        return encode_model(description)


def _limit_deadline(call: Call, request: RankRequest | LookupRequest, context: Context) -> None:
    """The deadline of the call counts too, whichever is earlier."""
    remaining_s = context.time_remaining()
    if remaining_s is not None:
        request.deadline = min(request.deadline, call.began + remaining_s)
