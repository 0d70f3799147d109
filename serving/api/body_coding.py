"""Compressed request bodies, within the limit of what they may become, and without holding the event loop up."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator
from typing import TypeAlias

from serving.errors import BodyTooLargeError, MalformedRequestError

Buffer: TypeAlias = bytes | bytearray | memoryview

CODINGS = ("gzip", "deflate")
PIECE_BYTES = 256 * 2**10
"""Made at once; after the first `FREE_BYTES` others come between two pieces."""
FREE_BYTES = 2**20
# By the header that the data begin with: https://www.zlib.net/manual.html#Advanced
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


async def expand(body: Buffer, max_body_bytes: int) -> bytes:
    """Decompress a body.

    Args:
        body: gzip (RFC 1952) or deflate (RFC 1950).
        max_body_bytes: the longest that it may become; no more is made.

    Raises:
        BodyTooLargeError: if it becomes longer.
        MalformedRequestError: if it is neither, incomplete, or followed by something else.
    """
    pieces, made = [], 0
    for piece in _pieces(body, max_body_bytes):
        pieces.append(piece)
        made += len(piece)
        if made > FREE_BYTES:
            await asyncio.sleep(0)
    return b"".join(pieces)


def expand_at_once(body: Buffer, max_body_bytes: int) -> bytes:
    """Decompress a body as `expand` does, but in one go."""
    return b"".join(_pieces(body, max_body_bytes))


def _pieces(body: Buffer, max_body_bytes: int) -> Iterator[bytes]:
    stream = zlib.decompressobj(_GZIP_OR_ZLIB)
    made, left = 0, body
    while not stream.eof:
        try:
            piece = stream.decompress(left, min(PIECE_BYTES, max_body_bytes + 1 - made))
        except zlib.error as error:
            raise MalformedRequestError("", f"the body is neither gzip nor deflate: {error}") from error
        made += len(piece)
        if made > max_body_bytes:
            unit = "bytes in the body once it is decompressed"
            raise BodyTooLargeError("", "max_body_bytes", max_body_bytes, f"at least {made}", unit)
        left = stream.unconsumed_tail
        if not piece and not stream.eof:
            raise MalformedRequestError("", "the compressed body ends before it is complete")
        yield piece
    if stream.unused_data:
        raise MalformedRequestError("", f"{len(stream.unused_data)} bytes follow the compressed body")
