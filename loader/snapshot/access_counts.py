"""Access counts: how often each row of a table was looked up, for who decides where rows lie.

A snapshot may hold them for any of its tables, in a file of one tensor, `counts`, U32 [num_embeddings]. They come from
training, or from what serving observed. Only the ratios matter, between rows and between tables: all are of one time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.errors import ExportError, SnapshotCorruptError, cut
from loader.snapshot.manifest import ModelSpec, TableSpec
from loader.snapshot.tensor_files import TensorInfo, expect_tensors, load_numpy, map_tensor, read_header

MAX_ACCESS_COUNT = 2**32 - 1
TENSOR = "counts"
# In a file of several tables: rows that were seen, and how often each. A dense table is one tensor under its name.
ROWS_SUFFIX, COUNTS_SUFFIX = "/rows", "/counts"


def access_count_tensors(table: TableSpec, counts: npt.NDArray[Any]) -> dict[str, npt.NDArray[np.uint32]]:
    """The tensors of a file of access counts: whole numbers [num_embeddings], each in [0, 2^32). Raises ExportError."""
    array = np.asarray(counts)
    if array.dtype.kind not in "iu" or array.shape != (table.num_embeddings,):
        raise ExportError(
            f"table {table.name!r}: access counts: expected integers [{table.num_embeddings}], "
            f"got {array.dtype} {list(array.shape)}"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > MAX_ACCESS_COUNT:
        row, bad = (int(array.argmin()), low) if low < 0 else (int(array.argmax()), high)
        raise ExportError(
            f"table {table.name!r}: access counts: row {row} has {bad}, which is not in [0, 2^32); "
            "only the ratios matter, so all counts may be divided by the same number"
        )
    return {TENSOR: np.ascontiguousarray(array, dtype=np.uint32)}


def check_access_counts_header(path: Path, table: TableSpec, tensors: Mapping[str, TensorInfo]) -> None:
    """Raises SnapshotCorruptError if dtype or shape in a file of access counts do not fit the table."""
    expect_tensors(path, tensors, {TENSOR: ("U32", (table.num_embeddings,))})


def map_access_counts(path: Path, tensors: Mapping[str, TensorInfo]) -> npt.NDArray[np.uint32]:
    """Returns the counts of a checked file: read-only uint32 [num_embeddings], mapped. Raises as `map_tensor`."""
    counts: npt.NDArray[np.uint32] = map_tensor(path, tensors[TENSOR], np.uint32)
    return counts


def read_access_counts(path: Path, spec: ModelSpec) -> dict[str, npt.NDArray[Any]]:
    """Returns what `export_snapshot` takes as `access_counts`, from disk.

    Args:
        path: a folder with a `<table>.npy` of whole numbers [num_embeddings] for each table with counts, which are
            mapped; or a safetensors file that has, for each, a tensor `<table>` of the same, or `<table>/rows` and
            `<table>/counts` of the rows that were seen, as `shard_node` saves what it observed.
        spec: the model that they are for.

    Raises:
        ExportError: it can't be read, is of another model, or is neither.
    """
    tables = {table.name: table for table in spec.tables}
    found = _read_folder(path) if path.is_dir() else _read_file(path, tables)
    if unknown := sorted(set(found) - set(tables)):
        raise ExportError(f"{path}: access counts of {cut(unknown)}; the model's tables are {cut(sorted(tables))}")
    if not found:
        raise ExportError(f"{path}: no access counts; expected <table>.npy for some of {cut(sorted(tables))}")
    return found


def _read_folder(path: Path) -> dict[str, npt.NDArray[Any]]:
    found: dict[str, npt.NDArray[Any]] = {}
    for file in sorted(path.glob("*.npy")):
        try:
            found[file.stem] = np.lib.format.open_memmap(file, mode="r")  # Maps numbers, and never takes a pickle.
        except (OSError, ValueError, EOFError) as error:
            raise ExportError(f"{file}: not an array that can be read: {cut(error)}") from error
    return found


def _read_file(path: Path, tables: Mapping[str, TableSpec]) -> dict[str, npt.NDArray[Any]]:
    try:
        header = read_header(path)
        # By the header, before memory is taken for it.
        longest = max((info.shape[0] if info.shape else 1 for info in header.values()), default=0)
        if longest > (limit := max(table.num_embeddings for table in tables.values())):
            raise ExportError(f"{path}: a tensor of {longest} numbers; the largest table has {limit} rows")
        tensors = load_numpy(path, header)
    except SnapshotCorruptError as error:
        raise ExportError(str(error)) from error
    found: dict[str, npt.NDArray[Any]] = {}
    for name, tensor in tensors.items():
        if name.endswith(ROWS_SUFFIX):
            table = name.removesuffix(ROWS_SUFFIX)
            counts = tensors.get(f"{table}{COUNTS_SUFFIX}")
            found[table] = _spread(path, tables.get(table), table, tensor, counts)
        elif not name.endswith(COUNTS_SUFFIX):
            found[name] = tensor
        elif f"{name.removesuffix(COUNTS_SUFFIX)}{ROWS_SUFFIX}" not in tensors:
            raise ExportError(f"{path}: has {cut(repr(name))} without the rows that it is of")
    return found


def _spread(
    path: Path, spec: TableSpec | None, table: str, rows: npt.NDArray[Any], counts: npt.NDArray[Any] | None
) -> npt.NDArray[np.uint32]:
    """Returns uint32 [num_embeddings] from those that were seen."""
    if spec is None:
        raise ExportError(f"{path}: access counts of {cut(repr(table))}, which is no table of the model")
    fits = counts is not None and rows.ndim == 1 and counts.shape == rows.shape
    if counts is None or not fits or rows.dtype.kind not in "iu" or counts.dtype != np.uint32:
        raise ExportError(f"{path}: table {table!r}: rows and counts are not whole numbers [n] and uint32 [n]")
    if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < spec.num_embeddings:
        raise ExportError(
            f"{path}: table {table!r}: rows from {rows.min()} to {rows.max()}; num_embeddings is {spec.num_embeddings}"
        )
    if np.unique(rows).size != rows.size:
        raise ExportError(f"{path}: table {table!r}: a row is there twice")
    dense = np.zeros(spec.num_embeddings, np.uint32)
    dense[rows] = counts
    return dense
