"""The engine on cards beyond what every engine does: threads, memory, rows of other nodes, the order of writes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.snapshot.codecs import RowCodec
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from shard_node.bags import Bags
from shard_node.cuda.batch import BatchSize, OutputRuns
from shard_node.cuda.card_engine import POOLS_PER_CARD, CardEngine
from shard_node.cuda.card_set import CardMemory, CardOptions, CardSet
from shard_node.errors import InvalidBagsError, MemoryBudgetError
from shardrank_testing.bags import assert_blocks_equal, bags_of, random_table_bags
from shardrank_testing.card_engines import OnCards, engine_params, options_for
from shardrank_testing.deltas import assert_stored, delta_spec, encoded, export_state, load_version
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.kernel_arena import expected_output, feature_bags, load_partition, runs_in_columns
from shardrank_testing.reference import ReferenceEngine
from shardrank_testing.snapshots import random_rows, random_tables
from shardrank_testing.topologies import decoded_tables

if TYPE_CHECKING:
    from shard_node.cuda.cupy_cards import Memory

SPEC = delta_spec(rows=700)
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> tuple[Snapshot, ReferenceEngine]:
    state = random_tables(SPEC, 1)
    snapshot = export_state(tmp_path_factory.mktemp("store"), SPEC, state, 1)
    return snapshot, ReferenceEngine(SPEC, decoded_tables(SPEC, state))


def one_big_bag(num_values: int) -> Bags:
    return bags_of({0: [[0] * num_values]})


def test_more_threads_than_lanes_pool_at_once(engine, stored):
    reference = stored[1]
    num_threads = POOLS_PER_CARD * len(engine.card_set.cards.cards) + 3

    def pool(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(3):
            bags = random_table_bags(rng, engine.layout, 30, 4, weighted=bool(seed % 2))
            assert_blocks_equal(engine.pool(bags), reference.pool(bags), scale=12.0)

    with ThreadPoolExecutor(num_threads) as threads:
        for future in [threads.submit(pool, seed) for seed in range(num_threads)]:
            future.result(TIMEOUT_S)
    use = engine.cards()
    assert (use.outside_table, use.not_here) == (0, 0)


def test_a_batch_too_large_for_a_card_leaves_lanes_usable(stored):
    cards = EmulatedCards(2, total_bytes=16 << 20)
    card_set = CardSet(cards, options_for(SPEC, 2, "every tier"), CardMemory(cards, reserve_bytes=0))
    engine = load_version(stored[0], card_set=card_set).engine
    num_lanes = POOLS_PER_CARD * len(cards.cards)
    for _ in range(2 * num_lanes):
        with pytest.raises(MemoryBudgetError):
            engine.pool(one_big_bag(4 << 20))
    rng = np.random.default_rng(1)
    for _ in range(2 * num_lanes):
        bags = random_table_bags(rng, engine.layout, 30, 4)
        assert_blocks_equal(engine.pool(bags), stored[1].pool(bags), scale=12.0)
    engine.close()


def test_closing_frees_all_memory_and_keeps_what_is_reported(stored):
    cards = EmulatedCards(3)
    before = cards.free_bytes()
    tables = load_version(stored[0], card_set=CardSet(cards, options_for(SPEC, 3, "every tier")))
    engine = tables.engine
    for size in (10, 30_000):
        engine.pool(one_big_bag(size))
    table = SPEC.tables[0]
    write = partial(engine.write_rows, engine.layout.index[table.name], np.arange(9), encoded(table, np.ones((9, 4))))
    write()
    assert cards.free_bytes() < before
    reported = engine.memory(), engine.rows_looked_up(), engine.cards()
    tables.close()
    engine.close()
    assert cards.free_bytes() == before
    # A node reports all versions that it knew a moment ago; each may be freed meanwhile.
    assert (engine.memory(), engine.rows_looked_up(), engine.cards()) == reported
    with pytest.raises(ValueError, match="the engine is closed"):
        write()


def test_values_outside_their_table_are_counted_and_not_read(engine):
    size = BatchSize(np.array([3]), 20)
    runs = runs_in_columns(engine.layout, [0], ["sum"], size)
    lane = engine.lane(0)
    slot = lane.prepare(runs, size)
    slot.fill(one_big_bag(4))
    slot._views.values[[1, 3]] = 0xFFFFFFF0, engine.layout.tables[0].num_embeddings
    lane.launch(slot.enqueue)
    lane.stream.synchronize()
    use = engine.cards()
    assert (use.outside_table, use.not_here) == (2, 0)
    lane.close()


DIVIDED = delta_spec(("int8",), rows=700)


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[list[CardEngine]]:
    """The table in two halves, on two cards each."""
    snapshot = export_state(tmp_path, DIVIDED, random_tables(DIVIDED, 1), 1)
    plan = Plan.make(DIVIDED, num_shards=2, sharding="range", cards_per_shard=2, replicate_bytes=0)
    options = CardOptions(hot_gb=0, card_memory_gb=1e-3)
    engines = [load_partition(snapshot, plan.partition(shard), EmulatedCards(2), options) for shard in range(2)]
    yield engines
    for engine in engines:
        engine.close()


def test_rows_of_another_node_are_refused(shards):
    state = random_tables(DIVIDED, 1)
    reference = ReferenceEngine(DIVIDED, decoded_tables(DIVIDED, state))
    refused = []
    for row in range(8):
        bags = bags_of({0: [[row]]})
        for engine in shards:
            try:
                blocks = engine.pool(bags)
            except InvalidBagsError as error:
                refused.append(str(error))
            else:
                assert_blocks_equal(blocks, reference.pool(bags), scale=1.0)
    assert sorted(refused) == [f"row {row} of table 'int8' is not on this node" for row in range(8)]


def test_a_slot_refuses_rows_of_another_node(shards):
    size = BatchSize(np.array([700, 700]), 1400)
    runs = runs_in_columns(shards[0].layout, [0, 0], ["sum", "none"], size)
    lane = shards[0].lane(1)
    slot = lane.prepare(runs, size)
    with pytest.raises(InvalidBagsError, match=r"row \d+ of table 'int8' is not on this node"):
        slot.fill(feature_bags(np.random.default_rng(1), shards[0].layout, runs, size))
    lane.close()


def test_write_buffers_grow_with_the_rows(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("shard_node.cuda.uploads.FIRST_CAPACITY_BYTES", 64)
    state = random_tables(SPEC, 1)
    engine = OnCards(2, "every tier").load(export_state(tmp_path, SPEC, state, 1))
    rng = np.random.default_rng(2)
    for fraction in (0.01, 1.0, 0.5):
        for number, table in enumerate(engine.layout.tables):
            rows = np.flatnonzero(rng.random(table.num_embeddings) < fraction)
            values = random_rows(rng, rows.size, table.embedding_dim)
            state[table.name][rows] = values
            assert engine.write_rows(number, rows, encoded(table, values)) == rows.size
    assert_stored(engine, export_state(tmp_path, SPEC, state, 2))
    engine.close()


WRITTEN_SPEC = delta_spec(("int8", "fp32"), rows=90)
WRITTEN_SIZE = BatchSize(np.array([6, 6, 6]), 60)

STEPS = st.one_of(
    st.tuples(st.just("look_up"), st.integers(0, 3), st.integers(0, 1), st.integers(0, 2**32)),
    st.tuples(st.just("write"), st.integers(0, 1), st.integers(0, 2**32)),
    st.tuples(st.just("synchronize"), st.integers(0, 9)),
)
PLACES = (OnCards(2, "peers", "as late as can be"), OnCards(3, "every tier", "as late as can be"))


@pytest.fixture(scope="module")
def written_snapshot(tmp_path_factory) -> Snapshot:
    return export_state(tmp_path_factory.mktemp("store"), WRITTEN_SPEC, random_tables(WRITTEN_SPEC, 1), 1)


class World:
    """An engine, two slots on each of four lanes, and what was looked up but not yet waited for.

    Slots of the first two lanes are captured after their first batch.
    """

    def __init__(self, written_snapshot: Snapshot, where: OnCards):
        self.state = random_tables(WRITTEN_SPEC, 1)
        self.engine: CardEngine = where.load(written_snapshot)
        layout = self.engine.layout
        self.rows = [decoded_tables(WRITTEN_SPEC, self.state)[table.name] for table in layout.tables]
        self.runs: OutputRuns = runs_in_columns(layout, [1, 0, 1], ["sum", "mean", "sum"], WRITTEN_SIZE)
        self.lanes = [self.engine.lane(number % where.num_cards) for number in range(4)]
        self.slots = [[lane.prepare(self.runs, WRITTEN_SIZE) for _ in range(2)] for lane in self.lanes]
        self.looked_up: list[tuple[Memory, np.ndarray]] = []

    def look_up(self, lane_number: int, slot_number: int, seed: int) -> None:
        lane, slot = self.lanes[lane_number], self.slots[lane_number][slot_number]
        bags = feature_bags(np.random.default_rng(seed), self.engine.layout, self.runs, WRITTEN_SIZE)
        slot.fill(bags)
        lane.launch(slot.enqueue)
        if lane_number < 2 and not slot.is_captured:
            slot.capture()
        down = self.engine.card_set.cards.allocate_pinned(self.runs.out_bytes)
        lane.card.copy_to_host(down, 0, slot.out.address, self.runs.out_bytes, lane.stream)
        self.looked_up.append((down, expected_output(self.rows, bags, self.runs)))

    def write(self, number: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        table = self.engine.layout.tables[number]
        rows = np.flatnonzero(rng.random(table.num_embeddings) < 0.5)
        stored = encoded(table, random_rows(rng, rows.size, table.embedding_dim))
        values = RowCodec(table.dtype, table.embedding_dim).decode(stored)
        self.state[table.name][rows] = values
        self.rows[number] = self.rows[number].copy()
        self.rows[number][rows] = values
        self.engine.write_rows(number, rows, stored)

    def synchronize(self, number: int) -> None:
        streams = [*(lane.stream for lane in self.lanes), *self.engine._rows.order.streams]
        streams[number % len(streams)].synchronize()

    def check(self) -> None:
        for lane in self.lanes:
            lane.stream.synchronize()
        for down, expected in self.looked_up:
            written = ~np.isnan(expected)
            out = down.array.view(np.float32)
            np.testing.assert_allclose(out[written], expected[written], rtol=1e-5, atol=1e-4)
        for lane in self.lanes:
            lane.close()
        self.engine.close()


@given(st.lists(STEPS, max_size=25), st.lists(st.integers(0, 9), max_size=10), st.sampled_from(PLACES))
def test_every_lookup_sees_just_the_writes_before_it(written_snapshot, steps, in_order, where):
    world = World(written_snapshot, where)
    for step, *arguments in [*steps, *(("synchronize", number) for number in in_order)]:
        getattr(world, step)(*arguments)
    world.check()


@pytest.mark.parametrize("where", engine_params(PLACES))
def test_writes_stay_between_the_lookups_around_them(written_snapshot, where):
    world = World(written_snapshot, where)
    for number in range(12):
        world.look_up(number % 4, number % 2, number)
        world.write(number % 2, number)
        # A card that writes first would do so now.
        world.synchronize(4 + number % where.num_cards)
    world.check()
