"""How large must a table be? From the ids that it was asked for: collisions, head and tail, and the smallest size.

Ids are counted, not read: a table's ids [n], all different, and how often each was asked for. What is measured maps
them as a router does; what is expected are the closed forms of throwing n balls into N bins at random (Kolchin,
Sevastyanov and Chistyakov, "Random Allocations", 1978):

- rows used: N (1 - (1 - 1/N)^n), which tends to n - n (n - 1) / 2N for a large table;
- the share of ids that share their row with no other: (1 - 1/N)^(n - 1), about e^(-n/N).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from loader.access_counts import AccessCounts, Int64Array
from loader.description import ModelDescription, TableDescription
from loader.snapshot.tables import MAX_NUM_EMBEDDINGS, Frozen, HashMapping, VocabularyMapping
from router.errors import FittingError
from router.id_mapping import hashed_rows

UInt64Array: TypeAlias = npt.NDArray[np.uint64]

HEAD_SHARES = (0.01, 0.1)
"""Shares of the ids that occur, hottest first, whose share of lookups is reported."""
_HASHES = 2**32


@dataclass(frozen=True, eq=False)
class TableIds:
    """The raw ids that one table was asked for.

    Attributes:
        ids: int64 [n], 0 or more; an id is there twice if two features asked for it that hash with their own seeds.
        counts: int64 [n], how often each, 1 or more.
        seeds: uint64 [n] or [1], what each id is hashed with; zeros where ids are not hashed.
    """

    ids: Int64Array
    counts: Int64Array
    seeds: UInt64Array

    @classmethod
    def of(cls, table: TableDescription, by_feature: Mapping[str, AccessCounts]) -> TableIds | None:
        """Gather what a table's features were asked for; None if there is no trace of any of them.

        Raises:
            FittingError: an id that the table refuses: identity, `unknown_id` reject, and not below num_embeddings.
        """
        traced = {name: by_feature[name] for name in table.feature_names if name in by_feature}
        if not traced:
            return None
        mapping, where = table.id_mapping, f"table {table.name!r}"
        if isinstance(mapping, HashMapping) and mapping.salt == "per_feature":
            ids, counts = [each.keys for each in traced.values()], [each.counts for each in traced.values()]
            seeds = np.array([mapping.seed_of(name) for name in traced], np.uint64)
            return cls(np.concatenate(ids), np.concatenate(counts), np.repeat(seeds, [keys.size for keys in ids]))
        merged = functools.reduce(AccessCounts.plus, traced.values())
        seed = mapping.seed if isinstance(mapping, HashMapping) else 0
        rows, is_row = table.num_embeddings, not isinstance(mapping, HashMapping | VocabularyMapping)
        if is_row and isinstance(rows, int) and merged.keys.size and int(merged.keys[-1]) >= rows:
            if table.unknown_id == "reject":
                raise FittingError(
                    f"{where}: id {int(merged.keys[-1])} of features {sorted(traced)} is not below "
                    f"num_embeddings {rows}: is the trace of another table?"
                )
            is_known = merged.keys < rows
            unknown = int(merged.counts[~is_known].sum())
            merged = AccessCounts(merged.keys[is_known], merged.counts[is_known])
            if table.unknown_id == "default_row":
                # Unknown ids read this row: it is as if they were its id.
                merged = merged.plus(AccessCounts(np.array([table.default_row]), np.array([unknown])))
        return cls(merged.keys, merged.counts, np.array([seed], np.uint64))

    @functools.cached_property
    def _by_hash(self) -> tuple[UInt64Array, Int64Array]:
        """The upper 32 bits of ids' hashes, ascending, and the ids' counts: by one sort, 24 bytes an id."""
        if self.ids.size >= _HASHES:
            raise FittingError(f"{self.ids.size} ids of one table; at most {_HASHES - 1} can be grouped")
        keys = hashed_rows(self.ids, self.seeds, np.array([_HASHES], np.uint64)).view(np.uint64)
        keys <<= np.uint64(32)
        keys |= np.arange(keys.size, dtype=np.uint64)
        keys.sort()
        counts = self.counts[(keys & np.uint64(_HASHES - 1)).view(np.int64)]
        keys >>= np.uint64(32)
        return keys, counts

    def hashed_to(self, num_embeddings: int) -> tuple[UInt64Array, Int64Array]:
        """Return the row of each id in a hashed table of so many, uint64 [n], ascending, and its count, int64 [n].

        The row is floor(hash * num_embeddings / 2^32): whatever the size, rows are in the order of the hashes.
        """
        hashes, counts = self._by_hash
        return (hashes * np.uint64(num_embeddings)) >> np.uint64(32), counts

    def row_counts(self, table: TableDescription) -> AccessCounts | None:
        """Return how often rows were asked for; None of a vocabulary's table."""
        if isinstance(table.id_mapping, VocabularyMapping):
            return None
        rows, counts = self.ids, self.counts
        if isinstance(table.id_mapping, HashMapping):
            hashed, counts = self.hashed_to(int(table.num_embeddings))
            rows = hashed.view(np.int64)
        return AccessCounts.from_lookups(rows, counts, int(table.num_embeddings))

    def rows(self, table: TableDescription) -> RowLookups:
        """Return how often each row is looked up: hashed, or a row for each id, as identity and vocabulary have it."""
        if not isinstance(table.id_mapping, HashMapping):
            if self.ids.size > int(table.num_embeddings):
                raise FittingError(
                    f"table {table.name!r}: the trace has {self.ids.size} different ids, num_embeddings is "
                    f"{table.num_embeddings}: is the trace of another table?"
                )
            return RowLookups.alone(self.counts)
        rows, counts = self.hashed_to(int(table.num_embeddings))
        if not rows.size:
            return RowLookups.alone(counts)
        first = np.flatnonzero(np.concatenate([[True], rows[1:] != rows[:-1]]))
        lookups, ids = np.add.reduceat(counts, first), np.diff(first, append=rows.size)
        hottest = np.argsort(-lookups, kind="stable")
        is_shared = ids > 1
        return RowLookups(lookups[hottest], is_shared[hottest], int(ids[is_shared].sum()))


@dataclass(frozen=True, slots=True, eq=False)
class RowLookups:
    """The rows that were asked for, hottest first.

    Attributes:
        lookups: int64 [r], falling.
        is_shared: bool [r], whether several of the ids that occur read it.
        ids_sharing: how many ids read such a row; None if only rows were counted, not ids.
    """

    lookups: Int64Array
    is_shared: npt.NDArray[np.bool_]
    ids_sharing: int | None

    @classmethod
    def alone(cls, lookups: npt.NDArray[np.integer], *, of_ids: bool = True) -> RowLookups:
        """Sort lookups of rows [n], each read by one id, or, without `of_ids`, by an unknown number of them."""
        falling = np.sort(lookups[lookups > 0].astype(np.int64))[::-1]
        return cls(falling, np.zeros(falling.size, np.bool_), 0 if of_ids else None)

    @property
    def total(self) -> int:
        """Return the lookups of all rows."""
        return int(self.lookups.sum())

    @property
    def colliding(self) -> int:
        """Return the lookups of rows that several ids read."""
        return int(self.lookups[self.is_shared].sum())

    def changed(self, kept: int) -> int:
        """Return the lookups of shared rows among the `kept` hottest, and of all rows after them."""
        return int(self.lookups[:kept][self.is_shared[:kept]].sum()) + int(self.lookups[kept:].sum())


def expected_rows(num_ids: int, num_embeddings: int) -> float:
    """Return how many of N rows n ids use in the mean, if each is in any row alike: N (1 - (1 - 1/N)^n)."""
    if num_embeddings == 1:
        return float(min(num_ids, 1))
    return -num_embeddings * math.expm1(num_ids * math.log1p(-1 / num_embeddings))


def expected_alone(num_ids: int, num_embeddings: int) -> float:
    """Return the share of n ids, if each is in any of N rows alike, that share their row with no other."""
    if num_ids <= 1:
        return 1.0
    return 0.0 if num_embeddings == 1 else math.exp((num_ids - 1) * math.log1p(-1 / num_embeddings))


def smallest_size(ids: TableIds, max_collision_share: float) -> int:
    """Return the smallest hashed table with at most so much of its lookups in a collision, a share above 0, below 1.

    A lookup is in a collision if its id shares its row with another id that occurs. The share does not fall with every
    row more, as each size hashes anew, so "the smallest" is defined: begin with a row for each id that must be alone,
    double until the share is small enough, then halve the interval between the last two sizes down to one row, keeping
    its upper end a size that is good. The same ids give the same size.

    Raises:
        FittingError: the share is out of range, there are no ids, or a table of `MAX_NUM_EMBEDDINGS` rows is too small.
    """
    if not 0 < max_collision_share < 1:
        raise FittingError(f"max_collision_share {max_collision_share} must be above 0 and below 1")
    if not ids.ids.size:
        raise FittingError("no id of the table is in the trace, so that no size can be found for it")
    allowed = max_collision_share * ids.counts.sum()

    def is_enough(size: int) -> bool:
        rows, counts = ids.hashed_to(size)
        is_shared = np.zeros(rows.size, np.bool_)
        is_shared[1:] = rows[1:] == rows[:-1]
        is_shared[:-1] |= is_shared[1:]
        return bool(counts[is_shared].sum() <= allowed)

    # Fewer rows than the hottest ids that make up the rest can't be enough: each of these needs a row for itself.
    must_be_alone = np.cumsum(np.sort(ids.counts)[::-1])
    high = min(int(np.searchsorted(must_be_alone, must_be_alone[-1] - allowed)) + 1, ids.ids.size)
    low = high - 1
    while not is_enough(high):
        if high == MAX_NUM_EMBEDDINGS:
            raise FittingError(
                f"max_collision_share {max_collision_share}: even {MAX_NUM_EMBEDDINGS} rows, the most of a table, are "
                f"too few for {ids.ids.size} ids"
            )
        low, high = high, min(2 * high, MAX_NUM_EMBEDDINGS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


class HeadUse(Frozen):
    """The hottest rows that were asked for: a share of them, and their share of lookups."""

    share_of_rows: float
    rows: int
    share_of_lookups: float


class TableMeasures(Frozen):
    """What a trace says of a table. Shares are 0 to 1; what is of ids is None if only rows were counted.

    Attributes:
        lookups: in the trace.
        distinct_ids, ids_seen_once: of the trace; equal ids of features with seeds of their own count apart.
        rows_used, rows_unused_share: rows asked for, and the share of the table's rows that were not.
        expected_rows_used: of a hashed table, what chance gives.
        ids_alone_share, expected_ids_alone_share: ids that share their row with no other, measured and by chance.
        lookups_colliding_share: lookups whose id shares its row with another one that occurs.
        unseen_share: of lookups to come, those of rows that the trace has not; by the rows that it has once (Good, "The
            Population Frequencies of Species", 1953: seen once / lookups).
        head: of the rows asked for, hottest first.
    """

    table: str
    num_embeddings: int
    stored_bytes: int
    lookups: int
    distinct_ids: int | None
    ids_seen_once: int | None
    rows_used: int
    rows_unused_share: float
    expected_rows_used: float | None
    ids_alone_share: float | None
    expected_ids_alone_share: float | None
    lookups_colliding_share: float | None
    unseen_share: float | None
    head: tuple[HeadUse, ...]


def measure(table: TableDescription, stored_bytes: int, rows: RowLookups, ids: TableIds | None = None) -> TableMeasures:
    """Measure a table by its rows' lookups and, if they are known, its ids; `stored_bytes` are of all its rows."""
    num_embeddings, total = int(table.num_embeddings), max(rows.total, 1)
    shares = np.append(0, np.cumsum(rows.lookups)) / total
    heads = [(share, math.ceil(share * rows.lookups.size)) for share in HEAD_SHARES]
    num_ids = None if ids is None else ids.ids.size
    is_hashed = isinstance(table.id_mapping, HashMapping) and num_ids is not None
    sharing = rows.ids_sharing
    return TableMeasures(
        table=table.name,
        num_embeddings=num_embeddings,
        stored_bytes=stored_bytes,
        lookups=rows.total,
        distinct_ids=num_ids,
        ids_seen_once=None if ids is None else int((ids.counts == 1).sum()),
        rows_used=rows.lookups.size,
        rows_unused_share=1 - rows.lookups.size / num_embeddings,
        expected_rows_used=expected_rows(num_ids or 0, num_embeddings) if is_hashed else None,
        ids_alone_share=None if sharing is None else 1 - sharing / max(num_ids or 0, 1),
        expected_ids_alone_share=expected_alone(num_ids or 0, num_embeddings) if is_hashed else None,
        lookups_colliding_share=None if sharing is None else rows.colliding / total,
        unseen_share=None if sharing is None else int((rows.lookups == 1).sum()) / total,
        head=tuple(HeadUse(share_of_rows=share, rows=n, share_of_lookups=float(shares[n])) for share, n in heads),
    )


def count_rows(tables: Iterable[TableDescription], by_feature: Mapping[str, AccessCounts]) -> dict[str, AccessCounts]:
    """Return how often rows are looked up by a trace of ids, by table.

    Tables without a trace are left out, and those of a vocabulary, whose rows a description does not tell. Raises
    FittingError as `TableIds.of`.
    """
    counts = {}
    for table in tables:
        ids = TableIds.of(table, by_feature)
        if ids is not None and (counted := ids.row_counts(table)) is not None:
            counts[table.name] = counted
    return counts


def fitted(description: ModelDescription, by_feature: Mapping[str, AccessCounts]) -> ModelDescription:
    """Give each table whose `num_embeddings` is auto the smallest size for its ids and its `max_collision_share`.

    Raises:
        FittingError: such a table has no ids in the trace, or no size is enough.
    """
    tables = list(description.tables)
    for number, table in enumerate(tables):
        if table.num_embeddings == "auto":
            if (ids := TableIds.of(table, by_feature)) is None:
                needed = f"a trace of the ids of its features {list(table.feature_names)}"
                raise FittingError(f"table {table.name!r}: num_embeddings auto needs {needed}")
            size = {"num_embeddings": smallest_size(ids, table.max_collision_share), "default_row": 0}
            tables[number] = table.model_copy(update=size)
    return description.model_copy(update={"tables": tuple(tables)})
