"""Make, check and read the files with one value a row: a table's vocabulary and its access counts.

A vocabulary is the list of ids whose position is their row: `ids`, int64 [V]. For string ids these are fingerprints,
and the strings lie beside them: `strings`, uint8, the UTF-8 of all strings one after the other, and `offsets`, int64
[V + 1].

Access counts, `counts`, U32 [num_embeddings], say how often each row was looked up, in training or in serving. Only the
ratios matter, between rows and between tables: all are of one time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.access_counts import MAX_ACCESS_COUNT
from loader.errors import ExportError, SnapshotCorruptError
from loader.snapshot.manifest import MAX_STRING_ID_BYTES
from loader.snapshot.tables import AnyTable, VocabularyMapping, fingerprint_strings
from loader.snapshot.tensor_files import TensorInfo, expect_at_most, expect_tensors, length_of

Vocabulary = Sequence[int] | Sequence[str] | npt.NDArray[Any]

COUNTS_TENSOR = "counts"


def vocabulary_tensors(table: AnyTable, vocabulary: Vocabulary) -> dict[str, npt.NDArray[Any]]:
    """Make the tensors of a vocabulary file: ids in row order, at most `num_embeddings`; rows beyond them have no id.

    Raises ExportError for a wrong type, a negative or too large an id, too many ids, a duplicate, or two strings whose
    fingerprints collide.
    """
    where = f"table {table.name!r}: vocabulary"
    if not 1 <= len(vocabulary) <= table.num_embeddings:
        raise ExportError(f"{where} of {len(vocabulary)} ids; allowed: 1 to num_embeddings {table.num_embeddings}")
    if not id_type_is_string(table):
        try:
            array = np.asarray(vocabulary)
        except (ValueError, OverflowError) as error:
            raise ExportError(f"{where}: {error}") from error
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ExportError(f"{where}: expected integers [V] below 2^63, got {array.dtype} {list(array.shape)}")
        if (bad := array.min()) < 0 or (bad := array.max()) > np.iinfo(np.int64).max:
            raise ExportError(f"{where}: id {bad} is not in [0, 2^63)")
        ids = np.ascontiguousarray(array, dtype=np.int64)
        _refuse_duplicates(where, ids, ids)
        return {"ids": ids}
    given = vocabulary.tolist() if isinstance(vocabulary, np.ndarray) else vocabulary
    strings = [text for text in given if isinstance(text, str)]
    if len(strings) != len(given):
        raise ExportError(f"{where}: expected strings (id_type string)")
    try:
        encoded = [text.encode() for text in strings]
    except UnicodeEncodeError as error:
        raise ExportError(f"{where}: {error.object!r} is not valid Unicode") from error
    if (longest := max(map(len, encoded))) > MAX_STRING_ID_BYTES:
        raise ExportError(f"{where}: an id of {longest} bytes of UTF-8; at most {MAX_STRING_ID_BYTES} are allowed")
    ids = fingerprint_strings(strings)
    _refuse_duplicates(where, ids, strings)
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    return {"ids": ids, "strings": np.frombuffer(b"".join(encoded), np.uint8), "offsets": offsets}


def id_type_is_string(table: AnyTable) -> bool:
    """Tells whether the table's vocabulary is of strings."""
    return isinstance(table.id_mapping, VocabularyMapping) and table.id_mapping.id_type == "string"


def check_vocabulary_header(table: AnyTable, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise SnapshotCorruptError if dtypes or shapes in a vocabulary file do not fit the table."""
    length, is_string = length_of(tensors, "ids"), id_type_is_string(table)
    if "ids" in tensors and not 1 <= length <= table.num_embeddings:
        raise SnapshotCorruptError(f"{path}: {length} ids; allowed: 1 to num_embeddings {table.num_embeddings}")
    expected: dict[str, tuple[str, tuple[int, ...]]] = {"ids": ("I64", (length,))}
    if is_string:
        expected |= {"strings": ("U8", (length_of(tensors, "strings"),)), "offsets": ("I64", (length + 1,))}
    expect_tensors(path, tensors, expected)
    if is_string:
        # A file of strings is read into memory.
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


def _refuse_duplicates(where: str, ids: npt.NDArray[np.int64], names: Sequence[str] | npt.NDArray[Any]) -> None:
    if (pair := _first_duplicate(ids)) is None:
        return
    first, second = (str(names[row]) if isinstance(names, np.ndarray) else repr(names[row]) for row in pair)
    what = f"have the same id {first}" if first == second else f"({first} and {second}) have the same fingerprint"
    raise ExportError(f"{where}: rows {pair[0]} and {pair[1]} {what}")


def _first_duplicate(ids: npt.NDArray[np.int64]) -> tuple[int, int] | None:
    order = np.argsort(ids, kind="stable")
    same = np.flatnonzero(ids[order[1:]] == ids[order[:-1]])
    return (int(order[same[0]]), int(order[same[0] + 1])) if len(same) else None


def access_count_tensors(table: AnyTable, counts: npt.NDArray[Any]) -> dict[str, npt.NDArray[np.uint32]]:
    """Make the tensors of a file of access counts: whole numbers [num_embeddings] in [0, 2^32). Raises ExportError."""
    array, where = np.asarray(counts), f"table {table.name!r}: access counts"
    if array.dtype.kind not in "iu" or array.shape != (table.num_embeddings,):
        expected = f"expected integers [{table.num_embeddings}], got {array.dtype} {list(array.shape)}"
        raise ExportError(f"{where}: {expected}")
    outside = (array < 0) | (array > MAX_ACCESS_COUNT)
    if outside.any():
        row = int(outside.argmax())
        raise ExportError(
            f"{where}: row {row} has {array[row]}, which is not in [0, 2^32); only the ratios matter, so all counts "
            "may be divided by the same number"
        )
    return {COUNTS_TENSOR: np.ascontiguousarray(array, dtype=np.uint32)}
