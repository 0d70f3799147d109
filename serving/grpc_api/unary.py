"""Methods of one message and one answer, as bytes, whose errors are those of the API.

A request that can't be decoded is answered by this code, not by the library.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from loader.errors import ShardrankError
from serving.call import Call
from serving.grpc_api.call_head import ERROR_KIND_METADATA
from serving.grpc_api.call_stream import CallStream
from serving.request import LookupRequest, RankRequest
from serving.service import RankingService

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


def limit_deadline(service: RankingService, request: RankRequest | LookupRequest, call: CallStream) -> None:
    """The deadline of the call counts too, whichever is earlier."""
    remaining_s = call.time_remaining()
    if remaining_s is not None:
        request.deadline = min(request.deadline, service.clock() + remaining_s)
