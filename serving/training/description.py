"""The demo's model: which features it has, which tables they are looked up in, which ranking model reads them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from loader.manifest import (
    DenseInputs,
    DenseModelSpec,
    FeatureSpec,
    Frozen,
    HashMapping,
    ModelSpec,
    Pooling,
    RowDtype,
    TableSpec,
    VocabularyMapping,
)
from loader.vocabulary import Vocabulary
from serving.training.errors import TrainingError
from serving.training.interactions import Interactions

HISTORY_LIMIT = 50
YEARS_PER_AGE_BUCKET = 5
NUM_AGE_BUCKETS = 32
NUM_ZIP_ROWS = 256

MAX_FILM_ID = 10_000_000

RankingKind = Literal["target_attention", "dlrm", "dcn_v2", "mlp"]


class FilmsOptions(Frozen):
    """What the demo's model is made of.

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
    """The description of a model for these users and films.

    Every user, and every film, has its row; a user who came later gets a row of its own kind (`default_row`), an
    unknown film is refused, an unknown genre left out.

    Raises:
        TrainingError: if a film's id is too large to be a row.
    """
    options = options or FilmsOptions()
    users, films = interactions.users, interactions.films
    if films.ids[-1] > MAX_FILM_ID:
        raise TrainingError(f"film id {films.ids[-1]}: film ids are rows, so at most {MAX_FILM_ID} is allowed")

    def table(name: str, num_embeddings: int, features: tuple[str, ...], **rest: Any) -> TableSpec:
        return TableSpec(
            name=name,
            num_embeddings=num_embeddings,
            embedding_dim=options.embedding_dim,
            feature_names=features,
            dtype=options.dtype,
            **rest,
        )

    history_pooling: Pooling = "none" if options.kind == "target_attention" else "mean"
    tables = [
        table(
            "users",
            users.ids.size + 1,
            ("user_id",),
            id_mapping=VocabularyMapping(),
            unknown_id="default_row",
            default_row=users.ids.size,
        ),
        table("films", int(films.ids[-1]) + 1, ("film_id", "history")),
        table("genres", len(films.genre_names), ("genre",), pooling="mean", unknown_id="skip"),
    ]
    features = [
        FeatureSpec(name="user_id", side="context"),
        FeatureSpec(name="history", side="context", pooling=history_pooling),
        FeatureSpec(name="film_id", side="candidate"),
        FeatureSpec(name="genre", side="candidate"),
    ]
    if options.profile:
        occupations = len(set(users.occupations))
        tables += [
            table("ages", NUM_AGE_BUCKETS, ("age",)),
            table(
                "occupations",
                occupations + 1,
                ("occupation",),
                id_mapping=VocabularyMapping(id_type="string"),
                unknown_id="default_row",
                default_row=occupations,
            ),
            table("zip_codes", NUM_ZIP_ROWS, ("zip_code",), id_mapping=HashMapping(seed=1)),
        ]
        features += [FeatureSpec(name=name, side="context") for name in ("age", "occupation", "zip_code")]
    return ModelSpec(
        model=options.model,
        tables=tuple(tables),
        features=tuple(features),
        dense_inputs=DenseInputs(candidate=2 if options.profile else 0),
        dense_model=DenseModelSpec(kind=options.kind, config=_dense_config(options)),
    )


def _dense_config(options: FilmsOptions) -> dict[str, Any]:
    if options.kind == "target_attention":
        return {
            "history_feature": "history",
            "target_feature": "film_id",
            "attention_hidden": [16],
            "hidden": [64, 32],
        }
    if options.kind == "dlrm":
        bottom = [16, options.embedding_dim] if options.profile else []
        return {"bottom_mlp": bottom, "top_mlp": [64, 32]}
    if options.kind == "dcn_v2":
        return {"num_cross_layers": 2, "deep": [64, 32]}
    return {"hidden": [64, 32]}


def films_vocabularies(interactions: Interactions, spec: ModelSpec) -> dict[str, Vocabulary]:
    """The ids in row order of the model's tables with vocabulary mapping."""
    vocabularies: dict[str, Vocabulary] = {"users": interactions.users.ids}
    if any(table.name == "occupations" for table in spec.tables):
        vocabularies["occupations"] = sorted(set(interactions.users.occupations))
    return vocabularies
