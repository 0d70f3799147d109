"""A snapshot that is not exactly what was written is refused: with a typed error, by its file, and at little cost."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from loader.errors import SnapshotCorruptError, SnapshotError, is_passing
from loader.snapshot import manifest, reader
from loader.snapshot.buckets import RowBuckets
from loader.snapshot.codecs import RowCodec
from loader.snapshot.reader import Snapshot, VerifyReport, verify_snapshot
from loader.snapshot.store import Store
from shardrank_testing.snapshots import (
    make_spec,
    one_table_spec,
    random_golden,
    restate_entry,
    restate_file,
    rewrite_manifest,
    write_snapshot,
)

USER = "tables/user/rows-00001-of-00002.safetensors"
GENRE = "tables/genre/rows-00000-of-00001.safetensors"
VOCABULARY = "tables/film/vocabulary.safetensors"
DENSE, GOLDEN = "dense.safetensors", "golden.safetensors"
FILE_KINDS = ["manifest.json", "manifest.json.sha256", DENSE, GOLDEN, VOCABULARY, USER, GENRE]
GIB = 1 << 30


@pytest.mark.parametrize("relative", FILE_KINDS)
@pytest.mark.parametrize("verify", [True, False])
def test_a_file_of_another_length_is_refused_by_name(copy, relative, verify):
    """With and without hashing; and one that is missing, or a folder."""

    def assert_refused():
        with pytest.raises(SnapshotCorruptError, match=os.path.basename(relative)):
            Snapshot.open(copy, verify=verify)

    content = (copy / relative).read_bytes()
    for kept in (0, 1, 7, 8, 9, len(content) // 2, len(content) - 1):
        (copy / relative).write_bytes(content[:kept])
        assert_refused()
    (copy / relative).write_bytes(content)
    Snapshot.open(copy, verify=verify)
    (copy / relative).write_bytes(content + b"\0")
    assert_refused()
    (copy / relative).unlink()
    assert_refused()
    (copy / relative).mkdir()
    assert_refused()


@pytest.mark.parametrize("call", ["stat", "iterdir", "resolve", "open"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_what_a_file_system_refuses_may_pass_and_damage_may_not(copy, call, number, monkeypatch):
    """Whichever call it refuses, it is a typed error; a file or folder that is not there may come, too."""

    def refusal() -> SnapshotError:
        with pytest.raises(SnapshotError) as refused:
            Snapshot.open(Store(copy.parent.parent).hold(copy.parent.name, int(copy.name)).path)
        return refused.value

    def refuse(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, call, refuse)
        error = refusal()
    assert is_passing(error)
    assert os.strerror(number) in str(error)
    for gone in (copy / USER, copy / "manifest.json", copy):
        gone.rename(copy.parent.parent / "away")
        assert is_passing(refusal())
        (copy.parent.parent / "away").rename(gone)
    content = (copy / USER).read_bytes()
    for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
        (copy / USER).write_bytes(damaged)
        assert not is_passing(refusal())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_bit_flip_anywhere_in_any_file_is_refused(pristine, data):
    path = data.draw(st.sampled_from(sorted(path for path in pristine.rglob("*") if path.is_file())))
    original = path.read_bytes()
    content = bytearray(original)
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        path.write_bytes(content)
        with pytest.raises(SnapshotError):
            Snapshot.open(pristine)
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize(
    "escape",
    [
        "/etc/passwd",
        "../../outside.safetensors",
        "tables/../dense.safetensors",
        "./dense.safetensors",
        "tables//dense.safetensors",
        "tables\\dense.safetensors",
        "dense.safetensors\n",
        "dense.safetensors/",
    ],
)
def test_a_path_that_is_not_plain_and_relative_is_refused(copy, escape):
    shutil.copy(copy / DENSE, copy.parent.parent / "outside.safetensors")
    rewrite_manifest(copy, lambda manifest: manifest["dense"].update(path=escape))
    with pytest.raises(SnapshotCorruptError, match="path"):
        Snapshot.open(copy)


def test_a_link_that_leaves_the_folder_is_refused_others_are_not(copy):
    outside = copy.parent / "outside.safetensors"
    (copy / DENSE).rename(outside)
    (copy / DENSE).symlink_to(outside)
    with pytest.raises(SnapshotCorruptError, match=r"dense.safetensors.*leaves the folder"):
        Snapshot.open(copy)
    (copy / DENSE).unlink()
    outside.rename(copy / "elsewhere.safetensors")
    (copy / DENSE).symlink_to("elsewhere.safetensors")
    Snapshot.open(copy)


# Manifests


def short_refusal(path, error):
    """The message of a refusal, which is never as long as what the file says."""
    with pytest.raises(error) as caught:
        Snapshot.open(path)
    assert len(str(caught.value)) < 3000
    return str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"format_version": 1}', "\udcff"])
def test_a_manifest_that_is_no_manifest_is_refused(copy, text):
    (copy / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SnapshotCorruptError, match=r"manifest.json"):
        Snapshot.open(copy)


@pytest.mark.parametrize("found", [2, 0, "1", None, True, 1.0, "x" * 1_000_000])
def test_an_unknown_format_version_is_named(copy, found):
    # A later format may have any other keys: the version is looked at first.
    (copy / "manifest.json").write_text(json.dumps({"format_version": found, "anything": []}))
    assert re.search(r"format_version .*reads only 1", short_refusal(copy, SnapshotCorruptError))


def test_a_manifest_beyond_the_limit_is_not_parsed(copy, monkeypatch):
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(SnapshotCorruptError, match=r"manifest.json: larger than 100 bytes"):
        Snapshot.open(copy)


def user_table(**changes):
    """An edit of the first table of a manifest's spec."""
    return lambda manifest: manifest["spec"]["tables"][0].update(changes)


def first_feature(**changes):
    return lambda manifest: manifest["spec"]["features"][0].update(changes)


def edit(**changes):
    return lambda manifest: manifest.update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # Numbers and bools of another type.
        (edit(version="1"), "manifest.json: version: "),
        (edit(version=1.0), "manifest.json: version: "),
        (edit(last_delta="7"), "manifest.json: last_delta: "),
        (edit(last_delta=True), "manifest.json: last_delta: "),
        (user_table(num_embeddings="1000"), "manifest.json: spec.tables.0.num_embeddings: "),
        (user_table(embedding_dim=16.0), "manifest.json: spec.tables.0.embedding_dim: "),
        (user_table(default_row=False), "manifest.json: spec.tables.0.default_row: "),
        (user_table(bucketing="hash"), "bucketing: Input should be 'mixed' or 'range'"),
        (first_feature(weighted="no"), "manifest.json: spec.features.0.weighted: "),
        (first_feature(weighted=0), "manifest.json: spec.features.0.weighted: "),
        (lambda one: one["golden"].update(tolerance="0.1"), "manifest.json: golden.tolerance: "),
        (lambda one: one["dense"].update(size_bytes="9"), "manifest.json: dense.size_bytes: "),
        # Files of rows.
        (lambda one: one["tables"][0]["rows"].pop(), "table 'user': 1 row files, expected 2"),
        (lambda one: one["tables"][1].update(rows_per_file=4097), "table 'film': .* must be a multiple of 4096"),
        (lambda one: one["tables"][2].update(rows_per_file=513), "table 'genre': .* must be a power of two"),
        # What is wrong in very many places.
        (edit(tables=[0] * 400_000), "tables.0: "),
        (lambda one: one["spec"].update(tables=[{}] * 400_000), "spec.tables.0"),
        (lambda one: one["spec"].update(features=[{}] * 400_000), "spec.features.0"),
        (lambda one: one["tables"][0].update(rows=one["tables"][0]["rows"][:1] * 66_000), "at most 65536"),
        (lambda one: one.update(tables=one["tables"][1:2] * 5000), "at most 4096"),
        (edit(**{str(key): 0 for key in range(5000)}), "object of 50.. keys; at most 4096"),
        (edit(**{f"key{key}" * 99: 0 for key in range(4000)}), "; and 3995 more"),
        (edit(created_at=[["x" * 1_000_000]]), "created_at: "),
        (user_table(feature_names=["f" * 99] * 4000), "has duplicates"),
    ],
)
def test_a_manifest_is_refused_by_place_in_a_short_message(copy, change, message):
    rewrite_manifest(copy, change)
    assert re.search(message, short_refusal(copy, SnapshotCorruptError))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (user_table(num_embeddings=999), r"user/rows-00001-of-00002.*expected U8 \[487, 24\]"),
        (user_table(embedding_dim=15), r"user/rows-00000-of-00002.*expected U8 \[512, 23\]"),
        (user_table(dtype="fp16"), r"user/rows-00000-of-00002.*expected U8 \[512, 32\]"),
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_rows_of_another_shape_than_the_spec_says_are_refused(copy, change, message, verify):
    rewrite_manifest(copy, change)
    with pytest.raises(SnapshotCorruptError, match=message):
        Snapshot.open(copy, verify=verify)


# Files of tensors

FILM_IDS = np.arange(700, dtype=np.int64)
FILM_VOCABULARY = {"ids": FILM_IDS, "strings": np.zeros(9, np.uint8), "offsets": np.zeros(701, np.int64)}
LONG_STRINGS = {"strings": np.zeros(1024 * 700 + 1, np.uint8)}


@pytest.mark.parametrize(
    ("relative", "tensors", "message"),
    [
        (GENRE, {"rows": np.zeros((19, 32), np.int8)}, r"is I8 \[19, 32\]"),
        (GENRE, {"row": np.zeros((19, 32), np.uint8)}, "no tensor 'rows'"),
        (GENRE, {"rows": np.zeros((19, 32), np.uint8), "x": np.zeros(1)}, r"tensors \['x'\] besides \['rows'\]"),
        (DENSE, {"weight": np.zeros(1, np.float64)}, "tensor 'weight' is F64"),
        (
            DENSE,
            {"weight": np.zeros([1] * 9, np.float32)},
            r"'weight': Expected `array` of length <= 8",
        ),
        (GOLDEN, {"scores": np.zeros(1, np.float32)}, "no tensor 'num_candidates'"),
        (VOCABULARY, {"ids": FILM_IDS}, "no tensor 'strings'"),
        (VOCABULARY, {"ids": np.arange(778)}, "778 ids; allowed"),
        (VOCABULARY, {"ids": FILM_IDS.astype(np.int32)}, "expected I64"),
        (VOCABULARY, {"ids": np.zeros((0,), np.int64)}, "0 ids; allowed"),
        (VOCABULARY, FILM_VOCABULARY | {"x": FILM_IDS}, r"tensors \['x'\] besides"),
        (VOCABULARY, FILM_VOCABULARY | LONG_STRINGS, r"tensors of 728009 bytes; at most 728008"),
    ],
)
def test_a_well_hashed_file_with_the_wrong_tensors_is_refused(copy, relative, tensors, message):
    save_file(tensors, copy / relative)
    restate_file(copy, relative)
    for verify in (True, False):
        with pytest.raises(SnapshotCorruptError, match=rf"{os.path.basename(relative)}.*{message}"):
            Snapshot.open(copy, verify=verify)


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        ("ids", None),  # that of another row
        ("ids", -1),
        ("offsets", 10_000),
        ("strings", 0xFF),  # not UTF-8
        ("strings", ord("u")),  # not the string of that fingerprint
    ],
)
def test_a_vocabulary_that_breaks_its_rules_is_refused(copy, tensor, value):
    tensors = load_file(copy / VOCABULARY)
    tensors[tensor][5] = tensors[tensor][600] if value is None else value
    save_file(tensors, copy / VOCABULARY)
    restate_file(copy, VOCABULARY)
    with pytest.raises(SnapshotCorruptError, match=r"film/vocabulary.safetensors"):
        Snapshot.open(copy)


def rows_header(dtype="U8", shape=(19, 32), offsets=(0, 608), name="rows"):
    """A header of one tensor, by default that of the table `genre`."""
    return {name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "header",
    [
        b"\xff" * 8,
        (1 << 30).to_bytes(8, "little"),
        (4).to_bytes(8, "little") + b"{{{{",
        (2).to_bytes(8, "little") + b"{}" + b"extra",
        (100_005).to_bytes(8, "little") + b'{"a":' + b"[" * 100_000,
        [],
        {"rows": []},
        rows_header(offsets=[0, 607]),
        rows_header(offsets=[1, 609]),
        rows_header(offsets=[0, 608, 1]),
        rows_header(dtype="U9"),
        rows_header(dtype=[]),
        rows_header(shape=[-19, -32]),
        rows_header(shape=[True, 608]),
        rows_header(shape="ab"),
        rows_header(shape={"19": 1, "32": 1}),
        rows_header(shape=[19, 32, 1, 1, 1, 1, 1, 1, 1]),
        rows_header(shape=[0, 2**63], offsets=[0, 0]),
        rows_header(name="a") | rows_header(),
        # Made to cost time, memory or a long message.
        {f"t{number}": {} for number in range(300_000)},
        rows_header(shape=[9] * 400_000),
        rows_header(shape=[10**4290] * 300),
        rows_header(shape=[10**4290], offsets=[10**4290, 608]),
        rows_header(dtype="U" * 1_000_000),
        rows_header(name="x" * 1_000_000, offsets=[0, 607]),
        rows_header(name="x" * 1_000_000),
    ],
    ids=lambda header: str(header)[:40],
)
def test_a_forged_header_is_refused_before_its_rows_are_mapped(copy, header, monkeypatch):
    products = []
    monkeypatch.setattr(math, "prod", lambda numbers: products.append(list(numbers)) or prod(numbers))
    if not isinstance(header, bytes):
        text = json.dumps(header).encode()
        header = len(text).to_bytes(8, "little") + text + b"\0" * 608
    (copy / GENRE).write_bytes(header)
    restate_file(copy, GENRE)
    assert GENRE in short_refusal(copy, SnapshotCorruptError)
    with pytest.raises(SnapshotCorruptError, match=r"genre/rows-00000-of-00001.safetensors"):
        Snapshot.open(copy, verify=False)
    assert all(len(numbers) <= 8 and max(numbers, default=0) < 2**63 for numbers in products)


def write_sparse(snapshot_path, relative, tensors):
    """A file of zeros that takes no room on the disk, by a header of `tensors` (dtype, shape, bytes)."""
    header, end = {}, 0
    for name, (dtype, shape, size_bytes) in tensors.items():
        header |= rows_header(dtype, shape, [end, end + size_bytes], name)
        end += size_bytes
    text = json.dumps(header).encode()
    size_bytes = 8 + len(text) + end
    with (snapshot_path / relative).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(size_bytes)
    rewrite_manifest(snapshot_path, lambda manifest: restate_entry(manifest, relative, {"size_bytes": size_bytes}))


@pytest.mark.parametrize(
    ("relative", "tensors", "message"),
    [
        (GOLDEN, {"scores": ("F32", [GIB], 4 * GIB)}, "tensors of 4294967296 bytes; at most 268435456"),
        (GOLDEN, {"scores": ("F32", [1 << 25], 1 << 27)}, "no tensor 'num_candidates'"),
        (DENSE, {"w": ("F32", [3 * GIB], 12 * GIB)}, "tensors of 12884901888 bytes; at most 8589934592"),
        (VOCABULARY, {"ids": ("I64", [GIB], 8 * GIB)}, "1073741824 ids; allowed: 1 to"),
        (
            VOCABULARY,
            {"ids": ("I64", [700], 5600), "strings": ("U8", [GIB], GIB), "offsets": ("I64", [701], 5608)},
            "tensors of 1073753032 bytes; at most 728008",
        ),
        (GENRE, {"rows": ("U8", [GIB, 32], 32 * GIB)}, r"expected U8 \[19, 32\]"),
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_a_huge_file_is_refused_before_it_is_read(copy, relative, tensors, message, verify, monkeypatch):
    write_sparse(copy, relative, tensors)
    hashed = []
    monkeypatch.setattr(reader, "hash_file", lambda *args: hashed.append(args))
    with pytest.raises(SnapshotCorruptError, match=rf"{os.path.basename(relative)}: .*{message}"):
        Snapshot.open(copy, verify=verify)
    assert hashed == []


# Verifying


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
@pytest.mark.parametrize("bucketing", ["mixed", "range"])
def test_a_stored_row_that_is_not_finite_is_named(tmp_path, dtype, bucketing):
    spec = one_table_spec(10_000, 4, dtype=dtype, bucketing=bucketing)
    path, _ = write_snapshot(tmp_path, spec, rows_per_file=4096)
    relative = "tables/items/rows-00001-of-00003.safetensors"
    rows = load_file(path / relative)["rows"]
    position = RowBuckets.of(spec.tables[0]).in_file(4096, 1).positions(np.array([601]))[0]
    bytes_of_nan = np.array([np.nan], "<f4" if dtype in ("int8", "fp32") else "<f2").view(np.uint8)
    rows[position, RowCodec(dtype, 4).row_bytes - len(bytes_of_nan) :] = bytes_of_nan
    save_file({"rows": rows}, path / relative)
    restate_file(path, relative)
    Snapshot.open(path)
    assert verify_snapshot(path).problems == (f"{relative}: table 'items', row 4697: decodes to NaN or inf",)


def test_a_dense_tensor_that_is_not_finite_is_named(copy):
    save_file({"weight": np.array([np.inf], np.float32)}, copy / DENSE)
    restate_file(copy, DENSE)
    report = verify_snapshot(copy)
    assert (report.ok, report.problems) == (False, ("dense.safetensors: tensor 'weight' holds NaN or inf",))


def test_a_snapshot_that_cannot_be_opened_is_reported(tmp_path):
    path, _ = write_snapshot(tmp_path, one_table_spec(10))
    (path / DENSE).unlink()
    report = verify_snapshot(path)
    assert not report.ok
    assert report.problems == (f"bad_snapshot: {path / DENSE}: missing",)
    # The manifest can be read, so the report says of which version it is.
    assert (report.model, report.version) == ("small", 1)
    assert DENSE in [file.path for file in report.files]
    assert verify_snapshot(tmp_path / "absent").problems[0].startswith("snapshot_not_found: ")
    (path / "manifest.json").write_text("{")
    unreadable = verify_snapshot(path)
    assert (unreadable.ok, unreadable.model, unreadable.version, unreadable.files) == (False, None, None, ())


@pytest.mark.parametrize(("relative", "damaged", "other"), [(USER, "rows", "other"), (DENSE, "other", "rows")])
def test_damage_is_found_only_by_those_who_read_the_file(copy, relative, damaged, other):
    content = bytearray((copy / relative).read_bytes())
    content[-1] ^= 1
    (copy / relative).write_bytes(content)
    for files in ("all", damaged):
        with pytest.raises(SnapshotCorruptError, match="SHA-256"):
            Snapshot.open(copy, files=files)
        with pytest.raises(SnapshotCorruptError, match="SHA-256"):
            Snapshot.open(copy, verify=False, files=files).check_content(files)
    Snapshot.open(copy, files=other).check_content(other)
