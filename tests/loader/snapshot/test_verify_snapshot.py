"""A snapshot is verified in full, or file by file, and reported on."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from loader.errors import SnapshotCorruptError
from loader.snapshot.buckets import RowBuckets
from loader.snapshot.codecs import codec_for
from loader.snapshot.reader import Snapshot, VerifyReport, verify_snapshot
from shardrank_testing.snapshots import make_spec, one_table_spec, random_golden, rewrite_manifest, write_snapshot


def test_a_good_snapshot_passes_with_a_report_of_every_file(tmp_path):
    spec = make_spec()
    path, _ = write_snapshot(tmp_path, spec, golden=random_golden(spec, seed=1), rows_per_file=256)
    report = verify_snapshot(path)
    assert report.ok
    assert report.problems == ()
    assert len(report.files) == len(list(path.rglob("*.safetensors")))
    assert sum(file.size_bytes for file in report.files) == Snapshot.open(path).size_bytes
    assert (report.model, report.version) == ("films", 1)
    assert VerifyReport.model_validate_json(report.model_dump_json()) == report


@pytest.mark.parametrize("dtype", ["int8", "int4", "fp16", "fp32"])
@pytest.mark.parametrize("bucketing", ["hash", "range"])
def test_a_stored_row_that_is_not_finite_is_named(tmp_path, dtype, bucketing):
    spec = one_table_spec(1000, 4, dtype=dtype, bucketing=bucketing)
    path, _ = write_snapshot(tmp_path, spec, rows_per_file=256)
    relative = "tables/items/rows-00002-of-00004.safetensors"
    rows = load_file(path / relative)["rows"]
    position = RowBuckets.of(spec.tables[0]).in_file(256, 2).positions(np.array([601 - 512]))[0]
    bytes_of_nan = np.array([np.nan], "<f4" if dtype in ("int8", "fp32") else "<f2").view(np.uint8)
    rows[position, codec_for(dtype, 4).row_bytes - len(bytes_of_nan) :] = bytes_of_nan
    save_file({"rows": rows}, path / relative)
    digest = hashlib.sha256((path / relative).read_bytes()).hexdigest()
    rewrite_manifest(path, lambda manifest: manifest["tables"][0]["rows"][2].update(sha256=digest))
    Snapshot.open(path)
    report = verify_snapshot(path)
    assert not report.ok
    assert report.problems == (f"{relative}: table 'items', row 601: decodes to NaN or inf",)


def test_a_dense_tensor_that_is_not_finite_is_named(tmp_path):
    path, _ = write_snapshot(tmp_path, one_table_spec(10))
    save_file({"weight": np.array([np.inf], np.float32)}, path / "dense.safetensors")
    digest = hashlib.sha256((path / "dense.safetensors").read_bytes()).hexdigest()
    rewrite_manifest(path, lambda manifest: manifest["dense"].update(sha256=digest))
    assert verify_snapshot(path).problems == ("dense.safetensors: tensor 'weight' holds NaN or inf",)


def test_a_snapshot_that_cannot_be_opened_is_a_report_and_not_an_exception(tmp_path):
    path, _ = write_snapshot(tmp_path, one_table_spec(10))
    (path / "dense.safetensors").unlink()
    report = verify_snapshot(path)
    assert not report.ok
    assert report.problems == (f"bad_snapshot: {path / 'dense.safetensors'}: missing",)
    # The manifest can be read, so the report says of which version it is.
    assert (report.model, report.version) == ("small", 1)
    assert "dense.safetensors" in [file.path for file in report.files]
    assert verify_snapshot(tmp_path / "absent").problems[0].startswith("snapshot_not_found: ")
    (path / "manifest.json").write_text("{")
    unreadable = verify_snapshot(path)
    assert (unreadable.ok, unreadable.model, unreadable.version, unreadable.files) == (False, None, None, ())


@pytest.fixture
def path(tmp_path) -> Path:
    spec = make_spec()
    return write_snapshot(tmp_path, spec, seed=1, golden=random_golden(spec, 2))[0]


def damage(path: Path, kind: str) -> None:
    """Changes the last byte of a row file, or of the dense model."""
    file = sorted((path / "tables" / "user").iterdir())[0] if kind == "rows" else path / "dense.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(("damaged", "blind"), [("rows", "other"), ("other", "rows")])
def test_damage_is_found_by_who_reads_the_file_and_not_by_who_does_not(path, damaged, blind):
    damage(path, damaged)
    for files in ("all", damaged):
        with pytest.raises(SnapshotCorruptError, match="SHA-256"):
            Snapshot.open(path, files=files)
        with pytest.raises(SnapshotCorruptError, match="SHA-256"):
            Snapshot.open(path, verify=False, files=files).check_content(files)
    Snapshot.open(path, files=blind).check_content(blind)
