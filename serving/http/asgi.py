"""Handlers behind ASGI: how the application, and whatever hosts it, reaches them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from serving.http.body import client_gone, too_large
from serving.http.disconnect import Disconnect
from serving.http.exchange import Exchange, Handler, Reply

DISCONNECT_EXTENSION = "shardrank.disconnect"
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


class AsgiExchange:
    """A request as ASGI gives it.

    Args:
        scope: of an HTTP request. The server may add a `Disconnect` as the extension `shardrank.disconnect`.
        receive: gives the body.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive

    @property
    def target(self) -> str:
        """Method and path, for the log."""
        return f"{self._scope['method']} {self._scope['path']}"

    @property
    def path_parameters(self) -> Mapping[str, str]:
        """Decoded parts of the path by name."""
        return cast(Mapping[str, str], self._scope.get("path_params", {}))

    def header(self, name: bytes) -> str | None:
        """The first header of that name."""
        for found, value in self._scope["headers"]:
            if found == name:
                return cast(bytes, value).decode("latin-1")
        return None

    async def body(self, max_body_bytes: int) -> bytes:
        """The whole body. Raises BodyTooLargeError, ClientGoneError."""
        parts: list[bytes] = []
        received, is_more = 0, True
        while is_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise client_gone()
            part = message.get("body", b"")
            received += len(part)
            if received > max_body_bytes:
                raise too_large(max_body_bytes, received)
            parts.append(part)
            is_more = message.get("more_body", False)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def watch_client(self, callback: Callable[[], None]) -> None:
        """Has `callback` called when the client goes, if the server tells."""
        disconnect: Disconnect | None = (self._scope.get("extensions") or {}).get(DISCONNECT_EXTENSION)
        if disconnect is not None:
            disconnect.watch_client(callback)


def response_of(reply: Reply) -> Response:
    """The framework's form of an answer."""
    return Response(reply.body, reply.status, {"content-type": reply.content_type, **dict(reply.headers)})


def exchange_of(request: Request) -> Exchange:
    """A request of the framework as handlers take it."""
    return AsgiExchange(request.scope, request.receive)


def endpoint_of(handler: Handler) -> Endpoint:
    """A handler as the framework takes it, with its name and its words for the documentation."""

    async def endpoint(request: Request) -> Response:
        return response_of(await handler(exchange_of(request)))

    endpoint.__name__ = handler.__name__
    endpoint.__doc__ = handler.__doc__
    return endpoint
