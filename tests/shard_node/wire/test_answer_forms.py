"""Peers of any age agree on the form of an answer: rows as stored and float16 sums only for whoever takes them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from loader.snapshot.reader import Snapshot
from router.plan import Plan
from shard_node.answer import FLOAT32_SUMS, Answer, Forms, add_answers
from shard_node.bags import KeyedBags
from shard_node.engine.loading import load_tables
from shard_node.errors import RemoteError
from shard_node.node import ShardNode
from shard_node.split import whole
from shard_node.wire.frame import FrameType
from shard_node.wire.messages import decode_answer, encode_answer, encode_pool
from shard_node.wire.server import ServerLimits
from shardrank_testing.nodes import (
    MODEL,
    VERSION,
    Place,
    RawPeer,
    connected,
    on_every_loop,
    small_spec,
    soon,
)
from shardrank_testing.snapshots import write_snapshot

# Of genre a row for each bag; of film more, so that sums are shorter; of user both kinds of bags, on average one row.
BAGS = KeyedBags.from_lengths(
    np.array([0, 1, 2], np.int32),
    np.array([2, 2, 3], np.int64),
    np.array([1, 1, 5, 4, 0, 1, 2]),
    np.array([3, 29, *range(400, 409), 17, 900, 901], np.int64),
    np.linspace(-2, 2, 14, dtype=np.float32),
)


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> ShardNode:
    """A node whose rows are in this machine's memory, so that it can give them as they are stored."""
    path, _ = write_snapshot(tmp_path_factory.mktemp("store"), small_spec(), seed=5)
    snapshot, plan = Snapshot.open(path), Plan.make(small_spec())
    node = ShardNode(plan.identity(0))
    node.stage(MODEL, VERSION, load_tables(snapshot, plan.partition(0), plan.digest))
    node.flip(MODEL, VERSION)
    return node


def added(node: ShardNode, answer: Answer) -> list[np.ndarray]:
    layout = node.table_layout(MODEL, VERSION)
    answer.check(layout, BAGS)
    return add_answers(layout, BAGS, [whole(BAGS)], [answer])


def dtypes(answer: Answer) -> set[str]:
    return {str(sums.dtype) for sums in answer.sums if sums.size}


@on_every_loop
@pytest.mark.parametrize("max_inline_bytes", [0, 16 << 10])
@pytest.mark.parametrize("forms", [Forms(stored, float16) for stored in (False, True) for float16 in (False, True)])
def test_a_node_answers_in_the_accepted_forms(place, node, tmp_path, max_inline_bytes, forms):
    async def scenario(server, client) -> Answer:
        return await client.pool(MODEL, VERSION, BAGS, soon(), forms)

    answer = place.with_client(tmp_path, scenario, node, ServerLimits(max_inline_bytes=max_inline_bytes))
    assert (answer.stored is not None) == forms.stored
    assert dtypes(answer) == ({"float16"} if forms.float16 else {"float32"})
    if forms.stored:
        # Rows of 4 and of 8 floats: both of genre and all of user, none of film.
        assert [rows.shape for rows in answer.stored] == [(2, 16), (3, 32)]
        assert [sums.shape for sums in answer.sums] == [(0, 4), (2, 8)]
    for actual, expected in zip(added(node, answer), node.pool(MODEL, VERSION, BAGS), strict=True):
        tolerance = {"rtol": 2**-10, "atol": 1e-6} if forms.float16 else {"rtol": 0}
        np.testing.assert_allclose(actual, expected, **tolerance)


@on_every_loop
@pytest.mark.parametrize("note", [0, 0x8000])
def test_clients_that_know_no_forms_get_float32_sums(place, node, tmp_path, note):
    request = bytearray(b"".join(encode_pool(7, 0, MODEL, VERSION, BAGS)))
    # The note is where older clients send 0, and newer ones may send what this node does not know.
    request[24 + 8 + 2 : 24 + 8 + 4] = note.to_bytes(2, "little")

    async def scenario(server, peer):
        peer.write(request)
        return await peer.read_frame()

    frame = place.with_peer(tmp_path, scenario, node)
    assert frame.header.frame_type == FrameType.POOLED
    answer = decode_answer(frame)
    assert answer.stored is None
    assert dtypes(answer) == {"float32"}
    for actual, expected in zip(answer.sums, node.pool(MODEL, VERSION, BAGS), strict=True):
        np.testing.assert_array_equal(actual, expected)


async def answered_by(place: Place, folder: Path, answer: Answer, forms: Forms) -> Answer:
    """What a client makes of an answer that a node sends whatever it was asked for."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = RawPeer(reader, writer)
        frame = await peer.read_frame()
        peer.write(*encode_answer(frame.header.request_id, answer))
        await peer.read_end()
        await peer.close()

    address = place.address(folder)
    async with await asyncio.start_unix_server(play, address.path), connected(address) as client:
        return await client.pool(MODEL, VERSION, BAGS, soon(), forms)


@on_every_loop
@pytest.mark.parametrize("forms", [FLOAT32_SUMS, Forms(float16=True)])
def test_unrequested_rows_as_stored_are_no_answer(place, node, tmp_path, forms):
    stored = node.answer(MODEL, VERSION, BAGS, Forms(stored=True))
    with pytest.raises(RemoteError, match="frame type 7 is no answer to this request"):
        place.run(answered_by(place, tmp_path, stored, forms))
