"""Whatever happens on the way, rows that are caught up are, byte for byte, a fresh export of the same state.

Deltas that come twice, in any order or not at all; followers that end and begin anew; snapshots taken in between that
contain some of the deltas, and nodes staged from any of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loader.deltas.publisher import AsyncDeltaPublisher
from loader.errors import DeltaGapError
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import delta_stream
from loader.snapshot.reader import Snapshot
from shard_node.agent.delta_follower import FollowerConfig
from shardrank_testing.card_engines import OnCards
from shardrank_testing.deltas import (
    MODEL,
    assert_stored,
    delta_spec,
    export_state,
    follow,
    load_version,
    register_version,
)
from shardrank_testing.snapshots import random_rows, random_tables

SPEC = delta_spec(("int8", "int4"), rows=300)
TIMEOUT_S = 30.0
CONFIG = FollowerConfig(poll_s=0.001, retry_s=0.001, look_at_end_s=0.01, max_entries=3)

PLACES: list[dict | OnCards] = [
    *({"cards": cards, "budget": budget} for cards in (1, 3) for budget in (None, 0)),
    OnCards(1, "peers"),
    OnCards(3, "every tier"),
    OnCards(2, "every tier", "as late as can be"),
]

STEPS = st.one_of(
    st.tuples(st.just("publish"), st.integers(0, 1), st.integers(0, 2**32)),
    st.tuples(st.just("deliver"), st.lists(st.integers(0, 30), max_size=12)),
    st.tuples(st.just("catch up")),
    st.tuples(st.just("restart")),
    st.tuples(st.just("snapshot")),
    st.tuples(st.just("stage"), st.integers(0, 5), st.sampled_from(PLACES)),
)


class World:
    """A trainer, its registry and one node."""

    def __init__(self, folder: Path):
        self.store = folder / "store"
        self.registry = DirectoryRegistry(folder / "registry")
        self.state = random_tables(SPEC, 0)
        self.snapshots = [export_state(self.store, SPEC, self.state, 1)]
        self.publisher = AsyncDeltaPublisher(self.registry, MODEL, 1)
        self.published = 0
        self.stage(self.snapshots[0], PLACES[0])

    def stage(self, snapshot: Snapshot, place: dict | OnCards) -> None:
        self.snapshot = snapshot
        options = {"card_set": place.card_set(SPEC)} if isinstance(place, OnCards) else place
        self.tables = load_version(snapshot, **options)
        self.follower = follow(self.registry, snapshot, self.tables, config=CONFIG)

    async def step(self, step) -> None:
        match step:
            case ("publish", table, seed):
                spec, rng = SPEC.tables[table], np.random.default_rng(seed)
                rows = rng.integers(0, spec.num_embeddings, int(rng.integers(1, 60)))
                values = random_rows(rng, rows.size, spec.embedding_dim)
                for row, value in zip(rows, values, strict=True):
                    self.state[spec.name][row] = value
                self.published = await self.publisher.publish(spec.name, rows, values)
            case ("deliver", wanted):
                found = {entry.sequence: entry for entry in await self.registry.read(delta_stream(MODEL, 1), 0)}
                with contextlib.suppress(DeltaGapError):
                    self.follower.apply([found[one] for one in wanted if one in found])
            case ("catch up",):
                await self.catch_up()
            case ("restart",):
                self.follower = follow(self.registry, self.snapshot, self.tables, config=CONFIG)
            case ("snapshot",):
                version = len(self.snapshots) + 1
                self.snapshots.append(export_state(self.store, SPEC, self.state, version, self.published, 1))
            case ("stage", index, place):
                self.stage(self.snapshots[index % len(self.snapshots)], place)

    async def catch_up(self) -> None:
        task = asyncio.create_task(self.follower.run())
        async with asyncio.timeout(TIMEOUT_S):
            while self.tables.deltas.sequence < self.published:  # noqa: ASYNC110 - it happens in another thread
                await asyncio.sleep(0.001)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@given(st.lists(STEPS, max_size=20))
def test_any_interleaving_equals_a_fresh_export(steps):
    async def scenario(folder: Path) -> None:
        world = World(folder)
        await register_version(world.registry, world.snapshots[0])
        for step in steps:
            await world.step(step)
            assert world.tables.deltas.sequence <= world.published
        await world.catch_up()
        assert_stored(world.tables.engine, export_state(world.store, SPEC, world.state, 1000))
        await world.registry.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))
