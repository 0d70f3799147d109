"""Compile a model as a person writes it into stored tables: each way to make a table smaller, in a word.

A description has all that `ModelSpec` has, and for each table what makes it smaller: `num_embeddings` auto, blocks of
rows by popularity, a dtype for hot rows and another for cold ones, a projection, quotient and remainder, and pruning
at export. All of them come to the same: a table is stored as a few parts, whose rows are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, compress
from typing import Annotated, Literal, Self, cast

from pydantic import Discriminator, Field, Tag, model_validator

from loader.errors import ExportError
from loader.snapshot import tables as stored
from loader.snapshot.manifest import MAX_TABLES, AnyDenseModel, DenseInputs, FeatureSpec, ModelSpec
from loader.snapshot.tables import (
    FAIL_FAST,
    MAX_EMBEDDING_DIM,
    DividedTable,
    Frozen,
    IdentityMapping,
    Name,
    RowDtype,
    TableSpec,
)


class QuotientRemainderMapping(Frozen):
    """Ids 0 <= id < num_embeddings; each has two rows, id // buckets and id % buckets of tables of their own."""

    kind: Literal["quotient_remainder"] = "quotient_remainder"
    buckets: int = Field(ge=1, le=stored.MAX_NUM_EMBEDDINGS)
    combine: stored.Combine = "add"


class Block(Frozen):
    """A share of a table's rows, the hottest that no block before has; without one, all that are left.

    `dim` and `dtype` are the table's where they are not given.
    """

    share: float | None = Field(default=None, gt=0, lt=1)
    dim: int | None = Field(default=None, ge=1, le=MAX_EMBEDDING_DIM)
    dtype: RowDtype | None = None


class DtypeByPopularity(Frozen):
    """Number formats of the hottest rows, `hot_share` of them, and of all others."""

    hot: RowDtype
    cold: RowDtype
    hot_share: float = Field(gt=0, lt=1)


# Which member of a union is meant is told by the value's type, so that an error is about that one alone.
Rows = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[int, Field(ge=1, le=stored.MAX_NUM_EMBEDDINGS), Tag("number")],
    Discriminator(lambda given: "auto" if isinstance(given, str) else "number"),
]
Dtype = Annotated[
    Annotated[RowDtype, Tag("format")] | Annotated[DtypeByPopularity, Tag("by_popularity")],
    Discriminator(lambda given: "format" if isinstance(given, str) else "by_popularity"),
]


class TableDescription(Frozen):
    """A table as a person describes it; what `TableSpec` has as well means the same.

    Attributes:
        num_embeddings: rows; `auto` is the smallest number that ids can be hashed to such that at most
            `max_collision_share` of the lookups share their row with another id.
        dtype: of all rows, or by popularity.
        blocks: rows by popularity, the hottest first, with dims and dtypes of their own.
        project_to: the columns that features get, through a projection, of rows of `embedding_dim`.
        capacity: of a table with `keys`, in place of num_embeddings: how many keys it can have; `auto` is 1.25 times
            as many as it has at export.
    """

    name: Name
    num_embeddings: Rows = "auto"
    capacity: Rows | None = None
    keys: stored.Keys | None = None
    missing: stored.Missing = "zeros"
    embedding_dim: int = Field(ge=1, le=MAX_EMBEDDING_DIM)
    feature_names: Annotated[tuple[Name, ...], FAIL_FAST] = Field(min_length=1, max_length=stored.MAX_FEATURES)
    max_collision_share: float = Field(default=0.05, gt=0, lt=1)
    pooling: stored.Pooling = "sum"
    dtype: Dtype = "int8"
    bucketing: stored.Bucketing = "mixed"
    id_mapping: Annotated[
        IdentityMapping | stored.HashMapping | stored.VocabularyMapping | QuotientRemainderMapping,
        Field(discriminator="kind"),
    ] = IdentityMapping()
    unknown_id: stored.UnknownId = "reject"
    default_row: int = Field(default=0, ge=0)
    column_dims: Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_EMBEDDING_DIM)], ...], FAIL_FAST] = Field(
        default=(), max_length=stored.MAX_COLUMN_SLICES
    )
    blocks: Annotated[tuple[Block, ...], FAIL_FAST] = Field(default=(), max_length=stored.MAX_PARTS)
    project_to: int | None = Field(default=None, ge=1, le=MAX_EMBEDDING_DIM)

    @model_validator(mode="after")
    def _check(self) -> Self:
        where = f"table {self.name!r}"
        is_sized = "num_embeddings" in self.model_fields_set
        if self.keys is not None and self.capacity is not None:
            is_wrong = is_sized and self.num_embeddings != self.capacity
            self.__dict__["num_embeddings"] = self.capacity
        else:
            is_wrong = not is_sized or self.keys is not None or self.capacity is not None
        if is_wrong:
            raise ValueError(f"{where}: a table has either num_embeddings, or keys and a capacity")
        if self.keys is not None and (ways := self._ways()):
            raise ValueError(f"{where}: a table with keys is stored whole: it does not go with {ways[0]}")
        if self.num_embeddings == "auto" and self.keys is None and not isinstance(self.id_mapping, stored.HashMapping):
            raise ValueError(f"{where}: num_embeddings auto goes with id_mapping hash, not {self.id_mapping.kind}")
        if self.blocks:
            if not isinstance(self.dtype, str):
                raise ValueError(f"{where}: blocks have dtypes of their own; dtype by popularity is two blocks more")
            if any(block.share is None for block in self.blocks[:-1]) or self.blocks[-1].share is not None:
                raise ValueError(f"{where}: every block but the last needs a share, the last has what is left")
            if (total := sum(block.share or 0 for block in self.blocks)) >= 1:
                raise ValueError(f"{where}: blocks have {total:g} of the rows without the last; it must be below 1")
            if (widest := max(block.dim or 0 for block in self.blocks)) > self.width:
                raise ValueError(f"{where}: a block has {widest} columns, features get {self.width}")
        if self.project_to is not None and self.project_to <= self.embedding_dim:
            raise ValueError(f"{where}: project_to {self.project_to} is not above embedding_dim {self.embedding_dim}")
        if (ways := self._ways()) and self.column_dims:
            raise ValueError(f"{where}: column_dims goes with a table that is stored whole, not with {ways[0]}")
        if isinstance(self.id_mapping, QuotientRemainderMapping) and len(ways) > 1:
            raise ValueError(f"{where}: id_mapping quotient_remainder does not go with {ways[1]}")
        return self

    def _ways(self) -> list[str]:
        ways = {
            "id_mapping quotient_remainder": isinstance(self.id_mapping, QuotientRemainderMapping),
            "dtype by popularity": not isinstance(self.dtype, str),
            "blocks": bool(self.blocks),
            "project_to": self.project_to is not None,
        }
        return [way for way, is_used in ways.items() if is_used]

    @property
    def width(self) -> int:
        """Return the columns that features get."""
        return self.project_to or self.embedding_dim

    def compiled(
        self, kept: int | None = None, num_keys: int | None = None
    ) -> tuple[tuple[TableSpec, ...], DividedTable | None]:
        """Return the tables that it is stored as, and how it is divided into them, if it is.

        `kept` is how many rows are left of a table that is pruned, `num_keys` how many keys there are. Raises
        ExportError if `num_embeddings` is still auto, `kept` is not 1 to `num_embeddings`, a block has no row, or keys
        are to be pruned; ValueError as `TableSpec` and `DividedTable`.
        """
        rows = self.num_embeddings
        if self.keys is not None and kept is not None:
            raise ExportError(f"table {self.name!r}: a table with keys is not pruned: delete keys instead")
        if self.keys is not None and rows == "auto":
            if num_keys is None:
                raise ExportError(f"table {self.name!r}: capacity is auto: give its keys")
            rows = -(-num_keys * 5 // 4)
        if isinstance(rows, str):
            raise ExportError(f"table {self.name!r}: num_embeddings is auto: give a trace of the ids that come")
        if kept is not None and not 1 <= kept <= rows:
            raise ExportError(f"table {self.name!r}: {kept} rows are kept; allowed is 1 to num_embeddings {rows}")
        pruned = 0 if kept is None else rows - kept
        seen = {name: getattr(self, name) for name in ("name", "feature_names", "pooling", "unknown_id", "default_row")}
        if not self._ways() and not pruned:
            same = {name: getattr(self, name) for name in ("embedding_dim", "dtype", "bucketing", "column_dims")}
            keyed = {"keys": self.keys, "missing": self.missing}
            return (TableSpec(num_embeddings=rows, id_mapping=self.id_mapping, **seen, **same, **keyed),), None
        if self.column_dims:
            raise ExportError(f"table {self.name!r}: column_dims goes with a table that is stored whole, not pruned")
        mapping, blocks = self.id_mapping, self.blocks or (Block(),)
        if isinstance(mapping, QuotientRemainderMapping):
            if pruned:
                raise ExportError(f"table {self.name!r}: by quotient_remainder a row is of many ids: none is pruned")
            sizes, blocks = [-(-rows // mapping.buckets), min(rows, mapping.buckets)], (Block(), Block())
            names = [f"{self.name}.q", f"{self.name}.r"]
            division = {"by": "quotient_remainder", "buckets": mapping.buckets, "id_mapping": IdentityMapping()}
        else:
            division = {"id_mapping": mapping}
            if isinstance(self.dtype, DtypeByPopularity):
                blocks = (Block(share=self.dtype.hot_share, dtype=self.dtype.hot), Block(dtype=self.dtype.cold))
            left = rows - pruned
            sizes = [max(1, round((block.share or 0) * left)) for block in blocks[:-1]]
            if (last := left - sum(sizes)) < 1:
                raise ExportError(
                    f"table {self.name!r}: {len(blocks)} blocks of {left} rows: the last would have {last}"
                )
            sizes.append(last + (pruned > 0))
            names = [self.name] if len(blocks) == 1 else [f"{self.name}.b{number}" for number in range(len(blocks))]
        parts = tuple(
            TableSpec(
                name=name,
                num_embeddings=size,
                embedding_dim=block.dim or self.embedding_dim,
                dtype=block.dtype or cast("RowDtype", self.dtype),
                feature_names=self.feature_names,
                pooling=self.pooling,
                bucketing=self.bucketing,
            )
            for name, size, block in zip(names, sizes, blocks, strict=True)
        )
        divided = DividedTable(
            num_embeddings=rows, embedding_dim=self.width, parts=tuple(names), pruned=pruned, **seen, **division
        )
        return parts, divided


class ModelDescription(Frozen):
    """A model as a person describes it: `ModelSpec`, with tables as `TableDescription` says."""

    model: Name
    tables: Annotated[tuple[TableDescription, ...], FAIL_FAST] = Field(min_length=1, max_length=MAX_TABLES)
    features: Annotated[tuple[FeatureSpec, ...], FAIL_FAST] = Field(min_length=1, max_length=stored.MAX_FEATURES)
    dense_inputs: DenseInputs = DenseInputs()
    dense_model: AnyDenseModel

    @property
    def traced_features(self) -> tuple[set[str], set[str]]:
        """Features that a trace may have, and those of them whose ids can only be whole numbers."""
        kinds = [(table.id_mapping.kind, getattr(table.id_mapping, "id_type", "")) for table in self.tables]
        of_numbers = [kind == "identity" or id_type == "integer" for kind, id_type in kinds]
        names = (table.feature_names for table in compress(self.tables, of_numbers))
        return {feature.name for feature in self.features}, {*chain.from_iterable(names)}

    def compiled(self, kept: Mapping[str, int] | None = None, num_keys: Mapping[str, int] | None = None) -> ModelSpec:
        """Return the model as it is stored; `kept` is how many rows are left of tables that are pruned.

        `num_keys` is how many keys tables have whose capacity is auto.

        Raises ExportError as `TableDescription.compiled` and for an unknown table, ValueError as `ModelSpec`.
        """
        if unknown := sorted((kept or {}).keys() - (names := {table.name for table in self.tables})):
            raise ExportError(f"kept: unknown tables {unknown}; the model has {sorted(names)}")
        made = [table.compiled((kept or {}).get(table.name), (num_keys or {}).get(table.name)) for table in self.tables]
        return ModelSpec(
            model=self.model,
            tables=tuple(part for parts, _ in made for part in parts),
            features=self.features,
            divided=tuple(divided for _, divided in made if divided is not None),
            dense_inputs=self.dense_inputs,
            dense_model=self.dense_model,
        )
