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
from serving.call import Call
from serving.errors import BodyTooLargeError, MalformedRequestError, RequestTimeoutError
from serving.grpc_api.encode import encode_lookup, encode_model, encode_rank
from serving.parse_proto import check_model, read_lookup, read_rank
from serving.proto.shardrank.v1 import ranking_pb2
from serving.request import LookupRequest, RankRequest
from serving.service import RankingService

logger = logging.getLogger(__name__)

SERVICE_NAME = ranking_pb2.DESCRIPTOR.services_by_name["RankingService"].full_name
ERROR_KIND_METADATA = "shardrank-error-kind"
MAX_DETAILS_BYTES = 4096
_CUT = "..."

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
                    data = await self._read(context)
                    self._service.admit(call)
                    return await answer(call, data, context)
            except ShardrankError as error:
                failure = error
            except Exception:
                logger.exception("gRPC method %s failed", name)
                failure = ShardrankError("internal error; the server's log says more")
            metadata = ((ERROR_KIND_METADATA, failure.kind),)
            await context.abort(grpc.StatusCode[failure.grpc_status], status_details(str(failure)), metadata)
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
        self._limit_deadline(request, context)
        answer = await self._service.rank(request)
        began = self._service.clock()
        encoded = encode_rank(answer)
        self._service.metrics.stage(call.model, "encode", self._service.clock() - began, call.method)
        return encoded

    async def _lookup(self, call: Call, data: bytes, context: Context) -> bytes:
        request = self._service.parse_lookup_message(call, read_lookup(data))
        self._limit_deadline(request, context)
        answer = await self._service.lookup(request)
        began = self._service.clock()
        encoded = encode_lookup(answer)
        self._service.metrics.stage(call.model, "encode", self._service.clock() - began, call.method)
        return encoded

    def _limit_deadline(self, request: RankRequest | LookupRequest, context: Context) -> None:
        """The deadline of the call counts too, whichever is earlier."""
        remaining_s = context.time_remaining()
        if remaining_s is not None:
            request.deadline = min(request.deadline, self._service.clock() + remaining_s)

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


def status_details(message: str) -> str:
    """A message, cut where it would take more than `MAX_DETAILS_BYTES` on the wire.

    There it is percent-encoded (https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md): printable ASCII but
    `%` takes one byte, every other byte of its UTF-8 form three. Peers refuse trailers that are too long as a whole.
    """
    if 12 * len(message) <= MAX_DETAILS_BYTES:
        return message
    # No character takes less than a byte, so what is beyond the limit need not be looked at.
    size, head = 0, message[: MAX_DETAILS_BYTES + 1]
    for end, letter in enumerate(head):
        size += 1 if " " <= letter <= "~" and letter != "%" else 3 * len(letter.encode("utf-8", "replace"))
        if size > MAX_DETAILS_BYTES:
            return message[: max(0, end - len(_CUT))] + _CUT
    return message
