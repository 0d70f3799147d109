"""An export that dies leaves no version, and goes on where it stopped."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from loader.errors import ExportError
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import RowSource
from loader.snapshot.store import Store
from loader.snapshot.writer import export_snapshot
from shardrank_testing.snapshots import make_spec, random_tables

SPEC = make_spec(bucketing="hash")
TABLES = random_tables(SPEC, seed=11)
# user 4, film 4, genre 1, tag 2, city 2: the order in which they are written
NUM_ROW_FILES = 13
SUPPORT = Path(__file__).parents[2] / "support"


class TrainingDiedError(Exception):
    """Stands for whatever ends a training job."""


class Rows(RowSource):
    """A source over an array that can end the export at its n-th request, and remembers what was asked."""

    def __init__(self, rows, requests, fail_at):
        self.num_embeddings, self.embedding_dim = rows.shape
        self._rows, self._requests, self._fail_at = rows, requests, fail_at

    def blocks(self, first_row, max_rows):
        if len(self._requests) == self._fail_at:
            raise TrainingDiedError
        self._requests.append(first_row)
        yield self._rows[first_row : first_row + max_rows]


def export(store, fail_at=None, spec=SPEC, dense_value=0.0, clock=lambda: datetime(2024, 1, 1, tzinfo=UTC)):
    """Exports with files of 256 rows; gives how many files were asked of the sources."""
    requests = []
    sources = {name: Rows(rows, requests, fail_at) for name, rows in TABLES.items()}
    dense = {"weight": torch.full((2,), dense_value)}
    with contextlib.suppress(TrainingDiedError):
        export_snapshot(store, spec, rows=sources, dense=dense, version=1, rows_per_file=256, clock=clock)
    return len(requests)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    store = tmp_path_factory.mktemp("whole")
    assert export(store) == NUM_ROW_FILES
    return contents(store)


@pytest.mark.parametrize("fail_at", range(NUM_ROW_FILES))
def test_an_export_interrupted_at_any_file_resumes_and_reads_only_what_is_missing(tmp_path, whole, fail_at):
    assert export(tmp_path, fail_at) == fail_at
    assert Store(tmp_path).versions("films") == []
    assert export(tmp_path) == NUM_ROW_FILES - fail_at
    assert contents(tmp_path) == whole


def test_an_export_interrupted_before_its_manifest_resumes_without_reading_any_row(tmp_path, whole):
    def dies():
        raise TrainingDiedError

    assert export(tmp_path, clock=dies) == NUM_ROW_FILES
    assert Store(tmp_path).versions("films") == []
    assert export(tmp_path) == 0
    assert contents(tmp_path) == whole


def test_a_finished_file_that_was_damaged_is_written_again_and_others_are_kept(tmp_path, whole, caplog):
    export(tmp_path, fail_at=10)
    files = tmp_path / "films" / ".export-1" / "snapshot" / "tables"
    flipped = bytearray((files / "user" / "rows-00001-of-00004.safetensors").read_bytes())
    flipped[-5] ^= 4
    (files / "user" / "rows-00001-of-00004.safetensors").write_bytes(flipped)
    os.truncate(files / "film" / "rows-00000-of-00004.safetensors", 100)
    (files / "genre" / "rows-00000-of-00001.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        assert export(tmp_path) == NUM_ROW_FILES - 10 + 3
    assert len(caplog.records) == 3
    assert contents(tmp_path) == whole


@pytest.mark.parametrize("change", ["spec", "dense", "journal"])
def test_an_export_of_other_inputs_starts_over_and_says_so(tmp_path, caplog, change):
    export(tmp_path, fail_at=5)
    spec, dense_value = SPEC, 0.0
    if change == "spec":
        spec = SPEC.model_copy(update={"dense_inputs": SPEC.dense_inputs.model_copy(update={"context": 9})})
    elif change == "dense":
        dense_value = 1.0
    else:
        (tmp_path / "films" / ".export-1" / "export-state.jsonl").write_text("not a journal\n")
    with caplog.at_level(logging.WARNING):
        assert export(tmp_path, spec=spec, dense_value=dense_value) == NUM_ROW_FILES
    assert "starting over" in caplog.text
    assert Snapshot.open(tmp_path / "films" / "1").spec == spec


KILLED_EXPORT = """
    import os, signal, sys
    from datetime import UTC, datetime
    import torch
    from loader.snapshot.row_source import RowsFromBlocks
    from loader.snapshot.writer import export_snapshot
    from shardrank_testing.snapshots import one_table_spec, random_tables

    def export(store, kill_at):
        spec = one_table_spec(1000, 4)
        rows = random_tables(spec, seed=2)["items"]

        def kill():
            os.kill(os.getpid(), signal.SIGKILL)

        def blocks():
            for start in range(0, 1000, 100):
                if str(start) == kill_at:
                    kill()
                yield rows[start : start + 100]

        def clock():
            if kill_at == "manifest":
                kill()
            return datetime(2024, 1, 1, tzinfo=UTC)

        export_snapshot(
            store, spec, rows={"items": RowsFromBlocks(blocks(), 1000, 4)}, dense={"weight": torch.zeros(1)},
            rows_per_file=256, clock=clock,
        )

    # Each export is a process of its own; the parent only loads the modules.
    for line in sys.stdin:
        child = os.fork()
        if not child:
            export(*line.split())
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_killed_process_leaves_no_version_and_the_next_one_finishes_its_work(tmp_path):
    def run(store, kill_at):
        print(store, kill_at, file=process.stdin, flush=True)
        return int(process.stdout.readline())

    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED_EXPORT)],
        env=os.environ | {"PYTHONPATH": str(SUPPORT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        for kill_at in ("0", "300", "700", "manifest"):
            assert run(tmp_path / "killed", kill_at) == -signal.SIGKILL
            assert Store(tmp_path / "killed").versions("small") == []
        assert run(tmp_path / "killed", "never") == 0
        assert run(tmp_path / "whole", "never") == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    Snapshot.open(tmp_path / "killed" / "small" / "1")


def test_a_disk_that_takes_no_more_is_a_typed_error_and_the_export_can_go_on(tmp_path, whole):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))  # a full file of table `user` has more
    try:
        with pytest.raises(ExportError, match="export of 'films' version 1"):
            export(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert Store(tmp_path).versions("films") == []
    export(tmp_path)
    assert contents(tmp_path) == whole
