"""Safetensors files: written durably, and read with a header that is not trusted.

The safetensors library writes files and reads small ones. Rows are mapped in place, which needs the offset of the
tensor's bytes; the library does not tell it, so the header is parsed here as well, and checked in full
(format: https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError

from loader.errors import SnapshotCorruptError

MAX_HEADER_BYTES = 16 << 20
_ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}
_HASH_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        dtype: safetensors' name of it, for example `U8` or `F32`.
        shape: its dims.
        offset: of its first byte, from the start of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file by name.

    Raises:
        SnapshotCorruptError: the header is too long, is not what the format allows, or does not fit the file's size.
    """
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise SnapshotCorruptError(
                    f"{path}: header of {header_bytes} bytes in a file of {file_bytes}; at most {MAX_HEADER_BYTES}"
                )
            header = json.loads(file.read(header_bytes))
    except OSError as error:
        raise SnapshotCorruptError(f"{path}: can't be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise SnapshotCorruptError(f"{path}: the header is not JSON: {error}") from error
    return _check_header(path, header, 8 + header_bytes, file_bytes)


def _check_header(path: Path, header: Any, data_offset: int, file_bytes: int) -> dict[str, TensorInfo]:
    if not isinstance(header, dict):
        raise SnapshotCorruptError(f"{path}: the header is not a JSON object")
    tensors: dict[str, TensorInfo] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            numbers = [*shape, begin, end]
            fits = all(type(number) is int and number >= 0 for number in numbers)
            fits = fits and end - begin == _ITEM_BYTES[dtype] * math.prod(shape)
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotCorruptError(f"{path}: tensor {name!r}: malformed header entry") from error
        if not fits:
            raise SnapshotCorruptError(
                f"{path}: tensor {name!r}: bytes {begin} to {end} do not hold {dtype} {list(shape)}"
            )
        tensors[name] = TensorInfo(dtype, tuple(shape), data_offset + begin)
        spans.append((begin, end))
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise SnapshotCorruptError(f"{path}: the tensors overlap or leave a gap at byte {position}")
        position = end
    if data_offset + position != file_bytes:
        raise SnapshotCorruptError(
            f"{path}: the header describes {data_offset + position} bytes, the file has {file_bytes}"
        )
    return tensors


def expect_tensor(path: Path, tensors: Mapping[str, TensorInfo], name: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Raises SnapshotCorruptError unless the tensor is there with that dtype and shape."""
    info = tensors.get(name)
    if info is None:
        raise SnapshotCorruptError(f"{path}: has no tensor {name!r}; it has {sorted(tensors)}")
    if (info.dtype, info.shape) != (dtype, shape):
        raise SnapshotCorruptError(
            f"{path}: tensor {name!r} is {info.dtype} {list(info.shape)}, expected {dtype} {list(shape)}"
        )


def map_tensor(path: Path, info: TensorInfo, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A read-only view of one tensor's bytes in the mapped file. Raises SnapshotCorruptError."""
    try:
        if 0 in info.shape:
            return np.zeros(info.shape, dtype)
        return np.memmap(path, dtype=dtype, mode="r", offset=info.offset, shape=info.shape)
    except (OSError, ValueError) as error:
        raise SnapshotCorruptError(f"{path}: can't be mapped: {error}") from error


def load_numpy(path: Path) -> dict[str, npt.NDArray[Any]]:
    """All tensors of a small file, copied into memory. Raises SnapshotCorruptError."""
    try:
        return safetensors.numpy.load_file(path)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise SnapshotCorruptError(f"{path}: can't be read: {error}") from error


def load_torch(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a small file, copied into memory. Raises SnapshotCorruptError."""
    try:
        return safetensors.torch.load_file(path)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise SnapshotCorruptError(f"{path}: can't be read: {error}") from error


def hash_file(path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> str:
    """SHA-256 (hex) of a file, in bounded memory; `on_bytes` is told the bytes done since its last call."""
    digest = hashlib.sha256()
    buffer = bytearray(_HASH_CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            on_bytes(count)
    return digest.hexdigest()


def fsync_path(path: Path) -> None:
    """Makes a file's bytes, or a folder's entries, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
