from __future__ import annotations

import pytest
import torch

from serving.errors import RankingModelError
from serving.models import ranking_models
from serving.models.inputs import RankingInputs
from serving.models.ranking_models import bfloat16_is_native, build_model, choose_dtype, load_model
from shardrank_testing.ranking import CONFIGS, compare_dtypes, converted, random_inputs, random_tensors, ranking_spec

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
