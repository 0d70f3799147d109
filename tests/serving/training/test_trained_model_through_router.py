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
from serving.training.dataset import FilmsDataset, FilmsOptions, films_description, films_spec
from serving.training.trainer import GOLDEN_TOLERANCES, Pruning, export_trained, train, train_described
from shard_node.bags import KeyedBags
from shard_node.engine.loading import load_tables
from shard_node.node import LocalShard, ShardNode
from shardrank_testing.levers import EVERY_LEVER
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
    tables = [table for table in spec.logical_tables if table.id_mapping.kind == "vocabulary"]
    vocabularies = {table.name: snapshot.vocabulary(table.name) for table in tables}
    classes = {one.name: snapshot.row_classes(one.name) for one in spec.divided if one.num_classes > 1}
    router = Router(schema, IdMapper(schema, vocabularies, classes), plan, local_shards(snapshot, plan))
    embeddings = asyncio.run(router.lookup("films", 1, keyed_bags(schema, requests), math.inf))
    model = load_model(spec, snapshot.dense_tensors(), dtype)
    inputs = InputAssembler(spec, schema, model.dtype).assemble(
        embeddings,
        np.repeat(np.arange(requests.num_requests), requests.num_candidates),
        requests.context_dense,
        requests.candidate_dense,
        projections=model.projections_by_part,
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


@pytest.mark.parametrize("kind", ["target_attention", "dcn_v2"])
def test_a_model_trained_with_every_lever_is_served_with_the_scores_of_its_torch_modules(
    kind: str, tmp_path: Path
) -> None:
    options = {"kind": kind, "dtype": "fp32", "profile": True, "crosses": True, "tables": EVERY_LEVER}
    described = films_description(DATASET.interactions, FilmsOptions.model_validate(options))
    trained = train_described(DATASET, described, pruning=Pruning(keep_share=0.9), epochs=1)
    snapshot = Snapshot.open(export_trained(trained, DATASET, tmp_path))
    scores, golden = served_scores(snapshot, 2, "float32")
    # Hot users and cold films are stored as float16.
    np.testing.assert_allclose(scores, golden.scores, atol=1e-4)
