"""Answers and errors as HTTP has them, in the forms of both APIs; and what a request's head says about it."""

from __future__ import annotations

import logging
from typing import NamedTuple

from starlette.types import Scope

from loader.errors import ShardrankError
from serving.errors import printable
from serving.formats.json_writer import MAX_MESSAGE_CHARS, RETRY_AFTER_S, encode, error_document

logger = logging.getLogger(__name__)

JSON = "application/json"
REQUEST_ID = b"x-request-id"
ERROR_KIND = "shardrank-error-kind"
OPEN_INFERENCE = "/v2"
"""Where the paths of the Open Inference Protocol begin, whose errors have a form of their own."""
_RETRY_LATER, _UNAUTHENTICATED = 503, 401


class Reply(NamedTuple):
    """One answer.

    Attributes:
        status: of HTTP.
        body: all of it.
        content_type: a whole header value.
        headers: names in lower case, and values, of any others.
    """

    status: int
    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


def header_of(scope: Scope, name: bytes) -> str | None:
    """Find the first header of a name, which is given in lower case."""
    for found, value in scope["headers"]:
        if found == name:
            text: str = value.decode("latin-1")
            return text
    return None


def header_lines(reply: Reply, request_id: bytes | None) -> list[tuple[bytes, bytes]]:
    """Write the headers of an answer as ASGI has them; the request's `X-Request-Id` is given back."""
    lines = [(b"content-type", reply.content_type.encode()), (b"content-length", b"%d" % len(reply.body))]
    if request_id is not None:
        lines.append((REQUEST_ID, request_id))
    for name, value in reply.headers:
        lines.append((name.encode("latin-1"), value.encode("latin-1")))
    return lines


def error_reply(path: str, request_id: str, error: ShardrankError) -> Reply:
    """Put an error in the form of the API that a path belongs to."""
    headers: tuple[tuple[str, str], ...] = ()
    if error.http_status == _RETRY_LATER:
        headers = (("retry-after", str(RETRY_AFTER_S)),)
    elif error.http_status == _UNAUTHENTICATED:
        # RFC 9110, 11.6.1: such an answer says what is wanted.
        headers = (("www-authenticate", "Bearer"),)
    if path == OPEN_INFERENCE or path.startswith(f"{OPEN_INFERENCE}/"):
        body = encode({"error": printable(str(error), MAX_MESSAGE_CHARS)})
        return Reply(error.http_status, body, JSON, ((ERROR_KIND, error.kind), *headers))
    return Reply(error.http_status, encode(error_document(error, request_id)), JSON, headers)


def defect_reply(path: str, request_id: str) -> Reply:
    """Answer what should never happen. Called where the error is handled, which it logs."""
    logger.exception("%s failed", path[:200])
    return error_reply(path, request_id, ShardrankError("internal error; the server's log says more"))
