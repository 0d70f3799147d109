"""Requests of the Open Inference Protocol (docs/open-inference-protocol.md), with binary tensors over HTTP."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from loadtest.workloads.errors import AnswerError
from loadtest.workloads.workload import FeatureBags, WorkloadRequest, features_of
from router.feature_schema import FeatureSchema
from serving.proto.inference import open_inference_pb2

HEADER_LENGTH = "inference-header-content-length"
SCORES = "scores"
INFER_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_FLOAT_BYTES = 4
_JSON = json.JSONDecoder()


def infer_path(model: str) -> str:
    """Where rank requests are sent over HTTP."""
    return f"/v2/models/{model}/infer"


@dataclass(frozen=True, slots=True)
class InputTensor:
    """One input.

    Attributes:
        name: a feature's, `<feature>.lengths`, `<feature>.weights`, `context.dense` or `candidates.dense`.
        datatype: INT64, FP32 or BYTES.
        shape: of the tensor.
        data: little-endian, row-major.
    """

    name: str
    datatype: str
    shape: list[int]
    data: bytes


def tensors_of(schema: FeatureSchema, request: WorkloadRequest) -> Iterator[InputTensor]:
    """The inputs of a request. A candidate feature is a matrix where all bags are of one length, else ragged."""
    for feature in features_of(schema, request):
        ragged, shape = _shape(feature)
        if feature.texts is None:
            yield InputTensor(feature.name, "INT64", shape, _bytes(feature.values, "<i8"))
        else:
            yield InputTensor(feature.name, "BYTES", shape, b"".join(map(_sized, feature.texts)))
        if ragged:
            lengths = _bytes(feature.lengths, "<i8")
            yield InputTensor(f"{feature.name}.lengths", "INT64", [feature.lengths.size], lengths)
        if feature.weights is not None:
            yield InputTensor(f"{feature.name}.weights", "FP32", shape, _bytes(feature.weights, "<f4"))
    for name, dense in (("context.dense", request.context_dense), ("candidates.dense", request.candidate_dense)):
        if dense.size:
            yield InputTensor(name, "FP32", list(dense.shape), _bytes(dense, "<f4"))


def encode_http(schema: FeatureSchema, request: WorkloadRequest, timeout_ms: int | None) -> tuple[bytes, int]:
    """The body of an infer request that asks for binary scores, and the length of its JSON header."""
    tensors = list(tensors_of(schema, request))
    document: dict[str, Any] = {
        "inputs": [
            {
                "name": tensor.name,
                "shape": tensor.shape,
                "datatype": tensor.datatype,
                "parameters": {"binary_data_size": len(tensor.data)},
            }
            for tensor in tensors
        ],
        "outputs": [{"name": SCORES, "parameters": {"binary_data": True}}],
    }
    if timeout_ms is not None:
        document["parameters"] = {"timeout_ms": timeout_ms}
    header = msgspec.json.encode(document)
    return b"".join([header, *(tensor.data for tensor in tensors)]), len(header)


def count_http_scores(answer: bytes) -> int:
    """How many scores an answer with binary scores has. Raises AnswerError.

    The JSON header says where the scores lie behind it, so its length is not needed.
    """
    try:
        # One character is one byte in Latin-1; header names and numbers are ASCII.
        header, end = _JSON.raw_decode(answer.decode("latin-1"))
        found = [output for output in header["outputs"] if output["name"] == SCORES]
        count, size = math.prod(map(int, found[0]["shape"])), int(found[0]["parameters"]["binary_data_size"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise AnswerError(f"the answer has no JSON header with binary {SCORES}: {error!r}") from error
    if size != count * _FLOAT_BYTES or len(answer) != end + size:
        raise AnswerError(f"{SCORES}: {count} of shape and {size} bytes, {len(answer) - end} bytes behind the header")
    return count


def _shape(feature: FeatureBags) -> tuple[bool, list[int]]:
    """(whether the tensor needs lengths, its shape)."""
    count = feature.lengths.size
    if feature.is_context:
        return False, [feature.values.size]
    longest = int(feature.lengths.max())
    if (feature.lengths == longest).all():
        return False, [count, longest]
    return True, [feature.values.size]


def _bytes(values: npt.NDArray[Any], dtype: str) -> bytes:
    return values.astype(np.dtype(dtype), copy=False).tobytes()


def _sized(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<I", len(encoded)) + encoded


def encode_grpc(schema: FeatureSchema, request: WorkloadRequest, model: str, timeout_ms: int | None) -> bytes:
    """A ModelInferRequest with raw contents that asks for the scores."""
    message = open_inference_pb2.ModelInferRequest(model_name=model)
    for tensor in tensors_of(schema, request):
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(tensor.data)
    message.outputs.add(name=SCORES)
    if timeout_ms is not None:
        message.parameters["timeout_ms"].int64_param = timeout_ms
    return message.SerializeToString(deterministic=True)


def count_grpc_scores(answer: bytes) -> int:
    """How many scores a ModelInferResponse has. Raises AnswerError."""
    try:
        message = open_inference_pb2.ModelInferResponse.FromString(answer)
    except DecodeError as error:
        raise AnswerError(f"the answer is not a ModelInferResponse: {error}") from error
    names = [output.name for output in message.outputs]
    if SCORES not in names or len(message.raw_output_contents) != len(names):
        raise AnswerError(f"{SCORES}: outputs are {names} with {len(message.raw_output_contents)} raw contents")
    return len(message.raw_output_contents[names.index(SCORES)]) // _FLOAT_BYTES
