"""HTTP/1.1 messages: where a request ends (RFC 9112), bodies within limits, and answers in the forms of both APIs."""

from __future__ import annotations

import asyncio
import logging
import mmap
import re
import time
import zlib
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from starlette.types import Receive

from loader.errors import ShardrankError
from serving.errors import (
    MAX_MESSAGE_CHARS,
    RETRY_AFTER_S,
    InvalidRequestError,
    error_document,
    limit_exceeded,
    malformed,
    printable,
)
from serving.formats.requests import Buffer
from shard_node.byte_budget import MessageBytes

logger = logging.getLogger(__name__)

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


MAPPED_BYTES = 2**22
"""From here on a body has a mapping of its own, which no heap keeps."""
_LINES_BETWEEN_LOOKS = 256
_STATUS_LINES = {one.value: b"HTTP/1.1 %d %b" % (one.value, one.phrase.encode()) for one in HTTPStatus}

_NAME = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_VALUE = rb"[\t\x20-\x7e\x80-\xff]*+"
_HEAD = re.compile(
    rb"(%b) (/[\x21-\x7e]*+|\*|https?://[\x21-\x7e]++) HTTP/1\.([01])\r\n(?:%b:%b\r\n)*+\r\n" % (_NAME, _NAME, _VALUE)
)
_FRAMING = re.compile(rb"\r\n((?i:host|content-length|transfer-encoding|connection|upgrade|http2-settings)):([^\r]*+)")
# RFC 9110, section 7.2: uri-host [":" port]. It may be empty, but it is one host, without a user or a path.
_HOST = re.compile(rb"(?:[!$&'()*+;=\-.~%\w]*+|\[[!$&'()*+;=\-.~%\w:]++\])(?::[0-9]*+)?")
_UPGRADE = re.compile(rb"(?<=\r\n)(?i:upgrade|http2-settings|connection):[^\r]*+\r\n")
# The end of the line behind a chunk's bytes is read with the next chunk's length.
_SIZE = rb"([0-9A-Fa-f]{1,15})([ \t]*+(?:;%b)?)\r\n" % _VALUE
_SIZE_BEGUN = rb"(?:[0-9A-Fa-f]{1,15}(?:[ \t]*+(?:;%b)?\r?)?)?" % _VALUE
_FIRST_CHUNK, _NEXT_CHUNK = re.compile(_SIZE), re.compile(rb"\r\n" + _SIZE)
_FIRST_BEGUN, _NEXT_BEGUN = re.compile(_SIZE_BEGUN + rb"\Z"), re.compile(rb"(?:\r(?:\n%b)?)?\Z" % _SIZE_BEGUN)
_TRAILER = re.compile(rb"(?:%b:%b)?\r\n" % (_NAME, _VALUE))


class HttpReply(NamedTuple):
    """One answer: status, whole body, its type, and other headers with names in lower case."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


Refuse: TypeAlias = Callable[[bytes], HttpReply | None]
"""Given a request's head, gives the answer to one that is refused before the application sees it."""


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
                    raise malformed("", problem) from error
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
                    raise malformed("", "the compressed body ends before it is complete")
                if not stream.eof:
                    await asyncio.sleep(0)
        finally:
            spent(max(0.0, took_s - USUAL_S_A_BYTE * made))
        if rest := len(stream.unused_data) + len(view) - taken:
            raise malformed("", f"{rest} bytes follow the compressed body")
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


def read_head(data: bytes, end: int) -> tuple[int, bool, bool]:
    """Check a request's head, and return where its body ends.

    `data` begins with the head, up to the two line ends at `end`. Returns the bytes of a body that is not chunked,
    whether it is, and whether another protocol is asked for, see `without_upgrade`. Raises InvalidRequestError,
    also for CONNECT, whose body would have no end.
    """
    head = _HEAD.match(data)
    if head is None:
        raise malformed("", "not HTTP/1.1: the request line or a header is malformed")
    hosts, length, is_chunked, has_upgrade = 0, None, False, False
    for stated_name, stated in _FRAMING.findall(data, head.end(3), end):
        name, value = stated_name.lower(), stated.strip(b" \t")
        if name == b"host":
            hosts += 1
            if _HOST.fullmatch(value) is None:
                raise malformed("host", "must be one host, and its port if it has one")
        elif name == b"content-length":
            if length is not None or not value.isdigit() or len(value) > _LENGTH_DIGITS:
                raise malformed("content-length", "must be given once, as digits")
            length = int(value)
        elif name == b"transfer-encoding":
            if is_chunked or value.lower() != b"chunked" or head[3] == b"0":
                raise malformed("transfer-encoding", "must be `chunked` alone, or absent")
            is_chunked = True
        else:
            has_upgrade = has_upgrade or name != b"connection" or b"upgrade" in value.lower()
    if hosts != 1 and (hosts or head[3] == b"1"):
        raise malformed("host", f"must be given once, and is {hosts} times")
    if is_chunked and length is not None:
        raise malformed("content-length", "must be absent from a chunked request")
    if head[1] == b"CONNECT":
        raise InvalidRequestError("", "CONNECT: this method is not allowed here", kind="method_not_allowed")
    return length or 0, is_chunked, has_upgrade


def without_upgrade(head: bytes) -> bytes:
    """Drop the wish for another protocol from a head: it is not granted, and the request answered as it is."""

    def kept(line: re.Match[bytes]) -> bytes:
        name, _, value = line[0].partition(b":")
        if name.lower() != b"connection":
            return b""
        options = [one.strip(b" \t\r\n") for one in value.split(b",")]
        options = [one for one in options if one.lower() not in (b"upgrade", b"http2-settings", b"")]
        return b"%b: %b\r\n" % (name, b", ".join(options)) if options else b""

    return _UPGRADE.sub(kept, head)


class ChunkReader:
    """Takes a chunked body apart, and drops extensions and trailers: at most `max_framing_bytes` of them.

    `is_interrupted` says that `feed` took long, and is to be called again without data. `rest` is not read yet: behind
    the end, it is the next request's.
    """

    def __init__(self, max_framing_bytes: int) -> None:
        self._max = max_framing_bytes
        self._framing_bytes = self._left = 0
        self._is_first, self._in_trailers = True, False
        self.is_complete = self.is_interrupted = False
        self.rest = b""

    def feed(self, data: bytes, may_go_on: Callable[[], bool]) -> bytes:
        """Read on, and return what came of the body; `may_go_on` bounds small chunks. Raises InvalidRequestError."""
        if self.rest:
            data, self.rest = self.rest + data, b""
        self.is_interrupted = False
        parts: list[bytes] = []
        at = lines = 0
        while not self._in_trailers:
            if self._left:
                part = data[at : at + self._left]
                at += len(part)
                self._left -= len(part)
                parts.append(part)
                if self._left:
                    break
            line = (_FIRST_CHUNK if self._is_first else _NEXT_CHUNK).match(data, at)
            if line is None:
                if (_FIRST_BEGUN if self._is_first else _NEXT_BEGUN).match(data, at) is None:
                    raise malformed("", "not HTTP/1.1: a chunk's length, or its end, is malformed")
                break
            at = line.end()
            self._is_first = False
            self._left = int(line[1], 16)
            self._in_trailers = not self._left
            self._framing_bytes += len(line[2])
            lines += 1
            if lines % _LINES_BETWEEN_LOOKS == 0 and not may_go_on():
                self.is_interrupted = True
                break
        if self._in_trailers:
            while not self.is_complete and (trailer := _TRAILER.match(data, at)) is not None:
                self.is_complete = trailer.end() - at == len(b"\r\n")
                self._framing_bytes += trailer.end() - at
                at = trailer.end()
            if not self.is_complete and data.find(b"\n", at) >= 0:
                raise malformed("", "not HTTP/1.1: a header behind the body is malformed")
        self.rest = data[at:]
        if self._framing_bytes + (0 if self.is_complete or self.is_interrupted else len(self.rest)) > self._max:
            raise header_too_large(self._max)
        return b"".join(parts)


def header_too_large(max_header_bytes: int) -> InvalidRequestError:
    """Make the error of a head, or of what else is no body, that is too long."""
    return InvalidRequestError(
        "", f"the headers are longer than the limit max_header_bytes = {max_header_bytes}", kind="header_too_large"
    )


def body_buffer(num_bytes: int) -> memoryview:
    """Make room for a body, which takes no memory before it comes; that of a long one goes back to the system."""
    return memoryview(mmap.mmap(-1, num_bytes)) if num_bytes >= MAPPED_BYTES else np.empty(num_bytes, np.uint8).data


def whole_answer(reply: HttpReply, headers: list[tuple[bytes, bytes]], *, is_last: bool) -> bytes:
    """Write an answer, head and body, with these headers before its own; `is_last` of its connection."""
    lines = [_STATUS_LINES[reply.status]]
    lines += [b"%b: %b" % header for header in headers]
    lines += [b"content-type: %b" % reply.content_type.encode(), b"content-length: %d" % len(reply.body)]
    lines += [f"{name}: {value}".encode("latin-1") for name, value in reply.headers]
    if is_last:
        lines.append(b"connection: close")
    return b"\r\n".join((*lines, b"", reply.body))


def error_answer(error: ShardrankError, headers: list[tuple[bytes, bytes]], *, is_last: bool = True) -> bytes:
    """Write the answer to a request that is refused before the application sees it, likewise."""
    return whole_answer(error_reply("", "", error), headers, is_last=is_last)
