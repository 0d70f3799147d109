from __future__ import annotations

from typing import Any

import pytest

from loader.snapshot.manifest import DenseModelSpec
from serving.errors import RankingModelError
from serving.models.ranking_models import parse_dense_model
from shardrank_testing.ranking import CONFIGS, ranking_spec


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_a_valid_config_is_parsed_into_its_own_type(kind: str) -> None:
    config = parse_dense_model(ranking_spec(kind))
    assert config.kind == kind
    given = config.model_dump(mode="json")
    assert {name: given[name] for name in CONFIGS[kind]} == CONFIGS[kind]


ATTENTION = CONFIGS["target_attention"]


@pytest.mark.parametrize(
    ("kind", "config", "problem"),
    [
        ("mlp", {"hiden": [8]}, r"hiden: unknown key 'hiden'; allowed are \['hidden'\] \(got"),
        ("mlp", {"hidden": [0]}, r"hidden.0: .*greater than or equal to 1 \(got 0\)"),
        ("mlp", {"hidden": [8] * 33}, r"hidden: .*at most 32"),
        ("mlp", {"hidden": [1 << 20]}, r"hidden.0: .*65536"),
        ("mlp", {"kind": "dlrm"}, r"config must not have 'kind'"),
        ("dlrm", {"bottom_mlp": [8], "top_mlp": [8]}, r"bottom_mlp ends in 8, not in the embedding_dim 4"),
        ("dlrm", {"bottom_mlp": [], "top_mlp": [8]}, r"with 5 dense inputs has bottom_mlp \[\]"),
        ("dcn_v2", {"num_cross_layers": 0}, r"num_cross_layers: .*greater than or equal to 1"),
        ("dcn_v2", {"low_rank": 0}, r"low_rank"),
        ("target_attention", {"target_feature": "film"}, r"history_feature: Field required"),
        ("target_attention", ATTENTION | {"history_feature": "past"}, r"history_feature 'past' is not one of"),
        ("target_attention", ATTENTION | {"target_feature": "user"}, r"target_feature 'user' must be a candidate"),
        ("target_attention", ATTENTION | {"attention_hidden": []}, r"attention_hidden"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_naming_the_option(
    kind: str, config: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RankingModelError, match=problem):
        parse_dense_model(ranking_spec(kind, config))


def test_an_unknown_kind_is_refused_naming_the_known_ones() -> None:
    spec = ranking_spec("mlp").model_copy(update={"dense_model": DenseModelSpec(kind="forest")})
    with pytest.raises(RankingModelError, match=r"'forest'.*'mlp', 'dlrm', 'dcn_v2', 'target_attention'"):
        parse_dense_model(spec)


NOT_USED = "feature 'history' has pooling none, which .* does not use"


@pytest.mark.parametrize(
    ("kind", "history", "problem"),
    [
        ("mlp", "none", NOT_USED),
        ("dlrm", "none", NOT_USED),
        ("dcn_v2", "none", NOT_USED),
        ("target_attention", "mean", "history_feature 'history' must be a context feature with pooling none"),
    ],
)
def test_a_history_of_another_pooling_is_refused(kind: str, history: str, problem: str) -> None:
    with pytest.raises(RankingModelError, match=problem):
        parse_dense_model(ranking_spec(kind, history=history))


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("dlrm", r"one embedding_dim, got \{'user': 4, 'history': 8, 'film': 8, 'genre': 4\}"),
        ("target_attention", r"differ in embedding_dim: \{'history': 8, 'film': 4\}"),
    ],
)
def test_features_of_other_dims_are_refused(kind: str, problem: str) -> None:
    spec = ranking_spec(kind)
    users, films, genres = spec.tables
    if kind == "dlrm":
        tables = (users, films.model_copy(update={"embedding_dim": 8}), genres)
    else:
        past = films.model_copy(update={"name": "past", "feature_names": ("history",), "embedding_dim": 8})
        tables = (users, films.model_copy(update={"feature_names": ("film",)}), past, genres)
    with pytest.raises(RankingModelError, match=problem):
        parse_dense_model(spec.model_copy(update={"tables": tables}))
