"""The JSON form of a rank request as an inference request: JSON, binary HTTP, and messages."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from loader.snapshot.manifest import ModelSpec
from serving.proto.inference import open_inference_pb2 as messages


@dataclass
class Tensor:
    """One input."""

    name: str
    datatype: str
    array: np.ndarray

    @property
    def raw(self) -> bytes:
        if self.datatype == "BYTES":
            return bytes_tensor(self.array.reshape(-1).tolist())
        return self.array.tobytes()

    def description(self) -> dict[str, Any]:
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.array.shape)}


def bytes_tensor(texts: list[str]) -> bytes:
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


def tensors_of(spec: ModelSpec, request: dict[str, Any]) -> list[Tensor]:
    """A rank request's tensors: ragged where bags differ, `[N]` where there is one id for each candidate."""
    tensors = []
    for feature in spec.features:
        part = request["context" if feature.side == "context" else "candidates"]
        ids, weights = part["sparse"][feature.name], part.get("weights", {}).get(feature.name)
        nested = feature.side == "candidate" and isinstance(ids[0], list)
        flat = [one for bag in ids for one in bag] if nested else ids
        is_text = any(isinstance(one, str) for one in flat)
        array = np.array(flat, dtype=object if is_text else np.int64)
        tensors.append(Tensor(feature.name, "BYTES" if is_text else "INT64", array))
        if nested:
            tensors.append(Tensor(f"{feature.name}.lengths", "INT64", np.array([len(bag) for bag in ids], np.int64)))
        if weights is not None:
            flat_weights = [one for bag in weights for one in bag] if nested else weights
            tensors.append(Tensor(f"{feature.name}.weights", "FP32", np.array(flat_weights, np.float32)))
    for part in ("context", "candidates"):
        if "dense" in request[part]:
            tensors.append(Tensor(f"{part}.dense", "FP32", np.array(request[part]["dense"], np.float32)))
    return tensors


def json_body(tensors: list[Tensor], **members: Any) -> bytes:
    """A request whose data are all JSON."""
    inputs = [one.description() | {"data": one.array.tolist()} for one in tensors]
    return json.dumps({"inputs": inputs, **members}).encode()


def binary_body(tensors: list[Tensor], **members: Any) -> tuple[bytes, dict[str, str]]:
    """A request whose data are all binary, and its headers."""
    inputs = [one.description() | {"parameters": {"binary_data_size": len(one.raw)}} for one in tensors]
    header = json.dumps({"inputs": inputs, **members}).encode()
    return header + b"".join(one.raw for one in tensors), {"inference-header-content-length": str(len(header))}


def message_of(tensors: list[Tensor], model: str, *, raw: bool = True, **fields: Any) -> messages.ModelInferRequest:
    """A request as a message, with raw contents or typed ones."""
    message = messages.ModelInferRequest(model_name=model, **fields)
    for one in tensors:
        given = message.inputs.add(**one.description())
        if raw:
            message.raw_input_contents.append(one.raw)
        elif one.datatype == "BYTES":
            given.contents.bytes_contents.extend(text.encode() for text in one.array.reshape(-1).tolist())
        elif one.datatype == "FP32":
            given.contents.fp32_contents.extend(one.array.reshape(-1).tolist())
        elif one.datatype == "INT32":
            given.contents.int_contents.extend(one.array.reshape(-1).tolist())
        else:
            given.contents.int64_contents.extend(one.array.reshape(-1).tolist())
    return message
