"""A trainer's rows become the bytes that an export would store, or an error that names the row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.deltas.batch import encode_rows
from loader.errors import DeltaFormatError
from loader.snapshot.manifest import TableSpec
from shardrank_testing.deltas import encoded

DTYPES = ["int8", "int4", "fp16", "fp32"]


def table_of(dtype: str = "int8") -> TableSpec:
    return TableSpec(name="t", num_embeddings=50, embedding_dim=4, feature_names=("f",), dtype=dtype)


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 49), max_size=80), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_rows_are_those_of_a_table_that_was_written_in_that_order(dtype, rows, seed):
    table = table_of(dtype)
    values = np.random.default_rng(seed).normal(size=(len(rows), 4)).astype(np.float32)
    written = np.zeros((50, 4), np.float32)
    for row, value in zip(rows, values, strict=True):
        written[row] = value
    numbers, stored = encode_rows(table, rows, values)
    assert numbers.tolist() == sorted(set(rows))
    np.testing.assert_array_equal(stored, encoded(table, written)[numbers])


def test_tensors_and_other_floats_are_taken():
    values = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    rows, stored = encode_rows(table_of(), [7, 3], values)
    assert rows.tolist() == [3, 7]
    parameter = torch.nn.Parameter(torch.from_numpy(values))
    for given_rows, given_values in (
        (torch.tensor([7, 3]), parameter),
        (torch.tensor([7, 3], dtype=torch.int32), torch.from_numpy(values).double()),
        (np.array([7, 3], np.uint64), values.astype(np.float64)),
    ):
        np.testing.assert_array_equal(encode_rows(table_of(), given_rows, given_values)[1], stored)
    halves = torch.from_numpy(values).bfloat16()
    np.testing.assert_array_equal(
        encode_rows(table_of(), [7, 3], halves)[1], encode_rows(table_of(), [7, 3], halves.float())[1]
    )


@pytest.mark.parametrize(
    ("rows", "values", "message"),
    [
        ([50], np.zeros((1, 4), np.float32), r"row 50 is not in 0\.\.49"),
        ([3, -1], np.zeros((2, 4), np.float32), r"row -1 is not in 0\.\.49"),
        (np.array([2**63], np.uint64), np.zeros((1, 4), np.float32), "row 9223372036854775808 is beyond any table"),
        ([1], np.zeros((1, 5), np.float32), r"values are \[1, 5\], expected \[1, 4\]"),
        ([1, 2], np.zeros((1, 4), np.float32), r"values are \[1, 4\], expected \[2, 4\]"),
        ([[1]], np.zeros((1, 4), np.float32), "rows must be flat whole numbers"),
        ([1.0], np.zeros((1, 4), np.float32), "rows must be flat whole numbers"),
        ([True], np.zeros((1, 4), np.float32), "rows must be flat whole numbers"),
        ([1], np.zeros((1, 4), np.int64), "values must be floats, got int64"),
        ([1], torch.zeros(1, 4, dtype=torch.int64), "values must be floats, got torch.int64"),
        ([4, 9], np.array([[0] * 4, [0, np.nan, 0, 0]], np.float32), "row 9 holds NaN, inf"),
        ([4, 9], np.array([[0, 0, np.inf, 0], [0] * 4], np.float32), "row 4 holds NaN, inf"),
        ([4], np.full((1, 4), 1e300), "row 4 holds NaN, inf"),
        ([1, 2], [[0.0] * 4, [0.0] * 3], "values are no array: .*inhomogeneous"),
        ([[1], [2, 3]], np.zeros((2, 4), np.float32), "rows are no array: .*inhomogeneous"),
    ],
)
def test_what_is_no_row_of_the_table_is_refused_by_name(rows, values, message):
    with pytest.raises(DeltaFormatError, match=f"table 't': .*{message}"):
        encode_rows(table_of(), rows, values)


@pytest.mark.parametrize(("dtype", "values"), [("fp16", [1e6, 0, 0, 0]), ("int8", [3e38, -3e38, 0, 0])])
def test_a_value_that_the_dtype_can_not_hold_is_refused(dtype, values):
    with pytest.raises(DeltaFormatError, match=rf"row 9 has values that {dtype} can't hold"):
        encode_rows(table_of(dtype), [2, 9], np.array([[0] * 4, values], np.float32))
