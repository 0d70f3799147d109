"""Answers to inference requests, in both forms."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from serving.oip.infer_request import InferRequest, RequestedOutput
from serving.oip.input_names import OUTPUT_NAMES, SCORES
from serving.proto.inference.open_inference_pb2 import ModelInferResponse
from serving.request import RankAnswer

_ENCODER = msgspec.json.Encoder()
_ALL = tuple(RequestedOutput(name) for name in OUTPUT_NAMES)

Output: TypeAlias = tuple[str, npt.NDArray[Any]]


def encode_http(request: InferRequest, answer: RankAnswer, answer_id: str) -> tuple[bytes, int | None]:
    """The body of an HTTP answer.

    Returns:
        The body, and the bytes of its JSON object if binary tensors follow it.
    """
    outputs: list[dict[str, Any]] = []
    tensors: list[bytes] = []
    for requested in _requested(request):
        datatype, values = _output(answer, requested.name)
        output: dict[str, Any] = {"name": requested.name, "datatype": datatype, "shape": values.shape}
        if request.binary_output if requested.binary is None else requested.binary:
            data = values.tobytes()
            output["parameters"] = {"binary_data_size": len(data)}
            tensors.append(data)
        else:
            output["data"] = values.tolist()
        outputs.append(output)
    header = _ENCODER.encode(
        {"id": answer_id, "model_name": answer.model, "model_version": str(answer.version), "outputs": outputs}
    )
    return (b"".join((header, *tensors)), len(header)) if tensors else (header, None)


def encode_grpc(request: InferRequest, answer: RankAnswer, answer_id: str) -> bytes:
    """A ModelInferResponse, always with raw contents."""
    outputs = [(one.name, *_output(answer, one.name)) for one in _requested(request)]
    head = _grpc_head(answer.model, answer.version, tuple((name, kind, len(values)) for name, kind, values in outputs))
    raw = [values.tobytes() for _, _, values in outputs]
    # Messages that follow one another are one message: https://protobuf.dev/programming-guides/encoding/#last-one-wins
    return head + ModelInferResponse(id=answer_id, raw_output_contents=raw).SerializeToString()


@lru_cache(maxsize=256)
def _grpc_head(model: str, version: int, outputs: tuple[tuple[str, str, int], ...]) -> bytes:
    message = ModelInferResponse(model_name=model, model_version=str(version))
    for name, datatype, size in outputs:
        message.outputs.add(name=name, datatype=datatype, shape=[size])
    return message.SerializeToString()


def _requested(request: InferRequest) -> tuple[RequestedOutput, ...]:
    return _ALL if request.outputs is None else tuple(request.outputs)


def _output(answer: RankAnswer, name: str) -> Output:
    if name == SCORES:
        return "FP32", np.asarray(answer.scores, dtype="<f4")
    return "INT64", np.asarray(answer.order, dtype="<i8")
