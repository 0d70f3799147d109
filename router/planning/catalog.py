"""Published models by name, with what a `ModelSpec` does not say: ids in a bag of each feature, and their skew.

They are in `catalog.json`, tables that are alike as one entry: how many, ids in a bag of each feature that is looked up
in such a table, rows, embedding_dim.

- `dlrm-v2`: MLPerf's DLRM-v2 on Criteo 1TB, multi-hot (github.com/mlcommons/training,
  recommendation_v2/torchrec_dlrm/README.MD: table sizes and hotness).
- `merlin-tiny` to `merlin-colossal`: the synthetic models of NVIDIA-Merlin/distributed-embeddings
  (examples/benchmarks/synthetic_models/config_v3.py), ids by a power law of exponent 1.05 (its README).
- `textbook`: one table of 2 * 10^9 rows of 128, 40 lookups a sample: easy to reckon by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.tables import Frozen, RowDtype, TableSpec
from router.errors import PlanError


class _Published(Frozen):
    dense_model: DenseModelSpec
    num_dense: int
    zipf: float
    tables: tuple[tuple[int, tuple[int, ...], int, int], ...]


CATALOG = TypeAdapter(dict[str, _Published]).validate_json(Path(__file__).with_name("catalog.json").read_bytes())


class CatalogModel(NamedTuple):
    """A model and how it is looked up: by feature, ids in a bag; the exponent of their power law, 0 for uniform."""

    spec: ModelSpec
    hotness: dict[str, int]
    zipf: float


def catalog_model(name: str, dtype: RowDtype = "int8", scale: float = 1.0) -> CatalogModel:
    """Return a published model.

    Args:
        name: one of `CATALOG`.
        dtype: in which its rows are stored; they are published as float32.
        scale: of the numbers of rows, above 0 and at most 1; every table keeps at least one.

    Raises:
        PlanError: no such name, or a scale out of range.
    """
    if name not in CATALOG:
        raise PlanError(f"model {name!r} is not in the catalog; it has {', '.join(CATALOG)}", kind="model_not_found")
    if not 0 < scale <= 1:
        raise PlanError(f"scale is {scale}, allowed is above 0 and at most 1")
    published, tables = CATALOG[name], []
    hotness: dict[str, int] = {}
    repeated = [alike for alike in published.tables for _ in range(alike[0])]
    for number, (_, bags, rows, dim) in enumerate(repeated):
        features = {f"f{number}" if len(bags) == 1 else f"f{number}_{ids}": ids for ids in bags}
        hotness |= features
        tables.append(
            TableSpec(
                name=f"t{number}",
                num_embeddings=max(1, round(rows * scale)),
                embedding_dim=dim,
                feature_names=tuple(features),
                dtype=dtype,
            )
        )
    spec = ModelSpec(
        model=name,
        tables=tuple(tables),
        features=tuple(FeatureSpec(name=feature, side="candidate") for feature in hotness),
        dense_inputs=DenseInputs(candidate=published.num_dense),
        dense_model=published.dense_model,
    )
    return CatalogModel(spec, hotness, published.zipf)
