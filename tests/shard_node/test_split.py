"""Splitting bags by owner and adding the pooled parts gives what pooling all of them gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_node.bags import Bags
from shard_node.split import NEARLY_ALL, Part, add, split, whole
from shardrank_testing.bags import bags_of, pool_by_definition, small_bags

DIM = 3
OWNERS = (st.integers(1, 12), st.randoms(use_true_random=False))


def pool(bags: Bags) -> np.ndarray:
    # Small integers and quarters: every sum is exact in float32, so answers can be compared for equality.
    table = np.arange(1000 * DIM, dtype=np.float32).reshape(1000, DIM)
    edges = bags.offsets[1:-1]
    weights = None if bags.weights is None else np.split(bags.weights, edges)
    pooled = pool_by_definition(table, np.split(bags.values, edges)[: bags.num_bags], "sum", weights)
    return pooled.astype(np.float32)


def random_owners(bags: Bags, num_owners: int, random, dtype: type = np.uint16) -> np.ndarray:
    return np.array([random.randrange(num_owners) for _ in range(bags.num_values)], dtype)


def pooled(parts: list[Part]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(part.bag_index, pool(part.bags)) for part in parts]


@given(st.one_of(small_bags(max_hotness=1), small_bags()), *OWNERS, st.data())
def test_the_pooled_parts_of_any_split_add_up(bags, num_owners, random, data):
    """All of them, and those of a range of bags."""
    parts, expected = split(bags, random_owners(bags, num_owners, random), range(num_owners)), pool(bags)
    np.testing.assert_array_equal(add(pooled(parts), bags.num_bags, DIM), expected)
    first = data.draw(st.integers(0, bags.num_bags))
    end = data.draw(st.integers(first, bags.num_bags))
    is_known = bool(parts) and all(part.shares_no_bag for part in parts)
    in_range = []
    for index, sums in pooled(parts):
        here = (index >= first) & (index < end)
        in_range.append((index[here], sums[here]))
    for share_no_bag in {False, is_known}:
        actual = add(in_range, end - first, DIM, first, share_no_bag=share_no_bag)
        assert (actual.dtype, actual.shape) == (np.float32, (end - first, DIM))
        np.testing.assert_array_equal(actual, expected[first:end])


@given(small_bags(), *OWNERS, st.sampled_from([np.int32, np.int64]))
def test_parts_hold_every_value_once_in_order(bags, num_owners, random, dtype):
    """Under the right key and in the right bag; empty bags only if all bags are there."""
    bags = bags.with_values(bags.values.astype(dtype), bags.weights)
    owner = random_owners(bags, num_owners, random)
    key_of_bag = np.repeat(bags.keys, bags.bags_per_key)
    bag_of_value = np.repeat(np.arange(bags.num_bags), bags.lengths)
    parts = split(bags, owner, range(num_owners))
    assert [part.owner for part in parts] == sorted(set(owner.tolist()))
    for part in parts:
        part.bags.validate()
        # Values keep their order.
        assert part.positions.tolist() == np.flatnonzero(owner == part.owner).tolist()
        np.testing.assert_array_equal(part.bags.values, bags.values[part.positions])
        assert part.bags.values.dtype == part.bags.offsets.dtype == dtype
        assert (part.bags.weights is None) == (bags.weights is None)
        if bags.weights is not None:
            np.testing.assert_array_equal(part.bags.weights, bags.weights[part.positions])
        np.testing.assert_array_equal(np.repeat(part.bag_index, part.bags.lengths), bag_of_value[part.positions])
        assert (np.diff(part.bag_index) > 0).all()
        assert (part.bags.bags_per_key > 0).all() or part.bags.num_bags == bags.num_bags
        np.testing.assert_array_equal(np.repeat(part.bags.keys, part.bags.bags_per_key), key_of_bag[part.bag_index])
        assert (part.bags.lengths > 0).all() or part.bags.num_bags == bags.num_bags
        # It is known to share no bag wherever no bag has two values, so that there is nothing to find out.
        assert part.shares_no_bag == (bags.lengths.max() <= 1)


@pytest.mark.parametrize("num_owners", [6, 7])
@pytest.mark.parametrize("last_length", [3, 0])
@pytest.mark.parametrize("num_filled", [6, 7, 8])
def test_a_part_in_nearly_all_bags_has_all_of_them(num_owners, last_length, num_filled):
    """With few owners, who are counted; a sort leaves empty bags out at no cost."""
    assert NEARLY_ALL == 7 / 8
    lengths = [3] * 7 + [last_length]
    of_first = [min(1, length) if bag < num_filled else 0 for bag, length in enumerate(lengths)]
    owner = [owner for count in of_first for owner in ([0] * count + [5] * (3 - count))][: sum(lengths)]
    rows = iter(range(sum(lengths)))
    bags = bags_of({4: [[next(rows) for _ in range(length)] for length in lengths]})
    first, last = split(bags, np.array(owner, np.uint8), range(num_owners))
    for part, counts in (
        (first, of_first),
        (last, [length - count for length, count in zip(lengths, of_first, strict=True)]),
    ):
        num_counted = sum(count > 0 for count in counts)
        is_complete = num_owners == 6 and num_counted >= 7
        assert part.bag_index.tolist() == [bag for bag, count in enumerate(counts) if count or is_complete]
        assert part.bags.lengths.tolist() == [count for count in counts if count or is_complete]
        assert (part.bags.keys.tolist(), part.bags.bags_per_key.tolist()) == ([4], [part.bags.num_bags])


def test_bags_of_one_owner_are_one_part():
    bags = bags_of({1: [[5, 6], [], [7]]})
    part = whole(bags)
    assert (part.owner, part.bags, part.shares_no_bag) == (0, bags, True)
    assert (part.bag_index.tolist(), part.positions.tolist()) == ([0, 1, 2], [0, 1, 2])
    assert split(bags_of({1: [[], []]}), np.zeros(0, np.uint8), range(3)) == []


INDEX = np.arange(2)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_block_of_every_bag_is_the_answer_or_is_added_to(dtype):
    block = np.ones((2, DIM), dtype)
    out = add([(INDEX, block)], 2, DIM)
    assert out.dtype == np.float32
    assert (out is block) == (dtype == np.float32)
    twos = np.full((2, DIM), 2, dtype)
    for is_writable in (False, True) if dtype == np.float32 else (True,):
        block.flags.writeable = is_writable
        out = add([(INDEX, block), (INDEX, twos), (INDEX, twos)], 2, DIM)
        assert out.dtype == np.float32
        assert out.tolist() == [[5.0] * DIM] * 2
        # A block that may not be written to is not; one that may, need not be copied.
        assert np.shares_memory(out, block) == (is_writable and dtype == np.float32)
        assert (block == (5 if np.shares_memory(out, block) else 1)).all()


@pytest.mark.parametrize("share_no_bag", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_parts_of_different_bags_are_put_side_by_side(share_no_bag, dtype):
    parts = [(np.array([4, 6]), np.full((2, DIM), 1, dtype)), (np.array([5]), np.full((1, DIM), 2, dtype))]
    for num_bags, expected in ((3, [1, 2, 1]), (4, [1, 2, 1, 0])):
        out = add(parts, num_bags, DIM, 4, share_no_bag=share_no_bag)
        assert out.dtype == np.float32
        assert out.tolist() == [[value] * DIM for value in expected]
    assert add([], 3, DIM, share_no_bag=share_no_bag).tolist() == [[0.0] * DIM] * 3
