"""`delta_base` in the manifest: which stream `last_delta` counts in."""

from __future__ import annotations

import numpy as np
import pytest

from loader.errors import ExportError
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import rows_of
from loader.snapshot.writer import export_snapshot
from shardrank_testing.snapshots import one_table_spec

SPEC = one_table_spec(10)


def export(store, **arguments):
    rows = {"items": rows_of(np.zeros((10, 8), np.float32))}
    return export_snapshot(store, SPEC, rows=rows, dense={}, **arguments)


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


def test_another_base_is_another_export(tmp_path):
    # An export that was cut off is only gone on with if it says the same of its deltas.
    def dies():
        raise KeyboardInterrupt

    for base in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            export(tmp_path, version=5, last_delta=3, delta_base=base, clock=dies)
    assert Snapshot.open(export(tmp_path, version=5, last_delta=3, delta_base=2)).manifest.delta_start == (2, 3)
