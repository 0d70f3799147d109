"""Slots of lanes: bags of several features of one table, in columns of an output, captured and replayed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from loader.snapshot.reader import Snapshot
from shard_node.bags import Bags, TableLayout
from shard_node.cuda.batch import BatchShapes, BatchSize, OutputRuns, RunTable
from shard_node.cuda.card_engine import BatchBuffer, CardEngine, CardStream
from shard_node.errors import InvalidBagsError, MemoryBudgetError
from shardrank_testing.bags import bags_of
from shardrank_testing.card_engines import OnCards
from shardrank_testing.kernel_arena import expected_output, feature_bags, runs_in_columns
from shardrank_testing.snapshots import make_spec, write_snapshot
from shardrank_testing.topologies import decoded_tables

SPEC = make_spec()
LAYOUT = TableLayout.of(SPEC)
NUM_TABLES = len(LAYOUT.tables)
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}
BYTES = 0xA5
"""What an output is filled with before: elements that no bag is written to keep it."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> tuple[Snapshot, dict[str, np.ndarray]]:
    path, tables = write_snapshot(tmp_path_factory.mktemp("store"), SPEC, seed=1, rows_per_file=256)
    return Snapshot.open(path), decoded_tables(SPEC, tables)


@pytest.fixture(scope="module")
def rows(stored) -> list[np.ndarray]:
    """Of each table in layout order, its float32 rows."""
    return [stored[1][table.name] for table in LAYOUT.tables]


@pytest.fixture
def emulated(stored) -> Iterator[CardEngine]:
    engine = OnCards(2, "every tier").load(stored[0])
    yield engine
    engine.close()


@pytest.fixture
def lane(engine) -> Iterator[CardStream]:
    lane = engine.lane(len(engine.card_set.cards.cards) - 1)
    yield lane
    lane.close()


def check_batch(lane: CardStream, slot: BatchBuffer, runs: OutputRuns, rows: list[np.ndarray], bags: Bags) -> None:
    """Pool a batch: each bag is in its columns, and nothing else is written."""
    out = lane.card.tensor(slot.out, 0, (runs.out_elements,), TORCH_DTYPES[runs.out_dtype])
    lane.stream.synchronize()
    with lane.card.torch_stream(lane.stream):
        lane.card.tensor(slot.out, 0, (slot.out.size_bytes,), torch.uint8).fill_(BYTES)
    slot.fill(bags)
    lane.launch(slot.enqueue)
    lane.stream.synchronize()
    out = out.cpu()
    values = out.double()
    values[out == torch.full((out.element_size(),), BYTES, dtype=torch.uint8).view(out.dtype)] = torch.nan
    tolerance = TOLERANCES[runs.out_dtype]
    np.testing.assert_allclose(values.numpy(), expected_output(rows, bags, runs), rtol=tolerance, atol=10 * tolerance)


FEATURES = {
    "each table": ([0, 1, 2, 3, 4], ["sum", "mean", "sum", "mean", "sum"]),
    "shared tables": ([4, 0, 4, 2, 0, 3], ["sum", "mean", "mean", "sum", "sum", "sum"]),
    "sequences": ([3, 1, 3, 0], ["none", "sum", "mean", "none"]),
}


@pytest.mark.parametrize(("out_dtype", "weighted"), [("fp32", True), ("fp32", False), ("bf16", True)])
@pytest.mark.parametrize("features", list(FEATURES))
def test_bags_are_pooled_into_their_columns_only(engine, rows, lane, features, out_dtype, weighted):
    tables, modes = FEATURES[features]
    size = BatchSize(np.full(len(tables), 9), 120, weighted=weighted)
    runs = runs_in_columns(LAYOUT, tables, modes, size, out_dtype)
    slot = lane.prepare(runs, size)
    rng = np.random.default_rng(7)
    for number in range(3):
        # The last batch of a slot with weights has none: they are all ones.
        bags = feature_bags(rng, LAYOUT, runs, size, weighted and number < 2)
        check_batch(lane, slot, runs, rows, bags)
    use = engine.cards()
    assert (use.outside_table, use.not_here) == (0, 0)


def test_a_captured_batch_is_replayed_for_others(rows, lane):
    tables, modes = FEATURES["shared tables"]
    size = BatchSize(np.full(len(tables), 30), 300, weighted=True)
    runs = runs_in_columns(LAYOUT, tables, modes, size)
    slot = lane.prepare(runs, size)
    rng = np.random.default_rng(3)
    for weighted in (True, True, False, True):
        check_batch(lane, slot, runs, rows, feature_bags(rng, LAYOUT, runs, size, weighted))
        if not slot.is_captured:
            slot.capture()


@pytest.mark.parametrize(("hotness", "weighted", "captured"), [(1, False, True), (20, False, False), (20, True, True)])
def test_half_a_batch_sends_half_the_bytes(emulated, rows, hotness, weighted, captured):
    cards = emulated.card_set.cards
    bags_per_table = 800
    size = BatchSize(np.full(5, bags_per_table), 5 * bags_per_table * hotness, weighted)
    runs = runs_in_columns(LAYOUT, [0, 1, 2, 3, 4], ["sum"] * 5, size)
    lane = emulated.lane(0)
    slot = lane.prepare(runs, size)
    sent, copies = [], []
    for number in (bags_per_table, bags_per_table // 2, bags_per_table // 4, 0):
        cards.bytes_up.clear()
        weights = np.full(5 * number * hotness, 0.5) if weighted else None
        check_batch(lane, slot, runs, rows, bags_of({key: [[7] * hotness] * number for key in range(5)}, weights))
        sent.append(sum(cards.bytes_up))
        copies.append(len(cards.bytes_up))
        if captured and not slot.is_captured:
            slot.capture()
    full, half, quarter, empty = sent
    assert full <= slot.batch.size_bytes
    # Blocks, up to a byte a bag, and runs are always sent.
    fixed = 5 * bags_per_table + 32 * 5 + 200
    assert full / 2 <= half <= full / 2 + fixed
    assert full / 4 <= quarter <= full / 4 + fixed
    assert empty <= fixed
    # One copy, and a second one for weights, which values push apart.
    assert copies == ([1, 2, 2, 1] if weighted else [1, 1, 1, 1])
    lane.close()


def test_lookups_of_a_shared_table_are_counted_together(engine, lane):
    size = BatchSize(np.array([2, 2, 2]), 20)
    slot = lane.prepare(runs_in_columns(LAYOUT, [1, 0, 1], ["sum", "none", "mean"], size), size)
    slot.fill(bags_of({0: [[0] * 3], 1: [[0], [0]], 2: [[0] * 4]}))
    assert [count.rows for count in engine.rows_looked_up()] == [2, 7, 0, 0, 0]


def test_refused_batches_and_errors_leave_the_slot_usable(rows, lane):
    size = BatchSize(np.array([2, 2]), 20)
    runs = runs_in_columns(LAYOUT, [2, 1], ["sum", "sum"], size)
    slot = lane.prepare(runs, size)
    table = LAYOUT.tables[1]
    beyond = table.num_embeddings
    for bags, message in (
        (bags_of({0: [[0]], 1: [[beyond]]}), rf"row {beyond} \(value 1\) .* of table '{table.name}'"),
        (bags_of({0: [[0]]}), "the batch has 1 keys, there must be 2"),
        (bags_of({0: [[0] * 20], 1: [[0]]}), "the batch has 21 values, but there is room for 20"),
        (bags_of({0: [[0]], 1: [[0]] * 3}), "key 1 has 3 bags, but there is room for 2"),
        (bags_of({0: [[0]], 1: [[0]]}, [1, 1]), "the batch has weights, but there is no room for any"),
    ):
        with pytest.raises(InvalidBagsError, match=message):
            slot.fill(bags)

    def fail() -> None:
        slot.enqueue()
        raise InterruptedError

    slot.fill(feature_bags(np.random.default_rng(1), LAYOUT, runs, size))
    with pytest.raises(InterruptedError):
        lane.launch(fail)
    check_batch(lane, slot, runs, rows, feature_bags(np.random.default_rng(2), LAYOUT, runs, size))


def test_lanes_and_slots_free_all_their_memory(emulated):
    cards = emulated.card_set.cards
    before = cards.free_bytes()
    lane = emulated.lane(1)
    size = BatchSize(np.full(5, 9), 120, weighted=True, extra_bytes=100)
    runs = runs_in_columns(LAYOUT, *FEATURES["each table"], size)
    slots = [lane.prepare(runs, size) for _ in range(3)]
    slots[1].fill(feature_bags(np.random.default_rng(1), LAYOUT, runs, size))
    lane.launch(slots[1].enqueue)
    in_use = cards.free_bytes()
    too_large = BatchSize(np.array([cards.cards[1].total_bytes // 16]), 20)
    with pytest.raises(MemoryBudgetError):
        lane.prepare(runs_in_columns(LAYOUT, [3], ["sum"], too_large), too_large)
    assert cards.free_bytes() == in_use
    for closing in (slots[1], slots[1], lane, lane):
        closing.close()
    assert cards.free_bytes() == before


def test_positions_beyond_32_bits_are_refused(lane):
    runs = OutputRuns(
        np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, 512), "fp32", 2**50
    )
    # The kernel looks a few values beyond the last one, with 32 bits.
    for num_bags, num_values in ((9, 2**31), (9, 2**32 - 1), (2**31 - 1, 9)):
        with pytest.raises(InvalidBagsError, match=f"a batch has at most {2**31 - 1} values and fewer bags"):
            lane.prepare(runs, BatchSize(np.array([num_bags]), num_values))


def runs_with(**changes) -> OutputRuns:
    fields = {
        "tables": np.array([0, 1]),
        "modes": np.array([0, 2]),
        "out_offsets": np.array([0, 100]),
        "out_strides": np.array([16, 16]),
        "out_dtype": "fp32",
        "out_elements": 200,
    }
    return OutputRuns(**(fields | changes))


def test_a_key_may_have_several_runs():
    runs = {
        "tables": np.array([0, 1, 2]),
        "modes": np.array([0, 2, 0]),
        "out_offsets": np.array([0, 64, 128]),
        "out_strides": np.array([16, 16, 16]),
    }
    table = RunTable(BatchShapes(LAYOUT), runs_with(**runs, keys=np.array([1, 0, 1])))
    assert table.tables.tolist() == [1, 0]
    assert [(keys.tolist(), tables.tolist()) for keys, tables in table.further] == [([False, True], [2])]
    assert table.blocks(bags_of({0: [[5]], 1: [[], [6, 7]]})).first.tolist() == [1, 0, 1]
