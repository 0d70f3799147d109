"""What a handler gets of a request and gives for it, whatever carries the two."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol, TypeAlias

JSON = "application/json"
Body: TypeAlias = bytes | bytearray | memoryview
"""A `memoryview` only on paths whose bodies have numbers, see `DirectRoute`; its memory is nobody else's then."""
REQUEST_ID = "x-request-id"
_REQUEST_ID_NAME = REQUEST_ID.encode()


class Exchange(Protocol):
    """One request, for as long as it is handled."""

    @property
    def target(self) -> str:
        """Method and path, for the log."""
        ...

    @property
    def path_parameters(self) -> Mapping[str, str]:
        """Decoded parts of the path by name."""
        ...

    def header(self, name: bytes) -> str | None:
        """The first header of that name, which is given in lower case; None without one."""
        ...

    async def body(self, max_body_bytes: int) -> Body:
        """The whole body, as it came. Asked for once.

        Raises:
            BodyTooLargeError: as soon as more than `max_body_bytes` have come.
            ClientGoneError: if the client leaves before that.
        """
        ...

    def watch_client(self, callback: Callable[[], None]) -> None:
        """Has `callback` called when the client closes its connection: at once, if it has done so already."""
        ...


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


Handler: TypeAlias = Callable[[Exchange], Awaitable[Reply]]


def reply_to(
    exchange: Exchange, status: int, body: bytes, content_type: str = JSON, headers: tuple[tuple[str, str], ...] = ()
) -> Reply:
    """An answer that carries the request's `X-Request-Id`, if it has one."""
    request_id = exchange.header(_REQUEST_ID_NAME)
    if request_id is not None:
        headers = ((REQUEST_ID, request_id), *headers)
    return Reply(status, body, content_type, headers)
