"""How float32 rows become stored bytes and back.

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

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loader.snapshot.tables import RowDtype

Float32Array = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class RowCodec:
    """Encodes and decodes rows of `embedding_dim` elements, stored as `dtype`."""

    dtype: RowDtype
    embedding_dim: int

    @property
    def row_bytes(self) -> int:
        """Stored bytes of one row, without padding."""
        return self._code_bytes + (2 if self._code_bytes else self.embedding_dim) * self._float.itemsize

    def encode(self, rows: Float32Array) -> ByteArray:
        """Encode float32 [n, dim] as uint8 [n, row_bytes]. Values must be finite; check with `first_non_finite`."""
        if not self._code_bytes:
            with np.errstate(over="ignore"):  # an overflow to inf is found, and named, by first_non_finite
                return np.ascontiguousarray(rows, dtype=self._float).view(np.uint8)
        import torch  # which takes a second: processes that only need layouts and ids do without

        # from_numpy needs a writable array; a block of a read-only memmap is copied here, block by block.
        weights = torch.from_numpy(np.require(rows, np.float32, ["C_CONTIGUOUS", "WRITEABLE"]))
        ops = torch.ops.quantized
        pack = ops.embedding_bag_byte_prepack if self.dtype == "int8" else ops.embedding_bag_4bit_prepack
        encoded: ByteArray = pack(weights).numpy()
        return encoded

    def decode(self, stored: ByteArray) -> Float32Array:
        """Decode uint8 [n, row_bytes] to float32 [n, dim], computed in float32."""
        floats = self._floats(stored).astype(np.float32)
        if not self._code_bytes:
            return floats
        codes = stored[:, : self._code_bytes]
        if self.dtype == "int8":
            values = codes.astype(np.float32)
        else:
            values = np.empty((len(stored), self.embedding_dim), np.float32)
            values[:, 0::2] = codes & 0x0F
            values[:, 1::2] = codes >> 4
        values *= floats[:, 0:1]
        values += floats[:, 1:2]
        return values

    def first_non_finite(self, stored: ByteArray) -> int | None:
        """Find the first stored row, of uint8 [n, row_bytes], that decodes to NaN or inf; None if none does."""
        floats = self._floats(stored)
        finite = np.isfinite(floats).all(axis=1)
        if self.dtype == "int8":
            # Finite scale and bias are not enough: code * scale + bias can still overflow, if so at the largest code.
            # Those of int4 are halves, which can't.
            with np.errstate(over="ignore", invalid="ignore"):
                finite &= np.isfinite(floats[:, 0] * np.float32(255) + floats[:, 1])
        return None if finite.all() else int(np.argmin(finite))

    @property
    def _code_bytes(self) -> int:
        """Bytes of codes, which scale and bias follow; 0 for rows of plain floats."""
        return {"int8": self.embedding_dim, "int4": self.embedding_dim // 2}.get(self.dtype, 0)

    @property
    def _float(self) -> np.dtype[np.floating]:
        return np.dtype("<f4" if self.dtype in ("int8", "fp32") else "<f2")

    def _floats(self, stored: ByteArray) -> npt.NDArray[np.floating]:
        """Return scale and bias, [n, 2], or the elements. Copied where they are not aligned."""
        return np.ascontiguousarray(stored[:, self._code_bytes :]).view(self._float)
