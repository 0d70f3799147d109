"""A snapshot made to hurt its reader is refused by its headers, at little cost and in a short message."""

from __future__ import annotations

import json
import math
import os
import re
from math import prod as math_prod

import pytest

from loader.errors import SnapshotCorruptError, SnapshotFormatError
from loader.snapshot import reader
from loader.snapshot.reader import Snapshot
from shardrank_testing.snapshots import restate_entry, restate_file, rewrite_manifest

GENRE = "tables/genre/rows-00000-of-00001.safetensors"
GIB = 1 << 30


def expect_short_refusal(path, error, **arguments):
    """The message of a refusal, which is never as long as what the file says."""
    with pytest.raises(error) as caught:
        Snapshot.open(path, **arguments)
    assert len(str(caught.value)) < 3000
    return str(caught.value)


@pytest.mark.parametrize(
    "entry",
    [
        {"rows": {"dtype": "U8", "shape": [9] * 400_000, "data_offsets": [0, 608]}},
        {"rows": {"dtype": "U8", "shape": [10**4290] * 300, "data_offsets": [0, 608]}},
        {"rows": {"dtype": "U8", "shape": [10**4290], "data_offsets": [10**4290, 608]}},
        {"x" * 1_000_000: {"dtype": "U8", "shape": [608], "data_offsets": [0, 607]}},
        {"x" * 1_000_000: {"dtype": "U8", "shape": [608], "data_offsets": [0, 608]}},
        {"rows": {"dtype": "U" * 1_000_000, "shape": [608], "data_offsets": [0, 608]}},
    ],
)
def test_a_header_of_long_shapes_numbers_or_names_is_refused_in_a_short_message(copy, entry, monkeypatch):
    products = []
    monkeypatch.setattr(math, "prod", lambda numbers: products.append(list(numbers)) or math_prod(numbers))
    text = json.dumps(entry).encode()
    (copy / GENRE).write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 608)
    restate_file(copy, GENRE)
    assert GENRE in expect_short_refusal(copy, SnapshotCorruptError)
    assert all(len(numbers) <= 8 and max(numbers, default=0) < 2**63 for numbers in products)


def write_sparse(snapshot_path, relative, tensors):
    """A file of zeros that takes no room on the disk, by a header of `tensors` (dtype, shape, bytes)."""
    header, end = {}, 0
    for name, (dtype, shape, size_bytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size_bytes]}
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
        ("golden.safetensors", {"scores": ("F32", [GIB], 4 * GIB)}, "tensors of 4294967296 bytes; at most 268435456"),
        ("golden.safetensors", {"scores": ("F32", [1 << 25], 1 << 27)}, "no tensor 'num_candidates'"),
        ("dense.safetensors", {"w": ("F32", [3 * GIB], 12 * GIB)}, "tensors of 12884901888 bytes; at most 8589934592"),
        ("tables/film/vocabulary.safetensors", {"ids": ("I64", [GIB], 8 * GIB)}, "1073741824 ids; allowed: 1 to"),
        (
            "tables/film/vocabulary.safetensors",
            {"ids": ("I64", [700], 5600), "strings": ("U8", [GIB], GIB), "offsets": ("I64", [701], 5608)},
            "tensors of 1073753032 bytes; at most 728008",
        ),
        (
            "tables/genre/rows-00000-of-00001.safetensors",
            {"rows": ("U8", [GIB, 32], 32 * GIB)},
            r"expected U8 \[19, 32\]",
        ),
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_a_huge_file_is_refused_by_its_header_before_it_is_read(copy, relative, tensors, message, verify, monkeypatch):
    write_sparse(copy, relative, tensors)
    hashed = []
    monkeypatch.setattr(reader, "hash_file", lambda *args: hashed.append(args))
    with pytest.raises(SnapshotCorruptError, match=rf"{os.path.basename(relative)}: .*{message}"):
        Snapshot.open(copy, verify=verify)
    assert hashed == []


def change_table(key, value):
    return lambda manifest: manifest["spec"]["tables"][0].update({key: value})


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (lambda manifest: manifest.update(version="1"), "version"),
        (lambda manifest: manifest.update(version=1.0), "version"),
        (lambda manifest: manifest.update(last_delta="7"), "last_delta"),
        (lambda manifest: manifest.update(last_delta=True), "last_delta"),
        (change_table("num_embeddings", "1000"), "spec.tables.0.num_embeddings"),
        (change_table("embedding_dim", 16.0), "spec.tables.0.embedding_dim"),
        (change_table("default_row", False), "spec.tables.0.default_row"),
        (lambda manifest: manifest["spec"]["features"][0].update(weighted="no"), "spec.features.0.weighted"),
        (lambda manifest: manifest["spec"]["features"][0].update(weighted=0), "spec.features.0.weighted"),
        (lambda manifest: manifest["golden"].update(tolerance="0.1"), "golden.tolerance"),
        (lambda manifest: manifest["dense"].update(size_bytes="9"), "dense.size_bytes"),
    ],
)
def test_a_number_or_bool_of_another_type_is_refused_by_its_place(copy, edit, place):
    rewrite_manifest(copy, edit)
    assert f"manifest.json: {place}: " in expect_short_refusal(copy, SnapshotFormatError)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda manifest: manifest.update(tables=[0] * 400_000), "tables.0: "),
        (lambda manifest: manifest["spec"].update(tables=[{}] * 400_000), "spec.tables.0"),
        (lambda manifest: manifest["spec"].update(features=[{}] * 400_000), "spec.features.0"),
        (
            lambda manifest: manifest["tables"][0].update(rows=manifest["tables"][0]["rows"][:1] * 66_000),
            "at most 65536",
        ),
        (lambda manifest: manifest.update(tables=manifest["tables"][1:2] * 5000), "at most 4096"),
        (lambda manifest: manifest.update({str(key): 0 for key in range(5000)}), "object of 50.. keys; at most 4096"),
        (lambda manifest: manifest.update({f"key{key}" * 99: 0 for key in range(4000)}), "; and 3995 more"),
        (lambda manifest: manifest.update(format_version="x" * 1_000_000), "format_version 'xxx"),
        (lambda manifest: manifest.update(created_at=[["x" * 1_000_000]]), "created_at: "),
        (lambda manifest: manifest["spec"]["tables"][0].update(feature_names=["f" * 99] * 4000), "has duplicates"),
    ],
)
def test_a_manifest_that_is_wrong_in_very_many_places_is_refused_in_a_short_message(copy, edit, message):
    rewrite_manifest(copy, edit)
    assert re.search(message, expect_short_refusal(copy, SnapshotFormatError))
