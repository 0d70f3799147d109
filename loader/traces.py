"""Count the ids that features were asked for, from traces.

A trace is what a product asked, one lookup after the other: an .npy file of one feature's ids, or a table with a column
for each feature, as CSV (with a header) or Parquet (with pyarrow, the extra `parquet`). A column that is not of whole
numbers is of string ids, which count by the fingerprint that serving takes them by.
"""

from __future__ import annotations

import csv
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.access_counts import MAX_IDS, AccessCounter, AccessCounts, merged_by_table
from loader.errors import TraceError, cut, nearest
from loader.snapshot.manifest import MAX_STRING_ID_BYTES
from loader.snapshot.tables import fingerprint_strings

logger = logging.getLogger(__name__)

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
        self.where = where
        self._counter = AccessCounter(MAX_DISTINCT_IDS, _PIECE_VALUES)

    def add(self, ids: npt.NDArray[Any], counts: npt.NDArray[Any] | int = 1) -> None:
        """Count ids [n], whole numbers. Raises TraceError if one is not in [0, 2^63)."""
        if not ids.size:
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= MAX_IDS:
            raise TraceError(f"{self.where}: id {low if low < 0 else high} is not in [0, 2^63)")
        self._counter.add(ids.astype(np.int64, copy=False), counts)
        if self._counter.is_full:
            self.result()

    def add_texts(self, seen: Mapping[str, int], line_of: Callable[[str], int], *, is_of_numbers: bool) -> None:
        """Count ids by the cells of a CSV column: whether these are numbers is known once all were seen.

        Raises TraceError for a cell that is no id, with its line; in a column `is_of_numbers` a text is none.
        """
        texts, counts = [text for text in seen if text], np.array([seen[text] for text in seen if text], np.int64)
        numbers = [text.isascii() and text.removeprefix("-").isdecimal() for text in texts]
        for text, is_number in zip(texts, numbers, strict=True):
            if len(text) > MAX_STRING_ID_BYTES:
                problem = f"an id of {len(text)} characters; at most {MAX_STRING_ID_BYTES} are allowed"
            elif is_number:
                continue
            elif _FLOAT.fullmatch(text) or (any(numbers) and _MISSING.fullmatch(text)):
                problem = f"{text!r} is neither a whole number nor a string; where there is no id, leave it empty"
            elif is_of_numbers:
                problem = f"{cut(text)!r} is a text in a column of whole numbers"
            else:
                continue
            raise TraceError(f"{self.where}, line {line_of(text)}: {problem}")
        # As objects, numbers of any length are compared with what is allowed.
        ids = np.array([int(text) for text in texts], object) if all(numbers) else fingerprint_strings(texts)
        self.add(ids, counts)

    def result(self) -> AccessCounts:
        """Return what was counted. Raises TraceError if there are more than `MAX_DISTINCT_IDS` different ids."""
        counts = self._counter.fold()
        if not self._counter.is_exact:
            raise TraceError(f"{self.where}: more than {MAX_DISTINCT_IDS} different ids; count a sample of the trace")
        return counts


def count_values(where: str, values: npt.NDArray[Any]) -> AccessCounts:
    """Count the values of an array of ids [m], which may be mapped: it is read once, piece by piece.

    Raises TraceError if it is not of whole numbers [m] in [0, 2^63), or has more than `MAX_DISTINCT_IDS` different
    ones.
    """
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise TraceError(f"{where}: ids must be whole numbers [n]; got {values.dtype} {list(values.shape)}")
    counter = _IdCounter(where)
    for first in range(0, values.size, _PIECE_VALUES):
        counter.add(values[first : first + _PIECE_VALUES])
    return counter.result()


def read_traces(
    traces: Iterable[str], features: Collection[str], of_numbers: Collection[str] = ()
) -> dict[str, AccessCounts]:
    """Count the ids of a model's features in traces; those of features `of_numbers` are never strings.

    Each trace is `FEATURE=FILE.npy`, or the path of a `.csv` or `.parquet` file whose columns are features; of other
    columns a warning is logged. A feature that several traces have is counted over all of them.

    Raises TraceError for a file that can't be read, or is of another kind; a feature that the model does not have, no
    column that is a feature; an id that is negative or too large; too many different ids.
    """
    return merged_by_table(_read(trace, features, of_numbers) for trace in traces)


def _read(trace: str, features: Collection[str], of_numbers: Collection[str]) -> Mapping[str, AccessCounts]:
    suffix = Path(trace).suffix.lower()
    if suffix in (".csv", ".parquet"):
        counters = (_read_csv if suffix == ".csv" else _read_parquet)(Path(trace), features, of_numbers)
        return {name: counter.result() for name, counter in counters.items()}
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
    except Exception as error:  # NumPy evaluates the header as Python, whose parser raises more than it says.
        raise TraceError(f"{file}: not an array that can be read: {cut(error)}") from error


def _counters(path: Path, columns: Collection[str], features: Collection[str]) -> dict[str, _IdCounter]:
    names = [name for name in columns if name in features]
    if not names:
        limit = f"is a feature; these are {cut(sorted(features))}"
        raise TraceError(f"{path}: none of its columns {cut(list(columns))} {limit}")
    if len(set(names)) != len(names):
        raise TraceError(f"{path}: a column is there twice: {cut(names)}")
    if others := [name for name in columns if name not in features]:
        missing = set(features) - set(names)
        near = f"; features without a column are {nearest(others[0], missing)}" if missing else ""
        logger.warning("%s: columns that match no feature are left out: %s%s", path, cut(others), near)
    return {name: _IdCounter(f"{path}, column {name!r}") for name in names}


def _read_csv(path: Path, features: Collection[str], of_numbers: Collection[str]) -> dict[str, _IdCounter]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            header = next(lines, [])
            counters = _counters(path, header, features)
            texts: dict[str, Counter[str]] = {name: Counter() for name in counters}
            while piece := list(islice(lines, _PIECE_LINES)):
                if sizes := {len(line) for line in piece} - {len(header)}:
                    raise TraceError(f"{path}: a line of {min(sizes)} cells; the header has {len(header)}")
                for name, column in zip(header, zip(*piece, strict=True), strict=True):
                    if name in texts:
                        texts[name].update(column)
                for name, seen in texts.items():
                    if len(seen) > MAX_DISTINCT_TEXTS:
                        limit = f"more than {MAX_DISTINCT_TEXTS} different cells; take Parquet"
                        raise TraceError(f"{path}: column {name!r} has {limit}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: can't be read: {cut(error)}") from error
    for name, counter in counters.items():
        counter.add_texts(texts[name], partial(_line_of, path, name), is_of_numbers=name in of_numbers)
    return counters


def _line_of(path: Path, column: str, text: str) -> int:
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.DictReader(file)
        return next(lines.line_num for line in lines if line[column] == text)


def _read_parquet(path: Path, features: Collection[str], of_numbers: Collection[str]) -> dict[str, _IdCounter]:
    """Count columns of whole numbers, of strings, or of lists of either: a list is a bag."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise TraceError(f"{path}: Parquet needs pyarrow: pip install 'shardrank[parquet]'") from error
    types = pyarrow.types
    try:
        file = pyarrow.parquet.ParquetFile(path)
        counters = _counters(path, file.schema_arrow.names, features)
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=list(counters)):
            for name, bags in zip(batch.schema.names, batch.columns, strict=True):
                column = bags
                while types.is_list(column.type) or types.is_large_list(column.type):
                    column = column.flatten()
                if types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                seen = column.drop_null().value_counts()
                ids = seen.field("values")
                if types.is_integer(ids.type):
                    numbers = ids.to_numpy(zero_copy_only=False)
                elif name not in of_numbers and (types.is_string(ids.type) or types.is_large_string(ids.type)):
                    numbers = fingerprint_strings(ids.to_pylist())
                else:
                    limit = f"ids must be whole numbers, strings if the model has these, or lists; got {ids.type}"
                    raise TraceError(f"{counters[name].where}: {limit}")
                counters[name].add(numbers, seen.field("counts").to_numpy().astype(np.int64))
    except (OSError, pyarrow.ArrowException) as error:
        raise TraceError(f"{path}: can't be read: {cut(error)}") from error
    return counters
