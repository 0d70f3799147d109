"""Ratings with labels, split into a training and a test part, as rank requests: one user with the films to score.

What a model may know of a user or a film for a training sample must not come from that sample, or the model learns to
read labels instead of tastes. So the training part is cut into folds, and a sample's history and statistics come from
the other folds (cross-fitting); leaving out just the sample itself would not do, because what is missing from the
history then tells its label. At test time they come from the whole training part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import ModelSpec, fingerprint_strings
from loader.snapshot.per_row import Vocabulary
from serving.training.description import HISTORY_LIMIT, NUM_AGE_BUCKETS, YEARS_PER_AGE_BUCKET
from serving.training.interactions import Interactions, TrainingError, offsets_of, positions_in
from shard_node.bags import Float32Array, Int64Array

LIKED_RATING = 4
TEST_SHARE = 0.2
NUM_FOLDS = 5
NO_FOLD = -1
# Statistics of a film are drawn toward the mean of all films as if it had this many more average ratings.
PRIOR_RATINGS = 5.0
NOT_A_US_ZIP_CODE = 1000


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
        """Splits at random, 80 to 20.

        Raises:
            TrainingError: if there are too few ratings, or one part has only liked or only disliked films.
        """
        count = interactions.ratings.size
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
        """Finds the films that users liked in the training part, latest first.

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
        samples, request = liked[positions], np.repeat(np.arange(user_index.size), lengths)
        seen = self.fold[samples] != left_out[request]
        samples, request = samples[seen], request[seen]
        first = offsets_of(np.bincount(request, minlength=user_index.size))
        recent = np.arange(request.size) - first[request] < limit
        return np.minimum(np.diff(first), limit), data.film_index[samples[recent]]

    def film_statistics(self, film_index: Int64Array, left_out: Int64Array) -> Float32Array:
        """Says how popular and how liked films are in the training part.

        Args:
            film_index: int64 [n].
            left_out: int64 [n], the fold that may not be looked at, or `NO_FOLD`.

        Returns:
            float32 [n, 2]: log10(1 + ratings), and the mean label, drawn toward the overall mean.
        """
        films, labels = self.interactions.film_index[self.train], self.labels[self.train]
        # Column NUM_FOLDS stands for "no fold left out".
        cell = films * (NUM_FOLDS + 1) + self.fold[self.train]
        column = np.where(left_out == NO_FOLD, NUM_FOLDS, left_out)

        def others(weights: Float32Array | None) -> npt.NDArray[np.float64]:
            size = self.interactions.films.ids.size * (NUM_FOLDS + 1)
            by_fold = np.bincount(cell, weights, size).reshape(-1, NUM_FOLDS + 1).astype(np.float64)
            found: npt.NDArray[np.float64] = (by_fold.sum(axis=1, keepdims=True) - by_fold)[film_index, column]
            return found

        count = others(None)
        mean = (others(labels) + PRIOR_RATINGS * float(labels.mean())) / (count + PRIOR_RATINGS)
        return np.stack([np.log10(1.0 + count), mean], axis=1).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class LabelledRequests:
    """Rank requests with the truth.

    Attributes:
        requests: the requests; their `scores` are zeros.
        labels: float32 [N], of the requests' candidates.
        samples: int64 [N], the interaction that each candidate is.
    """

    requests: GoldenRequests
    labels: Float32Array
    samples: Int64Array


def training_requests(dataset: FilmsDataset, spec: ModelSpec) -> LabelledRequests:
    """Makes one request for each user and fold: the films rated in the fold, with a history from the others."""
    return _grouped(dataset, spec, dataset.train, None)


def evaluation_requests(dataset: FilmsDataset, spec: ModelSpec, limit: int | None = None) -> LabelledRequests:
    """Makes one request for each user of the test part (the first `limit` of them).

    Candidates are the films rated in the test part; the history is from the training part.
    """
    return _grouped(dataset, spec, dataset.test, limit)


def _grouped(dataset: FilmsDataset, spec: ModelSpec, samples: Int64Array, limit: int | None) -> LabelledRequests:
    data = dataset.interactions
    group = data.user_index[samples] * (NUM_FOLDS + 1) + (dataset.fold[samples] + 1)
    samples = samples[np.argsort(group, kind="stable")]
    _, first, counts = np.unique(np.sort(group), return_index=True, return_counts=True)
    first, counts = first[:limit], counts[:limit]
    samples = samples[: counts.sum()]
    users, films, left_out = data.user_index[samples[first]], data.film_index[samples], dataset.fold[samples]
    history_lengths, history = dataset.histories(users, left_out[first], HISTORY_LIMIT)
    genre_lengths, genres = positions_in(data.films.genre_offsets, films)
    values = {"user_id": data.users.ids[users]}
    if any(feature.name == "age" for feature in spec.features):
        values |= {
            "age": np.minimum(data.users.ages // YEARS_PER_AGE_BUCKET, NUM_AGE_BUCKETS - 1)[users],
            "occupation": fingerprint_strings(data.users.occupations)[users],
            "zip_code": np.array([_zip_area(code) for code in data.users.zip_codes], np.int64)[users],
        }
    lengths = {name: np.ones(users.size, np.int32) for name in values}
    requests = GoldenRequests(
        num_candidates=counts.astype(np.int32),
        values={
            **values,
            "history": data.films.ids[history],
            "film_id": data.films.ids[films],
            "genre": data.films.genre_ids[genres],
        },
        lengths={
            **lengths,
            "history": history_lengths.astype(np.int32),
            "film_id": np.ones(films.size, np.int32),
            "genre": genre_lengths.astype(np.int32),
        },
        context_dense=np.zeros((users.size, 0), np.float32),
        candidate_dense=np.ascontiguousarray(
            dataset.film_statistics(films, left_out)[:, : spec.dense_inputs.candidate]
        ),
        scores=np.zeros(films.size, np.float32),
    )
    return LabelledRequests(requests, dataset.labels[samples], samples)


def _zip_area(code: str) -> int:
    """Returns the area of a US zip code (its first three digits), or `NOT_A_US_ZIP_CODE`."""
    return int(code[:3]) if code.isascii() and code[:5].isdigit() else NOT_A_US_ZIP_CODE


def to_json(requests: GoldenRequests, spec: ModelSpec, vocabularies: Mapping[str, Vocabulary]) -> list[dict[str, Any]]:
    """Writes each request as the body of `POST /v1/models/{model}:rank`.

    A candidate feature with one id for every candidate is a flat list, as the API allows.

    Args:
        requests: the requests, without weights.
        spec: their model.
        vocabularies: of its tables, as `films_vocabularies`; occupations are written as strings.
    """
    words = [str(word) for word in vocabularies.get("occupations", ())]
    occupations = dict(zip(fingerprint_strings(words).tolist(), words, strict=True))
    bodies = []
    for request in map(requests.request, range(requests.num_requests)):
        sparse: dict[str, dict[str, list[Any]]] = {"context": {}, "candidate": {}}
        for feature in spec.features:
            ids: list[Any] = request.values[feature.name].tolist()
            if feature.name == "occupation":
                ids = [occupations[number] for number in ids]
            lengths = request.lengths[feature.name]
            if feature.side == "candidate" and (lengths != 1).any():
                ends = np.cumsum(lengths).tolist()
                ids = [ids[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
            sparse[feature.side][feature.name] = ids
        bodies.append(
            {
                "context": {"sparse": sparse["context"], "dense": request.context_dense[0].tolist()},
                "candidates": {
                    "sparse": sparse["candidate"],
                    "dense": request.candidate_dense.tolist() if spec.dense_inputs.candidate else [],
                },
            }
        )
    return bodies
