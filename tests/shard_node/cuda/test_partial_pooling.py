"""Peer gather against partial sums: a simulation of owners, and the one crossing of the two."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_node.cuda.partial_pooling import (
    BagShape,
    gathered_bytes,
    partial_pooled_bytes,
    partial_pooling_from,
    partial_sum_owners,
)
from shard_node.cuda.row_format import RowFormat
from shard_node.planning.card_systems import SYSTEMS
from shardrank_testing.card_plans import DTYPES

NVLINK = SYSTEMS["h100"].peer


def shape_of(dtype="int8", dim=128, cards=8, hot=0.0):
    return BagShape(RowFormat.of(dtype, dim), cards, hot)


@pytest.mark.parametrize(("cards", "hotness", "hot"), [(2, 3, 0.0), (8, 20, 0.0), (8, 20, 0.7), (4, 1, 0.5)])
def test_owners_of_a_bag_are_as_many_as_in_a_simulation(cards, hotness, hot):
    rng = np.random.default_rng(1)
    owner = rng.integers(0, cards, (200_000, hotness))
    owner[rng.random(owner.shape) < hot] = 0  # hot rows are read from the card that pools, which is card 0
    others = sum((owner == card).any(axis=1) for card in range(1, cards))
    assert partial_sum_owners(shape_of(cards=cards, hot=hot), hotness) == pytest.approx(others.mean(), rel=0.01)


def test_one_id_in_int8_is_cheaper_to_gather_than_its_sum():
    # 5 sectors and 2 packets against 512 bytes in 4 packets; seven of eight ids are elsewhere.
    assert gathered_bytes(shape_of(), 1, NVLINK) == pytest.approx(0.875 * (160 + 64))
    assert partial_pooled_bytes(shape_of(), 1, NVLINK) == pytest.approx(0.875 * (512 + 128 + 4))


@given(
    dtype=st.sampled_from(DTYPES),
    dim=st.sampled_from([8, 16, 32, 64, 128, 256, 512]),
    cards=st.integers(2, 64),
    hot=st.floats(0, 0.99),
)
def test_from_the_threshold_on_and_only_there_partial_sums_are_smaller(dtype, dim, cards, hot):
    bag = shape_of(dtype, dim, cards, hot)
    first = partial_pooling_from(bag, NVLINK)
    assert first is not None
    below = {1, first // 2, first - 1} - {0, first}
    assert all(partial_pooled_bytes(bag, one, NVLINK) >= gathered_bytes(bag, one, NVLINK) for one in below)
    assert all(partial_pooled_bytes(bag, one, NVLINK) < gathered_bytes(bag, one, NVLINK) for one in (first, 3 * first))


@pytest.mark.parametrize("bag", [shape_of(cards=1), shape_of(hot=1.0)])
def test_nothing_crosses_where_every_row_is_here(bag):
    assert gathered_bytes(bag, 100, NVLINK) == partial_pooled_bytes(bag, 100, NVLINK) == 0
    assert partial_pooling_from(bag, NVLINK) is None


@given(dtype=st.sampled_from(DTYPES), dim=st.sampled_from([32, 64, 128]), hot=st.floats(0, 0.9))
def test_more_cards_and_more_copies_favour_gathering(dtype, dim, hot):
    at = [partial_pooling_from(shape_of(dtype, dim, cards, hot), NVLINK) for cards in (2, 4, 8, 16)]
    assert at == sorted(at)
    assert partial_pooling_from(shape_of(dtype, dim, 8, hot), NVLINK) >= partial_pooling_from(
        shape_of(dtype, dim, 8), NVLINK
    )
