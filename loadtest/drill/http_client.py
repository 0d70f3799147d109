"""An HTTP/1.1 client that costs little: kept connections in turn, whole requests written as prepared bytes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools

MAX_BODY_BYTES = 16 << 20


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self.closed = False
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not instances of asyncio's class.
        self._transport = cast(asyncio.Transport, transport)

    def request(self, payload: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Sends a whole request. The future gives (status, body) or ConnectionError."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(payload)
        return self._answer

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")
            self.close()

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > MAX_BODY_BYTES:
            self._fail(f"an answer of more than {MAX_BODY_BYTES} bytes")
            self.close()

    def on_message_complete(self) -> None:
        # Before the next request is sent, since an answer may say that it is the last one of its connection.
        if not self._parser.should_keep_alive():
            self.close()
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result((self._parser.get_status_code(), bytes(self._body)))
        self._body.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._fail(f"the connection ended: {exc or 'closed by the server'}")

    def close(self) -> None:
        """Ends the connection. Idempotent."""
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    def _fail(self, reason: str) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(ConnectionError(reason))


class HttpClient:
    """Sends prepared requests over kept connections, which take turns, so that every serving process gets some.

    A connection that was idle for long is not used again: the server may be closing it in this very moment. No request
    is sent a second time, whatever happens to it.

    Args:
        host, port: of the server.
        path: of all requests.
        max_connections: beyond these, requests wait for one.
        idle_limit_s: shorter than the server's `keep_alive_s`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        max_connections: int = 64,
        idle_limit_s: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._port = port
        self._idle: deque[_Connection] = deque()
        self._free = asyncio.Semaphore(max_connections)
        self._idle_limit_s = idle_limit_s
        self._clock = clock

    def prepare(self, path: str, body: bytes) -> bytes:
        """The bytes of a POST request."""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def call(self, payload: bytes) -> tuple[int, bytes]:
        """Sends a prepared request and waits for its answer; a cancelled call closes its connection.

        Raises:
            OSError: no connection, or one that ended before the answer.
        """
        async with self._free:
            connection = self._take() or await self._connect()
            try:
                answer = await connection.request(payload)
            except BaseException:
                connection.close()
                raise
            if not connection.closed:
                connection.idle_since = self._clock()
                self._idle.append(connection)
            return answer

    def close(self) -> None:
        """Closes idle connections; none may be in use."""
        while self._idle:
            self._idle.popleft().close()

    def _take(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.popleft()
            if not connection.closed and self._clock() - connection.idle_since < self._idle_limit_s:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(_Connection, self._host, self._port)
        return connection
