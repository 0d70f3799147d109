"""A workload's requests as bytes, made before a load begins: whoever measures must not encode meanwhile."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args, overload

import numpy as np

from loadtest.workloads import grpc_payload, json_payload, oip_payload
from loadtest.workloads.errors import WorkloadError
from loadtest.workloads.workload import Workload

Api: TypeAlias = Literal["json", "oip-http", "grpc", "grpc-packed", "oip-grpc"]
APIS: tuple[Api, ...] = get_args(Api)
GRPC_APIS: tuple[Api, ...] = ("grpc", "grpc-packed", "oip-grpc")

Headers: TypeAlias = tuple[tuple[str, str], ...]
"""Names in lower case, and values."""

_COUNT_SCORES: dict[Api, Callable[[bytes], int]] = {
    "json": json_payload.count_scores,
    "oip-http": oip_payload.count_http_scores,
    "grpc": grpc_payload.count_scores,
    "grpc-packed": grpc_payload.count_scores,
    "oip-grpc": oip_payload.count_grpc_scores,
}
_HEADERS: dict[Api, Headers] = {
    "json": (("content-type", "application/json"),),
    "oip-http": (("content-type", "application/octet-stream"),),
    **dict.fromkeys(GRPC_APIS, ()),
}

DEFAULT_PAYLOADS = 256
DEFAULT_MAX_BYTES = 128 << 20

FORMS = {True: "varied: ragged bags, headers that change", False: "not varied (--same)"}
"""What results say of requests that are `varied` or not."""


def changing_headers(varied: bool, seed: int) -> Iterator[Headers]:
    """What a traced client adds to each request that it sends, over HTTP or gRPC: without end, each time others.

    `traceparent` is that of W3C's Trace Context, with ids that are drawn. Requests that are not `varied` get nothing.
    """
    if not varied:
        yield from itertools.repeat(())
    draw = random.Random(seed)
    while True:
        digits = f"{draw.getrandbits(320):080x}"
        yield ("traceparent", f"00-{digits[:32]}-{digits[32:48]}-01"), ("x-request-id", digits[48:])


@dataclass(frozen=True, slots=True)
class Payload:
    """One encoded request.

    Attributes:
        body: the HTTP body or the gRPC message.
        headers: HTTP headers beside host and content-length, in lower case; none for gRPC.
        num_candidates: the scores that its answer must have.
    """

    body: bytes
    headers: Headers
    num_candidates: int


class Payloads(Sequence[Payload]):
    """A pool of distinct encoded requests.

    Args:
        workload: makes the requests.
        api: `json`, `oip-http` (binary tensors), `grpc` (maps by feature name), `grpc-packed` or `oip-grpc`.
        model: the name that the server has the model under; None for the workload's own.
        count: how many. Fewer are made if they would take more than `max_bytes`; `len` tells, and there is at
            least one.
        seed: of the requests; the same ones for every API.
        timeout_ms: the deadline that each brings; None to leave it to the server.
        max_bytes: of all bodies.

    Raises:
        WorkloadError: no such API, or a count or size out of range.
    """

    def __init__(
        self,
        workload: Workload,
        api: Api,
        *,
        model: str | None = None,
        count: int = DEFAULT_PAYLOADS,
        seed: int = 0,
        timeout_ms: int | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        if api not in APIS:
            raise WorkloadError(f"api: {api!r} is not one of {', '.join(APIS)}")
        for name, value in (("count", count), ("max_bytes", max_bytes)):
            if value < 1:
                raise WorkloadError(f"{name}: {value} is not 1 or more")
        self._workload = workload
        self.api = api
        self.model = model or workload.spec.model
        self._timeout_ms = timeout_ms
        self._payloads = self._make(np.random.default_rng(seed), count, max_bytes)

    @property
    def is_grpc(self) -> bool:
        """Whether bodies are gRPC messages, not HTTP bodies."""
        return self.api in GRPC_APIS

    @property
    def path(self) -> str:
        """Where they go: the path of a POST, or the full name of a gRPC method."""
        return {
            "json": json_payload.rank_path(self.model),
            "oip-http": oip_payload.infer_path(self.model),
            "grpc": grpc_payload.RANK_METHOD,
            "grpc-packed": grpc_payload.RANK_METHOD,
            "oip-grpc": oip_payload.INFER_METHOD,
        }[self.api]

    @property
    def size_bytes(self) -> int:
        """Of all bodies."""
        return sum(len(payload.body) for payload in self._payloads)

    def check(self, answer: bytes) -> int:
        """How many scores an answer has that came with success; `Payload.num_candidates` says how many it must have.

        Args:
            answer: the HTTP body or the gRPC message.

        Raises:
            AnswerError: it is not an answer of this API.
        """
        return _COUNT_SCORES[self.api](answer)

    @overload
    def __getitem__(self, index: int) -> Payload: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Payload]: ...

    def __getitem__(self, index: int | slice) -> Payload | Sequence[Payload]:
        return self._payloads[index]

    def __len__(self) -> int:
        return len(self._payloads)

    def _make(self, rng: np.random.Generator, count: int, max_bytes: int) -> tuple[Payload, ...]:
        made: list[Payload] = []
        left = max_bytes
        while len(made) < count:
            payload = self._encoded(rng)
            left -= len(payload.body)
            if made and left < 0:
                break
            made.append(payload)
        return tuple(made)

    def _encoded(self, rng: np.random.Generator) -> Payload:
        workload = self._workload
        request = workload.request(rng)
        schema, timeout_ms, headers = workload.schema, self._timeout_ms, _HEADERS[self.api]
        if self.api == "json":
            body = json_payload.encode_request(schema, request, timeout_ms)
        elif self.api == "oip-http":
            body, header_bytes = oip_payload.encode_http(schema, request, timeout_ms)
            headers = (*headers, (oip_payload.HEADER_LENGTH, str(header_bytes)))
        elif self.api == "grpc":
            body = grpc_payload.encode_request(schema, request, self.model, timeout_ms)
        elif self.api == "grpc-packed":
            body = grpc_payload.encode_packed(schema, request, self.model, timeout_ms)
        else:
            body = oip_payload.encode_grpc(schema, request, self.model, timeout_ms)
        return Payload(body, headers, request.num_candidates)
