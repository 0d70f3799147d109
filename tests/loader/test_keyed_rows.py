"""Keys beside rows: in the order of their buckets, none twice, what a missing key gets, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from loader.description import ModelDescription
from loader.errors import ExportError, SnapshotCorruptError
from loader.keyed_rows import first_twice
from loader.snapshot.codecs import RowCodec
from loader.snapshot.reader import Snapshot, verify_snapshot
from loader.snapshot.row_source import RowsFromBlocks
from loader.snapshot.tables import TableSpec, fingerprint_strings
from loader.snapshot.writer import export_snapshot
from shardrank_testing.keyed_tables import random_keys
from shardrank_testing.snapshots import files_of, model_of, random_rows, restate_file, table_of, write_snapshot

NUM_KEYS = 9000


def spec_of(kind="int64", **more):
    return model_of([table_of("items", 10_000, 4, "item", keys=kind, **more)])


def export(folder: Path, keys, rows: np.ndarray, **more) -> Path:
    options = {"rows_per_file": 4096, "version": 1}
    return write_snapshot(folder, spec_of(**more), tables={"items": rows}, keys={"items": keys}, **options)[0]


@pytest.fixture(scope="module")
def given():
    rng = np.random.default_rng(3)
    return random_keys(rng, NUM_KEYS), random_rows(rng, NUM_KEYS, 4)


def splitmix64(key: int) -> int:
    """By definition, in Python's numbers."""
    mixed = (key + 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return mixed ^ mixed >> 31


def test_each_key_has_its_row_in_the_order_of_the_buckets(tmp_path, given):
    keys, rows = given
    snapshot = Snapshot.open(export(tmp_path, keys, rows))
    (files,), codec = snapshot.manifest.tables, RowCodec("int8", 4)
    expected = dict(zip(keys.tolist(), codec.encode(rows), strict=True))
    assert (files.num_keys, len(files.rows)) == (NUM_KEYS, 3)
    for index in range(3):
        of_file, stored = snapshot.keys("items", index), snapshot.rows_file("items", index)
        assert sorted(of_file.tolist()) == sorted(keys[4096 * index :][:4096].tolist())
        in_order = [(splitmix64(key % 2**64) % 4096, key) for key in of_file.tolist()]
        assert in_order == sorted(in_order)
        for key, row in zip(of_file.tolist(), stored, strict=True):
            assert row.tobytes() == expected[key].tobytes()
    assert verify_snapshot(snapshot.path).ok


def test_a_missing_key_gets_zeros_or_the_mean_of_what_is_stored(tmp_path, given):
    keys, rows = given
    codec = RowCodec("int8", 4)
    assert not codec.decode(Snapshot.open(export(tmp_path / "a", keys, rows)).missing_row("items")).any()
    snapshot = Snapshot.open(export(tmp_path / "b", keys, rows, missing="mean"))
    mean = codec.decode(codec.encode(rows)).mean(axis=0, dtype=np.float64)
    np.testing.assert_allclose(codec.decode(snapshot.missing_row("items"))[0], mean, atol=np.ptp(mean) / 255)


def test_an_interrupted_export_goes_on_with_the_same_files(tmp_path, given):
    keys, rows = given
    whole = files_of(export(tmp_path / "whole", keys, rows, missing="mean"))

    def blocks(count: int):
        yield from np.split(rows, 90)[:count]

    def again(count: int):
        source = {"items": RowsFromBlocks(blocks(count), NUM_KEYS, 4)}
        options = {"keys": {"items": iter(np.split(keys, 9))}, "dense": {}, "version": 1, "rows_per_file": 4096}
        return export_snapshot(tmp_path / "again", spec_of(missing="mean"), rows=source, **options)

    with pytest.raises(ExportError, match="the blocks end after 5000 rows"):
        again(50)
    again_files = files_of(again(90))
    assert {name: again_files[name] for name in whole if name.startswith("tables/")} == {
        name: content for name, content in whole.items() if name.startswith("tables/")
    }


def test_keys_may_be_unsigned_or_strings(tmp_path, given):
    keys, rows = given
    signed, unsigned = (export(tmp_path / name, one, rows) for name, one in (("s", keys), ("u", keys.view(np.uint64))))
    # Manifests have the time at which they were written.
    assert files_of(signed / "tables") == files_of(unsigned / "tables")
    names = [f"film {number}" for number in range(50)]
    snapshot = Snapshot.open(export(tmp_path / "strings", names, rows[:50], kind="string"))
    assert sorted(snapshot.keys("items", 0).tolist()) == sorted(fingerprint_strings(names).tolist())


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda keys: np.where(np.arange(keys.size) == 7, keys[8], keys), "is there twice"),
        (lambda keys: keys[::-1], "keys are not in the order of their buckets"),
    ],
    ids=["twice", "order"],
)
def test_verify_finds_keys_that_are_wrong(tmp_path, given, edit, problem):
    keys, rows = given
    path = export(tmp_path, keys[:200], rows[:200])
    relative = Snapshot.open(path).manifest.tables[0].rows[0].path
    tensors = safetensors.numpy.load_file(path / relative)
    tensors["keys"] = np.ascontiguousarray(edit(tensors["keys"]))
    safetensors.numpy.save_file(tensors, path / relative)
    restate_file(path, relative)
    report = verify_snapshot(path)
    assert not report.ok
    assert any(problem in one for one in report.problems), report.problems


def test_a_row_file_without_its_keys_is_refused(tmp_path, given):
    keys, rows = given
    path = export(tmp_path, keys[:200], rows[:200])
    relative = Snapshot.open(path).manifest.tables[0].rows[0].path
    tensors = safetensors.numpy.load_file(path / relative)
    safetensors.numpy.save_file({"rows": tensors["rows"]}, path / relative)
    restate_file(path, relative)
    with pytest.raises(SnapshotCorruptError, match="has no tensor 'keys'"):
        Snapshot.open(path)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (None, "keys: missing for tables .'items'"),
        ([], "0 of them; allowed is 1 to its capacity 10000"),
        ([5, 6, 5], "table 'items': keys: 5 is there twice"),
        ([1, 2], r"rows are \[3, 4\], its keys, and the spec, say \[2, 4\]"),
        ([0.5, 1, 2], r"expected integers \[n\] of at most 64 bits, got float64"),
        (range(20_000), "20000 of them; allowed is 1 to its capacity 10000"),
    ],
)
def test_keys_that_do_not_fit_are_refused(tmp_path, keys, says):
    given = {} if keys is None else {"keys": {"items": keys}}
    with pytest.raises(ExportError, match=says):
        write_snapshot(tmp_path, spec_of(), tables={"items": np.ones((3, 4), np.float32)}, **given)


def described(**table) -> ModelDescription:
    shape = {"name": "items", "embedding_dim": 4, "feature_names": ["item"], **table}
    features = [{"name": "item", "side": "candidate"}]
    dense = {"kind": "mlp", "config": {"hidden": [4]}}
    return ModelDescription.model_validate(
        {"model": "m", "tables": [shape], "features": features, "dense_model": dense}
    )


def test_a_description_says_capacity_in_place_of_rows():
    (table,) = described(keys="int64", capacity=50, missing="skip").compiled().tables
    assert (table.num_embeddings, table.keys, table.missing) == (50, "int64", "skip")
    automatic = described(keys="int64", capacity="auto")
    assert automatic.compiled(num_keys={"items": 41}).tables[0].num_embeddings == 52
    with pytest.raises(ExportError, match="capacity is auto: give its keys"):
        automatic.compiled()
    # Read by a release that knows no keys, a table without them is what it was.
    assert {"keys", "missing"}.isdisjoint(described(num_embeddings=9).compiled().tables[0].model_dump())
    assert ModelDescription.model_validate_json(automatic.model_dump_json()) == automatic


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"num_embeddings": 5, "keys": "int64"}, "either num_embeddings, or keys and a capacity"),
        ({"num_embeddings": 5, "capacity": 5}, "either num_embeddings, or keys and a capacity"),
        ({"keys": "int64", "capacity": 9, "blocks": [{"share": 0.5}, {}]}, "keys is stored whole: .* blocks"),
        ({"keys": "int64", "capacity": 9, "project_to": 8}, "keys is stored whole: .* project_to"),
        ({"keys": "int64", "capacity": 9, "dtype": {"hot": "fp16", "cold": "int8", "hot_share": 0.1}}, "popularity"),
        ({"num_embeddings": 9, "missing": "mean"}, "missing goes with keys"),
        ({"keys": "int64", "capacity": 9, "unknown_id": "skip"}, "keys go without id_mapping, unknown_id"),
        ({"keys": "int64", "capacity": 9, "bucketing": "range"}, "keys go without id_mapping, unknown_id"),
    ],
)
def test_what_does_not_go_with_keys_is_refused(table, says):
    with pytest.raises(ValueError, match=says):
        described(**table).compiled()
    with pytest.raises(ExportError, match="a table with keys is not pruned"):
        described(keys="int64", capacity=9).compiled({"items": 3})


def test_slices_have_the_keys_of_their_table(tmp_path, given):
    keys, rows = given
    spec = model_of([TableSpec(**{**dict(iter(spec_of().tables[0])), "column_dims": (1, 3)})])
    path, _ = write_snapshot(tmp_path, spec, tables={"items": rows}, keys={"items": keys}, rows_per_file=4096)
    snapshot = Snapshot.open(path)
    for index in range(3):
        np.testing.assert_array_equal(snapshot.keys("items.c0", index), snapshot.keys("items.c1", index))


def test_many_keys_are_looked_through_in_parts_and_the_one_that_is_twice_is_found(monkeypatch):
    monkeypatch.setattr("loader.keyed_rows._COMPARED_KEYS", 100)
    keys = random_keys(np.random.default_rng(8), 1050)
    assert keys.size == 1050
    assert first_twice(keys) is None
    for mine, other in ((0, 1049), (500, 501), (3, 700)):
        twice = keys.copy()
        twice[mine] = twice[other]
        assert first_twice(twice) == keys[other]
    assert first_twice(np.zeros(0, np.int64)) is None
    assert first_twice(np.array([7, 3, 7, 3])) == 3
