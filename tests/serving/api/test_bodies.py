from __future__ import annotations

import asyncio
import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.api.bodies import PIECE_BYTES, expand, read_json
from shard_node.byte_budget import MessageBytes
from shardrank_testing.errors import raises_kind
from shardrank_testing.http_wire import message_bytes
from shardrank_testing.serving_api import counted_turns


async def expanded(body: bytes, max_bytes: int, held: MessageBytes | None = None) -> bytes:
    held = held or message_bytes()
    held.charge(len(body))
    return await expand(body, max_bytes, held, lambda seconds: None, asyncio.Semaphore(2))


@given(st.binary(max_size=2000), st.sampled_from([gzip.compress, zlib.compress]))
def test_a_body_is_what_it_was(body, compress):
    assert asyncio.run(expanded(compress(body), 2000)) == body


@pytest.mark.parametrize("body", [b'{"ready": ', b'{"\xff": 1}', b'{"a": ' + b"[" * 100_000, b"[]"])
async def test_what_is_no_json_of_its_kind_is_refused(body):
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body}

    with raises_kind("malformed", match="the body must be an object"):
        await read_json(receive, "limit", 1 << 20, dict[str, int], "be an object")


async def test_no_more_is_made_than_is_allowed():
    packed = gzip.compress(bytes(10 * PIECE_BYTES))
    assert len(await expanded(packed, 10 * PIECE_BYTES)) == 10 * PIECE_BYTES
    with raises_kind("body_too_large", match=f"at least {10 * PIECE_BYTES}"):
        await expanded(packed, 10 * PIECE_BYTES - 1)


async def test_each_piece_is_charged_before_the_next():
    packed, held = gzip.compress(bytes(10 * PIECE_BYTES)), message_bytes(16 * PIECE_BYTES)
    with raises_kind("buffer_full", match=f"max_buffered_bytes = {16 * PIECE_BYTES}"):
        await expanded(packed, 10 * PIECE_BYTES, held)
    assert held.held == len(packed) + 7 * PIECE_BYTES
    held = message_bytes()
    await expanded(packed, 10 * PIECE_BYTES, held)
    assert held.held == 10 * PIECE_BYTES


async def test_two_bodies_are_expanded_at_a_time():
    body, places = gzip.compress(bytes(4 * PIECE_BYTES)), asyncio.Semaphore(2)
    messages = [message_bytes() for _ in range(5)]
    tasks = [asyncio.create_task(expand(body, 2**24, held, lambda seconds: None, places)) for held in messages]
    for held in messages:
        held.hold(len(body))
    most = 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        most = max(most, sum(len(body) < held.held for held in messages if held.held < 4 * PIECE_BYTES))
    assert most == 2


async def test_others_have_their_turn_between_pieces_of_a_long_body():
    body = gzip.compress(bytes(20 * PIECE_BYTES))
    async with counted_turns() as turns:
        await expanded(body, 2**24)
    assert 18 <= turns[0] <= 24
