"""An HTTP client for prepared requests: kept connections in turn."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from loadtest.http_connection import HttpConnection, PostRequest, post_request


class HttpClient:
    """Sends prepared requests over kept connections, which take turns, so that every serving process gets some.

    A connection that was idle for long is not used again: the server may be closing it in this very moment. No request
    is sent a second time, whatever happens to it.

    Args:
        host, port: of the server.
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
        self._idle: deque[HttpConnection] = deque()
        self._answers: dict[HttpConnection, asyncio.Future[tuple[int, bytes]]] = {}
        self._free = asyncio.Semaphore(max_connections)
        self._idle_limit_s = idle_limit_s
        self._clock = clock

    def prepare(self, path: str, body: bytes) -> PostRequest:
        """A POST request."""
        return post_request(self._host, self._port, path, {"content-type": "application/json"}, body)

    async def call(self, request: PostRequest) -> tuple[int, bytes]:
        """Sends a prepared request and waits for its answer; a cancelled call closes its connection.

        Raises:
            OSError: no connection, or one that ended before the answer.
        """
        async with self._free:
            connection = self._take() or await self._connect()
            answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
            self._answers[connection] = answer
            connection.send(request)
            try:
                result = await answer
            except BaseException:
                self._answers.pop(connection, None)
                connection.close()
                raise
            if not connection.closed:
                connection.idle_since = self._clock()
                self._idle.append(connection)
            return result

    def close(self) -> None:
        """Closes idle connections; none may be in use."""
        while self._idle:
            self._idle.popleft().close()

    def _take(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.popleft()
            if not connection.closed and self._clock() - connection.idle_since < self._idle_limit_s:
                return connection
            connection.close()
        return None

    async def _connect(self) -> HttpConnection:
        def make() -> HttpConnection:
            return HttpConnection(self._answered, self._ended)

        _, connection = await asyncio.get_running_loop().create_connection(make, self._host, self._port)
        return connection

    def _answered(self, connection: HttpConnection, status: int, body: bytes) -> None:
        answer = self._answers.pop(connection, None)
        if answer is not None and not answer.done():
            answer.set_result((status, body))

    def _ended(self, connection: HttpConnection, reason: str) -> None:
        answer = self._answers.pop(connection, None)
        if answer is not None and not answer.done():
            answer.set_exception(ConnectionError(reason))
