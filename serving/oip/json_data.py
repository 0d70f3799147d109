"""Tensors as JSON: the nested or the flat list of their elements."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from serving.errors import CountMismatchError, InvalidFieldError, InvalidIdError
from serving.oip.infer_request import Integers, IntegerType, input_path
from shard_node.bags import Float32Array

_NESTED = re.compile(rb"\s*\[\s*\[")
_COMMA = ord(",")
_INTEGERS = (msgspec.json.Decoder(list[int]), msgspec.json.Decoder(list[list[int]]))
_FLOATS = (msgspec.json.Decoder(list[float]), msgspec.json.Decoder(list[list[float]]))
_TEXTS = (msgspec.json.Decoder(list[str]), msgspec.json.Decoder(list[list[str]]))
_DTYPES: dict[IntegerType, Any] = {"INT64": np.int64, "INT32": np.int32}


class JsonData:
    """Elements as JSON text, not decoded yet.

    Args:
        text: valid JSON.
        shape: as the client gives it; a nested list must be of this shape.
    """

    __slots__ = ("_shape", "_text")

    def __init__(self, text: bytes | memoryview, shape: Sequence[int]) -> None:
        self._text = text
        self._shape = shape

    def integers(self, name: str, datatype: IntegerType, count: int) -> Integers:
        """As `TensorData`."""
        elements = self._elements(name, _INTEGERS, count)
        try:
            values: Integers = np.fromiter(elements, _DTYPES[datatype], count=len(elements))
        except OverflowError as error:
            bound = np.iinfo(_DTYPES[datatype])
            position = next(number for number, one in enumerate(elements) if not bound.min <= one <= bound.max)
            raise InvalidIdError(
                f"{input_path(name)}[{position}]", f"{elements[position]} is not an {datatype}"
            ) from error
        return values

    def floats(self, name: str, count: int) -> Float32Array:
        """As `TensorData`; what float32 can't hold becomes inf."""
        elements = self._elements(name, _FLOATS, count)
        with np.errstate(over="ignore"):
            return np.fromiter(elements, np.float32, count=len(elements))

    def texts(self, name: str, count: int) -> list[str]:
        """As `TensorData`."""
        # The decoder has refused lone surrogates already.
        return self._elements(name, _TEXTS, count)

    def _elements(self, name: str, decoders: tuple[Any, Any], count: int) -> list[Any]:
        path = input_path(name)
        if decoders is not _TEXTS:
            # Each element but the first brings a comma, and each list but the first one more, if it is empty: so many
            # of them prove another number of elements, before any is decoded.
            commas, rows = int(np.count_nonzero(np.frombuffer(self._text, np.uint8) == _COMMA)), max(self._shape[0], 0)
            if commas > count + rows:
                raise _wrong_count(path, count, f"at least {commas - rows}")
        nested = _NESTED.match(self._text) is not None
        try:
            decoded = decoders[nested].decode(self._text)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidFieldError(path, f"its data is not what its datatype says: {error}") from error
        if nested and [len(decoded), *set(map(len, decoded))] != list(self._shape):
            raise CountMismatchError(path, f"its nested data does not have the shape {list(self._shape)}")
        elements: list[Any] = list(chain.from_iterable(decoded)) if nested else decoded
        if len(elements) != count:
            raise _wrong_count(path, count, str(len(elements)))
        return elements


def _wrong_count(path: str, count: int, got: str) -> CountMismatchError:
    return CountMismatchError(path, f"its shape holds {count} elements, its data {got}")
