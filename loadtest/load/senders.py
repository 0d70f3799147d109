"""Send prepared requests over kept connections of HTTP or gRPC, and have every answer judged."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import grpc
import grpc.aio
import httptools

from loader.errors import ShardrankError
from loadtest.load.config import LoadTarget
from loadtest.workloads.payloads import Headers, Payload, Pool

NEVER = -1.0
"""The time at which a request was sent that was not."""
OK_STATUS = 200
# Servers close connections that were idle for 5 s and more; a request may not meet that.
IDLE_LIMIT_S = 4.0
CONNECT_TIMEOUT_S = 10.0
MAX_BODY_BYTES = 16 << 20
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # After a serving process was killed, its port is tried again at once, not after gRPC's second and more.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
)


class Failure(NamedTuple):
    """Why a request has no right answer.

    Attributes:
        kind: `timeout`, `connect`, `connection`, `http_<status>`, `grpc_<status>`, or what a judge calls it.
        message: details.
        retry_after: that header of an HTTP answer, "" without.
    """

    kind: str
    message: str = ""
    retry_after: str = ""


class Outgoing:
    """A request that is sent or about to be; all times are CLOCK_MONOTONIC seconds.

    Attributes:
        number: of the request in its run, from 0; a sender sends its payload `number` modulo their count.
        offset_s: from the run's begin until it is due.
        intended: when it is due.
        deadline: when it is given up.
        turn: when the generator came to it.
        sent: when it was written to a connection; `NEVER` until then.
        verdict: what a judge keeps of its answer.
        over: whether `on_over` was called; later answers and failures are dropped.
        abort: frees what carries it; set by its sender.
        expiry: timer that gives it up; set by its loop.
    """

    __slots__ = (
        "abort", "deadline", "expiry", "intended", "number", "offset_s", "on_over", "over", "sent", "turn", "verdict"
    )  # fmt: skip

    def __init__(self, number: int, offset_s: float, intended: float, turn: float, deadline: float, on_over: OnOver):
        self.number, self.offset_s, self.intended, self.turn = number, offset_s, intended, turn
        self.deadline = deadline
        self.on_over = on_over
        self.sent = NEVER
        self.over = False
        self.abort: Callable[[], object] | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self.verdict: Any = None

    def finish(self, ended: float, failure: Failure | None) -> None:
        """Report what became of it; None for a right answer. Only the first call counts."""
        if not self.over:
            self.over = True
            if self.expiry is not None:
                self.expiry.cancel()
            self.on_over(self, ended, failure)

    def give_up(self, failure: Failure) -> None:
        """Let it fail now. An HTTP connection that carries it is closed."""
        self.finish(time.monotonic(), failure)
        if self.abort is not None:
            self.abort()


OnOver: TypeAlias = Callable[[Outgoing, float, Failure | None], None]
"""Takes a request that is over, when that was, and its failure; None for a right answer."""
Judge: TypeAlias = Callable[[Outgoing, bytes], Failure | None]
"""Checks an answer that came with success: an HTTP body or a gRPC message; None if it is right."""


Sender: TypeAlias = "HttpSender | GrpcSender"


async def make_sender(
    target: LoadTarget,
    payloads: Iterable[Payload],
    judge: Judge,
    headers: Iterator[Headers] | None = None,
    *,
    connections: int = 512,
    channels: int = 4,
) -> Sender:
    """Make the sender of a target.

    Args:
        target: where requests go.
        payloads: the requests.
        judge: of answers.
        headers: added to each request's, one after the other; None for none.
        connections: of HTTP that may be open at a time.
        channels: of gRPC.

    Raises:
        OSError: no such host.
    """
    headers = itertools.repeat(()) if headers is None else headers
    if target.scheme == "grpc":
        return GrpcSender(target, list(payloads), judge, headers, max(1, channels))
    # Resolved once, so that no connection waits for its name again.
    addresses = await asyncio.get_running_loop().getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    address = str(addresses[0][4][0]), target.port
    return HttpSender(address, target.address, list(payloads), judge, headers, connections)


class AnswerCheck:
    """Judges that an answer has one score for each candidate."""

    def __init__(self, pool: Pool) -> None:
        self._read_scores = pool.scores
        self._expected = [payload.num_candidates for payload in pool]

    def __call__(self, request: Outgoing, body: bytes) -> Failure | None:
        """Return why an answer is bad; None if it is not."""
        try:
            scores = len(self._read_scores(body))
        except ShardrankError as error:
            return Failure("bad_answer", str(error))
        expected = self._expected[request.number % len(self._expected)]
        if scores != expected:
            return Failure("bad_answer", f"{scores} scores for a request of {expected} candidates")
        return None


class HttpConnection(asyncio.Protocol):
    """One HTTP/1.1 connection that costs little: requests written as prepared bytes, one at a time.

    Attributes:
        request: in flight on it.
        closed: whether no request may be sent.
        idle_since: when its last answer came.
    """

    def __init__(self, sender: HttpSender) -> None:
        self.request: Outgoing | None = None
        self.closed = False
        self.idle_since = 0.0
        self._sender = sender
        self._ended = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._body_bytes = 0
        self._retry_after = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio's protocol."""
        # uvloop's transports are not instances of asyncio's class.
        self._transport = cast(asyncio.Transport, transport)

    def write(self, buffers: Sequence[bytes]) -> None:
        """Write a request; the one before it must have been answered."""
        assert self._transport is not None
        self._transport.writelines(buffers)

    def data_received(self, data: bytes) -> None:
        """Part of asyncio's protocol."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            # What a judge raised is a bug, and no fault of the server's.
            self._end("a bug of the client")
            raise
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read one header; called by the parser."""
        if name.lower() == b"retry-after":
            self._retry_after = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        """Add a piece of the body; called by the parser."""
        self._parts.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > MAX_BODY_BYTES:
            self._end(f"an answer of more than {MAX_BODY_BYTES} bytes")

    def on_message_complete(self) -> None:
        """End the answer; called by the parser."""
        if self._ended:
            return
        # Before the next request is sent, since an answer may say that it is the last one of its connection.
        is_last = self.closed = not self._parser.should_keep_alive()
        body, retry_after = b"".join(self._parts), self._retry_after
        self._parts, self._body_bytes, self._retry_after = [], 0, ""
        self._sender.on_answer(self, self._parser.get_status_code(), body, retry_after)
        if is_last:
            self._end("the answer before was the connection's last")

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of asyncio's protocol."""
        self._end(f"the connection ended: {exc or 'closed by the server'}")

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._end("closed by the client")

    def _end(self, reason: str) -> None:
        self.closed = True
        if self._ended:
            return
        self._ended = True
        if self._transport is not None:
            self._transport.close()
        self._sender.on_end(self, reason)


class HttpSender:
    """A request goes out at once on a free connection; without one, a new one is opened, up to a limit.

    What can't be sent waits for whichever connection is free first, in the order in which requests came, and its
    waiting counts in its latency. Free connections take turns, so that every serving process behind the port gets some.
    No request is sent a second time, and none costs a task.
    """

    def __init__(
        self,
        address: tuple[str, int],
        host: str,
        payloads: Sequence[Payload],
        judge: Judge,
        headers: Iterator[Headers],
        max_connections: int,
    ) -> None:
        self.opened = 0
        self._address = address
        self._requests = [(_head(host, payload), payload.body) for payload in payloads]
        self._judge = judge
        self._headers = headers
        self._max_connections = max_connections
        self._idle: deque[HttpConnection] = deque()
        self._waiting: deque[Outgoing] = deque()
        self._connections: set[HttpConnection] = set()
        self._opening: set[asyncio.Task[None]] = set()

    async def open(self, within_s: float) -> None:
        """Connect as often as it may, one after the other.

        Of many that come at once, one process of a server whose processes share a listening socket would take all.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                for _ in range(self._max_connections):
                    await self._connect()

    def send(self, request: Outgoing) -> None:
        """Send it at once, or as soon as a connection is free."""
        # Before those that wait it must not go, whatever is free.
        if not self._waiting and (connection := self._pop_idle()) is not None:
            self._write(connection, request)
            return
        self._waiting.append(request)
        self._open_more()

    async def close(self) -> None:
        """End all connections."""
        opening = list(self._opening)
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        for connection in list(self._connections):
            connection.close()

    def on_answer(self, connection: HttpConnection, status: int, body: bytes, retry_after: str) -> None:
        """Pass on an answer, and use its connection again; called by the connection."""
        ended = time.monotonic()
        request, connection.request = connection.request, None
        if request is None:
            # Nothing was sent: a server that says why it is about to close.
            connection.close()
            return
        self._reuse(connection)
        if status == OK_STATUS:
            failure = self._judge(request, body)
        else:
            failure = Failure(f"http_{status}", body.decode("utf-8", "replace"), retry_after)
        request.finish(ended, failure)

    def on_end(self, connection: HttpConnection, reason: str) -> None:
        """Let the request of a connection that has ended fail; called by the connection."""
        self._connections.discard(connection)
        if connection.request is not None:
            connection.request.finish(time.monotonic(), Failure("connection", reason))
        self._open_more()

    def _write(self, connection: HttpConnection, request: Outgoing) -> None:
        connection.request = request
        request.abort = connection.close
        head, body = self._requests[request.number % len(self._requests)]
        lines = "".join([f"{name}: {value}\r\n" for name, value in next(self._headers)])
        request.sent = time.monotonic()
        connection.write((head, f"{lines}\r\n".encode("latin-1"), body))

    def _pop_idle(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.popleft()
            if not connection.closed and time.monotonic() - connection.idle_since < IDLE_LIMIT_S:
                return connection
            connection.close()
        return None

    def _pop_waiting(self) -> Outgoing | None:
        while self._waiting:
            request = self._waiting.popleft()
            if not request.over:
                return request
        return None

    def _reuse(self, connection: HttpConnection) -> None:
        if connection.closed:
            return
        if (request := self._pop_waiting()) is not None:
            self._write(connection, request)
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def _open_more(self) -> None:
        while len(self._opening) < min(len(self._waiting), self._max_connections - len(self._connections)):
            task = asyncio.create_task(self._connect())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _connect(self) -> None:
        connection: HttpConnection | None = None
        reason = "closed by the server at once"
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: HttpConnection(self), *self._address
                )
        except TimeoutError:
            reason = f"no connection within {CONNECT_TIMEOUT_S:g} s"
        except OSError as error:
            reason = str(error)
        else:
            self.opened += 1
        if (task := asyncio.current_task()) is not None:
            self._opening.discard(task)
        if connection is not None and not connection.closed:
            self._connections.add(connection)
            self._reuse(connection)
            return
        # It was opened for one request, which fails with it; the next one tries again.
        if (request := self._pop_waiting()) is not None:
            request.finish(time.monotonic(), Failure("connect", reason))
        self._open_more()


def _head(host: str, payload: Payload) -> bytes:
    """Return the request line and headers of a POST, without the empty line, so that headers can be added."""
    lines = [f"POST {payload.path} HTTP/1.1", f"host: {host}", f"content-length: {len(payload.body)}"]
    lines += [f"{name}: {value}" for name, value in payload.headers]
    return ("\r\n".join(lines) + "\r\n").encode("latin-1")


class GrpcSender:
    """Every request goes out at once over several channels in turn: a channel carries many at a time."""

    def __init__(
        self,
        target: LoadTarget,
        payloads: Sequence[Payload],
        judge: Judge,
        headers: Iterator[Headers],
        channels: int,
    ) -> None:
        # Each is one connection, opened again when it breaks.
        self.opened = channels
        # With an option of its own, a channel has a connection of its own, and reaches another process of the port.
        self._channels = [
            grpc.aio.insecure_channel(target.address, options=[*CHANNEL_OPTIONS, ("shardrank.channel", number)])
            for number in range(channels)
        ]
        paths = {payload.path for payload in payloads}
        calls = [{path: channel.unary_unary(path, None, None) for path in paths} for channel in self._channels]
        self._calls: Iterator[dict[str, Any]] = itertools.cycle(calls)
        self._payloads = payloads
        self._judge = judge
        self._headers = headers
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, within_s: float) -> None:
        """Connect all channels. One that can't is connected by its first call, whose failure it then is."""
        opening = [asyncio.ensure_future(channel.channel_ready()) for channel in self._channels]
        _, late = await asyncio.wait(opening, timeout=within_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)

    def send(self, request: Outgoing) -> None:
        """Send it at once."""
        request.sent = time.monotonic()
        task = asyncio.create_task(self._call(request))
        request.abort = task.cancel
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    async def close(self) -> None:
        """End all channels."""
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close(None)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # What a judge raised goes to the event loop's exception handler.
            task.result()

    async def _call(self, request: Outgoing) -> None:
        payload = self._payloads[request.number % len(self._payloads)]
        call = next(self._calls)[payload.path]
        try:
            body = await call(
                payload.body, timeout=max(request.deadline - request.sent, 0.001), metadata=next(self._headers)
            )
            ended = time.monotonic()
            failure = self._judge(request, body)
        except grpc.aio.AioRpcError as error:
            ended = time.monotonic()
            is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            kind = "timeout" if is_late else f"grpc_{error.code().name.lower()}"
            failure = Failure(kind, error.details() or "")
        request.finish(ended, failure)
