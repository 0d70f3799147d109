"""A store finds models and versions, and nothing that is neither."""

from __future__ import annotations

import pytest

from loader.errors import SnapshotError, SnapshotNotFoundError
from loader.snapshot.manifest import MANIFEST_NAME
from loader.snapshot.store import TRASH_PREFIX, Store
from shardrank_testing.snapshots import one_table_spec, write_snapshot


def test_models_and_versions_are_found_in_order(tmp_path):
    for version in (10, 9, 2):
        write_snapshot(tmp_path, one_table_spec(10, model="a"), version=version)
    write_snapshot(tmp_path, one_table_spec(10, model="b"))
    for name in (".export-11", "007", "0", "-3", "x", "1.5", str(2**63)):
        (tmp_path / "a" / name).mkdir()
    (tmp_path / "a" / "12").write_text("a file is no version")
    (tmp_path / "empty").mkdir()
    (tmp_path / ".hidden" / "1").mkdir(parents=True)
    store = Store(tmp_path)
    assert store.models() == ["a", "b"]
    assert store.versions("a") == [2, 9, 10]
    assert store.latest("a") == 10
    assert store.next_version("a") == 11
    assert store.hold("a").path == tmp_path / "a" / "10"
    assert store.hold("a", 9).path == tmp_path / "a" / "9"


def test_what_does_not_exist_is_told_with_what_does(tmp_path):
    write_snapshot(tmp_path, one_table_spec(10, model="a"), version=3)
    store = Store(tmp_path)
    with pytest.raises(SnapshotNotFoundError, match=r"no version 4 of model 'a'; it has \[3\]"):
        store.hold("a", 4)
    with pytest.raises(SnapshotNotFoundError, match=r"no model 'b'; it has \['a'\]"):
        store.hold("b")
    for name in ("..", "../a", "", "."):
        with pytest.raises(SnapshotNotFoundError):
            store.latest(name)


def test_a_store_that_is_not_there_is_empty(tmp_path):
    store = Store(tmp_path / "absent")
    assert store.models() == []
    assert store.next_version("a") == 1
    with pytest.raises(SnapshotNotFoundError, match="absent: there is no such folder"):
        store.latest("a")


def test_an_interrupted_export_is_no_version_but_is_named(tmp_path):
    (tmp_path / "shop" / ".export-2").mkdir(parents=True)
    (tmp_path / "shop" / ".export-x").mkdir()
    store = Store(tmp_path)
    assert (store.models(), store.unfinished()) == ([], [("shop", 2)])
    problem = "; not finished: the export of shop/2, which goes on when it is run again"
    with pytest.raises(SnapshotNotFoundError, match=f"has no model{problem}"):
        store.check_exists()
    write_snapshot(tmp_path, one_table_spec(10, model="a"), version=3)
    store.check_exists()
    with pytest.raises(SnapshotNotFoundError, match=rf"no model 'shop'; it has \['a'\]{problem}"):
        store.latest("shop")


def test_what_a_killed_run_had_begun_to_delete_is_deleted(tmp_path):
    store, folder = Store(tmp_path), tmp_path / "films"
    for version in (1, 2):
        (folder / str(version)).mkdir(parents=True)
        (folder / str(version) / MANIFEST_NAME).touch()
        store.set_aside("films", version)
    store.set_aside("films", 3)  # is not there
    (folder / f"{TRASH_PREFIX}2" / MANIFEST_NAME).unlink()
    store.delete_set_aside("films", staying=[1, 2])
    assert sorted(path.name for path in folder.iterdir()) == ["1"]


def test_small_files_that_the_disk_refuses_are_named(tmp_path):
    store = Store(tmp_path)
    store.write_file("recordings/a", b"12345")
    (tmp_path / "recordings/folder/b").mkdir(parents=True)
    refusals = {
        "recordings/a/b: can't be written: File exists": lambda: store.write_file("recordings/a/b", b""),
        "recordings/folder: .*Is a directory": lambda: store.delete_files(["recordings/folder"]),
    }
    for message, call in refusals.items():
        with pytest.raises(SnapshotError, match=message):
            call()
    assert list(store.list_files("recordings")) == ["recordings/a"]
