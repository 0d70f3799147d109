"""Interactions with labels, split into a training and a test part.

What a model may know of a user or a film for a training sample must not come from that sample, or the model learns to
read labels instead of tastes. So the training part is cut into folds, and a sample's history and statistics come from
the other folds (cross-fitting); leaving out just the sample itself would not do, because what is missing from the
history then tells its label. At test time they come from the whole training part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.training.errors import TrainingError
from serving.training.interactions import Interactions
from serving.training.ragged import offsets_of, positions_in, rank_within
from shard_node.bags import Float32Array, Int64Array

LIKED_RATING = 4
TEST_SHARE = 0.2
NUM_FOLDS = 5
NO_FOLD = -1
# Statistics of a film are drawn toward the mean of all films as if it had this many more average ratings.
PRIOR_RATINGS = 5.0


@dataclass(frozen=True, eq=False)
class FilmsDataset:
    """Interactions, split.

    Attributes:
        interactions: all of them.
        labels: float32 [n], 1 where the rating is at least 4.
        train: int64, positions of the training samples.
        test: int64, positions of the test samples.
        fold: int64 [n], the fold of each training sample, `NO_FOLD` for a test sample.
    """

    interactions: Interactions
    labels: Float32Array
    train: Int64Array
    test: Int64Array
    fold: Int64Array

    @classmethod
    def split(cls, interactions: Interactions, *, seed: int) -> FilmsDataset:
        """A random split, 80 to 20.

        Raises:
            TrainingError: if there are too few ratings, or one part has only liked or only disliked films.
        """
        count = interactions.num_ratings
        draw = np.random.default_rng(seed)
        order = draw.permutation(count)
        num_test = round(count * TEST_SHARE)
        test, train = np.sort(order[:num_test]), np.sort(order[num_test:])
        labels = (interactions.ratings >= LIKED_RATING).astype(np.float32)
        for name, part in (("training", train), ("test", test)):
            liked = int(labels[part].sum())
            if liked in (0, part.size):
                raise TrainingError(
                    f"{interactions.source}: {liked} of the {part.size} {name} ratings are {LIKED_RATING} or more; "
                    "some must be and some must not"
                )
        fold = np.full(count, NO_FOLD, np.int64)
        fold[train] = draw.integers(NUM_FOLDS, size=train.size)
        return cls(interactions, labels, train, test, fold)

    def histories(self, user_index: Int64Array, left_out: Int64Array, limit: int) -> tuple[Int64Array, Int64Array]:
        """The films that users liked in the training part, latest first.

        Args:
            user_index: int64 [R].
            left_out: int64 [R], the fold that may not be looked at, or `NO_FOLD`.
            limit: most films of one history.

        Returns:
            Lengths int64 [R], and the films' positions, history by history.
        """
        data = self.interactions
        liked = self.train[self.labels[self.train] > 0]
        liked = liked[np.lexsort((-data.timestamps[liked], data.user_index[liked]))]
        offsets = offsets_of(np.bincount(data.user_index[liked], minlength=data.users.ids.size))
        lengths, positions = positions_in(offsets, user_index)
        samples = liked[positions]
        request = np.repeat(np.arange(user_index.size), lengths)
        seen = self.fold[samples] != left_out[request]
        samples, request = samples[seen], request[seen]
        recent = rank_within(np.bincount(request, minlength=user_index.size)) < limit
        samples, request = samples[recent], request[recent]
        return np.bincount(request, minlength=user_index.size), data.film_index[samples]

    def film_statistics(self, film_index: Int64Array, left_out: Int64Array) -> Float32Array:
        """How popular and how liked films are in the training part.

        Args:
            film_index: int64 [n].
            left_out: int64 [n], the fold that may not be looked at, or `NO_FOLD`.

        Returns:
            float32 [n, 2]: log10(1 + ratings), and the mean label, drawn toward the overall mean.
        """
        films, labels = self.interactions.film_index[self.train], self.labels[self.train]
        # Column NUM_FOLDS stands for "no fold left out".
        cell = films * (NUM_FOLDS + 1) + self.fold[self.train]
        shape = (self.interactions.films.ids.size, NUM_FOLDS + 1)
        ratings = _others(np.bincount(cell, minlength=shape[0] * shape[1]).reshape(shape))
        liked = _others(np.bincount(cell, weights=labels, minlength=shape[0] * shape[1]).reshape(shape))
        column = np.where(left_out == NO_FOLD, NUM_FOLDS, left_out)
        count, liked_count = ratings[film_index, column], liked[film_index, column]
        mean = (liked_count + PRIOR_RATINGS * float(labels.mean())) / (count + PRIOR_RATINGS)
        return np.stack([np.log10(1.0 + count), mean], axis=1).astype(np.float32)


def _others(by_fold: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """[films, folds + 1] counts in each fold to counts outside of it; the last, empty fold gives the total."""
    by_fold = by_fold.astype(np.float64)
    others: npt.NDArray[np.float64] = by_fold.sum(axis=1, keepdims=True) - by_fold
    return others
