"""A workload's requests as bytes, made before a load begins: whoever measures must not encode meanwhile.

The formats are those of docs/api.md and docs/open-inference-protocol.md; `flat` and `tensors` are what other servers
are sent (`loadtest.peers`), with the context's columns in each candidate's, or once a request.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors.numpy
from google.protobuf.message import DecodeError

from loadtest.errors import RequestFailedError
from loadtest.workloads.workload import FeatureBags, Workload, features_of
from router.feature_schema import FeatureSchema
from serving.client.features import RankFeatures
from serving.formats.messages import CONTENT_TYPE, packed_request
from serving.formats.protobuf import packed_bytes
from serving.formats.requests import RankRequest
from serving.observe.recording import REPLAY_ID, RecordedRequest
from serving.proto.inference import open_inference_pb2
from serving.proto.shardrank.v1 import ranking_pb2
from serving.results import Ragged
from shard_node.bags import Float32Array, Int64Array

Api: TypeAlias = Literal["json", "oip-http", "grpc", "grpc-packed", "oip-grpc"]
APIS: tuple[Api, ...] = get_args(Api)
GRPC_APIS: tuple[Api, ...] = ("grpc", "grpc-packed", "oip-grpc")
Encoding: TypeAlias = Api | Literal["flat", "flat-once", "tensors", "tensors-once"]

Headers: TypeAlias = tuple[tuple[str, str], ...]
"""Names in lower case, and values."""
ScoreList: TypeAlias = Sequence[float] | Float32Array
Encoded: TypeAlias = tuple[bytes, Headers]

HEADER_LENGTH = "inference-header-content-length"
SCORES = "scores"
MAX_POOL_BYTES = 128 << 20
FORMS = {True: "varied: ragged bags, headers that change", False: "not varied (--same)"}
"""What results say of requests that are `varied` or not."""

_BINARY: Headers = (("content-type", "application/octet-stream"),)
_MESSAGE: Headers = (("content-type", CONTENT_TYPE),)
_RANK_METHOD = "/shardrank.v1.RankingService/Rank"


def changing_headers(varied: bool) -> Iterator[Headers]:
    """Yield what a traced client adds to each request, over HTTP or gRPC: without end, each time others.

    That is a `traceparent`, sampled in one of a hundred, and an `x-request-id`; nothing if not `varied`.
    """
    if not varied:
        yield from itertools.repeat(())
    draw = random.Random()
    while True:
        digits = f"{draw.getrandbits(320):080x}"
        flags = "01" if draw.random() < 0.01 else "00"
        yield ("traceparent", f"00-{digits[:32]}-{digits[32:48]}-{flags}"), ("x-request-id", digits[48:])


@dataclass(frozen=True, slots=True)
class Payload:
    """One encoded request, whose answer must have `num_candidates` scores.

    The path is that of a POST, or the full name of a gRPC method; headers are without host and content-length.
    """

    path: str
    body: bytes
    headers: Headers
    num_candidates: int


class Pool(list[Payload]):
    """Requests to one model as an API encodes them: as many as fit into so many bytes of bodies, and at least one."""

    def __init__(self, api: Encoding, model: str, payloads: Iterable[Payload], max_bytes: int) -> None:
        super().__init__()
        self.api, self.model, left = api, model, max_bytes
        for payload in payloads:
            left -= len(payload.body)
            if self and left < 0:
                break
            self.append(payload)

    def scores(self, answer: bytes) -> ScoreList:
        """Read the scores of an answer that came with success. Raises RequestFailedError: it is none of this API."""
        try:
            return _FORMS[self.api][2](answer)
        except (DecodeError, msgspec.MsgspecError, ValueError, LookupError, TypeError, StopIteration) as error:
            raise RequestFailedError(f"the answer is not one to a rank request: {error!r}") from error


def drawn_payloads(workload: Workload, api: Encoding, seed: int, timeout_ms: int | None = None) -> Iterator[Payload]:
    """Draw distinct requests of a workload without end, which for the same seed are the same in every API."""
    rng = np.random.default_rng(seed)
    while True:
        yield payload_of(workload.schema, workload.request(rng), api, workload.spec.model, timeout_ms)


def payload_of(
    schema: FeatureSchema, request: RankRequest, api: Encoding, model: str, timeout_ms: int | None
) -> Payload:
    """Encode a request."""
    path, encode, _ = _FORMS[api]
    return Payload(path.format(model), *encode(schema, request, model, timeout_ms), request.num_candidates)


def recorded_payload(recorded: RecordedRequest, number: int, scheme: str, timeout_ms: int | None) -> Payload:
    """Return a recorded request as it is sent again by gRPC or HTTP, by its id known to recorders as a replay."""
    # Of a message that follows another one fields are added to those of the first.
    request_id = f"{REPLAY_ID}{number}"
    added = ranking_pb2.RankRequest(model=recorded.model, timeout_ms=timeout_ms or 0, request_id=request_id)
    path, headers = (_RANK_METHOD, ()) if scheme == "grpc" else (_FORMS["json"][0].format(recorded.model), _MESSAGE)
    return Payload(path, recorded.request + added.SerializeToString(), headers, len(recorded.scores))


class _Answer(msgspec.Struct):
    scores: list[float]


def _encode_json(schema: FeatureSchema, request: RankRequest, _: str, timeout_ms: int | None) -> Encoded:
    """Write a JSON body; a candidate feature with one id each is a flat list, as a client would write it."""
    features, document = list(features_of(schema, request)), dict[str, Any]()
    for side, dense in (("context", request.context_dense), ("candidates", request.candidate_dense)):
        of_side = [feature for feature in features if feature.is_context == (side == "context")]
        if of_side or dense.size:
            sparse = {feature.name: _nested(feature.ids, feature) for feature in of_side}
            document[side] = {"sparse": sparse, "dense": _shortest(dense)}
        weighted = [(feature, feature.weights) for feature in of_side if feature.weights is not None]
        if weighted:
            document[side]["weights"] = {each.name: _nested(_shortest(given), each) for each, given in weighted}
    if timeout_ms is not None:
        document["timeout_ms"] = timeout_ms
    return msgspec.json.encode(document), (("content-type", "application/json"),)


def _nested(items: Int64Array | Sequence[Any], feature: FeatureBags) -> list[Any]:
    """Return a list for each bag; the flat list for a context feature, and where every candidate has one."""
    flat = items.tolist() if isinstance(items, np.ndarray) else list(items)
    if feature.is_context or (feature.lengths == 1).all():
        return flat
    ends = np.cumsum(feature.lengths).tolist()
    return [flat[end - length : end] for end, length in zip(ends, feature.lengths.tolist(), strict=True)]


def _shortest(values: Float32Array) -> list[Any]:
    """Return the shortest decimals that read back as the same float32: what a client that has float32 writes."""
    numbers: list[Any] = values.astype("U32").astype(np.float64).tolist()
    return numbers if values.size else []


def _encode_grpc(schema: FeatureSchema, request: RankRequest, model: str, timeout_ms: int | None) -> Encoded:
    sides: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    weights: dict[str, Any] = {}
    for feature in features_of(schema, request):
        name, is_context, lengths = feature.name, feature.is_context, feature.lengths
        sides[not is_context][name] = feature.ids if is_context else Ragged(feature.ids, lengths)
        if feature.weights is not None:
            weights[name] = feature.weights if is_context else Ragged(feature.weights, lengths)
    message = RankFeatures(*sides, weights, request.context_dense, request.candidate_dense).by_name()
    message.model, message.timeout_ms = model, timeout_ms or 0
    # The same request is the same bytes, whatever order a process keeps the features in.
    return message.SerializeToString(deterministic=True), ()


def _encode_packed(schema: FeatureSchema, request: RankRequest, model: str, timeout_ms: int | None) -> Encoded:
    message = packed_request(schema, request)
    message.model, message.timeout_ms = model, timeout_ms or 0
    return message.SerializeToString(deterministic=True), ()


Tensor: TypeAlias = tuple[str, str, list[int], bytes]
"""Of the Open Inference Protocol: name, datatype, shape, and little-endian data, row-major."""


def _tensors(schema: FeatureSchema, request: RankRequest) -> Iterator[Tensor]:
    """Return the inputs of a request. A candidate feature is a matrix where all bags are of one length, else ragged."""
    for feature in features_of(schema, request):
        count, longest = feature.lengths.size, int(feature.lengths.max())
        ragged = not feature.is_context and not (feature.lengths == longest).all()
        shape = [feature.values.size] if feature.is_context or ragged else [count, longest]
        if feature.texts is None:
            yield feature.name, "INT64", shape, packed_bytes(feature.values, "<i8")
        else:
            texts = [text.encode() for text in feature.texts]
            yield feature.name, "BYTES", shape, b"".join(struct.pack("<I", len(text)) + text for text in texts)
        if ragged:
            yield f"{feature.name}.lengths", "INT64", [count], packed_bytes(feature.lengths, "<i8")
        if feature.weights is not None:
            yield f"{feature.name}.weights", "FP32", shape, packed_bytes(feature.weights, "<f4")
    for name, dense in (("context.dense", request.context_dense), ("candidates.dense", request.candidate_dense)):
        if dense.size:
            yield name, "FP32", list(dense.shape), packed_bytes(dense, "<f4")


def _infer_body(given: Iterable[Tensor], timeout_ms: int | None) -> Encoded:
    tensors = list(given)
    document: dict[str, Any] = {
        "inputs": [
            {"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(data)}}
            for name, datatype, shape, data in tensors
        ],
        "outputs": [{"name": SCORES, "parameters": {"binary_data": True}}],
    }
    if timeout_ms is not None:
        document["parameters"] = {"timeout_ms": timeout_ms}
    header = msgspec.json.encode(document)
    return b"".join([header, *(tensor[-1] for tensor in tensors)]), (*_BINARY, (HEADER_LENGTH, str(len(header))))


def _read_oip_http(answer: bytes) -> ScoreList:
    """Read scores from behind the JSON header, which says where they lie, so that its length is not needed."""
    # One character is one byte in Latin-1; header names and numbers are ASCII.
    header, end = json.JSONDecoder().raw_decode(answer.decode("latin-1"))
    scores = next(output for output in header["outputs"] if output["name"] == SCORES)
    count, size = math.prod(map(int, scores["shape"])), int(scores["parameters"]["binary_data_size"])
    if size != count * 4 or len(answer) != end + size:
        raise ValueError(f"{SCORES}: {count} of shape and {size} bytes, {len(answer) - end} bytes behind the header")
    return np.frombuffer(answer, "<f4", count, end)


def _encode_oip_grpc(schema: FeatureSchema, request: RankRequest, model: str, timeout_ms: int | None) -> Encoded:
    message = open_inference_pb2.ModelInferRequest(model_name=model)
    for name, datatype, shape, data in _tensors(schema, request):
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(data)
    message.outputs.add(name=SCORES)
    if timeout_ms is not None:
        message.parameters["timeout_ms"].int64_param = timeout_ms
    return message.SerializeToString(deterministic=True), ()


def _read_oip_grpc(answer: bytes) -> ScoreList:
    message = open_inference_pb2.ModelInferResponse.FromString(answer)
    names = [output.name for output in message.outputs]
    if len(message.raw_output_contents) != len(names):
        raise ValueError(f"outputs are {names} with {len(message.raw_output_contents)} raw contents")
    return _read_flat(message.raw_output_contents[names.index(SCORES)])


def _encode_flat(schema: FeatureSchema, request: RankRequest, *_: object, once: bool) -> Encoded:
    """Return safetensors: `ids`, `lengths` and `dense` of the candidates, and `context_ids` and so on.

    If not `once`, the context has no columns, and each candidate has them too: features in the model's order, dense
    inputs as `[context | candidate]`.
    """
    features = list(features_of(schema, request))
    context = [feature for feature in features if feature.is_context and once]
    others = [feature for feature in features if not (feature.is_context and once)]
    context_dense, dense = request.context_dense[None], request.candidate_dense
    if not once:
        dense = np.concatenate([np.repeat(context_dense, len(dense), 0), dense], 1)
        context_dense = context_dense[:, :0]
    arrays = _rows(others, dense) | {f"context_{name}": data for name, data in _rows(context, context_dense).items()}
    return safetensors.numpy.save(arrays), _BINARY


def _rows(features: Sequence[FeatureBags], dense: Float32Array) -> dict[str, npt.NDArray[Any]]:
    """Lay out features row by row of `dense`; one with a single bag has it in each row.

    Returns:
        ids: int64 [n], all bags of a row side by side.
        lengths: int32 [rows, features], the ids of each bag.
        dense: float32 [rows, dense].
    """
    rows, count = len(dense), len(features)
    lengths = np.array([np.broadcast_to(feature.lengths, rows) for feature in features], np.int64).reshape(count, rows)
    row = np.repeat(np.tile(np.arange(rows), count), lengths.ravel())
    values = [np.tile(feature.values, rows // feature.lengths.size) for feature in features]
    return {
        "ids": np.concatenate([np.zeros(0, np.int64), *values])[np.argsort(row, kind="stable")],
        "lengths": np.ascontiguousarray(lengths.T, np.int32),
        "dense": np.ascontiguousarray(dense),
    }


def _read_flat(answer: bytes) -> ScoreList:
    # Raises ValueError for bytes that are no float32.
    return np.frombuffer(answer, "<f4")


def _encode_tensors(schema: FeatureSchema, request: RankRequest, *_: object, once: bool) -> Encoded:
    body, _ = _encode_flat(schema, request, once=once)
    return _infer_body([("body", "UINT8", [1, len(body)], body)], None)


def _read_grpc(answer: bytes) -> ScoreList:
    return ranking_pb2.RankResponse.FromString(answer).scores


Encode: TypeAlias = Callable[[FeatureSchema, RankRequest, str, int | None], Encoded]
_FORMS: dict[Encoding, tuple[str, Encode, Callable[[bytes], ScoreList]]] = {
    "json": ("/v1/models/{}:rank", _encode_json, lambda answer: msgspec.json.decode(answer, type=_Answer).scores),
    "oip-http": (
        "/v2/models/{}/infer",
        lambda schema, request, _, timeout_ms: _infer_body(_tensors(schema, request), timeout_ms),
        _read_oip_http,
    ),
    "grpc": (_RANK_METHOD, _encode_grpc, _read_grpc),
    "grpc-packed": (_RANK_METHOD, _encode_packed, _read_grpc),
    "oip-grpc": ("/inference.GRPCInferenceService/ModelInfer", _encode_oip_grpc, _read_oip_grpc),
    "flat": ("/rank", partial(_encode_flat, once=False), _read_flat),
    "flat-once": ("/rank", partial(_encode_flat, once=True), _read_flat),
    "tensors": ("/v2/models/rank/infer", partial(_encode_tensors, once=False), _read_oip_http),
    "tensors-once": ("/v2/models/rank/infer", partial(_encode_tensors, once=True), _read_oip_http),
}
"""Of an API: a request's path, how it is encoded, and how scores are read from its answer."""
