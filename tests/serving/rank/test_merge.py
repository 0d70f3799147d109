from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serving.formats.requests import RankRequest
from serving.rank.ranking import (
    _join_by_blocks,
    _join_by_index,
    _join_by_segments,
    _runs_alike,
    merge,
    merge_bags,
    rank_order,
)
from shard_node.bags import KeyedBags


@st.composite
def batches_of_like_features(draw: st.DrawFn) -> list[KeyedBags]:
    """Runs of features with as many bags, and ids in a bag, as each other, as models with both sides have them."""
    runs = draw(st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.integers(0, 3)), min_size=1, max_size=4))
    num_keys = sum(size for size, _, _ in runs)
    batch, value = [], 0
    for _ in range(draw(st.integers(1, 4))):
        candidates = draw(st.integers(0, 4))
        bags_per_key = [1 if context else candidates for size, context, _ in runs for _ in range(size)]
        hotness = [ids for size, _, ids in runs for _ in range(size)]
        lengths = np.repeat(hotness, bags_per_key)
        values = np.arange(value, value + lengths.sum())
        value += values.size
        weights = values.astype(np.float32) if draw(st.booleans()) else None
        keys = np.arange(num_keys, dtype=np.int32)
        batch.append(KeyedBags.from_lengths(keys, np.array(bags_per_key, np.int64), lengths, values, weights))
    return batch


@st.composite
def batches(draw: st.DrawFn) -> list[KeyedBags]:
    num_keys = draw(st.integers(1, 4))
    keys = np.array(sorted(draw(st.sets(st.integers(0, 9), min_size=num_keys, max_size=num_keys))), np.int32)
    batch = []
    for _ in range(draw(st.integers(1, 5))):
        bags_per_key = draw(st.lists(st.integers(0, 4), min_size=num_keys, max_size=num_keys))
        lengths = draw(st.lists(st.integers(0, 3), min_size=sum(bags_per_key), max_size=sum(bags_per_key)))
        values = draw(st.lists(st.integers(0, 2**63 - 1), min_size=sum(lengths), max_size=sum(lengths)))
        weights = None
        if draw(st.booleans()):
            weights = np.array(draw(st.lists(st.integers(-9, 9), min_size=len(values), max_size=len(values))), "f4")
        bags = (np.array(bags_per_key, np.int64), np.array(lengths, np.int64), np.array(values, np.int64))
        batch.append(KeyedBags.from_lengths(keys, *bags, weights))
    return batch


def as_lists(bags: KeyedBags) -> list[list[list[tuple[int, float]]]]:
    """[key][bag] = [(value, weight), ...], by plain loops."""
    found, bag = [], 0
    for count in bags.bags_per_key.tolist():
        own = []
        for _ in range(count):
            span = range(int(bags.offsets[bag]), int(bags.offsets[bag + 1]))
            own.append([(int(bags.values[i]), 1.0 if bags.weights is None else float(bags.weights[i])) for i in span])
            bag += 1
        found.append(own)
    return found


@given(batches() | batches_of_like_features())
def test_merged_bags_are_those_of_the_obvious_loop(batch):
    merged = merge_bags(batch)
    merged.validate()
    expected = [[bag for bags in batch for bag in as_lists(bags)[key]] for key in range(batch[0].keys.size)]
    assert as_lists(merged) == expected
    assert (merged.weights is None) == all(bags.weights is None for bags in batch)


@given(batches() | batches_of_like_features())
def test_all_ways_of_merging_give_the_same(batch):
    bags = np.array([one.bags_per_key for one in batch])
    values = np.array([one.values_per_key() for one in batch])
    for per_segment, arrays in ((bags, [one.lengths for one in batch]), (values, [one.values for one in batch])):
        by_index = _join_by_index(per_segment)(arrays)
        for other in (_join_by_blocks(per_segment, _runs_alike(per_segment)), _join_by_segments(per_segment)):
            found = other(arrays)
            assert found.dtype == by_index.dtype
            assert found.tolist() == by_index.tolist()


alike = st.integers(1, 6).flatmap(
    lambda size: st.lists(st.lists(st.integers(-3, 3), min_size=size, max_size=size), min_size=1, max_size=5)
)


@given(st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=6), min_size=1, max_size=5) | alike)
def test_the_order_of_each_request_is_by_descending_score_then_position(scores):
    flat = np.array([one for own in scores for one in own], np.float32)
    owner = np.repeat(np.arange(len(scores)), [len(own) for own in scores])
    starts = np.concatenate([[0], np.cumsum([len(own) for own in scores])])
    order, start = rank_order(flat, starts, owner), 0
    for own in scores:
        expected = sorted(range(len(own)), key=lambda position: (-own[position], position))
        assert order[start : start + len(own)].tolist() == expected
        start += len(own)


def request(num_candidates: int, first: int) -> RankRequest:
    bags = KeyedBags.from_lengths(
        np.array([0], np.int32),
        np.array([num_candidates], np.int64),
        np.ones(num_candidates, np.int64),
        np.arange(first, first + num_candidates),
    )
    dense = np.full((num_candidates, 2), first, np.float32)
    return RankRequest(bags, num_candidates, np.array([first], np.float32), dense, timeout_s=1.0)


def test_dense_inputs_and_owners_follow_their_requests():
    batch = merge([request(2, 10), request(1, 20), request(3, 30)])
    assert batch.candidate_starts.tolist() == [0, 2, 3, 6]
    assert batch.request_of_candidate.tolist() == [0, 0, 1, 2, 2, 2]
    assert batch.bags.values.tolist() == [10, 11, 20, 30, 31, 32]
    assert batch.context_dense.tolist() == [[10], [20], [30]]
    assert batch.candidate_dense[:, 0].tolist() == [10, 10, 20, 30, 30, 30]
