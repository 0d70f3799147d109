"""Arrays that do not describe bags are refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from shard_node.bags import KeyedBags
from shard_node.errors import InvalidBagsError
from shardrank_testing.bags import keyed_bags


def bags(**changes) -> KeyedBags:
    arrays = {
        "keys": np.array([0, 2], np.int32),
        "bags_per_key": np.array([1, 2], np.int64),
        "offsets": np.array([0, 1, 1, 3], np.int64),
        "values": np.array([5, 6, 7], np.int64),
        "weights": np.array([1, 2, 3], np.float32),
    }
    return KeyedBags(**(arrays | changes))


def test_valid_bags_pass_and_describe_themselves():
    whole = bags()
    whole.validate()
    assert (whole.num_bags, whole.num_values) == (3, 3)
    assert whole.lengths.tolist() == [1, 0, 2]
    assert whole.bag_starts().tolist() == [0, 1, 3]
    assert whole.values_per_key().tolist() == [1, 2]


@given(keyed_bags())
def test_bags_made_from_lengths_are_valid(made):
    made.validate()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": np.array([2, 0], np.int32)}, "ascending"),
        ({"keys": np.array([1, 1], np.int32)}, "ascending"),
        ({"keys": np.array([-1, 1], np.int32)}, "non-negative"),
        ({"keys": np.array([1], np.int32)}, "keys has 1 entries, bags_per_key 2"),
        ({"bags_per_key": np.array([1, 1], np.int64)}, "add up to the 3 bags"),
        ({"bags_per_key": np.array([-1, 4], np.int64)}, "negative"),
        ({"bags_per_key": np.array([2**63 - 1, 2**63 - 1], np.int64)}, "add up"),
        ({"offsets": np.array([1, 1, 1, 3], np.int64)}, "begin with 0"),
        ({"offsets": np.array([0, 2, 1, 3], np.int64)}, "descend"),
        ({"offsets": np.array([0, 1, 1, 4], np.int64)}, "ends at 4"),
        ({"offsets": np.zeros(0, np.int64)}, "begin with 0"),
        ({"weights": np.ones(2, np.float32)}, "2 weights for 3 values"),
        ({"weights": np.array([1, np.nan, 1], np.float32)}, "finite"),
    ],
)
def test_arrays_that_are_not_bags_are_refused(changes, message):
    with pytest.raises(InvalidBagsError, match=message):
        bags(**changes).validate()
