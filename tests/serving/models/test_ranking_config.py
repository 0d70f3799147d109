from __future__ import annotations

from typing import Any

import pytest

from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.tables import TableSpec
from serving.errors import RankingModelError
from serving.models.config import parse_dense_model
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


@pytest.mark.parametrize("kind", ["mlp", "dlrm", "dcn_v2"])
def test_a_sequence_feature_is_refused_by_a_model_that_would_not_read_it(kind: str) -> None:
    with pytest.raises(RankingModelError, match=r"feature 'history' has pooling none, which .* does not use"):
        parse_dense_model(ranking_spec(kind, history="none"))


def test_a_pooled_history_is_refused_by_target_attention() -> None:
    with pytest.raises(
        RankingModelError, match="history_feature 'history' must be a context feature with pooling none"
    ):
        parse_dense_model(ranking_spec("target_attention", history="mean"))


def spec_of_dims(kind: str, dims: dict[str, int], config: dict[str, Any], dense: int = 0) -> ModelSpec:
    return ModelSpec(
        model="films",
        tables=tuple(
            TableSpec(name=name, num_embeddings=9, embedding_dim=dim, feature_names=(name,))
            for name, dim in dims.items()
        ),
        features=tuple(
            FeatureSpec(
                name=name,
                side="context" if name == "history" else "candidate",
                pooling="none" if name == "history" else None,
            )
            for name in dims
        ),
        dense_inputs=DenseInputs(candidate=dense),
        dense_model=DenseModelSpec(kind=kind, config=config),
    )


def test_dlrm_refuses_features_of_several_dims() -> None:
    with pytest.raises(RankingModelError, match=r"one embedding_dim, got \{'a': 4, 'b': 8\}"):
        parse_dense_model(spec_of_dims("dlrm", {"a": 4, "b": 8}, {}))


def test_target_attention_refuses_a_history_of_another_dim() -> None:
    config = {"history_feature": "history", "target_feature": "film"}
    with pytest.raises(RankingModelError, match=r"differ in embedding_dim: \{'history': 8, 'film': 4\}"):
        parse_dense_model(spec_of_dims("target_attention", {"film": 4, "history": 8}, config))
