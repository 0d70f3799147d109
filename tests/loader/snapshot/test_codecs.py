"""Rows survive being stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from loader.snapshot.codecs import RowCodec
from shardrank_testing.snapshots import random_rows

UNPACK = {
    "int8": torch.ops.quantized.embedding_bag_byte_unpack,
    "int4": torch.ops.quantized.embedding_bag_4bit_unpack,
}
ROW_BYTES = {"int8": 40, "int4": 20, "fp16": 64, "fp32": 128}


@st.composite
def finite_rows(draw, max_dim=40):
    dim = 2 * draw(st.integers(1, max_dim // 2))
    num_rows = draw(st.integers(0, 9))
    elements = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
    return draw(hnp.arrays(np.float32, (num_rows, dim), elements=elements))


@pytest.mark.parametrize("dtype", ROW_BYTES)
def test_a_row_takes_the_bytes_its_layout_says(dtype):
    codec = RowCodec(dtype, 32)
    assert codec.row_bytes == ROW_BYTES[dtype]
    assert codec.encode(random_rows(np.random.default_rng(0), 5, 32)).shape == (5, ROW_BYTES[dtype])


@pytest.mark.parametrize("dtype", UNPACK)
@given(rows=finite_rows())
def test_decoding_agrees_with_the_unpack_op(dtype, rows):
    stored = RowCodec(dtype, rows.shape[1]).encode(rows)
    decoded = RowCodec(dtype, rows.shape[1]).decode(stored)
    expected = UNPACK[dtype](torch.from_numpy(stored)).numpy()
    largest = max(float(np.abs(rows).max(initial=0)), 1.0)
    # The op may fuse the multiplication and the addition, which rounds once instead of twice.
    np.testing.assert_allclose(decoded, expected, rtol=0, atol=4 * largest * np.finfo(np.float32).eps)


@given(rows=finite_rows())
def test_int8_bytes_follow_the_published_formula(rows):
    dim = rows.shape[1]
    low, high = rows.min(axis=1, keepdims=True, initial=np.inf), rows.max(axis=1, keepdims=True, initial=-np.inf)
    spread = high - low
    codes = np.rint((rows - low) * (np.float32(255) / (spread + np.float32(1e-8))))
    stored = RowCodec("int8", dim).encode(rows)
    tail = stored[:, dim:].copy().view("<f4")
    np.testing.assert_array_equal(tail, np.hstack([spread / np.float32(255), low]))
    np.testing.assert_array_equal(stored[:, :dim], codes)


def test_int4_bytes_follow_the_published_formula():
    rows = random_rows(np.random.default_rng(3), 500, 12)
    low = rows.min(axis=1, keepdims=True).astype(np.float16).astype(np.float32)
    scale = ((rows.max(axis=1, keepdims=True) - low) / np.float32(15)).astype(np.float16)
    codes = np.clip(np.rint((rows - low) * (np.float32(1) / scale.astype(np.float32))), 0, 15).astype(np.uint8)
    stored = RowCodec("int4", 12).encode(rows)
    np.testing.assert_array_equal(stored[:, :6], codes[:, 0::2] | codes[:, 1::2] << 4)
    np.testing.assert_array_equal(stored[:, 6:].copy().view("<f2"), np.hstack([scale, low.astype(np.float16)]))


@pytest.mark.parametrize(("dtype", "item"), [("fp16", "<f2"), ("fp32", "<f4")])
def test_float_rows_are_plain_little_endian_numbers(dtype, item):
    rows = random_rows(np.random.default_rng(2), 7, 5)
    codec = RowCodec(dtype, 5)
    assert codec.encode(rows).tobytes() == rows.astype(item).tobytes()
    np.testing.assert_array_equal(codec.decode(codec.encode(rows)), rows.astype(item).astype(np.float32))


def test_read_only_and_strided_blocks_are_encoded_alike():
    rows = random_rows(np.random.default_rng(4), 6, 8)
    expected = RowCodec("int8", 8).encode(rows.copy())
    rows.flags.writeable = False
    np.testing.assert_array_equal(RowCodec("int8", 8).encode(rows), expected)
    np.testing.assert_array_equal(RowCodec("int8", 8).encode(np.asfortranarray(rows)), expected)


@pytest.mark.parametrize(
    ("dtype", "row"),
    [
        ("int8", [3e38, -3e38, 0, 0]),
        ("int4", [1e5, 1e5, 1e5, 1e5]),  # the bias itself is beyond float16
        ("int4", [0, 0, 0, 2e6]),
        ("fp16", [0, 70000, 0, 0]),
        ("fp32", [0, np.nan, 0, 0]),
        ("fp32", [np.inf, 0, 0, 0]),
    ],
)
def test_a_row_that_its_dtype_cannot_hold_is_found(dtype, row):
    rows = np.zeros((5, 4), np.float32)
    rows[3] = row
    codec = RowCodec(dtype, 4)
    assert codec.first_non_finite(codec.encode(rows)) == 3
    assert codec.first_non_finite(codec.encode(rows[:3])) is None


def test_a_stored_scale_whose_largest_code_overflows_is_found():
    stored = np.zeros((2, 12), np.uint8)
    stored[1, 4:] = np.array([3e38, 0], "<f4").view(np.uint8)
    assert RowCodec("int8", 4).first_non_finite(stored) == 1
