"""Ratings of films by users, read from MovieLens 100K or generated, and as rank requests: a user with films to score.

What a model may know of a user or a film for a training sample must not come from that sample, or the model learns to
read labels instead of tastes. So the training part is cut into folds, and a sample's history and statistics come from
the other folds (cross-fitting); leaving out just the sample itself would not do, because what is missing from the
history then tells its label. At test time they come from the whole training part.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from loader.description import ModelDescription, TableDescription
from loader.errors import ShardrankError
from loader.snapshot.buckets import ranges, starts_of
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.tables import Bucketing, Frozen, RowDtype, fingerprint_strings, refused_as
from loader.snapshot.vocabularies_and_counts import Vocabulary
from shard_node.bags import Float32Array, Int64Array

GENRES = ("unknown", "Action", "Adventure", "Animation", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
          "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War")  # fmt: skip
OCCUPATIONS = ("artist", "doctor", "educator", "engineer", "librarian", "programmer", "student", "writer")
_FIRST_WORDS = ("Silent", "Last", "Golden", "Broken", "Distant", "Crimson", "Hidden", "Winter", "Electric", "Paper")
_SECOND_WORDS = ("River", "Garden", "Engine", "Letter", "Harbour", "Orchard", "Signal", "Mirror", "Station", "Parade")
NUM_TASTES = 4
PAIRS_PER_RATING = 4
# Some two hundred times the real files: a folder with something else is refused before it is read.
MAX_FILE_BYTES = 512 * 1024 * 1024
MAX_RATING = 5
_NUMBER = r"\d{1,18}"

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


class TrainingError(ShardrankError, kind="bad_training", http_status=400, grpc_status="INVALID_ARGUMENT"):
    """Options, or a dataset, that no model can be trained with. The message names the option, or the file and line."""


@dataclass(frozen=True, slots=True, eq=False)
class Users:
    """All users: ids int64 [U], ascending, ages int64 [U] in years, and a word of each other kind for each user."""

    ids: Int64Array
    ages: Int64Array
    genders: tuple[str, ...]
    occupations: tuple[str, ...]
    zip_codes: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Films:
    """All films: ids int64 [F], ascending, and a title each.

    Film f has the genres genre_ids[genre_offsets[f] : genre_offsets[f + 1]], positions in `genre_names`.
    """

    ids: Int64Array
    titles: tuple[str, ...]
    genre_offsets: Int64Array
    genre_ids: Int64Array
    genre_names: tuple[str, ...]

    @classmethod
    def of_flags(
        cls, ids: Int64Array, titles: Sequence[str], flags: npt.NDArray[np.bool_], genre_names: tuple[str, ...]
    ) -> Films:
        """Make films of a matrix of genre flags, bool [F, genres]."""
        genre_ids = np.nonzero(flags)[1].astype(np.int64)
        return cls(ids, tuple(titles), starts_of(flags.sum(axis=1)), genre_ids, genre_names)

    def genres_of(self, film: int) -> list[int]:
        """Return the genres of the film at a position."""
        return list(map(int, self.genre_ids[self.genre_offsets[film] : self.genre_offsets[film + 1]]))


@dataclass(frozen=True, slots=True, eq=False)
class Interactions:
    """Ratings float32 [n], 1 to 5, with positions in `users` and `films`, and times in seconds, int64 [n] each."""

    source: str
    users: Users
    films: Films
    user_index: Int64Array
    film_index: Int64Array
    ratings: Float32Array
    timestamps: Int64Array


def positions_in(offsets: Int64Array, chosen: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the lengths of chosen lists, int64 [C], and the positions of their elements, int64 [lengths.sum()].

    The lists are stored in one flat array with `offsets` as of `starts_of`.
    """
    starts = offsets[chosen]
    lengths = offsets[chosen + 1] - starts
    return lengths, ranges(starts, lengths)


def generate_interactions(
    num_ratings: int = 40_000, *, num_users: int | None = None, num_films: int = 800, seed: int = 0
) -> Interactions:
    """Draw users, films and ratings; no user rates a film twice.

    A user's opinion of a film is quality + generosity + taste . character + noise; taste and character are latent
    vectors, and a film's character is mostly that of its genres. The rating, 1 to 5, is where the opinion
    stands among all: 55% are 4 or 5, as with MovieLens 100K. Without `num_users` there are 600, or more where there are
    more than 64 ratings for each.

    Raises TrainingError for more ratings than a quarter of all pairs of a user and a film.
    """
    num_users = num_users or max(600, num_ratings // 64)
    max_ratings = num_users * num_films // PAIRS_PER_RATING
    if num_ratings > max_ratings:
        allowed = f"{max_ratings}, a quarter of all pairs of {num_users} users and {num_films} films"
        raise TrainingError(f"num_ratings {num_ratings} is more than {allowed}")
    draw = np.random.default_rng(seed)
    users = Users(
        ids=np.arange(1, num_users + 1, dtype=np.int64),
        ages=draw.integers(12, 75, size=num_users),
        genders=tuple("FM"[i] for i in draw.integers(2, size=num_users)),
        occupations=tuple(OCCUPATIONS[i] for i in draw.integers(len(OCCUPATIONS), size=num_users)),
        zip_codes=tuple(f"{number:05d}" for number in draw.integers(100_000, size=num_users)),
    )
    # One to three genres each; 0, "unknown", is left to files that have it.
    flags = np.zeros((num_films, len(GENRES)), bool)
    for number_of_genres in range(1, 4):
        chosen = np.flatnonzero(draw.random(num_films) < 1.0 / number_of_genres)
        flags[chosen, draw.integers(1, len(GENRES), size=chosen.size)] = True
    years = draw.integers(1940, 1999, size=num_films).tolist()
    words = draw.integers((len(_FIRST_WORDS), len(_SECOND_WORDS)), size=(num_films, 2)).tolist()
    titles = [
        f"{_FIRST_WORDS[first]} {_SECOND_WORDS[second]} {number} ({year})"
        for number, ((first, second), year) in enumerate(zip(words, years, strict=True), start=1)
    ]
    character = flags @ draw.normal(size=(len(GENRES), NUM_TASTES)) / np.sqrt(flags.sum(axis=1, keepdims=True))
    character += 0.5 * draw.normal(size=character.shape)
    taste = draw.normal(size=(num_users, NUM_TASTES)) / np.sqrt(NUM_TASTES)
    quality, generosity = draw.normal(size=num_films), 0.7 * draw.normal(size=num_users)
    activity, popularity = draw.gamma(1.5, size=num_users), 1.0 / (10.0 + draw.permutation(num_films))
    pairs = np.zeros(0, np.int64)
    # Few pairs are drawn twice at this density, so each round brings new ones.
    while pairs.size < num_ratings:
        user = draw.choice(num_users, size=2 * num_ratings, p=activity / activity.sum())
        film = draw.choice(num_films, size=2 * num_ratings, p=popularity / popularity.sum())
        pairs = np.concatenate([pairs, user.astype(np.int64) * num_films + film])
        pairs = pairs[np.sort(np.unique(pairs, return_index=True)[1])]
    user_index, film_index = np.divmod(pairs[:num_ratings], num_films)
    opinion = quality[film_index] + generosity[user_index]
    opinion += 1.2 * np.einsum("nk,nk->n", taste[user_index], character[film_index])
    opinion += draw.normal(size=opinion.size)
    ratings = 1.0 + np.searchsorted(np.quantile(opinion, [0.06, 0.17, 0.45, 0.79]), opinion)
    return Interactions(
        source="synthetic",
        users=users,
        films=Films.of_flags(np.arange(1, num_films + 1, dtype=np.int64), titles, flags, GENRES),
        user_index=user_index,
        film_index=film_index,
        ratings=ratings.astype(np.float32),
        # Within a year.
        timestamps=880_000_000 + draw.integers(365 * 24 * 3600, size=opinion.size),
    )


def read_movielens(folder: str | Path) -> Interactions:
    """Read u.data, u.item, u.user and u.genre of MovieLens 100K (GroupLens) from a folder.

    Raises TrainingError for a file that is missing, too large, empty or malformed; the message names file and line.
    """
    folder = Path(folder)
    genres, numbers = _columns(folder / "u.genre", rf"([^|]*)\|({_NUMBER})", "genre|number")
    for expected, number in enumerate(map(int, numbers)):
        if number != expected:
            raise TrainingError(f"{folder / 'u.genre'}: genre number {number} is not {expected}, the next one")
    path, form = folder / "u.item", f"film id|title|date|date|URL, and |0 or |1 for each of {len(genres)} genres"
    pattern = rf"({_NUMBER})\|([^|]*)\|[^|]*\|[^|]*\|[^|]*((?:\|[01]){{{len(genres)}}})"
    ids, titles, flags = _columns(path, pattern, form)
    order = _ascending(path, "film id", ids)
    is_of_genre = np.array([list(text[1::2]) for text in flags])[order] == "1"
    films = Films.of_flags(np.array(ids, np.int64)[order], [titles[i] for i in order], is_of_genre, genres)
    path = folder / "u.user"
    pattern, form = rf"({_NUMBER})\|({_NUMBER})" + r"\|([^|]*)" * 3, "user id|age|gender|occupation|zip code"
    people = _columns(path, pattern, form)
    order = _ascending(path, "user id", people[0])
    numbers, ages, *words = (tuple(column[i] for i in order) for column in people)
    users = Users(np.array(numbers, np.int64), np.array(ages, np.int64), *words)
    path, form = folder / "u.data", f"user id, film id, rating in 1..{MAX_RATING} and timestamp, with tabs between them"
    pattern = rf"({_NUMBER})\t({_NUMBER})\t([1-{MAX_RATING}])\t({_NUMBER})"
    table = np.array(_columns(path, pattern, form), np.int64)
    indices: list[Int64Array] = []
    for name, given, known in (("user", table[0], users.ids), ("film", table[1], films.ids)):
        positions = np.searchsorted(known, given)
        unknown = np.flatnonzero(known[np.minimum(positions, known.size - 1)] != given)
        if unknown.size:
            row, listed_in = int(unknown[0]), "u.user" if name == "user" else "u.item"
            raise TrainingError(f"{path}: rating {row + 1}: {name} id {given[row]} is not in {listed_in}")
        indices.append(positions)
    return Interactions("movielens-100k", users, films, indices[0], indices[1], table[2].astype(np.float32), table[3])


def _columns(path: Path, pattern: str, form: str) -> list[tuple[str, ...]]:
    """Read the groups of a pattern that each line has, as columns; `form` says it in words. Empty lines are skipped."""
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise TrainingError(f"{path}: {size} bytes, allowed: {MAX_FILE_BYTES}")
        text = path.read_text(encoding="latin-1")
    except OSError as error:
        raise TrainingError(f"{path}: {error.strerror or error}") from error
    rows = []
    # Not splitlines: latin-1 text may hold characters (such as U+0085) that it reads as line ends.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            if (match := re.fullmatch(pattern, line.rstrip("\r"), re.ASCII)) is None:
                raise TrainingError(f"{path}, line {number}: {line!r:.80} is not {form}")
            rows.append(match.groups())
    if not rows:
        raise TrainingError(f"{path}: holds no line")
    return list(zip(*rows, strict=True))


def _ascending(path: Path, name: str, ids: Sequence[str]) -> npt.NDArray[np.intp]:
    numbers = np.array(ids, np.int64)
    order = np.argsort(numbers)
    if (twice := np.flatnonzero(np.diff(numbers[order]) == 0)).size:
        raise TrainingError(f"{path}: {name} {numbers[order][twice[0]]} is there twice")
    return order


class FilmsOptions(Frozen):
    """What the model of the films is made of; `dtype`, `embedding_dim` and `bucketing` are those of every table.

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
    bucketing: Bucketing = "mixed"
    profile: bool = False
    crosses: bool = False
    tables: dict[str, dict[str, Any]] = Field(default_factory=dict)


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
        tables=_described_tables(interactions, options),
        features=tuple(features),
        dense_inputs=DenseInputs(candidate=2 if options.profile else 0),
        dense_model=DenseModelSpec(kind=options.kind, config=dense[options.kind]),
    )


def _film_tables(interactions: Interactions, options: FilmsOptions) -> dict[str, dict[str, Any]]:
    users, films = interactions.users, interactions.films
    count, words = users.ids.size, len(set(users.occupations))
    vocabulary = {"id_mapping": {"kind": "vocabulary"}, "unknown_id": "default_row"}
    tables: dict[str, dict[str, Any]] = {
        "users": {"feature_names": ("user_id",), "num_embeddings": count + 1, "default_row": count, **vocabulary},
        "films": {"feature_names": ("film_id", "history"), "num_embeddings": int(films.ids[-1]) + 1},
        "genres": {
            "feature_names": ("genre",),
            "num_embeddings": len(films.genre_names),
            "pooling": "mean",
            "unknown_id": "skip",
        },
    }
    if options.profile:
        strings = vocabulary | {"id_mapping": {"kind": "vocabulary", "id_type": "string"}}
        hashed = {"id_mapping": {"kind": "hash", "seed": 1}}
        tables |= {
            "ages": {"feature_names": ("age",), "num_embeddings": NUM_AGE_BUCKETS},
            "occupations": {
                "feature_names": ("occupation",),
                "num_embeddings": words + 1,
                "default_row": words,
                **strings,
            },
            "zip_codes": {"feature_names": ("zip_code",), "num_embeddings": NUM_ZIP_ROWS, **hashed},
        }
    if options.crosses:
        hashed = {"id_mapping": {"kind": "hash", "salt": "per_feature"}}
        for name in CROSSES:
            ids, _ = _cross_ids(interactions, name, interactions.user_index, interactions.film_index)
            tables[name] = {"feature_names": (name,), "num_embeddings": np.unique(ids).size, **hashed}
    return tables


def _described_tables(interactions: Interactions, options: FilmsOptions) -> tuple[TableDescription, ...]:
    tables = _film_tables(interactions, options)
    shared = options.model_dump(include={"embedding_dim", "dtype", "bucketing"})
    described: dict[str, TableDescription] = {}
    table_of = {feature: name for name, words in tables.items() for feature in words["feature_names"]}
    known = sorted(table_of)
    for name in tables | options.tables:
        changes = options.tables.get(name, {})
        words = {**shared, **tables.get(name, {}), **changes, "name": name}
        with refused_as(TrainingError, f"table {name!r}: ", TableDescription):
            table = described[name] = TableDescription.model_validate(words)
        if "feature_names" in changes:
            if unknown := sorted(set(table.feature_names) - table_of.keys()):
                raise TrainingError(f"table {name!r}: feature_names: unknown {unknown}; the model has {known}")
            table_of |= dict.fromkeys(table.feature_names, name)
    features = {
        name: tuple(feature for feature in table.feature_names if table_of[feature] == name)
        for name, table in described.items()
    }
    return tuple(
        table.model_copy(update={"feature_names": features[name]})
        for name, table in described.items()
        if features[name]
    )


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

    def histories(self, user_index: Int64Array, excluded: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Find the films that users, int64 [R], liked in the training part, latest first, up to HISTORY_LIMIT.

        `excluded` is the fold of each that may not be looked at, or `NO_FOLD`. Returns lengths int64 [R], and the
        films' positions, history by history.
        """
        data = self.interactions
        liked = self.train[self.labels[self.train] > 0]
        liked = liked[np.lexsort((-data.timestamps[liked], data.user_index[liked]))]
        offsets = starts_of(np.bincount(data.user_index[liked], minlength=data.users.ids.size))
        lengths, positions = positions_in(offsets, user_index)
        samples, request = liked[positions], np.repeat(np.arange(user_index.size), lengths)
        seen = self.fold[samples] != excluded[request]
        samples, request = samples[seen], request[seen]
        first = starts_of(np.bincount(request, minlength=user_index.size))
        recent = np.arange(request.size) - first[request] < HISTORY_LIMIT
        return np.minimum(np.diff(first), HISTORY_LIMIT), data.film_index[samples[recent]]

    def film_statistics(self, film_index: Int64Array, excluded: Int64Array) -> Float32Array:
        """Return float32 [n, 2] of films in training without a fold: log10(1 + ratings), mean label with a prior."""
        films, labels = self.interactions.film_index[self.train], self.labels[self.train]
        # Column NUM_FOLDS stands for "no fold left out".
        cell = films * (NUM_FOLDS + 1) + self.fold[self.train]
        column = np.where(excluded == NO_FOLD, NUM_FOLDS, excluded)

        def others(weights: Float32Array | None) -> npt.NDArray[np.float64]:
            size = self.interactions.films.ids.size * (NUM_FOLDS + 1)
            by_fold = np.bincount(cell, weights, size).reshape(-1, NUM_FOLDS + 1).astype(np.float64)
            return np.asarray((by_fold.sum(axis=1, keepdims=True) - by_fold)[film_index, column])

        count = others(None)
        mean = (others(labels) + PRIOR_RATINGS * float(labels.mean())) / (count + PRIOR_RATINGS)
        return np.stack([np.log10(1.0 + count), mean], axis=1).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class LabelledRequests:
    """Rank requests whose `scores` are zeros, with each candidate's label float32 [N] and interaction int64 [N]."""

    requests: GoldenRequests
    labels: Float32Array
    samples: Int64Array


def labelled_requests(
    dataset: FilmsDataset, spec: ModelSpec | ModelDescription, samples: Int64Array, limit: int | None = None
) -> LabelledRequests:
    """Make one request for each user and fold of samples, of `train` or `test`; the first `limit` of them.

    It has the films that were rated in the fold, and a history from the others.
    """
    data = dataset.interactions
    group = data.user_index[samples] * (NUM_FOLDS + 1) + (dataset.fold[samples] + 1)
    samples = samples[np.argsort(group, kind="stable")]
    _, first, counts = np.unique(np.sort(group), return_index=True, return_counts=True)
    first, counts = first[:limit], counts[:limit]
    samples = samples[: counts.sum()]
    users, films, excluded = data.user_index[samples[first]], data.film_index[samples], dataset.fold[samples]
    history_lengths, history = dataset.histories(users, excluded[first])
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
    statistics = dataset.film_statistics(films, excluded)[:, : spec.dense_inputs.candidate]
    requests = GoldenRequests(
        num_candidates=counts.astype(np.int32),
        values=values,
        lengths={name: counts.astype(np.int32) for name, counts in lengths.items()},
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
