"""Lookups see the rows of the moment in which they were enqueued, however late cards get to their work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.snapshot.codecs import codec_for
from loader.snapshot.reader import Snapshot
from shard_node.cuda.batch import BatchSize, OutputRuns
from shard_node.cuda.card_engine import CardEngine
from shard_node.cuda.cards import PinnedMemory
from shard_node.cuda.lane import Lane, Slot
from shardrank_testing.card_engines import OnCards, engine_params
from shardrank_testing.deltas import delta_spec, encoded, export_state
from shardrank_testing.output_runs import expected_output, feature_bags, runs_in_columns
from shardrank_testing.snapshots import random_rows, random_tables
from shardrank_testing.topologies import decoded_tables

SPEC = delta_spec(("int8", "fp32"), rows=90)
SIZE = BatchSize(np.array([6, 6, 6]), 60)

STEPS = st.one_of(
    st.tuples(st.just("look"), st.integers(0, 3), st.integers(0, 1), st.integers(0, 2**32)),
    st.tuples(st.just("write"), st.integers(0, 1), st.integers(0, 2**32)),
    st.tuples(st.just("settle"), st.integers(0, 9)),
)
PLACES = [
    OnCards(2, "peers", "as late as can be"),
    OnCards(3, "every tier", "as late as can be"),
]


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory) -> Snapshot:
    return export_state(tmp_path_factory.mktemp("store"), SPEC, random_tables(SPEC, 1), 1)


class World:
    """An engine, two slots on each of four lanes, and what was looked up but not yet waited for.

    Slots of the first two lanes are captured after their first batch.
    """

    def __init__(self, snapshot: Snapshot, where: OnCards):
        self.state = random_tables(SPEC, 1)
        self.engine: CardEngine = where.load(snapshot)
        layout = self.engine.layout
        self.rows = [decoded_tables(SPEC, self.state)[table.name] for table in layout.tables]
        self.runs: OutputRuns = runs_in_columns(layout, [1, 0, 1], ["sum", "mean", "sum"], SIZE)
        self.lanes: list[Lane] = [self.engine.lane(number % where.num_cards) for number in range(4)]
        self.slots: list[list[Slot]] = [[lane.prepare(self.runs, SIZE) for _ in range(2)] for lane in self.lanes]
        self.looked_up: list[tuple[PinnedMemory, np.ndarray]] = []

    def look(self, lane: Lane, slot: Slot, seed: int) -> None:
        bags = feature_bags(np.random.default_rng(seed), self.engine.layout, self.runs, SIZE)

        slot.fill(bags)
        lane.launch(slot.enqueue)
        if lane in self.lanes[:2] and not slot.is_captured:
            slot.capture()
        down = self.engine.card_set.cards.allocate_pinned(self.runs.out_bytes)
        lane.card.copy_to_host(down, 0, slot.out.address, self.runs.out_bytes, lane.stream)
        self.looked_up.append((down, expected_output(self.rows, bags, self.runs)))

    def write(self, number: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        table = self.engine.layout.tables[number]
        rows = np.flatnonzero(rng.random(table.num_embeddings) < 0.5)
        stored = encoded(table, random_rows(rng, rows.size, table.embedding_dim))
        values = codec_for(table.dtype, table.embedding_dim).decode(stored)
        self.state[table.name][rows] = values
        self.rows[number] = self.rows[number].copy()
        self.rows[number][rows] = values
        self.engine.write_rows(number, rows, stored)

    def settle(self, number: int) -> None:
        streams = [*(lane.stream for lane in self.lanes), *self.engine._rows.order.streams]
        streams[number % len(streams)].synchronize()

    def step(self, step) -> None:
        match step:
            case ("look", lane, slot, seed):
                self.look(self.lanes[lane], self.slots[lane][slot], seed)
            case ("write", number, seed):
                self.write(number, seed)
            case ("settle", number):
                self.settle(number)

    def check(self, settle_in_order: list[int]) -> None:
        for number in settle_in_order:
            self.settle(number)
        for lane in self.lanes:
            lane.stream.synchronize()
        for down, expected in self.looked_up:
            written = ~np.isnan(expected)
            out = down.array.view(np.float32)
            np.testing.assert_allclose(out[written], expected[written], rtol=1e-5, atol=1e-4)

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()
        self.engine.close()


@given(st.lists(STEPS, max_size=25), st.lists(st.integers(0, 9), max_size=10), st.sampled_from(PLACES))
def test_every_lookup_sees_just_the_writes_before_it(snapshot, steps, settle_in_order, where):
    world = World(snapshot, where)
    for step in steps:
        world.step(step)
    world.check(settle_in_order)
    world.close()


@pytest.mark.parametrize("where", engine_params(tuple(PLACES)))
def test_writes_stay_between_the_lookups_around_them(snapshot, where):
    world = World(snapshot, where)
    for number in range(12):
        world.look(world.lanes[number % 4], world.slots[number % 4][number % 2], number)
        world.write(number % 2, number)
        # A card that writes first would do so now.
        world.settle(4 + number % where.num_cards)
    world.check([])
    world.close()
