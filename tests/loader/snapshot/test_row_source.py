"""Every kind of row source gives exactly the asked rows as float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from loader.errors import ExportError
from loader.snapshot.row_source import ArrayRows, RowsFromBlocks, SafetensorsRows
from shardrank_testing.snapshots import random_rows


def read_all(source, first_row, step):
    blocks = []
    for start in range(first_row, source.num_embeddings, step):
        for block in source.blocks(start, step):
            assert block.dtype == np.float32
            assert len(block) <= step
            blocks.append(block.copy())
    return np.concatenate(blocks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_in_memory_and_in_files_are_read_as_float32(tmp_path, dtype):
    tensor = torch.from_numpy(random_rows(np.random.default_rng(1), 50, 6)).to(dtype)
    save_file({"w": tensor, "other": torch.zeros(3)}, tmp_path / "m.safetensors")
    expected = tensor.to(torch.float32).numpy()
    for source in (ArrayRows(tensor.requires_grad_()), SafetensorsRows(tmp_path / "m.safetensors", "w")):
        assert (source.num_embeddings, source.embedding_dim) == (50, 6)
        np.testing.assert_array_equal(read_all(source, 3, 16), expected[3:])


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    step=st.integers(1, 64),
    skip=st.integers(0, 3),
)
def test_an_iterator_of_blocks_of_any_sizes_gives_the_same_rows(sizes, step, skip):
    rows = random_rows(np.random.default_rng(2), sum(sizes), 4)
    ends = np.cumsum(sizes)
    blocks = (rows[end - size : end] for end, size in zip(ends, sizes, strict=True))
    first_row = min(skip * step, len(rows) - 1)
    source = RowsFromBlocks(blocks, len(rows), 4)
    np.testing.assert_array_equal(read_all(source, first_row, step), rows[first_row:])


def test_an_iterator_is_read_only_once():
    source = RowsFromBlocks(iter([np.zeros((10, 2), np.float32)]), 10, 2)
    list(source.blocks(4, 4))
    with pytest.raises(ExportError, match="row 0 asked after row 8"):
        list(source.blocks(0, 4))


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([np.zeros((9, 2), np.float32)], "end after 9 rows of 10"),
        ([np.zeros((10, 2), np.float32), np.zeros((1, 2), np.float32)], "more than the 10 rows"),
        ([np.zeros((11, 2), np.float32)], "more than the 10 rows"),
        ([np.zeros((4, 2), np.float32), np.zeros((6, 3), np.float32)], "block at row 4 has dim 3, expected 2"),
        ([np.zeros((10, 2), np.int32)], "int32"),
    ],
)
def test_blocks_that_are_not_the_announced_table_are_refused(blocks, message):
    with pytest.raises(ExportError, match=message):
        list(RowsFromBlocks(blocks, 10, 2).blocks(0, 10))


def test_whole_numbers_vectors_and_missing_tensors_are_no_rows(tmp_path):
    save_file({"ids": torch.zeros(3, 2, dtype=torch.int64)}, tmp_path / "m.safetensors")
    for make in (
        lambda: ArrayRows(np.zeros((3, 2), np.int64)),
        lambda: ArrayRows(np.zeros(3, np.float32)),
        lambda: ArrayRows(torch.zeros(3, 2, dtype=torch.int32)),
        lambda: ArrayRows(torch.zeros(3, 2).to_sparse()),
        lambda: SafetensorsRows(tmp_path / "m.safetensors", "ids"),
        lambda: SafetensorsRows(tmp_path / "m.safetensors", "absent"),
        lambda: SafetensorsRows(tmp_path / "absent.safetensors", "w"),
    ):
        with pytest.raises(ExportError):
            make()
    with pytest.raises(ExportError, match=r"m\.safetensors, tensor 'ids': rows: expected a dense"):
        SafetensorsRows(tmp_path / "m.safetensors", "ids")
