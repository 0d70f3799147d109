"""The plan file: which shard and card own each bucket of each table, as one document with a digest. docs/plan.md.

A rank is one card of the fleet, `shard * cards_per_shard + card`, as TorchRec counts them. Of each table the file says
the kind of division, by TorchRec's names, and the rank of every bucket; what follows from these is checked, not
believed. The digest is the SHA-256 of everything else, so a file that was changed by hand or in transit is refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from loader.snapshot.manifest import MAX_PLAN_BYTES, MAX_TABLES, ModelSpec
from loader.snapshot.tables import (
    FAIL_FAST,
    MAX_COLUMN_SLICES,
    MAX_EMBEDDING_DIM,
    MAX_NUM_EMBEDDINGS,
    NUM_BUCKETS,
    Bucketing,
    Frozen,
    Name,
    refused_as,
)
from router.errors import PlanError

ShardingType = Literal["data_parallel", "table_wise", "row_wise", "column_wise", "grid_shard"]
"""TorchRec's names: on every shard; whole on one; its rows divided; slices of its columns, each whole on a shard;
slices of its columns, the rows of each divided."""

FORMAT_VERSION = 1
MAX_SHARDS = 1024
MAX_CARDS_PER_SHARD = 64
MAX_RANKS = MAX_SHARDS * MAX_CARDS_PER_SHARD
# Of the ranks of 4,096 buckets, that can't be made smaller, as base64.
_MAX_PACKED = 4 * -(-(2 * max(NUM_BUCKETS.values()) + 64) // 3)


class RanksOfBuckets(Frozen):
    """Who owns one stored table: a table, or one slice of its columns.

    Attributes:
        ranks: ascending, who owns any of it. Of a table on every shard, the one card of each shard.
        packed: where there are several ranks that share rows, which of `ranks` owns each bucket: base64 of a zlib
            stream of uint16 (little-endian) numbers in `ranks`, one for each of the table's 4,096 or 256 buckets. Else
            empty.
    """

    ranks: Annotated[tuple[int, ...], FAIL_FAST] = Field(min_length=1, max_length=MAX_RANKS)
    packed: str = Field(default="", max_length=_MAX_PACKED, pattern=r"^[A-Za-z0-9+/]*={0,2}$")

    @classmethod
    def of(cls, rank_of_bucket: npt.NDArray[np.integer]) -> Self:
        """Pack the rank of each bucket, [buckets]."""
        ranks, numbers = np.unique(rank_of_bucket, return_inverse=True)
        if ranks.size == 1:
            return cls(ranks=(int(ranks[0]),))
        packed = zlib.compress(numbers.astype("<u2").tobytes(), 9)
        return cls(ranks=tuple(ranks.tolist()), packed=base64.b64encode(packed).decode())

    @property
    def is_copied(self) -> bool:
        """Whether each of several ranks has all rows."""
        return len(self.ranks) > 1 and not self.packed

    def rank_of_bucket(self, count: int) -> npt.NDArray[np.int32]:
        """Return int32 [count]. Raises PlanError if it is not the ranks of so many buckets."""
        ranks = np.array(self.ranks, np.int32)
        if not self.packed:
            if ranks.size != 1:
                raise PlanError(f"packed is empty, but there are {ranks.size} ranks; allowed is 1")
            return np.full(count, ranks[0], np.int32)
        opened = zlib.decompressobj()
        try:
            # No more is ever unpacked than there are buckets.
            content = opened.decompress(base64.b64decode(self.packed, validate=True), 2 * count + 1)
        except (binascii.Error, zlib.error) as error:
            raise PlanError(f"packed can't be unpacked: {error}") from error
        if len(content) != 2 * count or not opened.eof or opened.unused_data:
            raise PlanError(f"packed does not hold {count} numbers of 2 bytes and nothing else")
        numbers: npt.NDArray[np.uint16] = np.frombuffer(content, "<u2")
        present = np.unique(numbers)
        if present.size != ranks.size or present[-1] != ranks.size - 1:
            raise PlanError(f"packed has numbers {present[:8].tolist()}…; allowed is each of 0..{ranks.size - 1}")
        return ranks[numbers]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ranks[0] < 0 or any(rank >= after for rank, after in pairwise(self.ranks)):
            raise ValueError("ranks must ascend from 0 on, none twice")
        return self


class TablePlan(Frozen):
    """Where one table of the model lies.

    Attributes:
        table: its name; `num_embeddings` and `bucketing` as in the model, for which alone the buckets are meant.
        sharding_type: how it is divided.
        column_dims: the widths of its slices; none of a table that is not sliced.
        slices: who owns each; one of a table that is not sliced.
    """

    table: Name
    num_embeddings: int = Field(ge=1, le=MAX_NUM_EMBEDDINGS)
    bucketing: Bucketing
    sharding_type: ShardingType
    column_dims: Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_EMBEDDING_DIM)], ...], FAIL_FAST] = Field(
        default=(), max_length=MAX_COLUMN_SLICES
    )
    slices: Annotated[tuple[RanksOfBuckets, ...], FAIL_FAST] = Field(min_length=1, max_length=MAX_COLUMN_SLICES)

    @model_validator(mode="after")
    def _check(self) -> Self:
        is_sliced = self.sharding_type in ("column_wise", "grid_shard")
        if is_sliced != (len(self.column_dims) > 1) or len(self.slices) != max(1, len(self.column_dims)):
            raise ValueError(
                f"table {self.table!r}: {self.sharding_type} with {len(self.column_dims)} column_dims and "
                f"{len(self.slices)} slices; allowed are as many slices as column_dims, at least 2, of column_wise and "
                "grid_shard, and one slice without column_dims of the others"
            )
        return self


class PlanFile(Frozen):
    """A plan as it is written. Made by `of`, read by `read` and `parse`; `Plan.of_file` uses it.

    Attributes:
        model, num_shards, cards_per_shard: whose it is; of no other model, and of no other fleet, it is taken.
        tables: in the model's order.
        digest: SHA-256 (hex) of the rest.
    """

    format_version: Literal[1] = 1
    model: Name
    num_shards: int = Field(ge=1, le=MAX_SHARDS)
    cards_per_shard: int = Field(ge=1, le=MAX_CARDS_PER_SHARD)
    tables: Annotated[tuple[TablePlan, ...], FAIL_FAST] = Field(min_length=1, max_length=MAX_TABLES)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")

    @classmethod
    def of(cls, model: str, num_shards: int, cards_per_shard: int, tables: Sequence[TablePlan]) -> Self:
        """Write down a plan, with its digest."""
        made = cls(
            model=model, num_shards=num_shards, cards_per_shard=cards_per_shard, tables=tuple(tables), digest="0" * 64
        )
        return made.model_copy(update={"digest": made.content_digest})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a plan from a file. Raises PlanError, naming the file and what is wrong with it."""
        try:
            with path.open("rb") as file:
                content = file.read(MAX_PLAN_BYTES + 1)
        except OSError as error:
            raise PlanError(f"{path}: {error.strerror or error}") from error
        return cls.parse(str(path), content)

    @classmethod
    def parse(cls, where: str, content: bytes) -> Self:
        """Return the plan in a text of JSON; `where` names it in errors.

        Raises PlanError: it is too long, not such a document, was changed, or gives a bucket to nobody.
        """
        if len(content) > MAX_PLAN_BYTES:
            raise PlanError(f"{where}: more than {MAX_PLAN_BYTES} bytes")
        with refused_as(PlanError, f"{where}: ", cls):
            plan = cls.model_validate_json(content, strict=True)
        if plan.digest != plan.content_digest:
            raise PlanError(
                f"{where}: digest is {plan.digest[:12]}…, but the content has {plan.content_digest[:12]}…: it was "
                "changed after `shardrank plan` wrote it"
            )
        for table in plan.tables:
            plan._check_table(where, table)
        return plan

    def to_json(self) -> str:
        """Return the text of the file, a line for each table."""
        document = self.model_dump(mode="json", exclude_defaults=True) | {"format_version": FORMAT_VERSION}
        tables = ",\n  ".join(json.dumps(table, separators=(",", ":")) for table in document.pop("tables"))
        head = ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(document.items()))
        return f'{{{head},\n "tables": [\n  {tables}\n ]}}\n'

    def sliced(self, spec: ModelSpec) -> ModelSpec:
        """Return a model with its tables' columns sliced as the plan says, as `export` stores it."""
        return with_columns(spec, {table.table: table.column_dims for table in self.tables})

    def check_fits(self, spec: ModelSpec) -> None:
        """Raise PlanError unless it is a plan of this model, sliced as the plan says."""
        if self.model != spec.model:
            raise PlanError(f"plan: model is {self.model!r}, allowed here is {spec.model!r}")
        planned, names = [plan.table for plan in self.tables], [table.name for table in spec.tables]
        if planned != names:
            pairs = [*zip(planned, names, strict=False), (f"{len(planned)} tables", f"{len(names)} tables")]
            of_plan, of_model = next(pair for pair in pairs if pair[0] != pair[1])
            raise PlanError(f"plan: tables has {of_plan!r}, allowed here is {of_model!r}")
        for plan, table in zip(self.tables, spec.tables, strict=True):
            for field in ("num_embeddings", "bucketing", "column_dims"):
                given, allowed = getattr(plan, field), getattr(table, field)
                if given != allowed:
                    raise PlanError(f"plan: table {plan.table!r}: {field} is {given!r}, allowed here is {allowed!r}")

    def ranks_of(self, spec: ModelSpec) -> dict[str, RanksOfBuckets]:
        """Return who owns each stored table of the model that it fits, by name."""
        return {
            stored.name: ranks
            for plan, table in zip(self.tables, spec.tables, strict=True)
            for stored, ranks in zip(table.slices, plan.slices, strict=True)
        }

    @cached_property
    def content_digest(self) -> str:
        """SHA-256 (hex) of everything but `digest`: of its JSON with sorted keys and no spaces."""
        content: dict[str, Any] = self.model_dump(mode="json", exclude={"digest"})
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def num_ranks(self) -> int:
        """Cards of the fleet."""
        return self.num_shards * self.cards_per_shard

    def _check_table(self, where: str, table: TablePlan) -> None:
        for number, owners in enumerate(table.slices):
            name = f"{table.table}, slice {number}" if table.column_dims else table.table
            ranks, kind = owners.ranks, table.sharding_type
            shards = {rank // self.cards_per_shard for rank in ranks}
            try:
                if ranks[-1] >= self.num_ranks:
                    raise PlanError(f"rank is {ranks[-1]}, allowed is 0..{self.num_ranks - 1}")
                if kind == "data_parallel":
                    if owners.packed or not len(ranks) == len(shards) == self.num_shards:
                        needed = f"data_parallel needs one card of each of the {self.num_shards} shards"
                        raise PlanError(f"ranks are {list(ranks[:8])}; {needed}")
                    continue
                if kind in ("table_wise", "column_wise") and len(shards) != 1:
                    raise PlanError(f"ranks are of {len(shards)} shards; {kind} allows 1")
                owners.rank_of_bucket(NUM_BUCKETS[table.bucketing])
            except PlanError as error:
                raise PlanError(f"{where}: table {name!r}: {error}") from error


def with_columns(spec: ModelSpec, dims: Mapping[str, tuple[int, ...]]) -> ModelSpec:
    """Return a model with these tables' columns sliced so, and all others whole. Raises PlanError if that can't be."""
    document = spec.model_dump()
    for table in document["tables"]:
        table["column_dims"] = dims.get(table["name"], ())
    with refused_as(PlanError, "plan: ", ModelSpec):
        return ModelSpec.model_validate(document)
