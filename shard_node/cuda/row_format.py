"""How a row lies on a card: the stored numbers, moved apart so that every row begins at a multiple of 16 bytes.

Nothing is quantised anew, so `restore` gives back what `relay` was given, byte for byte. Padding is zero.

| dtype | from byte 0 | tail | stride, before it is rounded up to 16 |
|---|---|---|---|
| int8 | D codes | at D rounded up to 8: float32 scale, float32 bias | tail + 8 |
| int4 | D/2 bytes of codes, the low 4 bits first | at D/2 rounded up to 4: float16 scale, float16 bias | tail + 4 |
| fp16 | D float16 | none | 2D |
| fp32 | D float32 | none | 4D |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt

from loader.snapshot.codecs import codec_for
from loader.snapshot.manifest import RowDtype
from shard_node.cuda.kernel_params import CHUNK_BYTES
from shard_node.errors import InvalidBagsError

ByteArray = npt.NDArray[np.uint8]

_TAIL_BYTES: dict[RowDtype, int] = {"int8": 8, "int4": 4, "fp16": 0, "fp32": 0}


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The layout of one dtype and dim on cards. Made by `RowFormat.of`.

    Attributes:
        dtype: as stored.
        embedding_dim: elements of a row.
        row_bytes: of a stored row, without padding.
        code_bytes: that codes or elements take.
        tail_offset: at which byte scale and bias lie; equal to `code_bytes` where there are none.
        tail_bytes: of scale and bias.
        stride: bytes from one row to the next, a multiple of 16.
        chunks: 16-byte chunks with codes or elements in them, the first ones of a row. A tail may share the last.
    """

    dtype: RowDtype
    embedding_dim: int
    row_bytes: int
    code_bytes: int
    tail_offset: int
    tail_bytes: int
    stride: int
    chunks: int

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, dtype: RowDtype, embedding_dim: int) -> Self:
        """The format of rows of `embedding_dim` elements stored as `dtype`."""
        row_bytes = codec_for(dtype, embedding_dim).row_bytes
        tail_bytes = _TAIL_BYTES[dtype]
        code_bytes = row_bytes - tail_bytes
        tail_offset = _round_up(code_bytes, tail_bytes) if tail_bytes else code_bytes
        return cls(
            dtype=dtype,
            embedding_dim=embedding_dim,
            row_bytes=row_bytes,
            code_bytes=code_bytes,
            tail_offset=tail_offset,
            tail_bytes=tail_bytes,
            stride=_round_up(tail_offset + tail_bytes, CHUNK_BYTES),
            chunks=-(-code_bytes // CHUNK_BYTES),
        )

    def relay(self, stored: ByteArray, out: ByteArray | None = None) -> ByteArray:
        """Lays rows out as on a card.

        Args:
            stored: uint8 [n, row_bytes].
            out: uint8 [n, stride], all of which is written; made if it is not given.

        Returns:
            `out`.

        Raises:
            InvalidBagsError: an array of another dtype or shape.
        """
        _check("stored", stored, (stored.shape[0], self.row_bytes))
        if out is None:
            out = np.empty((stored.shape[0], self.stride), np.uint8)
        _check("out", out, (stored.shape[0], self.stride))
        tail_end = self.tail_offset + self.tail_bytes
        out[:, : self.code_bytes] = stored[:, : self.code_bytes]
        out[:, self.code_bytes : self.tail_offset] = 0
        out[:, self.tail_offset : tail_end] = stored[:, self.code_bytes :]
        out[:, tail_end:] = 0
        return out

    def restore(self, relaid: ByteArray) -> ByteArray:
        """The stored rows, uint8 [n, row_bytes], of rows as on a card, uint8 [n, stride].

        Raises:
            InvalidBagsError: an array of another dtype or shape.
        """
        _check("relaid", relaid, (relaid.shape[0], self.stride))
        stored = np.empty((relaid.shape[0], self.row_bytes), np.uint8)
        stored[:, : self.code_bytes] = relaid[:, : self.code_bytes]
        stored[:, self.code_bytes :] = relaid[:, self.tail_offset : self.tail_offset + self.tail_bytes]
        return stored


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _check(name: str, array: ByteArray, shape: tuple[int, int]) -> None:
    if array.dtype != np.uint8 or array.shape != shape:
        raise InvalidBagsError(f"{name} must be uint8 {list(shape)}, got {array.dtype} {list(array.shape)}")
