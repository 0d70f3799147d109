"""Chains of deltas against a small model: a follower applies what follows, or says that it does not."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loader.registry.fleet import FleetRegistry, delta_stream
from loader.registry.memory import MemoryRegistry
from loader.snapshot.codecs import RowCodec
from loader.snapshot.reader import Snapshot
from shard_node.agent.delta_follower import FollowerConfig, catch_up
from shardrank_testing import deltas, nodes
from shardrank_testing.deltas import (
    MODEL,
    StreamWriter,
    delta_spec,
    encoded,
    export_state,
    stored_rows,
)
from shardrank_testing.snapshots import random_rows, random_tables

SPEC = delta_spec(rows=300)
STREAM = delta_stream(MODEL, 1)
CONFIG = FollowerConfig(poll_s=0.002, retry_s=0.002, check_end_s=0.01, max_entries=3)

until = functools.partial(nodes.until, pause_s=0.001)
CHAIN_STEPS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("follow")),
    st.tuples(st.just("lose"), st.integers(1, 3)),
    st.tuples(st.just("snapshot")),
)


class ChainModel:
    """What a stream is, whatever registries lose and publishers number, and what a follower of it must do."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.base = self.state = random_tables(SPEC, 5)
        self.snapshot, self.last_delta = snapshot, 0
        self.writer, self.applied = StreamWriter(SPEC), list[bytes]()
        self.highest = self.first_format = 0
        self.tables = deltas.load_version(snapshot)

    def write(self, gap: int, *, knows_all: bool) -> None:
        """Add a delta, of format 1 while that can be, then of a number that was lost unless it `knows_all`."""
        entries = self.writer.entries
        form = 1 if len(entries) == self.highest < 3 and not any(each.rows for each in entries) else 2
        number = max(self.writer.last, self.last_delta, self.highest if knows_all else self.first_format) + 1
        number += gap if form == 2 else 0
        self.first_format += form == 1
        rng = np.random.default_rng([number, len(entries), self.highest])
        rows = rng.choice(300, 20, replace=False)
        self.writer.write("int8", rows, random_rows(rng, 20, 4), number, form)
        self.highest = max(self.highest, number)

    def values(self, after: int) -> np.ndarray:
        """The stored rows of a snapshot with what the stream has after some number."""
        rows = encoded(SPEC.tables[0], self.state["int8"]).copy()
        for entry in self.writer.entries:
            if entry.tail.sequence > after:
                rows[entry.batch.rows] = entry.batch.stored
        return rows


async def follow_once(registry, snapshot: Snapshot, tables) -> str:
    """Follow until all that there is was read; the kind of the error if it can't be."""
    clock = iter(range(1, 1 << 40))
    follower = deltas.follow(registry, snapshot, tables, config=CONFIG, clock=lambda: float(next(clock)))
    last, before = (await registry.bounds(STREAM)).last, tables.deltas.now
    task = asyncio.create_task(follower.run())

    def is_done() -> bool:
        now = tables.deltas.now
        return task.done() or now.refused > before.refused or (now.sequence >= last and now.fresh_at is not None)

    # Kept by the position: what an earlier follower saw.
    tables.deltas.now = replace(before, fresh_at=None, reason="")
    await until(is_done)
    task.cancel()
    await asyncio.wait([task])
    error = None if task.cancelled() else task.exception()
    return getattr(error, "kind", "") or tables.deltas.now.reason


@given(st.lists(CHAIN_STEPS, max_size=14))
async def test_followers_apply_a_chain_or_notice_that_it_is_another(steps):
    """Two writers, a lost suffix, gaps in numbers, format 1 then 2, snapshots that contain deltas that were lost."""
    with tempfile.TemporaryDirectory() as folder:
        model = ChainModel(export_state(Path(folder), SPEC, random_tables(SPEC, 5), 1))
        for version, step in enumerate([*steps, ("follow",)], 2):
            match step:
                case ("write", gap, knows_all):
                    model.write(gap, knows_all=knows_all)
                case ("lose", count):
                    del model.writer.entries[-count:]
                case ("snapshot",):
                    await check_chain(model)
                    rows = stored_rows(model.tables.engine, "int8")
                    model.state = {**model.state, "int8": RowCodec("int8", 4).decode(rows)}
                    model.last_delta = model.tables.deltas.sequence
                    model.snapshot = export_state(Path(folder), SPEC, model.state, version, model.last_delta, 1)
                    model.tables, model.applied = deltas.load_version(model.snapshot), []
                case ("follow",):
                    await check_chain(model)


async def check_chain(model: ChainModel) -> None:
    registry, entries = MemoryRegistry("memory"), model.writer.entries
    await model.writer.put(registry)
    before = stored_rows(model.tables.engine, "int8")
    outcome = await follow_once(registry, model.snapshot, model.tables)
    digests = [each.tail.digest for each in entries]
    if not entries and model.applied:
        assert "the registry has no" in outcome
        np.testing.assert_array_equal(stored_rows(model.tables.engine, "int8"), before)
        return
    if model.applied and model.applied[-1] not in digests:
        assert outcome == "delta_fork"
        np.testing.assert_array_equal(stored_rows(model.tables.engine, "int8"), before)
        model.tables.close()
        model.tables = deltas.load_version(model.snapshot)
        await catch_up(FleetRegistry(registry), MODEL, model.snapshot.version, model.tables)
    else:
        assert outcome == ""
    model.applied = [each.tail.digest for each in entries if each.tail.sequence > model.last_delta]
    np.testing.assert_array_equal(stored_rows(model.tables.engine, "int8"), model.values(model.last_delta))


async def test_a_part_of_a_table_that_is_elsewhere_is_no_fork(tmp_path):
    """Partitions are of all tables: what was not read is not expected to be what comes before."""
    registry, snapshot = MemoryRegistry("memory"), export_state(tmp_path, SPEC, random_tables(SPEC, 5), 1)
    tables = deltas.load_version(snapshot)
    here = [np.full(cards.size, -1, np.int16) for cards in tables.partition.card_of_bucket]
    number = tables.engine.layout.index["int8"]
    here[number] = tables.partition.card_of_bucket[number]
    tables = replace(tables, partition=replace(tables.partition, card_of_bucket=tuple(here)))
    writer, rng = StreamWriter(SPEC), np.random.default_rng(0)
    for sequence, (table, dim) in enumerate((("int8", 4), ("fp16", 8), ("int8", 4)), 1):
        writer.write(table, np.arange(300), random_rows(rng, 300, dim), sequence, 2)
    await writer.put(registry)
    assert await follow_once(registry, snapshot, tables) == ""
    assert tables.deltas.sequence == 3
