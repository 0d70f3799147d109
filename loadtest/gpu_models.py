"""The models that the GPU bench ranks with: DLRM-v2's tables and sizes, cut to what can be exported in seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import JsonValue

from loader.manifest import DenseModelSpec, ModelSpec
from loader.row_source import rows_from_blocks
from loader.writer import export_snapshot
from loadtest.lookup_setup import DISTINCT_ROWS, distinct_rows
from router.feature_schema import FeatureSchema
from serving.cli.model_catalog import catalog_model
from serving.formats.requests import RankRequest
from serving.models.factory import build_model
from shard_node.bags import Float32Array, KeyedBags

ModelKind = Literal["dlrm", "dcn_v2"]
KINDS: tuple[ModelKind, ...] = ("dlrm", "dcn_v2")
# With bags of up to 100 rows, products of pooled vectors, and so logits, stay of the order of 1.
ROW_SCALE = np.float32(0.05)
BOTTOM, TOP = (512, 256, 128), (1024, 1024, 512, 256)
CROSS_LAYERS, CROSS_RANK = 3, 512


@dataclass(frozen=True)
class BenchModel:
    """One of the models.

    Attributes:
        kind: of its dense part.
        spec: its description; features are all the candidates', as in DLRM-v2.
        hotness: by feature, ids in a bag.
        table_rows: that no table has more of.
    """

    kind: ModelKind
    spec: ModelSpec
    hotness: Mapping[str, int]
    table_rows: int

    @classmethod
    def make(cls, kind: ModelKind, table_rows: int, most_hotness: int, layer_divisor: int) -> BenchModel:
        """DLRM-v2 with tables of at most `table_rows`, and bags of at most `most_hotness` ids.

        Hidden layers are `layer_divisor` times smaller than published; the bottom MLP still ends with dim 128.
        """
        found = catalog_model("dlrm-v2")
        tables = tuple(
            table.model_copy(update={"num_embeddings": min(table.num_embeddings, table_rows)})
            for table in found.spec.tables
        )
        name = f"bench-{kind.replace('_', '-')}"
        spec = found.spec.model_copy(
            update={"model": name, "tables": tables, "dense_model": _dense_model(kind, layer_divisor)}
        )
        hotness = {feature: min(ids, most_hotness) for feature, ids in found.hotness.items()}
        return cls(kind, spec, hotness, table_rows)

    def export(self, store: Path) -> Path:
        """Writes a snapshot: rows that repeat after a while, random weights that keep the size of what passes ReLUs."""
        rows = {
            table.name: rows_from_blocks(
                _blocks(table.num_embeddings, table.embedding_dim), table.num_embeddings, table.embedding_dim
            )
            for table in self.spec.tables
        }
        draw = torch.Generator().manual_seed(5)
        dense = {
            name: torch.randn(tensor.shape, generator=draw) * (2 / tensor.shape[-1]) ** 0.5
            for name, tensor in build_model(self.spec).state_dict().items()
        }
        return export_snapshot(store, self.spec, rows=rows, dense=dense)

    def request(self, candidates: int, seed: int) -> RequestParts:
        """Uniform ids, and dense inputs of the order of 1."""
        rng = np.random.default_rng(seed)
        schema = FeatureSchema.of(self.spec)
        hotness = np.array([self.hotness[feature.name] for feature in schema.features])
        rows = np.array([table.num_embeddings for table in schema.layout.tables])[schema.table_index]
        values = rng.integers(0, np.repeat(rows, hotness * candidates))
        keys = np.arange(hotness.size, dtype=np.int32)
        bags_per_key = np.full(hotness.size, candidates, np.int64)
        bags = KeyedBags.from_lengths(keys, bags_per_key, np.repeat(hotness, candidates), values)
        dense = rng.standard_normal((candidates, self.spec.dense_inputs.candidate), dtype=np.float32)
        return RequestParts(bags, dense)


def _dense_model(kind: ModelKind, divisor: int) -> DenseModelSpec:
    bottom = [*(size // divisor for size in BOTTOM[:-1]), BOTTOM[-1]]
    top = [size // divisor for size in TOP]
    config: dict[str, JsonValue] = {"bottom_mlp": [*bottom], "top_mlp": [*top]}
    if kind == "dcn_v2":
        cross: dict[str, JsonValue] = {"num_cross_layers": CROSS_LAYERS, "low_rank": CROSS_RANK // divisor}
        config = {"bottom_mlp": [*bottom], "deep": [*top], **cross}
    return DenseModelSpec(kind=kind, config=config)


@lru_cache(maxsize=1)
def _block(embedding_dim: int) -> Float32Array:
    return distinct_rows(embedding_dim) * ROW_SCALE


def _blocks(num_rows: int, embedding_dim: int) -> Iterator[Float32Array]:
    block = _block(embedding_dim)
    for first in range(0, num_rows, DISTINCT_ROWS):
        yield block[: num_rows - first]


@dataclass(frozen=True, eq=False)
class RequestParts:
    """A request before it is handed in: what an API makes of its bytes.

    Attributes:
        bags: of all features.
        dense: float32 [candidates, dense inputs].
    """

    bags: KeyedBags
    dense: Float32Array

    def parsed(self, timeout_s: float) -> RankRequest:
        """As an API's codec would give it."""
        return RankRequest(self.bags, self.dense.shape[0], np.zeros(0, np.float32), self.dense, timeout_s)
