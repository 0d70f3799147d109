"""Describe tables: how ids become rows, and how rows are stored. The part of a model that a shard node needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator

from loader.errors import cut

MAX_NUM_EMBEDDINGS = 2**32 - 1
MAX_EMBEDDING_DIM = 4096
MAX_COLUMN_SLICES = 32
MAX_FEATURES = 4096
MAX_PARTS = 8
RowDtype = Literal["int8", "int4", "fp16", "fp32"]
Pooling = Literal["sum", "mean", "none"]

Bucketing = Literal["mixed", "range"]
Combine = Literal["add"]
NUM_BUCKETS: dict[Bucketing, int] = {"mixed": 4096, "range": 256}
UnknownId = Literal["reject", "default_row", "skip"]
Keys = Literal["int64", "string"]
Missing = Literal["zeros", "mean", "skip"]
# A name becomes a folder, a metric label and a JSON key: no separators, no leading dot.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}$")]
MAX_NAME_LENGTH = 128
# Lists end at their first bad item, so that a list of a million bad ones costs one error.
FAIL_FAST = FailFast()
_ID_MASK = (1 << 63) - 1
KEY_BYTES = 20
"""Of each key that a table may have, in the index of a node: 12 for an entry, of which at most 0.6 are used."""


class Frozen(BaseModel):
    """Immutable, and an unknown key is an error: a misspelt option must not be ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class IdentityMapping(Frozen):
    """The id is the row: 0 <= id < num_embeddings."""

    kind: Literal["identity"] = "identity"


class HashMapping(Frozen):
    """row = floor(top32(splitmix64(id + seed)) * num_embeddings / 2^32). No id is unknown.

    With `salt` per_feature each feature of the table has a seed of its own (`seed_of`), so that equal ids of different
    features are in the same row by chance only. By default they share it: as a history and the item that it lists must.
    """

    kind: Literal["hash"] = "hash"
    seed: int = Field(default=0, ge=0, lt=2**63)
    # Left out where there is none, so that releases that know none can read the model.
    salt: Literal["none", "per_feature"] = Field(default="none", exclude_if=lambda salt: salt == "none")

    def seed_of(self, feature: str) -> int:
        """Return the seed that a feature's ids are hashed with: below 2^63."""
        return self.seed if self.salt == "none" else self.seed ^ int(fingerprint_strings([feature])[0])


class VocabularyMapping(Frozen):
    """An id's position in a stored list is its row. String ids are stored and looked up by a 63-bit fingerprint."""

    kind: Literal["vocabulary"] = "vocabulary"
    id_type: Literal["integer", "string"] = "integer"


IdMapping = Annotated[IdentityMapping | HashMapping | VocabularyMapping, Field(discriminator="kind")]


class TableSpec(Frozen):
    """One embedding table.

    `feature_names` are the features looked up in it (several may share it). `pooling` is the default of its features.
    `unknown_id` says what an id without a row gets: an error, `default_row`'s vector, or nothing (left out of its
    bag).

    `column_dims` cuts a wide table into slices of so many columns each, which are stored, quantised and placed like
    separate tables (`slices`); features still see one table of `embedding_dim`.

    A table with `keys` names its rows by them: signed 64-bit integers, or the fingerprints of strings. It has the keys
    that training gave it, at most `num_embeddings`, which deltas insert and delete. A key that is `missing` gets zeros,
    the mean of the rows at export, or is left out of its bag.
    """

    name: Name
    num_embeddings: int = Field(ge=1, le=MAX_NUM_EMBEDDINGS)
    embedding_dim: int = Field(ge=1, le=MAX_EMBEDDING_DIM)
    feature_names: Annotated[tuple[Name, ...], FAIL_FAST] = Field(min_length=1, max_length=MAX_FEATURES)
    pooling: Pooling = "sum"
    dtype: RowDtype = "int8"
    bucketing: Bucketing = "mixed"
    id_mapping: IdMapping = IdentityMapping()
    unknown_id: UnknownId = "reject"
    default_row: int = Field(default=0, ge=0)
    column_dims: Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_EMBEDDING_DIM)], ...], FAIL_FAST] = Field(
        default=(), max_length=MAX_COLUMN_SLICES
    )
    # Left out where there are none, so that releases that know none can read the model.
    keys: Keys | None = Field(default=None, exclude_if=lambda keys: keys is None)
    missing: Missing = Field(default="zeros", exclude_if=lambda missing: missing == "zeros")

    @model_validator(mode="after")
    def _check(self) -> Self:
        plain = (self.id_mapping.kind, self.unknown_id, self.default_row, self.bucketing)
        if self.keys is not None and plain != ("identity", "reject", 0, "mixed"):
            raise ValueError(f"table {self.name!r}: keys go without id_mapping, unknown_id, default_row and bucketing")
        if self.keys is None and self.missing != "zeros":
            raise ValueError(f"table {self.name!r}: missing goes with keys; id_mapping goes with unknown_id")
        if self.default_row >= self.num_embeddings:
            raise ValueError(
                f"table {self.name!r}: default_row {self.default_row} is not below num_embeddings {self.num_embeddings}"
            )
        if self.dtype == "int4" and self.embedding_dim % 2:
            raise ValueError(f"table {self.name!r}: int4 rows need an even embedding_dim, got {self.embedding_dim}")
        if len(set(self.feature_names)) != len(self.feature_names):
            raise ValueError(f"table {self.name!r}: feature_names has duplicates: {list(self.feature_names)}")
        if self.column_dims:
            where = f"table {self.name!r}: column_dims {list(self.column_dims)}"
            if len(self.column_dims) < 2:
                raise ValueError(f"{where}: at least 2 slices, or none for a table that is stored whole")
            if (total := sum(self.column_dims)) != self.embedding_dim:
                raise ValueError(f"{where}: they add up to {total}, embedding_dim is {self.embedding_dim}")
            if self.dtype == "int4" and any(dim % 2 for dim in self.column_dims):
                raise ValueError(f"{where}: slices of int4 rows need an even number of columns")
            if len(self.name) + len(f".c{len(self.column_dims) - 1}") > MAX_NAME_LENGTH:
                raise ValueError(f"{where}: names of slices, the table's and '.c0', pass {MAX_NAME_LENGTH} characters")
        return self

    @property
    def last_value(self) -> int:
        """Return the largest number, as an unsigned one of 64 bits, that names a row: any of a table with keys."""
        return self.num_embeddings - 1 if self.keys is None else 2**64 - 1

    @property
    def key_bytes(self) -> int:
        """Return what a row takes in memory beside the row: of a table with keys."""
        return 0 if self.keys is None else KEY_BYTES

    @property
    def slice_dims(self) -> tuple[int, ...]:
        """Return the columns of each slice, in order; of a table that is stored whole, its one `embedding_dim`."""
        return self.column_dims or (self.embedding_dim,)

    @property
    def slices(self) -> tuple[TableSpec, ...]:
        """Return the tables that it is stored as, in column order: `<name>.c0`, `<name>.c1`, ...; unsliced, itself.

        Each has all rows, in the same order of ids, and `slice_dims` of the columns.
        """
        if not self.column_dims:
            return (self,)
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return tuple(
            TableSpec(**{**fields, "name": f"{self.name}.c{number}", "embedding_dim": dim, "column_dims": ()})
            for number, dim in enumerate(self.column_dims)
        )


class DividedTable(Frozen):
    """A table whose rows are in several stored tables, its `parts`: what these give for an id is added.

    Divided by `popularity` each row is in one part: the hottest rows in the first, the next in the second, and so on,
    as the snapshot's row classes say. `pruned` rows are nowhere: they read the last row of the last part. By
    `quotient_remainder` (Shi et al., "Compositional Embeddings Using Complementary Partitions", 2019) an id has a row
    in each of two parts, id // buckets and id % buckets, which are added (`combine`).

    Features see rows of `embedding_dim`; a part of fewer columns has a projection, a tensor of the dense model called
    `projection_name(part)`: float32 [columns, embedding_dim]. A part's mapping is from rows to rows.
    """

    name: Name
    num_embeddings: int = Field(ge=1, le=MAX_NUM_EMBEDDINGS)
    embedding_dim: int = Field(ge=1, le=MAX_EMBEDDING_DIM)
    feature_names: Annotated[tuple[Name, ...], FAIL_FAST] = Field(min_length=1, max_length=MAX_FEATURES)
    pooling: Pooling = "sum"
    id_mapping: IdMapping = IdentityMapping()
    unknown_id: UnknownId = "reject"
    default_row: int = Field(default=0, ge=0)
    parts: Annotated[tuple[Name, ...], FAIL_FAST] = Field(min_length=1, max_length=MAX_PARTS)
    by: Literal["popularity", "quotient_remainder"] = "popularity"
    pruned: int = Field(default=0, ge=0, le=MAX_NUM_EMBEDDINGS)
    buckets: int | None = Field(default=None, ge=1, le=MAX_NUM_EMBEDDINGS)
    combine: Combine = "add"

    @model_validator(mode="after")
    def _check(self) -> Self:
        where = f"divided table {self.name!r}"
        if self.default_row >= self.num_embeddings:
            raise ValueError(f"{where}: default_row {self.default_row} is not below its {self.num_embeddings} rows")
        if (self.by == "quotient_remainder") != (self.buckets is not None):
            raise ValueError(f"{where}: buckets go with by quotient_remainder, and only with it")
        if self.by == "quotient_remainder" and (len(self.parts) != 2 or self.pruned):
            raise ValueError(f"{where}: by quotient_remainder it has 2 parts and nothing pruned, got {self.parts}")
        return self

    @property
    def last_value(self) -> int:
        """Return the largest number that names a row."""
        return self.num_embeddings - 1

    @property
    def num_classes(self) -> int:
        """Count the classes of rows: one for each part, and one more if rows are pruned; 1 by quotient_remainder."""
        return 1 if self.by == "quotient_remainder" else len(self.parts) + (self.pruned > 0)

    def class_rows(self, parts: Sequence[TableSpec]) -> tuple[int, ...]:
        """Return how many of the rows are in each class, given its parts: the pruned ones last."""
        rows = [part.num_embeddings for part in parts]
        if self.pruned:
            rows[-1] -= 1
            rows.append(self.pruned)
        return tuple(rows)

    def check_parts(self, parts: Sequence[TableSpec]) -> None:
        """Raise ValueError unless these are tables that it can be divided into."""
        where = f"divided table {self.name!r}"
        for part in parts:
            if part.id_mapping.kind != "identity" or part.column_dims or part.keys is not None:
                raise ValueError(f"{where}: part {part.name!r} must have the identity mapping, no column_dims, no keys")
            if part.feature_names != self.feature_names:
                raise ValueError(f"{where}: part {part.name!r} must have its features {list(self.feature_names)}")
            if part.embedding_dim > self.embedding_dim:
                limit = f"embedding_dim is {self.embedding_dim}"
                raise ValueError(f"{where}: part {part.name!r} has {part.embedding_dim} columns, {limit}")
        rows = [part.num_embeddings for part in parts]
        if self.buckets is not None:
            expected = [-(-self.num_embeddings // self.buckets), min(self.buckets, self.num_embeddings)]
            if rows != expected:
                raise ValueError(f"{where}: parts of {rows} rows; {self.buckets} buckets need {expected}")
        elif sum(self.class_rows(parts)) != self.num_embeddings or min(self.class_rows(parts)) < 0:
            raise ValueError(
                f"{where}: parts of {rows} rows and {self.pruned} pruned; num_embeddings is {self.num_embeddings}"
            )


AnyTable: TypeAlias = TableSpec | DividedTable
"""A table as features see it."""


def projection_name(part: str) -> str:
    """Return the name of the dense tensor that makes a part's rows as wide as its table: no dots but the first."""
    return f"projections.{part.replace('.', '/')}"


def fingerprint_strings(strings: Sequence[str]) -> npt.NDArray[np.int64]:
    """Hashes with XXH3-64 (seed 0) each string's UTF-8 bytes with the top bit cleared, int64 [len(strings)].

    Source of the hash: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
    """
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(text.encode()) & _ID_MASK for text in strings), np.int64, count=len(strings))


_QUOTED_ERRORS, _MAX_NAMED_ERRORS = 5, 20


class SchemaError(NamedTuple):
    """One mistake: where, what is wrong, and the value that was found."""

    place: tuple[int | str, ...]
    problem: str
    value: object

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.place)) or 'document'}: {self.problem}"


def schema_errors(
    error: ValidationError, schemas: Iterable[type[BaseModel]], elsewhere: Iterable[str] = ()
) -> Iterator[SchemaError]:
    """Yield the mistakes in a document; an unknown key comes with those that are allowed there.

    `schemas` are the model that was validated, or those of a union by `kind`; `elsewhere` are fields of them that are
    no keys of the document.
    """
    errors = error.errors(include_url=False, include_context=False)
    roots, hidden = tuple(schemas), frozenset(elsewhere)
    for mistake in errors:
        # A list is also said to be too short if validation stopped at one of its bad items.
        path = mistake["loc"]
        if mistake["type"] in ("too_short", "too_long") and any(
            len(other["loc"]) > len(path) and other["loc"][: len(path)] == path for other in errors
        ):
            continue
        problem = mistake["msg"]
        if mistake["type"] == "extra_forbidden":
            allowed = [name for name in _allowed_keys(path[:-1], roots) if name not in hidden]
            problem = f"unknown key {path[-1]!r:.80}; allowed are {allowed}"
        yield SchemaError(path, problem, mistake["input"])


def _tags_of(schema: type[BaseModel]) -> tuple[Any, ...]:
    fields = (schema.model_fields.get(name) for name in ("kind", "source"))
    return tuple(tag for field in fields if field is not None for tag in get_args(field.annotation))


def _allowed_keys(path: Iterable[int | str], schemas: tuple[type[BaseModel], ...]) -> list[str]:
    for part in path:
        if isinstance(part, int):
            continue
        if fields := [schema.model_fields[part].annotation for schema in schemas if part in schema.model_fields]:
            schemas = tuple(inner for annotation in fields for inner in _models_in(annotation))
            continue
        # A part that is no field is the tag by which pydantic names the member of a union, or a key of a mapping.
        tags = {schema: _tags_of(schema) for schema in schemas}
        schemas = tuple(schema for schema in schemas if part in tags[schema]) or tuple(
            schema for schema in schemas if not tags[schema] or all(tags.values())
        )
    return list(dict.fromkeys(name for schema in schemas for name in schema.model_fields))


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


@contextmanager
def refused_as(
    refusal: Callable[[str], Exception], where: str, schema: type[BaseModel] | None = None
) -> Iterator[None]:
    """Raise a refusal, of `where` and the mistakes, in place of a ValidationError in the block.

    With the `schema` that was validated, an unknown key comes with those that are allowed there.
    """
    try:
        yield
    except ValidationError as error:
        first = () if schema is None else islice(schema_errors(error, [schema]), _MAX_NAMED_ERRORS)
        raise refusal(f"{where}{'; '.join(map(str, first)) or quoted_errors(error)}") from error


def quoted_errors(error: ValidationError) -> str:
    """Return the first errors of a document that does not fit its schema, each with its path, in bounded length."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    quoted = [
        f"{cut('.'.join(map(str, mistake['loc'])) or 'document')}: {cut(mistake['msg'], 300)}"
        for mistake in errors[:_QUOTED_ERRORS]
    ]
    more = f"; and {len(errors) - _QUOTED_ERRORS} more" if len(errors) > _QUOTED_ERRORS else ""
    return "; ".join(quoted) + more
