"""Reading a request's body within its limit."""

from __future__ import annotations

from starlette.requests import Request

from serving.errors import BodyTooLargeError, ClientGoneError, InvalidFieldError


async def read_body(request: Request, max_body_bytes: int) -> bytes | bytearray:
    """The whole body.

    Raises:
        BodyTooLargeError: before anything is read if its Content-Length says so, else as soon as too much has come.
        InvalidFieldError: for a content coding; bodies are plain JSON.
        ClientGoneError: if the client leaves meanwhile.
    """
    headers = request.headers
    if (coding := headers.get("content-encoding", "identity")) != "identity":
        raise InvalidFieldError("content-encoding", f"{coding[:40]!r} is not supported; send the body as it is")
    stated = headers.get("content-length", "")
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
