"""Rows that are written are pooled from then on, on every engine, each completely; the snapshot stays as it is."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from loader.snapshot.manifest import ModelSpec
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from shard_node.answer import add_answers
from shard_node.engine.base import Engine, MemoryUse
from shard_node.engine.loading import load_tables, prepare_load
from shard_node.engine.memory import SLOT_BYTES, RowMemory
from shard_node.errors import InvalidBagsError, MemoryBudgetError
from shard_node.split import whole
from shardrank_testing.bags import assert_blocks_equal, bags_of, random_table_bags
from shardrank_testing.card_engines import OnCards, OnCpu, engine_params
from shardrank_testing.deltas import assert_stored, delta_spec, encode_rows, encoded, export_state, stored_rows
from shardrank_testing.reference import ReferenceEngine
from shardrank_testing.snapshots import model_of, plain_buckets, random_rows, random_tables, table_of, write_snapshot
from shardrank_testing.topologies import decoded_tables

SPEC = delta_spec(rows=700)
Where = OnCpu | OnCards | None
"""None: the reference engine."""
on_every_engine = pytest.mark.parametrize(
    "where", [None, OnCpu(1), OnCpu(2), OnCpu(1, 0), OnCpu(2, 0.2), *engine_params()], ids=str
)


def engine_of(where: Where, folder: Path, spec: ModelSpec, state: dict[str, np.ndarray]) -> Engine:
    if where is None:
        return ReferenceEngine(spec, decoded_tables(spec, state))
    return where.load(export_state(folder, spec, state, 1))


@pytest.fixture
def state() -> dict[str, np.ndarray]:
    return random_tables(SPEC, 1)


@pytest.fixture
def engine(where, tmp_path, state) -> Iterator[Engine]:
    engine = engine_of(where, tmp_path, SPEC, state)
    yield engine
    engine.close()


def write_random(engine: Engine, state: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    for number, table in enumerate(engine.layout.tables):
        rows = np.flatnonzero(rng.random(table.num_embeddings) < 0.3)
        values = random_rows(rng, rows.size, table.embedding_dim)
        state[table.name][rows] = values
        assert engine.write_rows(number, rows, encoded(table, values)) == rows.size


@on_every_engine
def test_written_rows_are_pooled_and_equal_a_fresh_export(engine, state, tmp_path):
    rng = np.random.default_rng(3)
    assert engine.write_rows(0, np.zeros(0, np.int64), encoded(engine.layout.tables[0], np.zeros((0, 4)))) == 0
    for _ in range(3):
        write_random(engine, state, rng)
        expected = ReferenceEngine(SPEC, decoded_tables(SPEC, state))
        bags = random_table_bags(rng, engine.layout, 40, 6, weighted=True)
        assert_blocks_equal(engine.pool(bags), expected.pool(bags), scale=20.0)
    if not isinstance(engine, ReferenceEngine):
        assert_stored(engine, export_state(tmp_path / "fresh", SPEC, state, 2))


@on_every_engine
def test_rows_that_do_not_fit_are_refused_and_not_written(engine):
    int8 = engine.layout.index["int8"]
    bags = bags_of({int8: [range(700)]})
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
            engine.write_rows(table, np.array(rows), np.full(shape, 7, np.uint8))
    for after, block in zip(engine.pool(bags), before, strict=True):
        np.testing.assert_array_equal(after, block)


def test_a_shard_writes_only_its_rows(tmp_path):
    spec = delta_spec(("int8",), rows=1000)
    state = random_tables(spec, 1)
    snapshot = export_state(tmp_path, spec, state, 1)
    plan = Plan.make(spec, num_shards=3, sharding="range", replicate_bytes=0)
    rows = np.arange(0, 1000, 3, dtype=np.int64)
    expected = decoded_tables(spec, state)["int8"]
    expected[rows] = 3.0
    written = 0
    for shard in range(3):
        engine = load_tables(snapshot, plan.partition(shard), plan.digest).engine
        written += engine.write_rows(0, rows, encoded(spec.tables[0], np.full((rows.size, 4), 3.0)))
        mine = np.flatnonzero(plan.partition(shard).card_of_bucket[0][plain_buckets(spec.tables[0])] >= 0)
        pooled = engine.pool(bags_of({0: mine.reshape(-1, 1)}))[0]
        np.testing.assert_allclose(pooled, expected[mine], rtol=1e-6, atol=1e-6)
    assert written == rows.size


def test_the_files_of_rows_on_disk_are_never_changed(tmp_path, state):
    snapshot = export_state(tmp_path, SPEC, state, 1)
    before = digests(snapshot.path)
    write_random(OnCpu(1, 0).load(snapshot), state, np.random.default_rng(2))
    assert digests(snapshot.path) == before
    Snapshot.open(snapshot.path)
    assert_stored(OnCpu(1, 0).load(snapshot), snapshot)


def digests(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


NUM_ROWS, DIM, SLICES = 512, 256, (64, 64, 128)
ALL_ROWS = np.arange(NUM_ROWS, dtype=np.int64)
WRITES, MAX_WRITES = 100, 100_000
TIMEOUT_S = 60.0


@pytest.mark.parametrize("slices", [pytest.param((), marks=pytest.mark.nightly), SLICES], ids=["one table", "slices"])
@on_every_engine
def test_no_pooled_row_is_torn(where, slices, tmp_path):
    """Threads pool and answer while rows are rewritten: a row is one of two patterns, in all of its slices."""
    spec = model_of([table_of("int8", NUM_ROWS, DIM, dtype="int8", column_dims=slices)])
    # All pooled values of a pattern are the same: a row that is half another one has two values.
    engine = engine_of(where, tmp_path, spec, {"int8": np.full((NUM_ROWS, DIM), 1.0, np.float32)})
    # Of one width and dtype, and of others: slices in one arena, and in several.
    assert len(engine.layout.groups) == len(set(slices) or {DIM})
    patterns = [
        encode_rows(spec.tables[0], ALL_ROWS, np.full((NUM_ROWS, DIM), value, np.float32))[1] for value in (1.0, 1024.0)
    ]
    tables = engine.layout.slices.get("int8", (0,))

    def write(number: int) -> None:
        assert engine.write_rows(tables, ALL_ROWS, patterns[number]) == NUM_ROWS * len(tables)

    pool_while_rows_change(engine, write, ALL_ROWS[:: 16 if where is None else 1])
    engine.close()


def pool_while_rows_change(engine: Engine, write: Callable[[int], None], rows: np.ndarray) -> None:
    """Pools and answers rows of every table, while `write` puts one of two patterns into all of them."""
    bags = bags_of({table: rows.reshape(-1, 1) for table in range(len(engine.layout.tables))})
    done = threading.Event()
    wrong: list[list[float]] = []
    seen: set[float] = set()
    pools = [0, 0]

    def pooled(number: int) -> list[np.ndarray]:
        if number == 0:
            return engine.pool(bags)
        # One row for each bag: where an engine can, it copies them, and what is pooled later is the copy.
        return add_answers(engine.layout, bags, [whole(bags)], [engine.answer(bags)])

    def read(number: int) -> None:
        while not done.is_set():
            values = np.unique(np.concatenate([block.reshape(-1) for block in pooled(number)]))
            pools[number] += 1
            seen.update(values.tolist())
            if values.size != 1:
                wrong.append(values.tolist())

    with ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(read, number) for number in range(2)]
        writes = 0
        while not any(reader.done() for reader in readers) and (
            writes < WRITES or ((min(pools) < 20 or len(seen) < 2) and writes < MAX_WRITES)
        ):
            write(writes % 2)
            writes += 1
        done.set()
        for reader in readers:
            reader.result(TIMEOUT_S)
    assert min(pools) >= 20
    assert wrong == []
    assert seen == {1.0, 1024.0}


@pytest.mark.parametrize("dim", [64, 4096])
def test_memory_for_written_rows_on_disk_is_claimed_first(tmp_path, dim):
    """A write without room changes nothing; a row that is written again takes no more; all is given back at the end."""
    num_rows = 7_000_000 // (dim + 8)
    spec = model_of([table_of("int8", num_rows, dim, dtype="int8", bucketing="range")])
    snapshot = Snapshot.open(write_snapshot(tmp_path, spec, tables={"int8": np.ones((num_rows, dim), np.float32)})[0])
    plan, memory = Plan.make(spec, sharding="range"), RowMemory()
    load = prepare_load(snapshot, plan.partition(0), plan.digest, memory_budget_bytes=0)
    tables = load.run(load.take(memory))
    size = stored_rows(tables.engine, "int8").nbytes

    def write(rows: np.ndarray) -> None:
        values = np.full((rows.size, dim), 2.0, np.float32)
        assert tables.engine.write_rows(0, rows, encoded(spec.tables[0], values)) == rows.size

    def in_ram() -> int:
        on_disk, ram = tables.engine.memory()
        assert on_disk == MemoryUse(0, "disk", size)
        return ram.size_bytes

    assert (memory.held_bytes, tables.engine.memory()) == (0, (MemoryUse(0, "disk", size),))
    write(np.array([0, num_rows // 2]))
    first = in_ram()
    # Room for some more is made at a time.
    assert 2 * (dim + 8) < first <= memory.held_bytes <= size + num_rows * SLOT_BYTES
    write(np.array([0, 1]))
    assert in_ram() == first
    held, before = memory.held_bytes, stored_rows(tables.engine, "int8")
    memory.cap_bytes = held
    for _ in range(2):
        with pytest.raises(MemoryBudgetError, match=f"beside {held} of"):
            write(np.arange(num_rows))
    assert (in_ram(), memory.held_bytes) == (first, held)
    np.testing.assert_array_equal(stored_rows(tables.engine, "int8"), before)
    tables.close()
    assert memory.held_bytes == 0
