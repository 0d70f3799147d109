"""The model of the films: which features it has, which tables they are looked up in, which ranking model reads them."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from pydantic import Field

from loader.snapshot.manifest import (
    Bucketing,
    DenseInputs,
    DenseModelSpec,
    FeatureSpec,
    Frozen,
    HashMapping,
    ModelSpec,
    RowDtype,
    TableSpec,
    VocabularyMapping,
)
from loader.snapshot.per_row import Vocabulary
from serving.training.interactions import Interactions, TrainingError

HISTORY_LIMIT = 50
YEARS_PER_AGE_BUCKET = 5
NUM_AGE_BUCKETS = 32
NUM_ZIP_ROWS = 256
MAX_FILM_ID = 10_000_000

RankingKind = Literal["target_attention", "dlrm", "dcn_v2", "mlp"]


class FilmsOptions(Frozen):
    """What the model of the films is made of.

    Attributes:
        model: its name.
        kind: the ranking model.
        dtype: row format of every table.
        embedding_dim: of every table.
        profile: adds what is known of a user beside the ratings (age, occupation, zip code), and two dense inputs of
            each film (popularity, mean label). Without it a request is four sparse features and nothing else.
    """

    model: str = "films"
    kind: RankingKind = "target_attention"
    dtype: RowDtype = "int8"
    embedding_dim: int = Field(default=16, ge=2, le=512)
    profile: bool = False


def films_spec(interactions: Interactions, options: FilmsOptions | None = None) -> ModelSpec:
    """Describes a model for these users and films.

    Every user and every film has a row. A user who came later gets the `default_row`, an unknown film is refused, an
    unknown genre left out.

    Raises:
        TrainingError: if a film's id is too large to be a row.
    """
    options = options or FilmsOptions()
    users, films = interactions.users, interactions.films
    if films.ids[-1] > MAX_FILM_ID:
        raise TrainingError(f"film id {films.ids[-1]}: film ids are rows, so at most {MAX_FILM_ID} is allowed")
    table = partial(TableSpec, embedding_dim=options.embedding_dim, dtype=options.dtype)
    count, last_film, genres = users.ids.size, int(films.ids[-1]), len(films.genre_names)
    known_users = {"id_mapping": VocabularyMapping(), "unknown_id": "default_row", "default_row": count}
    tables = [
        table(name="users", num_embeddings=count + 1, feature_names=("user_id",), **known_users),
        table(name="films", num_embeddings=last_film + 1, feature_names=("film_id", "history")),
        table(name="genres", num_embeddings=genres, feature_names=("genre",), pooling="mean", unknown_id="skip"),
    ]
    features = [
        FeatureSpec(name="user_id", side="context"),
        FeatureSpec(name="history", side="context", pooling="none" if options.kind == "target_attention" else "mean"),
        FeatureSpec(name="film_id", side="candidate"),
        FeatureSpec(name="genre", side="candidate"),
    ]
    if options.profile:
        words, strings = len(set(users.occupations)), VocabularyMapping(id_type="string")
        known_words = {"id_mapping": strings, "unknown_id": "default_row", "default_row": words}
        hashed = HashMapping(seed=1)
        tables += [
            table(name="ages", num_embeddings=NUM_AGE_BUCKETS, feature_names=("age",)),
            table(name="occupations", num_embeddings=words + 1, feature_names=("occupation",), **known_words),
            table(name="zip_codes", num_embeddings=NUM_ZIP_ROWS, feature_names=("zip_code",), id_mapping=hashed),
        ]
        features += [FeatureSpec(name=name, side="context") for name in ("age", "occupation", "zip_code")]
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
    return ModelSpec(
        model=options.model,
        tables=tuple(tables),
        features=tuple(features),
        dense_inputs=DenseInputs(candidate=2 if options.profile else 0),
        dense_model=DenseModelSpec(kind=options.kind, config=dense[options.kind]),
    )


def films_vocabularies(interactions: Interactions, spec: ModelSpec) -> dict[str, Vocabulary]:
    """Lists the ids in row order of the model's tables with vocabulary mapping."""
    vocabularies: dict[str, Vocabulary] = {"users": interactions.users.ids}
    if any(table.name == "occupations" for table in spec.tables):
        vocabularies["occupations"] = sorted(set(interactions.users.occupations))
    return vocabularies


def with_bucketing(spec: ModelSpec, bucketing: Bucketing) -> ModelSpec:
    """Returns the same model with its rows stored in another order."""
    tables = tuple(table.model_copy(update={"bucketing": bucketing}) for table in spec.tables)
    return spec.model_copy(update={"tables": tables})
