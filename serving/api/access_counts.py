"""Access counts over HTTP: what a serving process tells of the rows in its own memory, and how it is asked.

An answer is a COUNTS_ANSWER frame of docs/wire-protocol.md for each place in the process that answers lookups: its own
rows, hot rows; none where shard nodes have them all.
"""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from urllib.parse import quote, urlencode

import numpy as np

from serving.errors import InvalidRequestError, printable
from shard_node.access_counts import MAX_PART_ROWS, AccessCounts, CountedPart
from shard_node.errors import NodeUnavailableError, RemoteError, WireError
from shard_node.wire.frame import HEADER, Frame, FrameType, unpack_header
from shard_node.wire.messages import CountsRequest, decode_counts_answer, encode_counts_answer

MAX_PLACES = 16
"""Of one process, more than there are."""
_MAX_DIGITS = 18
_MAX_ANSWER_BYTES = MAX_PLACES * (4 * MAX_PART_ROWS + 1024)
_MAX_SHOWN = 200


def counts_asked(model: str, query: Mapping[str, str]) -> CountsRequest:
    """Read the parameters version (0: the live one), table, first_row and max_rows. Raises InvalidRequestError."""
    numbers = {"version": 0, "table": 0, "first_row": 0, "max_rows": MAX_PART_ROWS}
    if unknown := sorted(query.keys() - numbers.keys()):
        raise InvalidRequestError(
            printable(unknown[0], 64), f"there is no such parameter, only {', '.join(numbers)}", kind="invalid_field"
        )
    for name, text in query.items():
        if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
            problem = f"{printable(text, 64)!r} is no whole number of at most {_MAX_DIGITS} digits"
            raise InvalidRequestError(name, problem, kind="invalid_field")
        numbers[name] = int(text)
    return CountsRequest(model, **numbers)


def told_counts(places: Sequence[AccessCounts], asked: CountsRequest) -> bytes:
    """Return the frames of an answer, of all places. Raises as `AccessCounts.part`."""
    parts = (access.part(asked.table, asked.first_row, asked.max_rows) for access in places)
    return b"".join(buffer for part in parts for buffer in encode_counts_answer(0, part))


def ask_counts(
    url: str, request: CountsRequest, timeout_s: float, token: str | None = None, tls: ssl.SSLContext | None = None
) -> list[CountedPart]:
    """Ask a serving process at `http(s)://host:port`. Blocks.

    Raises:
        NodeUnavailableError: it can't be reached, or did not answer in time.
        RemoteError: it answered something else.
    """
    asked = {name: getattr(request, name) for name in ("version", "table", "first_row", "max_rows")}
    path = f"{url.rstrip('/')}/v1/models/{quote(request.model, safe='')}/access-counts?{urlencode(asked)}"
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(path, headers=headers), timeout=timeout_s, context=tls
        ) as answer:
            data = answer.read(_MAX_ANSWER_BYTES + 1)
    except urllib.error.HTTPError as error:
        told = printable(error.read(4 * _MAX_SHOWN).decode(errors="replace"), _MAX_SHOWN)
        raise RemoteError(f"{url}: HTTP status {error.code}: {told}") from error
    except (OSError, ValueError) as error:
        raise NodeUnavailableError(f"{url}: {error}") from error
    if len(data) > _MAX_ANSWER_BYTES:
        raise RemoteError(f"{url}: the answer has more than {_MAX_ANSWER_BYTES} bytes")
    try:
        return _parts(data)
    except WireError as error:
        raise RemoteError(f"{url}: malformed answer: {error}") from error


def _parts(data: bytes) -> list[CountedPart]:
    parts = []
    while data:
        if len(data) < HEADER.size:
            raise WireError(f"a header has {len(data)} bytes, {HEADER.size} are needed")
        header = unpack_header(memoryview(data))
        end = HEADER.size + header.body_bytes
        if header.frame_type != FrameType.COUNTS_ANSWER or end > len(data):
            raise WireError(f"a frame of type {header.frame_type} with {header.body_bytes} bytes")
        body = np.frombuffer(bytearray(data[HEADER.size : end]), np.uint8)
        parts.append(decode_counts_answer(Frame(header, body)))
        data = data[end:]
    return parts
