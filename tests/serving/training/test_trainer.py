"""Training end to end on small generated data: quality, determinism, and what is handed over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from loader.codecs import codec_for
from loader.reader import Snapshot
from serving.models.factory import load_model
from serving.training.batches import RequestBatches
from serving.training.dataset import FilmsDataset
from serving.training.description import FilmsOptions, films_spec
from serving.training.export import export_trained, golden_requests
from serving.training.float32_ranker import Float32Ranker
from serving.training.metrics import auc, item_mean_scores
from serving.training.network import RankingNetwork
from serving.training.requests import evaluation_requests
from serving.training.synthetic import SyntheticOptions, generate_interactions
from serving.training.trainer import TrainedModel, TrainingOptions, train
from shardrank_testing.movielens import small_interactions

DATASET = FilmsDataset.split(small_interactions(), seed=0)
SHORT = TrainingOptions(epochs=2)


@pytest.fixture(scope="module")
def trained() -> TrainedModel:
    return train(DATASET, films_spec(DATASET.interactions, FilmsOptions(profile=True)), SHORT)


def test_planted_tastes_are_found() -> None:
    data = generate_interactions(SyntheticOptions(num_users=250, num_films=150, num_ratings=9000, seed=5))
    dataset = FilmsDataset.split(data, seed=0)
    spec = films_spec(data)
    labelled = evaluation_requests(dataset, spec)
    model = train(dataset, spec, TrainingOptions(epochs=8))
    baseline = item_mean_scores(
        data.film_index[dataset.train],
        dataset.labels[dataset.train],
        data.film_index[labelled.samples],
        data.films.ids.size,
    )
    scores = Float32Ranker(model).score(labelled.requests)
    assert auc(labelled.labels, scores) >= auc(labelled.labels, baseline) + 0.02


def test_the_same_seed_trains_the_same_model_and_leaves_the_callers_random_state(trained: TrainedModel) -> None:
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    again = train(DATASET, trained.spec, SHORT)
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, rows in trained.tables.items():
        np.testing.assert_array_equal(again.tables[name], rows)
    for name, tensor in trained.dense.items():
        assert torch.equal(again.dense[name], tensor)
    other = train(DATASET, trained.spec, SHORT.model_copy(update={"seed": 1}))
    assert not np.array_equal(other.tables["films"], trained.tables["films"])


def test_progress_counts_every_batch_to_its_end() -> None:
    seen: list[tuple[str, int, int]] = []
    train(DATASET, films_spec(DATASET.interactions), SHORT, lambda *step: seen.append(step))
    total = seen[-1][2]
    assert seen == [("training", done, total) for done in range(1, total + 1)]


@pytest.mark.parametrize("kind", ["target_attention", "dlrm", "dcn_v2", "mlp"])
def test_trained_tensors_load_into_the_serving_model_as_they_are(kind: str) -> None:
    spec = films_spec(DATASET.interactions, FilmsOptions.model_validate({"kind": kind}))
    model = train(DATASET, spec, TrainingOptions(epochs=1))
    requests = evaluation_requests(DATASET, spec).requests
    network = RankingNetwork(spec).eval()
    network.load_tables({name: torch.from_numpy(rows) for name, rows in model.tables.items()})
    batches = RequestBatches(spec, model.vocabularies, requests)
    with torch.inference_mode():
        inputs = network.inputs(batches.take(np.arange(batches.num_requests)))
    served = load_model(spec, model.dense).score(inputs).numpy()
    np.testing.assert_allclose(served, Float32Ranker(model).score(requests), atol=1e-5)


def test_an_unknown_user_is_scored_with_the_default_row(trained: TrainedModel) -> None:
    requests = evaluation_requests(DATASET, trained.spec).requests.request(0)
    scores = Float32Ranker(trained).score(requests)
    requests.values["user_id"] = np.array([10**9])
    unknown = Float32Ranker(trained).score(requests)
    requests.values["user_id"] = np.array([2 * 10**9])
    assert np.isfinite(unknown).all()
    assert not np.allclose(unknown, scores)
    np.testing.assert_array_equal(Float32Ranker(trained).score(requests), unknown)


def test_an_exported_model_holds_its_rows_tensors_and_golden_scores(trained: TrainedModel, tmp_path: Path) -> None:
    golden = golden_requests(trained, DATASET, 6)
    assert golden.num_requests == 6
    path = export_trained(trained, tmp_path, golden=golden, metadata={"seed": "0"})
    assert path == tmp_path / "films" / "1"
    assert export_trained(trained, tmp_path, golden=golden) == tmp_path / "films" / "2"
    snapshot = Snapshot.open(path)
    assert snapshot.manifest.spec == trained.spec
    assert snapshot.manifest.golden is not None
    assert snapshot.manifest.golden.num_requests == 6
    assert snapshot.manifest.metadata == {"seed": "0"}


def test_int8_rows_cost_no_quality(trained: TrainedModel) -> None:
    labelled = evaluation_requests(DATASET, trained.spec)
    exact = Float32Ranker(trained).score(labelled.requests)
    rounded = {}
    for name, rows in trained.tables.items():
        codec = codec_for("int8", rows.shape[1])
        rounded[name] = codec.decode(codec.encode(rows))
    coarse = Float32Ranker(TrainedModel(trained.spec, rounded, trained.dense, trained.vocabularies)).score(
        labelled.requests
    )
    assert 0 < np.abs(coarse - exact).max() < 0.02
    assert auc(labelled.labels, coarse) >= auc(labelled.labels, exact) - 0.001
