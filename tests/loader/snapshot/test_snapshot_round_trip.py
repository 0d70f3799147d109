"""What is exported is what is read back, for every dtype, order and odd size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from loader.errors import ExportError, NonFiniteRowError, SnapshotExistsError
from loader.snapshot import writer
from loader.snapshot.buckets import RowBuckets
from loader.snapshot.codecs import codec_for
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import RowSource, rows_of
from loader.snapshot.writer import export_snapshot
from shardrank_testing.snapshots import (
    make_spec,
    one_table_spec,
    plain_buckets,
    random_golden,
    write_snapshot,
)

DENSE = {"weight": torch.zeros(1)}


@pytest.mark.parametrize(
    ("num_embeddings", "bucketing", "rows_per_file"),
    [(rows, bucketing, 256) for bucketing in ("hash", "range") for rows in (1, 255, 256, 257, 1000)]
    + [(rows, "mixed", 4096) for rows in (1, 300, 4095, 4096, 4097, 13_000)],
)
@pytest.mark.parametrize("dtype", ["int8", "int4", "fp16", "fp32"])
def test_rows_of_every_dtype_order_and_odd_size_come_back_bit_for_bit(
    tmp_path, dtype, bucketing, num_embeddings, rows_per_file
):
    spec = one_table_spec(num_embeddings, 6, dtype=dtype, bucketing=bucketing)
    path, tables = write_snapshot(tmp_path, spec, rows_per_file=rows_per_file)
    snapshot = Snapshot.open(path)
    expected = codec_for(dtype, 6).encode(tables["items"])
    np.testing.assert_array_equal(snapshot.read_rows("items", 0, num_embeddings), expected)
    first, last = num_embeddings // 3, num_embeddings - num_embeddings // 5
    np.testing.assert_array_equal(snapshot.read_rows("items", first, last - first), expected[first:last])
    assert len(snapshot.manifest.tables[0].rows) == -(-num_embeddings // rows_per_file)


@pytest.mark.parametrize(
    ("bucketing", "num_rows", "rows_per_file"), [("mixed", 10_000, 4096), ("hash", 2500, 1024), ("range", 2500, 1024)]
)
def test_the_rows_of_one_bucket_are_one_contiguous_run_of_each_file(tmp_path, bucketing, num_rows, rows_per_file):
    spec = one_table_spec(num_rows, 4, dtype="fp32", bucketing=bucketing)
    path, tables = write_snapshot(tmp_path, spec, rows_per_file=rows_per_file)
    snapshot, buckets = Snapshot.open(path), RowBuckets.of(spec.tables[0])
    bucket_of = plain_buckets(spec.tables[0])
    for bucket in (0, 1, 77, 195, 255):
        runs = []
        for file_index in range(3):
            start, stop = buckets.in_file(rows_per_file, file_index).starts[bucket : bucket + 2]
            runs.append(snapshot.rows_file("items", file_index)[start:stop])
        expected = tables["items"][bucket_of == bucket]
        np.testing.assert_array_equal(np.concatenate(runs).view("<f4"), expected)


def test_a_model_with_one_of_everything_comes_back_whole(tmp_path):
    spec = make_spec()
    dense = {
        "top.0.weight": torch.randn(4, 7),
        "half": torch.randn(3, 2).to(torch.bfloat16),
        "steps": torch.tensor(9),
        "transposed": torch.randn(5, 2).T,
    }
    dense["tied"] = dense["top.0.weight"]
    golden = random_golden(spec, seed=5)
    path, tables = write_snapshot(tmp_path, spec, seed=3, dense=dense, golden=golden)
    assert path == tmp_path / "films" / "1"
    snapshot = Snapshot.open(path)
    assert (snapshot.spec, snapshot.version) == (spec, 1)
    for table in spec.tables:
        stored = snapshot.read_rows(table.name, 0, table.num_embeddings)
        expected = codec_for(table.dtype, table.embedding_dim).encode(tables[table.name])
        np.testing.assert_array_equal(stored, expected)
    read = snapshot.dense_tensors()
    assert set(read) == set(dense)
    for name, tensor in dense.items():
        assert read[name].dtype == (torch.int64 if name == "steps" else torch.float32)
        assert torch.equal(read[name], tensor.to(read[name].dtype))
    back = snapshot.golden().to_tensors()
    assert set(back) == set(golden.to_tensors())
    assert all(np.array_equal(back[name], array) for name, array in golden.to_tensors().items())
    assert snapshot.float32_bytes == sum(rows.nbytes for rows in tables.values())
    on_disk = sum(file.stat().st_size for file in path.rglob("*.safetensors"))
    assert snapshot.size_bytes == on_disk


def test_mapped_rows_are_the_file_itself_and_cannot_be_written(tmp_path):
    path, _ = write_snapshot(tmp_path, one_table_spec(300))
    rows = Snapshot.open(path).rows_file("items", 0)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    assert len(mapped) == 1
    assert " r--s " in mapped[0]
    assert not rows.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        rows[0, 0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        rows.flags.writeable = True


class RecordingRows(RowSource):
    """A source that remembers what was asked of it."""

    def __init__(self, num_embeddings, embedding_dim):
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.requests = []

    def blocks(self, first_row, max_rows):
        self.requests.append((first_row, max_rows))
        yield np.full((max_rows, self.embedding_dim), first_row, np.float32)


def test_export_streams_in_blocks_of_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "BLOCK_BYTES", 4 * 64 * 1000)  # 1000 rows of dim 64
    spec = one_table_spec(10_000, 64)
    source = RecordingRows(10_000, 64)
    export_snapshot(tmp_path, spec, rows={"items": source}, dense=DENSE, rows_per_file=4096)
    assert all(count <= 1000 for _, count in source.requests)
    # Each row is asked for once, in order.
    ends = [first + count for first, count in source.requests]
    assert [first for first, _ in source.requests] == [0, *ends[:-1]]
    assert ends[-1] == 10_000


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_refused_by_table_and_row(tmp_path, bad):
    rows = np.zeros((1000, 8), np.float32)
    rows[777, 3] = bad
    with pytest.raises(NonFiniteRowError, match="table 'items', row 777: holds NaN or inf"):
        export_snapshot(tmp_path, one_table_spec(1000), rows={"items": rows_of(rows)}, dense=DENSE, rows_per_file=256)
    assert not (tmp_path / "small" / "1").exists()


def zeros(num_rows=300, dim=8):
    return rows_of(np.zeros((num_rows, dim), np.float32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": {}}, r"rows: missing for tables \['items'\]"),
        ({"rows": {"items": zeros(), "x": zeros()}}, r"unknown \['x'\]"),
        ({"rows": {"items": zeros(301)}}, r"rows are \[301, 8\], the spec says \[300, 8\]"),
        ({"rows": {"items": zeros(dim=9)}}, r"rows are \[300, 9\]"),
        ({"rows_per_file": 300}, "rows_per_file: 300 is not a power of two"),
        ({"rows_per_file": 128}, "rows_per_file: 128"),
        ({"version": 0}, "version: 0 is not in"),
        ({"golden_tolerance": 0.0}, "golden_tolerance: 0.0"),
        ({"golden_tolerance": float("nan")}, "golden_tolerance: nan"),
        ({"last_delta": -1}, "manifest: last_delta: .*greater than or equal to 0"),
        ({"metadata": {"epoch": 3}}, "manifest: metadata.epoch: .*valid string"),
        ({"metadata": {"a" * 300: 3}}, r"manifest: metadata\.a+\.\.\. \(309 characters\): "),
        ({"metadata": {str(key): "" for key in range(5000)}}, "an object of 5000 keys; at most 4096"),
        ({"metadata": {"log": "x" * (16 << 20)}}, "manifest: 16.* bytes for 2 files; at most 16777216"),
        ({"rows_per_file": 2**63}, "rows_per_file: 9223372036854775808 is not"),
        ({"dense": {"w" * (16 << 20): torch.zeros(1)}}, "dense: names and shapes of .* bytes; at most 16777216"),
        ({"dense": {"w": torch.zeros([1] * 9)}}, "dense tensor 'w': 9 dims; at most 8"),
        ({"vocabularies": {"items": [1]}}, r"vocabularies: .*unknown \['items'\]"),
        ({"dense": {"w": torch.tensor([1.0, float("nan")])}}, "dense tensor 'w': holds NaN or inf"),
        ({"dense": {"w": torch.tensor([1e300], dtype=torch.float64)}}, "dense tensor 'w'.*beyond float32"),
        ({"dense": {"w": torch.tensor([1j])}}, "dense tensor 'w': torch.complex64"),
    ],
)
def test_what_does_not_fit_the_spec_is_refused_before_anything_is_written(tmp_path, arguments, message):
    given = {"rows": {"items": zeros()}, "dense": DENSE} | arguments
    with pytest.raises(ExportError, match=message):
        export_snapshot(tmp_path / "store", one_table_spec(300), **given)
    assert not (tmp_path / "store").exists()


def test_a_version_is_written_only_once_and_the_next_one_is_free(tmp_path):
    spec = one_table_spec(20)
    path, _ = write_snapshot(tmp_path, spec, version=4)
    before = (path / "manifest.json").read_bytes()
    with pytest.raises(SnapshotExistsError, match="immutable"):
        write_snapshot(tmp_path, spec, seed=1, version=4)
    assert (path / "manifest.json").read_bytes() == before
    assert write_snapshot(tmp_path, spec, seed=1)[0].name == "5"
    assert sorted(entry.name for entry in (tmp_path / "small").iterdir()) == ["4", "5"]
