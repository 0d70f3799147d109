"""Make, check and read the files with one value a row: a table's vocabulary and its access counts.

A vocabulary is the list of ids whose position is their row: `ids`, int64 [V]. For string ids these are fingerprints,
and the strings lie beside them: `strings`, uint8, the UTF-8 of all strings one after the other, and `offsets`, int64
[V + 1].

Access counts, `counts`, U32 [num_embeddings], say how often each row was looked up, in training or in serving. Only the
ratios matter, between rows and between tables: all are of one time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from loader.errors import ExportError, SnapshotCorruptError, cut
from loader.snapshot.manifest import MAX_STRING_ID_BYTES, ModelSpec
from loader.snapshot.tables import AnyTable, VocabularyMapping, fingerprint_strings
from loader.snapshot.tensor_files import (
    TensorInfo,
    expect_at_most,
    expect_tensors,
    length_of,
    load_numpy,
    read_header,
)

Vocabulary = Sequence[int] | Sequence[str] | npt.NDArray[Any]

MAX_ACCESS_COUNT = 2**32 - 1
_PIECE_VALUES = 1 << 22
COUNTS_TENSOR = "counts"
# In a file of several tables: rows that were seen, and how often each. A dense table is one tensor under its name.
ROWS_SUFFIX, COUNTS_SUFFIX = "/rows", "/counts"
# Of how many rows the table was that was counted, where the file says it.
SIZE_SUFFIX = "/num_embeddings"


def vocabulary_tensors(table: AnyTable, vocabulary: Vocabulary) -> dict[str, npt.NDArray[Any]]:
    """Make the tensors of a vocabulary file: ids in row order, at most `num_embeddings`; rows beyond them have no id.

    Raises ExportError for a wrong type, a negative or too large an id, too many ids, a duplicate, or two strings whose
    fingerprints collide.
    """
    if not 1 <= len(vocabulary) <= table.num_embeddings:
        allowed = f"1 to num_embeddings {table.num_embeddings}"
        raise ExportError(f"table {table.name!r}: vocabulary of {len(vocabulary)} ids; allowed: {allowed}")
    if not id_type_is_string(table):
        ids = _integer_ids(table, vocabulary)
        _refuse_duplicates(table, ids, ids)
        return {"ids": ids}
    given = vocabulary.tolist() if isinstance(vocabulary, np.ndarray) else vocabulary
    strings = [text for text in given if isinstance(text, str)]
    if len(strings) != len(given):
        raise ExportError(f"table {table.name!r}: vocabulary: expected strings (id_type string)")
    try:
        encoded = [text.encode() for text in strings]
    except UnicodeEncodeError as error:
        raise ExportError(f"table {table.name!r}: vocabulary: {error.object!r} is not valid Unicode") from error
    if (longest := max(map(len, encoded))) > MAX_STRING_ID_BYTES:
        limit = f"at most {MAX_STRING_ID_BYTES} are allowed"
        raise ExportError(f"table {table.name!r}: vocabulary: an id of {longest} bytes of UTF-8; {limit}")
    ids = fingerprint_strings(strings)
    _refuse_duplicates(table, ids, strings)
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    return {"ids": ids, "strings": np.frombuffer(b"".join(encoded), np.uint8), "offsets": offsets}


def id_type_is_string(table: AnyTable) -> bool:
    """Tells whether the table's vocabulary is of strings."""
    return isinstance(table.id_mapping, VocabularyMapping) and table.id_mapping.id_type == "string"


def check_vocabulary_header(path: Path, table: AnyTable, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise SnapshotCorruptError if dtypes or shapes in a vocabulary file do not fit the table."""
    length = length_of(tensors, "ids")
    if "ids" in tensors and not 1 <= length <= table.num_embeddings:
        raise SnapshotCorruptError(f"{path}: {length} ids; allowed: 1 to num_embeddings {table.num_embeddings}")
    expected: dict[str, tuple[str, tuple[int, ...]]] = {"ids": ("I64", (length,))}
    if id_type_is_string(table):
        expected |= {"strings": ("U8", (length_of(tensors, "strings"),)), "offsets": ("I64", (length + 1,))}
    expect_tensors(path, tensors, expected)
    if id_type_is_string(table):
        # A file of strings is read as a whole.
        expect_at_most(path, tensors, 8 * length + 8 * (length + 1) + MAX_STRING_ID_BYTES * length)


def check_vocabulary_ids(path: Path, ids: npt.NDArray[np.int64]) -> None:
    """Raise SnapshotCorruptError if an id is negative or occurs twice."""
    if ids.min() < 0:
        raise SnapshotCorruptError(f"{path}: id {ids.min()} at row {int(ids.argmin())} is negative")
    if (pair := _first_duplicate(ids)) is not None:
        raise SnapshotCorruptError(f"{path}: rows {pair[0]} and {pair[1]} have the same id {ids[pair[0]]}")


def decode_strings(path: Path, ids: npt.NDArray[np.int64], tensors: Mapping[str, npt.NDArray[Any]]) -> list[str]:
    """Decode a vocabulary's strings, in row order. Raises SnapshotCorruptError if they are not the ids' strings."""
    blob, offsets = tensors["strings"].tobytes(), tensors["offsets"]
    if offsets[0] != 0 or offsets[-1] != len(blob) or (np.diff(offsets) < 0).any():
        raise SnapshotCorruptError(f"{path}: offsets do not ascend from 0 to the {len(blob)} bytes of strings")
    bounds = offsets.tolist()
    try:
        strings = [blob[bounds[i] : bounds[i + 1]].decode() for i in range(len(ids))]
    except UnicodeDecodeError as error:
        raise SnapshotCorruptError(f"{path}: strings are not UTF-8: {error}") from error
    if not np.array_equal(fingerprint_strings(strings), ids):
        raise SnapshotCorruptError(f"{path}: ids are not the fingerprints of the strings")
    return strings


def _integer_ids(table: AnyTable, vocabulary: Vocabulary) -> npt.NDArray[np.int64]:
    try:
        array = np.asarray(vocabulary)
    except (ValueError, OverflowError) as error:
        raise ExportError(f"table {table.name!r}: vocabulary: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ExportError(
            f"table {table.name!r}: vocabulary: expected integers [V] below 2^63, got {array.dtype} {list(array.shape)}"
        )
    if array.min() < 0 or array.max() > np.iinfo(np.int64).max:
        bad = array.min() if array.min() < 0 else array.max()
        raise ExportError(f"table {table.name!r}: vocabulary: id {bad} is not in [0, 2^63)")
    return np.ascontiguousarray(array, dtype=np.int64)


def _refuse_duplicates(table: AnyTable, ids: npt.NDArray[np.int64], names: Sequence[str] | npt.NDArray[Any]) -> None:
    pair = _first_duplicate(ids)
    if pair is None:
        return
    first, second = (str(names[row]) if isinstance(names, np.ndarray) else repr(names[row]) for row in pair)
    what = f"have the same id {first}" if first == second else f"({first} and {second}) have the same fingerprint"
    raise ExportError(f"table {table.name!r}: vocabulary: rows {pair[0]} and {pair[1]} {what}")


def _first_duplicate(ids: npt.NDArray[np.int64]) -> tuple[int, int] | None:
    order = np.argsort(ids, kind="stable")
    same = np.flatnonzero(ids[order[1:]] == ids[order[:-1]])
    return (int(order[same[0]]), int(order[same[0] + 1])) if len(same) else None


def access_count_tensors(table: AnyTable, counts: npt.NDArray[Any]) -> dict[str, npt.NDArray[np.uint32]]:
    """Make the tensors of a file of access counts: whole numbers [num_embeddings] in [0, 2^32). Raises ExportError."""
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
    return {COUNTS_TENSOR: np.ascontiguousarray(array, dtype=np.uint32)}


def write_access_counts(
    path: Path,
    lookups: Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]],
    num_embeddings: Mapping[str, int] | None = None,
) -> None:
    """Write how often rows were looked up, as `read_access_counts` reads it; whole or not at all.

    Numbers are rounded, to 1 at least. If one is too large for uint32, all of all tables are divided by the same.

    Args:
        path: of the safetensors file.
        lookups: by table, rows that were seen, integers [n], none twice, and how often each: numbers [n] above 0.
        num_embeddings: of the tables that were counted; who reads the file for a table of another size is told.

    Raises:
        OSError: the file can't be written.
    """
    most = max((float(counts.max()) for _, counts in lookups.values() if counts.size), default=1.0)
    scale = min(1.0, MAX_ACCESS_COUNT / most)
    tensors: dict[str, npt.NDArray[Any]] = {}
    for table, (rows, counts) in lookups.items():
        told = np.clip(np.rint(np.multiply(counts, scale, dtype=np.float64)), 1, MAX_ACCESS_COUNT)
        tensors |= {
            f"{table}{ROWS_SUFFIX}": np.ascontiguousarray(rows, dtype=np.uint32),
            f"{table}{COUNTS_SUFFIX}": told.astype(np.uint32),
        }
    for table, size in (num_embeddings or {}).items():
        tensors[f"{table}{SIZE_SUFFIX}"] = np.array([size], np.int64)
    part = path.with_name(f"{path.name}.part")
    safetensors.numpy.save_file(tensors, part)
    part.replace(path)


def read_access_counts(path: Path, spec: ModelSpec) -> dict[str, npt.NDArray[Any]]:
    """Return how often rows of a model's tables were looked up, by table as features see it. Raises ExportError.

    `path` is a folder with a `<table>.npy` of whole numbers [num_embeddings] for each table with counts, which are
    mapped; or a safetensors file that has, for each, a tensor `<table>` of the same, or `<table>/rows` and
    `<table>/counts` of the rows that were seen, as `write_access_counts` writes them. What is named after a slice of a
    table is the table's: every slice is looked up as often, so one of them is enough. Of a table that is divided by
    quotient_remainder there may be counts of its parts, by their names: which ids they were of can't be told. Counts of
    parts by popularity are refused, since other versions have other rows there.
    """
    counted = _Counted.of(spec)
    found = _read_folder(path) if path.is_dir() else _read_file(path, counted)
    counted.check(path, found)
    for name in [name for name in found if counted.tables[name].name != name]:
        found.setdefault(counted.tables[name].name, found.pop(name))
    if not found:
        raise ExportError(f"{path}: no access counts; expected <table>.npy for some of {cut(counted.names)}")
    return found


class _Counted(NamedTuple):
    """What access counts may be of.

    Attributes:
        tables: by its name or that of a slice, each table with counts.
        parts: by its name, the table that a part is of whose rows only its own version knows.
        names: of the tables as features see them.
    """

    tables: Mapping[str, AnyTable]
    parts: Mapping[str, str]
    names: list[str]

    @classmethod
    def of(cls, spec: ModelSpec) -> _Counted:
        seen: dict[str, AnyTable] = {table.name: table for table in spec.logical_tables}
        tables: dict[str, AnyTable] = {one.name: table for table in spec.tables for one in table.slices}
        tables |= seen
        parts: dict[str, str] = {}
        for table in spec.divided:
            if table.by == "popularity":
                parts |= {part: table.name for part in table.parts if part != table.name}
        return cls({name: table for name, table in tables.items() if name not in parts}, parts, sorted(seen))

    def check(self, path: Path, names: Iterable[str]) -> None:
        """Raise ExportError for what is no table, or a part whose rows are the table's in an order of its own."""
        for name in names:
            if name in self.parts:
                raise ExportError(
                    f"{path}: access counts of {name!r}, a part of table {self.parts[name]!r}: which rows of the table "
                    "these are its version alone knows; `shardrank counts --snapshot` writes them as the table's"
                )
        if unknown := sorted(set(names) - set(self.tables)):
            raise ExportError(f"{path}: access counts of {cut(unknown)}; the model's tables are {cut(self.names)}")


def count_trace(path: Path, table: AnyTable) -> npt.NDArray[np.uint32]:
    """Count the lookups of a trace: uint32 [num_embeddings], how often each row is in it.

    `path` is an .npy file of row numbers, integers [n], in any order; it is mapped, and read once.

    Raises:
        ExportError: it can't be read, has other numbers, more than 2^32 - 1 of them, or rows outside the table.
    """
    rows = map_npy(path)
    if rows.ndim != 1 or rows.dtype.kind not in "iu" or rows.size > MAX_ACCESS_COUNT:
        told = f"{rows.dtype} {list(rows.shape)}"
        raise ExportError(f"{path}: a trace of table {table.name!r} must be integers [n], n below 2^32; got {told}")
    counts = np.zeros(table.num_embeddings, np.uint32)
    for first in range(0, rows.size, _PIECE_VALUES):
        piece = rows[first : first + _PIECE_VALUES]
        low, high = int(piece.min()), int(piece.max())
        if low < 0 or high >= table.num_embeddings:
            row = low if low < 0 else high
            raise ExportError(f"{path}: row {row} is not within table {table.name!r} of {table.num_embeddings} rows")
        np.add.at(counts, piece.astype(np.int64, copy=False), np.uint32(1))
    return counts


def _read_folder(path: Path) -> dict[str, npt.NDArray[Any]]:
    found: dict[str, npt.NDArray[Any]] = {}
    for file in sorted(path.glob("*.npy")):
        found[file.stem] = map_npy(file)
    return found


def map_npy(file: Path) -> npt.NDArray[Any]:
    """Map the array of an .npy file. Raises ExportError if it can't be read, or holds objects."""
    try:
        return np.lib.format.open_memmap(file, mode="r")  # Maps numbers, and never takes a pickle.
    except (OSError, ValueError, EOFError) as error:
        raise ExportError(f"{file}: not an array that can be read: {cut(error)}") from error


def _read_file(path: Path, counted: _Counted) -> dict[str, npt.NDArray[Any]]:
    tables = counted.tables
    try:
        header = read_header(path)
        counted.check(path, {name.removesuffix(_suffix(name)) for name in header})
        # By the header, before memory is taken for it.
        longest = max((info.shape[0] if info.shape else 1 for info in header.values()), default=0)
        if longest > (limit := max(table.num_embeddings for table in tables.values())):
            raise ExportError(f"{path}: a tensor of {longest} numbers; the largest table has {limit} rows")
        tensors = load_numpy(path, header)
    except SnapshotCorruptError as error:
        raise ExportError(str(error)) from error
    found: dict[str, npt.NDArray[Any]] = {}
    for name, tensor in tensors.items():
        suffix = _suffix(name)
        table = name.removesuffix(suffix)
        if suffix == ROWS_SUFFIX:
            found[table] = _spread(path, tables[table], table, tensor, tensors.get(f"{table}{COUNTS_SUFFIX}"))
        elif suffix == SIZE_SUFFIX:
            _check_size(path, tables[table], table, tensor)
        elif not suffix:
            found[name] = tensor
        elif f"{table}{ROWS_SUFFIX}" not in tensors:
            raise ExportError(f"{path}: has {cut(repr(name))} without the rows that it is of")
    return found


def _suffix(name: str) -> str:
    """Return what a tensor of a file of access counts has behind the table's name; "" if it is the table's counts."""
    return next((one for one in (ROWS_SUFFIX, COUNTS_SUFFIX, SIZE_SUFFIX) if name.endswith(one)), "")


def _check_size(path: Path, spec: AnyTable, table: str, size: npt.NDArray[Any]) -> None:
    if size.shape != (1,) or size.dtype.kind not in "iu" or int(size[0]) != spec.num_embeddings:
        told = int(size[0]) if size.shape == (1,) and size.dtype.kind in "iu" else f"{size.dtype} {list(size.shape)}"
        raise ExportError(
            f"{path}: access counts of a table {table!r} whose num_embeddings was {told}; here it is "
            f"{spec.num_embeddings}. Counted in a version that was pruned, they are told by the table's rows with "
            "`shardrank counts --snapshot`"
        )


def _spread(
    path: Path, spec: AnyTable, table: str, rows: npt.NDArray[Any], counts: npt.NDArray[Any] | None
) -> npt.NDArray[np.uint32]:
    """Return uint32 [num_embeddings] from those that were seen."""
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
