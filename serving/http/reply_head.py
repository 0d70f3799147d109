"""Everything of an answer that stands before its body, and whole answers that no handler gives."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from loader.errors import ShardrankError
from serving.formats.json_writer import RETRY_AFTER_S, encode, error_document
from serving.http.exchange import JSON, Reply


def reply_head(reply: Reply, server_headers: Iterable[tuple[bytes, bytes]], *, keep_alive: bool) -> bytes:
    """Status line and headers.

    Args:
        reply: the values of its headers are its handler's own, or a request's: those have no line ends, or they would
            not have been parsed.
        server_headers: that every answer has, such as the date.
        keep_alive: whether the connection outlives the answer.
    """
    status, body, content_type, headers = reply
    own = f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\n"
    for name, value in headers:
        own += f"{name}: {value}\r\n"
    own += "\r\n" if keep_alive else "connection: close\r\n\r\n"
    parts = [STATUS_LINE[status]]
    for line in server_headers:
        parts += (line[0], b": ", line[1], b"\r\n")
    parts.append(own.encode("latin-1"))
    return b"".join(parts)


def refusal(error: ShardrankError) -> bytes:
    """Head and body of a connection's last answer."""
    is_passing = error.http_status == HTTPStatus.SERVICE_UNAVAILABLE
    headers = (("retry-after", str(RETRY_AFTER_S)),) if is_passing else ()
    reply = Reply(error.http_status, encode(error_document(error)), JSON, headers)
    return reply_head(reply, (), keep_alive=False) + reply.body
