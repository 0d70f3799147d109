"""Every row is in the bucket that the format page says, and lies in its file where the buckets' order puts it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.snapshot.buckets import RowBuckets, default_rows_per_file
from shardrank_testing.snapshots import num_buckets, one_table_spec, plain_buckets

BUCKETINGS = st.sampled_from(["mixed", "range"])


@given(st.integers(1, 2**32 - 1), BUCKETINGS, st.integers(0, 2**32))
def test_the_bucket_of_a_row_follows_the_formula(num_embeddings, bucketing, seed):
    table = one_table_spec(num_embeddings, bucketing=bucketing).tables[0]
    rows = np.random.default_rng(seed).integers(0, num_embeddings, 200)
    np.testing.assert_array_equal(RowBuckets.of(table).of_rows(rows), plain_buckets(table, rows))


@given(
    num_embeddings=st.integers(1, 20_000),
    rows_per_file=st.sampled_from([256, 512, 1024, 4096, 8192]),
    bucketing=BUCKETINGS,
    seed=st.integers(0, 2**32),
)
def test_buckets_follow_each_other_and_rows_ascend_in_them(num_embeddings, rows_per_file, bucketing, seed):
    table = one_table_spec(num_embeddings, bucketing=bucketing).tables[0]
    rows_per_file = max(rows_per_file, num_buckets(table)) if bucketing == "mixed" else rows_per_file
    buckets, bucket_of = RowBuckets.of(table), plain_buckets(table)
    for file_index in range(-(-num_embeddings // rows_per_file)):
        order = buckets.in_file(rows_per_file, file_index)
        rows = min(rows_per_file, num_embeddings - file_index * rows_per_file)
        absolute = file_index * rows_per_file + np.arange(rows)
        expected = absolute[np.lexsort((absolute, bucket_of[absolute]))]
        assert order.num_rows == rows
        np.testing.assert_array_equal(order.rows_at(np.arange(rows)), expected)
        np.testing.assert_array_equal(expected[order.positions(np.arange(rows))], absolute)
        counts = np.bincount(bucket_of[absolute], minlength=buckets.count)
        np.testing.assert_array_equal(order.starts, np.concatenate([[0], np.cumsum(counts)]))
        chosen = np.random.default_rng(seed).random(buckets.count) < 0.3
        positions = order.positions_of(chosen)
        np.testing.assert_array_equal(positions, np.flatnonzero(chosen[bucket_of[expected]]))
        np.testing.assert_array_equal(order.rows_at(positions), expected[positions])
        if rows:
            assert order.rows_at(np.array([rows - 1])) == expected[-1]


@pytest.mark.parametrize("shards", [2, 3, 4, 16, 64])
def test_mixed_buckets_divide_every_stride_of_rows_evenly(shards):
    table = one_table_spec(4_000_000, bucketing="mixed").tables[0]
    for stride in (1, 3, 256, 4096, 65_536):
        # Buckets of row numbers modulo 4,096 would give the last two strides to one shard.
        owners = RowBuckets.of(table).of_rows(np.arange(0, 4_000_000, stride)) * shards // 4096
        counts = np.bincount(owners, minlength=shards)
        if counts.sum() > 100 * shards:
            assert counts.max() < 1.5 * counts.mean()


def test_the_worked_example_of_the_format_page_holds():
    mixed = RowBuckets.of(one_table_spec(10_000, bucketing="mixed").tables[0])
    assert mixed.of_rows(np.array([0, 1, 4095, 4096, 9999])).tolist() == [2956, 2957, 1139, 3326, 1416]


@pytest.mark.parametrize(
    ("num_embeddings", "row_bytes", "bucketing", "expected"),
    [
        (1, 72, "range", 256),
        (256, 72, "range", 256),
        (257, 72, "range", 512),
        (257, 72, "mixed", 4096),
        (10**9, 72, "mixed", 1 << 21),
        (10**9, 128, "range", 1 << 21),
        (10**9, 129, "mixed", 1 << 20),
        (10**9, 1 << 20, "range", 256),
        (10**9, 1 << 20, "mixed", 4096),
    ],
)
def test_default_files_hold_at_most_256_mib(num_embeddings, row_bytes, bucketing, expected):
    table = one_table_spec(num_embeddings, bucketing=bucketing).tables[0]
    assert default_rows_per_file(table, row_bytes) == expected
