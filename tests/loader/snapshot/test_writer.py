"""What is exported is what is read back; and an export that dies leaves no version, and goes on where it stopped."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import zipfile
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch

from loader.errors import ExportError, SnapshotCorruptError, SnapshotExistsError
from loader.snapshot import program, writer
from loader.snapshot import store as stores
from loader.snapshot.codecs import RowCodec
from loader.snapshot.manifest import MAX_PLAN_BYTES, ExportedModelSpec
from loader.snapshot.program import ProgramArchive, program_bytes
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import ArrayRows, RowsFromBlocks, RowSource
from loader.snapshot.store import Store
from loader.snapshot.tables import VocabularyMapping
from loader.snapshot.writer import export_snapshot
from shardrank_testing.exhaustion import files_limited_to
from shardrank_testing.snapshots import (
    files_of,
    make_spec,
    one_table_spec,
    random_golden,
    random_tables,
    with_slices,
    write_snapshot,
)

DENSE = {"weight": torch.zeros(1)}


@pytest.mark.parametrize(
    ("num_embeddings", "bucketing", "rows_per_file"),
    [(rows, bucketing, 256) for bucketing in ("range",) for rows in (1, 255, 256, 257, 1000)]
    + [(rows, "mixed", 4096) for rows in (1, 300, 4095, 4096, 4097, 13_000)],
)
@pytest.mark.parametrize("dtype", ["int8", "int4", "fp16", "fp32"])
def test_rows_come_back_bit_for_bit(tmp_path, dtype, bucketing, num_embeddings, rows_per_file):
    spec = one_table_spec(num_embeddings, 6, dtype=dtype, bucketing=bucketing)
    path, tables = write_snapshot(tmp_path, spec, rows_per_file=rows_per_file)
    snapshot = Snapshot.open(path)
    expected = RowCodec(dtype, 6).encode(tables["items"])
    np.testing.assert_array_equal(snapshot.read_rows("items", 0, num_embeddings), expected)
    first, last = num_embeddings // 3, num_embeddings - num_embeddings // 5
    np.testing.assert_array_equal(snapshot.read_rows("items", first, last - first), expected[first:last])
    assert len(snapshot.manifest.tables[0].rows) == -(-num_embeddings // rows_per_file)


def test_a_model_with_one_of_everything_comes_back(tmp_path):
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
    read = snapshot.dense_tensors()
    assert set(read) == set(dense)
    for name, tensor in dense.items():
        assert read[name].dtype == (torch.int64 if name == "steps" else torch.float32)
        assert torch.equal(read[name], tensor.to(read[name].dtype))
    back = snapshot.golden().to_tensors()
    assert set(back) == set(golden.to_tensors())
    assert all(np.array_equal(back[name], array) for name, array in golden.to_tensors().items())
    assert snapshot.float32_bytes == sum(rows.nbytes for rows in tables.values())
    assert snapshot.size_bytes == sum(file.stat().st_size for file in path.rglob("*.safetensors"))


def test_mapped_rows_are_the_file_itself_and_cannot_be_written(tmp_path):
    path, _ = write_snapshot(tmp_path, one_table_spec(300))
    rows = Snapshot.open(path).rows_file("items", 0)
    (mapped,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    assert " r--s " in mapped
    assert not rows.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        rows[0, 0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        rows.flags.writeable = True


class TrainingDiedError(Exception):
    """Stands for whatever ends a training job."""


class Rows(RowSource):
    """An array's rows. Records requests, (first row, rows) each, and ends the export at that of index `fail_at`."""

    def __init__(self, rows, requests, fail_at=None):
        super().__init__(*rows.shape)
        self._rows, self._requests, self._fail_at = rows, requests, fail_at

    def blocks(self, first_row, max_rows):
        if len(self._requests) == self._fail_at:
            raise TrainingDiedError
        self._requests.append((first_row, max_rows))
        yield self._rows[first_row : first_row + max_rows]


def test_export_streams_in_blocks_of_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "BLOCK_BYTES", 4 * 64 * 1000)  # 1000 rows of dim 64
    requests = []
    source = Rows(np.zeros((10_000, 64), np.float32), requests)
    export_snapshot(tmp_path, one_table_spec(10_000, 64), rows={"items": source}, dense=DENSE, rows_per_file=4096)
    assert all(count <= 1000 for _, count in requests)
    # Each row is requested once, in order.
    ends = [first + count for first, count in requests]
    assert [first for first, _ in requests] == [0, *ends[:-1]]
    assert ends[-1] == 10_000


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (np.nan, "holds NaN or inf"),
        (np.inf, "holds NaN or inf"),
        (-np.inf, "holds NaN or inf"),
        (1e6, "values from 0.0 to 1000000.0 overflow as fp16"),
    ],
)
def test_values_that_no_row_can_hold_are_refused_by_row(tmp_path, bad, problem):
    rows = np.zeros((1000, 8), np.float32)
    rows[777, 3] = bad
    spec = one_table_spec(1000, dtype="fp16")
    with pytest.raises(ExportError, match=f"table 'items', row 777: {problem}"):
        export_snapshot(tmp_path, spec, rows={"items": ArrayRows(rows)}, dense=DENSE, rows_per_file=256)
    assert not (tmp_path / "small" / "1").exists()


MAPPED = one_table_spec(300, id_mapping=VocabularyMapping())
EXPORTED_MODEL = ExportedModelSpec(inputs={"x": {"source": "pooled", "features": ["item"]}}, outputs={"click": {}})
EXPORTED = one_table_spec(300).model_copy(update={"dense_model": EXPORTED_MODEL})


def zeros(num_rows=300, dim=8):
    return ArrayRows(np.zeros((num_rows, dim), np.float32))


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
        ({"version": 2, "delta_base": 1}, "delta_base needs last_delta"),
        ({"version": 2, "delta_base": 3, "last_delta": 1}, "delta_base: 3 is later than version 2"),
        ({"version": 2, "delta_base": 0, "last_delta": 1}, "delta_base: .*greater than or equal to 1"),
        ({"metadata": {"epoch": 3}}, "manifest: metadata.epoch: .*valid string"),
        ({"metadata": {"a" * 300: 3}}, r"manifest: metadata\.a+\.\.\. \(309 characters\): "),
        ({"metadata": {str(key): "" for key in range(5000)}}, "an object of 5000 keys; at most 4096"),
        ({"metadata": {"log": "x" * (16 << 20)}}, "manifest: 16.* bytes for 2 files; at most 16777216"),
        ({"rows_per_file": 2**63}, "rows_per_file: 9223372036854775808 is not"),
        ({"dense": {"w" * (16 << 20): torch.zeros(1)}}, "dense: names and shapes of .* bytes; at most 16777216"),
        ({"dense": {"w": torch.zeros([1] * 9)}}, "dense tensor 'w': 9 dims; at most 8"),
        ({"vocabularies": {"items": [1]}}, r"vocabularies .*unknown \['items'\]"),
        ({"dense": {"w": torch.tensor([1.0, float("nan")])}}, "dense tensor 'w': holds NaN or inf"),
        ({"dense": {"w": torch.tensor([1e300], dtype=torch.float64)}}, "dense tensor 'w'.*beyond float32"),
        ({"dense": {"w": torch.tensor([1j])}}, "dense tensor 'w': torch.complex64"),
        ({"dense": {"": torch.zeros(1)}}, "dense tensor '': not a name"),
        ({"plan": bytes(MAX_PLAN_BYTES + 1)}, "plan: 67108865 bytes; at most 67108864"),
        ({"spec": MAPPED}, r"vocabularies \(--vocabulary TABLE=FILE\): missing for tables \['items'\]"),
        ({"spec": EXPORTED}, "dense: the spec's dense_model is exported: expected a program, got tensors"),
        (
            {"spec": one_table_spec(2**25), "rows": {"items": RowsFromBlocks([], 2**25, 8)}, "rows_per_file": 256},
            "table 'items': rows_per_file 256 makes 131072 files; at most 65536 are allowed",
        ),
        ({"dense": b"a program"}, "dense: the spec's dense_model is mlp: expected tensors, got a program"),
    ],
)
def test_what_does_not_fit_the_spec_is_refused_before_a_write(tmp_path, arguments, message):
    given = {"spec": one_table_spec(300), "rows": {"items": zeros()}, "dense": DENSE} | arguments
    with pytest.raises(ExportError, match=message):
        export_snapshot(tmp_path / "store", **given)
    assert not (tmp_path / "store").exists()


WEIGHTS, GRAPH = "data/weights/model_weights_config.json", "models/model.json"
PROGRAM = {GRAPH: b"{}", WEIGHTS: b'{"config": {}}', "data/constants/model_constants_config.json": b'{"config": {}}'}


def archive_of(members, root="archive/", twice=None):
    """A zip file; the content of `twice` is that of another member, too."""
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(root + name, content)
        if twice is not None:
            archive.filelist.append(copy.copy(archive.getinfo(root + twice)))
            archive.filelist[-1].filename = f"{root}version"
    return buffer.getvalue()


def with_weight(**stated):
    return archive_of(PROGRAM | {WEIGHTS: json.dumps({"config": {"w": stated}}).encode()})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (archive_of({}), "0 members; 1 to 65536 are allowed"),
        (archive_of(PROGRAM | {"../other/x": b""}, root=""), "lies outside of its folder 'models'"),
        (archive_of(PROGRAM | {GRAPH: b" " * 900}, twice=GRAPH), "its members overlap"),
        (archive_of({GRAPH: b"{}"}), "model_weights_config.json is missing"),
        (archive_of(PROGRAM | {WEIGHTS: b'{"config": []}'}), "model_weights_config.json: no config of weights"),
        (with_weight(path_name="../weight_0"), r"'w' lies in '../weight_0', not in weight_<number>"),
        (with_weight(path_name="weight_0", use_pickle=False), "'w' has no tensor_meta"),
        (archive_of(PROGRAM | {GRAPH: b"[]"}), "models/model.json: not a JSON object"),
        (archive_of(PROGRAM | {GRAPH: b" " * 101}), "models/model.json: 101 bytes; at most 100 are read"),
        (archive_of({"byteorder": b"little"}), "models/model.json is missing"),
        (
            archive_of({"data/aotinductor/model/m.so": b""}),
            "a package that AOTInductor compiled.*export the program itself",
        ),
    ],
)
def test_an_archive_that_no_server_would_read_is_refused(tmp_path, monkeypatch, content, message):
    monkeypatch.setattr(program, "MAX_JSON_BYTES", 100)
    with pytest.raises(ExportError, match=f"the program: .*{message}"):
        export_snapshot(tmp_path / "store", EXPORTED, rows={"items": zeros()}, dense=content)
    assert not (tmp_path / "store").exists()


def test_a_program_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "dense.pt2"
    path.write_bytes(archive_of(PROGRAM))
    monkeypatch.setattr(program, "MAX_DENSE_BYTES", 100)
    for read, error in ((program_bytes, ExportError), (ProgramArchive.read, SnapshotCorruptError)):
        with pytest.raises(error, match=r"dense.pt2: \d+ bytes; at most 100 are allowed"):
            read(path)


def test_a_version_is_written_only_once_and_the_next_one_is_free(tmp_path):
    spec = one_table_spec(20)
    path, _ = write_snapshot(tmp_path, spec, version=4)
    before = (path / "manifest.json").read_bytes()
    with pytest.raises(SnapshotExistsError, match="immutable"):
        write_snapshot(tmp_path, spec, seed=1, version=4)
    assert (path / "manifest.json").read_bytes() == before
    assert write_snapshot(tmp_path, spec, seed=1)[0].name == "5"
    assert sorted(entry.name for entry in (tmp_path / "small").iterdir()) == ["4", "5"]


# Exports that die

SPEC = with_slices(make_spec(bucketing="range"), {"film": (10, 3, 3), "tag": (6, 2), "city": (1, 3)})
TABLES = random_tables(SPEC, seed=11)
# user 4, film 4, genre 1, tag 2, city 2, in the order in which they are written: what has slices is read once for all.
NUM_ROW_FILES = 13


def at_a_fixed_time():
    return datetime(2024, 1, 1, tzinfo=UTC)


def dies():
    raise TrainingDiedError


def export(store, fail_at=None, spec=SPEC, dense_value=0.0, clock=at_a_fixed_time, **options):
    """Export with files of 256 rows; return how many files were requested of the sources."""
    requests = []
    sources = {name: Rows(rows, requests, fail_at) for name, rows in TABLES.items()}
    dense = {"weight": torch.full((2,), dense_value)}
    with contextlib.suppress(TrainingDiedError):
        export_snapshot(store, spec, rows=sources, dense=dense, version=2, rows_per_file=256, clock=clock, **options)
    return len(requests)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    store = tmp_path_factory.mktemp("whole")
    assert export(store) == NUM_ROW_FILES
    return files_of(store)


@pytest.mark.parametrize("fail_at", range(NUM_ROW_FILES + 1))
def test_an_interrupted_export_reads_only_what_is_missing(tmp_path, whole, fail_at):
    """The last one dies before its manifest is written."""
    assert export(tmp_path, fail_at, clock=dies) == fail_at
    assert Store(tmp_path).versions("films") == []
    assert export(tmp_path) == NUM_ROW_FILES - fail_at
    assert files_of(tmp_path) == whole


def test_an_export_that_dies_between_slices_writes_the_missing(tmp_path, whole, monkeypatch):
    real = stores.ExportFolder.write

    def write(self, path, produce, stated=None):
        return dies() if "film.c1" in path else real(self, path, produce, stated)

    monkeypatch.setattr(stores.ExportFolder, "write", write)
    export(tmp_path)
    monkeypatch.undo()
    export(tmp_path)
    assert files_of(tmp_path) == whole


def test_blocks_that_can_be_read_once_give_all_slices(tmp_path, whole):
    rows = {name: RowsFromBlocks(iter(np.array_split(one, 5)), *one.shape) for name, one in TABLES.items()}
    dense = {"weight": torch.zeros(2)}
    export_snapshot(tmp_path, SPEC, rows=rows, dense=dense, version=2, rows_per_file=256, clock=at_a_fixed_time)
    assert files_of(tmp_path) == whole


def test_a_finished_file_that_was_damaged_is_written_again(tmp_path, whole, caplog):
    export(tmp_path, fail_at=10)
    files = tmp_path / "films" / ".export-2" / "snapshot" / "tables"
    flipped = bytearray((files / "user" / "rows-00001-of-00004.safetensors").read_bytes())
    flipped[-5] ^= 4
    (files / "user" / "rows-00001-of-00004.safetensors").write_bytes(flipped)
    os.truncate(files / "film.c1" / "rows-00000-of-00004.safetensors", 100)
    (files / "genre" / "rows-00000-of-00001.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        assert export(tmp_path) == NUM_ROW_FILES - 10 + 3
    # One is only missing.
    assert len(caplog.records) == 2
    assert files_of(tmp_path) == whole


OTHER_INPUTS = SPEC.model_copy(update={"dense_inputs": SPEC.dense_inputs.model_copy(update={"context": 9})})


@pytest.mark.parametrize(
    "options", [{"spec": OTHER_INPUTS}, {"dense_value": 1.0}, {"delta_base": 1, "last_delta": 0}, {}]
)
def test_an_export_of_other_inputs_starts_over_and_says_so(tmp_path, caplog, options):
    """And one whose journal is damaged."""
    export(tmp_path, fail_at=5)
    if not options:
        (tmp_path / "films" / ".export-2" / "export-state.jsonl").write_text("not a journal\n")
    with caplog.at_level(logging.WARNING):
        assert export(tmp_path, **options) == NUM_ROW_FILES
    assert "starting over" in caplog.text
    snapshot = Snapshot.open(tmp_path / "films" / "2")
    assert snapshot.spec == options.get("spec", SPEC)
    assert snapshot.manifest.delta_start == (options.get("delta_base", 2), 0)


def test_after_a_full_disk_an_export_can_go_on(tmp_path, whole):
    # A full file of table `user` has more.
    with files_limited_to(6000), pytest.raises(ExportError, match="export of 'films' version 2"):
        export(tmp_path)
    assert Store(tmp_path).versions("films") == []
    export(tmp_path)
    assert files_of(tmp_path) == whole
