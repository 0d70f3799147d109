"""Reading a request's body within its limit."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from serving.errors import BodyTooLargeError, ClientGoneError, InvalidFieldError
from serving.http.exchange import Body, Exchange

IDENTITY = "identity"


def content_coding(exchange: Exchange, allowed: Sequence[str] = ()) -> str:
    """How the body is coded: `identity`, or one of those allowed.

    Raises:
        InvalidFieldError: for another one.
    """
    stated = exchange.header(b"content-encoding")
    if stated is None:
        return IDENTITY
    coding = stated.lower()
    if coding != IDENTITY and coding not in allowed:
        others = f", or coded as {' or '.join(allowed)}" if allowed else ""
        raise InvalidFieldError("content-encoding", f"{coding[:40]!r} is not supported; send the body as it is{others}")
    return coding


def as_text(body: Body) -> bytes | bytearray:
    """A body that can be searched as bytes can."""
    return bytes(body) if isinstance(body, memoryview) else body


def read_body(exchange: Exchange, max_body_bytes: int) -> Awaitable[Body]:
    """The whole body, as it came.

    Args:
        exchange: its body was not read yet.
        max_body_bytes: the longest that it may be.

    Raises:
        BodyTooLargeError: before anything is read if its Content-Length says so, else as soon as too much has come.
        ClientGoneError: if the client leaves meanwhile.
    """
    stated = exchange.header(b"content-length")
    if stated is not None and stated.isdecimal() and int(stated[:20]) > max_body_bytes:
        raise BodyTooLargeError("", "max_body_bytes", max_body_bytes, int(stated[:20]), "bytes in the body")
    return exchange.body(max_body_bytes)


def too_large(max_body_bytes: int, received_bytes: int) -> BodyTooLargeError:
    """For a body of which so much has come, and whose end has not."""
    return BodyTooLargeError("", "max_body_bytes", max_body_bytes, f"at least {received_bytes}", "bytes in the body")


def client_gone() -> ClientGoneError:
    """For a body that will not come to its end."""
    return ClientGoneError("the client closed the connection before its request was complete")
