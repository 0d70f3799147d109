"""A table that is stored in slices of its columns: what a spec may say, what is written, and what is read back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from loader.errors import ExportError, SnapshotFormatError
from loader.snapshot.codecs import codec_for
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.publishing import rows_bytes_of
from loader.snapshot.reader import Snapshot, verify_snapshot
from loader.snapshot.row_source import RowsFromBlocks, RowSource, rows_of
from loader.snapshot.tables import TableSpec
from loader.snapshot.writer import export_snapshot
from shardrank_testing.snapshots import make_spec, random_tables, rewrite_manifest, with_slices, write_snapshot

SLICES = {"film": (10, 3, 3), "tag": (6, 2), "city": (1, 3)}
SPEC = with_slices(make_spec(), SLICES)
# Of whose tables files may have 256 rows: those of film are four of each slice.
HASHED = with_slices(make_spec(bucketing="hash"), SLICES)
STORED = ["user", "film.c0", "film.c1", "film.c2", "genre", "tag.c0", "tag.c1", "city.c0", "city.c1"]


def table(**fields) -> TableSpec:
    return TableSpec(**{"name": "t", "num_embeddings": 9, "embedding_dim": 8, "feature_names": ("f",), **fields})


def test_a_sliced_table_is_stored_as_tables_of_its_columns_that_are_alike_in_all_else():
    assert [one.name for one in SPEC.stored_tables] == STORED
    assert table().slices == (table(),)
    made = table(column_dims=(5, 3), dtype="fp16", bucketing="range", default_row=4)
    assert made.slices == tuple(
        table(name=f"t.c{number}", embedding_dim=dim, dtype="fp16", bucketing="range", default_row=4)
        for number, dim in enumerate((5, 3))
    )
    # No copy of a spec may go on with the slices of another one.
    assert [one.dtype for one in made.model_copy(update={"dtype": "fp32"}).slices] == ["fp32", "fp32"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"column_dims": (8,)}, "at least 2 slices"),
        ({"column_dims": (5, 4)}, "add up to 9, embedding_dim is 8"),
        ({"column_dims": (8, 0)}, "greater than or equal to 1"),
        ({"column_dims": (5, 3), "dtype": "int4"}, "even number of columns"),
        ({"column_dims": (1,) * 33, "embedding_dim": 33}, "at most 32"),
        ({"column_dims": (4, 4), "name": "t" * 126}, "pass 128 characters"),
    ],
)
def test_slices_that_do_not_make_up_the_table_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        table(**fields)


def test_each_slice_is_encoded_with_a_scale_of_its_own_and_read_back_row_for_row(tmp_path):
    path, rows = write_snapshot(tmp_path, SPEC, rows_per_file=256)
    snapshot = Snapshot.open(path)
    assert [files.table for files in snapshot.manifest.tables] == STORED
    for one in SPEC.tables:
        first = 0
        for stored in one.slices:
            columns = rows[one.name][:, first : first + stored.embedding_dim]
            expected = codec_for(stored.dtype, stored.embedding_dim).encode(columns)
            np.testing.assert_array_equal(snapshot.read_rows(stored.name, 0, one.num_embeddings), expected)
            first += stored.embedding_dim
    assert snapshot.float32_bytes == sum(4 * one.size for one in rows.values())
    report = verify_snapshot(path)
    assert report.ok
    assert "table 'film.c1': all 777 rows decode to finite values" in report.checks
    assert rows_bytes_of(SPEC) == sum(
        snapshot.read_rows(name, 0, 1).size * one.num_embeddings
        for name, one in zip(STORED, SPEC.stored_tables, strict=True)
    )


@dataclass(frozen=True)
class Written:
    """Bytes by path of what was written."""

    files: dict[str, bytes]

    @classmethod
    def of(cls, folder) -> Written:
        paths = (path for path in folder.rglob("*.safetensors"))
        return cls({str(path.relative_to(folder)): path.read_bytes() for path in paths})


class Dying(RowSource):
    """Rows that end the export at a call, once; before, each block may be asked for once only."""

    def __init__(self, rows, dies_at):
        super().__init__(*rows.shape)
        self.calls, self._rows, self._dies_at = 0, rows, dies_at

    def blocks(self, first_row, max_rows):
        self.calls += 1
        if self.calls == self._dies_at:
            raise InterruptedError
        yield self._rows[first_row : first_row + max_rows]


def export(store, sources):
    dense = {"weight": torch.zeros(1)}
    return export_snapshot(store, HASHED, rows=sources, dense=dense, version=1, rows_per_file=256)


def test_a_source_that_is_read_once_gives_all_slices_and_an_interrupted_export_the_same_bytes(tmp_path):
    rows = random_tables(SPEC, 4)
    whole = Written.of(export(tmp_path / "whole", {name: rows_of(one) for name, one in rows.items()}))
    blocks = {name: RowsFromBlocks(iter(np.array_split(one, 5)), *one.shape) for name, one in rows.items()}
    assert Written.of(export(tmp_path / "once", blocks)) == whole
    for dies_at in (1, 2, 3):
        store = tmp_path / str(dies_at)
        with pytest.raises((ExportError, InterruptedError)):
            export(store, {name: Dying(one, dies_at if name == "film" else 0) for name, one in rows.items()})
        sources = {name: Dying(one, 0) for name, one in rows.items()}
        assert Written.of(export(store, sources)) == whole
        # What was finished is not asked for again, and what was not is asked for once, whatever the slices.
        assert (sources["user"].calls, sources["film"].calls) == (0, 4 - (dies_at - 1))


def test_an_export_that_dies_between_two_slices_of_a_file_writes_the_missing_ones_only(tmp_path, monkeypatch):
    rows = random_tables(HASHED, 4)
    sources = {name: rows_of(one) for name, one in rows.items()}
    whole = Written.of(export(tmp_path / "whole", sources))
    from loader.snapshot import store as stores

    real, dying = stores.ExportFolder.write, {"film.c1"}

    def write(self, path, produce, stated=None):
        if any(name in path for name in dying):
            raise InterruptedError
        return real(self, path, produce, stated)

    monkeypatch.setattr(stores.ExportFolder, "write", write)
    with pytest.raises((ExportError, InterruptedError)):
        export(tmp_path / "cut", sources)
    dying.clear()
    assert Written.of(export(tmp_path / "cut", sources)) == whole


def test_vocabulary_and_access_counts_are_of_the_table_and_stand_with_its_first_slice(tmp_path):
    mapped = {"id_mapping": {"kind": "vocabulary", "id_type": "string"}}
    tables = [one.model_copy() if one.name != "film" else TableSpec(**{**dict(one), **mapped}) for one in SPEC.tables]
    spec = ModelSpec(**{**dict(SPEC), "tables": tables})
    counts = np.arange(777)
    path, _ = write_snapshot(tmp_path, spec, vocabularies={"film": ["a", "b"]}, access_counts={"film": counts})
    snapshot = Snapshot.open(path)
    assert snapshot.vocabulary_strings("film") == ["a", "b"]
    assert snapshot.vocabulary("film").tolist() == snapshot.vocabulary("film.c0").tolist()
    for name in ("film", "film.c0", "film.c2"):
        np.testing.assert_array_equal(snapshot.access_counts(name), counts)
    assert snapshot.access_counts("tag.c1") is None
    held = {files.table: files for files in snapshot.manifest.tables}
    assert held["film.c0"].vocabulary.path == "tables/film/vocabulary.safetensors"
    assert held["film.c0"].access_counts.path == "tables/film/access-counts.safetensors"
    assert held["film.c1"].vocabulary is held["film.c1"].access_counts is None

    def move(kind):
        def edit(manifest):
            first, second = manifest["tables"][1:3]
            second[kind], first[kind] = first[kind], None

        return edit

    for kind, message in (("access_counts", "first slice"), ("vocabulary", "vocabulary file goes with")):
        rewrite_manifest(path, move(kind))
        with pytest.raises(SnapshotFormatError, match=message):
            Snapshot.open(path)
