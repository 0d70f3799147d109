"""How rows lie on cards (nothing lost, nothing read beyond a row, every row aligned), and what a launch is given."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.snapshot.codecs import codec_for
from shard_node.cuda.kernel_params import (
    SWITCH_VALUES,
    ArenaParams,
    BatchParams,
    KernelSwitches,
    RowFormat,
    WriteParams,
    pointers_to,
)
from shard_node.errors import DeviceChoiceError, InvalidBagsError
from shardrank_testing.card_plans import DTYPES
from shardrank_testing.rows_on_cards import restored


def formats():
    dims = st.integers(1, 512)
    return st.builds(RowFormat.of, st.sampled_from(DTYPES[:1] + DTYPES[2:]), dims) | st.builds(
        RowFormat.of, st.just("int4"), dims.map(lambda dim: 2 * dim)
    )


def stored_rows(fmt, num_rows, seed):
    return np.random.default_rng(seed).integers(0, 256, (num_rows, fmt.row_bytes), np.uint8)


@given(fmt=formats(), num_rows=st.integers(0, 9), seed=st.integers(0, 2**32 - 1))
def test_rows_come_back_byte_for_byte(fmt, num_rows, seed):
    stored = stored_rows(fmt, num_rows, seed)
    out = np.full((num_rows, fmt.stride), 0xAB, np.uint8)
    assert fmt.relay(stored, out) is out
    np.testing.assert_array_equal(out, fmt.relay(stored))
    np.testing.assert_array_equal(restored(fmt, out), stored)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dim_up_to_512_comes_back(dtype):
    for dim in range(2 if dtype == "int4" else 1, 513, 2 if dtype == "int4" else 1):
        fmt = RowFormat.of(dtype, dim)
        stored = stored_rows(fmt, 3, dim)
        np.testing.assert_array_equal(restored(fmt, fmt.relay(stored)), stored)


@given(fmt=formats(), seed=st.integers(0, 2**32 - 1))
def test_padding_is_zero_and_nothing_else_is(fmt, seed):
    stored = np.maximum(stored_rows(fmt, 4, seed), 1)
    relaid = fmt.relay(stored)
    assert (relaid != 0).sum(axis=1).tolist() == [fmt.row_bytes] * 4


@given(fmt=formats())
def test_rows_are_aligned_and_as_short_as_that_allows(fmt):
    assert fmt.stride % 16 == 0
    assert fmt.stride - 16 < fmt.tail_offset + fmt.tail_bytes <= fmt.stride
    assert fmt.tail_offset % (fmt.tail_bytes or 1) == 0
    assert 0 <= fmt.tail_offset - fmt.code_bytes < (fmt.tail_bytes or 1)
    assert 16 * (fmt.chunks - 1) < fmt.code_bytes <= 16 * fmt.chunks <= fmt.stride


@pytest.mark.parametrize(
    ("dtype", "dim", "tail_offset", "stride", "chunks"),
    [
        ("int8", 8, 8, 16, 1),
        ("int8", 9, 16, 32, 1),
        ("int8", 64, 64, 80, 4),
        ("int8", 128, 128, 144, 8),
        ("int4", 2, 4, 16, 1),
        ("int4", 24, 12, 16, 1),
        ("int4", 64, 32, 48, 2),
        ("fp16", 64, 128, 128, 8),
        ("fp16", 1, 2, 16, 1),
        ("fp32", 64, 256, 256, 16),
    ],
)
def test_known_rows_have_known_sizes(dtype, dim, tail_offset, stride, chunks):
    fmt = RowFormat.of(dtype, dim)
    assert (fmt.tail_offset, fmt.stride, fmt.chunks) == (tail_offset, stride, chunks)


@pytest.mark.parametrize(("dtype", "kind", "top"), [("int8", "<f4", 255), ("int4", "<f2", 15)])
def test_scale_and_bias_lie_where_the_format_says(dtype, kind, top):
    dim = 10
    fmt = RowFormat.of(dtype, dim)
    codec = codec_for(dtype, dim)
    rows = np.random.default_rng(1).standard_normal((5, dim), np.float32)
    relaid = fmt.relay(codec.encode(rows))
    tail = relaid[:, fmt.tail_offset : fmt.tail_offset + fmt.tail_bytes].copy().view(kind).astype(np.float32)
    codes = relaid[:, : fmt.code_bytes]
    if dtype == "int4":
        codes = np.stack([codes & 15, codes >> 4], axis=2).reshape(5, dim)
    assert codes.max() == top
    np.testing.assert_array_equal(codes * tail[:, :1] + tail[:, 1:], codec.decode(codec.encode(rows)))


@pytest.mark.parametrize(
    "bad", [np.zeros((2, 71), np.uint8), np.zeros((2, 72), np.int8), np.zeros((2, 72, 1), np.uint8)]
)
def test_rows_of_another_shape_or_dtype_are_refused(bad):
    fmt = RowFormat.of("int8", 64)
    with pytest.raises(InvalidBagsError, match=r"stored must be uint8 \[2, 72\], got"):
        fmt.relay(bad)
    with pytest.raises(InvalidBagsError, match=r"out must be uint8 \[2, 80\], got"):
        fmt.relay(np.zeros((2, 72), np.uint8), bad)


def test_switches_as_the_product_has_them_change_nothing_of_the_source():
    assert KernelSwitches().defines() == ()
    assert KernelSwitches(l2_fetch_bytes=64).defines() == ()
    switches = KernelSwitches(bags_per_lane_group=4, absolute_bases=True)
    assert switches.defines() == ("-DBAGS_PER_LANE_GROUP=4", "-DABSOLUTE_BASES=1")


def test_switches_decide_how_many_bags_a_thread_block_has():
    shares = [KernelSwitches(), KernelSwitches(bags_per_lane_group=4), KernelSwitches(lane_groups_per_bag=4)]
    assert [one.bags_per_block(2) for one in shares] == [64, 256, 16]
    assert [one.bags_per_block(5) for one in shares] == [8, 32, 2]


@pytest.mark.parametrize("name", sorted(SWITCH_VALUES))
def test_a_switch_with_a_value_that_it_has_not_is_refused(name):
    for value in SWITCH_VALUES[name]:
        assert KernelSwitches.of({name: value}).turned() == ({name: value} if value != SWITCH_VALUES[name][0] else {})
    with pytest.raises(DeviceChoiceError, match=rf"kernel switch {name}=3 is none of {SWITCH_VALUES[name][0]}, "):
        KernelSwitches.of({name: 3})


def test_a_switch_that_there_is_not_is_refused():
    with pytest.raises(DeviceChoiceError, match="kernel switch 'bags' is none of bags_per_lane_group, lane_groups_per"):
        KernelSwitches.of({"bags": 2})
    assert KernelSwitches.of({}) == KernelSwitches()


def test_switches_that_do_not_go_together_are_refused():
    with pytest.raises(DeviceChoiceError, match="one of them must be 1"):
        KernelSwitches(bags_per_lane_group=2, lane_groups_per_bag=4)


KINDS = (ArenaParams, BatchParams, WriteParams)


@given(st.lists(st.sampled_from(KINDS).flatmap(lambda kind: st.tuples(st.just(kind), st.randoms())), max_size=5))
def test_a_launch_finds_every_structure_behind_its_pointer(drawn):
    params = [kind.from_buffer_copy(random.randbytes(ctypes.sizeof(kind))) for kind, random in drawn]
    pointers = pointers_to(params)
    # As cuLaunchKernel reads them: an array of void *, without its length.
    found = ctypes.cast(ctypes.addressof(pointers), ctypes.POINTER(ctypes.c_void_p)) if params else []
    assert [ctypes.string_at(found[i], ctypes.sizeof(one)) for i, one in enumerate(params)] == list(map(bytes, params))
