"""The model of the films, and ratings as rank requests for it: one user with the films to score.

What a model may know of a user or a film for a training sample must not come from that sample, or the model learns to
read labels instead of tastes. So the training part is cut into folds, and a sample's history and statistics come from
the other folds (cross-fitting); leaving out just the sample itself would not do, because what is missing from the
history then tells its label. At test time they come from the whole training part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from loader.description import ModelDescription, TableDescription
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.per_row import Vocabulary
from loader.snapshot.schema_errors import schema_errors
from loader.snapshot.tables import Bucketing, Frozen, RowDtype, fingerprint_strings
from serving.training.interactions import Interactions, TrainingError, offsets_of, positions_in
from shard_node.bags import Float32Array, Int64Array

HISTORY_LIMIT = 50
YEARS_PER_AGE_BUCKET = 5
NUM_AGE_BUCKETS = 32
NUM_ZIP_ROWS = 256
MAX_FILM_ID = 10_000_000
LIKED_RATING = 4
TEST_SHARE = 0.2
NUM_FOLDS = 5
NO_FOLD = -1
# Statistics of a film are drawn toward the mean of all films as if it had this many more average ratings.
PRIOR_RATINGS = 5.0
NOT_A_US_ZIP_CODE = 1000

RankingKind = Literal["target_attention", "dlrm", "dcn_v2", "mlp"]
CROSSES: dict[str, tuple[str, str]] = {
    "user_genre": ("user_id", "genre"),
    "occupation_film": ("occupation", "film_id"),
    "age_genre": ("age", "genre"),
    "zip_film": ("zip_code", "film_id"),
}
"""Features of a candidate that are pairs of others: one of the user, one of the film."""


class FilmsOptions(Frozen):
    """What the model of the films is made of; `dtype` and `embedding_dim` are those of every table.

    `profile` adds what is known of a user beside the ratings (age, occupation, zip code), and two dense inputs of each
    film (popularity, mean label). Without it a request is four sparse features and nothing else. `crosses` adds pairs
    of these, `CROSSES`, each in a hashed table with as many rows as pairs occur. `tables` changes tables: by name, what
    replaces the same words of a `TableDescription`. Features that are given to a table are taken from the others, and
    tables without features are left out; so a new name unites tables.
    """

    model: str = "films"
    kind: RankingKind = "target_attention"
    dtype: RowDtype = "int8"
    embedding_dim: int = Field(default=16, ge=2, le=512)
    profile: bool = False
    crosses: bool = False
    tables: dict[str, dict[str, Any]] = Field(default_factory=dict)


def films_spec(interactions: Interactions, options: FilmsOptions | None = None) -> ModelSpec:
    """Describe a model for these users and films, as it is stored. Raises as `films_description`; ExportError."""
    return films_description(interactions, options).compiled()


def films_description(interactions: Interactions, options: FilmsOptions | None = None) -> ModelDescription:
    """Describe a model for these users and films.

    Every user and every film has a row. A user who came later gets the `default_row`, an unknown film is refused, an
    unknown genre left out. Raises TrainingError for a film id that is too large to be a row, or wrong `options.tables`.
    """
    options = options or FilmsOptions()
    last_film = int(interactions.films.ids[-1])
    if last_film > MAX_FILM_ID:
        raise TrainingError(f"film id {last_film}: film ids are rows, so at most {MAX_FILM_ID} is allowed")
    features = [
        FeatureSpec(name="user_id", side="context"),
        FeatureSpec(name="history", side="context", pooling="none" if options.kind == "target_attention" else "mean"),
        FeatureSpec(name="film_id", side="candidate"),
        FeatureSpec(name="genre", side="candidate"),
    ]
    if options.profile:
        features += [FeatureSpec(name=name, side="context") for name in ("age", "occupation", "zip_code")]
    if options.crosses:
        features += [FeatureSpec(name=name, side="candidate", pooling="mean") for name in CROSSES]
    dense: dict[RankingKind, dict[str, Any]] = {
        "target_attention": {
            "history_feature": "history",
            "target_feature": "film_id",
            "attention_hidden": [16],
            "hidden": [64, 32],
        },
        "dlrm": {"bottom_mlp": [16, options.embedding_dim] if options.profile else [], "top_mlp": [64, 32]},
        "dcn_v2": {"num_cross_layers": 2, "deep": [64, 32]},
        "mlp": {"hidden": [64, 32]},
    }
    return ModelDescription(
        model=options.model,
        tables=_described_tables(_film_tables(interactions, options), options),
        features=tuple(features),
        dense_inputs=DenseInputs(candidate=2 if options.profile else 0),
        dense_model=DenseModelSpec(kind=options.kind, config=dense[options.kind]),
    )


def _film_tables(interactions: Interactions, options: FilmsOptions) -> dict[str, dict[str, Any]]:
    users, films = interactions.users, interactions.films
    count, words = users.ids.size, len(set(users.occupations))
    integers, strings = {"kind": "vocabulary"}, {"kind": "vocabulary", "id_type": "string"}
    found: dict[str, dict[str, Any]] = {
        "users": {"num_embeddings": count + 1, "id_mapping": integers, "unknown_id": "default_row"},
        "films": {"num_embeddings": int(films.ids[-1]) + 1, "feature_names": ("film_id", "history")},
        "genres": {"num_embeddings": len(films.genre_names), "pooling": "mean", "unknown_id": "skip"},
    }
    found["users"] |= {"feature_names": ("user_id",), "default_row": count}
    found["genres"] |= {"feature_names": ("genre",)}
    if options.profile:
        found["ages"] = {"num_embeddings": NUM_AGE_BUCKETS, "feature_names": ("age",)}
        found["occupations"] = {"num_embeddings": words + 1, "id_mapping": strings, "unknown_id": "default_row"}
        found["occupations"] |= {"feature_names": ("occupation",), "default_row": words}
        found["zip_codes"] = {"num_embeddings": NUM_ZIP_ROWS, "id_mapping": {"kind": "hash", "seed": 1}}
        found["zip_codes"] |= {"feature_names": ("zip_code",)}
    if options.crosses:
        for name in CROSSES:
            ids, _ = _cross_ids(interactions, name, interactions.user_index, interactions.film_index)
            found[name] = {"num_embeddings": np.unique(ids).size, "feature_names": (name,)}
            found[name] |= {"id_mapping": {"kind": "hash", "salt": "per_feature"}}
    return found


def _described_tables(tables: dict[str, dict[str, Any]], options: FilmsOptions) -> tuple[TableDescription, ...]:
    every = {"embedding_dim": options.embedding_dim, "dtype": options.dtype}
    described: dict[str, TableDescription] = {}
    for name in tables | options.tables:
        words = {**every, **tables.get(name, {}), **options.tables.get(name, {}), "name": name}
        try:
            described[name] = TableDescription.model_validate(words)
        except ValidationError as error:
            told = "; ".join(map(str, schema_errors(error, [TableDescription])))
            raise TrainingError(f"table {name!r}: {told}") from error
    known = {feature for words in tables.values() for feature in words["feature_names"]}
    taken: dict[str, str] = {}
    for name in (name for name, words in options.tables.items() if "feature_names" in words):
        if unknown := sorted(set(described[name].feature_names) - known):
            raise TrainingError(f"table {name!r}: feature_names: unknown {unknown}; the model has {sorted(known)}")
        taken |= dict.fromkeys(described[name].feature_names, name)
    found = []
    for name, table in described.items():
        own = tuple(one for one in table.feature_names if taken.get(one, name) == name)
        found += [table.model_copy(update={"feature_names": own})] if own else []
    return tuple(found)


def _cross_ids(
    data: Interactions, name: str, user_index: Int64Array, film_index: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return of pairs of a user and a film, int64 [n] positions each, the ids, and int64 [n] how many each has.

    An id is the user's number times how many numbers films have, plus the film's; all are below 2^63.
    """
    of_user, of_film = CROSSES[name]
    if of_user == "user_id":
        numbers = data.users.ids
    elif of_user == "occupation":
        numbers = np.unique(np.array(data.users.occupations), return_inverse=True)[1]
    else:
        numbers = _age_buckets(data) if of_user == "age" else _zip_areas(data)
    users = numbers[user_index]
    if of_film == "film_id":
        return users * int(data.films.ids[-1] + 1) + data.films.ids[film_index], np.ones(film_index.size, np.int64)
    lengths, positions = positions_in(data.films.genre_offsets, film_index)
    return np.repeat(users, lengths) * len(data.films.genre_names) + data.films.genre_ids[positions], lengths


def films_vocabularies(interactions: Interactions, spec: ModelSpec) -> dict[str, Vocabulary]:
    """List the ids in row order of the model's tables with vocabulary mapping."""
    vocabularies: dict[str, Vocabulary] = {"users": interactions.users.ids}
    if any(table.name == "occupations" for table in spec.logical_tables):
        vocabularies["occupations"] = sorted(set(interactions.users.occupations))
    return vocabularies


def with_bucketing(spec: ModelSpec, bucketing: Bucketing) -> ModelSpec:
    """Return the same model with its rows stored in another order."""
    tables = tuple(table.model_copy(update={"bucketing": bucketing}) for table in spec.tables)
    return spec.model_copy(update={"tables": tables})


@dataclass(frozen=True, eq=False)
class FilmsDataset:
    """Interactions, split; `labels` are float32 [n], 1 where the rating is at least 4.

    `train` and `test` are int64, positions of samples; `fold` is int64 [n], `NO_FOLD` for a test sample.
    """

    interactions: Interactions
    labels: Float32Array
    train: Int64Array
    test: Int64Array
    fold: Int64Array

    @classmethod
    def split(cls, interactions: Interactions, *, seed: int) -> FilmsDataset:
        """Split at random, 80 to 20. Raises TrainingError if a part has no liked, or no disliked films."""
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
        """Find the films that users, int64 [R], liked in the training part, latest first, at most `limit` each.

        `left_out` is the fold of each that may not be looked at, or `NO_FOLD`. Returns lengths int64 [R], and the
        films' positions, history by history.
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
        """Return float32 [n, 2] of films in training without a fold: log10(1 + ratings), mean label with a prior."""
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
    """Rank requests whose `scores` are zeros, with each candidate's label float32 [N] and interaction int64 [N]."""

    requests: GoldenRequests
    labels: Float32Array
    samples: Int64Array


def training_requests(dataset: FilmsDataset, spec: ModelSpec | ModelDescription) -> LabelledRequests:
    """Make one request for each user and fold: the films rated in the fold, with a history from the others."""
    return _grouped(dataset, spec, dataset.train, None)


def evaluation_requests(dataset: FilmsDataset, spec: ModelSpec, limit: int | None = None) -> LabelledRequests:
    """Make one request for each user of the test part (the first `limit` of them), with their films there."""
    return _grouped(dataset, spec, dataset.test, limit)


def _grouped(
    dataset: FilmsDataset, spec: ModelSpec | ModelDescription, samples: Int64Array, limit: int | None
) -> LabelledRequests:
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
            "age": _age_buckets(data)[users],
            "occupation": fingerprint_strings(data.users.occupations)[users],
            "zip_code": _zip_areas(data)[users],
        }
    lengths: dict[str, npt.NDArray[np.integer]] = {name: np.ones(users.size, np.int32) for name in values}
    values |= {
        "history": data.films.ids[history],
        "film_id": data.films.ids[films],
        "genre": data.films.genre_ids[genres],
    }
    lengths |= {"history": history_lengths, "film_id": np.ones(films.size, np.int32), "genre": genre_lengths}
    if any(feature.name in CROSSES for feature in spec.features):
        for name in CROSSES:
            values[name], lengths[name] = _cross_ids(data, name, data.user_index[samples], films)
    statistics = dataset.film_statistics(films, left_out)[:, : spec.dense_inputs.candidate]
    requests = GoldenRequests(
        num_candidates=counts.astype(np.int32),
        values=values,
        lengths={name: one.astype(np.int32) for name, one in lengths.items()},
        context_dense=np.zeros((users.size, 0), np.float32),
        candidate_dense=np.ascontiguousarray(statistics),
        scores=np.zeros(films.size, np.float32),
    )
    return LabelledRequests(requests, dataset.labels[samples], samples)


def _age_buckets(data: Interactions) -> Int64Array:
    return np.minimum(data.users.ages // YEARS_PER_AGE_BUCKET, NUM_AGE_BUCKETS - 1)


def _zip_areas(data: Interactions) -> Int64Array:
    """Return the area of each user's US zip code (its first three digits), or `NOT_A_US_ZIP_CODE`."""
    known = [code.isascii() and code[:5].isdigit() for code in data.users.zip_codes]
    areas = [int(code[:3]) if us else NOT_A_US_ZIP_CODE for code, us in zip(data.users.zip_codes, known, strict=True)]
    return np.array(areas, np.int64)
