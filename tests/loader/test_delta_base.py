"""`delta_base` in the manifest: which stream `last_delta` counts in."""

from __future__ import annotations

import numpy as np
import pytest

from loader.errors import ExportError, SnapshotFormatError
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import rows_of
from loader.snapshot.writer import export_snapshot
from shardrank_testing.snapshots import one_table_spec, rewrite_manifest

SPEC = one_table_spec(10)


def export(store, **arguments):
    rows = {"items": rows_of(np.zeros((10, 8), np.float32))}
    return export_snapshot(store, SPEC, rows=rows, dense={}, **arguments)


@pytest.mark.parametrize(
    ("version", "last_delta", "delta_base", "start"),
    [(3, None, None, (3, 0)), (3, 7, None, (3, 7)), (3, 7, 1, (1, 7)), (3, 0, 3, (3, 0))],
)
def test_where_a_snapshot_begins_to_follow_is_what_was_exported(tmp_path, version, last_delta, delta_base, start):
    path = export(tmp_path, version=version, last_delta=last_delta, delta_base=delta_base)
    manifest = Snapshot.open(path).manifest
    assert (manifest.last_delta, manifest.delta_base, manifest.delta_start) == (last_delta, delta_base, start)


def test_a_manifest_without_a_base_is_read_as_before(tmp_path):
    path = export(tmp_path, last_delta=4)
    rewrite_manifest(path, lambda manifest: manifest.pop("delta_base"))
    assert Snapshot.open(path).manifest.delta_start == (1, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"delta_base": 1}, "delta_base needs last_delta"),
        ({"delta_base": 3, "last_delta": 1}, "delta_base: 3 is later than version 2"),
        ({"delta_base": 0, "last_delta": 1}, "delta_base: .*greater than or equal to 1"),
    ],
)
def test_a_base_that_makes_no_sense_is_not_exported(tmp_path, arguments, message):
    with pytest.raises(ExportError, match=message):
        export(tmp_path, version=2, **arguments)


@pytest.mark.parametrize("base", ["1", True, 0, 2**63, 9])
def test_a_base_that_makes_no_sense_is_not_read(tmp_path, base):
    path = export(tmp_path, last_delta=4)
    rewrite_manifest(path, lambda manifest: manifest.update(delta_base=base))
    with pytest.raises(SnapshotFormatError, match="delta_base"):
        Snapshot.open(path)


def test_another_base_is_another_export(tmp_path):
    # An export that was cut off is only gone on with if it says the same of its deltas.
    def dies():
        raise KeyboardInterrupt

    for base in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            export(tmp_path, version=5, last_delta=3, delta_base=base, clock=dies)
    assert Snapshot.open(export(tmp_path, version=5, last_delta=3, delta_base=2)).manifest.delta_start == (2, 3)
