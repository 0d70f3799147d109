"""The one road of a call that ranks or looks up, whatever it came by: admit, lease, parse, rank, encode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

from serving.service import RankingService

Buffer: TypeAlias = bytes | bytearray | memoryview
JSON = "application/json"


class Encoded(NamedTuple):
    """An answer as bytes.

    Attributes:
        body: all of it.
        content_type: as an HTTP header has it.
        headers: further HTTP headers; names in lower case.
    """

    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


class Codec(Protocol):
    """Reads one call's request and writes its answer."""

    @property
    def api(self) -> str:
        """Name of the API in metrics: `http`, `grpc`, `oip_http` or `oip_grpc`."""

    @property
    def method(self) -> str:
        """`rank` or `lookup`."""

    def parse(self, service: RankingService, call: Any, body: Buffer) -> Any:
        """Transitional."""

    def encode(self, answer: Any) -> Encoded:
        """Write the answer."""


class Client(Protocol):
    """Whoever waits for an answer."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's own deadline; None if it set none."""

    def watch(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when the client leaves: at once, if it has left already."""


async def answer(
    service: RankingService, codec: Codec, receive: Callable[[], Awaitable[Buffer]], client: Client
) -> Encoded:
    """Answer one call.

    Args:
        service: holds the models.
        codec: reads the request and writes the answer.
        receive: gives the request's bytes, complete and not compressed.
        client: whoever waits.

    Raises:
        ShardrankError: with its HTTP and gRPC status.
    """
    with service.call(codec.api, codec.method) as call:
        body = await receive()
        call.received = service.clock()
        service.admit(call)
        request = codec.parse(service, call, body)
        call.parsed = service.clock()
        remaining_s = client.time_remaining()
        if remaining_s is not None:
            request.deadline = min(request.deadline, service.clock() + remaining_s)
        rank = service.rank if codec.method == "rank" else service.lookup
        ranked = await rank(request, client.watch)
        answered = service.clock()
        encoded = codec.encode(ranked)
        service.metrics.answer_encoded(call, request, answered, service.clock())
        return encoded
