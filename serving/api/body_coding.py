"""Compressed request bodies, expanded in pieces and within the limit of what they may become."""

from __future__ import annotations

import asyncio
import zlib

from serving.errors import BodyTooLargeError, MalformedRequestError

CODINGS = ("gzip", "deflate")
PIECE_BYTES = 256 * 2**10
BYTES_AT_ONCE = 2**20
# By the header that the data begin with: https://www.zlib.net/manual.html#Advanced
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


async def expand(body: bytes | bytearray | memoryview, max_body_bytes: int) -> bytes:
    """A body as it was before it was compressed. Others have their turn between the pieces of a long one.

    Args:
        body: gzip (RFC 1952) or deflate (RFC 1950).
        max_body_bytes: the longest that it may become; no more is made.

    Raises:
        BodyTooLargeError: if it becomes longer.
        MalformedRequestError: if it is neither, incomplete, or followed by something else.
    """
    stream = zlib.decompressobj(_GZIP_OR_ZLIB)
    pieces: list[bytes] = []
    made, rest = 0, body
    while not stream.eof:
        try:
            piece = stream.decompress(rest, min(PIECE_BYTES, max_body_bytes + 1 - made))
        except zlib.error as error:
            raise MalformedRequestError("", f"the body is neither gzip nor deflate: {error}") from None
        made, rest = made + len(piece), stream.unconsumed_tail
        pieces.append(piece)
        if made > max_body_bytes:
            unit = "bytes in the body once it is decompressed"
            raise BodyTooLargeError("", "max_body_bytes", max_body_bytes, f"at least {made}", unit)
        if not piece and not rest and not stream.eof:
            raise MalformedRequestError("", "the compressed body ends before it is complete")
        if made > BYTES_AT_ONCE:
            await asyncio.sleep(0)
    if stream.unused_data:
        raise MalformedRequestError("", f"{len(stream.unused_data)} bytes follow the compressed body")
    return b"".join(pieces)
