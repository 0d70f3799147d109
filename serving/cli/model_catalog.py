"""Published recommender models by name: what planning and load tests are compared on, without a file of one's own.

Each comes with what a `ModelSpec` does not say: how many ids a bag of each feature has, and how skewed they are.

- `dlrm-v2`: MLPerf's DLRM-v2 on Criteo 1TB, multi-hot (github.com/mlcommons/training,
  recommendation_v2/torchrec_dlrm/README.MD: table sizes and hotness).
- `merlin-tiny` to `merlin-colossal`: the synthetic models of NVIDIA-Merlin/distributed-embeddings
  (examples/benchmarks/synthetic_models/config_v3.py), ids by a power law of exponent 1.05 (its README).
- `textbook`: one table of 2 * 10^9 rows of 128, 40 lookups a sample: easy to reckon by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import JsonValue

from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec, RowDtype, TableSpec
from serving.errors import ModelNotFoundError

DLRM_V2_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10,
    2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
DLRM_V2_HOTNESS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
MERLIN_ZIPF = 1.05


@dataclass(frozen=True)
class CatalogModel:
    """A model and how it is looked up.

    Attributes:
        spec: tables, features, dense model.
        hotness: by feature, ids in a bag.
        zipf: exponent of the power law that ids follow, 0 for uniform.
    """

    spec: ModelSpec
    hotness: Mapping[str, int]
    zipf: float


class _Tables(NamedTuple):
    """So many tables alike, each looked up by one feature for each hotness."""

    number: int
    hotness: tuple[int, ...]
    rows: int
    dim: int


class _Merlin(NamedTuple):
    tables: tuple[_Tables, ...]
    hidden: tuple[int, ...]
    dense: int


_MERLIN = {
    "merlin-tiny": _Merlin(
        (
            _Tables(1, (1, 10), 10_000, 8), _Tables(1, (1, 10), 1_000_000, 16), _Tables(1, (1, 10), 25_000_000, 16),
            _Tables(1, (1,), 25_000_000, 16), _Tables(16, (1,), 10, 8), _Tables(10, (1,), 1_000, 8),
            _Tables(4, (1,), 10_000, 8), _Tables(2, (1,), 100_000, 16), _Tables(19, (1,), 1_000_000, 16),
        ),
        (256, 128),
        10,
    ),
    "merlin-small": _Merlin(
        (
            _Tables(5, (1, 30), 10_000, 16), _Tables(3, (1, 30), 4_000_000, 32), _Tables(1, (1, 30), 50_000_000, 32),
            _Tables(1, (1,), 50_000_000, 32), _Tables(30, (1,), 10, 16), _Tables(30, (1,), 1_000, 16),
            _Tables(5, (1,), 10_000, 16), _Tables(5, (1,), 100_000, 32), _Tables(27, (1,), 4_000_000, 32),
        ),
        (512, 256, 128),
        10,
    ),
    "merlin-medium": _Merlin(
        (
            _Tables(20, (1, 50), 100_000, 64), _Tables(5, (1, 50), 10_000_000, 64),
            _Tables(1, (1, 50), 100_000_000, 128), _Tables(1, (1,), 100_000_000, 128), _Tables(80, (1,), 10, 32),
            _Tables(60, (1,), 1_000, 32), _Tables(80, (1,), 100_000, 64), _Tables(24, (1,), 200_000, 64),
            _Tables(40, (1,), 10_000_000, 64),
        ),
        (1024, 512, 256, 128),
        25,
    ),
    "merlin-large": _Merlin(
        (
            _Tables(40, (1, 100), 100_000, 64), _Tables(16, (1, 100), 15_000_000, 64),
            _Tables(1, (1, 100), 200_000_000, 128), _Tables(1, (1,), 200_000_000, 128), _Tables(100, (1,), 10, 32),
            _Tables(100, (1,), 10_000, 32), _Tables(160, (1,), 100_000, 64), _Tables(50, (1,), 500_000, 64),
            _Tables(144, (1,), 15_000_000, 64),
        ),
        (2048, 1024, 512, 256),
        100,
    ),
    "merlin-jumbo": _Merlin(
        (
            _Tables(50, (1, 200), 100_000, 128), _Tables(24, (1, 200), 20_000_000, 128),
            _Tables(1, (1, 200), 400_000_000, 256), _Tables(1, (1,), 400_000_000, 256), _Tables(100, (1,), 10, 32),
            _Tables(200, (1,), 10_000, 64), _Tables(350, (1,), 100_000, 128), _Tables(80, (1,), 1_000_000, 128),
            _Tables(216, (1,), 20_000_000, 128),
        ),
        (2048, 1024, 512, 256),
        200,
    ),
    "merlin-colossal": _Merlin(
        (
            _Tables(100, (1, 300), 100_000, 128), _Tables(50, (1, 300), 40_000_000, 256),
            _Tables(1, (1, 300), 2_000_000_000, 256), _Tables(1, (1,), 1_000_000_000, 256),
            _Tables(100, (1,), 10, 32), _Tables(400, (1,), 10_000, 128), _Tables(100, (1,), 100_000, 128),
            _Tables(800, (1,), 1_000_000, 128), _Tables(450, (1,), 40_000_000, 256),
        ),
        (4096, 2048, 1024, 512, 256),
        500,
    ),
}  # fmt: skip


def catalog_model(name: str, dtype: RowDtype = "int8", scale: float = 1.0) -> CatalogModel:
    """Return a published model.

    Args:
        name: one of `CATALOG`.
        dtype: in which its rows are stored; they are published as float32.
        scale: of the numbers of rows, above 0 and at most 1; every table keeps at least one.

    Raises:
        ModelNotFoundError: no such name.
        ValueError: a scale out of range.
    """
    if name not in CATALOG:
        raise ModelNotFoundError(f"model {name!r} is not in the catalog; it has {', '.join(CATALOG)}")
    if not 0 < scale <= 1:
        raise ValueError(f"scale is {scale}, allowed is above 0 and at most 1")
    return CATALOG[name](name, dtype, scale)


def _dlrm_v2(name: str, dtype: RowDtype, scale: float) -> CatalogModel:
    tables = [_Tables(1, (hotness,), rows, 128) for rows, hotness in zip(DLRM_V2_ROWS, DLRM_V2_HOTNESS, strict=True)]
    config: dict[str, JsonValue] = {
        "num_cross_layers": 3,
        "low_rank": 512,
        "bottom_mlp": [512, 256, 128],
        "deep": [1024, 1024, 512, 256],
    }
    return _model(name, tables, DenseModelSpec(kind="dcn_v2", config=config), 13, 0.0, dtype, scale)


def _merlin(name: str, dtype: RowDtype, scale: float) -> CatalogModel:
    described = _MERLIN[name]
    dense_model = DenseModelSpec(kind="mlp", config={"hidden": list(described.hidden)})
    return _model(name, described.tables, dense_model, described.dense, MERLIN_ZIPF, dtype, scale)


def _textbook(name: str, dtype: RowDtype, scale: float) -> CatalogModel:
    tables = [_Tables(1, (40,), 2_000_000_000, 128)]
    return _model(name, tables, DenseModelSpec(kind="mlp"), 0, 0.0, dtype, scale)


def _model(
    name: str,
    described: Sequence[_Tables],
    dense_model: DenseModelSpec,
    num_dense: int,
    zipf: float,
    dtype: RowDtype,
    scale: float,
) -> CatalogModel:
    tables: list[TableSpec] = []
    hotness: dict[str, int] = {}
    alike = [one for one in described for _ in range(one.number)]
    for number, one in enumerate(alike):
        features = {f"f{number}" if len(one.hotness) == 1 else f"f{number}_{ids}": ids for ids in one.hotness}
        hotness |= features
        tables.append(
            TableSpec(
                name=f"t{number}",
                num_embeddings=max(1, round(one.rows * scale)),
                embedding_dim=one.dim,
                feature_names=tuple(features),
                dtype=dtype,
            )
        )
    spec = ModelSpec(
        model=name,
        tables=tuple(tables),
        features=tuple(FeatureSpec(name=feature, side="candidate") for feature in hotness),
        dense_inputs=DenseInputs(candidate=num_dense),
        dense_model=dense_model,
    )
    return CatalogModel(spec, hotness, zipf)


CATALOG: dict[str, Callable[[str, RowDtype, float], CatalogModel]] = {
    "dlrm-v2": _dlrm_v2,
    **dict.fromkeys(_MERLIN, _merlin),
    "textbook": _textbook,
}
