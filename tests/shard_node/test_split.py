"""Splitting bags by owner and adding the pooled parts gives what pooling the whole gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shard_node.bags import KeyedBags
from shard_node.split import add, split
from shardrank_testing.bags import keyed_bags

DIM = 3


def pool_by_definition(bags: KeyedBags) -> np.ndarray:
    # Small integers and quarters: every sum is exact in float32, so answers can be compared for equality.
    table = np.arange(1000 * DIM, dtype=np.float32).reshape(1000, DIM)
    out = np.zeros((bags.num_bags, DIM), np.float32)
    for bag in range(bags.num_bags):
        for position in range(bags.offsets[bag], bags.offsets[bag + 1]):
            weight = 1.0 if bags.weights is None else bags.weights[position]
            out[bag] += weight * table[bags.values[position]]
    return out


@given(keyed_bags(), st.integers(1, 12), st.randoms(use_true_random=False))
def test_adding_the_pooled_parts_of_any_split_gives_the_whole(bags, num_owners, random):
    owner = np.array([random.randrange(num_owners) for _ in range(bags.num_values)], np.uint16)
    parts = split(bags, owner, range(num_owners))
    pooled = [(part.bag_index, pool_by_definition(part.bags)) for part in parts]
    np.testing.assert_array_equal(add(pooled, bags.num_bags, DIM), pool_by_definition(bags))


@given(keyed_bags(), st.integers(1, 12), st.randoms(use_true_random=False))
def test_parts_hold_every_value_once_under_the_right_key_and_no_empty_bags_unless_all_bags(bags, num_owners, random):
    owner = np.array([random.randrange(num_owners) for _ in range(bags.num_values)], np.uint16)
    key_of_bag = np.repeat(bags.keys, bags.bags_per_key)
    seen = []
    for part in split(bags, owner, range(num_owners)):
        part.bags.validate()
        assert (part.bags.lengths > 0).all() or part.bags.num_bags == bags.num_bags
        assert (np.diff(part.bag_index) > 0).all()
        assert (np.repeat(part.bags.keys, part.bags.bags_per_key) == key_of_bag[part.bag_index]).all()
        bag_of_value = np.repeat(part.bag_index, part.bags.lengths)
        seen += list(zip([part.owner] * part.bags.num_values, bag_of_value, part.bags.values, strict=True))
    bag_of_value = np.repeat(np.arange(bags.num_bags), bags.lengths)
    assert sorted(seen) == sorted(zip(owner.tolist(), bag_of_value, bags.values, strict=True))


@given(keyed_bags(), st.integers(1, 12), st.randoms(use_true_random=False), st.data())
def test_a_block_of_some_of_the_bags_adds_only_their_parts(bags, num_owners, random, data):
    owner = np.array([random.randrange(num_owners) for _ in range(bags.num_values)], np.uint16)
    first = data.draw(st.integers(0, bags.num_bags))
    end = data.draw(st.integers(first, bags.num_bags))
    pooled = []
    for part in split(bags, owner, range(num_owners)):
        here = (part.bag_index >= first) & (part.bag_index < end)
        pooled.append((part.bag_index[here], pool_by_definition(part.bags)[here]))
    np.testing.assert_array_equal(add(pooled, end - first, DIM, first), pool_by_definition(bags)[first:end])


@given(st.one_of(keyed_bags(max_hotness=1), keyed_bags()), st.integers(1, 12), st.randoms(use_true_random=False))
def test_parts_that_are_known_to_share_no_bag_share_none_and_add_up_without_looking(bags, num_owners, random):
    owner = np.array([random.randrange(num_owners) for _ in range(bags.num_values)], np.uint8)
    parts = split(bags, owner, range(num_owners))
    is_known = all(part.shares_no_bag for part in parts)
    # Known it is wherever no bag has two values, so that there is nothing to find out.
    assert is_known == (bags.lengths.max(initial=0) <= 1)
    if is_known:
        all_bags = np.concatenate([np.empty(0, np.int64), *(part.bag_index for part in parts)])
        assert np.unique(all_bags).size == all_bags.size
        pooled = [(part.bag_index, pool_by_definition(part.bags)) for part in parts]
        whole = add(pooled, bags.num_bags, DIM, share_no_bag=True)
        np.testing.assert_array_equal(whole, pool_by_definition(bags))


def test_a_read_only_block_that_covers_every_bag_is_not_written_to():
    index = np.array([0, 1])
    block = np.ones((2, DIM), np.float32)
    block.flags.writeable = False
    out = add([(index, block), (index, np.full((2, DIM), 2.0, np.float32))], 2, DIM)
    assert (out == 3.0).all()
    assert (block == 1.0).all()


def test_no_parts_give_zeros():
    assert (add([], 3, DIM) == np.zeros((3, DIM))).all()
