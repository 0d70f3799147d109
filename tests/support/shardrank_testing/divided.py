"""Models with divided tables, and their twins: the same rows in whole float32 tables, worked out by plain loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loader.description import ModelDescription
from loader.divided_rows import divide_rows, kept_rows
from loader.snapshot.codecs import Float32Array
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import ArrayRows
from loader.snapshot.tables import DividedTable, TableSpec, projection_name
from loader.snapshot.writer import export_snapshot
from shardrank_testing.snapshots import random_rows, write_snapshot
from shardrank_testing.topologies import decoded_rows


@dataclass(frozen=True)
class DividedModel:
    """A model with divided tables: rows by the names that trainers use, and how often each row was looked up."""

    spec: ModelSpec
    given: dict[str, Float32Array]
    counts: dict[str, np.ndarray]
    projections: dict[str, Float32Array]

    def export(
        self,
        store: Path,
        *,
        dense: Mapping[str, torch.Tensor] | None = None,
        **options: Any,
    ) -> Snapshot:
        """Write a snapshot of it; `dense` is without projections, `options` as of `export_snapshot`."""
        sources = {name: ArrayRows(rows) for name, rows in self.given.items()}
        division = divide_rows(self.spec, sources, self.counts)
        weights = {"weight": torch.zeros(1)} if dense is None else dict(dense)
        tensors = {projection_name(part): torch.from_numpy(one) for part, one in self.projections.items()}
        path = export_snapshot(
            store,
            self.spec,
            rows=division.rows,
            dense=weights | tensors,
            row_classes=division.row_classes,
            access_counts=division.access_counts,
            **options,
        )
        return Snapshot.open(path)


def divided_model(description: ModelDescription, *, pruned: tuple[str, ...] = (), seed: int = 0) -> DividedModel:
    """Random rows and counts. Half of the rows of `pruned` tables were never looked up."""
    # Rows are the same whatever is pruned.
    rng, draw = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    counts = {}
    for table in description.tables:
        seen = draw.integers(1, 50, table.num_embeddings)
        if table.name in pruned:
            seen *= draw.random(seen.size) < 0.5
            seen[0] = 1
        counts[table.name] = seen
    spec = description.compiled({name: kept_rows(name, counts[name]) for name in pruned})
    given = {}
    for table in spec.logical_tables:
        parts = spec.parts(table)
        is_cut = isinstance(table, DividedTable) and table.buckets is None
        if is_cut and all(part.embedding_dim == table.embedding_dim for part in parts):
            given[table.name] = random_rows(rng, table.num_embeddings, table.embedding_dim)
        else:
            given |= {part.name: random_rows(rng, part.num_embeddings, part.embedding_dim) for part in parts}
    projections = {
        part: rng.standard_normal(shape, np.float32) / np.float32(4) for part, shape in spec.projections().items()
    }
    return DividedModel(spec, given, counts, projections)


@dataclass(frozen=True)
class Twins:
    """A model with divided tables, and what it must answer like.

    `rows` is what each row of a table is worth to a feature, float32 [num_embeddings, embedding_dim], by table.
    """

    divided: Snapshot
    whole: Snapshot
    rows: dict[str, Float32Array]
    projections: dict[str, Float32Array]


def describe(spec: ModelSpec, levers: Mapping[str, Mapping[str, Any]]) -> ModelDescription:
    """The spec as a description, with words for some of its tables."""
    fields = spec.model_dump(mode="json")
    fields["tables"] = [one | dict(levers.get(one["name"], {})) for one in fields["tables"]]
    return ModelDescription.model_validate(fields)


def write_twins(
    folder: Path,
    description: ModelDescription,
    *,
    pruned: tuple[str, ...] = (),
    dense: Mapping[str, torch.Tensor] | None = None,
    seed: int = 0,
    version: int | None = None,
) -> Twins:
    """Export a `divided_model` and its twin. `dense` is without projections."""
    made = divided_model(description, pruned=pruned, seed=seed)
    divided = made.export(folder / "divided", dense=dense, version=version)
    rows = {table.name: worth(made, table) for table in made.spec.logical_tables}
    whole = [
        {**one.model_dump(), "dtype": "fp32", "embedding_dim": rows[one.name].shape[1]}
        | {"blocks": (), "project_to": None, "column_dims": (), "id_mapping": {"kind": "identity"}}
        | ({} if one.id_mapping.kind == "quotient_remainder" else {"id_mapping": one.id_mapping.model_dump()})
        for one in description.tables
    ]
    twin = ModelDescription.model_validate({**description.model_dump(), "tables": whole}).compiled()
    plain, _ = write_snapshot(folder / "whole", twin, tables=rows, dense=dense, version=version)
    return Twins(divided, Snapshot.open(plain), rows, made.projections)


def worth(made: DividedModel, table: TableSpec | DividedTable) -> Float32Array:
    """What each row is worth once stored, projected and combined."""
    given, projections = made.given, made.projections

    def stored(part: TableSpec, rows: Float32Array) -> Float32Array:
        decoded = decoded_rows(part, rows)
        return decoded @ projections[part.name] if part.name in projections else decoded

    parts = made.spec.parts(table)
    if not isinstance(table, DividedTable):
        return decoded_rows(table, given[table.name]) if table.column_dims else stored(table, given[table.name])
    ids = np.arange(table.num_embeddings)
    if table.buckets is not None:
        quotients, remainders = (stored(part, given[part.name]) for part in parts)
        return quotients[ids // table.buckets] + remainders[ids % table.buckets]
    hottest = sorted(ids.tolist(), key=lambda row: (-int(made.counts[table.name][row]), row))
    out = np.zeros((ids.size, table.embedding_dim), np.float32)
    begin = 0
    for number, part in enumerate(parts):
        size = part.num_embeddings - (1 if table.pruned and number == len(parts) - 1 else 0)
        own = sorted(hottest[begin : begin + size])
        begin += size
        is_given = part.name in given and given[part.name].shape[0] == part.num_embeddings
        rows = given[part.name] if is_given else given[table.name][own]
        out[own] = stored(part, rows[:size])
    if table.pruned:
        rest = hottest[begin:]
        mean = given[table.name][rest].mean(axis=0, keepdims=True, dtype=np.float64).astype(np.float32)
        out[rest] = stored(parts[-1], mean)
    return out
