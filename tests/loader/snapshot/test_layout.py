"""Where rows lie in files: the vector form, the scalar form of `loader.snapshot.codecs`, and their reverse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.snapshot.codecs import (
    bucket_shift,
    bucket_start_in_file,
    default_rows_per_file,
    row_at_position,
    row_positions,
    rows_at_positions,
    rows_in_file,
)
from shardrank_testing.snapshots import one_table_spec


@settings(deadline=None, max_examples=60)
@given(
    num_embeddings=st.integers(1, 3000),
    rows_per_file=st.sampled_from([256, 512, 1024, 4096]),
    bucketing=st.sampled_from(["hash", "range"]),
)
def test_buckets_lie_one_after_the_other_and_rows_ascend_inside_them(num_embeddings, rows_per_file, bucketing):
    table = one_table_spec(num_embeddings, bucketing=bucketing).tables[0]
    shift = bucket_shift(bucketing, num_embeddings)
    for file_index in range(-(-num_embeddings // rows_per_file)):
        rows = rows_in_file(num_embeddings, rows_per_file, file_index)
        local_rows = np.arange(rows)
        absolute = file_index * rows_per_file + local_rows
        expected = np.lexsort((absolute, (absolute >> shift) & 255))  # by bucket, then by row
        positions = row_positions(table, rows_per_file, file_index, local_rows)
        np.testing.assert_array_equal(positions[expected], local_rows)
        starts = [bucket_start_in_file(table, rows_per_file, file_index, bucket) for bucket in range(257)]
        counts = np.bincount((absolute >> shift) & 255, minlength=256)
        np.testing.assert_array_equal(starts, np.concatenate([[0], np.cumsum(counts)]))
        begin, end = rows // 3, rows - rows // 5
        read = rows_at_positions(table, rows_per_file, file_index, begin, end)
        np.testing.assert_array_equal(read, absolute[expected][begin:end])
        for position in {0, rows // 2, rows - 1}:
            row = row_at_position(table, rows_per_file, file_index, position)
            assert positions[row - file_index * rows_per_file] == position


def test_the_worked_example_of_the_format_page_holds():
    table = one_table_spec(600).tables[0]
    assert [row_at_position(table, 512, 0, position) for position in (0, 1, 2, 3, 510, 511)] == [
        0,
        256,
        1,
        257,
        255,
        511,
    ]
    assert [row_at_position(table, 512, 1, position) for position in (0, 87)] == [512, 599]
    assert row_positions(table, 512, 0, np.array([300])).tolist() == [89]


@pytest.mark.parametrize(
    ("num_embeddings", "row_bytes", "expected"),
    [(1, 72, 256), (256, 72, 256), (257, 72, 512), (10**9, 72, 1 << 21), (10**9, 128, 1 << 21), (10**9, 129, 1 << 20)],
)
def test_default_files_hold_at_most_256_mib_and_no_more_than_needed(num_embeddings, row_bytes, expected):
    assert default_rows_per_file(num_embeddings, row_bytes) == expected
    assert expected * row_bytes <= 256 << 20
