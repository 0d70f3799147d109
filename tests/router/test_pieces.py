"""Pieces hold every bag once and in order, none is much too large, and their joined blocks are those of the whole."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.replicas import VALUE_BYTES, Cutter, join
from shardrank_testing.bags import random_table_bags
from shardrank_testing.nodes import reference_engine


@given(st.integers(0, 2**32), st.integers(1, 4000), st.booleans())
def test_joined_blocks_of_all_pieces_are_those_of_the_whole(seed, piece_bytes, weighted):
    engine = reference_engine()
    bags = random_table_bags(np.random.default_rng(seed), engine.layout, 12, 6, weighted)
    pieces = Cutter(engine.layout, piece_bytes).cut(bags)
    assert sum(piece.num_bags for piece in pieces) == bags.num_bags
    for whole, joined in zip(engine.pool(bags), join([engine.pool(piece) for piece in pieces]), strict=True):
        np.testing.assert_array_equal(joined, whole)


@given(st.integers(0, 2**32), st.integers(1, 4000))
def test_a_piece_of_several_bags_is_within_its_bytes(seed, piece_bytes):
    layout = reference_engine().layout
    bags = random_table_bags(np.random.default_rng(seed), layout, 12, 6)
    for piece in Cutter(layout, piece_bytes).cut(bags):
        piece.validate()
        dims = np.array([layout.tables[key].embedding_dim for key in piece.keys])
        sums = int((4 * dims * piece.bags_per_key).sum())
        assert piece.num_bags == 1 or sums + piece.num_values * VALUE_BYTES <= piece_bytes


def test_what_fits_is_not_touched():
    layout = reference_engine().layout
    bags = random_table_bags(np.random.default_rng(1), layout, 12, 6)
    assert Cutter(layout).cut(bags)[0] is bags
