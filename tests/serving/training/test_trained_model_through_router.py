"""An exported model, served over shards from its snapshot, gives the float32 scores of its torch modules."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from loader.snapshot.reader import Snapshot
from serving.embedded import ModelSource, load_served_model
from serving.models.layers import bfloat16_is_native
from serving.rank.service import RankingService
from serving.training.dataset import FilmsDataset, FilmsOptions, films_description
from serving.training.trainer import GOLDEN_TOLERANCES, export_trained, train_described
from shardrank_testing.movielens import small_interactions

DATASET = FilmsDataset.split(small_interactions(), seed=0)
EVERY_LEVER = {
    "users": {"blocks": [{"share": 0.3, "dtype": "fp16"}, {"dim": 4, "dtype": "fp32"}]},
    "films": {"dtype": {"hot": "fp32", "cold": "fp16", "hot_share": 0.2}},
    "genres": {"embedding_dim": 4, "project_to": 16},
    "zip_codes": {"num_embeddings": 50, "embedding_dim": 4, "project_to": 16},
    "crosses": {
        "num_embeddings": 900,
        "feature_names": ["user_genre", "zip_film"],
        "id_mapping": {"kind": "hash", "salt": "per_feature"},
    },
    "age_genre": {"num_embeddings": 256, "id_mapping": {"kind": "quotient_remainder", "buckets": 16}},
    "occupation_film": {"num_embeddings": 1024, "id_mapping": {"kind": "quotient_remainder", "buckets": 40}},
}
EXACT = {"dtype": "fp32", "profile": True}


def served_difference(
    store: Path, options: dict[str, Any], dtype: str, num_shards: int, keep_share: float | None = None
) -> float:
    """Train and serve a model; return how far its golden scores are from those of training, which refuses to be far."""
    described = films_description(DATASET.interactions, FilmsOptions.model_validate(options))
    trained = train_described(DATASET, described, keep_share=keep_share, epochs=1)
    path = export_trained(trained, DATASET, store)
    assert Snapshot.open(path).manifest.golden.tolerance == GOLDEN_TOLERANCES[options.get("dtype", "int8")]
    topology = {"local_shards": num_shards, "cards": 2, "sharding": "hash", "replicate_bytes": 0}
    source = ModelSource(snapshot=path, dtype=dtype, **topology)
    with closing(load_served_model(source, RankingService())) as served:
        return served.checked.difference


@pytest.mark.parametrize("kind", ["target_attention", "dlrm", "dcn_v2", "mlp"])
def test_float32_rows_give_the_float32_scores(kind, tmp_path):
    assert served_difference(tmp_path, EXACT | {"kind": kind}, "float32", 3) <= 1e-5


@pytest.mark.parametrize("row_dtype", ["int8", "int4", "fp16"])
@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        pytest.param(
            "bfloat16", marks=pytest.mark.skipif(not bfloat16_is_native(), reason="this CPU emulates bfloat16")
        ),
        "int8",
    ],
)
def test_quantised_rows_stay_within_the_golden_tolerance(row_dtype, dtype, tmp_path):
    assert 0 < served_difference(tmp_path, {"dtype": row_dtype}, dtype, 2) <= GOLDEN_TOLERANCES[row_dtype]


@pytest.mark.parametrize(("kind", "keep_share"), [("target_attention", 0.9), ("dcn_v2", None)])
def test_a_model_with_every_lever_gives_its_scores(kind, keep_share, tmp_path):
    """Hot users and cold films are stored as float16."""
    options = EXACT | {"kind": kind, "crosses": True, "tables": EVERY_LEVER}
    assert served_difference(tmp_path, options, "float32", 2, keep_share) <= 1e-4
