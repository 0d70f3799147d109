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
from serving.api.bodies import COMPRESSED_PIECE_BYTES, FREE_BYTES, PIECE_BYTES
from serving.errors import BodyTooLargeError, MalformedRequestError

EMPTY_BLOCKS = b"\x78\x9c" + bytes.fromhex(
    "04c081000000000090ff6b100007020000000040feaf41001c080000000000f9bf060170200000000000e4ff1a"
)
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


def test_others_have_their_turn_while_a_long_body_of_empty_blocks_becomes_nothing():
    body = EMPTY_BLOCKS[:2] + EMPTY_BLOCKS[2:] * 20_000
    pieces = len(body) // COMPRESSED_PIECE_BYTES
    assert pieces > 12
    assert pieces <= asyncio.run(turns_while(expand(body, 2**24))) <= pieces + 3


def test_what_follows_a_long_body_is_counted_whether_it_was_looked_at_or_not():
    for rest in (1, 10 * COMPRESSED_PIECE_BYTES):
        with pytest.raises(MalformedRequestError, match=f"^{rest} bytes follow"):
            asyncio.run(expand(gzip.compress(b"body") + bytes(rest), 2**24))


@pytest.mark.parametrize(
    ("body", "error", "charged_s"),
    [
        # Each piece takes 3 seconds here.
        (EMPTY_BLOCKS, MalformedRequestError, 6.0),
        (b"neither", MalformedRequestError, 3.0),
        (zlib.compress(b"some"), None, 3.0 - 4e-8),
        (zlib.compress(bytes(1001)), BodyTooLargeError, 3.0 - 1001e-8),
    ],
    ids=["empty blocks", "not compressed", "usual", "too long"],
)
def test_what_takes_longer_than_its_bytes_usually_do_is_charged_whether_it_is_taken_or_not(body, error, charged_s):
    charged: list[float] = []
    ticks = iter(range(0, 100, 3))
    expanding = expand(body, 1000, charged.append, clock=lambda: next(ticks))
    if error is None:
        asyncio.run(expanding)
    else:
        with pytest.raises(error):
            asyncio.run(expanding)
    assert charged == [pytest.approx(charged_s, rel=1e-12)]
