"""Read a table's rows in blocks: arrays, tensors, safetensors files, iterators."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from loader.errors import ExportError
from loader.snapshot.codecs import ByteArray, Float32Array
from loader.snapshot.tables import RowDtype

_SAMPLED_ROWS = 1024
NUMPY_DTYPES = (np.float16, np.float32, np.float64)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def file_fingerprint(path: Path, name: str) -> str:
    """Return path, size and time of change of a file, and `name` of rows in it. Raises ExportError."""
    try:
        status = path.stat()
        return json.dumps([str(path.resolve()), name, status.st_size, status.st_mtime_ns])
    except OSError as error:
        raise ExportError(f"rows: {path}: {error}") from error


class RowSource(ABC):
    """A table's rows in training precision, and the shape of the table.

    `stored_dtype` is of rows that are stored already as a snapshot would: a table of that dtype takes them as they are.
    `quantised_as` is what rows are, or were before they were chosen out of a table; None for floats.
    """

    stored_dtype: RowDtype | None = None
    quantised_as: RowDtype | None = None

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim

    @abstractmethod
    def blocks(self, first_row: int, max_rows: int) -> Iterator[Float32Array]:
        """Yield rows [first_row, first_row + max_rows), or up to the table's end, as blocks float32 [k, dim].

        A block is only valid until the next is taken. Memory is bounded by `max_rows` rows.
        """

    def stored_blocks(self, first_row: int, max_rows: int) -> Iterator[ByteArray]:
        """Yield blocks as `blocks` does, as `RowCodec` of `stored_dtype` encodes them: uint8 [k, row_bytes]."""
        raise NotImplementedError(f"{type(self).__name__}: rows are not stored yet")

    def location(self, row: int) -> str:
        """Return where a row is, for a message that has named the table and the row; "" if that says it all."""
        return ""

    def fingerprint(self) -> str:
        """Return a text that is equal for the same rows and differs, as far as can be cheaply known, for others.

        By it an interrupted export notices that it is run again with other rows; "" for a source that can't know.
        """
        return ""


class ArrayRows(RowSource):
    """Rows of a NumPy array, memmap or torch tensor, on any device, [num_embeddings, dim] of floats.

    `file` is what a tensor is mapped from, where it is called `name`.
    """

    def __init__(self, rows: npt.NDArray[Any] | torch.Tensor, file: Path | None = None, name: str = "") -> None:
        """Raise ExportError if it is not two-dimensional, dense and of floats."""
        if isinstance(rows, torch.Tensor):
            rows = rows.detach()
            is_matrix, is_of = rows.layout == torch.strided, rows.dtype in FLOAT_DTYPES
        else:
            is_matrix, is_of = True, rows.dtype.newbyteorder("=") in NUMPY_DTYPES
            file = file or (Path(rows.filename) if isinstance(rows, np.memmap) and rows.filename else None)
        if rows.ndim != 2 or not is_matrix or not is_of:
            raise ExportError(
                "rows: expected a dense array or tensor [rows, dim] of float16, bfloat16, float32 or float64, "
                f"got {rows.dtype} {list(rows.shape)}"
            )
        super().__init__(*rows.shape)
        self._rows, self._file, self._name = rows, file, name

    def blocks(self, first_row: int, max_rows: int) -> Iterator[Float32Array]:
        """Yield one block: a view where rows are float32 in host memory, else a converted copy of these rows."""
        yield self._read(slice(first_row, first_row + max_rows))

    def fingerprint(self) -> str:
        """Of up to 1024 rows, first, last and evenly spaced between, and of the file that they are mapped from."""
        num_rows = self.num_embeddings
        rows = self._read(np.linspace(0, num_rows - 1, min(num_rows, _SAMPLED_ROWS)).astype(np.int64))
        digest = hashlib.sha256(json.dumps([num_rows, rows.dtype.str, rows.shape]).encode())
        digest.update(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
        sample = digest.hexdigest()
        return sample if self._file is None else f"{sample} {file_fingerprint(self._file, self._name)}"

    def location(self, row: int) -> str:
        """Return the file that rows are mapped from, if they are."""
        return "" if self._file is None else f" ({self._file})"

    def _read(self, chosen: Any) -> Float32Array:
        if isinstance(self._rows, torch.Tensor):
            return np.asarray(self._rows[chosen].to("cpu", torch.float32).numpy())
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, which the writer refuses by row
            return np.asarray(self._rows[chosen], np.float32)


class SafetensorsRows(ArrayRows):
    """Rows of one tensor [num_embeddings, dim] of a safetensors file, which is mapped."""

    def __init__(self, path: str | Path, name: str) -> None:
        """Raise ExportError if the file can't be read, has no such tensor, or it is not a matrix of floats."""
        try:
            file: Any = safe_open(str(path), framework="pt")
            super().__init__(file.get_tensor(name), Path(path), name)
        except (SafetensorError, OSError) as error:
            raise ExportError(f"rows: {path}, tensor {name!r}: {error}") from error
        except ExportError as error:
            raise ExportError(f"{path}, tensor {name!r}: {error}") from error


class RowsFromBlocks(RowSource):
    """Rows from an iterable of blocks [k, dim], in row order and of any number of rows, that is read once."""

    def __init__(
        self, blocks: Iterable[npt.NDArray[Any] | torch.Tensor], num_embeddings: int, embedding_dim: int
    ) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self._blocks = (block for block in map(ArrayRows, blocks) if block.num_embeddings)
        self._next_row = 0
        self._block: ArrayRows | None = None
        self._block_first_row = 0

    def blocks(self, first_row: int, max_rows: int) -> Iterator[Float32Array]:
        """Yield these rows as they come; rows before `first_row` that were not read yet are read and dropped.

        Raises ExportError if they were already read, a block has the wrong dim, or there are too few or too many rows.
        """
        if first_row < self._next_row:
            raise ExportError(
                f"rows: row {first_row} asked after row {self._next_row}, but an iterator of blocks is read only once"
            )
        last_row = min(first_row + max_rows, self.num_embeddings)
        while self._next_row < last_row:
            block_first_row = self._block_first_row
            if (block := self._block) is None:
                if (block := next(self._blocks, None)) is None:
                    raise ExportError(f"rows: the blocks end after {block_first_row} rows of {self.num_embeddings}")
                if block.embedding_dim != self.embedding_dim:
                    dims = f"has dim {block.embedding_dim}, expected {self.embedding_dim}"
                    raise ExportError(f"rows: the block at row {block_first_row} {dims}")
                self._block = block
            block_end = block_first_row + block.num_embeddings
            start, stop = max(first_row, self._next_row), min(last_row, block_end)
            self._next_row = stop
            if stop == block_end:
                self._block, self._block_first_row = None, block_end
            if start < stop:
                yield from block.blocks(start - block_first_row, stop - start)
        if last_row == self.num_embeddings and (self._block is not None or next(self._blocks, None) is not None):
            raise ExportError(f"rows: the blocks hold more than the {self.num_embeddings} rows of the table")
