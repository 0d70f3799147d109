"""Training end to end on small generated data: quality, determinism, and what is handed over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loader.snapshot.reader import Snapshot
from serving.training.dataset import (
    FilmsDataset,
    FilmsOptions,
    TrainingError,
    films_description,
    generate_interactions,
    labelled_requests,
)
from serving.training.network import TrainedModel, float32_scores
from serving.training.trainer import (
    GOLDEN_REQUESTS,
    auc,
    export_trained,
    train,
)
from shardrank_testing.movielens import small_interactions

DATASET = FilmsDataset.split(small_interactions(), seed=0)


@pytest.fixture(scope="module")
def trained() -> TrainedModel:
    return train(DATASET, films_description(DATASET.interactions, FilmsOptions(profile=True)).compiled(), epochs=2)


def test_planted_tastes_are_found() -> None:
    data = generate_interactions(9000, num_users=250, num_films=150, seed=5)
    dataset = FilmsDataset.split(data, seed=0)
    spec = films_description(data).compiled()
    labelled = labelled_requests(dataset, spec, dataset.test)
    model = train(dataset, spec, epochs=8)
    films = data.film_index[labelled.samples]
    baseline = dataset.film_statistics(films, dataset.fold[labelled.samples])[:, 1]
    scores = float32_scores(model, labelled.requests)
    assert auc(labelled.labels, scores) >= auc(labelled.labels, baseline) + 0.02


def test_the_same_seed_trains_the_same_model(trained: TrainedModel) -> None:
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    again = train(DATASET, trained.spec, epochs=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, rows in trained.tables.items():
        np.testing.assert_array_equal(again.tables[name], rows)
    for name, tensor in trained.dense.items():
        assert torch.equal(again.dense[name], tensor)
    other = train(DATASET, trained.spec, seed=1, epochs=2)
    assert not np.array_equal(other.tables["films"], trained.tables["films"])


def test_an_unknown_user_is_scored_with_the_default_row(trained: TrainedModel) -> None:
    requests = labelled_requests(DATASET, trained.spec, DATASET.test).requests.request(0)
    scores = float32_scores(trained, requests)
    requests.values["user_id"] = np.array([10**9])
    unknown = float32_scores(trained, requests)
    requests.values["user_id"] = np.array([2 * 10**9])
    assert np.isfinite(unknown).all()
    assert not np.allclose(unknown, scores)
    np.testing.assert_array_equal(float32_scores(trained, requests), unknown)


def test_an_exported_model_has_golden_scores_and_metadata(trained: TrainedModel, tmp_path: Path) -> None:
    path = export_trained(trained, DATASET, tmp_path, metadata={"seed": "0"})
    assert path == tmp_path / "films" / "1"
    assert export_trained(trained, DATASET, tmp_path) == tmp_path / "films" / "2"
    snapshot = Snapshot.open(path)
    assert snapshot.manifest.spec == trained.spec
    golden = snapshot.golden()
    assert golden.num_requests == GOLDEN_REQUESTS
    first = labelled_requests(DATASET, trained.spec, DATASET.test).requests
    np.testing.assert_allclose(golden.scores, float32_scores(trained, first)[: golden.scores.size], atol=1e-6)
    assert snapshot.manifest.metadata == {"seed": "0"}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2, max_size=40))
def test_auc_is_the_share_of_pairs_in_order(samples: list[tuple[bool, int]]) -> None:
    labels = np.array([positive for positive, _ in samples], np.float32)
    scores = np.array([score / 4 for _, score in samples], np.float32)
    if labels.min() == labels.max():
        with pytest.raises(TrainingError, match="both are needed"):
            auc(labels, scores)
    else:
        liked, others = scores[labels == 1, None], scores[labels == 0]
        assert auc(labels, scores) == pytest.approx(((liked > others) + (liked == others) / 2).mean(), abs=1e-12)
