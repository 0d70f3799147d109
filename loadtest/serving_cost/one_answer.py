"""One request of the pool over any API, with its scores: to see that what is measured is right."""

from __future__ import annotations

import urllib.request

import grpc
import msgspec
import numpy as np

from loadtest.grpc_channels import as_it_is
from loadtest.serving_cost.errors import WrongAnswerError
from loadtest.serving_cost.servers import HOST, Server
from loadtest.workloads.payloads import Payloads
from serving.proto.inference import open_inference_pb2
from serving.proto.shardrank.v1 import ranking_pb2
from shard_node.bags import Float32Array

HEADER_LENGTH = "Inference-Header-Content-Length"
SCORES = "scores"
TIMEOUT_S = 60.0


def scores_of(server: Server, pool: Payloads, request: int) -> Float32Array:
    """float32 [candidates]. Raises WrongAnswerError, urllib.error.URLError and grpc.RpcError."""
    if pool.is_grpc:
        with grpc.insecure_channel(f"{HOST}:{server.grpc_port}") as channel:
            answer = channel.unary_unary(pool.path, as_it_is, as_it_is)(pool[request].body, timeout=TIMEOUT_S)
        if pool.api == "oip-grpc":
            return _raw_scores(answer)
        return np.array(ranking_pb2.RankResponse.FromString(answer).scores, np.float32)
    url = f"http://{HOST}:{server.http_port}{pool.path}"
    post = urllib.request.Request(url, pool[request].body, dict(pool[request].headers))
    with urllib.request.urlopen(post, timeout=TIMEOUT_S) as response:
        body, header_bytes = response.read(), response.headers[HEADER_LENGTH]
    if pool.api == "json":
        return np.array(msgspec.json.decode(body)["scores"], np.float32)
    return _binary_scores(body, int(header_bytes))


def _binary_scores(body: bytes, header_bytes: int) -> Float32Array:
    """Of an answer with binary tensors: each output's bytes follow the header in the order of the outputs."""
    first = header_bytes
    for output in msgspec.json.decode(body[:header_bytes])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        if output["name"] == SCORES:
            return np.frombuffer(body[first : first + size], "<f4")
        first += size
    raise WrongAnswerError(f"oip-http: no output {SCORES!r}")


def _raw_scores(answer: bytes) -> Float32Array:
    """Of a ModelInferResponse: raw contents are in the order of the outputs."""
    message = open_inference_pb2.ModelInferResponse.FromString(answer)
    for output, raw in zip(message.outputs, message.raw_output_contents, strict=False):
        if output.name == SCORES:
            return np.frombuffer(raw, "<f4")
    raise WrongAnswerError(f"oip-grpc: no output {SCORES!r} with raw contents")


def check_scores(server: Server, pool: Payloads, request: int, expected: Float32Array, tolerance: float) -> None:
    """Raises WrongAnswerError unless the server's scores are the expected ones."""
    scores = scores_of(server, pool, request)
    if scores.shape != expected.shape or not np.allclose(scores, expected, rtol=0, atol=tolerance):
        largest = float(np.abs(scores - expected).max()) if scores.shape == expected.shape else float("nan")
        raise WrongAnswerError(
            f"{pool.api}: {scores.size} scores, {expected.size} expected; they differ by up to {largest:.3g}, "
            f"allowed is {tolerance:g}"
        )
