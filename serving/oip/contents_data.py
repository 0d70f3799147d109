"""Tensors as the typed fields of gRPC's `InferTensorContents`. Raw contents are faster; see `raw_data`."""

from __future__ import annotations

from typing import Any

import numpy as np

from serving.errors import CountMismatchError
from serving.oip.infer_request import Integers, IntegerType, input_path
from serving.oip.raw_data import decode_text
from serving.proto.inference.open_inference_pb2 import InferTensorContents
from shard_node.bags import Float32Array

_FIELDS: dict[IntegerType, tuple[str, Any]] = {
    "INT64": ("int64_contents", np.int64),
    "INT32": ("int_contents", np.int32),
}


class ContentsData:
    """Elements as a message's repeated fields.

    Args:
        contents: the message; only the field of the tensor's datatype is read.
    """

    __slots__ = ("_contents",)

    def __init__(self, contents: InferTensorContents) -> None:
        self._contents = contents

    def integers(self, name: str, datatype: IntegerType, count: int) -> Integers:
        """As `TensorData`."""
        field, dtype = _FIELDS[datatype]
        values: Integers = np.fromiter(self._field(name, field, count), dtype, count=count)
        return values

    def floats(self, name: str, count: int) -> Float32Array:
        """As `TensorData`."""
        return np.fromiter(self._field(name, "fp32_contents", count), np.float32, count=count)

    def texts(self, name: str, count: int) -> list[str]:
        """As `TensorData`."""
        elements = self._field(name, "bytes_contents", count)
        return [decode_text(input_path(name), position, element) for position, element in enumerate(elements)]

    def _field(self, name: str, field: str, count: int) -> Any:
        elements = getattr(self._contents, field)
        if len(elements) != count:
            raise CountMismatchError(
                f"{input_path(name)}.contents.{field}", f"{len(elements)} elements; the tensor's shape holds {count}"
            )
        return elements
