from __future__ import annotations

import asyncio
import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.api.bodies import FREE_BYTES, PIECE_BYTES, expand
from serving.errors import BodyTooLargeError, MalformedRequestError
from shardrank_testing.serving_api import counted_turns


def no_charge(seconds: float) -> None:
    """Whatever it takes."""


@given(st.binary(max_size=2000), st.sampled_from([gzip.compress, zlib.compress]))
def test_a_body_is_what_it_was(body, compress):
    assert asyncio.run(expand(compress(body), 2000, no_charge)) == body


@given(st.binary(max_size=200))
def test_whatever_is_no_such_body_is_refused(body):
    try:
        asyncio.run(expand(body, 100, no_charge))
    except (MalformedRequestError, BodyTooLargeError):
        return
    assert asyncio.run(expand(body, 100, no_charge)) is not None


def test_no_more_is_made_than_is_allowed():
    packed = gzip.compress(bytes(10 * PIECE_BYTES))
    assert len(asyncio.run(expand(packed, 10 * PIECE_BYTES, no_charge))) == 10 * PIECE_BYTES
    with pytest.raises(BodyTooLargeError, match=f"at least {10 * PIECE_BYTES}"):
        asyncio.run(expand(packed, 10 * PIECE_BYTES - 1, no_charge))


async def test_others_have_their_turn_between_pieces_of_a_long_body():
    body = gzip.compress(bytes(FREE_BYTES + 20 * PIECE_BYTES))
    async with counted_turns() as turns:
        await expand(body, 2**24, no_charge)
    assert 18 <= turns[0] <= 24
