"""JSON text: what can be counted in it before anything is made of it, and how answers and errors are written.

`json_reader` reads requests, and writes scores.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from loader.errors import ShardrankError
from serving.errors import MAX_FIELD_CHARS, printable
from serving.formats.requests import Buffer, LookupAnswer
from shard_node.bags import Float32Array, Int64Array

_QUOTE = ord('"')
_ENCODER = msgspec.json.Encoder()

MAX_MESSAGE_CHARS = 4096
PIECE_FLOATS = 8192
"""Written at once: about a millisecond's worth."""

# Tells a client that was shed when to try again, in seconds.
RETRY_AFTER_S = 1


@contextlib.contextmanager
def many_lists() -> Iterator[None]:
    """Hold the garbage collector off, which would go over many new lists again and again, for most of their time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def count_above(body: Buffer, character: int, most: int) -> int:
    """Count a character outside of strings if it is there more than `most` times; else return 0. Exact for JSON."""
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


def lookup_pieces(answer: LookupAnswer) -> Iterator[bytes]:
    """Write the answer to a lookup, in pieces of about `PIECE_FLOATS` numbers.

    It has [bags][dim] floats by feature, or [bags][ids][dim] for a feature that is not pooled.
    """
    head: dict[str, Any] = {"model": answer.model, "version": answer.version}
    if answer.request_id:
        head["request_id"] = answer.request_id
    yield encode(head)[:-1] + b',"embeddings":{'
    for number, (name, feature) in enumerate(answer.embeddings.items()):
        yield (b"," if number else b"") + encode(name) + b":["
        yield from _rows(feature.values) if feature.lengths is None else _bags(feature.values, feature.lengths)
        yield b"]"
    yield b"}}"


def error_document(error: ShardrankError, request_id: str = "") -> dict[str, Any]:
    """Return the JSON form of an error."""
    # Whatever the text holds, an error must not fail to be told.
    content: dict[str, Any] = {"kind": error.kind, "message": printable(str(error), MAX_MESSAGE_CHARS)}
    if error.field:
        content["field"] = printable(error.field, MAX_FIELD_CHARS)
    if request_id:
        content["request_id"] = request_id
    return {"error": content}


def encode(document: Any) -> bytes:
    """JSON bytes."""
    return _ENCODER.encode(document)


def _rows(values: Float32Array) -> Iterator[bytes]:
    """Write rows [n, dim] without the brackets around them."""
    step = max(1, PIECE_FLOATS // (values.shape[1] + 1))
    for begin in range(0, len(values), step):
        yield (b"," if begin else b"") + encode(values[begin : begin + step].tolist())[1:-1]


def _bags(values: Float32Array, lengths: Int64Array) -> Iterator[bytes]:
    """Write bags of rows likewise: several at once, or one that is long in pieces of its own."""
    ends = np.cumsum(lengths)
    step, begin = max(1, PIECE_FLOATS // (values.shape[1] + 2)), 0
    while begin < len(ends):
        separator, first = (b",", int(ends[begin - 1])) if begin else (b"", 0)
        stop = min(int(np.searchsorted(ends, first + step, "right")), begin + PIECE_FLOATS)
        if stop > begin:
            bounds = [0, *(ends[begin:stop] - first).tolist()]
            with many_lists():
                rows = values[first : ends[stop - 1]].tolist()
                text = encode([rows[at:end] for at, end in pairwise(bounds)])
            yield separator + text[1:-1]
        else:
            yield separator + b"["
            yield from _rows(values[first : ends[begin]])
            yield b"]"
            stop = begin + 1
        begin = stop
