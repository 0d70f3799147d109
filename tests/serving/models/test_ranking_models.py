"""The ranking models: their formulas, their loading, their packed layers, their copies on devices."""

from __future__ import annotations

import itertools
import threading
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import RankingModelError
from serving.models import layers
from serving.models.inputs import InputShapes, RankingInputs, SequenceInput
from serving.models.layers import CPU, Int8Product, Linear, Steps, choose_dtype
from serving.models.ranking_models import MAX_PAIRS, DeviceCopies, RankingModel, TargetAttention, load_model
from shardrank_testing.ranking import (
    CONFIGS,
    DIM,
    as_trained,
    converted,
    numpy_mlp,
    random_inputs,
    random_tensors,
    ranking_spec,
)


def logits_of(spec, tensors, inputs: RankingInputs) -> np.ndarray:
    with torch.inference_mode():
        return load_model(spec, tensors)(inputs).numpy()


def loaded(spec, tensors, dtype: str, inputs: RankingInputs) -> RankingModel:
    """The model; with int8, all layers that may be are, with codes for what they read of these inputs."""
    exact = load_model(spec, tensors)
    with exact.observed() as noted:
        exact.scores(inputs)
    return load_model(spec, tensors, dtype, exact.steps(noted))


def side_by_side(spec, inputs: RankingInputs) -> np.ndarray:
    return np.concatenate(as_trained(spec, inputs), axis=1)


def test_mlp_is_layers_over_dense_inputs_then_embeddings() -> None:
    spec = ranking_spec("mlp")
    tensors, inputs = random_tensors(spec), random_inputs(spec, [5, 3])
    expected = numpy_mlp(tensors, "mlp", side_by_side(spec, inputs))[:, 0]
    np.testing.assert_allclose(logits_of(spec, tensors, inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dense", [(2, 3), (0, 0)])
def test_dlrm_interacts_every_pair_of_vectors_once(dense: tuple[int, int]) -> None:
    config = CONFIGS["dlrm"] if sum(dense) else {"bottom_mlp": [], "top_mlp": [8]}
    spec = ranking_spec("dlrm", config, dense=dense)
    tensors, inputs = random_tensors(spec), random_inputs(spec, [4, 2])
    expected = []
    for floats, embeddings in zip(*as_trained(spec, inputs), strict=True):
        bottom = [numpy_mlp(tensors, "bottom", floats, relu_at_end=True)] if sum(dense) else []
        pairs = itertools.combinations([*bottom, *embeddings.reshape(-1, DIM)], 2)
        interactions = [first @ second for first, second in pairs]
        expected.append(numpy_mlp(tensors, "top", np.concatenate([*bottom, interactions]))[0])
    np.testing.assert_allclose(logits_of(spec, tensors, inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bottom_mlp", [[], [6, 5]])
@pytest.mark.parametrize("low_rank", [None, 3])
def test_dcn_v2_crosses_as_the_paper_says(low_rank: int | None, bottom_mlp: list[int]) -> None:
    spec = ranking_spec("dcn_v2", {"num_cross_layers": 3, "low_rank": low_rank, "deep": [8], "bottom_mlp": bottom_mlp})
    tensors, inputs = random_tensors(spec), random_inputs(spec, [4, 2])
    weights = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    x0 = side_by_side(spec, inputs)
    if bottom_mlp:
        floats, embeddings = as_trained(spec, inputs)
        x0 = np.concatenate([numpy_mlp(tensors, "bottom", floats, relu_at_end=True), embeddings], axis=1)
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
    weight, bias = (tensors[f"attention.first.{name}"].double().numpy() for name in ("weight", "bias"))
    result = np.zeros((inputs.candidates.shape[0], DIM))
    for n, request in enumerate(inputs.request_of_candidate.tolist()):
        q = inputs.candidates[n, target].double().numpy()
        keys = history.rows[request][history.mask[request]].double().numpy()
        if len(keys):
            hidden = [np.maximum(weight @ np.concatenate([q, k, q - k, q * k]) + bias, 0) for k in keys]
            shares = np.exp([numpy_mlp(tensors, "attention.rest", one)[0] for one in hidden])
            result[n] = shares @ keys / shares.sum()
    return result


@pytest.mark.parametrize("lengths", [[3, 5], [0, 4], [0, 0], [1, 6]])
@pytest.mark.parametrize("max_pairs", [MAX_PAIRS, 7])
def test_target_attention_is_a_softmax_over_the_history(lengths: list[int], max_pairs: int) -> None:
    spec = ranking_spec("target_attention")
    tensors, inputs = random_tensors(spec), random_inputs(spec, [4, 2], lengths)
    film = InputShapes.of(spec).columns["film"]
    attended = attended_by_loops(tensors, inputs, film)
    expected = numpy_mlp(tensors, "mlp", np.concatenate([side_by_side(spec, inputs), attended], axis=1))[:, 0]
    model = load_model(spec, tensors)
    assert isinstance(model, TargetAttention)
    model.attention.max_pairs = max_pairs
    with torch.inference_mode():
        np.testing.assert_allclose(model(inputs).numpy(), expected, rtol=1e-4, atol=1e-5)


KINDS = sorted(CONFIGS)


@pytest.mark.parametrize(
    ("bias", "problem"),
    [
        (None, r"missing tensors: \['mlp.layers.1.bias'\]"),
        (torch.full((6,), float("nan")), "'mlp.layers.1.bias' holds NaN or inf"),
        (torch.full((6,), float("inf")), "'mlp.layers.1.bias' holds NaN or inf"),
        (torch.zeros(6, dtype=torch.int64), "'mlp.layers.1.bias' is torch.int64, expected floating point"),
    ],
)
def test_tensors_that_are_no_finite_floats_are_refused(bias: torch.Tensor | None, problem: str) -> None:
    spec = ranking_spec("mlp")
    tensors = random_tensors(spec) | {"mlp.layers.1.bias": bias}
    with pytest.raises(RankingModelError, match=problem):
        load_model(spec, {name: tensor for name, tensor in tensors.items() if tensor is not None})


@pytest.mark.parametrize(
    ("has_fast_int8", "has_bfloat16", "chosen"),
    [(True, True, "int8"), (True, False, "int8"), (False, True, "bfloat16"), (False, False, "float32")],
)
def test_auto_takes_the_fastest_format_that_the_cpu_has(monkeypatch, has_fast_int8, has_bfloat16, chosen) -> None:
    monkeypatch.setattr(layers, "int8_is_faster", lambda: has_fast_int8)
    monkeypatch.setattr(layers, "bfloat16_is_native", lambda: has_bfloat16)
    monkeypatch.setattr(layers, "int8_is_there", lambda: True)
    assert [choose_dtype(choice) for choice in ("auto", "float32", "int8")] == [chosen, "float32", "int8"]


FORMATS = st.sampled_from(["float32", "bfloat16", "int8"])
SPLIT_TOLERANCES = {"float32": 1e-5, "bfloat16": 0.03, "int8": 0.04}


def for_each_candidate(inputs: RankingInputs) -> RankingInputs:
    """The same with a request for every candidate: nothing is shared, and nothing is in blocks."""
    owner = inputs.request_of_candidate
    return inputs._replace(
        context=inputs.context[owner],
        sequences={name: SequenceInput(one.rows[owner], one.mask[owner]) for name, one in inputs.sequences.items()},
        request_of_candidate=torch.arange(len(owner)),
        is_ordered=False,
    )


@given(
    st.sampled_from(KINDS),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.sampled_from([(0, 4), (3, 0), (2, 3)]),
    st.integers(0, 1000),
)
def test_int8_layers_score_the_same_with_a_shared_context(kind, counts, dense, seed):
    """However small they are."""
    spec = ranking_spec(kind, dense=dense)
    tensors, inputs = random_tensors(spec, seed), random_inputs(spec, counts, [3] * len(counts), seed)
    with mock.patch.object(layers, "MIN_INT8_WEIGHTS", 0):
        model = loaded(spec, tensors, "int8", inputs)
    assert model.int8
    split = model.scores(converted(inputs, model.dtype))
    whole = model.scores(converted(for_each_candidate(inputs), model.dtype))
    torch.testing.assert_close(split, whole, rtol=0, atol=0.04)


@given(
    st.sampled_from(KINDS),
    FORMATS,
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.sampled_from([(0, 4), (3, 0), (2, 3)]),
    st.integers(0, 1000),
)
def test_shared_context_scores_like_each_candidates(kind, dtype, counts, dense, seed):
    spec = ranking_spec(kind, dense=dense)
    tensors, inputs = random_tensors(spec, seed), random_inputs(spec, counts, [3] * len(counts), seed)
    model, whole = loaded(spec, tensors, dtype, inputs), for_each_candidate(inputs)
    split = model.scores(converted(inputs, model.dtype))
    tolerance = SPLIT_TOLERANCES[dtype]
    torch.testing.assert_close(split, model.scores(converted(whole, model.dtype)), rtol=0, atol=tolerance)
    exact = load_model(spec, tensors).scores(whole)
    torch.testing.assert_close(split, exact, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [[30, 30], [5, 17, 1], [0, 3]], ids=str)
def test_candidates_in_any_order_and_in_blocks_score_the_same(kind, counts):
    spec = ranking_spec(kind)
    model, inputs = load_model(spec, random_tensors(spec)), random_inputs(spec, counts)
    unordered = inputs._replace(is_ordered=False)
    torch.testing.assert_close(model.scores(inputs), model.scores(unordered), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["mlp", "dcn_v2"])
def test_wide_layers_in_int8_are_close_to_float32(kind):
    config = {"hidden": [256, 128]} if kind == "mlp" else {"num_cross_layers": 2, "deep": [256]}
    spec = ranking_spec(kind, config, dense=(200, 600))
    tensors, inputs = random_tensors(spec), random_inputs(spec, [20, 30])
    narrow = loaded(spec, tensors, "int8", inputs)
    products = [one.ready.rows for one in narrow.modules() if isinstance(one, Linear)]
    assert sum(isinstance(product, Int8Product) for product in products) == len(narrow.int8) >= 2
    difference = narrow.scores(converted(inputs, narrow.dtype)) - load_model(spec, tensors).scores(inputs)
    assert 0 < difference.abs().max() < 0.05


def test_an_mlp_reads_the_codes_of_its_candidates_by_feature():
    spec = ranking_spec("mlp", {"hidden": [256, 128]}, dense=(2, 600))
    tensors, inputs = random_tensors(spec), random_inputs(spec, [20, 30])
    # Floats may be much larger than embeddings.
    inputs.candidates[:, InputShapes.of(spec).candidate.dense_columns][:, 1] *= 100.0
    narrow = loaded(spec, tensors, "int8", inputs)
    steps = narrow.int8[narrow.reads_candidates]
    for name in InputShapes.of(spec).candidate.features:
        assert len(set(steps.step[InputShapes.of(spec).columns[name]].tolist())) == 1
    numbers = narrow.scores(converted(inputs, narrow.dtype)._replace(candidates=inputs.candidates))
    codes = converted(inputs, narrow.dtype)._replace(candidates=steps.codes(inputs.candidates))
    torch.testing.assert_close(narrow.scores(codes), numbers, rtol=0, atol=0)
    torch.testing.assert_close(numbers, load_model(spec, tensors).scores(inputs), rtol=0, atol=0.05)


def test_the_layers_that_are_given_up_first_are_the_smallest():
    spec = ranking_spec("mlp", {"hidden": [256, 128]}, dense=(200, 600))
    model = load_model(spec, random_tensors(spec))
    with model.observed() as noted:
        assert model.steps(noted) == {}
        model.scores(random_inputs(spec, [20, 30]))
    steps = model.steps(noted)
    assert list(steps) == ["mlp.layers.0", "mlp.layers.1"]
    # What a ReLU returns has all codes.
    assert (steps["mlp.layers.0"].zero, steps["mlp.layers.1"]) == (128, Steps(steps["mlp.layers.1"].step, 0))


OTHER = torch.device("meta")


def test_each_device_has_one_copy():
    spec = ranking_spec("dlrm")
    model = load_model(spec, random_tensors(spec))
    copies = DeviceCopies(model)
    found = []
    threads = [threading.Thread(target=lambda: found.append(copies.on(OTHER))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    tensors = [*found[0].parameters(), *found[0].buffers()]
    assert {tensor.device for tensor in tensors} == {OTHER}
    assert {tensor.device for tensor in [*model.parameters(), *model.buffers()]} == {CPU}
    assert not any(parameter.requires_grad for parameter in found[0].parameters())


@pytest.mark.gpu
def test_a_copy_on_a_gpu_is_whole_for_work_on_every_stream():
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    spec = ranking_spec("dlrm")
    copies = DeviceCopies(load_model(spec, random_tensors(spec)))
    copies.on(torch.device("cuda", 0))
    assert torch.cuda.current_stream(0).query()
