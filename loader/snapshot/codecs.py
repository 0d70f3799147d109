"""How float32 rows become stored bytes and back, and where in a file they lie.

The quantised layouts are FBGEMM's fused row-wise CPU layouts, so that the torch ops
`quantized::embedding_bag_{byte,4bit}_rowwise_offsets` read stored rows as they lie
(source: pytorch, aten/src/ATen/native/quantized/cpu/qembeddingbag_prepack.cpp). All numbers are little-endian:

| dtype | bytes of a row of dim D | value of element i |
|---|---|---|
| int8 | D codes, float32 scale, float32 bias | code[i] * scale + bias |
| int4 | D/2 code bytes (element 2k in the low 4 bits of byte k), float16 scale, float16 bias | code[i] * scale + bias |
| fp16 | D float16 | as stored |
| fp32 | D float32 | as stored |

Every table has 256 buckets, `(row >> shift) & 255`, which docs/snapshot-format.md lays out: shift is 0 with bucketing
`hash`, and with `range` the smallest that leaves at most 256 buckets. File i of a table holds rows [i * rows_per_file,
(i + 1) * rows_per_file) in bucket order, so that some buckets are one contiguous run of each file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loader.snapshot.manifest import NUM_BUCKETS, Bucketing, RowDtype, TableSpec

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
        if self._code_bytes:
            # Finite scale and bias are not enough: code * scale + bias can still overflow, if so at the largest code.
            largest_code = np.float32(255 if self.dtype == "int8" else 15)
            with np.errstate(over="ignore", invalid="ignore"):
                tail = floats.astype(np.float32)
                finite &= np.isfinite(tail[:, 0] * largest_code + tail[:, 1])
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


def codec_for(dtype: RowDtype, embedding_dim: int) -> RowCodec:
    """Return the codec for rows of `embedding_dim` elements stored as `dtype`."""
    return RowCodec(dtype, embedding_dim)


def bucket_shift(bucketing: Bucketing, num_embeddings: int) -> int:
    """Return the shift s for which bucket = (row >> s) & 255."""
    if bucketing == "hash":
        return 0
    return max(0, (num_embeddings - 1).bit_length() - 8)


def num_buckets_used(table: TableSpec) -> int:
    """Return how many of the 256 buckets hold at least one row; they are the first ones."""
    if table.bucketing == "hash":
        return min(NUM_BUCKETS, table.num_embeddings)
    width = 1 << bucket_shift("range", table.num_embeddings)
    return -(-table.num_embeddings // width)


def rows_in_file(num_embeddings: int, rows_per_file: int, file_index: int) -> int:
    """Return the rows of file `file_index`; all files but the last are full."""
    return min(rows_per_file, num_embeddings - file_index * rows_per_file)


def bucket_start_in_file(table: TableSpec, rows_per_file: int, file_index: int, bucket: int) -> int:
    """Find the position, in file `file_index`, of the first row of `bucket` (0..256; 256: how many rows it has)."""
    rows = rows_in_file(table.num_embeddings, rows_per_file, file_index)
    if table.bucketing == "hash":
        return bucket * (rows // NUM_BUCKETS) + min(bucket, rows % NUM_BUCKETS)
    first_row = file_index * rows_per_file
    return min(max((bucket << bucket_shift("range", table.num_embeddings)) - first_row, 0), rows)


def row_positions(
    table: TableSpec, rows_per_file: int, file_index: int, local_rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Find the positions in file `file_index` of its rows `local_rows`, in row order from the file's first row.

    The closed form of `bucket_start_in_file` plus the number of earlier rows of the same bucket: since a file of a
    `hash` table starts at a multiple of 256, local row r is the (r >> 8)-th of bucket r & 255.
    """
    if table.bucketing == "range":
        return local_rows
    rows = rows_in_file(table.num_embeddings, rows_per_file, file_index)
    buckets = local_rows & (NUM_BUCKETS - 1)
    starts = buckets * (rows // NUM_BUCKETS) + np.minimum(buckets, rows % NUM_BUCKETS)
    positions: npt.NDArray[np.int64] = starts + (local_rows >> 8)
    return positions


def default_rows_per_file(num_embeddings: int, row_bytes: int) -> int:
    """Pick the largest power of two whose rows fit 256 MiB; at least 256, at most what one file of all rows needs."""
    # Large enough for few files, small enough to hold one in memory and to redo after an interruption.
    largest = 1 << max(8, ((256 << 20) // row_bytes).bit_length() - 1)
    needed = 1 << max(8, (num_embeddings - 1).bit_length())
    return min(largest, needed)


def row_at_position(table: TableSpec, rows_per_file: int, file_index: int, position: int) -> int:
    """Find the row number of what lies at `position` in file `file_index`: the reverse of `row_positions`."""
    return int(rows_at_positions(table, rows_per_file, file_index, position, position + 1)[0])


def rows_at_positions(
    table: TableSpec, rows_per_file: int, file_index: int, begin: int, end: int
) -> npt.NDArray[np.int64]:
    """Find the row numbers, int64 [end - begin], of what lies at positions [begin, end) in file `file_index`."""
    first_row = file_index * rows_per_file
    rows: npt.NDArray[np.int64] = np.arange(begin, end, dtype=np.int64)
    if table.bucketing == "range":
        rows += first_row
        return rows
    starts = np.array([bucket_start_in_file(table, rows_per_file, file_index, one) for one in range(NUM_BUCKETS + 1)])
    bucket_rows = np.diff(np.clip(starts, begin, end))
    # The k-th row of bucket b is b + 256 k.
    first = np.arange(NUM_BUCKETS, dtype=np.int64) - starts[:-1] * NUM_BUCKETS + first_row
    rows *= NUM_BUCKETS
    rows += np.repeat(first, bucket_rows)
    return rows
