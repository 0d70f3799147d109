"""Make a model's tables smaller until they fit, one lever after the other, and tell what each changes.

The levers, in the order in which they are tried, each only as far as needed:

| lever | what it does | needs training again |
|---|---|---|
| fit | hashed tables get the smallest size that holds collisions down | yes |
| prune | rows that nobody asks for go; then the rarest | no |
| unify | hashed tables alike share one, each feature with a seed of its own | yes |
| compose | the largest table of identity ids becomes two small ones: quotient and remainder | yes |
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
from math import ceil, isqrt
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from loader.id_counts import IdCounts
from loader.snapshot.codecs import codec_for
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.tables import MAX_NUM_EMBEDDINGS, Frozen, HashMapping, IdentityMapping, RowDtype, TableSpec
from router.errors import FittingError
from router.fitting import DEFAULT_COLLISION_SHARE, RowLookups, TableIds, smallest_size

Lever: TypeAlias = Literal["fit", "prune", "unify", "compose", "dims", "precision", "shard"]
LEVERS: tuple[Lever, ...] = get_args(Lever)
NEEDS_TRAINING = frozenset({"fit", "unify", "compose", "dims"})
DEFAULT_KEEP_SHARE = 0.999
WIDTH: dict[RowDtype, int] = {"int4": 0, "int8": 1, "fp16": 2, "fp32": 3}
"""The dtypes of rows from the narrowest."""

_LEAST_BUCKETS_SHARE = 1 / 200
"""Of a composed table's ids: 10 million buckets for 2 * 10^9 ids. Fewer share a remainder among more ids."""
_DIM_ROUNDS: tuple[tuple[tuple[float, int], ...], ...] = (
    ((0.5, 1), (0.0, 2)),
    ((0.1, 1), (0.0, 4)),
    ((0.05, 1), (0.25, 4), (0.0, 16)),
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


class Block(NamedTuple):
    """Rows that stand together by popularity: their share of all rows (of the last block 0: what is left)."""

    share: float
    dim: int
    dtype: RowDtype


def class_bytes(num_embeddings: int, marked: Iterable[int]) -> int:
    """Count the bytes that say which class each row is in: a bitmap for each class but the last.

    Each is over the rows that no class before has: a bit a row, and a count of 32 bits for every 512.
    """
    total = 0
    for rows in marked:
        total += -(-num_embeddings // 64) * 8 + -(-num_embeddings // 512) * 4
        num_embeddings -= rows
    return total


@dataclass(frozen=True, eq=False)
class LeveredTable:
    """A table, and the levers that are on.

    Attributes:
        spec: with its present size and dtype.
        described: the dtype it had first.
        traced: by feature of the model, the ids it was asked for, where they are known.
        observed: how often its rows are looked up, where only that is known.
        keep_share: pruned to the hottest rows with that share of lookups; None if it is not.
        buckets: composed of quotients and remainders of so many; 0 if it is not.
        blocks: by falling popularity; empty for rows that are all alike.
    """

    spec: TableSpec
    described: RowDtype
    traced: Mapping[str, IdCounts]
    observed: RowLookups | None = None
    keep_share: float | None = None
    buckets: int = 0
    blocks: tuple[Block, ...] = ()

    @cached_property
    def asked(self) -> TableIds | None:
        """Return the raw ids that it was asked for; None if there is no trace of them."""
        return None if self.observed is not None else TableIds.of(self.spec, self.traced)

    @cached_property
    def rows(self) -> RowLookups | None:
        """Return how often its rows are looked up; None if nobody knows."""
        return self.observed if self.asked is None else self.asked.rows(self.spec)

    @cached_property
    def kept_rows(self) -> int:
        """Count the rows that pruning leaves."""
        if self.keep_share is None or self.rows is None:
            return self.spec.num_embeddings
        return max(self.rows.rows_for(self.keep_share), 1)

    @property
    def is_pruned(self) -> bool:
        """Tell whether rows went."""
        return self.kept_rows < self.spec.num_embeddings

    @cached_property
    def block_rows(self) -> tuple[int, ...]:
        """Count the rows of each block; of a table without blocks, its rows."""
        left, found = self.kept_rows, []
        for block in self.blocks[:-1]:
            found.append(min(round(block.share * self.kept_rows), left))
            left -= found[-1]
        return (*found, left)

    @cached_property
    def stored_bytes(self) -> int:
        """Count the bytes of its rows with their scales, of what says which row is where, and of projections."""
        spec = self.spec
        row_bytes = sum(codec_for(spec.dtype, dim).row_bytes for dim in spec.slice_dims)
        if self.buckets:
            return (-(-spec.num_embeddings // self.buckets) + self.buckets) * row_bytes
        rows = list(self.block_rows)
        classes = class_bytes(spec.num_embeddings, rows if self.is_pruned else rows[:-1])
        rows[-1] += self.is_pruned  # one row for all that went
        if not self.blocks:
            return rows[0] * row_bytes + classes
        stored = sum(n * codec_for(one.dtype, one.dim).row_bytes for one, n in zip(self.blocks, rows, strict=True))
        projections = sum(4 * one.dim * spec.embedding_dim for one in self.blocks if one.dim < spec.embedding_dim)
        return stored + classes + projections

    def changed(self, by: Lever | None = None) -> int:
        """Count the lookups that one lever changes, or, each once, all of them."""
        if self.rows is None:
            return 0
        if self.buckets:
            return self.rows.total if by in (None, "compose") else 0
        if by in ("fit", "unify"):
            return self.rows.colliding
        if by == "prune":
            return self.rows.total - self.rows.of_hottest(self.kept_rows)
        # Blocks are by popularity: what is less than described begins after some hottest rows.
        first = self._rows_as_described(dims=by in (None, "dims"), dtypes=by in (None, "precision"))
        if by is None:
            return self.rows.changed(first)
        return self.rows.of_hottest(self.kept_rows) - self.rows.of_hottest(first)

    def _rows_as_described(self, *, dims: bool, dtypes: bool) -> int:
        """Count the rows before the first block of fewer dims, or of a narrower dtype than described."""
        spec, first = self.spec, 0
        for block, rows in zip(
            self.blocks or (Block(0.0, spec.embedding_dim, spec.dtype),), self.block_rows, strict=True
        ):
            if (dims and block.dim < spec.embedding_dim) or (dtypes and WIDTH[block.dtype] < WIDTH[self.described]):
                return first
            first += rows
        return first

    def resized(self, **changes: Any) -> LeveredTable:
        """Return it with other fields of its spec, which are checked."""
        fields = {name: getattr(self.spec, name) for name in TableSpec.model_fields}
        return replace(self, spec=TableSpec(**{**fields, **changes}))

    def told(self) -> str:
        """Say what it is: rows, dims, dtypes."""
        spec = self.spec
        if self.buckets:
            quotients = -(-spec.num_embeddings // self.buckets)
            return f"{quotients} quotients + {self.buckets} remainders x {spec.embedding_dim} {spec.dtype}"
        blocks = self.blocks or (Block(0.0, spec.embedding_dim, spec.dtype),)
        parts = [f"{n} x {one.dim} {one.dtype}" for one, n in zip(blocks, self.block_rows, strict=True)]
        return " + ".join(parts) + (f" of {spec.num_embeddings} rows" if self.is_pruned else "")


CURVE_SHARES = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01)


class CurvePoint(Frozen):
    """All hashed tables with so many rows for each id that occurs: bytes of the model, and lookups in a collision."""

    rows_per_id: float
    stored_bytes: int
    changed_share: float | None


def size_curve(tables: Sequence[LeveredTable]) -> tuple[CurvePoint, ...]:
    """Measure the model with hashed tables of 100 % down to 1 % of the ids that occur; empty if no ids are known."""
    is_hashed = [isinstance(one.spec.id_mapping, HashMapping) and one.asked is not None for one in tables]
    if not any(is_hashed):
        return ()
    found = []
    for share in CURVE_SHARES:
        sized = [
            one.resized(num_embeddings=max(ceil(share * one.asked.ids.size), 1), default_row=0)
            if hashed and one.asked is not None
            else one
            for one, hashed in zip(tables, is_hashed, strict=True)
        ]
        changed = share_of_lookups(sized, "fit")
        found.append(CurvePoint(rows_per_id=share, stored_bytes=stored_bytes(sized), changed_share=changed))
    return tuple(found)


def described(spec: ModelSpec, tables: Sequence[LeveredTable]) -> dict[str, Any]:
    """Write the model with its levers as a description, the JSON that `export` reads.

    Pruning is not part of it: it is a flag of `export`.
    """
    document = spec.model_dump(mode="json", exclude_defaults=True)
    document["tables"] = [_described_table(one) for one in tables]
    return document


def _described_table(table: LeveredTable) -> dict[str, Any]:
    spec, blocks = table.spec, table.blocks
    document = {**spec.model_dump(mode="json", exclude_defaults=True), "dtype": spec.dtype}
    if isinstance(spec.id_mapping, HashMapping):
        document["id_mapping"] = spec.id_mapping.model_dump()
    if table.buckets:
        document["id_mapping"] = {"kind": "quotient_remainder", "buckets": table.buckets, "combine": "add"}
    if len(blocks) == 2 and all(one.dim == spec.embedding_dim for one in blocks):
        hot, cold = blocks
        document["dtype"] = {"hot": hot.dtype, "cold": cold.dtype, "hot_share": hot.share}
    elif blocks:
        told: list[dict[str, Any]] = [{"share": one.share, "dim": one.dim, "dtype": one.dtype} for one in blocks]
        del told[-1]["share"]
        document["blocks"] = told
    return document


Round: TypeAlias = Callable[[LeveredTable, int], LeveredTable | None]
"""Makes a table smaller, by so many bytes if a milder form is enough; None if it can't."""


def levered(
    spec: ModelSpec, traced: Mapping[str, IdCounts], observed: Mapping[str, RowLookups]
) -> tuple[LeveredTable, ...]:
    """Return a model's tables with no lever on.

    Args:
        spec: the model.
        traced: by feature, ids of a trace.
        observed: by table, how often its rows are looked up; of tables without a trace of ids.
    """
    return tuple(LeveredTable(one, one.dtype, traced, observed.get(one.name)) for one in spec.tables)


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
        max_collision_share: of hashed tables' lookups, above 0 and below 1.
        keep_share: of lookups that pruning leaves alone, above 0 and at most 1.
        levers: which may be tried; their order is `LEVERS`'.

    Raises:
        FittingError: one of them is out of range.
    """

    limit_bytes: int
    max_collision_share: float = DEFAULT_COLLISION_SHARE
    keep_share: float = DEFAULT_KEEP_SHARE
    levers: Sequence[str] = LEVERS

    def __post_init__(self) -> None:
        if self.limit_bytes < 1:
            raise FittingError(f"bytes {self.limit_bytes} must be 1 or more")
        if not 0 < self.max_collision_share < 1:
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
            note = "at export, with the same counts: export --prune"
            return done, _nothing(tables, done, "no table with counts has rows that nobody asks for", note)
        if lever == "unify":
            done = self._unified(tables)
            return done, _nothing(
                tables, done, "no hashed tables alike with a trace of raw ids would be smaller as one"
            )
        if lever == "compose":
            able = [
                one for one in tables if isinstance(one.spec.id_mapping, IdentityMapping) and not one.spec.column_dims
            ]
            largest = max(able, key=lambda one: one.stored_bytes, default=None)
            done = self._rounds(tables, [lambda table, excess: _composed(table, excess) if table is largest else None])
            return done, _nothing(tables, done, "no table of identity ids would be smaller")
        if lever == "dims":
            done = self._rounds(tables, [partial(_narrowed, shape) for shape in _DIM_ROUNDS])
        else:
            done = self._rounds(tables, [partial(_coarsened, *dtypes) for dtypes in _DTYPE_ROUNDS])
        note = "by popularity: export needs counts" if any(one.blocks for one in done) else ""
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

    def _fitted(self, table: LeveredTable, excess: int) -> LeveredTable | None:
        if not isinstance(table.spec.id_mapping, HashMapping) or table.asked is None or not table.asked.ids.size:
            return None
        if table.changed("fit") > self.max_collision_share * table.asked.counts.sum():
            return None
        row_bytes = table.stored_bytes // table.spec.num_embeddings
        enough = table.spec.num_embeddings - -(-excess // row_bytes)
        rows = max(smallest_size(table.asked, self.max_collision_share), enough)
        return table.resized(num_embeddings=rows, default_row=0) if rows < table.spec.num_embeddings else None

    def _unified(self, tables: tuple[LeveredTable, ...]) -> tuple[LeveredTable, ...]:
        """Join each group of tables alike, those of most bytes first, until all fit."""
        groups: dict[tuple[Any, ...], list[LeveredTable]] = {}
        for one in tables:
            mapping, spec = one.spec.id_mapping, one.spec
            # Features that share a table and a seed do so on purpose: equal ids of theirs mean the same.
            alone = len(spec.feature_names) == 1 or (isinstance(mapping, HashMapping) and mapping.salt == "per_feature")
            if isinstance(mapping, HashMapping) and alone and one.asked is not None and one.asked.ids.size:
                alike = (spec.embedding_dim, spec.dtype, spec.pooling, spec.column_dims, spec.bucketing, one.described)
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
        first, taken = members[0], {one.spec.name for one in tables}
        names = (
            f"unified_{first.spec.embedding_dim}{end}" for end in ("", *(f"_{number}" for number in range(2, 5000)))
        )
        kept = [one.keep_share for one in members if one.keep_share is not None]
        rows = min(sum(one.spec.num_embeddings for one in members), MAX_NUM_EMBEDDINGS)
        joined = replace(first, keep_share=max(kept, default=None)).resized(
            name=next(name for name in names if name not in taken),
            num_embeddings=rows,
            default_row=0,
            feature_names=tuple(name for one in members for name in one.spec.feature_names),
            id_mapping=HashMapping(salt="per_feature"),
        )
        if joined.asked is None or joined.changed("unify") > self.max_collision_share * joined.asked.counts.sum():
            return None
        if joined.keep_share is None:
            row_bytes = joined.stored_bytes // rows
            rows -= -(-max(excess - stored_bytes(members) + joined.stored_bytes, 0) // row_bytes)
        smallest = smallest_size(joined.asked, self.max_collision_share)
        joined = joined.resized(num_embeddings=max(min(rows, joined.spec.num_embeddings), smallest))
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
        old = [one for one in before if set(one.spec.feature_names) <= set(new.spec.feature_names)]
        if old != [new]:
            told = "; ".join(f"{one.spec.name} {one.told()}" if len(old) > 1 else one.told() for one in old)
            change = {"table": new.spec.name, "before": told, "after": new.told()}
            changes.append(TableChange(**change, bytes_before=stored_bytes(old), bytes_after=new.stored_bytes))
    return Step(
        lever=lever,
        needs_training=lever in NEEDS_TRAINING and bool(changes),
        bytes_before=bytes_before,
        bytes_after=bytes_after,
        changed_share=0.0 if lever == "shard" else share_of_lookups(after, lever),
        all_changed_share=share_of_lookups(after),
        tables=tuple(changes),
        note=note,
    )


def _pruned(keep_share: float, table: LeveredTable, excess: int) -> LeveredTable | None:
    del excess  # which rows go is a question of lookups, not of bytes
    if table.rows is None or not table.rows.total:
        return None
    return replace(table, keep_share=keep_share)


def _composed(table: LeveredTable, excess: int) -> LeveredTable | None:
    """Take as many buckets as there is room for: (ceil(ids / buckets) + buckets) rows."""
    spec = table.spec
    row_bytes = codec_for(spec.dtype, spec.embedding_dim).row_bytes
    ids, least = spec.num_embeddings, max(isqrt(spec.num_embeddings), ceil(spec.num_embeddings * _LEAST_BUCKETS_SHARE))
    room = (table.stored_bytes - excess) // row_bytes - 1  # ceil adds less than a row
    buckets = (room + isqrt(room * room - 4 * ids)) // 2 if room > 0 and room * room > 4 * ids else 0
    made = replace(table, keep_share=None, blocks=(), buckets=min(max(buckets, least), ids))
    return made if made.stored_bytes < table.stored_bytes else None


def _narrowed(shape: Sequence[tuple[float, int]], table: LeveredTable, excess: int) -> LeveredTable | None:
    del excess
    spec = table.spec
    if table.buckets or spec.column_dims or spec.embedding_dim // shape[-1][1] < 2:
        return None
    # Even, as rows of int4 must be.
    dims = [
        spec.embedding_dim // divisor // (2 if divisor > 1 else 1) * (2 if divisor > 1 else 1) for _, divisor in shape
    ]
    return _in_blocks(table, [Block(share, dim, spec.dtype) for (share, _), dim in zip(shape, dims, strict=True)])


def _coarsened(
    hot: RowDtype, cold: RowDtype, hot_share: float, table: LeveredTable, excess: int
) -> LeveredTable | None:
    del excess
    spec = table.spec
    dims = [one.dim for one in table.blocks] or list(spec.slice_dims)
    if "int4" in (hot, cold) and any(dim % 2 for dim in dims):
        return None

    def narrower(wanted: RowDtype) -> RowDtype:
        return min(wanted, spec.dtype, key=lambda dtype: WIDTH[dtype])

    if table.blocks:
        first, *others = table.blocks
        blocks = [first._replace(dtype=narrower(hot)), *(one._replace(dtype=narrower(cold)) for one in others)]
        return replace(table, blocks=tuple(blocks))
    if narrower(hot) == narrower(cold):
        return table.resized(dtype=narrower(cold))
    if table.buckets or spec.column_dims:
        return None
    dim = spec.embedding_dim
    return _in_blocks(table, [Block(hot_share, dim, narrower(hot)), Block(0.0, dim, narrower(cold))])


def _in_blocks(table: LeveredTable, blocks: Sequence[Block]) -> LeveredTable | None:
    made = replace(table, blocks=tuple(blocks))
    return made if min(made.block_rows) > 0 else None
