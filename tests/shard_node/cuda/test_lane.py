"""Slots of lanes: bags of several features of one table, in columns of an output, captured and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from loader.snapshot.reader import Snapshot
from shard_node.bags import KeyedBags
from shard_node.cuda.batch import BatchSize, OutputRuns
from shard_node.cuda.card_engine import CardEngine
from shard_node.cuda.lane import Lane, Slot
from shard_node.errors import InvalidBagsError, MemoryBudgetError
from shardrank_testing.card_engines import CARD_ENGINES, REAL_ENGINES, OnCards, engine_params
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.output_runs import expected_output, feature_bags, runs_in_columns
from shardrank_testing.snapshots import make_spec, write_snapshot
from shardrank_testing.topologies import decoded_tables

SPEC = make_spec()
TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCES = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}
BYTES = 0xA5
"""What an output is filled with before: elements that no bag is written to keep it."""


@dataclass
class Loaded:
    """An engine and, by table in layout order, its float32 rows."""

    engine: CardEngine
    rows: list[np.ndarray]


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> tuple[Snapshot, list[np.ndarray]]:
    path, tables = write_snapshot(tmp_path_factory.mktemp("store"), SPEC, seed=1, rows_per_file=256)
    decoded = decoded_tables(SPEC, tables)
    snapshot = Snapshot.open(path)
    names = [table.name for table in sorted(SPEC.tables, key=lambda one: (one.embedding_dim, one.dtype))]
    return snapshot, [decoded[name] for name in names]


@pytest.fixture(params=engine_params())
def loaded(request, stored) -> Iterator[Loaded]:
    engine = request.param.load(stored[0])
    yield Loaded(engine, stored[1])
    engine.close()


def a_lane(loaded: Loaded) -> Lane:
    return loaded.engine.lane(len(loaded.engine.card_set.cards.cards) - 1)


def fill_out(lane: Lane, slot: Slot) -> None:
    view = lane.card.tensor(slot.out, 0, (slot.out.size_bytes,), torch.uint8)
    lane.stream.synchronize()
    with lane.card.torch_stream(lane.stream):
        view.fill_(BYTES)


def read_out(lane: Lane, slot: Slot, runs: OutputRuns) -> torch.Tensor:
    """The output, on the host, as float64; NaN where it was not written to."""
    lane.stream.synchronize()
    out = lane.card.tensor(slot.out, 0, (runs.out_elements,), TORCH_DTYPES[runs.out_dtype]).cpu()
    untouched = torch.full((out.element_size(),), BYTES, dtype=torch.uint8).view(out.dtype)
    values = out.double()
    values[out == untouched] = torch.nan
    return values


def assert_out(lane: Lane, slot: Slot, runs: OutputRuns, rows: list[np.ndarray], bags: KeyedBags) -> None:
    tolerance = TOLERANCES[runs.out_dtype]
    np.testing.assert_allclose(
        read_out(lane, slot, runs).numpy(), expected_output(rows, bags, runs), rtol=tolerance, atol=10 * tolerance
    )


def run(lane: Lane, slot: Slot, bags: KeyedBags) -> None:
    slot.fill(bags)
    lane.launch(slot.enqueue)


FEATURES = {
    "one of each table": ([0, 1, 2, 3, 4], ["sum", "mean", "sum", "mean", "sum"]),
    "several of a table, in any order": ([4, 0, 4, 2, 0, 3], ["sum", "mean", "mean", "sum", "sum", "sum"]),
    "sequences beside pooled ones": ([3, 1, 3, 0], ["none", "sum", "mean", "none"]),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("out_dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("features", list(FEATURES))
def test_each_bag_is_pooled_into_its_own_columns_and_nothing_else_is_touched(loaded, features, out_dtype, weighted):
    tables, modes = FEATURES[features]
    layout = loaded.engine.layout
    size = BatchSize(np.full(len(tables), 9), 120, weighted=weighted)
    runs = runs_in_columns(layout, tables, modes, size, out_dtype)
    lane = a_lane(loaded)
    slot = lane.prepare(runs, size)
    rng = np.random.default_rng(7)
    for number in range(4):
        # The last batch of a slot with weights has none: they are all ones.
        bags = feature_bags(rng, layout, runs, size, weighted and number < 3)
        fill_out(lane, slot)
        run(lane, slot, bags)
        assert_out(lane, slot, runs, loaded.rows, bags)
    assert loaded.engine.counters() == (0, 0)
    lane.close()


@pytest.mark.parametrize(
    "where", engine_params(tuple(one for one in CARD_ENGINES if one.tiers == "peers"), REAL_ENGINES[:1])
)
def test_a_captured_batch_is_replayed_for_every_other_one(stored, where):
    engine = where.load(stored[0])
    layout = engine.layout
    tables, modes = FEATURES["several of a table, in any order"]
    size = BatchSize(np.full(len(tables), 30), 300, weighted=True)
    runs = runs_in_columns(layout, tables, modes, size)
    lane = engine.lane(0)
    slot = lane.prepare(runs, size)
    rng = np.random.default_rng(3)
    run(lane, slot, feature_bags(rng, layout, runs, size, True))
    lane.stream.synchronize()
    slot.capture()
    for weighted in (True, False, True):
        bags = feature_bags(rng, layout, runs, size, weighted)
        fill_out(lane, slot)
        run(lane, slot, bags)
        assert_out(lane, slot, runs, stored[1], bags)
    lane.close()
    engine.close()


def full_bags(num_keys: int, bags_per_key: int, hotness: int, weighted: bool = False) -> KeyedBags:
    """The same number of bags, and of values in each, for every key."""
    num_bags = num_keys * bags_per_key
    weights = np.full(num_bags * hotness, 0.5, np.float32) if weighted else None
    keys = np.arange(num_keys, dtype=np.int32)
    return KeyedBags.from_lengths(
        keys, np.full(num_keys, bags_per_key), np.full(num_bags, hotness), np.arange(num_bags * hotness) % 7, weights
    )


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("hotness", "weighted"), [(1, False), (20, False), (20, True)])
def test_a_batch_of_half_a_slots_size_sends_half_the_bytes(stored, hotness, weighted, captured):
    engine = OnCards(2, "peers").load(stored[0])
    cards = engine.card_set.cards
    assert isinstance(cards, EmulatedCards)
    tables = [0, 1, 2, 3, 4]
    size = BatchSize(np.full(5, 2000), 5 * 2000 * hotness, weighted)
    runs = runs_in_columns(engine.layout, tables, ["sum"] * 5, size)
    lane = engine.lane(0)
    slot = lane.prepare(runs, size)
    sent, copies = [], []
    for bags_per_key in (2000, 1000, 500, 0):
        bags = full_bags(5, bags_per_key, hotness, weighted)
        cards.bytes_up.clear()
        fill_out(lane, slot)
        run(lane, slot, bags)
        assert_out(lane, slot, runs, stored[1], bags)
        sent.append(sum(cards.bytes_up))
        copies.append(len(cards.bytes_up))
        if captured and not slot.is_captured:
            slot.capture()
    whole, half, quarter, nothing = sent
    assert whole <= slot.batch.size_bytes
    # Blocks, up to a byte a bag, and runs go up whole.
    fixed = 5 * 2000 + 32 * 5 + 200
    assert whole / 2 <= half <= whole / 2 + fixed
    assert whole / 4 <= quarter <= whole / 4 + fixed
    assert nothing <= fixed
    # One copy, and a second one for weights, which values push apart.
    assert copies == ([1, 2, 2, 1] if weighted else [1, 1, 1, 1])
    lane.close()
    engine.close()


def test_what_the_caller_sends_along_arrives_with_the_batch(loaded):
    layout = loaded.engine.layout
    size = BatchSize(np.array([5]), 20, extra_bytes=24)
    runs = runs_in_columns(layout, [0], ["sum"], size)
    lane = a_lane(loaded)
    slot = lane.prepare(runs, size)
    for number in range(3):
        bags = feature_bags(np.random.default_rng(number), layout, runs, size)
        slot.fill(bags)
        slot.extra[:] = np.arange(6, dtype=np.float32).view(np.uint8) + number
        lane.launch(slot.enqueue)
        lane.stream.synchronize()
        sent = lane.card.tensor(slot.batch, slot.extra_at, (24,), torch.uint8).cpu().numpy()
        np.testing.assert_array_equal(sent, slot.extra)
    lane.close()


def test_lookups_of_features_that_share_a_table_are_counted_together(loaded):
    layout = loaded.engine.layout
    size = BatchSize(np.array([2, 2, 2]), 20)
    runs = runs_in_columns(layout, [1, 0, 1], ["sum", "none", "mean"], size)
    lane = a_lane(loaded)
    slot = lane.prepare(runs, size)
    keys = np.arange(3, dtype=np.int32)
    slot.fill(KeyedBags.from_lengths(keys, np.array([1, 2, 1]), np.array([3, 1, 1, 4]), np.zeros(9, np.int64)))
    assert [count.rows for count in loaded.engine.rows_looked_up()] == [2, 7, 0, 0, 0]
    lane.close()


def test_a_row_outside_its_table_is_refused_by_the_tables_name_and_the_slot_stays_usable(loaded):
    layout = loaded.engine.layout
    size = BatchSize(np.array([2, 2]), 20)
    runs = runs_in_columns(layout, [2, 1], ["sum", "sum"], size)
    lane = a_lane(loaded)
    slot = lane.prepare(runs, size)
    keys, counts = np.arange(2, dtype=np.int32), np.array([1, 1])
    wrong = layout.tables[1]
    with pytest.raises(InvalidBagsError, match=rf"row {wrong.num_embeddings} \(value 1\) .* of table '{wrong.name}'"):
        slot.fill(KeyedBags.from_lengths(keys, counts, np.array([1, 1]), np.array([0, wrong.num_embeddings])))
    with pytest.raises(InvalidBagsError, match="the batch has 1 keys, there must be 2"):
        slot.fill(KeyedBags.from_lengths(keys[:1], counts[:1], np.array([1]), np.array([0])))
    with pytest.raises(InvalidBagsError, match="the batch has 21 values, but there is room for 20"):
        slot.fill(KeyedBags.from_lengths(keys, counts, np.array([20, 1]), np.zeros(21, np.int64)))
    bags = feature_bags(np.random.default_rng(1), layout, runs, size)
    fill_out(lane, slot)
    run(lane, slot, bags)
    assert_out(lane, slot, runs, loaded.rows, bags)
    lane.close()


def test_an_error_while_a_batch_is_enqueued_leaves_the_lane_usable(loaded):
    layout = loaded.engine.layout
    size = BatchSize(np.array([3]), 20)
    runs = runs_in_columns(layout, [0], ["sum"], size)
    lane = a_lane(loaded)
    slot = lane.prepare(runs, size)

    def fail() -> None:
        slot.enqueue()
        raise InterruptedError

    slot.fill(feature_bags(np.random.default_rng(1), layout, runs, size))
    with pytest.raises(InterruptedError):
        lane.launch(fail)
    bags = feature_bags(np.random.default_rng(2), layout, runs, size)
    fill_out(lane, slot)
    run(lane, slot, bags)
    assert_out(lane, slot, runs, loaded.rows, bags)
    lane.close()


def test_lanes_and_slots_give_back_all_they_took(stored):
    where = OnCards(2, "every tier")
    engine = where.load(stored[0])
    cards = engine.card_set.cards
    assert isinstance(cards, EmulatedCards)
    before = [card.free_bytes() for card in cards.cards], cards.space.free_bytes(None)
    lane = engine.lane(1)
    size = BatchSize(np.full(5, 9), 120, weighted=True, extra_bytes=100)
    runs = runs_in_columns(engine.layout, *FEATURES["one of each table"], size)
    slots = [lane.prepare(runs, size) for _ in range(3)]
    run(lane, slots[1], feature_bags(np.random.default_rng(1), engine.layout, runs, size))
    slots[1].close()
    slots[1].close()
    lane.close()
    lane.close()
    assert ([card.free_bytes() for card in cards.cards], cards.space.free_bytes(None)) == before
    engine.close()


def test_a_slot_that_does_not_fit_on_the_card_holds_nothing(stored):
    where = OnCards(1, "peers")
    engine = where.load(stored[0])
    cards = engine.card_set.cards
    assert isinstance(cards, EmulatedCards)
    lane = engine.lane(0)
    before = cards.cards[0].free_bytes(), cards.space.free_bytes(None)
    size = BatchSize(np.array([cards.cards[0].total_bytes // 16]), 20)
    runs = runs_in_columns(engine.layout, [3], ["sum"], size)
    with pytest.raises(MemoryBudgetError):
        lane.prepare(runs, size)
    assert (cards.cards[0].free_bytes(), cards.space.free_bytes(None)) == before
    lane.close()
    engine.close()


def test_runs_of_another_layout_are_refused(loaded):
    size = BatchSize(np.array([3]), 20)
    runs = runs_in_columns(loaded.engine.layout, [0], ["sum"], size)
    lane = a_lane(loaded)
    wrong = OutputRuns(np.array([9]), runs.modes, runs.out_offsets, runs.out_strides, "fp32", runs.out_elements)
    with pytest.raises(InvalidBagsError, match=r"tables must be within 0\.\.4, got \[9\]"):
        lane.prepare(wrong, size)
    lane.close()
