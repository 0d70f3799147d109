"""The typed configs of the ranking models, and the check that one fits the features of its model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field, TypeAdapter, ValidationError

from loader.snapshot.manifest import DenseModelSpec, ModelSpec
from loader.snapshot.tables import Frozen, schema_errors
from serving.errors import RankingModelError

MAX_LAYERS = 32
MAX_LAYER_SIZE = 65_536

LayerSize = Annotated[int, Field(ge=1, le=MAX_LAYER_SIZE)]
LayerSizes = Annotated[tuple[LayerSize, ...], Field(max_length=MAX_LAYERS)]


class MlpConfig(Frozen):
    """logit = MLP(concat(dense, embeddings)): hidden layers (ReLU) of these sizes, and a last one of size 1."""

    kind: Literal["mlp"] = "mlp"
    hidden: LayerSizes = (256, 64)


class DlrmConfig(Frozen):
    """DLRM (Naumov et al., 2019, arXiv:1906.00091) with dot interaction.

    `bottom_mlp` has the layer sizes over the dense inputs (ReLU after each), the last of which is the embedding_dim;
    empty if, and only if, there are none. `top_mlp` has those of the hidden layers over the interactions.
    """

    kind: Literal["dlrm"] = "dlrm"
    bottom_mlp: LayerSizes = ()
    top_mlp: LayerSizes = (256, 64)


class DcnV2Config(Frozen):
    """DCN-v2 (Wang et al., 2021, arXiv:2008.13535), stacked: cross layers, then deep layers.

    `low_rank` is the rank of each cross layer's two factors, or None for one full matrix. `bottom_mlp` has the sizes of
    an MLP over the dense inputs (ReLU after each), whose output takes their place; this is MLPerf's DLRM-v2.
    """

    kind: Literal["dcn_v2"] = "dcn_v2"
    num_cross_layers: int = Field(default=3, ge=1, le=MAX_LAYERS)
    low_rank: LayerSize | None = None
    bottom_mlp: LayerSizes = ()
    deep: LayerSizes = (256, 64)


class TargetAttentionConfig(Frozen):
    """Attention of each candidate over a history, after DIN (Zhou et al., 2018, arXiv:1706.06978).

    The pooled candidate feature `target_feature` attends over `history_feature`, a context feature with pooling none,
    by an MLP over [q, k, q - k, q * k]; the head is over concat(dense, embeddings, attended history).
    """

    kind: Literal["target_attention"] = "target_attention"
    history_feature: str
    target_feature: str
    attention_hidden: Annotated[LayerSizes, Field(min_length=1)] = (32,)
    hidden: LayerSizes = (128, 64)


DenseModelConfig: TypeAlias = MlpConfig | DlrmConfig | DcnV2Config | TargetAttentionConfig

_ADAPTER: TypeAdapter[DenseModelConfig] = TypeAdapter(Annotated[DenseModelConfig, Field(discriminator="kind")])


def parse_dense_model(spec: ModelSpec) -> DenseModelConfig:
    """Return `spec.dense_model`, checked against the model's features and dense inputs. Raises RankingModelError."""
    described = spec.dense_model
    if not isinstance(described, DenseModelSpec):
        raise RankingModelError(f"model {spec.model!r}: dense_model {described.kind!r} is no built-in model")
    if "kind" in described.config:
        raise RankingModelError(
            f"model {spec.model!r}: dense_model.config must not have 'kind', it stands beside config"
        )
    try:
        config = _ADAPTER.validate_python({"kind": described.kind, **described.config})
    except ValidationError as error:
        # A discriminated union puts the kind in front of each location; the name of the option follows.
        reasons = "; ".join(
            f"{'.'.join(map(str, one.place[1:])) or 'kind'}: {one.problem} (got {one.value!r:.80})"
            for one in schema_errors(error, get_args(DenseModelConfig), elsewhere=["kind"])
        )
        raise RankingModelError(f"model {spec.model!r}: dense_model {described.kind!r}: {reasons}") from error
    for problem in _problems(spec, config):
        raise RankingModelError(f"model {spec.model!r}: {problem}")
    return config


def _problems(spec: ModelSpec, config: DenseModelConfig) -> Iterator[str]:
    """Say why a config does not fit a model; what follows the first may rest on what that denies."""
    pooled = {
        feature.name: spec.table_of(feature.name).embedding_dim
        for feature in spec.features
        if spec.pooling_of(feature.name) != "none"
    }
    dense_width, sequence = spec.dense_inputs.context + spec.dense_inputs.candidate, None
    if isinstance(config, DlrmConfig):
        yield from _dlrm_problems(config, pooled, dense_width)
    elif isinstance(config, TargetAttentionConfig):
        yield from _target_attention_problems(spec, config)
        sequence = config.history_feature
    elif isinstance(config, DcnV2Config) and config.bottom_mlp and not dense_width:
        yield f"dcn_v2 has bottom_mlp {list(config.bottom_mlp)}, but no dense inputs"
    elif not pooled and not dense_width:
        yield f"{config.kind} has no pooled feature and no dense input"
    for feature in spec.features:
        if feature.name not in pooled and feature.name != sequence:
            yield (
                f"feature {feature.name!r} has pooling none, which {config.kind} does not use; "
                "use pooling sum or mean, or target_attention with it as history_feature"
            )


def _dlrm_problems(config: DlrmConfig, dims: dict[str, int], dense_width: int) -> Iterator[str]:
    if len(set(dims.values())) != 1:
        yield f"dlrm needs features of one embedding_dim, got {dims}"
    dim, bottom = next(iter(dims.values())), config.bottom_mlp
    if bool(bottom) != bool(dense_width):
        yield (
            f"dlrm with {dense_width} dense inputs has bottom_mlp {list(bottom)}; "
            "it must be empty without dense inputs, and only then"
        )
    if bottom and bottom[-1] != dim:
        yield f"dlrm's bottom_mlp ends in {bottom[-1]}, not in the embedding_dim {dim}"
    if len(dims) + bool(bottom) < 2:
        yield f"dlrm needs at least two vectors to interact, got {sorted(dims)}"


def _target_attention_problems(spec: ModelSpec, config: TargetAttentionConfig) -> Iterator[str]:
    names = [feature.name for feature in spec.features]
    for option, name in (("history_feature", config.history_feature), ("target_feature", config.target_feature)):
        if name not in names:
            yield f"{option} {name!r} is not one of its features: {names}"
    history, target = spec.feature(config.history_feature), spec.feature(config.target_feature)
    for option, feature, side, poolings in (
        ("history_feature", history, "context", ("none",)),
        ("target_feature", target, "candidate", ("sum", "mean")),
    ):
        pooling = spec.pooling_of(feature.name)
        if feature.side != side or pooling not in poolings:
            yield (
                f"{option} {feature.name!r} must be a {side} feature with pooling {' or '.join(poolings)}, "
                f"it is a {feature.side} feature with pooling {pooling}"
            )
    dims = {name: spec.table_of(name).embedding_dim for name in (history.name, target.name)}
    if len(set(dims.values())) != 1:
        yield f"history and target differ in embedding_dim: {dims}"
