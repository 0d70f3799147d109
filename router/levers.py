"""Make a model's tables smaller until they fit, one lever after the other, and tell what each changes.

The levers, in the order in which they are tried, each only as far as needed:

| lever | what it does | needs training again |
|---|---|---|
| fit | hashed tables get the smallest size that holds collisions down | yes |
| prune | rows that nobody asks for go; then the rarest | no |
| unify | hashed tables alike share one, each feature with a seed of its own | yes |
| compose | the largest table, of identity ids, becomes two small ones: quotient and remainder | yes |
| dims | rows by popularity get fewer dims and a projection | yes |
| precision | fewer bits, the hottest rows' last | no |
| shard | what is left is divided | no |

"Changed" is a lookup that no longer gets a row of its own, whole: its id shares the row with another one that occurs
(in a collision), or the row is pruned, composed, of fewer dims, or of a narrower dtype than described.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from math import ceil, isqrt
from typing import Any, Literal, TypeAlias, get_args

from loader.access_counts import AccessCounts
from loader.description import Block, DtypeByPopularity, QuotientRemainderMapping, TableDescription
from loader.divided_rows import rows_with_share
from loader.snapshot.codecs import codec_for
from loader.snapshot.row_classes import classes_bytes
from loader.snapshot.tables import MAX_NUM_EMBEDDINGS, DividedTable, Frozen, HashMapping, RowDtype, TableSpec
from router.errors import FittingError
from router.fitting import RowLookups, TableIds, smallest_size

Lever: TypeAlias = Literal["fit", "prune", "unify", "compose", "dims", "precision", "shard"]
LEVERS: tuple[Lever, ...] = get_args(Lever)
NEEDS_TRAINING = frozenset({"fit", "unify", "compose", "dims"})
DEFAULT_KEEP_SHARE = 0.999
WIDTH: dict[RowDtype, int] = {"int4": 0, "int8": 1, "fp16": 2, "fp32": 3}
"""The dtypes of rows from the narrowest."""

_LEAST_BUCKETS_SHARE = 1 / 200
"""Of a composed table's ids: 10 million buckets for 2 * 10^9 ids. Fewer share a remainder among more ids."""
_DIM_ROUNDS: tuple[tuple[tuple[float | None, int], ...], ...] = (
    ((0.5, 1), (None, 2)),
    ((0.1, 1), (None, 4)),
    ((0.05, 1), (0.25, 4), (None, 16)),
)
"""From mild to strong: shares of rows by falling popularity, the last one what is left, and what divides their dim."""
_DTYPE_ROUNDS: tuple[tuple[RowDtype, RowDtype, float], ...] = (
    ("fp16", "fp16", 1.0),
    ("int8", "int8", 1.0),
    ("int8", "int4", 0.5),
    ("fp16", "int4", 0.1),
    ("int8", "int4", 0.1),
    ("int4", "int4", 1.0),
)
"""From mild to strong: dtype of the hottest rows, of the others, and the hottest rows' share."""
_LEAST_ROWS = 100
"""Of a table whose rows are divided by popularity: of fewer, blocks would be of no rows."""
_OF_ONE_TABLE = {
    "name",
    "num_embeddings",
    "feature_names",
    "id_mapping",
    "default_row",
    "unknown_id",
    "max_collision_share",
}
"""What may differ between hashed tables that become one."""


@dataclass(frozen=True, eq=False)
class LeveredTable:
    """A table as it is described, with the levers that are on.

    Attributes:
        table: its `num_embeddings` is a number.
        first: as it was described before any lever.
        traced: by feature of the model, the ids it was asked for, where they are known.
        asked: its own, None if there is no trace of them.
        observed: how often its rows are looked up, where only that is known.
        keep_share: pruned to the hottest rows with that share of lookups; None if it is not.
    """

    table: TableDescription
    first: TableDescription
    traced: Mapping[str, AccessCounts]
    asked: TableIds | None = None
    observed: RowLookups | None = None
    keep_share: float | None = None

    @cached_property
    def rows(self) -> RowLookups | None:
        """Return how often its rows are looked up; None if nobody knows."""
        return self.observed if self.asked is None else self.asked.rows(self.table)

    @property
    def num_embeddings(self) -> int:
        """Return its rows, those that are pruned among them."""
        return int(self.table.num_embeddings)

    @cached_property
    def kept_rows(self) -> int:
        """Count the rows that pruning leaves."""
        if self.keep_share is None or self.rows is None:
            return self.num_embeddings
        return max(rows_with_share(self.rows.lookups, self.keep_share), 1)

    @cached_property
    def stored(self) -> tuple[tuple[TableSpec, ...], DividedTable | None]:
        """Return the tables that it is stored as, and how it is divided into them, if it is."""
        return self.table.compiled(self.kept_rows)

    @cached_property
    def class_bytes(self) -> int:
        """Count the bytes that say which row is where."""
        parts, divided = self.stored
        return 0 if divided is None else classes_bytes(divided, parts)

    @property
    def projection_bytes(self) -> int:
        """Count the bytes of the matrices that make rows of fewer columns as wide as features get them."""
        width = self.table.width
        return sum(4 * part.embedding_dim * width for part in self.stored[0] if part.embedding_dim < width)

    @cached_property
    def stored_bytes(self) -> int:
        """Count the bytes of its rows with their scales, of what says which row is where, and of projections."""
        total = self.class_bytes + self.projection_bytes
        for part in self.stored[0]:
            total += part.num_embeddings * sum(codec_for(part.dtype, dim).row_bytes for dim in part.slice_dims)
        return total

    @property
    def is_divided(self) -> bool:
        """Tell whether it is stored in several tables by what its description says, pruning aside."""
        return len(self.stored[0]) > 1 or bool(self.table.column_dims or self.table.project_to)

    @property
    def is_composed(self) -> bool:
        """Tell whether each id has two rows, of its quotient and its remainder."""
        return isinstance(self.table.id_mapping, QuotientRemainderMapping)

    def changed(self, by: Lever | None = None) -> int:
        """Count the lookups that one lever changes, or, each once, all of them."""
        if self.rows is None:
            return 0
        if self.is_composed:
            return self.rows.total if by in (None, "compose") else 0
        if by in ("fit", "unify"):
            return self.rows.colliding
        if by == "compose":
            return 0
        if by == "prune":
            return self.rows.total - self.rows.of_hottest(self.kept_rows)
        # Parts are by popularity: what is less than described begins after some hottest rows.
        first = self._rows_as_described(dims=by in (None, "dims"), dtypes=by in (None, "precision"))
        if by is None:
            return self.rows.changed(first)
        return self.rows.of_hottest(self.kept_rows) - self.rows.of_hottest(first)

    def _rows_as_described(self, *, dims: bool, dtypes: bool) -> int:
        """Count the rows before the first part of fewer columns, or of a narrower dtype, than described."""
        widest, rows = max((one.dtype for one in self.first.compiled()[0]), key=WIDTH.__getitem__), 0
        for part in self.stored[0]:
            if (dims and part.embedding_dim < self.table.width) or (dtypes and WIDTH[part.dtype] < WIDTH[widest]):
                return rows
            rows += part.num_embeddings
        return self.kept_rows

    def updated(self, **changes: Any) -> LeveredTable:
        """Return it with other fields of its description, which are checked."""
        fields = {name: getattr(self.table, name) for name in TableDescription.model_fields}
        table, asked = TableDescription(**{**fields, **changes}), self.asked
        if asked is not None and not changes.keys().isdisjoint({"feature_names", "id_mapping"}):
            asked = TableIds.of(table, self.traced)
        return replace(self, table=table, asked=asked)

    def told(self) -> str:
        """Say what it is stored as: rows, dims, dtypes."""
        parts, divided = self.stored
        words = " + ".join(f"{one.num_embeddings} x {one.embedding_dim} {one.dtype}" for one in parts)
        return f"{words} of {self.num_embeddings} rows" if divided is not None and divided.pruned else words

    def in_dtypes(self, hot: RowDtype, cold: RowDtype, hot_share: float) -> LeveredTable:
        """Return it with rows of other dtypes, the hottest of one; where it has blocks, the first is hot.

        Rows of an odd dim, which int4 can't have, are int8 in its place; what can't be divided is all cold.
        """
        table = self.table
        is_odd = any(dim % 2 for part in self.stored[0] for dim in part.slice_dims)
        hot, cold = (("int8" if is_odd and dtype == "int4" else dtype) for dtype in (hot, cold))
        if table.blocks:
            blocks = [{**dict(one), "dtype": cold if number else hot} for number, one in enumerate(table.blocks)]
            return self.updated(blocks=blocks, dtype=cold)
        if hot == cold or self.is_composed or table.column_dims or self.kept_rows < _LEAST_ROWS:
            return self.updated(dtype=cold)
        return self.updated(dtype=DtypeByPopularity(hot=hot, cold=cold, hot_share=hot_share))


def levered(
    tables: Sequence[TableDescription], traced: Mapping[str, AccessCounts], observed: Mapping[str, RowLookups]
) -> tuple[LeveredTable, ...]:
    """Return a model's tables with no lever on.

    Args:
        tables: of the model; none with a `num_embeddings` of auto.
        traced: by feature, ids of a trace.
        observed: by table, how often its rows are looked up; of tables without a trace of ids.
    """
    return tuple(
        LeveredTable(
            one, one, traced, None if one.name in observed else TableIds.of(one, traced), observed.get(one.name)
        )
        for one in tables
    )


CURVE_SHARES = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01)


class CurvePoint(Frozen):
    """All hashed tables with so many rows for each id that occurs: bytes of the model, and lookups in a collision."""

    rows_per_id: float
    stored_bytes: int
    changed_share: float | None


def size_curve(tables: Sequence[LeveredTable]) -> tuple[CurvePoint, ...]:
    """Measure the model with hashed tables of 100 % down to 1 % of the ids that occur; empty if no ids are known."""
    ids = [0 if one.asked is None or one.table.id_mapping.kind != "hash" else one.asked.ids.size for one in tables]
    if not any(ids):
        return ()
    found = []
    for share in CURVE_SHARES:
        sized = [
            one.updated(num_embeddings=ceil(share * size), default_row=0) if size else one
            for one, size in zip(tables, ids, strict=True)
        ]
        changed = share_of_lookups(sized, "fit")
        found.append(CurvePoint(rows_per_id=share, stored_bytes=stored_bytes(sized), changed_share=changed))
    return tuple(found)


Round: TypeAlias = Callable[[LeveredTable, int], LeveredTable | None]
"""Makes a table smaller, by so many bytes if a milder form is enough; None if it can't."""


class TableChange(Frozen):
    """What a step made of a table, in words; of tables that became one, `table` names the new one."""

    table: str
    before: str
    after: str
    bytes_before: int
    bytes_after: int


class Step(Frozen):
    """One lever. Shares are of all lookups that were counted, None if none were.

    Attributes:
        bytes_before, bytes_after: of all rows; of the last step, `shard`, of one shard's.
        changed_share: lookups that this lever changes, in the tables as they are after it: in a collision, of a pruned
            row, composed, of fewer dims, of a narrower dtype.
        all_changed_share: lookups that any lever so far changes, each once.
        note: why it did nothing, or what it needs.
    """

    lever: Lever
    needs_training: bool
    bytes_before: int
    bytes_after: int
    changed_share: float | None
    all_changed_share: float | None
    tables: tuple[TableChange, ...] = ()
    note: str = ""


class Proposal(Frozen):
    """Levers that make a model's rows fit into so many bytes; `shards` is 1 if they do without being divided."""

    limit_bytes: int
    bytes_before: int
    bytes_after: int
    shards: int
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Propose:
    """How far levers may go.

    Attributes:
        limit_bytes: to reach, 1 or more.
        max_collision_share: of hashed tables' lookups, above 0 and below 1; None for what each table's says.
        keep_share: of lookups that pruning leaves alone, above 0 and at most 1.
        levers: which may be tried; their order is `LEVERS`'.

    Raises:
        FittingError: one of them is out of range.
    """

    limit_bytes: int
    max_collision_share: float | None = None
    keep_share: float = DEFAULT_KEEP_SHARE
    levers: Sequence[str] = LEVERS

    def __post_init__(self) -> None:
        if self.limit_bytes < 1:
            raise FittingError(f"bytes {self.limit_bytes} must be 1 or more")
        if self.max_collision_share is not None and not 0 < self.max_collision_share < 1:
            raise FittingError(f"max_collision_share {self.max_collision_share} must be above 0 and below 1")
        if not 0 < self.keep_share <= 1:
            raise FittingError(f"keep_share {self.keep_share} must be above 0 and at most 1")
        if unknown := sorted(set(self.levers) - set(LEVERS)):
            raise FittingError(f"levers {unknown} are not among {list(LEVERS)}")

    def make(self, tables: Sequence[LeveredTable]) -> tuple[Proposal, tuple[LeveredTable, ...]]:
        """Apply one lever after the other until the tables fit; return what was done, and the tables."""
        done, steps, shards = tuple(tables), [], 1
        for lever in LEVERS:
            before = stored_bytes(done)
            if before <= self.limit_bytes:
                break
            if lever not in self.levers:
                continue
            if lever == "shard":
                shards = -(-before // self.limit_bytes)
                told = f"{shards} shards, none above {self.limit_bytes} bytes"
                steps.append(_step(lever, done, done, before, -(-before // shards), told))
                break
            after, note = self._pull(lever, done)
            steps.append(_step(lever, done, after, before, stored_bytes(after), note))
            done = after
        proposal = Proposal(
            limit_bytes=self.limit_bytes,
            bytes_before=stored_bytes(tables),
            bytes_after=stored_bytes(done),
            shards=shards,
            steps=tuple(steps),
        )
        return proposal, done

    def _pull(self, lever: Lever, tables: tuple[LeveredTable, ...]) -> tuple[tuple[LeveredTable, ...], str]:
        if lever == "fit":
            done = self._rounds(tables, [self._fitted])
            return done, _nothing(tables, done, "no hashed table with a trace of raw ids is larger than its ids need")
        if lever == "prune":
            done = self._rounds(tables, [partial(_pruned, 1.0), partial(_pruned, self.keep_share)])
            return done, _nothing(
                tables, done, "no table with counts has rows that nobody asks for", self._pruning(done)
            )
        if lever == "unify":
            done = self._unified(tables)
            return done, _nothing(
                tables, done, "no hashed tables alike with a trace of raw ids would be smaller as one"
            )
        if lever == "compose":
            largest = max(tables, key=lambda one: one.stored_bytes)
            done = self._rounds(tables, [lambda table, excess: _composed(table, excess) if table is largest else None])
            return done, _nothing(
                tables, done, "the largest table has no identity ids, is divided, or would not shrink"
            )
        if lever == "dims":
            done = self._rounds(tables, [partial(_narrowed, shape) for shape in _DIM_ROUNDS])
        else:
            done = self._rounds(tables, [partial(_coarsened, *dtypes) for dtypes in _DTYPE_ROUNDS])
        note = "by popularity: export needs counts" if any(one.class_bytes for one in done) else ""
        return done, _nothing(tables, done, "no table would be smaller", note)

    def _rounds(self, tables: tuple[LeveredTable, ...], rounds: Sequence[Round]) -> tuple[LeveredTable, ...]:
        """Try each round, mild to strong, on each table, largest first, until they fit."""
        done, total = list(tables), stored_bytes(tables)
        largest_first = sorted(range(len(done)), key=lambda at: -tables[at].stored_bytes)
        for make in rounds:
            for at in largest_first:
                if total <= self.limit_bytes:
                    return tuple(done)
                others = total - done[at].stored_bytes
                made = make(tables[at], others + tables[at].stored_bytes - self.limit_bytes)
                if made is not None and made.stored_bytes < done[at].stored_bytes:
                    done[at], total = made, others + made.stored_bytes
        return tuple(done)

    def _pruning(self, tables: Sequence[LeveredTable]) -> str:
        rarest = any(one.keep_share not in (None, 1.0) for one in tables)
        told = f"at export: export --counts FILE --prune{f' --keep-share {self.keep_share:g}' * rarest}"
        known = [one.rows for one in tables if one.asked is not None and one.rows is not None]
        lookups = sum(one.total for one in known)
        pruned = [
            one.rows.seen_once
            for one in tables
            if one.asked is not None and one.rows and one.kept_rows < one.num_embeddings
        ]
        if not lookups or not pruned:
            return told
        return f"{told}; and of lookups to come about {sum(pruned) / lookups:.2%} are of rows that the trace has not"

    def _collisions_allowed(self, tables: Sequence[LeveredTable]) -> float:
        return self.max_collision_share or min(one.table.max_collision_share for one in tables)

    def _fitted(self, table: LeveredTable, excess: int) -> LeveredTable | None:
        if not isinstance(table.table.id_mapping, HashMapping) or table.asked is None or not table.asked.ids.size:
            return None
        share = self._collisions_allowed([table])
        if table.changed("fit") > share * table.asked.counts.sum():
            return None
        row_bytes = max(table.stored_bytes // table.num_embeddings, 1)
        rows = max(smallest_size(table.asked, share), table.num_embeddings - -(-excess // row_bytes))
        return table.updated(num_embeddings=rows, default_row=0) if rows < table.num_embeddings else None

    def _unified(self, tables: tuple[LeveredTable, ...]) -> tuple[LeveredTable, ...]:
        """Join each group of tables alike, those of most bytes first, until all fit."""
        groups: dict[str, list[LeveredTable]] = {}
        for one in tables:
            mapping, names = one.table.id_mapping, one.table.feature_names
            # Features that share a table and a seed do so on purpose: equal ids of theirs mean the same.
            alone = len(names) == 1 or (isinstance(mapping, HashMapping) and mapping.salt == "per_feature")
            if isinstance(mapping, HashMapping) and alone and one.asked is not None and one.asked.ids.size:
                alike = one.table.model_dump_json(exclude=_OF_ONE_TABLE)
                groups.setdefault(alike, []).append(one)
        done = tables
        for members in sorted(groups.values(), key=stored_bytes, reverse=True):
            excess = stored_bytes(done) - self.limit_bytes
            if len(members) > 1 and excess > 0 and (made := self._joined(members, excess, done)) is not None:
                at = done.index(members[0])
                done = tuple(one for one in (*done[:at], made, *done[at:]) if one not in members)
        return done

    def _joined(
        self, members: Sequence[LeveredTable], excess: int, tables: Sequence[LeveredTable]
    ) -> LeveredTable | None:
        first, taken = members[0], {one.table.name for one in tables}
        names = (f"unified_{number}" for number in count(1))
        kept = [one.keep_share for one in members if one.keep_share is not None]
        share = self._collisions_allowed(members)
        joined = replace(first, keep_share=max(kept, default=None)).updated(
            name=next(name for name in names if name not in taken),
            num_embeddings=min(sum(one.num_embeddings for one in members), MAX_NUM_EMBEDDINGS),
            default_row=0,
            feature_names=tuple(name for one in members for name in one.table.feature_names),
            id_mapping=HashMapping(salt="per_feature"),
        )
        if joined.asked is None or joined.changed("unify") > share * joined.asked.counts.sum():
            return None
        if joined.keep_share is None:
            enough = joined.num_embeddings - -(-excess // max(joined.stored_bytes // joined.num_embeddings, 1))
            rows = max(smallest_size(joined.asked, share), enough)
            joined = joined.updated(num_embeddings=min(rows, joined.num_embeddings))
        return joined if joined.stored_bytes < stored_bytes(members) else None


def stored_bytes(tables: Iterable[LeveredTable]) -> int:
    """Count the bytes of all tables."""
    return sum(one.stored_bytes for one in tables)


def share_of_lookups(tables: Sequence[LeveredTable], by: Lever | None = None) -> float | None:
    """Return the share of lookups that one lever changes, or any; None if none were counted."""
    total = sum(one.rows.total for one in tables if one.rows is not None)
    return sum(one.changed(by) for one in tables) / total if total else None


def _nothing(before: Sequence[LeveredTable], after: Sequence[LeveredTable], why: str, note: str = "") -> str:
    return f"nothing: {why}" if stored_bytes(before) == stored_bytes(after) else note


def _step(
    lever: Lever,
    before: Sequence[LeveredTable],
    after: Sequence[LeveredTable],
    bytes_before: int,
    bytes_after: int,
    note: str,
) -> Step:
    changes = []
    for new in after:
        old = [one for one in before if set(one.table.feature_names) <= set(new.table.feature_names)]
        if old != [new]:
            told = "; ".join(f"{one.table.name} {one.told()}" if len(old) > 1 else one.told() for one in old)
            change = {"table": new.table.name, "before": told, "after": new.told()}
            changes.append(TableChange(**change, bytes_before=stored_bytes(old), bytes_after=new.stored_bytes))
    return Step(
        lever=lever,
        needs_training=lever in NEEDS_TRAINING and bool(changes),
        bytes_before=bytes_before,
        bytes_after=bytes_after,
        changed_share=share_of_lookups(after, lever) if changes else 0.0,
        all_changed_share=share_of_lookups(after),
        tables=tuple(changes),
        note=note,
    )


def _pruned(keep_share: float, table: LeveredTable, excess: int) -> LeveredTable | None:
    del excess  # which rows go is a question of lookups, not of bytes
    if table.rows is None or not table.rows.total or table.table.column_dims or table.is_composed:
        return None
    return replace(table, keep_share=keep_share)


def _composed(table: LeveredTable, excess: int) -> LeveredTable | None:
    """Take as many buckets as there is room for: (ceil(ids / buckets) + buckets) rows."""
    if table.table.id_mapping.kind != "identity" or table.is_divided:
        return None
    ids = table.num_embeddings
    least = max(isqrt(ids), ceil(ids * _LEAST_BUCKETS_SHARE))
    row_bytes = codec_for(table.stored[0][0].dtype, table.table.embedding_dim).row_bytes
    room = (table.stored_bytes - excess) // row_bytes - 1  # ceil adds less than a row
    buckets = (room + isqrt(room * room - 4 * ids)) // 2 if room > 0 and room * room > 4 * ids else 0
    mapping = QuotientRemainderMapping(buckets=min(max(buckets, least), ids))
    return replace(table, keep_share=None).updated(id_mapping=mapping)


def _narrowed(shape: Sequence[tuple[float | None, int]], table: LeveredTable, excess: int) -> LeveredTable | None:
    del excess
    dim = table.table.embedding_dim
    if table.is_divided or dim // shape[-1][1] < 2 or table.kept_rows < _LEAST_ROWS:
        return None
    # Even dims, as rows of int4 must have.
    narrow = [Block(share=share, dim=dim if divisor == 1 else dim // divisor // 2 * 2) for share, divisor in shape]
    return table.updated(blocks=tuple(narrow))


def _coarsened(
    hot: RowDtype, cold: RowDtype, hot_share: float, table: LeveredTable, excess: int
) -> LeveredTable | None:
    del excess
    own = [part.dtype for part in table.stored[0]]
    hot, cold = (min(wanted, one, key=WIDTH.__getitem__) for wanted, one in ((hot, own[0]), (cold, own[-1])))
    return table.in_dtypes(hot, cold, hot_share)
