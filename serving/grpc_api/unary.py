"""Unary gRPC methods whose messages come and go as bytes, and whose errors are those of the API.

A request that can't be decoded is answered by this code, not by the library. Methods are unary for clients; on this
side they read their one message themselves, which is what lets a client that never sends it be timed out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from loader.errors import ShardrankError
from serving.call import Call
from serving.errors import BodyTooLargeError, MalformedRequestError, RequestTimeoutError
from serving.request import LookupRequest, RankRequest
from serving.service import RankingService

logger = logging.getLogger(__name__)

ERROR_KIND_METADATA = "shardrank-error-kind"
MAX_DETAILS_BYTES = 4096
_CUT = "..."

Context = grpc.aio.ServicerContext[Any, Any]


class UnaryMethods:
    """Makes the methods of one gRPC service.

    Args:
        service: counts the calls in and out.
        api: the name of this API in metrics.
    """

    def __init__(self, service: RankingService, api: str) -> None:
        self._service = service
        self._api = api

    def make(
        self, name: str, answer: Callable[[Call, bytes, Context], Awaitable[bytes]], *, is_probe: bool = False
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Makes one method.

        Args:
            name: in metrics, such as `rank`.
            answer: from the message's bytes to the answer's.
            is_probe: whether it is answered even while too many requests are in flight.
        """

        async def handle(requests: object, context: Context) -> bytes:
            del requests
            try:
                with self._service.call(self._api, name) as call:
                    data = await self._read(context)
                    call.received = self._service.clock()
                    if not is_probe:
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

    def limit_deadline(self, request: RankRequest | LookupRequest, context: Context) -> None:
        """The deadline of the call counts too, whichever is earlier."""
        remaining_s = context.time_remaining()
        if remaining_s is not None:
            request.deadline = min(request.deadline, self._service.clock() + remaining_s)


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
