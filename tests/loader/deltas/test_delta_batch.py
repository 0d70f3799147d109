"""Deltas: rows that are encoded, and the bytes that carry them."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from loader.deltas.batch import MAX_BATCH_BYTES, MAX_BATCH_ROWS, DeltaBatch, rows_per_batch
from loader.errors import DeltaFormatError
from loader.snapshot.tables import TableSpec
from shardrank_testing.deltas import delta_spec, encode_rows, encoded, make_batch

DTYPES = ["int8", "int4", "fp16", "fp32"]
FIELDS = [name for name in DeltaBatch.__slots__ if name not in ("rows", "stored")]


@st.composite
def batches(draw) -> DeltaBatch:
    dtype = draw(st.sampled_from(DTYPES))
    column_dims = tuple(2 * dim for dim in draw(st.lists(st.integers(1, 20), min_size=2, max_size=6) | st.just([])))
    dim = sum(column_dims) or 2 * draw(st.integers(1, 40))
    rows = np.array(sorted(draw(st.sets(st.integers(0, 2**32 - 2), min_size=1, max_size=50))), np.int64)
    values = np.random.default_rng(draw(st.integers(0, 2**32))).normal(size=(rows.size, dim)).astype(np.float32)
    name = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,20}", fullmatch=True)
    return DeltaBatch(
        model=draw(name),
        delta_base=draw(st.integers(1, 2**63 - 1)),
        base_version=draw(st.integers(1, 2**63 - 1)),
        sequence=draw(st.integers(1, 2**53 - 1)),
        published_at=draw(st.floats(0, 1e12)),
        table=draw(name),
        dtype=dtype,
        embedding_dim=dim,
        rows=rows,
        stored=encode_rows(table_of(dtype, dim, column_dims, 2**32 - 1), rows, values)[1],
        column_dims=column_dims,
    )


def table_of(dtype: str = "int8", dim: int = 4, column_dims: tuple[int, ...] = (), rows: int = 50) -> TableSpec:
    return TableSpec(
        name="t",
        num_embeddings=rows,
        embedding_dim=dim,
        feature_names=("f",),
        dtype=dtype,
        column_dims=column_dims,
    )


def small_batch() -> DeltaBatch:
    values = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    return make_batch(delta_spec(), "int8", 7, [3, 200], values)


def with_checksum(body: bytes | bytearray) -> bytes:
    return b"SRDELTA1" + xxhash.xxh3_128_intdigest(bytes(body)).to_bytes(16, "little") + bytes(body)


@given(batches())
def test_what_is_decoded_is_what_was_encoded(batch):
    read = DeltaBatch.decode(batch.encode())
    assert [getattr(read, name) for name in FIELDS] == [getattr(batch, name) for name in FIELDS]
    np.testing.assert_array_equal(read.rows, batch.rows)
    np.testing.assert_array_equal(read.stored, batch.stored)
    assert read.rows.dtype == np.int64


def test_every_bit_flip_and_every_other_length_are_refused():
    payload = small_batch().encode()
    number = int.from_bytes(payload, "little")
    flipped = ((number ^ (1 << bit)).to_bytes(len(payload), "little") for bit in range(8 * len(payload)))
    for damaged in (*flipped, *(payload[:length] for length in range(len(payload))), payload + b"\0"):
        with pytest.raises(DeltaFormatError):
            DeltaBatch.decode(damaged)


@pytest.mark.parametrize(
    ("offset", "code", "value", "message"),
    [
        (0, "Q", 0, "sequence; allowed is 1 to"),
        (0, "Q", 2**53, "sequence; allowed is 1 to"),
        (8, "Q", 0, "delta_base 0 is not in"),
        (16, "Q", 2**63, r"base_version 9223372036854775808 is not in"),
        (24, "d", float("nan"), "published_at nan is no time"),
        (24, "d", -1.0, "published_at -1.0 is no time"),
        (32, "I", 2**32 - 1, "are stated"),
        (36, "I", 2**32 - 1, "are stated"),
        (40, "I", 0, "embedding_dim 0 is not in"),
        (40, "I", 2**32 - 1, "embedding_dim 4294967295 is not in"),
        (44, "H", 4, r"dtype 4; allowed is 0\.\.3"),
        (44, "H", 1, "stored rows are"),
        (46, "H", 65535, "are stated"),
        # Its rows, 3 and 200.
        *((at, "q", row, "rows must ascend within") for at, row in ((-40, -1), (-32, 3), (-32, 2), (-32, 2**32 - 1))),
    ],
)
def test_what_is_forged_with_a_right_checksum_is_refused(offset, code, value, message):
    body = bytearray(small_batch().encode()[24:])
    struct.pack_into("<" + code, body, offset, value)
    with pytest.raises(DeltaFormatError, match=message):
        DeltaBatch.decode(with_checksum(body))


def test_a_batch_has_at_most_8192_rows_and_4_mib():
    assert rows_per_batch(72) == MAX_BATCH_ROWS == 8192
    assert rows_per_batch(16 << 10) * (16 << 10) <= MAX_BATCH_BYTES
    assert rows_per_batch(MAX_BATCH_BYTES) == 1
    values = np.zeros((MAX_BATCH_ROWS + 1, 4), np.float32)
    spec = delta_spec(rows=10_000)
    make_batch(spec, "int8", 1, np.arange(MAX_BATCH_ROWS), values[:-1]).encode()
    with pytest.raises(DeltaFormatError, match="8193 rows of 12 bytes; allowed is 1 to 8192"):
        make_batch(spec, "int8", 1, np.arange(MAX_BATCH_ROWS + 1), values).encode()
    with pytest.raises(DeltaFormatError, match="0 rows"):
        make_batch(spec, "int8", 1, [], values[:0]).encode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int4"}, "has int4 rows of 4, the delta int8 of 4"),
        ({"embedding_dim": 8}, "has int8 rows of 8, the delta int8 of 4"),
        ({"num_embeddings": 200}, r"row 200 is not in 0\.\.199"),
    ],
)
def test_a_batch_for_another_table_than_it_says_is_refused(change, message):
    fits = table_of(rows=300)
    small_batch().check_table(fits)
    with pytest.raises(DeltaFormatError, match=message):
        small_batch().check_table(fits.model_copy(update=change))


def test_a_batch_of_rows_that_are_not_finite_is_refused():
    batch = small_batch()
    stored = batch.stored.copy()
    stored[1, 4:8] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
    with pytest.raises(DeltaFormatError, match="row 200 holds NaN or inf"):
        replace(batch, stored=stored).check_table(table_of(rows=300))


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 49), max_size=80), st.integers(0, 2**32))
def test_rows_are_those_of_a_table_written_in_that_order(dtype, rows, seed):
    table = table_of(dtype)
    values = np.random.default_rng(seed).normal(size=(len(rows), 4)).astype(np.float32)
    written = np.zeros((50, 4), np.float32)
    for row, value in zip(rows, values, strict=True):
        written[row] = value
    numbers, stored = encode_rows(table, rows, values)
    assert numbers.tolist() == sorted(set(rows))
    np.testing.assert_array_equal(stored, encoded(table, written)[numbers])


def test_rows_may_be_tensors_and_values_any_floats():
    values = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    rows, stored = encode_rows(table_of(), [7, 3], values)
    assert rows.tolist() == [3, 7]
    halves = torch.from_numpy(values).bfloat16()
    for given_rows, given_values, expected in (
        (torch.tensor([7, 3]), torch.nn.Parameter(torch.from_numpy(values)), stored),
        (torch.tensor([7, 3], dtype=torch.int32), torch.from_numpy(values).double(), stored),
        (np.array([7, 3], np.uint64), values.astype(np.float64), stored),
        ([7, 3], halves, encode_rows(table_of(), [7, 3], halves.float())[1]),
    ):
        np.testing.assert_array_equal(encode_rows(table_of(), given_rows, given_values)[1], expected)


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
        ([1], torch.zeros(1, 4, dtype=torch.int64), "values must be floats, got int64"),
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


def sliced_batch() -> tuple[TableSpec, np.ndarray, DeltaBatch]:
    """A table of two slices, float32 values of two rows [2, 10], and their delta."""
    table = table_of(dim=10, column_dims=(4, 6))
    values = np.random.default_rng(3).normal(size=(2, 10)).astype(np.float32)
    rows, stored = encode_rows(table, [3, 5], values)
    fields = {"table": "t", "embedding_dim": 10, "rows": rows, "stored": stored, "column_dims": (4, 6)}
    return table, values, replace(small_batch(), **fields)


def test_a_delta_of_a_sliced_table_has_the_rows_of_all_slices():
    table, values, batch = sliced_batch()
    slices = zip(table.slices, np.split(values, [4], axis=1), strict=True)
    np.testing.assert_array_equal(batch.stored, np.concatenate([encoded(*columns) for columns in slices], axis=1))
    read = DeltaBatch.decode(batch.encode())
    read.check_table(*table.slices)
    assert read.column_dims == (4, 6)


@pytest.mark.parametrize("column_dims", [(10,), (4, 7), (10, 0), (1,) * 33])
def test_slices_that_make_up_no_row_are_refused_by_both_ends(column_dims):
    *_, batch = sliced_batch()
    with pytest.raises(DeltaFormatError, match="columns in slices of"):
        replace(batch, column_dims=column_dims).encode()
    body = bytearray(batch.encode()[24:])
    struct.pack_into("<2I", body, 56, 3, 6)
    with pytest.raises(DeltaFormatError, match=r"10 columns in slices of 3 \+ 6"):
        DeltaBatch.decode(with_checksum(body))
