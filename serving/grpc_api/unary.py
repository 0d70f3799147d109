"""Methods of one message and one answer, as bytes, whose errors are those of the API.

A request that can't be decoded is answered by this code, not by the library.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from loader.errors import ShardrankError
from serving.formats.requests import Codec
from serving.grpc_api.call_head import ERROR_KIND_METADATA
from serving.grpc_api.call_stream import CallStream
from serving.observe.times import Call
from serving.rank.answer import answer
from serving.rank.service import RankingService

logger = logging.getLogger(__name__)

Answer = Callable[[Call, bytes, CallStream], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class UnaryMethod:
    """One method.

    Args:
        service: counts the calls in and out.
        api: the name of its API in metrics.
        name: its own in metrics, such as `rank`.
        answer: from the message's bytes to the answer's.
        is_probe: whether it is answered even while too many requests are in flight.
    """

    service: RankingService
    api: str
    name: str
    answer: Answer
    is_probe: bool = False
    is_streamed: bool = False

    async def run(self, call: CallStream) -> None:
        """Answers a call."""
        service = self.service
        try:
            with service.call(self.api, self.name) as counted:
                data = await call.receive(service.limits.receive_timeout_s)
                counted.received = service.clock()
                if not self.is_probe:
                    service.admit(counted)
                answer = await self.answer(counted, data, call)
        except ShardrankError as error:
            failure = error
        except Exception:
            logger.exception("gRPC method %s failed", self.name)
            failure = ShardrankError("internal error; the server's log says more")
        else:
            call.answer(answer)
            return
        call.end(grpc.StatusCode[failure.grpc_status], str(failure), ((ERROR_KIND_METADATA, failure.kind),))


class RoadMethod:
    """A method that ranks or looks up."""

    is_streamed = False

    def __init__(self, service: RankingService, codec: Codec) -> None:
        self.service = service
        self.codec = codec

    async def run(self, call: CallStream) -> None:
        """Answers a call."""
        service = self.service

        async def receive() -> bytes:
            return await call.receive(service.limits.receive_timeout_s)

        try:
            encoded = await answer(service, self.codec, receive, GrpcClient(call))
        except ShardrankError as error:
            call.end(grpc.StatusCode[error.grpc_status], str(error), ((ERROR_KIND_METADATA, error.kind),))
        except Exception:
            logger.exception("gRPC method failed")
            failure = ShardrankError("internal error; the server's log says more")
            call.end(grpc.StatusCode[failure.grpc_status], str(failure), ((ERROR_KIND_METADATA, failure.kind),))
        else:
            call.answer(encoded.body)


class GrpcClient:
    """Whoever waits behind a call; it cancels the task when it leaves."""

    def __init__(self, call: CallStream) -> None:
        self.time_remaining = call.time_remaining

    def watch(self, callback: Callable[[], None]) -> None:
        """Nothing to watch."""
