"""How float32 rows become stored bytes and back, one codec per `RowDtype`.

The quantised layouts are FBGEMM's fused row-wise CPU layouts, so that the torch ops
`quantized::embedding_bag_{byte,4bit}_rowwise_offsets` read stored rows as they lie
(source: pytorch, aten/src/ATen/native/quantized/cpu/qembeddingbag_prepack.cpp). All numbers are little-endian:

| dtype | bytes of a row of dim D | value of element i |
|---|---|---|
| int8 | D codes, float32 scale, float32 bias | code[i] * scale + bias |
| int4 | D/2 code bytes (element 2k in the low 4 bits of byte k), float16 scale, float16 bias | code[i] * scale + bias |
| fp16 | D float16 | as stored |
| fp32 | D float32 | as stored |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from loader.snapshot.manifest import RowDtype

Float32Array = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class RowCodec(ABC):
    """Encodes and decodes rows of one dtype and dim.

    Attributes:
        dtype: how rows are stored.
        embedding_dim: elements of a row.
    """

    dtype: RowDtype
    embedding_dim: int

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Stored bytes of one row, without padding."""

    @abstractmethod
    def encode(self, rows: Float32Array) -> ByteArray:
        """Encodes float32 [n, dim] as uint8 [n, row_bytes]. Values must be finite; check with `first_non_finite`."""

    @abstractmethod
    def decode(self, stored: ByteArray) -> Float32Array:
        """Decodes uint8 [n, row_bytes] to float32 [n, dim], computed in float32."""

    @abstractmethod
    def first_non_finite(self, stored: ByteArray) -> int | None:
        """Finds the first stored row, of uint8 [n, row_bytes], that decodes to NaN or inf; None if none does."""


@dataclass(frozen=True)
class _FusedCodec(RowCodec):
    """Codes, then scale and bias at the tail of the row."""

    @property
    def _code_bytes(self) -> int:
        return self.embedding_dim if self.dtype == "int8" else self.embedding_dim // 2

    @property
    def _tail_dtype(self) -> np.dtype[np.floating]:
        return np.dtype("<f4") if self.dtype == "int8" else np.dtype("<f2")

    @property
    def row_bytes(self) -> int:
        return self._code_bytes + 2 * self._tail_dtype.itemsize

    def encode(self, rows: Float32Array) -> ByteArray:
        # from_numpy needs a writable array; a block of a read-only memmap is copied here, block by block.
        weights = torch.from_numpy(np.require(rows, np.float32, ["C_CONTIGUOUS", "WRITEABLE"]))
        if self.dtype == "int8":
            stored = torch.ops.quantized.embedding_bag_byte_prepack(weights)
        else:
            stored = torch.ops.quantized.embedding_bag_4bit_prepack(weights)
        encoded: ByteArray = stored.numpy()
        return encoded

    def decode(self, stored: ByteArray) -> Float32Array:
        tail = self._tail(stored).astype(np.float32)
        codes = stored[:, : self._code_bytes]
        if self.dtype == "int8":
            values = codes.astype(np.float32)
        else:
            values = np.empty((len(stored), self.embedding_dim), np.float32)
            values[:, 0::2] = codes & 0x0F
            values[:, 1::2] = codes >> 4
        values *= tail[:, 0:1]
        values += tail[:, 1:2]
        return values

    def first_non_finite(self, stored: ByteArray) -> int | None:
        # Finite scale and bias are not enough: code * scale + bias can still overflow, if so at the largest code.
        tail = self._tail(stored).astype(np.float32)
        largest_code = np.float32(255 if self.dtype == "int8" else 15)
        with np.errstate(over="ignore", invalid="ignore"):
            largest = tail[:, 0] * largest_code + tail[:, 1]
        return _first_row(~(np.isfinite(tail).all(axis=1) & np.isfinite(largest)))

    def _tail(self, stored: ByteArray) -> npt.NDArray[np.floating]:
        """Scale and bias, [n, 2]. Copied, since they are not aligned in the row."""
        return np.ascontiguousarray(stored[:, self._code_bytes :]).view(self._tail_dtype)


@dataclass(frozen=True)
class _FloatCodec(RowCodec):
    """Plain little-endian floats."""

    @property
    def _item_dtype(self) -> np.dtype[np.floating]:
        return np.dtype("<f4") if self.dtype == "fp32" else np.dtype("<f2")

    @property
    def row_bytes(self) -> int:
        return self.embedding_dim * self._item_dtype.itemsize

    def encode(self, rows: Float32Array) -> ByteArray:
        with np.errstate(over="ignore"):  # an overflow to inf is found, and named, by first_non_finite
            items = np.ascontiguousarray(rows, dtype=self._item_dtype)
        return items.view(np.uint8)

    def decode(self, stored: ByteArray) -> Float32Array:
        return self._items(stored).astype(np.float32)

    def first_non_finite(self, stored: ByteArray) -> int | None:
        return _first_row(~np.isfinite(self._items(stored)).all(axis=1))

    def _items(self, stored: ByteArray) -> npt.NDArray[np.floating]:
        return np.ascontiguousarray(stored).view(self._item_dtype)


def codec_for(dtype: RowDtype, embedding_dim: int) -> RowCodec:
    """Returns the codec for rows of `embedding_dim` elements stored as `dtype`."""
    if dtype in ("int8", "int4"):
        return _FusedCodec(dtype, embedding_dim)
    return _FloatCodec(dtype, embedding_dim)


def _first_row(bad: npt.NDArray[np.bool_]) -> int | None:
    return int(np.argmax(bad)) if bad.any() else None
