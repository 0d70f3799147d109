"""`loadtest prepare`: what it writes is a snapshot like any other, which serves the workload's requests."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.snapshot.publishing import rows_bytes_of
from loader.snapshot.reader import Snapshot, verify_snapshot
from loadtest.cli import prepare
from loadtest.workloads.catalog import open_workload
from loadtest.workloads.payloads import MAX_POOL_BYTES, Pool, drawn_payloads
from loadtest.workloads.prepare import ROW_LIMIT, RandomRows, write_random_snapshot
from serving.embedded import ModelSource, load_served_model
from serving.rank.service import RankingService
from shardrank_testing.serving_api import run, running_api

WORKLOAD = "merlin-tiny:0.0002"


@pytest.fixture(scope="module")
def snapshot_folder(tmp_path_factory):
    return write_random_snapshot(open_workload(WORKLOAD).spec, tmp_path_factory.mktemp("store"), seed=3)


def joined(rows: RandomRows, first: int, count: int) -> np.ndarray:
    return np.concatenate(list(rows.blocks(first, count)))


@given(first=st.integers(0, 300_000), count=st.integers(1, 200_000))
@settings(max_examples=20)
def test_random_rows_are_the_same_in_every_block(first, count):
    rows = RandomRows(5, "t", 300_001, 8)
    assert np.array_equal(joined(rows, first, count), ALL_ROWS[first : first + count])


ALL_ROWS = np.concatenate(list(RandomRows(5, "t", 300_001, 8).blocks(0, 300_001)))


def test_random_rows_fill_their_range_and_differ_by_seed():
    assert ALL_ROWS.dtype == np.float32
    assert -ROW_LIMIT <= ALL_ROWS.min() < -0.99 * ROW_LIMIT
    assert 0.99 * ROW_LIMIT < ALL_ROWS.max() <= ROW_LIMIT
    assert abs(float(ALL_ROWS.mean())) < 0.001
    others = [RandomRows(6, "t", 100, 8), RandomRows(5, "u", 100, 8)]
    assert not any(np.array_equal(joined(one, 0, 100), ALL_ROWS[:100]) for one in others)
    assert len({one.fingerprint() for one in [*others, RandomRows(5, "t", 300_001, 8)]}) == 3


def test_memory_is_bounded_by_a_block(monkeypatch):
    monkeypatch.setattr("loadtest.workloads.prepare.BLOCK_BYTES", 4 * 8 * 1000)
    blocks = RandomRows(5, "t", 10_500, 8).blocks(1_500, 5_000)
    assert [block.shape[0] for block in blocks] == [500, 1000, 1000, 1000, 1000, 500]


def test_the_snapshot_has_the_rows_and_passes_verification(snapshot_folder):
    report = verify_snapshot(snapshot_folder)
    assert report.ok, report.problems
    snapshot = Snapshot.open(snapshot_folder)
    spec = open_workload(WORKLOAD).spec
    assert snapshot.spec == spec
    assert snapshot.manifest.metadata == {"source": "random rows", "seed": "3"}
    assert sum(entry.size_bytes for table in snapshot.manifest.tables for entry in table.rows) >= rows_bytes_of(spec)


async def served(folder, payloads) -> list[dict]:
    service = RankingService(None, expected_models=[payloads.model])
    service.install(load_served_model(ModelSource(snapshot=folder, dtype="float32"), service))
    try:
        async with running_api(service) as api:
            answers = [await api.http.post(payload.path, content=payload.body) for payload in payloads]
            return [answer.json() for answer in answers]
    finally:
        service.close()


def test_scores_of_random_models_differ_and_do_not_saturate(tmp_path):
    folder = write_random_snapshot(open_workload("dlrm-v2:0.0001").spec, tmp_path)
    drawn = drawn_payloads(open_workload("dlrm-v2:0.0001", candidates="50"), "json", 0)
    payloads = Pool("json", "dlrm-v2", itertools.islice(drawn, 2), MAX_POOL_BYTES)
    scores = np.array([answer["scores"] for answer in run(served(folder, payloads))])
    assert 0.01 < scores.std() < 0.4
    assert ((scores > 0.001) & (scores < 0.999)).all()


def test_the_command_says_how_to_serve_the_model(tmp_path):
    result = CliRunner().invoke(prepare, ["--workload", WORKLOAD, "--store", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert f"shardrank serve --store {tmp_path} --model merlin-tiny" in result.output


def test_an_interrupted_export_goes_on_with_the_same_rows(tmp_path, snapshot_folder):
    spec = open_workload(WORKLOAD).spec

    def interrupt(what: str, done: int, total: int) -> None:
        if what == f"table {spec.tables[30].name}":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_random_snapshot(spec, tmp_path, seed=3, progress=interrupt)
    written = {path.stat().st_ino for path in tmp_path.rglob("*.safetensors")}
    folder = write_random_snapshot(spec, tmp_path, seed=3)
    assert len(written & {path.stat().st_ino for path in folder.rglob("*.safetensors")}) >= 30
    # The same files, by size and checksum, as of the export in one go.
    assert Snapshot.open(folder).manifest.tables == Snapshot.open(snapshot_folder).manifest.tables
