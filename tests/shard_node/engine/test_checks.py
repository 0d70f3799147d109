"""Whatever an engine could not pool safely is refused first, by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_node.bags import Bags, CheckedBags, TableLayout
from shard_node.errors import InvalidBagsError
from shardrank_testing.bags import random_table_bags
from shardrank_testing.nodes import reference_engine

LAYOUT = reference_engine().layout
NUM_ROWS = [table.num_embeddings for table in LAYOUT.tables]


@given(st.integers(0, 2**32 - 1), st.integers(0, 3), st.booleans())
def test_the_first_row_outside_its_table_is_named(seed, num_wrong, negative):
    rng = np.random.default_rng(seed)
    bags = random_table_bags(rng, LAYOUT, 5, 6)
    wrong = rng.integers(0, bags.num_values, min(num_wrong, bags.num_values)) if bags.num_values else []
    limits = np.repeat([NUM_ROWS[key] for key in bags.keys], bags.values_per_key())
    bags.values[wrong] = -1 - limits[wrong] if negative else limits[wrong]
    expected = [position for position in range(bags.num_values) if not 0 <= bags.values[position] < limits[position]]
    if not expected:
        LAYOUT.check(bags)
        return
    with pytest.raises(InvalidBagsError, match=rf"row {bags.values[expected[0]]} \(value {expected[0]}\) is not in 0"):
        LAYOUT.check(bags)


def is_right_by_definition(bags: Bags) -> bool:
    try:
        bags.validate()
    except InvalidBagsError:
        return False
    if any(not 0 <= key < len(NUM_ROWS) for key in bags.keys):
        return False
    limits = np.repeat([NUM_ROWS[key] for key in bags.keys], bags.values_per_key())
    return all(0 <= value < limit for value, limit in zip(bags.values, limits, strict=True))


def with_a_row_too_high(layout: TableLayout) -> CheckedBags:
    bags = random_table_bags(np.random.default_rng(5), LAYOUT, 5, 6)
    bags.values[-1] = max(NUM_ROWS)
    return CheckedBags(bags.keys, bags.bags_per_key, bags.offsets, bags.values, bags.weights, layout=layout)


@pytest.mark.parametrize(
    "layout", [LAYOUT, TableLayout(LAYOUT.tables, LAYOUT.groups)], ids=["the same", "an equal one"]
)
def test_values_checked_against_a_layout_are_not_read_again(layout):
    for _ in range(2):
        LAYOUT.check(with_a_row_too_high(layout))


def test_values_checked_against_another_layout_are_checked():
    grown = LAYOUT.tables[-1].model_copy(update={"num_embeddings": 10 * max(NUM_ROWS)})
    other = TableLayout((*LAYOUT.tables[:-1], grown), LAYOUT.groups)
    LAYOUT.check(with_a_row_too_high(LAYOUT))
    for _ in range(2):
        with pytest.raises(InvalidBagsError, match="is not in 0"):
            LAYOUT.check(with_a_row_too_high(other))


def test_arrays_of_checked_bags_must_fit_each_other():
    bags = with_a_row_too_high(LAYOUT)
    half = bags.values.size // 2
    shorter = CheckedBags(bags.keys, bags.bags_per_key, bags.offsets, bags.values[:half], layout=LAYOUT)
    strided = CheckedBags(bags.keys, bags.bags_per_key, bags.offsets, np.repeat(bags.values, 2)[::2], layout=LAYOUT)
    fewer = CheckedBags(bags.keys, bags.bags_per_key - 1, bags.offsets, bags.values, layout=LAYOUT)
    for wrong, said in ((shorter, "offsets ends at"), (strided, "flat and contiguous"), (fewer, "add up to")):
        with pytest.raises(InvalidBagsError, match=said):
            LAYOUT.check(wrong)


small = st.integers(-1, 4)


@given(
    st.lists(small, max_size=4),
    st.lists(small, max_size=4),
    st.lists(small, max_size=6),
    st.lists(small, max_size=5),
    st.one_of(st.none(), st.lists(st.floats(width=32), max_size=5)),
)
def test_the_check_refuses_exactly_what_are_no_bags(keys, counts, offsets, values, weights):
    bags = Bags(
        np.array(keys, np.int32),
        np.array(counts, np.int64),
        np.array(offsets, np.int64),
        np.array(values, np.int64),
        None if weights is None else np.array(weights, np.float32),
    )
    if is_right_by_definition(bags):
        LAYOUT.check(bags)
    else:
        with pytest.raises(InvalidBagsError):
            LAYOUT.check(bags)


def one_bag(**changes) -> Bags:
    arrays = {
        "keys": np.array([0], np.int32),
        "bags_per_key": np.array([1], np.int64),
        "offsets": np.array([0, 3], np.int64),
        "values": np.array([0, 0, 0], np.int64),
        "weights": np.ones(3, np.float32),
    }
    return Bags(**(arrays | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": np.broadcast_to(np.float32(1), 3)}, "weights must be flat and contiguous float32"),
        ({"weights": np.ones(6, np.float32)[::2]}, "weights must be flat and contiguous float32"),
        ({"weights": np.ones(3)}, "weights must be flat and contiguous float32, got float64"),
        ({"weights": np.ones(2, np.float32)}, "2 weights for 3 values"),
        ({"values": np.zeros(6, np.int64)[::2]}, "values must be flat and contiguous int64"),
        ({"values": np.zeros(3, np.int16)}, "values must be flat and contiguous int64, got int16"),
        ({"values": np.array([0, -1, 1], np.int32)}, "row -1"),
        ({"offsets": np.array([0, 9, 3, 9])[::2]}, "offsets must be flat and contiguous int64"),
        ({"offsets": np.array([0, 2**63 - 1, -(2**63), -1, 3]), "bags_per_key": np.array([4])}, "must not descend"),
        ({"bags_per_key": np.array([-1])}, "bags_per_key must not be negative"),
        ({"bags_per_key": np.array([0])}, "bags_per_key must .* add up to the 1 bags"),
        ({"bags_per_key": np.array([1, 0])}, "keys has 1 entries, bags_per_key 2"),
        ({"keys": np.zeros(2, np.int32), "bags_per_key": np.array([1, 0])}, "strictly ascending"),
        ({"offsets": np.array([0, 2])}, "offsets ends at 2, but there are 3 values"),
        ({"offsets": np.array([1, 3])}, "offsets must begin with 0"),
        ({"offsets": np.array([], np.int64)}, "offsets must begin with 0"),
        ({"weights": np.array([1, np.nan, 2], np.float32)}, "weights must be finite"),
        ({"keys": np.array([-1], np.int32)}, "keys must be non-negative"),
        ({"keys": np.array([99], np.int32)}, f"key 99 is no table, tables are 0..{len(NUM_ROWS) - 1}"),
    ],
)
def test_arrays_that_would_be_read_out_of_bounds_are_refused(changes, message):
    LAYOUT.check(one_bag())
    with pytest.raises(InvalidBagsError, match=message):
        LAYOUT.check(one_bag(**changes))
