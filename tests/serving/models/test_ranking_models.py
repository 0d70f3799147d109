"""The ranking models: their formulas, their loading, their packed layers, their copies on devices."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import torch

from serving.errors import RankingModelError
from serving.models import ranking_models
from serving.models.inputs import RankingInputs
from serving.models.ranking_models import (
    CPU,
    MAX_PAIRS,
    DeviceCopies,
    LogitHead,
    Mlp,
    TargetAttention,
    bfloat16_is_native,
    build_model,
    can_pack,
    choose_dtype,
    load_model,
)
from shardrank_testing.ranking import (
    CONFIGS,
    DIM,
    compare_dtypes,
    converted,
    numpy_mlp,
    random_inputs,
    random_tensors,
    ranking_spec,
)


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


KINDS = sorted(CONFIGS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_model_gives_the_logits_of_the_trained_one(kind: str) -> None:
    spec = ranking_spec(kind)
    trained, inputs = build_model(spec), random_inputs(spec, [3, 2])
    loaded = load_model(spec, trained.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(loaded(inputs), trained(inputs))


@pytest.mark.parametrize("kind", ["mlp", "dcn_v2"])
def test_a_model_that_reads_the_columns_as_they_lie_is_padded_to_a_multiple_of_32(kind: str) -> None:
    spec = ranking_spec(kind)
    model = load_model(spec, random_tensors(spec))
    assert model.shapes.width == 21
    assert model.columns_read == 32


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_model_has_no_gradients_and_is_in_eval_mode(kind: str) -> None:
    spec = ranking_spec(kind)
    model = load_model(spec, random_tensors(spec))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_differs_from_float32_by_rounding_only(kind: str) -> None:
    spec = ranking_spec(kind)
    tensors, inputs = random_tensors(spec), random_inputs(spec, [20, 12], [4, 0])
    narrow = load_model(spec, tensors, torch.bfloat16)
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.bfloat16}
    assert narrow.score(converted(inputs, torch.bfloat16)).dtype == torch.float32
    difference = compare_dtypes(load_model(spec, tensors), narrow, inputs)
    assert 0 < difference < 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_still_tells_different_candidates_apart(kind: str) -> None:
    spec = ranking_spec(kind)
    narrow = load_model(spec, random_tensors(spec), torch.bfloat16)
    scores = narrow.score(converted(random_inputs(spec, [400], [4]), torch.bfloat16))
    # With logits of 8 significant bits, less than half of these scores would be different ones.
    assert len(set(scores.tolist())) > 390


def test_comparing_a_model_with_itself_gives_no_difference() -> None:
    spec = ranking_spec("mlp")
    model = load_model(spec, random_tensors(spec))
    assert compare_dtypes(model, model, random_inputs(spec, [5])) == 0.0


def test_comparing_on_no_candidates_gives_no_difference() -> None:
    spec = ranking_spec("mlp")
    model = load_model(spec, random_tensors(spec))
    empty = RankingInputs.of_parts(torch.zeros(0, 5), torch.zeros(0, 16), torch.zeros(0, dtype=torch.int64))
    assert compare_dtypes(model, model, empty) == 0.0


def test_missing_tensors_are_refused_by_name() -> None:
    spec = ranking_spec("mlp")
    tensors = random_tensors(spec)
    del tensors["mlp.layers.1.bias"]
    with pytest.raises(RankingModelError, match=r"missing tensors: \['mlp.layers.1.bias'\]"):
        load_model(spec, tensors)


def test_unknown_tensors_are_refused_by_name() -> None:
    spec = ranking_spec("mlp")
    with pytest.raises(RankingModelError, match=r"unknown tensors: \['extra'\]"):
        load_model(spec, random_tensors(spec) | {"extra": torch.zeros(1)})


def test_a_tensor_of_another_shape_is_refused_with_both_shapes() -> None:
    spec = ranking_spec("mlp")
    with pytest.raises(RankingModelError, match=r"'mlp.layers.0.weight' has shape \[8, 20\], expected \[8, 21\]"):
        load_model(spec, random_tensors(spec) | {"mlp.layers.0.weight": torch.zeros(8, 20)})


@pytest.mark.parametrize(
    ("bias", "problem"),
    [
        (torch.full((8,), float("nan")), "holds NaN or inf"),
        (torch.full((8,), float("inf")), "holds NaN or inf"),
        (torch.zeros(8, dtype=torch.int64), "is torch.int64, expected floating point"),
    ],
)
def test_a_tensor_that_is_not_finite_floats_is_refused(bias: torch.Tensor, problem: str) -> None:
    spec = ranking_spec("mlp")
    with pytest.raises(RankingModelError, match=f"'mlp.layers.0.bias' {problem}"):
        load_model(spec, random_tensors(spec) | {"mlp.layers.0.bias": bias})


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_only_where_the_cpu_has_it(monkeypatch, native: bool, dtype: torch.dtype) -> None:
    monkeypatch.setattr(ranking_models, "bfloat16_is_native", lambda: native)
    assert choose_dtype("auto") == dtype
    assert choose_dtype("float32") == torch.float32


def test_bfloat16_is_refused_where_the_cpu_has_none(monkeypatch) -> None:
    monkeypatch.setattr(ranking_models, "bfloat16_is_native", lambda: True)
    assert choose_dtype("bfloat16") == torch.bfloat16
    monkeypatch.setattr(ranking_models, "bfloat16_is_native", lambda: False)
    with pytest.raises(RankingModelError, match="'bfloat16': this CPU has no bfloat16"):
        choose_dtype("bfloat16")


def test_the_error_names_the_device_that_has_no_bfloat16(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose_dtype("auto", torch.device("cuda", 0)) == torch.float32
    with pytest.raises(RankingModelError, match="'bfloat16': this GPU has no bfloat16"):
        choose_dtype("bfloat16", torch.device("cuda", 0))


def test_emulated_bfloat16_does_not_count_as_native(monkeypatch) -> None:
    emulating = {"architecture": "x86_64", "avx512_f": True, "avx512_bf16": False, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: emulating)
    assert not bfloat16_is_native()


DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16, marks=pytest.mark.skipif(not bfloat16_is_native(), reason="this CPU emulates bfloat16")
    ),
]
# Sums are rounded in another order.
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2}}


def ready(layers: Mlp, dtype: torch.dtype) -> Mlp:
    return layers.to(dtype).requires_grad_(False).eval()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 5)], ids=str)
@pytest.mark.parametrize("relu_at_end", [False, True])
def test_packed_layers_give_what_plain_ones_give(dtype, shape, relu_at_end):
    torch.manual_seed(4)
    layers = ready(Mlp(13, [8, 5], relu_at_end=relu_at_end), dtype)
    # A part of wider rows, as the dense inputs are.
    x = torch.randn(*shape, 40).to(dtype)[..., :13]
    with torch.inference_mode():
        expected = layers(x)
        layers.pack()
        found = layers(x)
    assert found.shape == expected.shape
    assert found.dtype == dtype
    if relu_at_end:
        assert not (found < 0).any()
    torch.testing.assert_close(found, expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [[], [8], [8, 4]], ids=str)
def test_a_packed_head_ends_in_a_float32_logit(dtype, hidden):
    torch.manual_seed(5)
    head, x = ready(LogitHead(6, hidden), dtype), torch.randn(9, 6).to(dtype)
    with torch.inference_mode():
        expected = head(x)
        head.pack()
        found = head(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_a_loaded_model_scores_as_the_one_that_was_built(kind):
    spec = ranking_spec(kind)
    tensors, inputs = random_tensors(spec), random_inputs(spec, [4, 1, 3])
    built = build_model(spec)
    built.load_state_dict(tensors)
    loaded = load_model(spec, tensors)
    assert all(module._packed is not None for module in loaded.modules() if isinstance(module, Mlp))
    torch.testing.assert_close(loaded.score(inputs), built.score(inputs).detach(), rtol=1e-5, atol=1e-6)


def test_who_wants_gradients_gets_them():
    layers = ready(Mlp(4, [3], relu_at_end=True), torch.float32)
    layers.pack()
    x = torch.randn(2, 4, requires_grad=True)
    layers(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (2, 4)


def test_a_copy_is_not_packed_and_scores_the_same():
    spec = ranking_spec("dlrm")
    model, inputs = load_model(spec, random_tensors(spec)), random_inputs(spec, [3])
    twin = copy.deepcopy(model)
    assert all(module._packed is None for module in twin.modules() if isinstance(module, Mlp))
    torch.testing.assert_close(twin.score(inputs), model.score(inputs), rtol=1e-5, atol=1e-6)
    twin.pack()
    assert torch.equal(twin.score(inputs), model.score(inputs))


def test_only_weights_on_the_cpu_of_its_number_formats_are_packed():
    assert not can_pack(torch.empty(2, 2, device="meta"))
    assert not can_pack(torch.empty(2, 2, dtype=torch.float64))
    spec = ranking_spec("mlp")
    elsewhere = DeviceCopies(load_model(spec, random_tensors(spec))).on(torch.device("meta"))
    assert all(module._packed is None for module in elsewhere.modules() if isinstance(module, Mlp))


def test_layers_without_bias_can_be_packed():
    layers = Mlp(3, [2], relu_at_end=False)
    layers.layers[0] = torch.nn.Linear(3, 2, bias=False)
    x = torch.randn(4, 3)
    with torch.inference_mode():
        expected = layers(x)
        layers.pack()
        torch.testing.assert_close(layers(x), expected)


OTHER = torch.device("meta")


def test_the_original_is_the_copy_for_the_cpu():
    spec = ranking_spec("dlrm")
    model = load_model(spec, random_tensors(spec))
    assert DeviceCopies(model).on(CPU) is model


def test_each_device_has_one_copy_and_the_original_stays_where_it_is():
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


def test_inputs_go_to_a_device_whole_or_stay_as_they_are():
    inputs = random_inputs(ranking_spec("target_attention"), [2, 3])
    assert inputs.on(CPU) is inputs
    moved = inputs.on(OTHER)
    sequence = moved.sequences["history"]
    for tensor in (moved.columns, moved.request_of_candidate, sequence.rows, sequence.mask):
        assert tensor.device == OTHER
    assert (moved.dense_width, moved.embedding_width) == (inputs.dense_width, inputs.embedding_width)
