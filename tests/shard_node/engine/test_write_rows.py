"""Rows that are written are pooled from then on, on every engine, and the snapshot stays as it is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from loader.snapshot.reader import Snapshot
from router.plan import Plan
from shard_node.bags import KeyedBags
from shard_node.engine.base import Engine
from shard_node.engine.loading import load_tables
from shard_node.engine.reference import ReferenceEngine
from shard_node.errors import InvalidBagsError
from shardrank_testing.bags import assert_blocks_equal, random_table_bags
from shardrank_testing.card_engines import OnCards, engine_params
from shardrank_testing.deltas import assert_stored, delta_spec, encoded, export_state, load_version
from shardrank_testing.snapshots import random_rows, random_tables, write_snapshot
from shardrank_testing.topologies import decoded_tables

SPEC = delta_spec(rows=700)

ENGINES: dict[str, Callable[[Snapshot, dict[str, np.ndarray]], Engine]] = {
    "reference": lambda snapshot, rows: ReferenceEngine(snapshot.spec, decoded_tables(snapshot.spec, rows)),
    "one card": lambda snapshot, rows: load_version(snapshot).engine,
    "three cards": lambda snapshot, rows: load_version(snapshot, cards=3).engine,
    "mapped": lambda snapshot, rows: load_version(snapshot, budget=0).engine,
    "partly mapped, two cards": lambda snapshot, rows: load_version(snapshot, cards=2, budget=20_000).engine,
}


@pytest.fixture(params=[*ENGINES, *engine_params()])
def engine(request, tmp_path) -> Iterator[Engine]:
    path, tables = write_snapshot(tmp_path, SPEC, seed=1, rows_per_file=256)
    snapshot, param = Snapshot.open(path), request.param
    engine = param.load(snapshot) if isinstance(param, OnCards) else ENGINES[param](snapshot, tables)
    yield engine
    engine.close()


def write_random(engine: Engine, state: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    for number, table in enumerate(engine.layout.tables):
        rows = np.flatnonzero(rng.random(table.num_embeddings) < 0.3)
        values = random_rows(rng, rows.size, table.embedding_dim)
        state[table.name][rows] = values
        assert engine.write_rows(number, rows, encoded(table, values)) == rows.size


def test_written_rows_are_pooled_and_equal_a_fresh_export(engine, tmp_path):
    rng = np.random.default_rng(3)
    state = random_tables(SPEC, 1)
    assert engine.write_rows(0, np.zeros(0, np.int64), encoded(engine.layout.tables[0], np.zeros((0, 4)))) == 0
    for _ in range(3):
        write_random(engine, state, rng)
        expected = ReferenceEngine(SPEC, decoded_tables(SPEC, state))
        bags = random_table_bags(rng, engine.layout, 40, 6, weighted=True)
        assert_blocks_equal(engine.pool(bags), expected.pool(bags), scale=20.0)
    if not isinstance(engine, ReferenceEngine):
        assert_stored(engine, export_state(tmp_path / "fresh", SPEC, state, 2))


def test_rows_that_do_not_fit_are_refused_and_not_written(engine):
    int8 = engine.layout.index["int8"]
    bags = KeyedBags.from_lengths(np.array([int8], np.int32), np.array([1]), np.array([700]), np.arange(700))
    before = engine.pool(bags)
    for table, rows, shape, message in (
        (4, [0], (1, 12), r"4 is no table, tables are 0\.\.3"),
        (-1, [0], (1, 12), r"-1 is no table"),
        (int8, [700], (1, 12), r"table 'int8': row 700 is not in 0\.\.699"),
        (int8, [-1], (1, 12), r"table 'int8': row -1 is not in 0\.\.699"),
        (int8, [3, 3], (2, 12), "table 'int8': rows must ascend, none twice"),
        (int8, [4, 3], (2, 12), "table 'int8': rows must ascend, none twice"),
        (int8, [3], (1, 13), r"stored must be contiguous uint8 \[1, 12\], got uint8 \[1, 13\]"),
        (int8, [3, 4], (1, 12), r"stored must be contiguous uint8 \[2, 12\], got uint8 \[1, 12\]"),
        (int8, np.zeros(1, np.int32), (1, 12), "rows must be flat int64, got int32"),
    ):
        with pytest.raises(InvalidBagsError, match=message):
            engine.write_rows(
                table, rows if isinstance(rows, np.ndarray) else np.array(rows), np.full(shape, 7, np.uint8)
            )
    for after, block in zip(engine.pool(bags), before, strict=True):
        np.testing.assert_array_equal(after, block)


def test_a_shard_writes_only_its_rows(tmp_path):
    spec = delta_spec(("int8",), rows=1000)
    state = random_tables(spec, 1)
    snapshot = export_state(tmp_path, spec, state, 1)
    plan = Plan.make(spec, num_shards=3, sharding="hash", replicate_bytes=0)
    rows = np.arange(0, 1000, 3, dtype=np.int64)
    values = np.full((rows.size, 4), 3.0, np.float32)
    written = 0
    for shard in range(3):
        engine = load_tables(snapshot, plan.partition(shard), plan.digest).engine
        written += engine.write_rows(0, rows, encoded(spec.tables[0], values))
        mine = np.flatnonzero(plan.partition(shard).card_of_bucket[0][np.arange(1000) % 256] >= 0)
        ones = np.ones(mine.size, np.int64)
        bags = KeyedBags.from_lengths(np.zeros(1, np.int32), np.array([mine.size]), ones, mine)
        expected = decoded_tables(spec, state)["int8"]
        expected[rows] = 3.0
        np.testing.assert_allclose(engine.pool(bags)[0], expected[mine], rtol=1e-6, atol=1e-6)
    assert written == rows.size


def test_a_mapped_snapshots_files_are_never_changed(tmp_path):
    state = random_tables(SPEC, 1)
    snapshot = export_state(tmp_path, SPEC, state, 1)
    before = digests(snapshot.path)
    engine = load_version(snapshot, budget=0).engine
    write_random(engine, state, np.random.default_rng(2))
    assert digests(snapshot.path) == before
    Snapshot.open(snapshot.path)
    other = load_version(snapshot, budget=0).engine
    assert_stored(other, snapshot)


def digests(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}
