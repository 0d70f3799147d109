"""A packed batch: every bag is in one block of its arena, sections are aligned, and nothing is written outside."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_node.bags import KeyedBags, TableLayout
from shard_node.cuda.batch import (
    GAP_BYTES,
    BatchLayout,
    BatchShapes,
    BatchSize,
    BatchViews,
    OutputRuns,
    RunTable,
    check_fits,
    check_runs,
)
from shard_node.cuda.kernel_params import MODES, NO_RUN
from shard_node.errors import InvalidBagsError
from shardrank_testing.bags import keyed_bags
from shardrank_testing.snapshots import make_spec

LAYOUT = TableLayout.of(make_spec())
SHAPES = BatchShapes(LAYOUT)
NUM_TABLES = len(LAYOUT.tables)


def runs_of(tables: list[int], modes: list[int]) -> OutputRuns:
    size = len(tables)
    return OutputRuns(
        np.array(tables, np.int64),
        np.array(modes, np.int64),
        np.arange(size, dtype=np.int64) * 1000,
        np.full(size, 512, np.int64),
        "fp32",
        10**9,
    )


def test_positions_beyond_32_bits_are_refused():
    runs = OutputRuns(
        np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, 512), "fp32", 2**50
    )
    check_runs(LAYOUT, runs, BatchSize(np.array([9]), 2**31 - 1))
    # The kernel looks a few values beyond the last one, with 32 bits.
    for num_bags, num_values in ((9, 2**31), (9, 2**32 - 1), (2**31 - 1, 9)):
        with pytest.raises(InvalidBagsError, match=f"a batch has at most {2**31 - 1} values and fewer bags"):
            check_runs(LAYOUT, runs, BatchSize(np.array([num_bags]), num_values))


@st.composite
def batches(draw: st.DrawFn) -> tuple[KeyedBags, OutputRuns]:
    bags = draw(keyed_bags(num_keys=8, max_bags=40, max_hotness=3))
    size = bags.keys.size
    tables = draw(st.lists(st.integers(0, NUM_TABLES - 1), min_size=size, max_size=size))
    modes = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    return bags, runs_of(tables, modes)


def pack(
    bags: KeyedBags, table: RunTable, layout: BatchLayout | None = None, buffer: np.ndarray | None = None
) -> BatchViews:
    blocks = table.blocks(bags)
    layout = layout or BatchLayout.tight(bags, blocks)
    views = BatchViews(np.full(layout.size_bytes, 0xEE, np.uint8) if buffer is None else buffer, layout)
    views.write_constant(table)
    for target in views.blocks:
        # As a larger batch before may have left it.
        target[:] = 0
    views.pack(bags, blocks)
    return views


def covered(views: BatchViews, table: RunTable) -> list[tuple[int, int]]:
    """The (run, bag within the run) of every block of every arena, in order."""
    found = []
    for arena, blocks in enumerate(views.blocks):
        for run, first in blocks.tolist():
            if run != NO_RUN:
                assert table.arena[run] == arena
                end = min(first + SHAPES.arenas[arena].bags_per_block, int(views.runs["num"][run]))
                found += [(run, bag) for bag in range(first, end)]
    return found


@given(batches())
def test_a_packed_batch_is_the_batch(batch):
    """Every bag is in one block of its arena; values, offsets, weights and runs are those of the batch."""
    bags, runs = batch
    table = RunTable(SHAPES, runs)
    views = pack(bags, table)
    none = runs.modes == MODES["none"]
    num = np.where(none, bags.values_per_key(), bags.bags_per_key)
    first = np.where(none, bags.value_starts()[:-1], bags.bag_starts()[:-1])
    assert sorted(covered(views, table)) == [(run, bag) for run in range(runs.tables.size) for bag in range(num[run])]
    assert views.values.dtype == np.uint32
    assert views.values.tolist() == bags.values.tolist()
    assert views.offsets.tolist() == bags.offsets.tolist()
    assert (views.weights is None) == (bags.weights is None)
    if bags.weights is not None:
        assert views.weights.tolist() == bags.weights.tolist()
    for name, expected in (
        ("num", num),
        ("first", first),
        ("table", SHAPES.table_in_arena[runs.tables]),
        ("mode", runs.modes),
        ("out_offset", runs.out_offsets),
        ("out_stride", runs.out_strides),
    ):
        assert views.runs[name].tolist() == expected.tolist()


@given(batches(), st.integers(0, 50), st.integers(0, 300), st.integers(0, 33))
def test_a_smaller_batch_leaves_the_other_blocks_idle(batch, more_bags, more_values, extra):
    bags, runs = batch
    table = RunTable(SHAPES, runs)
    size = BatchSize(bags.bags_per_key + more_bags, bags.num_values + more_values, weighted=True, extra_bytes=extra)
    check_fits(bags, size)
    layout = BatchLayout(
        size.num_values, int(size.bags_per_key.sum()), table.size, table.most_blocks(size), True, extra
    )
    views = pack(bags, table, layout)
    num = views.runs["num"].tolist()
    assert sorted(covered(views, table)) == [(run, bag) for run in range(table.size) for bag in range(num[run])]
    assert views.weights is not None
    expected = [1.0] * bags.num_values if bags.weights is None else bags.weights.tolist()
    assert views.weights[: bags.num_values].tolist() == expected
    assert views.extra.size == extra
    # Offsets lie at the end, and runs say where: a run of bags names its first offset, one of values its first value.
    skipped = views.offsets.size - bags.offsets.size
    assert views.offsets[skipped:].tolist() == bags.offsets.tolist()
    none = runs.modes == MODES["none"]
    first = np.where(none, bags.value_starts()[:-1], bags.bag_starts()[:-1] + skipped)
    assert views.runs["first"].tolist() == first.tolist()


@given(batches(), st.integers(0, 50), st.integers(0, 20_000), st.booleans())
def test_used_bytes_are_all_that_packing_writes_and_little_more(batch, more_bags, more_values, weighted):
    bags, runs = batch
    weighted = weighted or bags.weights is not None
    table = RunTable(SHAPES, runs)
    size = BatchSize(bags.bags_per_key + more_bags, bags.num_values + more_values, weighted)
    layout = BatchLayout(size.num_values, int(size.bags_per_key.sum()), table.size, table.most_blocks(size), weighted)
    used = layout.used(bags)
    assert 1 <= len(used) <= 1 + weighted
    assert all(0 <= first < end <= layout.size_bytes and first % 16 == 0 for first, end in used)
    written = np.zeros(layout.size_bytes, np.bool_)
    for fill in (0x00, 0xEE):
        buffer = np.full(layout.size_bytes, fill, np.uint8)
        pack(bags, table, layout, buffer)
        written |= buffer != fill
    for first, end in used:
        written[first:end] = False
    assert not written.any()
    # All blocks and runs, and of offsets, values and weights those of the batch; and what is not worth a second copy.
    parts = 4 * bags.offsets.size + 4 * bags.num_values * (1 + weighted) + layout.values_at - layout.runs_at
    taken = sum(end - first for first, end in used)
    assert taken <= parts + 32 + (GAP_BYTES + 16 if weighted and len(used) == 1 else 0)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (BatchSize(np.array([2, 1]), 2, True), "the batch has 3 values, but there is room for 2"),
        (BatchSize(np.array([2, 0]), 9, True), "key 1 has 1 bags, but there is room for 0"),
        (BatchSize(np.array([2, 1]), 9, False), "the batch has weights, but there is no room for any"),
    ],
)
def test_a_batch_too_large_for_its_buffer_is_refused(size, message):
    bags = KeyedBags.from_lengths(
        np.array([0, 1], np.int32), np.array([2, 1]), np.array([1, 1, 1]), np.arange(3), np.ones(3, np.float32)
    )
    with pytest.raises(InvalidBagsError, match=message):
        check_fits(bags, size)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tables": np.array([0, NUM_TABLES])}, rf"tables must be within 0\.\.{NUM_TABLES - 1}"),
        ({"tables": np.array([-1, 0])}, "tables must be within"),
        ({"modes": np.array([0, 3])}, r"modes must be within 0\.\.2, got \[0, 3\]"),
        ({"modes": np.array([0])}, "these must be flat and of one length"),
        ({"out_offsets": np.array([-1, 100])}, "out_offsets must not be negative"),
        ({"out_strides": np.array([3, 16])}, "out_strides not below the table's embedding_dim"),
        ({"out_elements": 10}, "run 0: its last bag ends at element .* of 10"),
        ({"out_strides": np.array([2**62, 16])}, "run 0: its last bag ends at element"),
        ({"out_offsets": np.array([0, 190])}, "run 1: its last bag ends at element"),
    ],
)
def test_runs_that_would_write_outside_are_refused(changes, message):
    size = BatchSize(np.array([4, 4]), 3)
    check_runs(LAYOUT, runs_with(), size)
    with pytest.raises(InvalidBagsError, match=message):
        check_runs(LAYOUT, runs_with(**changes), size)


def test_a_key_may_have_several_runs():
    size = BatchSize(np.array([4, 4]), 3)
    runs = {
        "tables": np.array([0, 1, 2]),
        "modes": np.array([0, 2, 0]),
        "out_offsets": np.array([0, 64, 128]),
        "out_strides": np.array([16, 16, 16]),
    }
    table = RunTable(SHAPES, runs_with(**runs, keys=np.array([1, 0, 1])))
    check_runs(LAYOUT, table.runs, size)
    assert table.tables.tolist() == [1, 0]
    assert [(keys.tolist(), tables.tolist()) for keys, tables in table.further] == [([False, True], [2])]
    bags = KeyedBags.from_lengths(
        np.array([0, 1], np.int32), np.array([1, 2]), np.array([1, 0, 2]), np.array([5, 6, 7])
    )
    assert table.spans(bags)[0].tolist() == [1, 0, 1]
    for keys, message in (
        (np.array([1, 2, 1]), r"keys must be within 0\.\.1"),
        (np.array([1, 1, 1]), "keys must name each of the 2 keys"),
        (np.array([1, 0]), "of one length"),
    ):
        with pytest.raises(InvalidBagsError, match=message):
            check_runs(LAYOUT, runs_with(**runs, keys=keys), size)
