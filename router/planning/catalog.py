"""Published models by name, with what a `ModelSpec` does not say: ids in a bag of each feature, and their skew.

- `dlrm-v2`: MLPerf's DLRM-v2 on Criteo 1TB, multi-hot (github.com/mlcommons/training,
  recommendation_v2/torchrec_dlrm/README.MD: table sizes and hotness).
- `merlin-tiny` to `merlin-colossal`: the synthetic models of NVIDIA-Merlin/distributed-embeddings
  (examples/benchmarks/synthetic_models/config_v3.py), ids by a power law of exponent 1.05 (its README).
- `textbook`: one table of 2 * 10^9 rows of 128, 40 lookups a sample: easy to reckon by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.tables import RowDtype, TableSpec
from router.errors import PlanError

MERLIN_ZIPF = 1.05
DLRM_V2_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10,
    2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
DLRM_V2_HOTNESS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)

Alike: TypeAlias = tuple[int, tuple[int, ...], int, int]
"""So many tables alike, each looked up by one feature for each hotness: number, hotness, rows, embedding_dim."""


class _Published(NamedTuple):
    tables: tuple[Alike, ...]
    dense_model: DenseModelSpec
    num_dense: int = 0
    zipf: float = 0.0


def _merlin(hidden: tuple[int, ...], num_dense: int, *tables: Alike) -> _Published:
    return _Published(tables, DenseModelSpec(kind="mlp", config={"hidden": list(hidden)}), num_dense, MERLIN_ZIPF)


_DLRM_V2_CONFIG: dict[str, Any] = {
    "num_cross_layers": 3,
    "low_rank": 512,
    "bottom_mlp": [512, 256, 128],
    "deep": [1024, 1024, 512, 256],
}
CATALOG: dict[str, _Published] = {
    "dlrm-v2": _Published(
        tuple((1, (ids,), rows, 128) for rows, ids in zip(DLRM_V2_ROWS, DLRM_V2_HOTNESS, strict=True)),
        DenseModelSpec(kind="dcn_v2", config=_DLRM_V2_CONFIG), 13,
    ),
    "merlin-tiny": _merlin(
        (256, 128), 10,
        (1, (1, 10), 10_000, 8), (1, (1, 10), 1_000_000, 16), (1, (1, 10), 25_000_000, 16), (1, (1,), 25_000_000, 16),
        (16, (1,), 10, 8), (10, (1,), 1_000, 8), (4, (1,), 10_000, 8), (2, (1,), 100_000, 16),
        (19, (1,), 1_000_000, 16),
    ),
    "merlin-small": _merlin(
        (512, 256, 128), 10,
        (5, (1, 30), 10_000, 16), (3, (1, 30), 4_000_000, 32), (1, (1, 30), 50_000_000, 32), (1, (1,), 50_000_000, 32),
        (30, (1,), 10, 16), (30, (1,), 1_000, 16), (5, (1,), 10_000, 16), (5, (1,), 100_000, 32),
        (27, (1,), 4_000_000, 32),
    ),
    "merlin-medium": _merlin(
        (1024, 512, 256, 128), 25,
        (20, (1, 50), 100_000, 64), (5, (1, 50), 10_000_000, 64), (1, (1, 50), 100_000_000, 128),
        (1, (1,), 100_000_000, 128), (80, (1,), 10, 32), (60, (1,), 1_000, 32), (80, (1,), 100_000, 64),
        (24, (1,), 200_000, 64), (40, (1,), 10_000_000, 64),
    ),
    "merlin-large": _merlin(
        (2048, 1024, 512, 256), 100,
        (40, (1, 100), 100_000, 64), (16, (1, 100), 15_000_000, 64), (1, (1, 100), 200_000_000, 128),
        (1, (1,), 200_000_000, 128), (100, (1,), 10, 32), (100, (1,), 10_000, 32), (160, (1,), 100_000, 64),
        (50, (1,), 500_000, 64), (144, (1,), 15_000_000, 64),
    ),
    "merlin-jumbo": _merlin(
        (2048, 1024, 512, 256), 200,
        (50, (1, 200), 100_000, 128), (24, (1, 200), 20_000_000, 128), (1, (1, 200), 400_000_000, 256),
        (1, (1,), 400_000_000, 256), (100, (1,), 10, 32), (200, (1,), 10_000, 64), (350, (1,), 100_000, 128),
        (80, (1,), 1_000_000, 128), (216, (1,), 20_000_000, 128),
    ),
    "merlin-colossal": _merlin(
        (4096, 2048, 1024, 512, 256), 500,
        (100, (1, 300), 100_000, 128), (50, (1, 300), 40_000_000, 256), (1, (1, 300), 2_000_000_000, 256),
        (1, (1,), 1_000_000_000, 256), (100, (1,), 10, 32), (400, (1,), 10_000, 128), (100, (1,), 100_000, 128),
        (800, (1,), 1_000_000, 128), (450, (1,), 40_000_000, 256),
    ),
    "textbook": _Published(((1, (40,), 2_000_000_000, 128),), DenseModelSpec(kind="mlp")),
}  # fmt: skip


@dataclass(frozen=True)
class CatalogModel:
    """A model and how it is looked up: by feature, ids in a bag; the exponent of their power law, 0 for uniform."""

    spec: ModelSpec
    hotness: Mapping[str, int]
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
