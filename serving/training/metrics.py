"""How good a ranking is."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from serving.training.errors import TrainingError
from shard_node.bags import Float32Array, Int64Array


def auc(labels: npt.NDArray[Any], scores: npt.NDArray[np.floating]) -> float:
    """The share of (positive, negative) pairs in which the positive scores higher; a tie counts one half.

    By the Mann-Whitney rank statistic: (sum of the positives' ranks - P (P + 1) / 2) / (P N), tied scores sharing their
    mean rank.

    Args:
        labels: [n], positive where above 0.5.
        scores: [n].

    Raises:
        TrainingError: if the sizes differ, a score is not finite, or one of the two classes is not there.
    """
    if labels.shape != scores.shape or labels.ndim != 1:
        raise TrainingError(f"auc: labels {list(labels.shape)} and scores {list(scores.shape)} must be of one size [n]")
    if not np.isfinite(scores).all():
        raise TrainingError("auc: scores hold NaN or inf")
    positive = np.asarray(labels) > 0.5
    num_positive = int(positive.sum())
    num_negative = positive.size - num_positive
    if not num_positive or not num_negative:
        raise TrainingError(f"auc: {num_positive} positive and {num_negative} negative labels; both are needed")
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    rank_sum = float(mean_rank[place][positive].sum())
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)


def item_mean_scores(
    train_items: Int64Array, train_labels: Float32Array, items: Int64Array, num_items: int
) -> Float32Array:
    """The baseline: each item's mean training label, and the mean of all labels for an item that has none.

    Args:
        train_items: int64 [t].
        train_labels: float32 [t].
        items: int64 [n], the items to score.
        num_items: items are below it.

    Returns:
        float32 [n].
    """
    counts = np.bincount(train_items, minlength=num_items)
    sums = np.bincount(train_items, weights=train_labels, minlength=num_items)
    overall = float(train_labels.mean()) if train_labels.size else 0.0
    means = np.where(counts > 0, sums / np.maximum(counts, 1), overall)
    return means[items].astype(np.float32)
