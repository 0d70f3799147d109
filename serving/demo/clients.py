"""Two blocking clients of a running server, as a product's would be: HTTP with JSON, and `serving.client` over gRPC."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from loader.golden import GoldenRequests
from loader.manifest import ModelSpec
from serving.client import Client, ClientError, Ragged, RetryPolicy
from serving.demo.errors import RankCallError
from shard_node.bags import Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class RankedAnswer:
    """An answer as it arrived.

    Attributes:
        version: that gave the scores.
        scores: float32 [N].
        order: positions by descending score.
        seconds: over HTTP from the first byte sent to the whole answer received, the client's coding left out; over
            gRPC the whole call of the Python client.
    """

    version: int
    scores: Float32Array
    order: list[int]
    seconds: float


class RankClient(Protocol):
    """Sends prepared requests. What a prepared request is, is the client's own affair."""

    @property
    def name(self) -> str:
        """The API: `http` or `grpc`."""
        ...

    def rank(self, index: int) -> RankedAnswer:
        """Sends prepared request `index`. Raises RankCallError."""
        ...

    def close(self) -> None:
        """Closes the connection."""
        ...


class HttpRankClient:
    """`POST /v1/models/{model}:rank` over one kept-alive connection.

    Args:
        host, port: of the server.
        model: the model's name.
        bodies: request bodies, encoded.
        timeout_s: for one answer.
        clock: seconds.
    """

    name = "http"

    def __init__(
        self,
        host: str,
        port: int,
        model: str,
        bodies: list[bytes],
        timeout_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        self._model = model
        self._bodies = bodies
        self._clock = clock

    def rank(self, index: int) -> RankedAnswer:
        """Sends body `index`. Raises RankCallError."""
        return self.send(self._bodies[index])

    def send(self, body: bytes) -> RankedAnswer:
        """Sends one body. Raises RankCallError."""
        start = self._clock()
        payload = self._call("POST", f"/v1/models/{self._model}:rank", body)
        seconds = self._clock() - start
        document: dict[str, Any] = json.loads(payload)
        scores = np.array(document["scores"], dtype=np.float32)
        return RankedAnswer(document["version"], scores, document["order"], seconds)

    def describe(self) -> dict[str, Any]:
        """`GET /v1/models/{model}`. Raises RankCallError."""
        document: dict[str, Any] = json.loads(self._call("GET", f"/v1/models/{self._model}", None))
        return document

    def _call(self, method: str, path: str, body: bytes | None) -> bytes:
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
            payload = answer.read()
        except (OSError, http.client.HTTPException) as error:
            # The connection's state is unknown; the next request opens a new one.
            self._connection.close()
            raise RankCallError(f"http: {type(error).__name__}: {error}") from error
        if answer.status != http.client.OK:
            raise RankCallError(f"http: status {answer.status}: {payload[:300].decode('utf-8', 'replace')}")
        return payload

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class GrpcRankClient:
    """The Python client over gRPC, which packs.

    Args:
        host, port: of the server.
        model: the model's name.
        requests: arguments of `Client.rank`.
        timeout_ms: deadline of one call.
        clock: seconds.
    """

    name = "grpc"

    def __init__(
        self,
        host: str,
        port: int,
        model: str,
        requests: list[dict[str, Any]],
        timeout_ms: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        # A request that fails is counted, so none is sent again.
        self._client = Client(f"grpc://{at}", timeout_ms=timeout_ms, retry=RetryPolicy(max_attempts=1))
        self._model = model
        self._requests = requests
        self._clock = clock

    def rank(self, index: int) -> RankedAnswer:
        """Sends request `index`. Raises RankCallError."""
        start = self._clock()
        try:
            result = self._client.rank(self._model, **self._requests[index])
        except ClientError as error:
            raise RankCallError(f"grpc: {error}") from error
        return RankedAnswer(result.version, result.scores, result.order.tolist(), self._clock() - start)

    def close(self) -> None:
        """Closes the channel."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def rank_arguments(requests: GoldenRequests, spec: ModelSpec) -> list[dict[str, Any]]:
    """Each request as arguments of `Client.rank`. For models without string vocabularies."""
    arguments = []
    for one in map(requests.request, range(requests.num_requests)):
        sides: dict[str, dict[str, Any]] = {"context": {}, "candidate": {}}
        for feature in spec.features:
            values = one.values[feature.name]
            is_context = feature.side == "context"
            sides[feature.side][feature.name] = values if is_context else Ragged(values, one.lengths[feature.name])
        arguments.append(
            {
                "context": sides["context"],
                "candidates": sides["candidate"],
                "weights": {feature.name: one.weights[feature.name] for feature in spec.features if feature.weighted},
                "context_dense": one.context_dense[0],
                "candidate_dense": one.candidate_dense,
            }
        )
    return arguments


def json_bodies(documents: list[dict[str, Any]], timeout_ms: int) -> list[bytes]:
    """Each request document as an encoded HTTP body."""
    return [json.dumps({**document, "timeout_ms": timeout_ms}).encode() for document in documents]
