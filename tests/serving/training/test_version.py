from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.training.dataset import FilmsDataset
from serving.training.interactions import TrainingError
from serving.training.version import auc, film_mean_scores
from shardrank_testing.movielens import small_interactions


def auc_by_pairs(labels: np.ndarray, scores: np.ndarray) -> float:
    wins = [
        1.0 if positive > negative else 0.5 if positive == negative else 0.0
        for positive in scores[labels == 1]
        for negative in scores[labels == 0]
    ]
    return sum(wins) / len(wins)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2, max_size=40))
def test_auc_is_the_share_of_pairs_in_order_with_ties_counting_half(samples: list[tuple[bool, int]]) -> None:
    labels = np.array([positive for positive, _ in samples], np.float32)
    scores = np.array([score / 4 for _, score in samples], np.float32)
    if labels.min() == labels.max():
        with pytest.raises(TrainingError, match="both are needed"):
            auc(labels, scores)
    else:
        assert auc(labels, scores) == pytest.approx(auc_by_pairs(labels, scores), abs=1e-12)


def test_auc_refuses_scores_that_are_not_finite() -> None:
    with pytest.raises(TrainingError, match="NaN or inf"):
        auc(np.array([0.0, 1.0]), np.array([0.1, np.nan]))


def test_film_mean_scores_are_means_of_training_labels_and_the_overall_mean_for_new_films() -> None:
    dataset = FilmsDataset.split(small_interactions(num_ratings=500), seed=0)
    rated = dataset.interactions.film_index[dataset.train]
    new = int(rated[0])
    kept = dataset.train[rated != new]
    dataset = dataclasses.replace(dataset, train=kept)
    samples = np.concatenate([dataset.test, np.flatnonzero(dataset.interactions.film_index == new)])
    for sample, score in zip(samples, film_mean_scores(dataset, samples), strict=True):
        film = dataset.interactions.film_index[sample]
        labels = dataset.labels[kept[dataset.interactions.film_index[kept] == film]]
        assert score == pytest.approx((labels if labels.size else dataset.labels[kept]).mean(), rel=1e-6)
