"""Reading a request's body within its limit."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from serving.errors import BodyTooLargeError, ClientGoneError, InvalidFieldError


def content_coding(request: Request, allowed: Sequence[str] = ()) -> str:
    """How the body is coded: `identity`, or one of those allowed.

    Raises:
        InvalidFieldError: for another one.
    """
    coding = request.headers.get("content-encoding", "identity").lower()
    if coding != "identity" and coding not in allowed:
        others = f", or coded as {' or '.join(allowed)}" if allowed else ""
        raise InvalidFieldError("content-encoding", f"{coding[:40]!r} is not supported; send the body as it is{others}")
    return coding


async def read_body(request: Request, max_body_bytes: int, codings: Sequence[str] = ()) -> bytes | bytearray:
    """The whole body, as it came.

    Args:
        request: its body was not read yet.
        max_body_bytes: the longest that it may be.
        codings: content codings that the caller undoes.

    Raises:
        BodyTooLargeError: before anything is read if its Content-Length says so, else as soon as too much has come.
        InvalidFieldError: for any other content coding.
        ClientGoneError: if the client leaves meanwhile.
    """
    content_coding(request, codings)
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated[:20]) > max_body_bytes:
        raise BodyTooLargeError("", "max_body_bytes", max_body_bytes, int(stated[:20]), "bytes in the body")
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientGoneError("the client closed the connection before its request was complete")
    first: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        return _checked(first, max_body_bytes)
    body = bytearray(first)
    while message.get("more_body", False):
        _checked(body, max_body_bytes)
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client closed the connection before its request was complete")
        body += message.get("body", b"")
    return _checked(body, max_body_bytes)


def _checked(body: bytes | bytearray, max_body_bytes: int) -> bytes | bytearray:
    if len(body) > max_body_bytes:
        raise BodyTooLargeError("", "max_body_bytes", max_body_bytes, f"at least {len(body)}", "bytes in the body")
    return body
