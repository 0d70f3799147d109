"""A model in memory becomes a version by one call: its rows, its keys, its dense weights, or what is wrong with it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import shardrank
from loader.errors import CheckpointError, ExportError
from serving.embedded import Ranker

DESCRIPTION = {
    "model": "shop",
    "tables": [
        {"name": "films", "num_embeddings": 50, "embedding_dim": 8, "feature_names": ["film"], "dtype": "fp32"},
        {"name": "users", "keys": "int64", "capacity": "auto", "embedding_dim": 4, "feature_names": ["user"]}
        | {"dtype": "fp32"},
    ],
    "features": [{"name": "film", "side": "candidate"}, {"name": "user", "side": "context"}],
    "dense_model": {"kind": "mlp", "config": {"hidden": [6]}},
}
KEYS = np.array([-5, 2**63 - 1, 7], np.int64)
REQUEST = {"context": {"sparse": {"user": [7]}}, "candidates": {"sparse": {"film": [3, 49]}}}


class Shop(nn.Module):
    """What is trained: tables, and the dense model of the description."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.films, self.users = nn.Embedding(50, 8), nn.EmbeddingBag(3, 4)
        described = shardrank.ModelDescription.model_validate(DESCRIPTION)
        self.dense = shardrank.build_model(described.compiled(num_keys={"users": 3}))

    def scores(self) -> list[float]:
        """Training's own answer to the request, in NumPy."""
        weights = iter(parameter.detach().numpy() for parameter in self.dense.parameters())
        films, users = self.films.weight.detach().numpy(), self.users.weight.detach().numpy()
        inputs = np.stack([np.concatenate([films[film], users[2]]) for film in (3, 49)])
        hidden = np.maximum(inputs @ next(weights).T + next(weights), 0)
        logits = hidden @ next(weights).T + next(weights)
        return (1 / (1 + np.exp(-logits.reshape(-1)))).tolist()


@pytest.mark.parametrize("given", ["module", "state dict", "nested"])
@pytest.mark.parametrize("described", ["object", "file", "description"])
def test_a_model_is_exported_as_it_is(tmp_path, given, described):
    model = Shop()
    nested = {"epoch": 3, "model": dict(model.state_dict())}
    content = {"module": model, "state dict": model.state_dict(), "nested": nested}[given]
    (tmp_path / "shop.json").write_text(json.dumps(DESCRIPTION))
    description = {"object": DESCRIPTION, "file": tmp_path / "shop.json"}.get(described)
    description = description or shardrank.ModelDescription.model_validate(DESCRIPTION)
    prefix = "model.dense." if given == "nested" else "dense."
    options = {"keys": {"users": KEYS.tolist()}, "dense_prefix": prefix, "metadata": {"run": "a"}}
    folder = shardrank.export(content, description, None, tmp_path / "models", **options)
    assert folder == tmp_path / "models" / "shop" / "1"
    with Ranker.open(folder) as ranker:
        scores = ranker.rank("shop", **REQUEST).scores
    assert scores == pytest.approx(model.scores(), abs=1e-5)


def test_golden_scores_that_are_not_the_models_are_found_by_its_servers(tmp_path):
    model = Shop()
    options = {"keys": {"users": KEYS}, "dense_prefix": "dense.", "golden_tolerance": 1e-3}
    for shift in (0.0, 0.1):
        golden = shardrank.GoldenRequests.from_requests([REQUEST], np.array(model.scores()) + shift)
        folder = shardrank.export(model, DESCRIPTION, golden, tmp_path / "models", **options)
        if shift:
            with pytest.raises(shardrank.RankingModelError, match="golden"):
                Ranker.open(folder)
        else:
            Ranker.open(folder).close()


def test_tables_by_popularity_are_divided_by_counts(tmp_path):
    films = DESCRIPTION["tables"][0] | {"dtype": {"hot": "fp32", "cold": "int4", "hot_share": 0.1}}
    description = DESCRIPTION | {"tables": [films, DESCRIPTION["tables"][1]]}
    counts = np.zeros(50, np.int64)
    counts[[3, 49, 1, 2, 8]] = 9
    model = Shop()
    options = {"keys": {"users": KEYS}, "dense_prefix": "dense.", "access_counts": {"films": counts}}
    path = shardrank.export(model, description, None, tmp_path, **options)
    with Ranker.open(path) as ranker:
        scores = ranker.rank("shop", **REQUEST).scores
    # Both films are hot, whose rows are stored as they are.
    assert scores == pytest.approx(model.scores(), abs=1e-5)


@pytest.mark.parametrize(
    ("description", "options", "error", "message"),
    [
        (DESCRIPTION, {}, ExportError, "capacity is auto: give its keys"),
        (DESCRIPTION, {"keys": {"users": KEYS}}, CheckpointError, "the names fit with --dense-prefix dense\\."),
        (DESCRIPTION | {"modle": 1}, {}, ExportError, "modle"),
        (
            DESCRIPTION | {"dense_model": {"kind": "mlp", "config": {"hidden": [5]}}},
            {"keys": {"users": KEYS}, "dense_prefix": "dense."},
            CheckpointError,
            "has shape \\[6\\], expected \\[5\\]",
        ),
        (DESCRIPTION, {"keys": {"users": KEYS}, "table_keys": {"films": "x"}}, CheckpointError, "no tensor 'x'"),
        (
            DESCRIPTION,
            {"keys": {"users": KEYS}, "program": b"", "dense_prefix": "dense."},
            ExportError,
            "goes with a dense_model of kind exported",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(tmp_path, description, options, error, message):
    with pytest.raises(error, match=message):
        shardrank.export(Shop(), description, None, tmp_path / "models", **options)
    assert not (tmp_path / "models").exists()
