"""What is too large for one frame travels in pieces, which are parts of the whole like those of several shards."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loader.snapshot.reader import Snapshot
from router.router import VALUE_BYTES, Cutter
from shard_node.answer import Answer, add_answers
from shard_node.bags import KeyedBags
from shard_node.split import split, whole
from shardrank_testing.bags import random_table_bags
from shardrank_testing.nodes import reference_engine
from shardrank_testing.snapshots import one_table_spec, write_snapshot
from shardrank_testing.topologies import Topology, local_router, lookup, remote_router


@given(st.integers(0, 2**32), st.integers(1, 4000), st.integers(1, 3), st.booleans())
def test_pieces_add_up_to_the_whole_within_their_bytes(seed, piece_bytes, num_owners, weighted):
    engine, rng = reference_engine(), np.random.default_rng(seed)
    layout = engine.layout
    bags = random_table_bags(rng, layout, 12, 6, weighted)
    owner = rng.integers(0, num_owners, bags.num_values).astype(np.uint8)
    parts = [whole(bags)] if num_owners == 1 else split(bags, owner, range(num_owners))
    key_of_bag = np.repeat(bags.keys, bags.bags_per_key)
    pieces = []
    for part in parts:
        of_part = Cutter(layout, piece_bytes).cut(part)
        np.testing.assert_array_equal(np.concatenate([piece.bag_index for piece in of_part]), part.bag_index)
        np.testing.assert_array_equal(np.concatenate([piece.positions for piece in of_part]), part.positions)
        for piece in of_part:
            piece.bags.validate()
            assert (piece.owner, piece.shares_no_bag) == (part.owner, part.shares_no_bag)
            np.testing.assert_array_equal(piece.bags.values, bags.values[piece.positions])
            assert (piece.bags.weights is None) != weighted
            keys = np.repeat(piece.bags.keys, piece.bags.bags_per_key)
            np.testing.assert_array_equal(keys, key_of_bag[piece.bag_index])
            answer_bytes = int((layout.bag_bytes[piece.bags.keys] * piece.bags.bags_per_key).sum())
            assert piece.bags.num_bags == 1 or answer_bytes + piece.bags.num_values * VALUE_BYTES <= piece_bytes
        pieces += of_part
        assert Cutter(layout).cut(part)[0] is part
    added = add_answers(layout, bags, pieces, [Answer(engine.pool(piece.bags)) for piece in pieces])
    for actual, expected in zip(added, engine.pool(bags), strict=True):
        # Weights are not whole numbers, so the order in which owners are added shows in the last bits.
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-3 if weighted and num_owners > 1 else 0)


def test_what_is_too_large_for_a_frame_travels_in_pieces(tmp_path):
    spec = one_table_spec(100, embedding_dim=4096)
    path, _ = write_snapshot(tmp_path, spec, seed=1)
    wide = Snapshot.open(path)
    # Of 6,000 bags 16 KiB each come back: more than one frame may hold.
    rows = np.arange(18_000, dtype=np.int64) % 100
    bags = KeyedBags.from_lengths(np.array([0], np.int32), np.array([6000], np.int64), np.full(6000, 3), rows)
    expected = asyncio.run(lookup(local_router(wide, Topology()), wide, bags))

    async def look_up() -> None:
        async with remote_router(wide, Topology(), tmp_path) as router:
            embeddings = await lookup(router, wide, bags)
        np.testing.assert_array_equal(embeddings.blocks[0], expected.blocks[0])
        assert embeddings.times.stored_bytes == 0
        assert embeddings.times.float32_bytes == 6000 * 4096 * 4

    asyncio.run(look_up())
