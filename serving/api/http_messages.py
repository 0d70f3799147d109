"""HTTP/1.1 messages: what heads must be (RFC 9112), requests, and answers in the forms of both APIs."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, NamedTuple, TypeAlias

import msgspec

from loader.errors import ShardrankError
from serving.errors import MAX_MESSAGE_CHARS, RETRY_AFTER_S, InvalidRequestError, error_document, malformed, printable

logger = logging.getLogger(__name__)

JSON = "application/json"
OPEN_INFERENCE = "/v2"
"""Where the paths of the Open Inference Protocol begin, whose errors have a form of their own."""
_LENGTH_DIGITS = 18
_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b" % (status.value, status.phrase.encode()) for status in HTTPStatus}
# RFC 9110, section 7.2: uri-host [":" port]. It may be empty, but it is one host, without a user or a path.
_HOST = re.compile(rb"(?:[!$&'()*+;=\-.~%\w]*+|\[[!$&'()*+;=\-.~%\w:]++\])(?::[0-9]*+)?[ \t]*+")

Headers: TypeAlias = list[tuple[bytes, bytes]]
Fields: TypeAlias = dict[bytes, bytes]


class HttpReply(NamedTuple):
    """One answer: status, complete body, its type, and other headers with names in lower case."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()

    def encode(self, headers: Headers, *, is_last: bool) -> bytes:
        """Return the bytes of the answer, which begins with `headers`; `is_last` on its connection."""
        lines, body = [_STATUS_LINES[self.status]], self.body
        for name, value in headers:
            lines.append(b"%b: %b" % (name, value))
        for field, text in self.headers:
            lines.append(f"{field}: {text}".encode("latin-1"))
        last = b"\r\nconnection: close" if is_last else b""
        last_lines = b"content-type: %b\r\ncontent-length: %d%b\r\n" % (self.content_type.encode(), len(body), last)
        return b"\r\n".join((*lines, last_lines, body))


Respond: TypeAlias = Callable[[bytes], Awaitable[HttpReply]]
"""Answers a request, given its body; raises nothing."""


class Exchange:
    """A request whose head was read, and its answer. Implements `serving.rank.service.Caller`.

    Attributes:
        connection: the `HttpConnection`.
        fields: the first header of each name, which is in lower case.
        respond: what `Admit` lets answer; None if the application does.
        on_leave: called when the client leaves before its answer.
        on_sent: called once the answer is sent, or the client has left.
    """

    def __init__(self, connection: Any, method: str, path: str, fields: Fields) -> None:
        self.connection, self.method, self.path, self.fields = connection, method, path, fields
        self.respond: Respond | None = None
        self.is_answered = self._is_over = False
        self.on_leave: Callable[[], None] | None = None
        self.on_sent: list[Callable[[], None]] = []

    @property
    def request_id(self) -> str:
        """The client's id of the request, "" for none."""
        return self.fields.get(b"x-request-id", b"").strip(b" \t").decode("latin-1")

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the client leaves before its answer: at once, if it has left already."""
        self.on_leave = callback
        if self._is_over:
            callback()

    def once_sent(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the answer is sent, or the client has left."""
        self.on_sent.append(callback)
        if self._is_over:
            callback()

    def leave(self) -> None:
        """Notify those who work for a client that has left, or was refused meanwhile."""
        self._is_over = True
        if self.on_leave is not None and not self.is_answered:
            self.on_leave()
        for callback in self.on_sent:
            callback()
        # They would keep the request and its version.
        self.respond = self.on_leave = None


def body_length(version: str, headers: Headers, fields: Fields) -> int | None:
    """Return the bytes of the body that follows a parsed head; None for a chunked body.

    Raises InvalidRequestError for what llhttp lets pass, and another reader could understand differently: a host that
    is missing or ambiguous, other codings than `chunked`, versions before 1.0. `fields` has the first header of each
    name, in lower case.
    """
    if version not in ("1.0", "1.1"):
        raise malformed("", "not HTTP/1.1: the version is not known")
    host = fields.get(b"host")
    hosts = 0 if host is None else 1
    if len(fields) < len(headers):
        hosts = [name for name, _ in headers].count(b"host")
    if hosts > 1 or (version == "1.1" and not hosts):
        raise malformed("host", f"must be given once, and is {hosts} times")
    if host is not None and _HOST.fullmatch(host) is None:
        raise malformed("host", "must be one host, and its port if it has one")
    coding = fields.get(b"transfer-encoding")
    if coding is not None:
        if version == "1.0" or coding.strip(b" \t").lower() != b"chunked":
            raise malformed("transfer-encoding", "must be `chunked` alone, or absent")
        return None
    length = fields.get(b"content-length", b"0")
    if len(length) > _LENGTH_DIGITS:
        raise malformed("content-length", f"must have at most {_LENGTH_DIGITS} digits")
    return int(length)


def header_too_large(max_header_bytes: int) -> InvalidRequestError:
    """Return the error of a head, or of other bytes that are no body, of more than `max_header_bytes`."""
    return InvalidRequestError(
        "", f"the headers are longer than the limit max_header_bytes = {max_header_bytes}", kind="header_too_large"
    )


def error_reply(path: str, request_id: str, error: ShardrankError) -> HttpReply:
    """Put an error in the form of the API that a path belongs to."""
    headers: tuple[tuple[str, str], ...] = ()
    if error.http_status in (429, 503):
        headers = (("retry-after", str(RETRY_AFTER_S)),)
    elif error.http_status == 401:
        # RFC 9110, 11.6.1: such an answer says what is expected.
        headers = (("www-authenticate", "Bearer"),)
    if path == OPEN_INFERENCE or path.startswith(f"{OPEN_INFERENCE}/"):
        body = msgspec.json.encode({"error": printable(str(error), MAX_MESSAGE_CHARS)})
        return HttpReply(error.http_status, body, JSON, (("shardrank-error-kind", error.kind), *headers))
    return HttpReply(error.http_status, msgspec.json.encode(error_document(error, request_id)), JSON, headers)


def internal_error_reply(path: str, request_id: str) -> HttpReply:
    """Answer what should never happen. Called where the error is handled, which it logs."""
    logger.exception("%s failed", path[:200])
    return error_reply(path, request_id, ShardrankError("internal error; the server's log says more"))
