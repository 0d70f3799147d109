"""Tensors as bytes: the binary tensor extension of HTTP, and gRPC's raw contents.

Little-endian, row-major; a BYTES element is a 4-byte length and its bytes. Source:
https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/protocol/extension_binary_data.html
"""

from __future__ import annotations

from struct import Struct
from typing import Any

import numpy as np

from serving.errors import CountMismatchError, InvalidIdError, MalformedRequestError
from serving.oip.infer_request import Integers, IntegerType, input_path
from shard_node.bags import Float32Array

_INTEGERS: dict[IntegerType, np.dtype[Any]] = {"INT64": np.dtype("<i8"), "INT32": np.dtype("<i4")}
_FLOAT32 = np.dtype("<f4")
_LENGTH = Struct("<I")


class RawData:
    """Elements as they lie in memory. What is returned may be read-only, unaligned, and a view of the request.

    Args:
        buffer: exactly the tensor's bytes.
    """

    __slots__ = ("_buffer",)

    def __init__(self, buffer: bytes | memoryview) -> None:
        self._buffer = buffer

    def integers(self, name: str, datatype: IntegerType, count: int) -> Integers:
        """As `TensorData`, without a copy."""
        dtype = _INTEGERS[datatype]
        if len(self._buffer) != count * dtype.itemsize:
            raise self._wrong_size(name, datatype, count, dtype.itemsize)
        values: Integers = np.frombuffer(self._buffer, dtype)
        return values

    def floats(self, name: str, count: int) -> Float32Array:
        """As `TensorData`, without a copy."""
        if len(self._buffer) != count * _FLOAT32.itemsize:
            raise self._wrong_size(name, "FP32", count, _FLOAT32.itemsize)
        return np.frombuffer(self._buffer, _FLOAT32)

    def texts(self, name: str, count: int) -> list[str]:
        """As `TensorData`. Where an element begins only the one before it tells, so they are read one by one."""
        path, buffer, end, start = input_path(name), self._buffer, len(self._buffer), 0
        texts: list[str] = []
        while start < end and len(texts) <= count:
            if end - start < _LENGTH.size:
                raise MalformedRequestError(
                    path, f"{end - start} bytes are left over after {len(texts)} BYTES elements"
                )
            first = start + _LENGTH.size
            start = first + _LENGTH.unpack_from(buffer, start)[0]
            if start > end:
                raise MalformedRequestError(path, f"BYTES element {len(texts)} is longer than what is left")
            texts.append(decode_text(path, len(texts), bytes(buffer[first:start])))
        if len(texts) != count:
            raise CountMismatchError(path, f"its shape holds {count} elements, its data {_more(len(texts), count)}")
        return texts

    def _wrong_size(self, name: str, datatype: str, count: int, width: int) -> CountMismatchError:
        wanted = f"{count} elements of {datatype}, {count * width} bytes"
        return CountMismatchError(input_path(name), f"{len(self._buffer)} bytes of data; its shape holds {wanted}")


def decode_text(path: str, position: int, element: bytes) -> str:
    """A BYTES element as text.

    Raises:
        InvalidIdError: if it is not UTF-8.
    """
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise InvalidIdError(f"{path}[{position}]", f"it is not UTF-8: {error.reason}") from error


def _more(got: int, count: int) -> str:
    return f"{got}" if got < count else f"at least {got}"
