"""Layers made ready for scoring: packed, in int8, with columns read once a request."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.models import layers
from serving.models.layers import (
    SAMPLED,
    Int8Product,
    Linear,
    Mlp,
    PackedProduct,
    PlainProduct,
    Shared,
    Steps,
    bfloat16_is_native,
    choose_dtype,
    input_dtype,
    int8_is_faster,
    int8_is_there,
)
from shardrank_testing.ranking import needs_int8

FORMATS = [
    "float32",
    pytest.param("bfloat16", marks=pytest.mark.skipif(not bfloat16_is_native(), reason="this CPU emulates bfloat16")),
]
# Sums are rounded in another order.
TOLERANCES = {"float32": {"rtol": 1e-5, "atol": 1e-5}, "bfloat16": {"rtol": 1e-2, "atol": 1e-2}}


def ready(module: torch.nn.Module, number_format: str) -> torch.nn.Module:
    module.requires_grad_(False).eval()
    for one in module.modules():
        if isinstance(one, Linear):
            one.pack(number_format)
    return module


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 5)], ids=str)
@pytest.mark.parametrize("relu_at_end", [False, True])
def test_packed_layers_give_what_plain_ones_give(number_format, shape, relu_at_end):
    torch.manual_seed(4)
    dtype = input_dtype(number_format)
    mlp = Mlp(13, [8, 5], "relu" if relu_at_end else "linear").to(dtype)
    # A part of wider rows, as the dense inputs are.
    x = torch.randn(*shape, 40).to(dtype)[..., :13]
    with torch.inference_mode():
        expected = mlp(x)
        found = ready(mlp, number_format)(x)
    assert found.shape == expected.shape
    assert found.dtype == dtype
    if relu_at_end:
        assert not (found < 0).any()
    torch.testing.assert_close(found, expected, **TOLERANCES[number_format])


@pytest.mark.parametrize(("vnni", "amx", "faster"), [(True, False, True), (True, True, False), (False, False, False)])
def test_int8_counts_as_faster_with_vnni_alone(monkeypatch, vnni, amx, faster) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_vnni": vnni, "amx_bf16": amx})
    assert int8_is_faster() is faster


@pytest.mark.parametrize(("inputs", "outputs", "gains"), [(1677, 256, True), (256, 64, True), (128, 64, False)])
def test_only_wide_layers_gain_by_int8(inputs, outputs, gains) -> None:
    assert Linear(inputs, outputs).may_be_int8 is gains
    assert not Linear(inputs, outputs, is_exact=True).may_be_int8


@given(st.floats(1e-20, 1e20), st.booleans())
def test_a_step_is_a_power_of_the_root_of_two_with_room_for_more(magnitude, is_signed):
    least, most = torch.tensor(-magnitude if is_signed else 0.0), torch.tensor(magnitude)
    steps = Steps.of(least, most)
    step = float(steps.step)
    assert 2 * math.log2(step) == pytest.approx(round(2 * math.log2(step)), abs=1e-5)
    reach = step * (255 - steps.zero)
    assert 1.24 * magnitude <= reach <= 1.78 * magnitude
    assert steps.zero == (128 if is_signed else 0)
    # Which codes there are does not depend on the last bit of a number.
    following = float(Steps.of(least, torch.nextafter(most, torch.tensor(0.0))).step)
    assert following == step or following == pytest.approx(step / math.sqrt(2))


@given(st.integers(0, 20), st.integers(1, 40), st.integers(0, 10_000), st.booleans(), st.booleans())
def test_codes_are_the_nearest_that_there_are(rows, columns, seed, is_signed, by_column):
    draw = torch.Generator().manual_seed(seed)
    x = 40.0 * torch.randn(rows, columns, generator=draw)
    step = torch.exp2(torch.randint(-6, 1, (columns,) if by_column else (), generator=draw).float())
    steps = Steps(step, 128 if is_signed else 0)
    expected = np.clip(np.rint(x.numpy() / step.numpy()) + steps.zero, 0, 255)
    np.testing.assert_array_equal(steps.codes(x).numpy(), expected)


def int8_bound(weight: torch.Tensor, x: torch.Tensor, steps: Steps) -> torch.Tensor:
    """Half a step of each input, and of each weight, for every product."""
    folded = weight * steps.step
    step_w = folded.abs().amax(1) / 127
    codes = (x / steps.step).abs() + 0.5
    return 0.5 * (folded.abs().sum(1) + step_w * codes.sum(1, keepdim=True)) * 1.01 + 1e-4


@needs_int8
@given(
    st.integers(0, 20),
    st.integers(1, 70),
    st.integers(1, 40),
    st.integers(0, 10_000),
    st.sampled_from(["none", "bias", "rows"]),
    st.booleans(),
    st.booleans(),
)
def test_int8_sums_are_within_the_rounding_of_both_factors(rows, inputs, outputs, seed, adds, relu, by_column):
    draw = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(outputs, inputs, generator=draw), torch.randn(rows, inputs, generator=draw)
    least, most = (x.amin(0), x.amax(0)) if rows else (torch.zeros(inputs), torch.ones(inputs))
    steps = Steps.of(least, most) if by_column else Steps.of(least.amin(), most.amax())
    more = {"none": None, "bias": torch.randn(outputs), "rows": torch.randn(rows, outputs)}[adds]
    expected = PlainProduct(weight)(x, None if more is None else more.clone(), relu)
    product = Int8Product(weight, steps, torch.float32)
    found = product(x, more, relu)
    assert found.dtype == torch.float32
    assert ((found - expected).abs() <= int8_bound(weight, x, steps)).all()
    # Codes and the numbers that they are of give the same, and so do three dimensions.
    assert torch.equal(product(steps.codes(x), more, relu), found)
    assert torch.equal(product(x[None], None, relu), product(x, None, relu)[None])


def test_an_int8_layer_returns_the_codes_that_the_next_one_reads():
    torch.manual_seed(3)
    weight, x, bias = torch.randn(24, 32), torch.rand(9, 32), torch.randn(24)
    steps = Steps.of(torch.tensor(0.0), torch.tensor(1.0))
    numbers = Int8Product(weight, steps, torch.float32)(x, bias, True)
    following = Steps.of(numbers.amin(), numbers.amax())
    codes = Int8Product(weight, steps, following)(x, bias, True)
    assert codes.dtype == torch.uint8
    assert (codes.int() - following.codes(numbers).int()).abs().max() <= 1


def test_inputs_beyond_the_codes_are_counted_in_some_calls():
    product = Int8Product(torch.ones(4, 8), Steps(torch.tensor(1.0), 128), torch.float32)
    x = torch.zeros(2, 8)
    x[0, 0], x[1, 3], x[1, 4] = 400.0, -400.0, 100.0
    for _ in range(SAMPLED + 1):
        product(x, None, False)
    assert product.take_sampled() == (32, 4)
    assert product.take_sampled() == (0, 0)


@needs_int8
def test_a_build_whose_operators_are_others_has_no_int8_layers(monkeypatch, caplog):
    assert int8_is_there()
    int8_is_there.cache_clear()
    monkeypatch.setattr(layers, "codes_of", lambda x, step, zero: torch.full_like(x, 7, dtype=torch.uint8))
    try:
        assert not int8_is_there()
        assert [record.message for record in caplog.records if "no int8 layers" in record.message]
        assert choose_dtype("int8") == choose_dtype("auto") != "int8"
    finally:
        int8_is_there.cache_clear()


@pytest.mark.parametrize("product", [PlainProduct, PackedProduct])
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


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(-6, 6)), min_size=1, max_size=12))
def test_neighbours_share_a_step_where_it_costs_none_more_than_a_bit(features):
    ends = np.cumsum([width for width, _ in features])
    columns = [slice(int(end) - width, int(end)) for end, (width, _) in zip(ends, features, strict=True)]
    before = torch.cat([torch.full((width,), 2.0**exponent) for width, exponent in features])
    rest = torch.tensor([0.125, 3.0])
    steps = Steps(torch.cat([before, rest]), 0)
    steps.join(columns)
    after, added = steps.step[: before.numel()], steps.step[before.numel() :]
    assert added.tolist() == rest.tolist()
    assert ((after == before) | (after == 2 * before)).all()
    chosen = [float(after[of_feature.start]) for of_feature in columns]
    for of_feature, step in zip(columns, chosen, strict=True):
        assert (after[of_feature] == step).all()
    # Between two runs there is a feature that the other run's step would cost more than that, or that reaches further.
    given_steps = [2.0**exponent for _, exponent in features]
    first = 0
    for number in range(1, len(features) + 1):
        of_run = given_steps[first : number + 1]
        if number == len(features) or max(of_run) > 2 * min(of_run):
            assert chosen[first:number] == [max(given_steps[first:number])] * (number - first)
            first = number
