"""How often rows, or raw ids, were looked up: the one form of access counts, the one counter, and the one file.

A file is safetensors whose metadata has `FORMAT` as `format`, with three tensors for each table: `<table>/rows`, U32
[n], ascending, `<table>/counts`, U32 [n], 1 or more, and `<table>/num_embeddings`, I64 [1]. Only the ratios of counts
matter, between rows and between tables: all are of one time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from loader.errors import ExportError, cut
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.tables import AnyTable

Int64Array: TypeAlias = npt.NDArray[np.int64]

FORMAT = "shardrank-access-counts/1"
MAX_ACCESS_COUNT = 2**32 - 1
MAX_IDS = 2**63
"""Raw ids, and keys made of a table and a row, are below it."""
_TENSORS = "rows", "counts", "num_embeddings"
_HOW_TO_MAKE = "`shardrank counts` writes one; docs/snapshot-format.md has its tensors"


@dataclass(frozen=True, slots=True, eq=False)
class AccessCounts:
    """How often keys were looked up: rows of a table, or raw ids. Sliced, it reads as an array uint32 [limit].

    Attributes:
        keys: int64 [n], ascending, none twice.
        counts: int64 or float64 [n], above 0.
        limit: keys are below it: the table's num_embeddings, or `MAX_IDS`.
    """

    keys: Int64Array
    counts: npt.NDArray[Any]
    limit: int = MAX_IDS

    @classmethod
    def from_lookups(cls, keys: Int64Array, counts: npt.NDArray[Any], limit: int = MAX_IDS) -> AccessCounts:
        """Add up lookups of keys [n], in any order, by how often each was: [n]."""
        order = np.argsort(keys, kind="stable")
        keys, counts = keys[order], counts[order]
        first = np.flatnonzero(np.diff(keys, prepend=-1))
        return cls(keys[first], np.add.reduceat(counts, first) if first.size else counts, limit)

    @classmethod
    def from_rows(cls, counts: npt.NDArray[Any]) -> AccessCounts:
        """Return the counts that are not 0, of those of all rows of a table [num_embeddings]."""
        rows = counts.nonzero()[0]
        return cls(rows, counts[rows], counts.size)

    @property
    def total(self) -> int:
        """All lookups, rounded."""
        return round(float(self.counts.sum()))

    @property
    def shape(self) -> tuple[int, ...]:
        """(limit,)."""
        return (self.limit,)

    def __getitem__(self, keys: slice) -> npt.NDArray[np.uint32]:
        """Return the counts of a slice of all keys with step 1, uint32 [m], rounded; 0 where there is none."""
        first, end, _ = keys.indices(self.limit)
        dense = np.zeros(max(0, end - first), np.uint32)
        begin, stop = self.keys.searchsorted([first, max(first, end)])
        dense[self.keys[begin:stop] - first] = np.minimum(np.rint(self.counts[begin:stop]), MAX_ACCESS_COUNT)
        return dense

    def plus(self, other: AccessCounts) -> AccessCounts:
        """Add counts of the same keys; takes time by `other`, and one copy of these."""
        if not self.keys.size:
            return replace(self, keys=other.keys, counts=other.counts)
        at = self.keys.searchsorted(other.keys)
        is_known = self.keys.take(at, mode="clip") == other.keys
        counts = self.counts.astype(np.result_type(self.counts, other.counts))
        counts[at[is_known]] += other.counts[is_known]
        at, keys, new_counts = at[~is_known], other.keys[~is_known], other.counts[~is_known]
        return replace(self, keys=np.insert(self.keys, at, keys), counts=np.insert(counts, at, new_counts))

    def most_frequent(self, count: int) -> AccessCounts:
        """Return at most so many keys with the highest counts."""
        if (surplus := self.keys.size - count) <= 0:
            return self
        kept = np.sort(np.argpartition(self.counts, surplus)[surplus:])
        return replace(self, keys=self.keys[kept], counts=self.counts[kept])

    def hottest_first(self) -> Int64Array:
        """Return the keys, those with the highest counts first."""
        return self.keys[np.argsort(-self.counts, kind="stable")]


class AccessCounter:
    """Counts lookups of keys, with a bounded memory: the most frequent keys keep their counts. Thread-safe.

    Keys are queued, which is cheap, and counted together by `fold`: the caller decides when, by `is_full`.

    Args:
        max_keys: keys that have a count, 16 bytes each.
        min_queued: keys from which on the queue is full; a quarter of those with a count, if that is more.
        half_life: lookups after which a count weighs half; None for never.
    """

    def __init__(self, max_keys: int, min_queued: int, half_life: float | None = None) -> None:
        self.total = 0.0
        """Lookups that were counted, also of keys that were forgotten; older ones weigh less."""
        self.is_exact = True
        """Whether no key was forgotten."""
        self._max_keys, self._min_queued, self._half_life = max_keys, min_queued, half_life
        self._queue_lock, self._folding = threading.Lock(), threading.Lock()
        self._queue: list[tuple[Callable[[], Int64Array], npt.NDArray[Any] | int]] = []
        self._num_queued = 0
        self._counts = AccessCounts(np.empty(0, np.int64), np.empty(0, np.int64))

    @property
    def is_full(self) -> bool:
        """Whether the queue should be folded before more is added."""
        return self._num_queued >= max(self._min_queued, self._counts.keys.size // 4)

    def add(self, keys: Int64Array, counts: npt.NDArray[Any] | int = 1) -> None:
        """Queue lookups of keys, int64 [n], in any order: how often each was looked up, [n], or all alike."""
        self.add_later(lambda: keys, keys.size, counts)

    def add_later(self, keys: Callable[[], Int64Array], size: int, counts: npt.NDArray[Any] | int = 1) -> None:
        """As `add` of so many keys, which are made when they are counted."""
        with self._queue_lock:
            self._queue.append((keys, counts))
            self._num_queued += size

    def fold(self) -> AccessCounts:
        """Count what is queued, and return all counts."""
        with self._folding:
            with self._queue_lock:
                queue, self._queue, self._num_queued = self._queue, [], 0
            if queue:
                parts = [(made := make(), np.broadcast_to(counts, made.shape)) for make, counts in queue]
                keys, counted = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
                new, known = AccessCounts.from_lookups(keys, counted), self._counts
                if self._half_life is not None:
                    age = 0.5 ** (new.total / self._half_life)
                    known, self.total = replace(known, counts=known.counts * age), self.total * age
                everything = known.plus(new)
                self._counts = everything.most_frequent(self._max_keys)
                self.is_exact &= self._counts is everything
                self.total += new.total
            return self._counts


def merged_by_table(parts: Iterable[Mapping[str, AccessCounts]]) -> dict[str, AccessCounts]:
    """Add up counts of the same tables; what only some have is kept."""
    merged: dict[str, AccessCounts] = {}
    for by_table in parts:
        merged |= {name: merged[name].plus(counts) if name in merged else counts for name, counts in by_table.items()}
    return merged


def encode_access_counts(lookups: Mapping[str, AccessCounts]) -> bytes:
    """Return a file of access counts, by table: rounded, to 1 at least, and all divided alike if one exceeds uint32."""
    highest = max((float(table.counts.max()) for table in lookups.values() if table.counts.size), default=1.0)
    scale = min(1.0, MAX_ACCESS_COUNT / highest)
    tensors: dict[str, npt.NDArray[Any]] = {}
    for name, table in lookups.items():
        counts = np.clip(np.rint(np.multiply(table.counts, scale, dtype=np.float64)), 1, MAX_ACCESS_COUNT)
        arrays = table.keys.astype(np.uint32), counts.astype(np.uint32), np.array([table.limit], np.int64)
        tensors |= {f"{name}/{kind}": array for kind, array in zip(_TENSORS, arrays, strict=True)}
    return safetensors.numpy.save(tensors, {"format": FORMAT})


def write_access_counts(path: Path, lookups: Mapping[str, AccessCounts]) -> None:
    """Write a file of access counts, by table; whole or not at all. Raises OSError if it can't be written."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(encode_access_counts(lookups))
    part.replace(path)


def decode_access_counts(data: bytes, source: object) -> dict[str, AccessCounts]:
    """Return what a file of access counts has, by the names of its tables, of whatever model.

    Raises ExportError, which names the `source`, for another format, or rows and counts that do not fit.
    """
    try:
        tensors = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise ExportError(f"{source}: no file of access counts: {cut(error)}") from error
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    if (stated := (header.get("__metadata__") or {}).get("format")) != FORMAT:
        was = "no format: of an earlier release, or no access counts" if stated is None else f"format {cut(stated)}"
        raise ExportError(f"{source}: its metadata has {was}; {FORMAT!r} is read: {_HOW_TO_MAKE}")
    names = sorted({name.rpartition("/")[0] for name in tensors})
    if tensors.keys() != {f"{name}/{kind}" for name in names for kind in _TENSORS}:
        raise ExportError(f"{source}: has the tensors {cut(sorted(tensors))}, which are not three for each table")
    by_table: dict[str, AccessCounts] = {}
    for name in names:
        rows, counts, size = (tensors[f"{name}/{kind}"] for kind in _TENSORS)
        where = f"{source}: table {cut(repr(name))}"
        if rows.dtype != np.uint32 or counts.dtype != np.uint32 or rows.ndim != 1 or rows.shape != counts.shape:
            raise ExportError(f"{where}: rows and counts are not uint32 [n] and uint32 [n]")
        if size.dtype != np.int64 or size.shape != (1,) or size[0] < 1:
            raise ExportError(f"{where}: num_embeddings is no number, int64 [1]")
        keys = rows.astype(np.int64)
        if keys.size and (keys[-1] >= size[0] or (np.diff(keys) <= 0).any() or not counts.all()):
            limit = f"must ascend below num_embeddings {size[0]}, each with a count of 1 or more"
            raise ExportError(f"{where}: rows {limit}")
        by_table[name] = AccessCounts(keys, counts.astype(np.int64), int(size[0]))
    return by_table


def read_access_counts(paths: Sequence[Path], spec: ModelSpec) -> dict[str, AccessCounts]:
    """Return how often rows of a model's tables were looked up, added up over files, by table as features see it.

    Counts of a slice are the table's: every slice is looked up as often. Those of a part by quotient_remainder are by
    its name, since which ids they were of can't be known; of a part by popularity they are refused, since other
    versions have other rows there.

    Raises ExportError as `decode_access_counts`; for a file that can't be read, has no table, or one that the model has
    not, or of another size.
    """
    logical = {table.name: table for table in spec.logical_tables}
    tables: dict[str, AnyTable] = {stored.name: table for table in spec.tables for stored in table.slices}
    tables |= logical
    by_popularity = (table for table in spec.divided if table.by == "popularity")
    of_other_rows = {part: table.name for table in by_popularity for part in table.parts if part != table.name}
    files: list[dict[str, AccessCounts]] = []
    for path in paths:
        if path.is_dir():
            raise ExportError(f"{path}: counts are read from one file, no longer from a folder of .npy: {_HOW_TO_MAKE}")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ExportError(f"{path}: can't be read: {error}") from error
        by_table: dict[str, AccessCounts] = {}
        for name, counts in decode_access_counts(data, path).items():
            where = f"{path}: access counts of"
            if name in of_other_rows:
                raise ExportError(
                    f"{where} {name!r}, a part of table {of_other_rows[name]!r}: which rows of the table these are "
                    "its version alone knows; `shardrank counts --snapshot` writes them as the table's"
                )
            if name not in tables:
                raise ExportError(f"{where} {cut([name])}; the model's tables are {cut(sorted(logical))}")
            if counts.limit != (rows := tables[name].num_embeddings):
                raise ExportError(
                    f"{where} a table {name!r} whose num_embeddings was {counts.limit}; here it is {rows}. Those of a "
                    "version that was pruned are written by the table's rows with `shardrank counts --snapshot`"
                )
            by_table.setdefault(tables[name].name, counts)
        if not by_table:
            raise ExportError(f"{path}: no access counts; the model's tables are {cut(sorted(logical))}")
        files.append(by_table)
    return merged_by_table(files)
