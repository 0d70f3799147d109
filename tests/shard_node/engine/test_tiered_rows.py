"""Rows by tier: which are in memory, which are read from disk, how they move, and what a bad disk does."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.access_counts import AccessCounts
from loader.errors import SnapshotCorruptError
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from shard_node.answer import add_answers
from shard_node.engine import row_files
from shard_node.engine.cpu import CpuEngine
from shard_node.engine.key_index import ABSENT
from shard_node.engine.loading import prepare_load
from shard_node.engine.memory import SLOT_BYTES, RowMemory
from shard_node.engine.row_files import BUFFER_BYTES, RowFile, RowFiles
from shard_node.engine.tiered_rows import MIN_EPOCH
from shard_node.errors import MemoryBudgetError, RowReadError
from shard_node.split import whole
from shardrank_testing.bags import assert_blocks_equal, bags_of
from shardrank_testing.deltas import encoded
from shardrank_testing.snapshots import model_of, plain_buckets, random_rows, table_of, write_snapshot

NUM_ROWS, DIM, HEAD = 20_000, 16, 500
ROW_BYTES = DIM + 8
SPEC = model_of([table_of("item", NUM_ROWS, DIM, dtype="int8", bucketing="mixed")])


def counts_of_head(first: int) -> np.ndarray:
    """Counts by which HEAD rows from `first` on are the hottest."""
    counts = np.ones(NUM_ROWS, np.uint32)
    counts[first : first + HEAD] = 100
    return counts


def load_with_slots(folder: Path, slots: int, first_hot: int | None = None, shards: int = 1) -> CpuEngine:
    """Load a table of which so many rows are in memory: those of the counts, if they begin anywhere."""
    counts = {} if first_hot is None else {"access_counts": {"item": counts_of_head(first_hot)}}
    path, _ = write_snapshot(folder, SPEC, seed=3, rows_per_file=8192, **counts)
    snapshot, plan = Snapshot.open(path), Plan.make(SPEC, num_shards=shards, replicate_bytes=0)
    budget = slots * (ROW_BYTES + SLOT_BYTES)
    load = prepare_load(snapshot, plan.partition(0), plan.digest, memory_budget_bytes=budget)
    engine = load.run(load.take(RowMemory())).engine
    assert isinstance(engine, CpuEngine)
    return engine


def looked_up(engine: CpuEngine) -> dict[str, int]:
    return {count.tier: count.rows for count in engine.rows_looked_up()}


def tiered_find(engine: CpuEngine) -> np.ndarray:
    """Return the slot of every row."""
    ((_, tiered),) = engine._tiered.items()
    return tiered.find(engine._placement.locate_rows(0, np.arange(NUM_ROWS))[1])


def law(rng: np.random.Generator, size: int, first: int = 0) -> np.ndarray:
    """Draw as the chapter does: 85 % by r^-1.1 of a head, the others anywhere."""
    weights = np.arange(1, HEAD + 1) ** -1.1
    head = first + rng.choice(HEAD, size, p=weights / weights.sum())
    others = rng.permutation(np.setdiff1d(np.arange(NUM_ROWS), np.arange(first, first + HEAD)))[:size]
    return np.where(rng.random(size) < 0.85, head, rng.choice(others, size))


@pytest.mark.parametrize("shards", [1, 2])
def test_rows_counted_most_are_in_memory_and_the_others_read(tmp_path, shards):
    """The hit rate of the law is its head's, by the counters; what is read is what missed."""
    engine = load_with_slots(tmp_path, HEAD // shards, first_hot=4000, shards=shards)
    owners = Plan.make(SPEC, num_shards=shards, replicate_bytes=0).shard_of_bucket[0][plain_buckets(SPEC.tables[0])]
    rows = law(np.random.default_rng(1), 10_000, first=4000)
    rows = rows[owners[rows] == 0]
    engine.pool(bags_of({0: rows.reshape(-1, 1)}))
    tiers, hit = looked_up(engine), (rows >= 4000) & (rows < 4000 + HEAD)
    assert sum(tiers.values()) == rows.size
    assert tiers["ram"] / rows.size == pytest.approx(hit.mean(), abs=0.01 * (shards - 1))
    assert hit.mean() == pytest.approx(0.85, abs=0.05)
    use = engine.disk_use()
    # Of a shard's rows of the head a few more than half may be there.
    assert abs(use.reads - np.unique(rows[~hit]).size) <= 30 * (shards - 1)
    assert 511 * use.reads <= use.size_bytes <= 1024 * use.reads
    assert use.disk_p99_us >= use.disk_p50_us > 0 == use.ram_p50_us
    engine.close()


@given(st.integers(1, 3000), st.integers(0, 1500), st.lists(st.integers(1, 40), min_size=1, max_size=3), st.data())
def test_rows_read_from_files_are_their_bytes(tmp_path_factory, row_bytes, offset, sizes, data):
    folder, rng = tmp_path_factory.mktemp("rows"), np.random.default_rng(0)
    stored = [rng.integers(0, 256, (size, row_bytes), np.uint8) for size in sizes]
    for number, rows in enumerate(stored):
        (folder / str(number)).write_bytes(bytes(offset) + rows.tobytes())
    files = RowFiles([RowFile(folder / str(n), offset, size) for n, size in enumerate(sizes)], row_bytes)
    positions = np.array(data.draw(st.lists(st.integers(0, sum(sizes) - 1), max_size=60)), np.int64)
    np.testing.assert_array_equal(files.read(positions), np.concatenate(stored)[positions])
    assert files.counts()[0] == positions.size
    files.close()


def test_more_rows_than_are_read_at_a_time_are_read(tmp_path):
    row_bytes, count = 8192, BUFFER_BYTES // 8192 * 3
    rows = np.random.default_rng(0).integers(0, 256, (count, row_bytes), np.uint8)
    (tmp_path / "rows").write_bytes(rows.tobytes())
    files = RowFiles([RowFile(tmp_path / "rows", 0, count)], row_bytes)
    order = np.random.default_rng(1).permutation(count)
    np.testing.assert_array_equal(files.read(order), rows[order])
    files.close()


def test_rows_that_become_hot_move_to_memory(tmp_path):
    """By the node's own counts: another head is looked up than the one that was exported."""
    engine = load_with_slots(tmp_path, HEAD, first_hot=0)
    rng, before = np.random.default_rng(2), engine.pool(bags_of({0: [range(NUM_ROWS)]}))[0]
    rates = []
    for _ in range(3):
        started = looked_up(engine)
        for _ in range(MIN_EPOCH // 10_000 + 1):
            engine.pool(bags_of({0: law(rng, 12_000, first=9000).reshape(-1, 1)}))
        engine._mover.join()
        ended = looked_up(engine)
        rates.append((ended["ram"] - started["ram"]) / (sum(ended.values()) - sum(started.values())))
        for tiered in engine._tiered.values():
            tiered._next_move_at = 0.0
    assert rates[0] < 0.5
    assert rates[-1] > 0.8
    np.testing.assert_allclose(engine.pool(bags_of({0: [range(NUM_ROWS)]}))[0], before, rtol=1e-4, atol=1e-3)
    engine.close()


def test_written_rows_stay_in_memory_while_others_move(tmp_path):
    engine = load_with_slots(tmp_path, HEAD, first_hot=0)
    rng = np.random.default_rng(2)
    written = np.unique(np.append(rng.choice(NUM_ROWS, 3000, replace=False), np.arange(100)))
    values = random_rows(rng, written.size, DIM)
    assert engine.write_rows(0, written, encoded(SPEC.tables[0], values)) == written.size
    stored = engine.read_rows(0, written)
    for _ in range(2):
        for _ in range(8):
            engine.pool(bags_of({0: law(rng, 12_000, first=9000).reshape(-1, 1)}))
        engine._mover.join()
        next(iter(engine._tiered.values()))._next_move_at = 0.0
    np.testing.assert_array_equal(engine.read_rows(0, written), stored)
    np.testing.assert_array_equal(stored, encoded(SPEC.tables[0], values))
    engine.close()


def test_rows_about_to_be_written_do_not_leave_memory(tmp_path):
    """Between the claim for a write and the write, an epoch may end."""
    engine = load_with_slots(tmp_path, HEAD, first_hot=0)
    (tiered,) = engine._tiered.values()
    reserved = tiered._position_of[:100].copy()
    tiered.reserve(reserved, int)
    tiered._missed.add(np.setdiff1d(np.arange(NUM_ROWS), tiered._position_of).repeat(9))
    tiered.move(engine._writing, engine._row_lock)
    assert np.isin(reserved, tiered._position_of).all()
    assert np.isin(tiered._position_of, reserved).sum() == 100
    assert tiered.find(reserved).min() >= 0
    engine.close()


def test_no_answer_mixes_tiers_while_rows_move_and_are_written(tmp_path):
    """Answers are those of a row's first or second value, whatever moves meanwhile."""
    engine = load_with_slots(tmp_path, HEAD, first_hot=0)
    tiered = next(iter(engine._tiered.values()))
    rng, rows = np.random.default_rng(4), np.arange(0, NUM_ROWS, 7)
    original, done = engine.read_rows(0, rows), threading.Event()
    changed = encoded(SPEC.tables[0], random_rows(rng, rows.size, DIM))

    def move() -> None:
        while not done.is_set():
            tiered._missed.add(rng.choice(NUM_ROWS, 5000).repeat(4))
            tiered.move(engine._writing, engine._row_lock)

    def write() -> None:
        for begin in range(0, rows.size, 50):
            engine.write_rows(0, rows[begin : begin + 50], np.ascontiguousarray(changed[begin : begin + 50]))
        done.set()

    threads = [threading.Thread(target=work) for work in (move, write)]
    for thread in threads:
        thread.start()
    checked = 0
    while not done.is_set() or checked < 5:
        answer = engine.answer(bags_of({0: rows.reshape(-1, 1)}))
        (stored,) = answer.stored
        is_old, is_new = (stored == original).all(axis=1), (stored == changed).all(axis=1)
        assert (is_old | is_new).all()
        checked += 1
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(engine.read_rows(0, rows), changed)
    engine.close()


def test_a_file_cut_short_fails_only_lookups_of_its_rows(tmp_path):
    engine = load_with_slots(tmp_path, HEAD, first_hot=0)
    files = sorted(tmp_path.rglob("rows-*"))
    all_rows = np.arange(NUM_ROWS)
    expected = engine.pool(bags_of({0: all_rows.reshape(-1, 1)}))
    with files[1].open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(RowReadError, match=rf"{files[1].name}: the row at byte \d+ of 24 bytes: the file ends \d+"):
        engine.pool(bags_of({0: [range(8192, 16_384)]}))
    kept = all_rows[(all_rows < 8192) | (all_rows >= 16_384)]
    bags = bags_of({0: kept.reshape(-1, 1)})
    np.testing.assert_array_equal(engine.pool(bags)[0], expected[0][kept])
    assert engine.disk_use().failed > 0
    tiers, num_answered = looked_up(engine), NUM_ROWS + kept.size
    assert tiers["ram"] + tiers["disk"] == num_answered
    assert tiers["ram"] == sum(int((tiered_find(engine) >= 0)[rows].sum()) for rows in (all_rows, kept))
    assert_blocks_equal(
        add_answers(engine.layout, bags, [whole(bags)], [engine.answer(bags)]), engine.pool(bags), scale=1.0
    )
    engine.close()


def test_counts_of_another_number_of_rows_choose_no_rows(tmp_path):
    """A node's counts of the version before, whose table was larger, name rows of other tables here."""
    snapshot, plan = Snapshot.open(write_snapshot(tmp_path, SPEC, seed=3)[0]), Plan.make(SPEC)
    budget, hot = HEAD * (ROW_BYTES + SLOT_BYTES), np.arange(NUM_ROWS - HEAD, NUM_ROWS)
    for limit, expected in ((NUM_ROWS, HEAD), (NUM_ROWS + 1, 0)):
        observed = {"item": AccessCounts(hot, np.full(HEAD, 9), limit)}
        load = prepare_load(snapshot, plan.partition(0), plan.digest, memory_budget_bytes=budget, observed=observed)
        engine = load.run(load.take(RowMemory())).engine
        is_there = tiered_find(engine) >= 0
        assert is_there.sum() == HEAD
        assert abs(int(is_there[hot].sum()) - expected) < HEAD / 5
        engine.close()


def test_lookups_of_rows_in_memory_queue_nothing(tmp_path):
    engine = load_with_slots(tmp_path, HEAD, first_hot=0)
    (tiered,) = engine._tiered.values()
    for _ in range(50):
        engine.pool(bags_of({0: [range(HEAD)]}))
    assert tiered._missed._queue == []
    assert (engine.disk_use().reads, looked_up(engine)["disk"]) == (0, 0)
    engine.close()


def test_a_refused_load_leaves_no_file_open(tmp_path):
    path, _ = write_snapshot(tmp_path, SPEC, seed=3, rows_per_file=8192)
    snapshot, plan = Snapshot.open(path), Plan.make(SPEC)
    file, offset = snapshot.rows_at("item", 1)
    with file.open("r+b") as opened:
        opened.seek(offset + DIM)
        opened.write(np.float32(np.nan).tobytes())
    opened_before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        load = prepare_load(snapshot, plan.partition(0), plan.digest, memory_budget_bytes=0)
        with pytest.raises(SnapshotCorruptError, match="decodes to NaN"):
            load.run(load.take(RowMemory()))
    assert len(os.listdir("/proc/self/fd")) == opened_before


def test_written_rows_fit_exactly_what_memory_there_is(tmp_path):
    """Room for more at a time is tried first; a write without memory keeps nothing in the arena."""
    engine = load_with_slots(tmp_path, HEAD, first_hot=0)
    (tiered,) = engine._tiered.values()
    cold, claimed = np.arange(NUM_ROWS)[tiered.find(np.arange(NUM_ROWS)) == ABSENT], list[int]()

    def claim(size_bytes: int) -> None:
        if size_bytes > 7 * (ROW_BYTES + SLOT_BYTES):
            raise MemoryBudgetError("no")
        claimed.append(size_bytes)

    with pytest.raises(MemoryBudgetError):
        tiered.reserve(np.append(tiered._position_of[:5], cold[:8]), claim)
    assert not tiered._is_pinned.any()
    tiered.reserve(cold[:7], claim)
    assert claimed == [7 * (ROW_BYTES + SLOT_BYTES)]
    engine.close()


def test_a_read_that_is_interrupted_is_waited_for(tmp_path):
    """What comes next does not get its results, nor its buffer."""
    pool = row_files._ReadPool()
    with pool.reading() as interrupted:
        interrupted.is_idle = False
    with pool.reading() as reads:
        assert reads is not interrupted
        assert reads.is_idle
