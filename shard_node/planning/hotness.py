"""How often rows are looked up, in levels: what placement orders rows by, without sorting them.

A level is a set of rows of one table that count as equally hot; within it the lower row comes first. Levels of a table
are numbered from the hottest, 0, on. What a level says about one row (`lookups`) compares rows of different tables;
only the ratios matter. From access counts, counts below 64 are kept apart, and larger ones if they differ by more than
2%.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from loader.access_counts import AccessCounts
from loader.snapshot.buckets import RowBuckets
from loader.snapshot.tables import TableSpec
from shard_node.bags import Int64Array, TableLayout

Float64Array = npt.NDArray[np.float64]
UInt16Array = npt.NDArray[np.uint16]
UInt32Array = npt.NDArray[np.uint32]

_PIECE_ROWS = 1 << 20
# Levels of access counts for each doubling of (count + 1).
_COUNTS_PER_DOUBLING = 64
# Rank ranges of a power law: this many for each doubling of the rank, ranks below the first apart.
_EDGES_PER_DOUBLING = 8
_HEAD_EDGES_PER_DOUBLING = 64
_EXACT_RANKS = 1 << 12

RowCounts: TypeAlias = UInt32Array | AccessCounts
"""How often each row of a table was looked up: uint32 [num_embeddings], or what is read like it."""
ObservedCounts: TypeAlias = Mapping[str, RowCounts]
"""By table, uint32 [num_embeddings]: how often each row was seen to be looked up."""


class Head(NamedTuple):
    """The first rows of a table, and the share of its lookups that is theirs alone."""

    rows: int
    share: float


class PartOfRanks(NamedTuple):
    """Which ranks of a larger table the rows of a part have: those after the first `before` of `num_rows`."""

    before: int
    num_rows: int


class RankedRows:
    """Rows whose numbers are their ranks: row 0 is the hottest. Closed forms, no memory per row.

    Row r (from 0) is looked up in proportion to (r + 1) ** -zipf; with 0 all rows are alike. With a head only its rows
    are, for its share of the lookups, and the others go to all rows of the table alike. The rows of a part have the
    ranks after those of hotter parts.

    Attributes:
        lookups: float64 [levels], at most 65,535 of them, descending: how often one row of each level is looked up, in
            the mean.
    """

    def __init__(
        self,
        table: TableSpec,
        lookups_per_sample: float,
        zipf: float,
        head: Head | None = None,
        part: PartOfRanks | None = None,
    ) -> None:
        self.table = table
        rows = table.num_embeddings
        before, num_rows = part or (0, rows)
        first = rows if head is None else min(max(head.rows - before, 0), rows)
        # The levels of a head are few, and how many of its rows are worth having is what is asked of it.
        per_doubling = _EDGES_PER_DOUBLING if head is None else _HEAD_EDGES_PER_DOUBLING
        # 0, 1, 2, ... and then so many for each doubling, up to the first rows.
        num_edges = first.bit_length() * per_doubling + 1 if zipf else 0
        edges = np.minimum(np.ceil(2.0 ** (np.arange(num_edges) / per_doubling)), first).astype(np.int64)
        self._edges = np.unique(np.concatenate([[0], edges, [first, rows]]))
        mass = np.diff(ranked_share(before + self._edges, num_rows, zipf, head))
        lookups = lookups_per_sample * (mass / (mass.sum() or 1.0)) / np.diff(self._edges)
        # Differences of sums are rounded; what is nearly alike must not seem to rise.
        self.lookups = np.minimum.accumulate(lookups)

    def rows_by_owner(self, owner_of_bucket: npt.NDArray[np.integer], num_owners: int) -> Int64Array:
        """Count the rows of each level that each owner has, int64 [levels, num_owners]; -1 is no owner."""
        first = int(owner_of_bucket[0])
        if (owner_of_bucket == first).all():
            by_owner = np.zeros((self._edges.size - 1, num_owners), np.int64)
            if first >= 0:
                by_owner[:, first] = self.rows()
            return by_owner
        is_owned = (owner_of_bucket[:, None] == np.arange(num_owners)).astype(np.float64)
        # Sums of fewer than 2^32 rows are exact, and faster than in whole numbers.
        below = RowBuckets.of(self.table).rows_below(self._edges).astype(np.float64) @ is_owned
        return np.asarray(np.diff(below, axis=0).astype(np.int64))

    def lookups_by_bucket(self, missed: Float64Array | None = None) -> Float64Array:
        """Return how often the rows of each bucket are looked up, float64 [buckets].

        `missed`, float64 [levels], is the share of each level's lookups that counts; by default all do. Each edge adds
        what a row above it is looked up less.
        """
        lookups = self.lookups if missed is None else self.lookups * missed
        steps = -np.diff(lookups, prepend=0.0, append=0.0)
        by_bucket = steps @ RowBuckets.of(self.table).rows_below(self._edges).astype(np.float64)
        # What cancels out but for rounding is nothing.
        return np.asarray(np.maximum(by_bucket, 0.0))

    def rows(self) -> Int64Array:
        """Count the rows of each level, int64 [levels]; together `num_embeddings`."""
        return np.diff(self._edges)

    def levels(self, first_row: int, end_row: int) -> UInt16Array:
        """Return the level of each row, uint16 [end_row - first_row]."""
        cuts = np.clip(self._edges, first_row, end_row)
        return np.repeat(np.arange(cuts.size - 1, dtype=np.uint16), np.diff(cuts))


class CountedRows:
    """Rows with an access count each, uint32 [num_embeddings], kept and not copied, so that they may be mapped.

    They are read front to back: for the levels, and whenever they are counted by owner. Methods are as of `RankedRows`.
    """

    def __init__(self, table: TableSpec, counts: RowCounts) -> None:
        self.table = table
        self._counts = counts
        num_keys = 32 * _COUNTS_PER_DOUBLING + 1
        by_key, sums = np.zeros(num_keys, np.int64), np.zeros(num_keys)
        for first, end in self._pieces():
            keys = self._keys(first, end)
            by_key += np.bincount(keys, minlength=num_keys)
            sums += np.bincount(keys, counts[first:end], num_keys)
        present = np.flatnonzero(by_key)[::-1]
        self._level_of_key = np.zeros(num_keys, np.uint16)
        self._level_of_key[present] = np.arange(present.size)
        self._rows = by_key[present]
        self.lookups = sums[present] / self._rows

    def rows_by_owner(self, owner_of_bucket: npt.NDArray[np.integer], num_owners: int) -> Int64Array:
        """Count the rows of each level that each owner has, int64 [levels, num_owners]."""
        by_owner = np.zeros((self._rows.size, num_owners + 1), np.int64)
        buckets = RowBuckets.of(self.table)
        owners = np.where(owner_of_bucket < 0, num_owners, owner_of_bucket).astype(np.int64)
        for first, end in self._pieces():
            flat = self.levels(first, end).astype(np.int64) * (num_owners + 1)
            flat += owners.take(buckets.of_rows(np.arange(first, end)))
            by_owner += np.bincount(flat, minlength=by_owner.size).reshape(by_owner.shape)
        return by_owner[:, :num_owners]

    def lookups_by_bucket(self, missed: Float64Array | None = None) -> Float64Array:
        """Return how often the rows of each bucket are looked up, float64 [buckets]."""
        lookups = self.lookups if missed is None else self.lookups * missed
        buckets = RowBuckets.of(self.table)
        by_bucket = np.zeros(buckets.count)
        for first, end in self._pieces():
            of_rows = buckets.of_rows(np.arange(first, end))
            by_bucket += np.bincount(of_rows, lookups[self.levels(first, end)], buckets.count)
        return by_bucket

    def rows(self) -> Int64Array:
        """Count the rows of each level, int64 [levels]."""
        return self._rows

    def levels(self, first_row: int, end_row: int) -> UInt16Array:
        """Return the level of each row, uint16 [end_row - first_row]."""
        return self._level_of_key[self._keys(first_row, end_row)]

    def _pieces(self) -> Iterator[tuple[int, int]]:
        for first in range(0, self.table.num_embeddings, _PIECE_ROWS):
            yield first, min(first + _PIECE_ROWS, self.table.num_embeddings)

    def _keys(self, first_row: int, end_row: int) -> UInt16Array:
        """Return 0 for what was never looked up, else 1 and on, ascending with the count: uint16 [n]."""
        keys = np.log2(self._counts[first_row:end_row].astype(np.float32) + np.float32(1))
        keys *= _COUNTS_PER_DOUBLING
        levels: UInt16Array = keys.astype(np.uint16)
        return levels


RowHotness: TypeAlias = RankedRows | CountedRows
"""The levels of one table."""


@dataclass(frozen=True)
class Hotness:
    """What is known of how often the rows of a model are looked up.

    Attributes:
        counts: by table, uint32 [num_embeddings], all counted over the same batches. How many samples they stand for
            follows from the lookups per sample of these tables.
        lookups_per_sample: of a table, all its features together; by default one a feature.
        zipf: of tables without counts, the exponent of the power law of their row numbers; 0: all alike.
        head: of tables without counts, the rows that the power law is of; None for all.
        parts: of tables without counts that are parts by popularity, which ranks their rows have.
    """

    counts: Mapping[str, RowCounts] = field(default_factory=dict)
    lookups_per_sample: Mapping[str, float] = field(default_factory=dict)
    zipf: float = 0.0
    head: Head | None = None
    parts: Mapping[str, PartOfRanks] = field(default_factory=dict)

    def of(self, layout: TableLayout) -> tuple[RowHotness, ...]:
        """Return the levels of each table, in layout order."""
        tables = {table.name: table for table in layout.tables}
        counted = {name: CountedRows(table, self.counts[name]) for name, table in tables.items() if name in self.counts}
        default = {name: len(table.feature_names) for name, table in tables.items()}
        lookups = {name: float(self.lookups_per_sample.get(name, count)) for name, count in default.items()}
        # How many samples the counts stand for: what makes them comparable with lookups per sample.
        per_sample = sum(lookups[name] for name in counted)
        total = sum(float(rows.rows() @ rows.lookups) for rows in counted.values())
        samples = total / per_sample if per_sample and total else 1.0
        return tuple(
            counted.get(name) or RankedRows(table, samples * lookups[name], self.zipf, self.head, self.parts.get(name))
            for name, table in tables.items()
        )


def ranked_share(ranks: Int64Array, num_rows: int, zipf: float, head: Head | None = None) -> Float64Array:
    """Return which share of a table's lookups its hottest rows have, float64 [n], for each number of them in `ranks`.

    `zipf` and `head` are as of `Hotness`; `ranks` are int64 [n], 0 to `num_rows`.
    """
    first = num_rows if head is None else min(head.rows, num_rows)
    sums = power_law_sums(np.append(np.minimum(ranks, first), first), zipf)
    share: Float64Array = sums[:-1] / sums[-1]
    return share if head is None else head.share * share + (1 - head.share) * ranks / num_rows


def power_law_sums(ranks: Int64Array, exponent: float) -> Float64Array:
    """Sum of k ** -exponent over k = 1 .. r, for each r of `ranks`, int64 [n] and not negative: float64 [n].

    The first 4,096 terms are added; beyond them the sum is the integral between half ranks (the midpoint rule), which
    is within 1e-8 of each term's share.
    """
    first = np.concatenate([[0.0], np.cumsum(np.arange(1, _EXACT_RANKS + 1, dtype=np.float64) ** -exponent)])
    sums: Float64Array = first[np.minimum(ranks, _EXACT_RANKS)]
    begin = _EXACT_RANKS + 0.5
    end = np.maximum(ranks, _EXACT_RANKS) + 0.5
    if abs(exponent - 1) < 1e-9:
        beyond = np.log(end / begin)
    else:
        beyond = (end ** (1 - exponent) - begin ** (1 - exponent)) / (1 - exponent)
    sums[ranks > _EXACT_RANKS] += beyond[ranks > _EXACT_RANKS]
    return sums
