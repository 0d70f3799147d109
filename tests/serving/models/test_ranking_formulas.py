"""Each ranking model against its plain formula, written with NumPy and loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serving.models.inputs import RankingInputs
from serving.models.ranking_models import MAX_PAIRS, TargetAttention, load_model
from shardrank_testing.ranking import CONFIGS, DIM, numpy_mlp, random_inputs, random_tensors, ranking_spec


def logits_of(spec, tensors, inputs: RankingInputs) -> np.ndarray:
    with torch.inference_mode():
        return load_model(spec, tensors)(inputs).numpy()


def side_by_side(inputs: RankingInputs) -> np.ndarray:
    return np.concatenate([inputs.dense.numpy(), inputs.embeddings.numpy()], axis=1).astype(np.float64)


def test_mlp_is_layers_over_dense_inputs_then_embeddings() -> None:
    spec = ranking_spec("mlp")
    tensors, inputs = random_tensors(spec), random_inputs(spec, [5, 3])
    expected = numpy_mlp(tensors, "mlp", side_by_side(inputs))[:, 0]
    np.testing.assert_allclose(logits_of(spec, tensors, inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dense", [(2, 3), (0, 0)])
def test_dlrm_interacts_every_pair_of_vectors_once(dense: tuple[int, int]) -> None:
    config = CONFIGS["dlrm"] if sum(dense) else {"bottom_mlp": [], "top_mlp": [8]}
    spec = ranking_spec("dlrm", config, dense=dense)
    tensors, inputs = random_tensors(spec), random_inputs(spec, [4, 2])
    expected = []
    for n in range(inputs.columns.shape[0]):
        vectors = list(inputs.embeddings[n].double().numpy().reshape(-1, DIM))
        features = []
        if sum(dense):
            bottom = numpy_mlp(tensors, "bottom", inputs.dense[n].double().numpy(), relu_at_end=True)
            vectors.insert(0, bottom)
            features.extend(bottom)
        for i in range(len(vectors)):
            for j in range(i + 1, len(vectors)):
                features.append(sum(vectors[i][d] * vectors[j][d] for d in range(DIM)))
        expected.append(numpy_mlp(tensors, "top", np.array(features))[0])
    np.testing.assert_allclose(logits_of(spec, tensors, inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bottom_mlp", [[], [6, 5]])
@pytest.mark.parametrize("low_rank", [None, 3])
def test_dcn_v2_crosses_as_the_paper_says(low_rank: int | None, bottom_mlp: list[int]) -> None:
    spec = ranking_spec("dcn_v2", {"num_cross_layers": 3, "low_rank": low_rank, "deep": [8], "bottom_mlp": bottom_mlp})
    tensors, inputs = random_tensors(spec), random_inputs(spec, [4, 2])
    weights = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    x0 = side_by_side(inputs)
    if bottom_mlp:
        dense = numpy_mlp(tensors, "bottom", inputs.dense.double().numpy(), relu_at_end=True)
        x0 = np.concatenate([dense, inputs.embeddings.double().numpy()], axis=1)
    x = x0
    for layer in range(3):
        if low_rank is None:
            matrix, bias = weights[f"cross.full.{layer}.weight"], weights[f"cross.full.{layer}.bias"]
        else:
            matrix = weights[f"cross.up.{layer}.weight"] @ weights[f"cross.down.{layer}.weight"]
            bias = weights[f"cross.up.{layer}.bias"]
        x = x0 * (x @ matrix.T + bias) + x
    expected = numpy_mlp(tensors, "deep", x)[:, 0]
    np.testing.assert_allclose(logits_of(spec, tensors, inputs), expected, rtol=1e-4, atol=1e-4)


def attended_by_loops(tensors, inputs: RankingInputs, target: slice) -> np.ndarray:
    history = inputs.sequences["history"]
    first = {name: tensors[f"attention.first.{name}"].double().numpy() for name in ("weight", "bias")}
    result = np.zeros((inputs.columns.shape[0], DIM))
    for n in range(inputs.columns.shape[0]):
        q = inputs.embeddings[n, target].double().numpy()
        request = int(inputs.request_of_candidate[n])
        keys = history.rows[request][history.mask[request]].double().numpy()
        if not len(keys):
            continue
        weights = []
        for k in keys:
            hidden = np.maximum(first["weight"] @ np.concatenate([q, k, q - k, q * k]) + first["bias"], 0)
            weights.append(numpy_mlp(tensors, "attention.rest", hidden)[0])
        shares = np.exp(np.array(weights) - max(weights))
        result[n] = shares @ keys / shares.sum()
    return result


@pytest.mark.parametrize("lengths", [[3, 5], [0, 4], [0, 0], [1, 6]])
@pytest.mark.parametrize("max_pairs", [MAX_PAIRS, 7])
def test_target_attention_is_a_softmax_over_each_candidates_own_history(lengths: list[int], max_pairs: int) -> None:
    spec = ranking_spec("target_attention")
    tensors, inputs = random_tensors(spec), random_inputs(spec, [4, 2], lengths)
    film = slice(DIM, 2 * DIM)
    attended = attended_by_loops(tensors, inputs, film)
    expected = numpy_mlp(tensors, "mlp", np.concatenate([side_by_side(inputs), attended], axis=1))[:, 0]
    model = load_model(spec, tensors)
    assert isinstance(model, TargetAttention)
    model.attention.max_pairs = max_pairs
    with torch.inference_mode():
        np.testing.assert_allclose(model(inputs).numpy(), expected, rtol=1e-4, atol=1e-5)


def test_gradients_stay_finite_where_a_history_is_empty() -> None:
    spec = ranking_spec("target_attention")
    inputs = random_inputs(spec, [2, 2], [0, 3])
    model = load_model(spec, random_tensors(spec)).requires_grad_(True)
    model(inputs).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and bool(torch.isfinite(gradient).all()) for gradient in gradients)


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_requests_in_one_batch_score_as_they_do_one_by_one(kind: str) -> None:
    from shardrank_testing.ranking import only_request

    spec = ranking_spec(kind)
    model = load_model(spec, random_tensors(spec))
    inputs = random_inputs(spec, [4, 1, 7, 2], [3, 0, 6, 1])
    alone = [model.score(only_request(inputs, request)) for request in range(4)]
    together = model.score(inputs)
    assert together.dtype == torch.float32
    assert together.shape == (14,)
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)


def test_score_is_the_sigmoid_of_the_logit() -> None:
    spec = ranking_spec("mlp")
    tensors, inputs = random_tensors(spec), random_inputs(spec, [3])
    expected = 1 / (1 + np.exp(-logits_of(spec, tensors, inputs).astype(np.float64)))
    np.testing.assert_allclose(load_model(spec, tensors).score(inputs).numpy(), expected, rtol=1e-5)
