"""Write and check the keys of a table that names its rows by them: beside the rows of each file, in the same order.

A row file of such a table has a second tensor, `keys`, I64 [rows]: rows are in the order of their keys' buckets, within
a bucket in that of the keys. What a missing key gets, of a table whose `missing` is `mean`, is one row more, in
`missing-row.safetensors`, tensor `row`, U8 [1, row_bytes]: the mean of all stored rows, computed in float64.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from loader.errors import ExportError
from loader.snapshot.buckets import Int64Array, key_buckets
from loader.snapshot.codecs import RowCodec
from loader.snapshot.tables import Keys, TableSpec, fingerprint_strings
from loader.snapshot.tensor_files import map_tensor, read_header

GivenKeys: TypeAlias = npt.NDArray[Any] | Sequence[int] | Sequence[str] | Iterable[npt.NDArray[Any]]
"""Keys of a table: one array, memmap or list, or blocks of them; unsigned ones are taken by their bits."""

_BLOCK_BYTES = 16 << 20
_COMPARED_KEYS = 4 << 20


def as_keys(where: str, kind: Keys | None, given: Any) -> Int64Array:
    """Return keys as signed 64-bit integers, [n]; of strings the fingerprints. Raises ExportError, named by `where`."""
    if isinstance(given, Iterable) and not isinstance(given, np.ndarray | Sequence):
        blocks = [as_keys(where, kind, block) for block in given]
        return np.concatenate(blocks) if blocks else np.zeros(0, np.int64)
    if kind == "string" and len(given) and all(isinstance(text, str) for text in given):
        return fingerprint_strings(given)
    try:
        array = np.asarray(given)
    except (ValueError, OverflowError) as error:
        raise ExportError(f"{where}: {error}") from error
    if not array.size:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ExportError(f"{where}: expected integers [n] of at most 64 bits, got {array.dtype} {list(array.shape)}")
    # An unsigned one keeps its bits.
    return np.ascontiguousarray(array).astype(np.int64, copy=False)


def checked_keys(table: TableSpec, given: GivenKeys) -> Int64Array:
    """Return the keys of a table's rows, int64 [n]. Raises ExportError for none, too many, or one that comes twice."""
    where = f"table {table.name!r}: keys"
    keys = as_keys(where, table.keys, given)
    if not 1 <= keys.size <= table.num_embeddings:
        raise ExportError(f"{where}: {keys.size} of them; allowed is 1 to its capacity {table.num_embeddings}")
    if (twice := first_twice(keys)) is not None:
        raise ExportError(f"{where}: {twice} is there twice")
    return keys


def first_twice(keys: Int64Array) -> int | None:
    """Return the smallest key that is there twice, if one is."""
    in_order = keys_in_file(keys.size)
    in_order[:] = keys
    in_order.sort()
    for start in range(0, keys.size, _COMPARED_KEYS):
        some = in_order[start : start + _COMPARED_KEYS + 1]
        same = np.flatnonzero(some[1:] == some[:-1])
        if same.size:
            return int(some[same[0]])
    return None


def keys_in_file(count: int) -> Int64Array:
    """Return room for keys, int64 [count]; that of many is in a file without a name, not of this process's memory."""
    if count <= _COMPARED_KEYS:
        return np.empty(count, np.int64)
    try:
        with tempfile.TemporaryFile() as file:
            # Room that is not there is found now, not by a signal.
            os.posix_fallocate(file.fileno(), 0, count * 8)
            return np.memmap(file, np.int64, "r+", shape=(count,))
    except OSError as error:
        room = f"{count * 8} bytes for keys in {tempfile.gettempdir()}"
        raise ExportError(f"{room}: {error.strerror or error}; TMPDIR names another folder") from error


def key_order(keys: Int64Array) -> Int64Array:
    """Return which of a file's rows, by the order in which they were given, is stored at each place: int64 [n]."""
    return np.lexsort((keys, key_buckets(keys)))


def save_mean(table: TableSpec, row_files: Sequence[Path], path: Path) -> None:
    """Write the mean of all rows of a stored table's files as its row for missing keys."""
    codec, total, count = RowCodec(table.dtype, table.embedding_dim), np.zeros(table.embedding_dim), 0
    block_rows = max(1, _BLOCK_BYTES // (4 * table.embedding_dim))
    for file in row_files:
        rows = map_tensor(file, read_header(file)["rows"], np.uint8)
        for begin in range(0, len(rows), block_rows):
            total += codec.decode(rows[begin : begin + block_rows]).sum(axis=0, dtype=np.float64)
        count += len(rows)
    mean = (total / count).astype(np.float32)[None]
    safetensors.numpy.save_file({"row": codec.encode(mean)}, path)
