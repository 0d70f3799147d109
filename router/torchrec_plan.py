"""Take TorchRec's sharding plan for a plan file, where its kinds of division are ours.

TorchRec has no file for a plan. What is read is JSON as `json.dumps(plan._serialize())` writes it: by module and table
`sharding_type`, `ranks`, and `shards` with offsets, sizes and placement. Source: meta-pytorch/torchrec,
torchrec/distributed/types.py (`ShardingPlan._serialize`), sharding_plan.py, of 1.8.

Our rows are divided by bucket, not by range, so of a table divided by rows a rank gets as large a share, but not the
same rows. A rank is a card of a host in both; how many a host has is told by the placements (`rank:9/cuda:1`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loader.errors import cut
from loader.snapshot.manifest import MAX_PLAN_BYTES, ModelSpec
from loader.snapshot.tables import NUM_BUCKETS, TableSpec
from router.errors import PlanError
from router.plan_file import MAX_SHARDS, PlanFile, RanksOfBuckets, ShardingType, TablePlan

_KINDS: dict[str, ShardingType] = {
    "data_parallel": "data_parallel",
    "table_wise": "table_wise",
    "row_wise": "row_wise",
    "table_row_wise": "row_wise",
    "column_wise": "column_wise",
    "table_column_wise": "column_wise",
    "grid_shard": "grid_shard",
}
_PLACEMENT = re.compile(r"rank:(\d+)/(?:cuda:(\d+)|cpu)")


def read_plan(path: Path, spec: ModelSpec) -> PlanFile:
    """Read a plan file, or TorchRec's plan for the tables of a model. Raises PlanError."""
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(MAX_PLAN_BYTES + 1))
    except (OSError, ValueError, RecursionError):
        document = None
    # What is neither is refused as a plan file.
    is_torchrec = isinstance(document, dict) and isinstance(document.get("plan"), dict)
    return _converted(str(path), document["plan"], spec) if is_torchrec else PlanFile.read(path)


def _converted(where: str, plan: Mapping[str, Any], spec: ModelSpec) -> PlanFile:
    tables: dict[str, Mapping[str, Any]] = {}
    try:
        for module in plan.values():
            if both := sorted(tables.keys() & module.keys()):
                raise PlanError(
                    f"{where}: table {both[0]!r} is in two modules, and a model's tables have one name each"
                )
            tables |= module
        placements = [shard["placement"] for table in tables.values() for shard in table.get("shards") or ()]
        placed = [(int(match[1]), int(match[2] or 0)) for match in map(_PLACEMENT.fullmatch, placements) if match]
        ranks = 1 + max(rank for table in tables.values() for rank in table["ranks"])
        if missing := sorted({table.name for table in spec.tables} - tables.keys()):
            raise PlanError(f"{where}: tables {missing} are not in it; it has {cut(sorted(tables))}")
        # The first rank of each host, which need not be on every card, is a multiple of it.
        least = 1 + max((card for _, card in placed), default=0)
        cards_per_shard = 1 if least == 1 else math.gcd(*(rank - card for rank, card in placed)) or least
        num_shards = -(-ranks // cards_per_shard)
        if cards_per_shard < least or num_shards > MAX_SHARDS:
            raise PlanError(f"{where}: {ranks} ranks, {least} or more cards to a host: these are no hosts of one size")
        first_cards = tuple(shard * cards_per_shard for shard in range(num_shards))
        planned = [_table_plan(where, table, tables[table.name], first_cards) for table in spec.tables]
        return PlanFile.parse(where, PlanFile.of(spec.model, num_shards, cards_per_shard, planned).to_json().encode())
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise PlanError(f"{where}: not a plan as ShardingPlan._serialize gives it: {cut(repr(error))}") from error


def _table_plan(where: str, table: TableSpec, given: Mapping[str, Any], first_cards: tuple[int, ...]) -> TablePlan:
    if (kind := _KINDS.get(given["sharding_type"])) is None:
        raise PlanError(
            f"{where}: table {table.name!r}: sharding_type {given['sharding_type']!r}; allowed: {[*_KINDS]}"
        )
    buckets = NUM_BUCKETS[table.bucketing]
    column_dims: tuple[int, ...] = ()
    if kind == "data_parallel":
        slices = [RanksOfBuckets(ranks=first_cards)]
    else:
        # The rank and the number of rows of each shard, by where a slice of columns begins, and its width.
        of_slices: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for rank, shard in zip(given["ranks"], given["shards"], strict=True):
            (_, column), (rows, width) = shard["shard_offsets"], shard["shard_sizes"]
            of_slices.setdefault((column, width), []).append((rank, rows))
        by_columns = [(width, of_slice) for (_, width), of_slice in sorted(of_slices.items())]
        if len(by_columns) > 1:
            column_dims = tuple(width for width, _ in by_columns)
        elif kind in ("column_wise", "grid_shard"):
            kind = "table_wise" if kind == "column_wise" else "row_wise"
        slices = [RanksOfBuckets.of(_rank_of_bucket(of_slice, buckets)) for _, of_slice in by_columns]
    if column_dims and sum(column_dims) != table.embedding_dim:
        raise PlanError(
            f"{where}: table {table.name!r}: shards of {list(column_dims)} columns; it has {table.embedding_dim}"
        )
    return TablePlan(
        table=table.name,
        num_embeddings=table.num_embeddings,
        bucketing=table.bucketing,
        sharding_type=kind,
        column_dims=column_dims,
        slices=tuple(slices),
    )


def _rank_of_bucket(rows: Sequence[tuple[int, int]], buckets: int) -> Any:
    """Return which rank gets each bucket, int [buckets]: of these ranks each as large a share as it has of the rows."""
    ends = np.cumsum([max(count, 0) for _, count in rows], dtype=np.float64)
    at = (np.arange(buckets) + 0.5) * (ends[-1] / buckets)
    return np.array([rank for rank, _ in rows])[np.searchsorted(ends, at, side="right").clip(0, len(rows) - 1)]
