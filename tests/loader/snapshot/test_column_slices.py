"""A table that is stored in slices of its columns: what a spec may say, what is written, and what is read back."""

from __future__ import annotations

import numpy as np
import pytest

from loader.errors import SnapshotCorruptError
from loader.snapshot.codecs import RowCodec
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.publishing import rows_bytes_of
from loader.snapshot.reader import Snapshot, verify_snapshot
from loader.snapshot.tables import TableSpec
from shardrank_testing.snapshots import make_spec, rewrite_manifest, with_slices, write_snapshot

SPEC = with_slices(make_spec(), {"film": (10, 3, 3), "tag": (6, 2), "city": (1, 3)})
STORED = ["user", "film.c0", "film.c1", "film.c2", "genre", "tag.c0", "tag.c1", "city.c0", "city.c1"]


def table(**fields) -> TableSpec:
    return TableSpec(**{"name": "t", "num_embeddings": 9, "embedding_dim": 8, "feature_names": ("f",), **fields})


def test_a_sliced_table_is_stored_as_tables_alike_in_all_else():
    assert [one.name for one in SPEC.stored_tables] == STORED
    assert table().slices == (table(),)
    made = table(column_dims=(5, 3), dtype="fp16", bucketing="range", default_row=4)
    assert made.slices == tuple(
        table(name=f"t.c{number}", embedding_dim=dim, dtype="fp16", bucketing="range", default_row=4)
        for number, dim in enumerate((5, 3))
    )
    # No copy of a spec may go on with the slices of another one.
    assert [one.dtype for one in made.model_copy(update={"dtype": "fp32"}).slices] == ["fp32", "fp32"]


def test_each_slice_is_encoded_with_a_scale_of_its_own(tmp_path):
    path, rows = write_snapshot(tmp_path, SPEC, rows_per_file=256)
    snapshot = Snapshot.open(path)
    assert [files.table for files in snapshot.manifest.tables] == STORED
    stored_bytes = 0
    for one in SPEC.tables:
        columns = (
            np.split(rows[one.name], np.cumsum(one.column_dims)[:-1], axis=1) if one.column_dims else [rows[one.name]]
        )
        for stored, values in zip(one.slices, columns, strict=True):
            expected = RowCodec(stored.dtype, stored.embedding_dim).encode(values)
            np.testing.assert_array_equal(snapshot.read_rows(stored.name, 0, one.num_embeddings), expected)
            stored_bytes += expected.nbytes
    assert rows_bytes_of(SPEC) == stored_bytes
    assert snapshot.float32_bytes == sum(values.nbytes for values in rows.values())
    report = verify_snapshot(path)
    assert report.ok
    assert "table 'film.c1': all 777 rows decode to finite values" in report.checks


def test_vocabulary_and_access_counts_go_with_the_first_slice(tmp_path):
    mapped = {"id_mapping": {"kind": "vocabulary", "id_type": "string"}}
    tables = [
        one.model_copy() if one.name != "film" else TableSpec(**{**dict(iter(one)), **mapped}) for one in SPEC.tables
    ]
    spec = ModelSpec(**{**dict(SPEC), "tables": tables})
    counts = np.arange(777)
    path, _ = write_snapshot(tmp_path, spec, vocabularies={"film": ["a", "b"]}, access_counts={"film": counts})
    snapshot = Snapshot.open(path)
    assert snapshot.vocabulary_strings("film") == ["a", "b"]
    assert snapshot.vocabulary("film").tolist() == snapshot.vocabulary("film.c0").tolist()
    for name in ("film", "film.c0", "film.c2"):
        np.testing.assert_array_equal(snapshot.access_counts(name), counts)
    assert snapshot.access_counts("tag.c1") is None
    with pytest.raises(KeyError):
        snapshot.access_counts("nobody")
    held = {files.table: files for files in snapshot.manifest.tables}
    assert held["film.c0"].vocabulary.path == "tables/film/vocabulary.safetensors"
    assert held["film.c0"].access_counts.path == "tables/film/access-counts.safetensors"
    assert held["film.c1"].vocabulary is held["film.c1"].access_counts is None
    for kind, message in (("access_counts", "first slice"), ("vocabulary", "vocabulary file goes with")):
        rewrite_manifest(
            path, lambda manifest, kind=kind: manifest["tables"][2].update({kind: manifest["tables"][1].pop(kind)})
        )
        with pytest.raises(SnapshotCorruptError, match=message):
            Snapshot.open(path)
