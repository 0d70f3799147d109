"""Models of a few features for the tests of ranking models: descriptions, random inputs, random tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from serving.models.inputs import InputShapes, RankingInputs, SequenceInput, SideShapes
from serving.models.ranking_models import build_model
from shardrank_testing.snapshots import table_of

DIM = 4
CONFIGS: dict[str, dict[str, Any]] = {
    "mlp": {"hidden": [8, 6]},
    "dlrm": {"bottom_mlp": [6, DIM], "top_mlp": [8]},
    "dcn_v2": {"num_cross_layers": 2, "low_rank": 3, "deep": [8]},
    "target_attention": {
        "history_feature": "history",
        "target_feature": "film",
        "attention_hidden": [7, 5],
        "hidden": [8],
    },
}


needs_int8 = pytest.mark.skipif(
    not torch.cpu.get_capabilities().get("avx512_vnni"),
    reason="products of bytes are saturated on processors without VNNI, so there are no int8 layers",
)


def ranking_spec(
    kind: str, config: Mapping[str, Any] | None = None, *, dense: tuple[int, int] = (2, 3), history: str = ""
) -> ModelSpec:
    """user (context), film and genre (candidate) of dim 4, a history that shares film's table, and dense inputs.

    The history's pooling is none for target attention and mean otherwise, unless `history` says which.
    """
    pooling = history or ("none" if kind == "target_attention" else "mean")
    return ModelSpec(
        model="films",
        tables=(
            table_of("users", 50, DIM, "user"),
            table_of("films", 40, DIM, "film", "history"),
            table_of("genres", 10, DIM, "genre", pooling="mean"),
        ),
        features=(
            FeatureSpec(name="user", side="context"),
            FeatureSpec.model_validate({"name": "history", "side": "context", "pooling": pooling}),
            FeatureSpec(name="film", side="candidate"),
            FeatureSpec(name="genre", side="candidate"),
        ),
        dense_inputs=DenseInputs(context=dense[0], candidate=dense[1]),
        dense_model=DenseModelSpec(kind=kind, config=dict(CONFIGS[kind] if config is None else config)),
    )


def random_inputs(
    spec: ModelSpec, candidates: Sequence[int], history_lengths: Sequence[int] | None = None, seed: int = 0
) -> RankingInputs:
    """Standard normal inputs of requests with that many candidates each."""
    shapes, draw = InputShapes.of(spec), torch.Generator().manual_seed(seed)
    owner = torch.repeat_interleave(torch.arange(len(candidates)), torch.tensor(candidates))
    lengths = torch.tensor(history_lengths if history_lengths is not None else [3] * len(candidates))
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    sequences = {
        name: SequenceInput(torch.randn(*mask.shape, dim, generator=draw) * mask.unsqueeze(2), mask)
        for name, dim in shapes.sequence_dims.items()
    }
    context = random_matrix(shapes.context, len(candidates), draw)
    return RankingInputs(context, random_matrix(shapes.candidate, len(owner), draw), sequences, owner, is_ordered=True)


def random_matrix(side: SideShapes, rows: int, draw: torch.Generator) -> torch.Tensor:
    """One side's matrix: standard normal, and zeros in the padding."""
    matrix = torch.zeros(rows, side.padded_width)
    matrix[:, : side.width] = torch.randn(rows, side.width, generator=draw)
    return matrix


def as_trained(spec: ModelSpec, inputs: RankingInputs) -> tuple[np.ndarray, np.ndarray]:
    """Each candidate's dense inputs [N, Kc + Kd], and its embeddings [N, W] in the spec's order, in float64."""
    shapes = InputShapes.of(spec)
    owner = inputs.request_of_candidate.numpy()
    context, candidates = inputs.context.double().numpy()[owner], inputs.candidates.double().numpy()
    dense = [context[:, shapes.context.dense_columns], candidates[:, shapes.candidate.dense_columns]]
    embeddings = [
        (context if name in shapes.context.features else candidates)[:, columns]
        for name, columns in shapes.columns.items()
    ]
    return np.concatenate(dense, axis=1), np.concatenate(embeddings, axis=1)


def inputs_of(
    spec: ModelSpec,
    dense: torch.Tensor,
    embeddings: torch.Tensor,
    owner: torch.Tensor,
    sequences: Mapping[str, SequenceInput],
) -> RankingInputs:
    """Inputs from what `as_trained` gives, in float32; each request has a candidate at least."""
    shapes = InputShapes.of(spec)
    first = torch.searchsorted(owner, torch.arange(int(owner.max()) + 1))
    dense_parts = torch.split(dense, [shapes.context.dense_width, shapes.candidate.dense_width], dim=1)
    matrices = []
    sides = (shapes.context, shapes.candidate)
    for side, floats in zip(sides, dense_parts, strict=True):
        matrix = torch.cat([embeddings[:, torch.from_numpy(side.embedding_order)], floats], dim=1)
        matrices.append(torch.nn.functional.pad(matrix, (0, side.padded_width - side.width)))
    return RankingInputs(matrices[0][first], matrices[1], sequences, owner, is_ordered=True)


def random_tensors(spec: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of the spec's ranking model, scaled so that logits are of the order of 1."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=draw) / max(1, tensor.shape[-1]) ** 0.5
        for name, tensor in build_model(spec).state_dict().items()
    }


def numpy_mlp(
    tensors: Mapping[str, torch.Tensor], prefix: str, x: np.ndarray, *, relu_at_end: bool = False
) -> np.ndarray:
    """The plain formula of `Mlp`, in float64."""
    names = sorted(name for name in tensors if name.startswith(f"{prefix}.layers.") and name.endswith(".weight"))
    for number in range(len(names)):
        weight = tensors[f"{prefix}.layers.{number}.weight"].double().numpy()
        x = x @ weight.T + tensors[f"{prefix}.layers.{number}.bias"].double().numpy()
        if number < len(names) - 1 or relu_at_end:
            x = np.maximum(x, 0)
    return x


def converted(inputs: RankingInputs, dtype: torch.dtype) -> RankingInputs:
    """The same inputs in another floating-point type."""
    sequences = {name: SequenceInput(one.rows.to(dtype), one.mask) for name, one in inputs.sequences.items()}
    context, candidates = inputs.context.to(dtype), inputs.candidates.to(dtype)
    return inputs._replace(context=context, candidates=candidates, sequences=sequences)
