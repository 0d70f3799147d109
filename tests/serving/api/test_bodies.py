from __future__ import annotations

import asyncio
import contextlib
import gzip
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.api import bodies
from serving.api.bodies import FREE_BYTES, PIECE_BYTES
from serving.errors import BodyTooLargeError, MalformedRequestError

"""A beginning of deflate, and 4 of the blocks that take longest for their length: empty, with codes of their own."""


def expand(body: bytes, max_bytes: int, spent: Callable[[float], object] = lambda seconds: None, **more: Any) -> Any:
    return bodies.expand(body, max_bytes, spent, **more)


async def turns_while(expanding: Any) -> int:
    """Counts the turns that others have meanwhile."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    with contextlib.suppress(MalformedRequestError):
        await expanding
    task.cancel()
    return turns


@given(st.binary(max_size=2000), st.sampled_from([gzip.compress, zlib.compress]))
def test_a_body_is_what_it_was(body, compress):
    assert asyncio.run(expand(compress(body), 2000)) == body


@given(st.binary(max_size=200))
def test_whatever_is_no_such_body_is_refused(body):
    try:
        asyncio.run(expand(body, 100))
    except (MalformedRequestError, BodyTooLargeError):
        return
    assert asyncio.run(expand(body, 100)) is not None


def test_no_more_is_made_than_is_allowed_and_a_limit_is_met_exactly():
    packed = gzip.compress(bytes(10 * PIECE_BYTES))
    assert len(asyncio.run(expand(packed, 10 * PIECE_BYTES))) == 10 * PIECE_BYTES
    with pytest.raises(BodyTooLargeError, match=f"at least {10 * PIECE_BYTES}"):
        asyncio.run(expand(packed, 10 * PIECE_BYTES - 1))


def test_others_have_their_turn_between_the_pieces_of_a_long_body():
    body = gzip.compress(bytes(FREE_BYTES + 20 * PIECE_BYTES))
    assert 18 <= asyncio.run(turns_while(expand(body, 2**24))) <= 24
