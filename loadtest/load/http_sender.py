"""Sends prepared HTTP requests over kept connections, without a task for each."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator

from loadtest.http_connection import HttpConnection, post_request
from loadtest.load.answer_check import AnswerCheck
from loadtest.load.outgoing import OnOver, Outgoing, PayloadPool
from loadtest.load.recorder import Recorder
from loadtest.workloads.payloads import Headers

OK_STATUS = 200
# Servers close connections that were idle for 5 s and more; a request may not meet that.
IDLE_LIMIT_S = 4.0
CONNECT_TIMEOUT_S = 10.0


class HttpSender:
    """A request goes out at once on a free connection; without one, a new one is opened, up to a limit.

    What can't be sent waits for whichever connection is free first, in the order in which requests came, and its
    waiting counts in its latency. Free connections take turns, so that every serving process behind the port gets some.
    No request is sent a second time.

    Args:
        address: of the server, resolved.
        host: as it is named in requests.
        pool: of the requests.
        recorder: gives out codes of failures.
        on_over: told each request that is over.
        headers: that each request is sent with beside its own, one after the other.
        max_connections: open at a time.
        clock: CLOCK_MONOTONIC in seconds.
    """

    def __init__(
        self,
        address: tuple[str, int],
        host: str,
        pool: PayloadPool,
        recorder: Recorder,
        on_over: OnOver,
        *,
        headers: Iterator[Headers],
        max_connections: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._requests = [post_request(host, address[1], pool.path, dict(one.headers), one.body) for one in pool]
        self._check = AnswerCheck(pool, recorder)
        self._recorder = recorder
        self._on_over = on_over
        self._headers = headers
        self._max_connections = max_connections
        self._clock = clock
        self._idle: deque[HttpConnection] = deque()
        self._waiting: deque[Outgoing] = deque()
        self._out: dict[HttpConnection, Outgoing] = {}
        self._on: dict[Outgoing, HttpConnection] = {}
        self._open = 0
        self._opening: set[asyncio.Task[None]] = set()
        self._opened = 0

    @property
    def opened(self) -> int:
        """Connections that were opened so far."""
        return self._opened

    def send(self, request: Outgoing) -> None:
        """As `Sender.send`."""
        # Before those that wait it must not go, whatever is free.
        if not self._waiting and (connection := self._take()) is not None:
            self._write(connection, request)
            return
        self._waiting.append(request)
        self._open_more()

    def give_up(self, request: Outgoing) -> None:
        """As `Sender.give_up`."""
        connection = self._on.pop(request, None)
        if connection is None:
            return
        self._out.pop(connection, None)
        connection.close()

    async def close(self) -> None:
        """As `Sender.close`."""
        opening = list(self._opening)
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        while self._idle:
            self._idle.popleft().close()
        for connection in list(self._out):
            connection.close()

    def _write(self, connection: HttpConnection, request: Outgoing) -> None:
        self._out[connection] = request
        self._on[request] = connection
        request.sent = self._clock()
        connection.send(self._requests[request.number], next(self._headers))

    def _take(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.popleft()
            if not connection.closed and self._clock() - connection.idle_since < IDLE_LIMIT_S:
                return connection
            connection.close()
        return None

    def _next_waiting(self) -> Outgoing | None:
        while self._waiting:
            request = self._waiting.popleft()
            if not request.over:
                return request
        return None

    def _free(self, connection: HttpConnection) -> None:
        if connection.closed:
            return
        if (request := self._next_waiting()) is not None:
            self._write(connection, request)
            return
        connection.idle_since = self._clock()
        self._idle.append(connection)

    def _open_more(self) -> None:
        while len(self._opening) < min(len(self._waiting), self._max_connections - self._open):
            task = asyncio.create_task(self._connect())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _connect(self) -> None:
        def make() -> HttpConnection:
            return HttpConnection(self._answered, self._ended)

        connection: HttpConnection | None = None
        reason = "closed by the server at once"
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await asyncio.get_running_loop().create_connection(make, *self._address)
        except TimeoutError:
            reason = f"no connection within {CONNECT_TIMEOUT_S:g} s"
        except OSError as error:
            reason = str(error)
        else:
            self._open += 1
            self._opened += 1
        self._opening.discard(_this_task())
        if connection is not None and not connection.closed:
            self._free(connection)
            return
        # It was opened for one request, which fails with it; the next one tries again.
        if (request := self._next_waiting()) is not None:
            self._on_over(request, self._clock(), self._recorder.failure("connect", reason))
        self._open_more()

    def _answered(self, connection: HttpConnection, status: int, body: bytes) -> None:
        ended = self._clock()
        request = self._out.pop(connection, None)
        if request is None:
            # Nothing was asked: a server that says why it is about to close.
            connection.close()
            return
        del self._on[request]
        self._free(connection)
        if status == OK_STATUS:
            code = self._check(request.number, body)
        else:
            code = self._recorder.failure(f"http_{status}", body.decode("utf-8", "replace"))
        self._on_over(request, ended, code)

    def _ended(self, connection: HttpConnection, reason: str) -> None:
        self._open -= 1
        request = self._out.pop(connection, None)
        if request is not None:
            del self._on[request]
            self._on_over(request, self._clock(), self._recorder.failure("connection", reason))
        self._open_more()


async def resolve(host: str, port: int) -> tuple[str, int]:
    """The first address of a host, so that no connection waits for its name again.

    Raises:
        OSError: no such host.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return str(found[0][4][0]), port


def _this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task
