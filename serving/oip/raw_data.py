"""Tensors as bytes: the binary tensor extension of HTTP, and gRPC's raw contents.

Little-endian, row-major; a BYTES element is a 4-byte length and its bytes. Source:
https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/protocol/extension_binary_data.html
"""

from __future__ import annotations

from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.errors import CountMismatchError, InvalidIdError, MalformedRequestError
from serving.oip.infer_request import Buffer, Integers, IntegerType, input_path
from shard_node.bags import Float32Array

_DTYPES: dict[str, np.dtype[Any]] = {"INT64": np.dtype("<i8"), "INT32": np.dtype("<i4"), "FP32": np.dtype("<f4")}
_LENGTH = Struct("<I")


def element_bytes(datatype: str) -> int:
    """Of one number. Raises KeyError for a datatype that no input is of."""
    return _DTYPES[datatype].itemsize


def elements_at(buffer: Buffer, datatype: str, count: int, start: int) -> npt.NDArray[Any]:
    """Numbers as they lie in memory, which is large enough: a view, maybe read-only and unaligned.

    Args:
        buffer: of any length.
        datatype: INT64, INT32 or FP32.
        count: how many.
        start: where they begin, in bytes.
    """
    values: npt.NDArray[Any] = np.frombuffer(buffer, _DTYPES[datatype], count, start)
    return values


class RawData:
    """Elements as they lie in memory. What is returned may be read-only, unaligned, and a view of the request.

    Args:
        buffer: exactly the tensor's bytes.
    """

    __slots__ = ("_buffer", "size_bytes")

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.size_bytes = len(buffer)

    def integers(self, name: str, datatype: IntegerType, count: int) -> Integers:
        """As `TensorData`, without a copy."""
        return self._numbers(name, datatype, count)

    def floats(self, name: str, count: int) -> Float32Array:
        """As `TensorData`, without a copy."""
        return self._numbers(name, "FP32", count)

    def _numbers(self, name: str, datatype: str, count: int) -> npt.NDArray[Any]:
        if self.size_bytes != count * element_bytes(datatype):
            raise self.wrong_size(name, datatype, count)
        return elements_at(self._buffer, datatype, count, 0)

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

    def wrong_size(self, name: str, datatype: str, count: int) -> CountMismatchError:
        """The error for numbers that are not as many as they should be."""
        wanted = f"{count} elements of {datatype}, {count * element_bytes(datatype)} bytes"
        return CountMismatchError(input_path(name), f"{self.size_bytes} bytes of data; its shape holds {wanted}")


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
