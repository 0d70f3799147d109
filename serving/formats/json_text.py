"""JSON as text: errors and in-process requests written, and what is counted before anything is made of it."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from loader.errors import ShardrankError
from serving.errors import MAX_FIELD_CHARS, InvalidFieldError, printable
from serving.formats.requests import Buffer

MAX_MESSAGE_CHARS = 4096
# Tells a client that was shed when to try again, in seconds.
RETRY_AFTER_S = 1
_QUOTE = ord('"')

encode = msgspec.json.Encoder().encode
"""Writes a document. A float32 has all its digits, so it reads back as the same float32."""


def encode_request(request: Mapping[str, Any]) -> bytes:
    """Write a request that is given as plain Python values.

    Raises:
        InvalidFieldError: something in it that JSON has no form for.
    """
    try:
        return encode(request)
    except (TypeError, ValueError, OverflowError, RecursionError):
        # It does not write integers beyond 64 bits; the reader shall name where they stand.
        try:
            return json.dumps(request).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidFieldError("", f"the request has no JSON form: {error}") from None


def error_document(error: ShardrankError, request_id: str = "") -> dict[str, Any]:
    """The JSON form of an error."""
    # Whatever the text holds, an error must not fail to be told.
    content: dict[str, Any] = {"kind": error.kind, "message": printable(str(error), MAX_MESSAGE_CHARS)}
    if field := getattr(error, "field", ""):
        content["field"] = printable(field, MAX_FIELD_CHARS)
    if request_id:
        content["request_id"] = request_id
    return {"error": content}


@contextlib.contextmanager
def many_lists() -> Iterator[None]:
    """Hold the garbage collector off while lists are made by the hundred thousand, none of them part of a cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def count_above(body: Buffer, character: int, most: int) -> int:
    """Count a character outside of strings, if it stands there more than `most` times; else return 0.

    Exact for JSON; any other text is refused in any case.
    """
    # The whole text is counted first, several times faster than `bytes.count`; what stands in strings only adds to it.
    if len(body) <= most or int(np.count_nonzero(np.frombuffer(body, np.uint8) == character)) <= most:
        return 0
    plain = bytes(body)
    if b"\\" in plain:
        # First pairs of backslashes, then escaped quotes: what is left has a quote only where a string begins or ends.
        plain = plain.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = np.frombuffer(plain, np.uint8)
    is_outside = np.cumsum(text == _QUOTE, dtype=np.uint8) & 1 == 0
    count = int(np.count_nonzero((text == character) & is_outside))
    return count if count > most else 0
