"""Divide a table's rows among its parts: which rows stay, which part each is in, and the rows of each part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loader.access_counts import MAX_ACCESS_COUNT
from loader.errors import ExportError
from loader.snapshot.codecs import Float32Array
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.row_classes import RowClasses
from loader.snapshot.row_source import RowSource
from loader.snapshot.tables import AnyTable, DividedTable, TableSpec

Counts = Mapping[str, npt.NDArray[np.integer[Any]]]
"""How often each row was looked up, [num_embeddings], by the name of the table as features see it."""

# Rows of a source that are looked through at a time.
_CHUNK_ROWS = 1 << 16


def _check_counts(table: str, counts: npt.NDArray[Any], rows: int) -> None:
    if counts.shape != (rows,) or counts.dtype.kind not in "iu":
        shape = f"{counts.dtype} {list(counts.shape)}"
        raise ExportError(f"table {table!r}: counts are {shape}, expected whole numbers [{rows}]")
    if counts.dtype.kind == "i" and int(counts.min()) < 0:
        raise ExportError(f"table {table!r}: row {int(counts.argmin())} has count {counts.min()}, which is below 0")


def rows_with_share(lookups: npt.NDArray[np.integer[Any]], share: float) -> int:
    """Return how many of the first rows have at least so much of all lookups [r]; all, of a share of 1."""
    if share >= 1 or not lookups.size:
        return lookups.size
    passed = np.cumsum(lookups, dtype=np.uint64)
    return min(int(np.searchsorted(passed, share * int(passed[-1]))) + 1, lookups.size)


def kept_rows(table: str, counts: npt.NDArray[np.integer[Any]], keep_share: float = 1.0) -> int:
    """Return how many of the hottest rows have `keep_share` of all lookups; with 1, all that were looked up at all.

    Raises ExportError for a share that is not in (0, 1], a table of which nothing would be left, or what is no count.
    """
    if not 0 < keep_share <= 1:
        raise ExportError(f"keep_share: {keep_share:g} is not above 0 and at most 1")
    _check_counts(table, counts, counts.size)
    if not counts.any():
        raise ExportError(f"table {table!r}: no row of it was looked up: pruned, it would be empty")
    return rows_with_share(np.sort(counts[counts > 0])[::-1], keep_share)


def choose_rows(
    table: str, counts: npt.NDArray[np.integer[Any]], keep_share: float, also: npt.NDArray[np.integer[Any]] | None
) -> npt.NDArray[np.bool_]:
    """Return which rows of a table stay when it is pruned: bool [num_embeddings]. Raises ExportError as `kept_rows`.

    The hottest rows with `keep_share` of the lookups `counts` stay, and those that are above 0 in `also`; both
    [num_embeddings].
    """
    chosen = np.zeros(counts.size, np.bool_) if also is None else also > 0
    if counts.any() or not chosen.any():
        chosen[_hottest_first(counts)[: kept_rows(table, counts, keep_share)]] = True
    return chosen


def _hottest_first(
    counts: npt.NDArray[np.integer[Any]], is_kept: npt.NDArray[np.bool_] | None = None
) -> npt.NDArray[np.intp]:
    """Return the rows by falling counts, those that are kept before all others; of equals the first is the hotter."""
    falling = -counts.astype(np.int64)
    return np.argsort(falling, kind="stable") if is_kept is None else np.lexsort((falling, ~is_kept))


class DividedRows(NamedTuple):
    """Sources of all stored tables' rows, classes of those that have classes, and counts as far as they were given."""

    rows: Mapping[str, RowSource]
    row_classes: Mapping[str, RowClasses]
    access_counts: Mapping[str, npt.NDArray[np.uint32]]


def divide_rows(
    spec: ModelSpec,
    rows: Mapping[str, RowSource],
    counts: Counts,
    *,
    row_classes: Mapping[str, RowClasses] | None = None,
    kept: Mapping[str, npt.NDArray[np.bool_]] | None = None,
) -> DividedRows:
    """Make the parts' rows from those of the tables that they are parts of.

    Args:
        spec: of the model, compiled.
        rows: by table, as features see it. Parts that are trained as such (narrower ones, quotient and remainder) are
            given themselves, by name, in the order of their rows. Of a table whose only part has its name, a source
            with as many rows as the table is the table's.
        counts: of the tables whose rows are divided by popularity.
        row_classes: for those that training has divided already.
        kept: of tables that are pruned, the rows that stay, bool [num_embeddings]; by default the hottest do.

    Raises ExportError where rows, counts or classes are missing, of another table or another size; or rows of a table
    are given of which nothing is made.
    """
    trained_classes, kept = row_classes or {}, kept or {}
    sources, made = dict[str, RowSource](), dict[str, RowClasses]()
    access_counts = dict[str, npt.NDArray[np.uint32]]()
    names = {table.name for table in spec.logical_tables}
    if unknown := sorted(set(counts) - names):
        raise ExportError(f"counts: unknown tables {unknown}; the model has {sorted(names)}")
    needed = names - {table.name for table in spec.divided if rows.keys() >= set(table.parts)}
    if unused := sorted(rows.keys() - needed - {table.name for table in spec.tables}):
        raise ExportError(f"rows: {unused} are no tables of the model, or their parts are given themselves")
    if unknown := sorted(trained_classes.keys() - {table.name for table in spec.divided if table.num_classes > 1}):
        raise ExportError(f"row_classes: of tables {unknown}, which are not divided by popularity")
    for table in spec.logical_tables:
        if (table_counts := counts.get(table.name)) is not None:
            _check_counts(table.name, table_counts, table.num_embeddings)
        parts, class_of_row = spec.parts(table), None
        if isinstance(table, DividedTable) and table.num_classes > 1:
            classes = trained_classes.get(table.name)
            classes = classes or classes_by_counts(table, parts, table_counts, kept.get(table.name))
            classes.check(table, parts)
            made[table.name], class_of_row = classes, classes.classes()
        for number, part in enumerate(parts):
            source = rows.get(part.name)
            if source is not None and part.name == table.name and isinstance(table, DividedTable) and table.pruned:
                # Rows of the part, or those of the table that the part is cut out of.
                source = source if part.num_embeddings == source.num_embeddings != table.num_embeddings else None
            if source is None:
                if (table_rows := rows.get(table.name)) is None:
                    raise ExportError(f"rows: missing for table {table.name!r}; given are {sorted(rows)}")
                if class_of_row is None or table_rows.embedding_dim != part.embedding_dim:
                    raise ExportError(f"rows: missing for part {part.name!r}, which is not cut out of {table.name!r}")
                if table_rows.num_embeddings != table.num_embeddings:
                    size = f"{table_rows.num_embeddings} rows, num_embeddings is {table.num_embeddings}"
                    raise ExportError(f"table {table.name!r}: the source has {size}")
                source = _PartRows(table_rows, class_of_row, number, part.num_embeddings)
            sources[part.name] = source
        if table_counts is not None:
            access_counts |= part_counts(table, parts, table_counts, class_of_row)
    return DividedRows(sources, made, access_counts)


def classes_by_counts(
    table: DividedTable,
    parts: Sequence[TableSpec],
    counts: npt.NDArray[np.integer[Any]] | None,
    is_kept: npt.NDArray[np.bool_] | None = None,
) -> RowClasses:
    """Return classes with the hottest rows in the first part, and so on; of equals the first is the hotter.

    `is_kept`, bool [num_embeddings], says which rows of a pruned table stay. Raises ExportError without counts.
    """
    if counts is None:
        raise ExportError(f"table {table.name!r} is divided by popularity: counts of its rows are needed")
    order = _hottest_first(counts, is_kept)
    classes = np.empty(table.num_embeddings, np.uint8)
    sizes = table.class_rows(parts)
    classes[order] = np.repeat(np.arange(len(sizes), dtype=np.uint8), sizes)
    return RowClasses.of(classes, len(sizes))


def _as_uint32(counts: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    return np.asarray(np.minimum(counts, MAX_ACCESS_COUNT), np.uint32)


def part_counts(
    table: AnyTable,
    parts: Sequence[TableSpec],
    counts: npt.NDArray[np.integer[Any]],
    classes: npt.NDArray[np.uint8] | None,
) -> dict[str, npt.NDArray[np.uint32]]:
    """Return how often the rows of each part are looked up, uint32 [its num_embeddings], by name.

    `counts` and `classes` are of the table's rows, [num_embeddings]; no classes for a table with one.
    """
    if not isinstance(table, DividedTable) or (classes is None and table.buckets is None):
        return {parts[0].name: _as_uint32(counts)}
    if table.buckets is not None:
        rows = np.divmod(np.arange(counts.size), table.buckets)
        return {
            part.name: _as_uint32(np.bincount(of_part, counts, part.num_embeddings))
            for part, of_part in zip(parts, rows, strict=True)
        }
    by_part = [counts[classes == number].astype(np.uint64) for number in range(len(parts))]
    if table.pruned:
        by_part[-1] = np.append(by_part[-1], counts[classes == len(parts)].sum(dtype=np.uint64))
    return {part.name: _as_uint32(of_part) for part, of_part in zip(parts, by_part, strict=True)}


def chosen_rows(table: str, source: RowSource, chosen: npt.NDArray[np.bool_]) -> RowSource:
    """Return some rows of a table with keys, bool [n], in order. Raises ExportError for another number of rows."""
    if source.num_embeddings != chosen.size:
        raise ExportError(f"table {table!r}: {source.num_embeddings} rows, but {chosen.size} keys")
    return _PartRows(source, (~chosen).view(np.uint8), 0, int(chosen.sum()))


class _PartRows(RowSource):
    """The rows of one class of another source, in order; those of a pruned table's last part end with a mean."""

    def __init__(self, source: RowSource, classes: npt.NDArray[np.uint8], number: int, num_rows: int) -> None:
        super().__init__(num_rows, source.embedding_dim)
        self.quantised_as = source.quantised_as
        self._source, self._classes, self._number = source, classes, number
        in_class = np.add.reduceat(classes == number, np.arange(0, classes.size, _CHUNK_ROWS), dtype=np.int64)
        self._chunk_ends = np.cumsum(in_class)

    def blocks(self, first_row: int, max_rows: int) -> Iterator[Float32Array]:
        """Yield the rows of the class among each chunk of the source's; as of `RowSource`."""
        end = min(first_row + max_rows, self.num_embeddings)
        row, chunk = first_row, int(np.searchsorted(self._chunk_ends, first_row, side="right"))
        while row < end and chunk < self._chunk_ends.size:
            before = int(self._chunk_ends[chunk - 1]) if chunk else 0
            rows = self._of_class(chunk, self._number)[row - before : end - before]
            row, chunk = row + len(rows), chunk + 1
            if len(rows):
                yield rows
        if row < end:
            total, count = np.zeros(self.embedding_dim), 0
            for chunk in range(self._chunk_ends.size):
                rows = self._of_class(chunk, self._number + 1)
                total += rows.sum(axis=0, dtype=np.float64)
                count += len(rows)
            yield (total / max(count, 1)).astype(np.float32)[None, :]

    def fingerprint(self) -> str:
        return f"{self._source.fingerprint()} {hashlib.sha256(self._classes.data).hexdigest()} {self._number}"

    def _of_class(self, chunk: int, number: int) -> Float32Array:
        first = chunk * _CHUNK_ROWS
        is_of = self._classes[first : first + _CHUNK_ROWS] == number
        chosen, start = [np.empty((0, self.embedding_dim), np.float32)], 0
        # A block is valid until the next one: what is chosen of it is copied at once.
        for block in self._source.blocks(first, is_of.size):
            chosen.append(block[is_of[start : start + len(block)]])
            start += len(block)
        return np.concatenate(chosen)
