"""Propose how a model's tables become small enough: what needs no training first, then what changes least.

Each lever of docs/levers.md goes only as far as needed. First unused rows are pruned, then bits narrowed, then the
rarest rows pruned. If that is not enough, the next lever is always the one that changes the fewest lookups for each
byte that it saves of those above the limit. What is left is divided over shards.

A lookup is changed if it no longer gets an undivided row of its own: its id shares the row with another one that occurs
(in a collision), or the row is pruned, composed, or of fewer dims. A row of a narrower dtype is the same row, rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil, inf, isqrt
from typing import Any, Literal, Self, TypeAlias, get_args

from loader.access_counts import AccessCounts
from loader.description import Block, DtypeByPopularity, QuotientRemainderMapping, TableDescription
from loader.divided_rows import rows_with_share
from loader.snapshot.codecs import RowCodec
from loader.snapshot.row_classes import classes_bytes
from loader.snapshot.tables import DividedTable, Frozen, HashMapping, RowDtype, TableSpec
from router.table_sizing import RowLookups, TableIds, smallest_size

Lever: TypeAlias = Literal["prune", "precision", "fit", "compose", "dims", "shard"]
LEVERS: tuple[Lever, ...] = get_args(Lever)
TRAINED_LEVERS: tuple[Lever, ...] = ("fit", "compose", "dims")
_NARROWEST_FIRST: tuple[RowDtype, ...] = ("int4", "int8", "fp16", "fp32")

_LEAST_BUCKETS_SHARE = 1 / 200
"""Of a composed table's ids: 10 million buckets for 2 * 10^9 ids. Fewer share a remainder among more ids."""
_DIM_ROUNDS: tuple[tuple[tuple[float | None, int], ...], ...] = (
    ((0.5, 1), (None, 2)),
    ((0.1, 1), (None, 4)),
    ((0.05, 1), (0.25, 4), (None, 16)),
)
"""From mild to strong: shares of rows by falling popularity, the last one what is left, and what divides their dim."""
DTYPE_ROUNDS: tuple[tuple[RowDtype, RowDtype, float], ...] = (
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


@dataclass(frozen=True, eq=False)
class LeveredTable:
    """A table as it is described, with the levers that are on.

    Attributes:
        table: its `num_embeddings` is a number.
        traces: by feature of the model, the ids of a trace, where they are known.
        ids: the table's ids; None if there is no trace of them.
        observed: how often its rows are looked up, where only that is known.
        keep_share: pruned to the hottest rows with that share of lookups; None if it is not.
    """

    table: TableDescription
    traces: Mapping[str, AccessCounts]
    ids: TableIds | None = None
    observed: RowLookups | None = None
    keep_share: float | None = None

    @classmethod
    def of(
        cls, table: TableDescription, traces: Mapping[str, AccessCounts], observed: RowLookups | None = None
    ) -> Self:
        """Return a table with no lever on; `observed` is of a table without a trace of ids."""
        return cls(table, traces, TableIds.of(table, traces) if observed is None else None, observed)

    @cached_property
    def rows(self) -> RowLookups | None:
        """Return how often its rows are looked up; None if that is not known."""
        return self.observed if self.ids is None else self.ids.rows(self.table)

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
        return self.table.compiled(None if self.table.keys else self.kept_rows)

    @property
    def class_bytes(self) -> int:
        """Count the bytes that say which row is where, keys' too, and of projections, which make narrow rows wide."""
        (parts, divided), width = self.stored, self.table.width
        projections = sum(4 * part.embedding_dim * width for part in parts if part.embedding_dim < width)
        keys = sum(part.num_embeddings * part.key_bytes * len(part.slice_dims) for part in parts)
        return projections + keys + (0 if divided is None else classes_bytes(divided, parts))

    @cached_property
    def stored_bytes(self) -> int:
        """Count the bytes of its rows with their scales, and `class_bytes`."""
        return self.class_bytes + sum(
            part.num_embeddings * RowCodec(part.dtype, dim).row_bytes
            for part in self.stored[0]
            for dim in part.slice_dims
        )

    @property
    def is_indivisible(self) -> bool:
        """Return whether its rows can't be divided by popularity, nor pruned."""
        by_column_or_key = self.table.column_dims or self.table.keys
        return bool(by_column_or_key) or self.table.id_mapping.kind == "quotient_remainder"

    @property
    def is_divided(self) -> bool:
        """Return whether it can't be made parts of: it has some, columns or keys, pruning aside."""
        table = self.table
        return len(self.stored[0]) > 1 or bool(table.column_dims or table.project_to or table.keys)

    @cached_property
    def changed(self) -> int:
        """Count the lookups that do not get an undivided row of their own, each once; 0 if none were counted."""
        if self.rows is None:
            return 0
        if self.table.id_mapping.kind == "quotient_remainder":
            return self.rows.total
        # Parts are by popularity: all rows from the first narrow part on are changed.
        undivided = 0
        for part in self.stored[0]:
            if part.embedding_dim < self.table.width:
                return self.rows.changed(undivided)
            undivided += part.num_embeddings
        return self.rows.changed(self.kept_rows)

    def updated(self, **changes: Any) -> LeveredTable:
        """Return it with other fields of its description, which are checked."""
        fields = {name: getattr(self.table, name) for name in TableDescription.model_fields}
        table, ids = TableDescription(**{**fields, **changes}), self.ids
        if ids is not None and not changes.keys().isdisjoint({"feature_names", "id_mapping"}):
            ids = TableIds.of(table, self.traces)
        return replace(self, table=table, ids=ids)

    def __str__(self) -> str:
        parts, divided = self.stored
        words = " + ".join(f"{part.num_embeddings} x {part.embedding_dim} {part.dtype}" for part in parts)
        return f"{words} of {self.num_embeddings} rows" if divided is not None and divided.pruned else words

    def in_dtypes(self, hot: RowDtype, cold: RowDtype, hot_share: float) -> LeveredTable:
        """Return it with rows of other dtypes, the hottest of one; where it has blocks, the first is hot.

        Rows of an odd dim, which int4 can't have, are int8 in its place; what can't be divided is all cold.
        """
        table = self.table
        is_odd = any(dim % 2 for part in self.stored[0] for dim in part.slice_dims)
        hot, cold = (("int8" if is_odd and dtype == "int4" else dtype) for dtype in (hot, cold))
        if table.blocks:
            blocks = [{**dict(block), "dtype": cold if number else hot} for number, block in enumerate(table.blocks)]
            return self.updated(blocks=blocks, dtype=cold)
        if hot == cold or self.is_indivisible or self.kept_rows < _LEAST_ROWS:
            return self.updated(dtype=cold)
        return self.updated(dtype=DtypeByPopularity(hot=hot, cold=cold, hot_share=hot_share))


Tables: TypeAlias = tuple[LeveredTable, ...]


class TableChange(Frozen):
    """What a step made of a table, in words."""

    table: str
    before: str
    after: str
    bytes_before: int
    bytes_after: int


class Step(Frozen):
    """A lever that made tables smaller. Shares are of all lookups that were counted, None if none were.

    Attributes:
        bytes_before, bytes_after: of all rows; of the last step, `shard`, of one shard's.
        changed_share: lookups that this step changes beyond those that were changed before.
        all_changed_share: lookups that are changed after it, each once.
    """

    lever: Lever
    needs_training: bool
    bytes_before: int
    bytes_after: int
    changed_share: float | None
    all_changed_share: float | None
    tables: tuple[TableChange, ...] = ()


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
        levers: which may be proposed, of `LEVERS`.
    """

    limit_bytes: int
    max_collision_share: float | None = None
    keep_share: float = 0.999
    levers: Sequence[str] = LEVERS

    def make(self, tables: Sequence[LeveredTable]) -> tuple[Proposal, Tables]:
        """Apply levers until the tables fit; return the steps that changed something, and the tables."""
        done, steps, shards = tuple(tables), list[Step](), 1
        untrained: list[tuple[Lever, Sequence[Round]]] = [
            ("prune", [partial(_pruned, 1.0)]),
            ("precision", [partial(_coarsened, *dtypes) for dtypes in DTYPE_ROUNDS]),
            ("prune", [partial(_pruned, self.keep_share)]),
        ]
        for lever, rounds in untrained:
            after = self._rounds(done, rounds) if lever in self.levers else done
            if after != done:
                steps.append(self._step(lever, done, after))
                done = after
        trained = [lever for lever in TRAINED_LEVERS if lever in self.levers]
        while (cheapest := self._cheapest(done, trained)) is not None:
            steps.append(self._step(*cheapest))
            done = cheapest[2]
            trained.remove(cheapest[0])
        total = stored_bytes(done)
        if total > self.limit_bytes and "shard" in self.levers:
            shards = -(-total // self.limit_bytes)
            steps.append(self._step("shard", done, done).model_copy(update={"bytes_after": -(-total // shards)}))
        sizes = {"limit_bytes": self.limit_bytes, "bytes_before": stored_bytes(tables), "bytes_after": total}
        return Proposal(**sizes, shards=shards, steps=tuple(steps)), done

    def _cheapest(self, tables: Tables, levers: Iterable[Lever]) -> tuple[Lever, Tables, Tables] | None:
        """Return the lever that changes the fewest lookups for each byte saved, the tables, and what it makes of them.

        Bytes below the limit save nothing. Levers on tables whose lookups are unknown come last. None if none helps.
        """
        total, best, least = stored_bytes(tables), None, inf
        for lever in levers if total > self.limit_bytes else ():
            after = self._trained(lever, tables)
            if (saved := total - max(stored_bytes(after), self.limit_bytes)) > 0:
                is_known = all(table.rows is not None for table in after if table not in tables)
                cost = (_changed(after) - _changed(tables)) / saved if is_known else inf
                if best is None or cost < least:
                    best, least = (lever, tables, after), cost
        return best

    def _trained(self, lever: Lever, tables: Tables) -> Tables:
        if lever == "fit":
            return self._rounds(tables, [self._fitted])
        if lever == "dims":
            return self._rounds(tables, [partial(_narrowed, shape) for shape in _DIM_ROUNDS])
        largest = max(tables, key=lambda table: table.stored_bytes)
        return self._rounds(tables, [lambda table, excess: _composed(table, excess) if table is largest else None])

    def _rounds(self, tables: Tables, rounds: Sequence[Round]) -> Tables:
        """Try each round, mild to strong, on each table, largest first, until they fit."""
        done, total = list(tables), stored_bytes(tables)
        largest_first = sorted(range(len(done)), key=lambda number: -tables[number].stored_bytes)
        for make in rounds:
            for number in largest_first:
                if total <= self.limit_bytes:
                    return tuple(done)
                others = total - done[number].stored_bytes
                made = make(tables[number], others + tables[number].stored_bytes - self.limit_bytes)
                if made is not None and made.stored_bytes < done[number].stored_bytes:
                    done[number], total = made, others + made.stored_bytes
        return tuple(done)

    def _step(self, lever: Lever, before: Sequence[LeveredTable], after: Sequence[LeveredTable]) -> Step:
        changes = [
            TableChange(
                table=new.table.name,
                before=str(old),
                after=str(new),
                bytes_before=old.stored_bytes,
                bytes_after=new.stored_bytes,
            )
            for old, new in zip(before, after, strict=True)
            if old != new
        ]
        share, all_changed = share_of_lookups(before), share_of_lookups(after)
        return Step(
            lever=lever,
            needs_training=lever in TRAINED_LEVERS,
            bytes_before=stored_bytes(before),
            bytes_after=stored_bytes(after),
            changed_share=None if share is None or all_changed is None else all_changed - share,
            all_changed_share=all_changed,
            tables=tuple(changes),
        )

    def _fitted(self, table: LeveredTable, excess: int) -> LeveredTable | None:
        if not isinstance(table.table.id_mapping, HashMapping) or table.ids is None or not table.ids.ids.size:
            return None
        share = self.max_collision_share or table.table.max_collision_share
        if table.ids.rows(table.table).colliding > share * table.ids.counts.sum():
            return None
        row_bytes = max(table.stored_bytes // table.num_embeddings, 1)
        rows = max(smallest_size(table.ids, share), table.num_embeddings - -(-excess // row_bytes))
        return table.updated(num_embeddings=rows, default_row=0) if rows < table.num_embeddings else None


def stored_bytes(tables: Iterable[LeveredTable]) -> int:
    """Count the bytes of all tables."""
    return sum(table.stored_bytes for table in tables)


def _changed(tables: Iterable[LeveredTable]) -> int:
    return sum(table.changed for table in tables)


def share_of_lookups(tables: Sequence[LeveredTable]) -> float | None:
    """Return the share of lookups that are changed; None if none were counted."""
    total = sum(table.rows.total for table in tables if table.rows is not None)
    return _changed(tables) / total if total else None


Round: TypeAlias = Callable[[LeveredTable, int], LeveredTable | None]
"""Makes a table smaller, by so many bytes if a milder form is enough; None if it can't."""


def _pruned(keep_share: float, table: LeveredTable, _excess: int) -> LeveredTable | None:
    is_counted = table.rows is not None and table.rows.total > 0
    return replace(table, keep_share=keep_share) if is_counted and not table.is_indivisible else None


def _composed(table: LeveredTable, excess: int) -> LeveredTable | None:
    """Return it with as many buckets as there is room for: (ceil(ids / buckets) + buckets) rows."""
    if table.table.id_mapping.kind != "identity" or table.is_divided:
        return None
    ids = table.num_embeddings
    least = max(isqrt(ids), ceil(ids * _LEAST_BUCKETS_SHARE))
    row_bytes = RowCodec(table.stored[0][0].dtype, table.table.embedding_dim).row_bytes
    room = (table.stored_bytes - excess) // row_bytes - 1  # ceil adds less than a row
    buckets = (room + isqrt(room * room - 4 * ids)) // 2 if room > 0 and room * room > 4 * ids else 0
    mapping = QuotientRemainderMapping(buckets=min(max(buckets, least), ids))
    return replace(table, keep_share=None).updated(id_mapping=mapping)


def _narrowed(shape: Sequence[tuple[float | None, int]], table: LeveredTable, _excess: int) -> LeveredTable | None:
    dim = table.table.embedding_dim
    if table.is_divided or dim // shape[-1][1] < 2 or table.kept_rows < _LEAST_ROWS:
        return None
    # Even dims, as rows of int4 must have.
    narrow = [Block(share=share, dim=dim if divisor == 1 else dim // divisor // 2 * 2) for share, divisor in shape]
    return table.updated(blocks=tuple(narrow))


def _coarsened(hot: RowDtype, cold: RowDtype, hot_share: float, table: LeveredTable, _excess: int) -> LeveredTable:
    parts, narrower = table.stored[0], partial(min, key=_NARROWEST_FIRST.index)
    return table.in_dtypes(narrower(hot, parts[0].dtype), narrower(cold, parts[-1].dtype), hot_share)
