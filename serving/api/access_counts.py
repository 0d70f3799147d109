"""Access counts over HTTP: what a serving process has counted of the rows in its memory, as one file of counts."""

from __future__ import annotations

import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from loader.access_counts import AccessCounts, encode_access_counts, load_access_counts, merged_by_table
from loader.errors import ExportError
from serving.errors import InvalidRequestError, printable
from shard_node.access_counts import LookupSampler
from shard_node.errors import NodeUnavailableError, RemoteError

_MAX_DIGITS = 18
_MAX_ANSWER_BYTES = 1 << 28
"""Of one process: more than the rows that all of its samplers count."""
_MAX_SHOWN = 200


def requested_version(query: Mapping[str, str]) -> int | None:
    """Read the parameter version; None, the live one, without it. Raises InvalidRequestError."""
    if gone := sorted(query.keys() & {"table", "first_row", "max_rows"}):
        raise InvalidRequestError(gone[0], "is gone: an answer has all rows of all tables", kind="invalid_field")
    if unknown := sorted(query.keys() - {"version"}):
        raise InvalidRequestError(
            printable(unknown[0], 64), "there is no such parameter, only version", kind="invalid_field"
        )
    text = query.get("version", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        problem = f"{printable(text, 64)!r} is no whole number of at most {_MAX_DIGITS} digits"
        raise InvalidRequestError("version", problem, kind="invalid_field")
    return int(text) or None


def encode_counts(places: Sequence[LookupSampler]) -> bytes:
    """Return a file of all that was looked up in the places of a process that answer lookups."""
    return encode_access_counts(merged_by_table(place.estimated_lookups() for place in places))


def fetch_counts(
    url: str, model: str, version: int, timeout_s: float, token: str | None = None, tls: ssl.SSLContext | None = None
) -> dict[str, AccessCounts]:
    """Return what a serving process at `http(s)://host:port` has counted, by table. Blocks.

    Raises:
        NodeUnavailableError: it can't be reached, or did not answer in time.
        RemoteError: it answered something else.
    """
    path = f"{url.rstrip('/')}/v1/models/{quote(model, safe='')}/access-counts?version={version}"
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s, context=tls) as answer:
            data = answer.read(_MAX_ANSWER_BYTES + 1)
    except urllib.error.HTTPError as error:
        text = printable(error.read(4 * _MAX_SHOWN).decode(errors="replace"), _MAX_SHOWN)
        raise RemoteError(f"{url}: HTTP status {error.code}: {text}") from error
    except (OSError, ValueError) as error:
        raise NodeUnavailableError(f"{url}: {error}") from error
    if len(data) > _MAX_ANSWER_BYTES:
        raise RemoteError(f"{url}: the answer has more than {_MAX_ANSWER_BYTES} bytes")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "access-counts"
        file.write_bytes(data)
        try:
            return load_access_counts(file)
        except ExportError as error:
            raise RemoteError(f"{url}: malformed answer: {error}") from error
