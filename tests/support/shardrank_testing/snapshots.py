"""Small models and their snapshots, with the float32 rows that they were made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.row_source import ArrayRows
from loader.snapshot.tables import Bucketing, HashMapping, Pooling, RowDtype, TableSpec, VocabularyMapping
from loader.snapshot.writer import export_snapshot
from shard_node.buckets import Sharding

Float32Array = npt.NDArray[np.float32]
DEFAULT_DENSE_MODEL = DenseModelSpec(kind="mlp")
DEFAULT_DENSE_INPUTS = DenseInputs(context=2, candidate=3)


def random_rows(rng: np.random.Generator, num_rows: int, dim: int) -> Float32Array:
    """float32 [num_rows, dim], each row with its own scale and offset, so that a mixed-up scale or bias is seen."""
    rows = rng.standard_normal((num_rows, dim), dtype=np.float32)
    rows *= rng.uniform(0.05, 2.0, (num_rows, 1)).astype(np.float32)
    rows += rng.uniform(-1.0, 1.0, (num_rows, 1)).astype(np.float32)
    return rows


def make_spec(
    model: str = "films",
    *,
    dtype: RowDtype | None = None,
    bucketing: Bucketing | None = None,
    dense_inputs: DenseInputs = DEFAULT_DENSE_INPUTS,
    dense_model: DenseModelSpec = DEFAULT_DENSE_MODEL,
) -> ModelSpec:
    """A model with five tables and seven features that has one of everything.

    `history` shares the table of `film`; `tag` and `liked_tag` are weighted.

    Args:
        model: its name.
        dtype: use this dtype for all tables instead.
        bucketing: use this bucketing for all tables instead.
        dense_inputs: dense floats of a request.
        dense_model: the dense model's kind and config.
    """

    layouts: list[tuple[str, int, int, RowDtype, Bucketing, tuple[str, ...], Pooling]] = [
        ("user", 1000, 16, "int8", "range", ("user",), "sum"),
        ("film", 777, 16, "int8", "mixed", ("film", "history"), "sum"),
        ("genre", 19, 8, "fp32", "range", ("genre",), "mean"),
        ("tag", 257, 8, "int4", "range", ("tag", "liked_tag"), "sum"),
        ("city", 300, 4, "fp16", "mixed", ("city",), "sum"),
    ]
    return ModelSpec(
        model=model,
        tables=tuple(
            table_of(name, rows, dim, *features, pooling=pooling, dtype=dtype or stored, bucketing=bucketing or order)
            for name, rows, dim, stored, order, features, pooling in layouts
        ),
        features=(
            FeatureSpec(name="user", side="context"),
            FeatureSpec(name="film", side="candidate"),
            FeatureSpec(name="history", side="context", pooling="none"),
            FeatureSpec(name="genre", side="candidate"),
            FeatureSpec(name="tag", side="candidate", weighted=True),
            FeatureSpec(name="liked_tag", side="context", weighted=True),
            FeatureSpec(name="city", side="context"),
        ),
        dense_inputs=dense_inputs,
        dense_model=dense_model,
    )


def one_table_spec(
    num_embeddings: int,
    embedding_dim: int = 8,
    *,
    dtype: RowDtype = "int8",
    bucketing: Bucketing = "range",
    id_mapping: VocabularyMapping | HashMapping | None = None,
    model: str = "small",
) -> ModelSpec:
    """A model of one table `items` with one candidate feature `item`."""
    mapping = {} if id_mapping is None else {"id_mapping": id_mapping}
    shape = {"dtype": dtype, "bucketing": bucketing} | mapping
    return model_of([table_of("items", num_embeddings, embedding_dim, "item", **shape)], model)


def table_of(name: str, num_embeddings: int, embedding_dim: int = 8, *features: str, **more: Any) -> TableSpec:
    """A table of these features, or of one that is called `f.NAME`."""
    features = features or (f"f.{name}",)
    return TableSpec(
        name=name, num_embeddings=num_embeddings, embedding_dim=embedding_dim, feature_names=features, **more
    )


def model_of(tables: Sequence[TableSpec], model: str = "m") -> ModelSpec:
    """A model with these tables, whose features are all candidates'."""
    features = tuple(FeatureSpec(name=name, side="candidate") for table in tables for name in table.feature_names)
    return ModelSpec(model=model, tables=tuple(tables), features=features, dense_model=DEFAULT_DENSE_MODEL)


def random_tables(spec: ModelSpec, seed: int) -> dict[str, Float32Array]:
    """Float32 rows for every table, by name."""
    rng = np.random.default_rng(seed)
    return {table.name: random_rows(rng, table.num_embeddings, table.embedding_dim) for table in spec.tables}


def random_golden(spec: ModelSpec, seed: int, num_requests: int = 3, max_ids_per_bag: int = 4) -> GoldenRequests:
    """Requests that fit the spec, with ids below `num_embeddings` and arbitrary scores."""
    rng = np.random.default_rng(seed)
    num_candidates = rng.integers(1, 6, num_requests, dtype=np.int32)
    total = int(num_candidates.sum())
    values, lengths, weights = {}, {}, {}
    for feature in spec.features:
        bags = num_requests if feature.side == "context" else total
        lengths[feature.name] = rng.integers(0, max_ids_per_bag + 1, bags, dtype=np.int32)
        nnz = int(lengths[feature.name].sum())
        values[feature.name] = rng.integers(0, spec.table_of(feature.name).num_embeddings, nnz, dtype=np.int64)
        if feature.weighted:
            weights[feature.name] = rng.standard_normal(nnz, dtype=np.float32)
    return GoldenRequests(
        num_candidates=num_candidates,
        values=values,
        lengths=lengths,
        weights=weights,
        context_dense=rng.standard_normal((num_requests, spec.dense_inputs.context), dtype=np.float32),
        candidate_dense=rng.standard_normal((total, spec.dense_inputs.candidate), dtype=np.float32),
        scores=rng.random(total, dtype=np.float32),
    )


def write_snapshot(
    store_path: Path,
    spec: ModelSpec,
    seed: int = 0,
    *,
    tables: dict[str, Float32Array] | None = None,
    dense: Mapping[str, torch.Tensor] | None = None,
    **options: Any,
) -> tuple[Path, dict[str, Float32Array]]:
    """Export the spec into the store at `store_path`, with random rows by default; `options` as of `export_snapshot`.

    Returns:
        The snapshot's folder, and each table's float32 rows [num_embeddings, embedding_dim].
    """
    tables = random_tables(spec, seed) if tables is None else tables
    rows = {name: ArrayRows(values) for name, values in tables.items()}
    dense = {"weight": torch.zeros(1)} if dense is None else dense
    return export_snapshot(store_path, spec, rows=rows, dense=dense, **options), tables


def files_of(folder: Path) -> dict[str, bytes]:
    """The contents of all files below a folder, by relative path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def restate_file(snapshot_path: Path, relative: str) -> None:
    """States the present size and SHA-256 of a file in the manifest, as a forger would."""
    content = (snapshot_path / relative).read_bytes()
    stated = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite_manifest(snapshot_path, lambda manifest: restate_entry(manifest, relative, stated))


def restate_entry(node: Any, relative: str, stated: Mapping[str, Any]) -> None:
    """Changes what a manifest, or a part of it, says of the file at `relative`."""
    if isinstance(node, dict) and node.get("path") == relative:
        node.update(stated)
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        restate_entry(child, relative, stated)


def rewrite_manifest(snapshot_path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edits `manifest.json` as a forger would: the checksum beside it is made to fit again."""
    path = snapshot_path / "manifest.json"
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    (snapshot_path / "manifest.json.sha256").write_text(f"{digest}  manifest.json\n")


def plain_bucket(table: TableSpec, row: int) -> int:
    """The bucket of a row by the formulas of docs/snapshot-format.md, in whole numbers of any size."""
    if table.bucketing == "range":
        return row >> max(0, (table.num_embeddings - 1).bit_length() - 8)
    mixed = ((row >> 12) + xxhash.xxh3_64_intdigest(table.name.encode())) * 0xFF51AFD7ED558CCD % 2**64
    mixed = (mixed ^ (mixed >> 32)) * 0xC4CEB9FE1A85EC53 % 2**64
    return (row ^ (mixed >> 52)) % 4096


def plain_buckets(table: TableSpec, rows: Iterable[int] | None = None) -> np.ndarray:
    """The buckets of some rows, or of all, int64 [n]."""
    rows = range(table.num_embeddings) if rows is None else rows
    return np.array([plain_bucket(table, int(row)) for row in rows], np.int64)


def num_buckets(table: TableSpec) -> int:
    """How many buckets a table has."""
    return 4096 if table.bucketing == "mixed" else 256


def with_slices(spec: ModelSpec, slices: Mapping[str, tuple[int, ...]]) -> ModelSpec:
    """The model with some of its tables cut into slices of so many columns; their widths follow."""
    changes = {name: {"column_dims": dims, "embedding_dim": sum(dims)} for name, dims in slices.items()}
    tables = [TableSpec(**{**dict(iter(table)), **changes.get(table.name, {})}) for table in spec.tables]
    return ModelSpec(**{**dict(iter(spec)), "tables": tuple(tables)})


def sharding_of(spec: ModelSpec) -> Sharding:
    """How a plan divides tables that are all stored like the first one."""
    return "range" if spec.tables[0].bucketing == "range" else "hash"
