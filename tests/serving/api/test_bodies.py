from __future__ import annotations

import asyncio
import gzip
import zlib
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.api.bodies import PIECE_BYTES, expand
from serving.errors import BodyTooLargeError, MalformedRequestError
from shard_node.errors import BufferFullError
from shardrank_testing.http_wire import Payer
from shardrank_testing.serving_api import counted_turns


async def expanded(body: bytes, max_bytes: int, payer: Payer | None = None) -> bytes:
    return await expand(body, max_bytes, payer or Payer(), asyncio.Semaphore(2))


@given(st.binary(max_size=2000), st.sampled_from([gzip.compress, zlib.compress]))
def test_a_body_is_what_it_was(body, compress):
    assert asyncio.run(expanded(compress(body), 2000)) == body


@given(st.binary(max_size=200))
def test_whatever_is_no_such_body_is_refused(body):
    try:
        asyncio.run(expanded(body, 100))
    except (MalformedRequestError, BodyTooLargeError):
        return
    assert asyncio.run(expanded(body, 100)) is not None


async def test_no_more_is_made_than_is_allowed():
    packed = gzip.compress(bytes(10 * PIECE_BYTES))
    assert len(await expanded(packed, 10 * PIECE_BYTES)) == 10 * PIECE_BYTES
    with pytest.raises(BodyTooLargeError, match=f"at least {10 * PIECE_BYTES}"):
        await expanded(packed, 10 * PIECE_BYTES - 1)


async def test_each_piece_is_charged_before_the_next():
    packed, payer = gzip.compress(bytes(10 * PIECE_BYTES)), Payer(8 * PIECE_BYTES)
    payer.charge(len(packed))
    with pytest.raises(BufferFullError, match=f"max_buffered_bytes = {8 * PIECE_BYTES}"):
        await expanded(packed, 10 * PIECE_BYTES, payer)
    assert payer.account.held == len(packed) + 7 * PIECE_BYTES
    payer = Payer()
    payer.charge(len(packed))
    await expanded(packed, 10 * PIECE_BYTES, payer)
    assert payer.account.held == 10 * PIECE_BYTES


async def test_two_bodies_are_expanded_at_a_time():
    running, most = set[Payer](), 0

    class Counted(Payer):
        def spent(self, seconds: float) -> None:
            running.discard(self)

    def charge(payer: Payer, num_bytes: int) -> None:
        nonlocal most
        running.add(payer)
        most = max(most, len(running))

    payers, places = [Counted() for _ in range(5)], asyncio.Semaphore(2)
    for payer in payers:
        payer.charge, payer.refund = partial(charge, payer), lambda num_bytes: None
    body = gzip.compress(bytes(4 * PIECE_BYTES))
    await asyncio.gather(*(expand(body, 2**24, payer, places) for payer in payers))
    assert most == 2


async def test_others_have_their_turn_between_pieces_of_a_long_body():
    body = gzip.compress(bytes(20 * PIECE_BYTES))
    async with counted_turns() as turns:
        await expanded(body, 2**24)
    assert 18 <= turns[0] <= 24
