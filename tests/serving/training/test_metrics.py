from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.training.errors import TrainingError
from serving.training.metrics import auc, item_mean_scores


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


def test_auc_refuses_scores_that_are_not_finite_or_too_few() -> None:
    with pytest.raises(TrainingError, match="NaN or inf"):
        auc(np.array([0.0, 1.0]), np.array([0.1, np.nan]))
    with pytest.raises(TrainingError, match=r"labels \[2\] and scores \[1\]"):
        auc(np.array([0.0, 1.0]), np.array([0.1]))


def test_item_mean_scores_are_means_of_training_labels_and_the_overall_mean_for_new_items() -> None:
    scores = item_mean_scores(
        np.array([0, 0, 0, 2]), np.array([1, 1, 0, 0], np.float32), np.array([0, 1, 2, 0]), num_items=3
    )
    np.testing.assert_allclose(scores, [2 / 3, 1 / 2, 0, 2 / 3], rtol=1e-6)
