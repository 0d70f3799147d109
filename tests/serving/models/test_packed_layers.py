"""Layers made ready for the CPU give what they gave before, and only where that is allowed."""

from __future__ import annotations

import copy

import pytest
import torch

from serving.models.ranking_models import (
    DeviceCopies,
    LogitHead,
    Mlp,
    bfloat16_is_native,
    build_model,
    can_pack,
    load_model,
)
from shardrank_testing.ranking import CONFIGS, random_inputs, random_tensors, ranking_spec

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
