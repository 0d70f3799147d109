"""Layers made ready for scoring: packed, in int8, with columns read once a request."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.models.layers import (
    Int8Product,
    Linear,
    Mlp,
    PackedProduct,
    PlainProduct,
    Shared,
    bfloat16_is_native,
    input_dtype,
    int8_is_faster,
)

FORMATS = [
    "float32",
    pytest.param("bfloat16", marks=pytest.mark.skipif(not bfloat16_is_native(), reason="this CPU emulates bfloat16")),
]
# Sums are rounded in another order.
TOLERANCES = {"float32": {"rtol": 1e-5, "atol": 1e-5}, "bfloat16": {"rtol": 1e-2, "atol": 1e-2}}


def ready(layers: torch.nn.Module, number_format: str) -> torch.nn.Module:
    layers.requires_grad_(False).eval()
    for one in layers.modules():
        if isinstance(one, Linear):
            one.pack(number_format)
    return layers


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 5)], ids=str)
@pytest.mark.parametrize("relu_at_end", [False, True])
def test_packed_layers_give_what_plain_ones_give(number_format, shape, relu_at_end):
    torch.manual_seed(4)
    dtype = input_dtype(number_format)
    layers = Mlp(13, [8, 5], "relu" if relu_at_end else "linear").to(dtype)
    # A part of wider rows, as the dense inputs are.
    x = torch.randn(*shape, 40).to(dtype)[..., :13]
    with torch.inference_mode():
        expected = layers(x)
        found = ready(layers, number_format)(x)
    assert found.shape == expected.shape
    assert found.dtype == dtype
    if relu_at_end:
        assert not (found < 0).any()
    torch.testing.assert_close(found, expected, **TOLERANCES[number_format])


@pytest.mark.parametrize(("vnni", "amx", "faster"), [(True, False, True), (True, True, False), (False, False, False)])
def test_int8_counts_as_faster_with_vnni_alone(monkeypatch, vnni, amx, faster) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_vnni": vnni, "amx_bf16": amx})
    assert int8_is_faster() is faster


@pytest.mark.parametrize(("inputs", "outputs", "gains"), [(1677, 256, True), (1677, 64, False), (416, 256, False)])
def test_only_wide_layers_gain_by_int8(inputs, outputs, gains) -> None:
    assert Linear(inputs, outputs).requires_grad_(False).pack("int8") is gains


@given(st.integers(0, 20), st.integers(2, 70), st.integers(1, 40), st.integers(0, 10_000), st.booleans(), st.booleans())
def test_int8_sums_are_within_the_rounding_of_both_factors(rows, inputs, outputs, seed, has_bias, relu):
    draw = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(outputs, inputs, generator=draw), torch.randn(rows, inputs, generator=draw)
    # Rows of zeros have no scale.
    x[::5] = 0.0
    bias = torch.randn(outputs, generator=draw) if has_bias else None
    found = Int8Product(weight)(x, bias, relu)
    expected = PlainProduct(weight)(x, bias, relu)
    # Half a step of each row of inputs, and of each row of weights, for every product.
    step_x = x.abs().amax(1, keepdim=True) / 127 if inputs else x[:, :1]
    step_w = weight.abs().amax(1) / 127
    bound = 0.5 * (step_x * weight.abs().sum(1) + step_w * x.abs().sum(1, keepdim=True) + inputs * step_x * step_w)
    assert found.dtype == x.dtype
    assert ((found - expected).abs() <= bound * 1.01 + 1e-5).all()


@pytest.mark.parametrize("product", [PlainProduct, PackedProduct, Int8Product])
@pytest.mark.parametrize("relu", [False, True])
def test_a_product_adds_what_each_row_has_besides(product, relu):
    torch.manual_seed(2)
    weight, x, more = torch.randn(5, 9), torch.randn(7, 9), torch.randn(7, 5)
    made = product(weight)
    expected = made(x, None, False) + more
    found = made(x, more.clone(), relu)
    torch.testing.assert_close(found, expected.clamp(min=0) if relu else expected)


SIDES = st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(any)


@given(SIDES, st.lists(st.integers(0, 4), min_size=1, max_size=4), st.booleans(), st.integers(0, 10_000))
def test_columns_read_once_a_request_are_those_of_each_row(widths, counts, is_packed, seed):
    rng = np.random.default_rng(seed)
    order = rng.permutation(sum(widths))
    columns = [np.append(order[: widths[0]], -1), np.append(order[widths[0] :], -1)]
    # A side without columns has no padding either.
    columns = [one if width else one[:0] for one, width in zip(columns, widths, strict=True)]
    outputs = rng.permutation(5)[:4]
    layer = Linear(sum(widths), 5, relu=True, context=columns[0], rows=columns[1], outputs=outputs)
    owner = np.repeat(np.arange(len(counts)), counts)
    full = torch.randn(len(owner), sum(widths))
    per_request = torch.randn(len(counts), sum(widths))
    full[:, columns[0][columns[0] >= 0]] = per_request[owner][:, columns[0][columns[0] >= 0]]
    # What stands in padding does not count.
    rows = torch.cat([full, torch.full((len(owner), 1), 7.0)], dim=1)[:, columns[1]]
    context = torch.cat([per_request, torch.full((len(counts), 1), 7.0)], dim=1)[:, columns[0]]
    expected = torch.nn.functional.linear(full, layer.weight, layer.bias)[:, outputs].clamp(min=0).detach()
    with torch.inference_mode():
        if is_packed:
            layer.requires_grad_(False).pack("float32")
        found = layer(rows, Shared(context, torch.from_numpy(owner)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
