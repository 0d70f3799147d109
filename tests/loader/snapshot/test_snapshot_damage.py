"""A snapshot that is not exactly what was written is refused with a typed error that names the file."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from loader.errors import (
    SnapshotCorruptError,
    SnapshotError,
    SnapshotFormatError,
    SnapshotPathError,
)
from loader.snapshot import manifest
from loader.snapshot.reader import Snapshot
from shardrank_testing.snapshots import restate_file, rewrite_manifest


def all_files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


FILE_KINDS = [
    "manifest.json",
    "manifest.json.sha256",
    "dense.safetensors",
    "golden.safetensors",
    "tables/film/vocabulary.safetensors",
    "tables/user/rows-00001-of-00002.safetensors",
    "tables/genre/rows-00000-of-00001.safetensors",
]


@pytest.mark.parametrize("relative", FILE_KINDS)
@pytest.mark.parametrize("verify", [True, False])
def test_a_truncated_file_is_refused_by_name_with_and_without_hashing(copy, relative, verify):
    content = (copy / relative).read_bytes()
    for kept in (0, 1, 7, 8, 9, len(content) // 2, len(content) - 1):
        (copy / relative).write_bytes(content[:kept])
        with pytest.raises((SnapshotCorruptError, SnapshotFormatError), match=os.path.basename(relative)):
            Snapshot.open(copy, verify=verify)
    (copy / relative).write_bytes(content)
    Snapshot.open(copy, verify=verify)


@pytest.mark.parametrize("relative", FILE_KINDS)
def test_a_file_that_grew_or_is_missing_or_is_a_folder_is_refused_by_name(copy, relative):
    content = (copy / relative).read_bytes()
    (copy / relative).write_bytes(content + b"\0")
    with pytest.raises((SnapshotCorruptError, SnapshotFormatError), match=os.path.basename(relative)):
        Snapshot.open(copy, verify=False)
    (copy / relative).unlink()
    with pytest.raises(SnapshotCorruptError, match=os.path.basename(relative)):
        Snapshot.open(copy, verify=False)
    (copy / relative).mkdir()
    with pytest.raises(SnapshotCorruptError, match=os.path.basename(relative)):
        Snapshot.open(copy, verify=False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_bit_flip_anywhere_in_any_file_is_refused(pristine, tmp_path_factory, data):
    relative = data.draw(st.sampled_from(all_files(pristine)))
    content = bytearray((pristine / relative).read_bytes())
    position, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    content[position] ^= 1 << bit
    original = (pristine / relative).read_bytes()
    try:
        (pristine / relative).write_bytes(content)
        with pytest.raises(SnapshotError):
            Snapshot.open(pristine)
    finally:
        (pristine / relative).write_bytes(original)


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
    shutil.copy(copy / "dense.safetensors", copy.parent.parent / "outside.safetensors")
    rewrite_manifest(copy, lambda manifest: manifest["dense"].update(path=escape))
    with pytest.raises(SnapshotPathError, match="path"):
        Snapshot.open(copy)


def test_a_link_that_leaves_the_folder_is_refused_and_one_that_stays_is_not(copy):
    outside = copy.parent / "outside.safetensors"
    (copy / "dense.safetensors").rename(outside)
    (copy / "dense.safetensors").symlink_to(outside)
    with pytest.raises(SnapshotPathError, match=r"dense.safetensors.*leaves the folder"):
        Snapshot.open(copy)
    (copy / "dense.safetensors").unlink()
    outside.rename(copy / "elsewhere.safetensors")
    (copy / "dense.safetensors").symlink_to("elsewhere.safetensors")
    Snapshot.open(copy)


@pytest.mark.parametrize("found", [2, 0, "1", None, True, 1.0])
def test_an_unknown_format_version_is_told_apart_from_a_broken_manifest(copy, found):
    # A later format may have any other keys: the version is looked at first.
    (copy / "manifest.json").write_text(json.dumps({"format_version": found, "anything": []}))
    with pytest.raises(SnapshotFormatError, match=r"format_version .*reads only 1"):
        Snapshot.open(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"format_version": 1}', "\udcff"])
def test_a_manifest_that_is_no_manifest_is_refused(copy, text):
    (copy / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SnapshotFormatError, match=r"manifest.json"):
        Snapshot.open(copy)


def test_a_manifest_beyond_the_limit_is_refused_before_it_is_parsed(copy, monkeypatch):
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(SnapshotCorruptError, match=r"manifest.json: larger than 100 bytes"):
        Snapshot.open(copy)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_embeddings", 999, r"user/rows-00001-of-00002.*expected U8 \[487, 24\]"),
        ("embedding_dim", 15, r"user/rows-00000-of-00002.*expected U8 \[512, 23\]"),
        ("dtype", "fp16", r"user/rows-00000-of-00002.*expected U8 \[512, 32\]"),
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_rows_of_another_shape_than_the_spec_says_are_refused(copy, key, value, message, verify):
    rewrite_manifest(copy, lambda manifest: manifest["spec"]["tables"][0].update({key: value}))
    with pytest.raises(SnapshotCorruptError, match=message):
        Snapshot.open(copy, verify=verify)


GENRE = "tables/genre/rows-00000-of-00001.safetensors"
FILM_IDS = np.arange(700, dtype=np.int64)
FILM_VOCABULARY = {"ids": FILM_IDS, "strings": np.zeros(9, np.uint8), "offsets": np.zeros(701, np.int64)}


@pytest.mark.parametrize(
    ("relative", "tensors", "message"),
    [
        (GENRE, {"rows": np.zeros((19, 32), np.int8)}, r"is I8 \[19, 32\]"),
        (GENRE, {"row": np.zeros((19, 32), np.uint8)}, "no tensor 'rows'"),
        ("dense.safetensors", {"weight": np.zeros(1, np.float64)}, "tensor 'weight' is F64"),
        ("golden.safetensors", {"scores": np.zeros(1, np.float32)}, "no tensor 'num_candidates'"),
        ("tables/film/vocabulary.safetensors", {"ids": FILM_IDS}, "no tensor 'strings'"),
        ("tables/film/vocabulary.safetensors", {"ids": np.arange(778)}, "778 ids; allowed"),
        ("tables/film/vocabulary.safetensors", {"ids": FILM_IDS.astype(np.int32)}, "expected I64"),
        ("tables/film/vocabulary.safetensors", {"ids": np.zeros((0,), np.int64)}, "0 ids; allowed"),
        (GENRE, {"rows": np.zeros((19, 32), np.uint8), "x": np.zeros(1)}, r"tensors \['x'\] besides \['rows'\]"),
        ("tables/film/vocabulary.safetensors", FILM_VOCABULARY | {"x": FILM_IDS}, r"tensors \['x'\] besides"),
        (
            "tables/film/vocabulary.safetensors",
            FILM_VOCABULARY | {"strings": np.zeros(1024 * 700 + 1, np.uint8)},
            r"tensors of 728009 bytes; at most 728008",
        ),
        ("dense.safetensors", {"weight": np.zeros([1] * 9, np.float32)}, r"shape \[1, .*\] is not a list of at most 8"),
    ],
)
def test_a_well_hashed_file_with_the_wrong_tensors_is_refused_by_name(copy, relative, tensors, message):
    save_file(tensors, copy / relative)
    restate_file(copy, relative)
    for verify in (True, False):
        with pytest.raises(SnapshotCorruptError, match=rf"{os.path.basename(relative)}.*{message}"):
            Snapshot.open(copy, verify=verify)


@pytest.mark.parametrize("kind", ["duplicate", "negative", "other strings", "offsets", "not utf-8"])
def test_a_vocabulary_that_breaks_its_rules_is_refused(copy, kind):
    relative = "tables/film/vocabulary.safetensors"
    tensors = load_file(copy / relative)
    if kind == "duplicate":
        tensors["ids"][5] = tensors["ids"][600]
    elif kind == "negative":
        tensors["ids"][5] = -1
    elif kind == "offsets":
        tensors["offsets"][5] = 10_000
    elif kind == "not utf-8":
        tensors["strings"][5] = 0xFF
    else:
        tensors["strings"][5] += 1
    save_file(tensors, copy / relative)
    restate_file(copy, relative)
    with pytest.raises(SnapshotCorruptError, match=r"film/vocabulary.safetensors"):
        Snapshot.open(copy)


@pytest.mark.parametrize(
    "header",
    [
        b"\xff" * 8,
        (1 << 30).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"{{{{",
        (2).to_bytes(8, "little") + b"{}" + b"extra",
        *(
            len(text).to_bytes(8, "little") + text + b"\0" * 608
            for text in (
                b'{"rows":{"dtype":"U8","shape":[19,32],"data_offsets":[0,607]}}',
                b'{"rows":{"dtype":"U8","shape":[19,32],"data_offsets":[1,609]}}',
                b'{"rows":{"dtype":"U8","shape":[-19,-32],"data_offsets":[0,608]}}',
                b'{"rows":{"dtype":"U8","shape":[true,608],"data_offsets":[0,608]}}',
                b'{"rows":{"dtype":"U9","shape":[19,32],"data_offsets":[0,608]}}',
                b'{"rows":{"dtype":"U8","shape":"ab","data_offsets":[0,608]}}',
                b'{"rows":{"dtype":[],"shape":[608],"data_offsets":[0,608]}}',
                b'{"rows":{"dtype":"U8","shape":[608],"data_offsets":[0,608,1]}}',
                b'{"rows":{"dtype":"U8","shape":{"19":1,"32":1},"data_offsets":[0,608]}}',
                b'{"rows":{"dtype":"U8","shape":[19,32,1,1,1,1,1,1,1],"data_offsets":[0,608]}}',
                b'{"rows":{"dtype":"U8","shape":[0,9223372036854775808],"data_offsets":[0,0]}}',
                b'{"rows":[]}',
                b'{"a":{"dtype":"U8","shape":[608],"data_offsets":[0,608]},'
                b'"rows":{"dtype":"U8","shape":[608],"data_offsets":[0,608]}}',
            )
        ),
    ],
)
def test_a_forged_header_is_refused_before_its_rows_are_mapped(copy, header):
    (copy / GENRE).write_bytes(header)
    restate_file(copy, GENRE)
    for verify in (True, False):
        with pytest.raises(SnapshotCorruptError, match=r"genre/rows-00000-of-00001.safetensors"):
            Snapshot.open(copy, verify=verify)
