"""Bodies over HTTP: requests, read and decompressed within limits; answers, and errors in the forms of both APIs."""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import msgspec
from starlette.types import Receive

from loader.errors import ShardrankError
from serving.errors import (
    MAX_MESSAGE_CHARS,
    RETRY_AFTER_S,
    InvalidRequestError,
    error_document,
    limit_exceeded,
    printable,
)
from shard_node.byte_budget import MessageBytes

logger = logging.getLogger(__name__)

Buffer: TypeAlias = bytes | bytearray | memoryview

JSON = "application/json"
OPEN_INFERENCE = "/v2"
"""Where the paths of the Open Inference Protocol begin, whose errors have a form of their own."""
CODINGS = ("gzip", "deflate")
PIECE_BYTES = 256 * 2**10
"""Decompressed at once, in about a millisecond; others come between two pieces."""
COMPRESSED_PIECE_BYTES = 2**15
"""Taken of what is compressed at once: blocks that hold nothing take 80 ns a byte."""
USUAL_S_A_BYTE = 1e-8
"""Within which any usual body is decompressed, by the bytes that it becomes."""
# By the header that the data begin with: https://www.zlib.net/manual.html#Advanced
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
_LENGTH_DIGITS = 18
_RETRY_LATER, _UNAUTHENTICATED = (429, 503), 401


class HttpReply(NamedTuple):
    """One answer: status, whole body, its type, and other headers with names in lower case."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


async def read_body(receive: Receive, limit: str, max_bytes: int, stated: bytes | None = None) -> bytes:
    """Read a body of `max_bytes` at most; `stated` is `Content-Length`. Raises InvalidRequestError."""
    unit = "bytes in the body"
    if stated is not None and stated.isdigit() and int(stated[:_LENGTH_DIGITS]) > max_bytes:
        raise limit_exceeded("", limit, max_bytes, int(stated[:_LENGTH_DIGITS]), unit, kind="body_too_large")
    parts: list[bytes] = []
    received = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise InvalidRequestError(
                "", "the client closed the connection before its request was complete", kind="client_gone"
            )
        part = message.get("body", b"")
        received += len(part)
        if received > max_bytes:
            raise limit_exceeded("", limit, max_bytes, f"at least {received}", unit, kind="body_too_large")
        parts.append(part)
        if not message.get("more_body", False):
            return part if len(parts) == 1 else b"".join(parts)


async def expand(
    body: Buffer, max_body_bytes: int, held: MessageBytes, spent: Callable[[float], object], places: asyncio.Semaphore
) -> bytes:
    """Decompress gzip (RFC 1952) or deflate (RFC 1950) without holding the event loop up.

    Args:
        body: what is decompressed.
        max_body_bytes: the longest that it may become; no more is made.
        held: has the body, then what it became: each piece is charged before the next one is made.
        spent: called with the seconds beyond those that as many bytes usually take: blocks that hold nothing cost most.
        places: limits the bodies that are decompressed at a time.

    Raises InvalidRequestError for what is too long, neither or incomplete, OverloadedError without room.
    """
    stream, view = zlib.decompressobj(_GZIP_OR_ZLIB), memoryview(body)
    pieces: list[bytes] = []
    taken = made = 0
    took_s = 0.0
    async with places:
        try:
            while not stream.eof:
                left: Buffer = stream.unconsumed_tail
                if not left:
                    left = view[taken : taken + COMPRESSED_PIECE_BYTES]
                    taken += len(left)
                # Processor time of this thread.
                began = time.thread_time()
                try:
                    piece = stream.decompress(left, min(PIECE_BYTES, max_body_bytes + 1 - made))
                except zlib.error as error:
                    problem = f"the body is neither gzip nor deflate: {error}"
                    raise InvalidRequestError("", problem, kind="malformed") from error
                finally:
                    took_s += time.thread_time() - began
                held.charge(len(piece))
                pieces.append(piece)
                made += len(piece)
                if made > max_body_bytes:
                    unit = "bytes in the body once it is decompressed"
                    raise limit_exceeded(
                        "", "max_body_bytes", max_body_bytes, f"at least {made}", unit, kind="body_too_large"
                    )
                if not (piece or left or stream.eof):
                    raise InvalidRequestError("", "the compressed body ends before it is complete", kind="malformed")
                if not stream.eof:
                    await asyncio.sleep(0)
        finally:
            spent(max(0.0, took_s - USUAL_S_A_BYTE * made))
        if rest := len(stream.unused_data) + len(view) - taken:
            raise InvalidRequestError("", f"{rest} bytes follow the compressed body", kind="malformed")
        expanded = b"".join(pieces)
    held.refund(len(body))
    return expanded


def error_reply(path: str, request_id: str, error: ShardrankError) -> HttpReply:
    """Put an error in the form of the API that a path belongs to."""
    headers: tuple[tuple[str, str], ...] = ()
    if error.http_status in _RETRY_LATER:
        headers = (("retry-after", str(RETRY_AFTER_S)),)
    elif error.http_status == _UNAUTHENTICATED:
        # RFC 9110, 11.6.1: such an answer says what is wanted.
        headers = (("www-authenticate", "Bearer"),)
    if path == OPEN_INFERENCE or path.startswith(f"{OPEN_INFERENCE}/"):
        body = msgspec.json.encode({"error": printable(str(error), MAX_MESSAGE_CHARS)})
        return HttpReply(error.http_status, body, JSON, (("shardrank-error-kind", error.kind), *headers))
    return HttpReply(error.http_status, msgspec.json.encode(error_document(error, request_id)), JSON, headers)


def defect_reply(path: str, request_id: str) -> HttpReply:
    """Answer what should never happen. Called where the error is handled, which it logs."""
    logger.exception("%s failed", path[:200])
    return error_reply(path, request_id, ShardrankError("internal error; the server's log says more"))
