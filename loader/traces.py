"""Count the ids that features were asked for, from traces.

A trace is what a product asked, one lookup after the other: an .npy file of one feature's ids, or a table with a column
for each feature, as CSV (with a header) or Parquet (with pyarrow, the extra `parquet`). A column that is not of whole
numbers is of string ids, which count by the fingerprint that serving takes them by.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.access_counts import MAX_IDS, AccessCounter, AccessCounts, Int64Array, merged_by_table
from loader.errors import TraceError, cut
from loader.snapshot.manifest import MAX_STRING_ID_BYTES
from loader.snapshot.tables import fingerprint_strings

MAX_DISTINCT_IDS = 200_000_000
"""Of one feature: 3.2 GB of ids and counts, and about three times that while they are counted."""
MAX_DISTINCT_TEXTS = 20_000_000
"""Of one column of a CSV file, whose cells are texts until all are seen: about 2 GB."""
_PIECE_VALUES = 1 << 22
_PIECE_LINES = 1 << 16
_PARQUET_ROWS = 1 << 18
# What programs write for ids that they took for floats, and, among whole numbers, for those that are missing: as
# strings all of a column would be other ids.
_FLOAT = re.compile(r"[+-]?(\d+\.\d*|\.\d+)([eE][+-]?\d+)?")
_MISSING = re.compile(r"[+-]?(nan|inf|infinity)|null|none|<na>|n/a|-+", re.IGNORECASE)


class _IdCounter:
    """Counts the ids of one feature exactly. `where` they are from is named in errors."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._counter = AccessCounter(MAX_DISTINCT_IDS, _PIECE_VALUES)

    def add(self, ids: npt.NDArray[Any], counts: npt.NDArray[Any] | int = 1) -> None:
        if not ids.size:
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= MAX_IDS:
            raise TraceError(f"{self._where}: id {low if low < 0 else high} is not in [0, 2^63)")
        self._counter.add(ids.astype(np.int64, copy=False), counts)
        if self._counter.is_full:
            self.result()

    def result(self) -> AccessCounts:
        """Return what was counted. Raises TraceError if there are more than `MAX_DISTINCT_IDS` different ids."""
        counts = self._counter.fold()
        if not self._counter.is_exact:
            raise TraceError(f"{self._where}: more than {MAX_DISTINCT_IDS} different ids; count a sample of the trace")
        return counts


def count_values(where: str, values: npt.NDArray[Any]) -> AccessCounts:
    """Count the values of an array of ids [m], which may be mapped: it is read once, piece by piece.

    Raises:
        TraceError: it is not of whole numbers [m] in [0, 2^63), or has more than `MAX_DISTINCT_IDS` different ones.
    """
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise TraceError(f"{where}: ids must be whole numbers [n]; got {values.dtype} {list(values.shape)}")
    counter = _IdCounter(where)
    for first in range(0, values.size, _PIECE_VALUES):
        counter.add(values[first : first + _PIECE_VALUES])
    return counter.result()


def read_traces(traces: Iterable[str], features: Collection[str]) -> dict[str, AccessCounts]:
    """Count the ids of features in traces.

    Args:
        traces: each `FEATURE=FILE.npy`, or the path of a `.csv` or `.parquet` file whose columns are features; other
            columns are left alone. A feature that several traces have is counted over all of them.
        features: of the model.

    Raises:
        TraceError: a file that can't be read, or is of another kind; a feature that the model does not have, no column
            that is a feature; an id that is negative or too large; too many different ids.
    """
    return merged_by_table(_read(trace, features) for trace in traces)


def _read(trace: str, features: Collection[str]) -> Mapping[str, AccessCounts]:
    suffix = Path(trace).suffix.lower()
    if suffix in (".csv", ".parquet"):
        return (_read_csv if suffix == ".csv" else _read_parquet)(Path(trace), features)
    feature, _, file = trace.partition("=")
    if not file or Path(file).suffix != ".npy":
        raise TraceError(f"trace {cut(trace)!r}: expected FEATURE=FILE.npy, or a file .csv or .parquet")
    if feature not in features:
        raise TraceError(f"trace {cut(trace)!r}: no feature {cut(feature)!r}; the model has {cut(sorted(features))}")
    return {feature: count_values(f"{file}, feature {feature!r}", map_npy(Path(file)))}


def map_npy(file: Path) -> npt.NDArray[Any]:
    """Map the array of an .npy file. Raises TraceError if it can't be read, or holds objects."""
    try:
        return np.lib.format.open_memmap(file, mode="r")  # Maps numbers, and never takes a pickle.
    except (OSError, ValueError, EOFError) as error:
        raise TraceError(f"{file}: not an array that can be read: {cut(error)}") from error


def _wanted(path: Path, columns: Collection[str], features: Collection[str]) -> list[str]:
    wanted = [name for name in columns if name in features]
    if not wanted:
        raise TraceError(
            f"{path}: none of its columns {cut(list(columns))} is a feature; these are {cut(sorted(features))}"
        )
    if len(set(wanted)) != len(wanted):
        raise TraceError(f"{path}: a column is there twice: {cut(wanted)}")
    return wanted


def _read_csv(path: Path, features: Collection[str]) -> dict[str, AccessCounts]:
    """Count cells as texts, then what they mean: whether a column is of numbers is known once all of it was seen."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            header = next(lines, [])
            wanted = _wanted(path, header, features)
            at = {name: header.index(name) for name in wanted}
            texts: dict[str, Counter[str]] = {name: Counter() for name in wanted}
            while piece := list(islice(lines, _PIECE_LINES)):
                if any(len(line) != len(header) for line in piece):
                    number = next(line for line in piece if len(line) != len(header))
                    raise TraceError(f"{path}: a line of {len(number)} cells; the header has {len(header)}")
                columns = list(zip(*piece, strict=True))
                for name, seen in texts.items():
                    seen.update(columns[at[name]])
                    if len(seen) > MAX_DISTINCT_TEXTS:
                        raise TraceError(
                            f"{path}: column {name!r} has more than {MAX_DISTINCT_TEXTS} different cells; take Parquet"
                        )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: can't be read: {cut(error)}") from error
    return {name: _of_texts(f"{path}, column {name!r}", seen) for name, seen in texts.items()}


def _of_texts(where: str, seen: Counter[str]) -> AccessCounts:
    """Count ids by their texts; an empty one is no id."""
    seen.pop("", None)
    texts, counts = list(seen), np.fromiter(seen.values(), np.int64, len(seen))
    if texts and len(longest := max(texts, key=len)) > MAX_STRING_ID_BYTES:
        raise TraceError(f"{where}: an id of {len(longest)} characters; at most {MAX_STRING_ID_BYTES} are allowed")
    counter = _IdCounter(where)
    numbers = [text.isascii() and text.removeprefix("-").isdecimal() for text in texts]
    if all(numbers):
        try:
            counter.add(np.array([int(text) for text in texts], np.int64), counts)
        except OverflowError as error:
            raise TraceError(f"{where}: an id is not in [0, 2^63)") from error
    else:
        has_numbers = any(numbers)
        for text in texts:
            if _FLOAT.fullmatch(text) or (has_numbers and _MISSING.fullmatch(text)):
                raise TraceError(
                    f"{where}: {text!r} is neither a whole number nor a string; where there is no id, leave it empty"
                )
        counter.add(fingerprint_strings(texts), counts)
    return counter.result()


def _read_parquet(path: Path, features: Collection[str]) -> dict[str, AccessCounts]:
    """Count columns of whole numbers, of strings, or of lists of either: a list is a bag."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise TraceError(f"{path}: Parquet needs pyarrow: pip install 'shardrank[parquet]'") from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        wanted = _wanted(path, file.schema_arrow.names, features)
        counters = {name: _IdCounter(f"{path}, column {name!r}") for name in wanted}
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=wanted):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                counters[name].add(*_arrow_counts(pyarrow, f"{path}, column {name!r}", column))
    except (OSError, pyarrow.ArrowException) as error:
        raise TraceError(f"{path}: can't be read: {cut(error)}") from error
    return {name: counter.result() for name, counter in counters.items()}


def _arrow_counts(pyarrow: Any, where: str, column: Any) -> tuple[npt.NDArray[Any], Int64Array]:
    types = pyarrow.types
    while types.is_list(column.type) or types.is_large_list(column.type):
        column = column.flatten()
    column = column.drop_null()
    if types.is_integer(column.type):
        return np.unique(column.to_numpy(zero_copy_only=False), return_counts=True)
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not (types.is_string(column.type) or types.is_large_string(column.type)):
        raise TraceError(f"{where}: ids must be whole numbers or strings, or lists of them; got {column.type}")
    seen = column.value_counts()
    return fingerprint_strings(seen.field("values").to_pylist()), seen.field("counts").to_numpy().astype(np.int64)
