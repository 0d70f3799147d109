"""Bodies of requests: read, and decompressed, within limits."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.types import Receive

from loader.errors import NOT_DECODED
from serving.errors import InvalidRequestError, limit_exceeded, malformed
from serving.formats.requests import Buffer
from shard_node.byte_budget import ByteAccount, MessageBytes

T = TypeVar("T")
CODINGS = ("gzip", "deflate")
PIECE_BYTES = 256 * 2**10
"""Decompressed at once, in about a millisecond; others run between two pieces."""
COMPRESSED_PIECE_BYTES = 2**15
"""Read of what is compressed at once: blocks that hold nothing cost 80 ns a byte."""
USUAL_S_A_BYTE = 1e-8
"""Within which any usual body is decompressed, by the bytes that it becomes."""
# By the header that the data begin with: https://www.zlib.net/manual.html#Advanced
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


def body_too_large(limit: str, max_bytes: int, received: int | str) -> InvalidRequestError:
    """Return the error of a body of more than `max_bytes`."""
    return limit_exceeded("", limit, max_bytes, received, "bytes in the body", kind="body_too_large")


def left_early() -> InvalidRequestError:
    """Return the error of a request whose client has left before it was complete."""
    return InvalidRequestError(
        "", "the client closed the connection before its request was complete", kind="client_gone"
    )


async def read_json(receive: Receive, limit: str, max_bytes: int, kind: type[T], form: str) -> T:
    """Read a body of JSON; an empty one is `{}`. Raises InvalidRequestError, which says of what `form` it must be."""
    parts: list[bytes] = []
    received, has_more = 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise left_early()
        parts.append(message.get("body", b""))
        received += len(parts[-1])
        if received > max_bytes:
            raise body_too_large(limit, max_bytes, f"at least {received}")
        has_more = message.get("more_body", False)
    try:
        return msgspec.json.decode(b"".join(parts) or b"{}", type=kind)
    except NOT_DECODED as error:
        raise malformed("", f"the body must {form}: {error}") from error


async def expand(
    body: Buffer,
    max_body_bytes: int,
    buffered: ByteAccount | MessageBytes,
    spent: Callable[[float], object],
    permits: asyncio.Semaphore,
) -> bytes:
    """Decompress gzip (RFC 1952) or deflate (RFC 1950) without delaying the event loop.

    Args:
        body: what is decompressed.
        max_body_bytes: the longest that it may become; no more is made.
        buffered: is charged for the body, then for each piece that it becomes before the next one is made.
        spent: called with the seconds beyond those that as many bytes usually cost: blocks that hold nothing cost most.
        permits: limits the bodies that are decompressed at a time.

    Raises InvalidRequestError for what is too long, neither or incomplete, OverloadedError without room.
    """
    stream, view = zlib.decompressobj(_GZIP_OR_ZLIB), memoryview(body)
    pieces: list[bytes] = []
    position = size = 0
    cpu_s = 0.0
    async with permits:
        try:
            while not stream.eof:
                coded: Buffer = stream.unconsumed_tail
                if not coded:
                    coded = view[position : position + COMPRESSED_PIECE_BYTES]
                    position += len(coded)
                started_at = time.thread_time()
                try:
                    piece = stream.decompress(coded, min(PIECE_BYTES, max_body_bytes + 1 - size))
                except zlib.error as error:
                    raise malformed("", f"the body is neither gzip nor deflate: {error}") from error
                finally:
                    cpu_s += time.thread_time() - started_at
                buffered.charge(len(piece))
                pieces.append(piece)
                size += len(piece)
                if size > max_body_bytes:
                    unit = "bytes in the body once it is decompressed"
                    raise limit_exceeded(
                        "", "max_body_bytes", max_body_bytes, f"at least {size}", unit, kind="body_too_large"
                    )
                if not (piece or coded or stream.eof):
                    raise malformed("", "the compressed body ends before it is complete")
                if not stream.eof:
                    await asyncio.sleep(0)
        finally:
            spent(max(0.0, cpu_s - USUAL_S_A_BYTE * size))
        if excess := len(stream.unused_data) + len(view) - position:
            raise malformed("", f"{excess} bytes follow the compressed body")
        expanded = b"".join(pieces)
    buffered.refund(len(body))
    return expanded
