"""Tables in the files of a training system, most of them in several files of one rank each, as one checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from loader.checkpoints import Checkpoint
from loader.errors import CheckpointError, cut
from loader.keyed_rows import first_twice, keys_in_file
from loader.memory import map_array
from loader.snapshot.buckets import Int64Array
from loader.snapshot.codecs import ByteArray, Float32Array, RowCodec
from loader.snapshot.row_source import FLOAT_DTYPES, NUMPY_DTYPES, ArrayRows, RowSource, file_fingerprint

Floats: TypeAlias = npt.NDArray[np.floating[Any]] | torch.Tensor
KeyDtype = Literal["int64", "int32", "uint32", "uint64"]
ValueDtype = Literal["float32", "float16", "bfloat16", "float64"]
HALF_PARAMETERS = 4
"""Bytes of an int8 row behind its codes, where scale and offset are halves."""


class Part(NamedTuple):
    """One file's rows of a table.

    `rows` are floats [n, dim], or uint8 [n, dim + 4] of codes, float16 scale and float16 offset; `keys` are of the
    rows, int64 [n], if they are named by such.
    """

    file: Path
    rows: Floats | ByteArray
    keys: Int64Array | None = None


class ImportedTable(NamedTuple):
    """A table as it was found: its rows, their keys, int64 [n], if they have such, and how its values are stored."""

    rows: RowSource
    keys: Int64Array | None
    dtype: str


def refused(file: Path, table: str, expected: str, value: object) -> NoReturn:
    """Raise the CheckpointError of a file that is not as it should be."""
    raise CheckpointError(f"{file}: table {table!r}: expected {expected}, found {value}")


def map_raw(file: Path, table: str, dtype: str) -> npt.NDArray[Any]:
    """Map a file of little-endian numbers and nothing else, [n]; those of bfloat16 as int16.

    Raises CheckpointError if it can't be read, or ends within a number.
    """
    kind = np.dtype("<i2" if dtype == "bfloat16" else dtype).newbyteorder("<")
    try:
        if (size := file.stat().st_size) % kind.itemsize:
            refused(file, table, f"{dtype}, {kind.itemsize} bytes each", f"{size} bytes")
        return map_array(file, 0, (size // kind.itemsize,), kind, copy_on_write=True) if size else np.zeros(0, kind)
    except OSError as error:
        raise CheckpointError(f"{file}: table {table!r}: {error.strerror or error}") from error


def raw_part(
    table: str, key_file: Path, value_file: Path, key_dtype: str = "int64", value_dtype: str = "float32"
) -> Part:
    """Map the keys and values of a table that are files of their own; the dim is what makes as many rows as keys.

    A part without keys has the dim 0. Raises CheckpointError as `map_raw`, and if there is no such dim.
    """
    keys, values = map_raw(key_file, table, key_dtype), map_raw(value_file, table, value_dtype)
    if not keys.size or values.size % keys.size or not values.size:
        if keys.size or values.size:
            expected = f"as many rows as the {keys.size} keys of {key_file.name}"
            refused(value_file, table, expected, f"{values.size} {value_dtype}")
        return Part(value_file, np.zeros((0, 0), np.float32), np.zeros(0, np.int64))
    rows: Any = values.reshape(keys.size, -1)
    if value_dtype == "bfloat16":
        rows = torch.from_numpy(rows).view(torch.bfloat16)
    # Unsigned ones keep their bits.
    return Part(value_file, rows, keys.astype(np.int64, copy=False))


class JoinedRows(RowSource):
    """The rows of several files, one after the other."""

    def __init__(self, table: str, parts: Sequence[Part]) -> None:
        """Raise CheckpointError if they are not all of one dim and dtype, one that is read; some have rows."""
        filled = [part for part in parts if len(part.rows)]
        first = filled[0].rows
        kind, self.is_int8 = _kind(first), first.dtype == np.uint8
        for part in filled:
            if kind is None or _kind(part.rows) != kind:
                expected = (
                    f"{kind} as in {filled[0].file}" if kind else "floats [n, dim], or uint8 codes, scale and offset"
                )
                refused(part.file, table, expected, f"{part.rows.dtype} {list(part.rows.shape)}")
        super().__init__(sum(len(part.rows) for part in filled), first.shape[1] - HALF_PARAMETERS * self.is_int8)
        self._table, self._parts = table, filled
        self._ends = np.cumsum([len(part.rows) for part in filled])
        self._codec = RowCodec("int8", self.embedding_dim)
        self.stored_dtype = self.quantised_as = "int8" if self.is_int8 else None
        self.number_format = str(first.dtype)

    def blocks(self, first_row: int, max_rows: int) -> Iterator[Float32Array]:
        """Yield the rows of each file; as of `RowSource`. Those of int8 are decoded."""
        for part, start, stop in self._spans(first_row, max_rows):
            if self.is_int8:
                yield self._codec.decode(widened(part.rows[start:stop]))
            else:
                yield from ArrayRows(part.rows[start:stop]).blocks(0, stop - start)

    def stored_blocks(self, first_row: int, max_rows: int) -> Iterator[ByteArray]:
        """Yield int8 rows with the codes that they have; as of `RowSource`."""
        for part, start, stop in self._spans(first_row, max_rows):
            yield widened(part.rows[start:stop])

    def location(self, row: int) -> str:
        """Return the file that a row is in, and which it is there."""
        number = int(np.searchsorted(self._ends, row, side="right"))
        part = self._parts[number]
        return f" ({part.file}, row {row - int(self._ends[number]) + len(part.rows)})"

    def fingerprint(self) -> str:
        files = " ".join(file_fingerprint(part.file, self._table) for part in self._parts)
        return f"{self.number_format} [{self.embedding_dim}] {files}"

    def _spans(self, first_row: int, max_rows: int) -> Iterator[tuple[Part, int, int]]:
        begin = 0
        for part, end in zip(self._parts, self._ends.tolist(), strict=True):
            start, stop = max(first_row, begin), min(first_row + max_rows, end)
            if start < stop:
                yield part, start - begin, stop - begin
            begin = end


def _kind(rows: Floats | ByteArray) -> str | None:
    """Return the dtype and width of rows as text; None for what is not read."""
    if rows.ndim != 2 or rows.shape[1] <= HALF_PARAMETERS * (rows.dtype == np.uint8):
        return None
    is_float = rows.dtype in (FLOAT_DTYPES if isinstance(rows, torch.Tensor) else NUMPY_DTYPES)
    return f"{rows.dtype} [n, {rows.shape[1]}]" if is_float or rows.dtype == np.uint8 else None


def widened(rows: Any) -> ByteArray:
    """Return int8 rows with scale and offset as float32, uint8 [n, dim + 8], of such with halves: no bit is lost."""
    parameters = np.ascontiguousarray(rows[:, -HALF_PARAMETERS:]).view("<f2").astype("<f4")
    return np.concatenate([rows[:, :-HALF_PARAMETERS], parameters.view(np.uint8)], axis=1)


def _joined(table: str, parts: Sequence[Part]) -> ImportedTable:
    """Return the table in several files. Raises CheckpointError as `JoinedRows`, and for a key that is there twice."""
    rows = JoinedRows(table, parts)
    dtype = "uint8 with float16 scale and offset" if rows.is_int8 else rows.number_format
    keys_of_parts = [part.keys for part in parts if part.keys is not None]
    if not keys_of_parts:
        return ImportedTable(rows, None, dtype)
    keys = keys_of_parts[0]
    if len(keys_of_parts) > 1:
        keys = np.concatenate(keys_of_parts, out=keys_in_file(sum(part.size for part in keys_of_parts)))
    if keys.size != rows.num_embeddings:
        refused(parts[0].file, table, f"{keys.size} rows, as there are keys", rows.num_embeddings)
    if (twice := first_twice(keys)) is not None:
        files = [str(part.file) for part in parts if part.keys is not None and (part.keys == twice).any()]
        others = "".join(f", also in {file}" for file in files[1:])
        refused(Path(files[0]), table, "each key once", f"{twice} twice{others}")
    return ImportedTable(rows, keys, dtype)


class TablesCheckpoint(Checkpoint):
    """Tables that were found, and what else a model has, out of another checkpoint."""

    def __init__(
        self, path: Path, parts: Mapping[str, Sequence[Part]], remainder: Checkpoint | None, notes: Sequence[str] = ()
    ) -> None:
        """Raise CheckpointError if parts of a table do not fit each other, or `remainder` has one of its name."""
        empty = {name for name, of_table in parts.items() if not any(len(part.rows) for part in of_table)}
        self.notes = (*notes, *(f"{name}: left out, it has no rows" for name in sorted(empty)))
        self._tables = {name: _joined(name, of_table) for name, of_table in parts.items() if name not in empty}
        self._remainder, others = remainder, [] if remainder is None else remainder.names()
        if both := sorted(self._tables.keys() & set(others)):
            raise CheckpointError(f"{path}: {cut(both)} are both there and in --checkpoint")
        super().__init__(path, dict(self._tables) | dict.fromkeys(others))

    def shape(self, name: str) -> tuple[int, ...]:
        if self._entry(name) is None and self._remainder is not None:
            return self._remainder.shape(name)
        rows = self._tables[name].rows
        return rows.num_embeddings, rows.embedding_dim

    def tensor(self, name: str) -> torch.Tensor:
        if self._entry(name) is None and self._remainder is not None:
            return self._remainder.tensor(name)
        raise CheckpointError(f"{self.path}: {name!r} is a table: it is read as rows, not as a tensor")

    def rows(self, name: str) -> RowSource:
        if self._entry(name) is None and self._remainder is not None:
            return self._remainder.rows(name)
        return self._tables[name].rows

    def keys(self, name: str) -> Int64Array | None:
        return None if (table := self._entry(name)) is None else table.keys

    @property
    def tables(self) -> Mapping[str, str]:
        return {name: table.dtype for name, table in self._tables.items()}
