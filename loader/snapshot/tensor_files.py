"""Read safetensors files by a header that is not trusted.

Rows are mapped in place, which needs the offset of the tensor's bytes; the library does not return it, so the header
is parsed here, and checked in full (format: https://github.com/huggingface/safetensors#format). Small files are read
by that header too: the library would set aside memory for whatever a header claims, and panics where there is none.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from loader.errors import NOT_DECODED, SnapshotCorruptError, cut, file_errors
from loader.memory import map_array

MAX_HEADER_BYTES = 16 << 20
MAX_TENSOR_DIMS = 8
_DTYPES = {"BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "U32": "<u4"}
_DTYPES |= {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
_ITEM_BYTES = {name: np.dtype(code).itemsize for name, code in _DTYPES.items()} | {"BF16": 2}  # NumPy has no bfloat16

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Entry(msgspec.Struct):
    dtype: Literal["BOOL", "U8", "I8", "I16", "I32", "I64", "U32", "F16", "F32", "F64", "BF16"]
    shape: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=MAX_TENSOR_DIMS)]
    data_offsets: tuple[_Number, _Number]


# The first entry that is wrong ends it: a header may have a million of them.
_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_Entry)


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `dtype` by safetensors' names, `offset` of its first byte from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return _ITEM_BYTES[self.dtype] * math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file by name.

    Raises SnapshotCorruptError if the header is too long, not what the format allows, or does not fit the file's size.
    """
    try:
        with file_errors(path, "read"), path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise SnapshotCorruptError(
                    f"{path}: header of {header_bytes} bytes in a file of {file_bytes}; at most {MAX_HEADER_BYTES}"
                )
            entries = _HEADER.decode(file.read(header_bytes))
    except NOT_DECODED as error:
        raise SnapshotCorruptError(f"{path}: the header: {error}") from error
    position = data_offset = 8 + header_bytes
    tensors: dict[str, TensorInfo] = {}
    for name, text in entries.items():
        if name == "__metadata__":
            continue
        try:
            entry = _ENTRY.decode(text)
        except NOT_DECODED as error:
            raise SnapshotCorruptError(f"{path}: the header: {cut(repr(name))}: {cut(error)}") from error
        begin, end = entry.data_offsets
        tensors[name] = info = TensorInfo(entry.dtype, entry.shape, data_offset + begin)
        if end - begin != info.size_bytes:
            where = f"{path}: tensor {cut(repr(name))}"
            raise SnapshotCorruptError(f"{where}: bytes {begin} to {end} do not hold {info.dtype} {list(info.shape)}")
    for begin, size_bytes in sorted((info.offset, info.size_bytes) for info in tensors.values()):
        if begin != position:
            raise SnapshotCorruptError(f"{path}: the tensors overlap or leave a gap at byte {position}")
        position += size_bytes
    if position != file_bytes:
        raise SnapshotCorruptError(f"{path}: the header describes {position} bytes, the file has {file_bytes}")
    return tensors


def length_of(tensors: Mapping[str, TensorInfo], name: str) -> int:
    """Return the first dim of a tensor; 0 if there is no such tensor or it is a scalar."""
    return tensors[name].shape[0] if name in tensors and tensors[name].shape else 0


def expect_tensors(
    path: Path, tensors: Mapping[str, TensorInfo], expected: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """Raise SnapshotCorruptError unless the file has exactly these tensors, each of its dtype and shape."""
    for name, (dtype, shape) in expected.items():
        if (info := tensors.get(name)) is None:
            raise SnapshotCorruptError(f"{path}: has no tensor {name!r}; it has {cut(sorted(tensors))}")
        if (info.dtype, info.shape) != (dtype, shape):
            raise SnapshotCorruptError(
                f"{path}: tensor {name!r} is {info.dtype} {list(info.shape)}, expected {dtype} {list(shape)}"
            )
    if extra := sorted(set(tensors) - set(expected)):
        raise SnapshotCorruptError(f"{path}: has the tensors {cut(extra)} besides {cut(sorted(expected))}")


def expect_at_most(path: Path, tensors: Mapping[str, TensorInfo], max_bytes: int) -> None:
    """Raise SnapshotCorruptError if a file that is read as a whole has more than `max_bytes` of tensors."""
    size_bytes = sum(info.size_bytes for info in tensors.values())
    if size_bytes > max_bytes:
        raise SnapshotCorruptError(f"{path}: tensors of {size_bytes} bytes; at most {max_bytes} are read")


def map_tensor(path: Path, info: TensorInfo, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a read-only view of one tensor's bytes in the mapped file.

    Raises SnapshotCorruptError if the file is not there any more, or shorter, SnapshotResourceError if no file
    descriptor, mapping or memory is left.
    """
    if 0 in info.shape:
        return np.zeros(info.shape, dtype)
    try:
        with file_errors(path, "mapped"):
            return map_array(path, info.offset, info.shape, dtype)
    except ValueError as error:
        raise SnapshotCorruptError(f"{path}: can't be mapped: {error}") from error


def load_numpy(path: Path, tensors: Mapping[str, TensorInfo] | None = None) -> dict[str, npt.NDArray[Any]]:
    """Return all tensors of a small file, copied into memory. `tensors` is its header, if it was read already.

    Raises as `map_tensor`; SnapshotCorruptError also if it has bfloat16 in it.
    """
    header = read_header(path) if tensors is None else tensors
    loaded: dict[str, npt.NDArray[Any]] = {}
    with file_errors(path, "read"), path.open("rb") as file:
        for name, info in header.items():
            if info.dtype not in _DTYPES:
                raise SnapshotCorruptError(f"{path}: tensor {cut(repr(name))} is {info.dtype}, which is not read")
            array = np.empty(info.shape, _DTYPES[info.dtype])
            file.seek(info.offset)
            if file.readinto(array.reshape(-1).view(np.uint8).data) != info.size_bytes:
                raise SnapshotCorruptError(f"{path}: can't be read: it ends in tensor {cut(repr(name))}")
            loaded[name] = array
    return loaded
