"""An exported model, loaded from its snapshot and looked up through router and engine, gives the float32 scores."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from loader.snapshot.golden import GoldenRequests
from loader.snapshot.reader import Snapshot
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper
from router.plan import Plan
from router.router import Router
from serving.models.inputs import InputAssembler
from serving.models.layers import NumberFormat
from serving.models.ranking_models import load_model
from serving.training.dataset import FilmsDataset, FilmsOptions, films_spec
from serving.training.trainer import GOLDEN_TOLERANCES, export_trained, train
from shard_node.bags import KeyedBags
from shard_node.engine.loading import load_tables
from shard_node.node import LocalShard, ShardNode
from shardrank_testing.movielens import small_interactions

DATASET = FilmsDataset.split(small_interactions(), seed=0)


def exported(store: Path, options: FilmsOptions) -> Snapshot:
    trained = train(DATASET, films_spec(DATASET.interactions, options), epochs=2)
    return Snapshot.open(export_trained(trained, DATASET, store))


def local_shards(snapshot: Snapshot, plan: Plan) -> Sequence[LocalShard]:
    shards = []
    for index in range(plan.num_shards):
        node = ShardNode(plan.identity(index))
        node.stage("films", 1, load_tables(snapshot, plan.partition(index), plan.digest))
        node.flip("films", 1)
        shards.append(LocalShard(node))
    return shards


def keyed_bags(schema: FeatureSchema, requests: GoldenRequests) -> KeyedBags:
    names = [feature.name for feature in schema.features]
    return KeyedBags.from_lengths(
        np.arange(len(names), dtype=np.int32),
        np.array([requests.lengths[name].size for name in names], np.int64),
        np.concatenate([requests.lengths[name] for name in names]),
        np.concatenate([requests.values[name] for name in names]),
    )


def served_scores(snapshot: Snapshot, num_shards: int, dtype: NumberFormat) -> tuple[np.ndarray, GoldenRequests]:
    spec, requests = snapshot.spec, snapshot.golden()
    assert requests is not None
    schema = FeatureSchema.of(spec)
    plan = Plan.make(spec, num_shards, "hash", cards_per_shard=2, replicate_bytes=0)
    vocabularies = {t.name: snapshot.vocabulary(t.name) for t in spec.tables if t.id_mapping.kind == "vocabulary"}
    router = Router(schema, IdMapper(schema, vocabularies), plan, local_shards(snapshot, plan))
    embeddings = asyncio.run(router.lookup("films", 1, keyed_bags(schema, requests), math.inf))
    model = load_model(spec, snapshot.dense_tensors(), dtype)
    inputs = InputAssembler(spec, schema, model.dtype).assemble(
        embeddings,
        np.repeat(np.arange(requests.num_requests), requests.num_candidates),
        requests.context_dense,
        requests.candidate_dense,
    )
    return model.score(inputs).numpy()[: requests.scores.size], requests


@pytest.mark.parametrize("kind", ["target_attention", "dlrm", "dcn_v2", "mlp"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_float32_rows_give_the_float32_scores(kind: str, num_shards: int, tmp_path: Path) -> None:
    options = FilmsOptions.model_validate({"kind": kind, "dtype": "fp32", "profile": True})
    scores, golden = served_scores(exported(tmp_path, options), num_shards, "float32")
    np.testing.assert_allclose(scores, golden.scores, atol=1e-5)


@pytest.mark.parametrize("row_dtype", ["int8", "int4", "fp16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_quantised_rows_stay_within_the_golden_tolerance(row_dtype: str, dtype: NumberFormat, tmp_path: Path) -> None:
    snapshot = exported(tmp_path, FilmsOptions.model_validate({"dtype": row_dtype}))
    assert snapshot.manifest.golden is not None
    assert snapshot.manifest.golden.tolerance == GOLDEN_TOLERANCES[row_dtype]
    scores, golden = served_scores(snapshot, 2, dtype)
    assert 0 < np.abs(scores - golden.scores).max() <= snapshot.manifest.golden.tolerance
