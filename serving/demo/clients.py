"""Two blocking clients of a running server, as a product's would be: HTTP with JSON, and gRPC."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import grpc
import numpy as np

from loader.golden import GoldenRequests
from loader.manifest import ModelSpec
from serving.demo.errors import RankCallError
from serving.proto.shardrank.v1 import ranking_pb2, ranking_pb2_grpc
from shard_node.bags import Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class RankedAnswer:
    """An answer as it arrived.

    Attributes:
        version: that gave the scores.
        scores: float32 [N].
        order: positions by descending score.
        seconds: from the first byte sent to the whole answer received; encoding and decoding in the client left out.
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
    """`shardrank.v1.RankingService/Rank` over one channel.

    Args:
        host, port: of the server.
        messages: the requests.
        timeout_s: deadline of one call.
        clock: seconds.
    """

    name = "grpc"

    def __init__(
        self,
        host: str,
        port: int,
        messages: list[ranking_pb2.RankRequest],
        timeout_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        # A proxy of the environment is for the way out, not for a server on this machine.
        self._channel = grpc.insecure_channel(at, options=[("grpc.enable_http_proxy", 0)])
        self._stub = ranking_pb2_grpc.RankingServiceStub(self._channel)
        self._messages = messages
        self._timeout_s = timeout_s
        self._clock = clock

    def rank(self, index: int) -> RankedAnswer:
        """Sends message `index`. Raises RankCallError."""
        start = self._clock()
        try:
            answer = self._stub.Rank(self._messages[index], timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise RankCallError(f"grpc: {error}") from error
        seconds = self._clock() - start
        scores = np.array(answer.scores, dtype=np.float32)
        return RankedAnswer(answer.version, scores, list(answer.order), seconds)

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def rank_messages(requests: GoldenRequests, spec: ModelSpec, timeout_ms: int) -> list[ranking_pb2.RankRequest]:
    """Each request as a protobuf message. For models without string vocabularies."""
    messages = []
    for index in range(requests.num_requests):
        request = requests.request(index)
        message = ranking_pb2.RankRequest(model=spec.model, timeout_ms=timeout_ms)
        for feature in spec.features:
            side = message.context if feature.side == "context" else message.candidates
            sparse = side.sparse[feature.name]
            sparse.ids.extend(request.values[feature.name].tolist())
            lengths = request.lengths[feature.name]
            if feature.side == "candidate" and (lengths != 1).any():
                sparse.lengths.extend(lengths.tolist())
            if feature.weighted:
                sparse.weights.extend(request.weights[feature.name].tolist())
        message.context.dense.extend(request.context_dense[0].tolist())
        message.candidates.dense.extend(request.candidate_dense.reshape(-1).tolist())
        message.num_candidates = int(request.num_candidates[0])
        messages.append(message)
    return messages


def json_bodies(documents: list[dict[str, Any]], timeout_ms: int) -> list[bytes]:
    """Each request document as an encoded HTTP body."""
    return [json.dumps({**document, "timeout_ms": timeout_ms}).encode() for document in documents]
