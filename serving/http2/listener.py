"""A TCP port and the HTTP/2 connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Generic, TypeVar

from serving.http2.connection import Http2Connection
from serving.http2.header_blocks import Header
from serving.http2.limits import ConnectionLimits
from serving.http2.stream import Stream
from serving.listening_socket import accept_waiting, listening_socket

Head = TypeVar("Head")
BACKLOG = 1024


class Http2Listener(Generic[Head]):
    """Listens, and keeps the connections. Belongs to one event loop.

    Args:
        api: what is served, for errors.
        limits: of each connection.
        max_connections: at once; a further one is closed as it comes.
        read_head, make_stream: see `Http2Connection`.

    Attributes:
        port: where it listens; 0 before.
    """

    def __init__(
        self,
        api: str,
        limits: ConnectionLimits,
        max_connections: int,
        read_head: Callable[[list[Header]], Head],
        make_stream: Callable[[Http2Connection[Head], int, Head], Stream[Head]],
    ) -> None:
        self._api, self._limits, self._max_connections = api, limits, max_connections
        self._read_head, self._make_stream = read_head, make_stream
        self._connections: set[Http2Connection[Head]] = set()
        self._server: asyncio.Server | None = None
        self._socket: socket.socket | None = None
        self._none_left = asyncio.Event()
        self._is_stopping = False
        self.port = 0

    async def start(self, host: str, port: int) -> int:
        """Listens; other processes may listen on the same port. Returns the port, a free one if 0 was asked for.

        Raises:
            ListenError: if the port can't be bound.
        """
        self._socket = listener = listening_socket(host, port, self._api)
        self.port = bound = int(listener.getsockname()[1])
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._make_connection, sock=listener, backlog=BACKLOG)
        return bound

    async def stop(self, grace_s: float) -> None:
        """Takes in what has connected, then nothing more; ends connections as their streams are answered.

        Args:
            grace_s: after it, what is left is dropped.
        """
        self._is_stopping = True
        if self._server is not None and self._socket is not None:
            accepted = accept_waiting(self._socket)
            self._server.close()
            self._socket.close()
            for one in accepted:
                await asyncio.get_running_loop().connect_accepted_socket(self._make_connection, one)
        for connection in list(self._connections):
            connection.lifetime.ask_to_go()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._all_closed()
        for connection in list(self._connections):
            connection.lifetime.abort()
        await self._all_closed()

    async def _all_closed(self) -> None:
        while self._connections:
            self._none_left.clear()
            await self._none_left.wait()

    def _make_connection(self) -> asyncio.Protocol:
        if len(self._connections) >= self._max_connections:
            return _Refused()
        return Http2Connection(self._limits, self._read_head, self._make_stream, self._opened, self._forget)

    def _opened(self, connection: Http2Connection[Head]) -> None:
        self._connections.add(connection)
        if len(self._connections) > self._max_connections:
            # Several were accepted at once, before any of them counted.
            connection.lifetime.abort()
        elif self._is_stopping:
            connection.lifetime.ask_to_go()

    def _forget(self, connection: Http2Connection[Head]) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._none_left.set()


class _Refused(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
