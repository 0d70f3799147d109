from __future__ import annotations

import itertools

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
from shard_node.bags import Bags


@st.composite
def batches(draw: st.DrawFn) -> list[Bags]:
    """Requests of the same features; where they are alike, runs of features have as many bags and ids as each other."""
    rng, is_alike = np.random.default_rng(draw(st.integers(0, 2**32))), draw(st.booleans())
    num_keys = int(rng.integers(1, 10))
    keys = np.sort(rng.choice(10, num_keys, replace=False)).astype(np.int32)
    run, is_context, ids = np.sort(rng.integers(0, 4, num_keys)), rng.random(4) < 0.5, rng.integers(0, 4, 4)
    batch = []
    for _ in range(rng.integers(1, 6)):
        bags_per_key = np.where(is_context[run], 1, rng.integers(0, 5)) if is_alike else rng.integers(0, 5, num_keys)
        lengths = np.repeat(ids[run], bags_per_key) if is_alike else rng.integers(0, 4, bags_per_key.sum())
        values = rng.integers(0, 2**63 - 1, lengths.sum())
        weights = rng.integers(-9, 10, values.size).astype(np.float32) if rng.random() < 0.5 else None
        batch.append(Bags.from_lengths(keys, bags_per_key, lengths, values, weights))
    return batch


def as_lists(bags: Bags) -> list[list[list[tuple[int, float]]]]:
    """[key][bag] = [(value, weight), ...]."""
    weights = [1.0] * bags.num_values if bags.weights is None else bags.weights.tolist()
    pairs = list(zip(bags.values.tolist(), weights, strict=True))
    each = [pairs[first:end] for first, end in itertools.pairwise(bags.offsets.tolist())]
    return [each[first:end] for first, end in itertools.pairwise(bags.bag_starts().tolist())]


@given(batches())
def test_merged_bags_are_those_of_the_obvious_loop(batch):
    merged = merge_bags(batch)
    merged.validate()
    expected = [[bag for bags in batch for bag in as_lists(bags)[key]] for key in range(batch[0].keys.size)]
    assert as_lists(merged) == expected
    assert (merged.weights is None) == all(bags.weights is None for bags in batch)


@given(batches())
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
def test_order_is_by_descending_score_then_position(scores):
    flat = np.array([one for own in scores for one in own], np.float32)
    owner = np.repeat(np.arange(len(scores)), [len(own) for own in scores])
    starts = np.concatenate([[0], np.cumsum([len(own) for own in scores])])
    order, start = rank_order(flat, starts, owner), 0
    for own in scores:
        expected = sorted(range(len(own)), key=lambda position: (-own[position], position))
        assert order[start : start + len(own)].tolist() == expected
        start += len(own)


def request(num_candidates: int, first: int) -> RankRequest:
    bags = Bags.from_lengths(
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
