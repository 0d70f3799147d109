"""Send prepared requests over kept connections of HTTP or gRPC, and check every answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import grpc
import grpc.aio
import httptools

from loader.errors import ShardrankError
from loadtest.load.config import LoadTarget
from loadtest.load.recorder import NEVER, OK
from loadtest.workloads.payloads import Headers, Pool, ScoreList

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


class Outgoing:
    """A request whose turn has come.

    Attributes:
        number: of its payload.
        offset_s: when it was due, from the run's begin.
        intended: the same as CLOCK_MONOTONIC seconds, as all other times are.
        turn: when the process came to it.
        sent: when it was written to a connection; `NEVER` until then.
        over: whether it has its record; what comes for it later is dropped.
    """

    __slots__ = ("intended", "number", "offset_s", "over", "sent", "turn")

    def __init__(self, number: int, offset_s: float, intended: float, turn: float) -> None:
        self.number = number
        self.offset_s = offset_s
        self.intended = intended
        self.turn = turn
        self.sent = NEVER
        self.over = False


class Outcomes(Protocol):
    """Takes what became of requests; both loops do."""

    def failure(self, kind: str, message: str = "") -> int:
        """Give the code of a kind of error."""


OnOver: TypeAlias = Callable[[Outgoing, float, int], None]
"""Takes a request, when it was over, and `OK` or the code of its failure."""


async def make_sender(
    at: LoadTarget,
    pool: Pool,
    outcomes: Outcomes,
    on_over: OnOver,
    headers: Iterator[Headers],
    *,
    connections: int,
    channels: int,
    timeout_s: float,
    check: AnswerCheck | None = None,
) -> HttpSender | GrpcSender:
    """Make the sender of a target, which reports each request that is not given up, once.

    Args:
        at: where requests go.
        pool: of the requests.
        outcomes: gives out codes of failures.
        on_over: told each request that is over.
        headers: that each request is sent with beside its own, one after the other.
        connections: of HTTP that may be open at a time.
        channels: of gRPC.
        timeout_s: deadline of a gRPC call, from the request's intended time.
        check: of answers; None for one that counts their scores.

    Raises:
        OSError: no such host.
    """
    check = check or AnswerCheck(pool, outcomes)
    if at.scheme == "grpc":
        return GrpcSender(at, pool, check, on_over, headers, max(1, channels), timeout_s)
    # Resolved once, so that no connection waits for its name again.
    found = await asyncio.get_running_loop().getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM)
    address = str(found[0][4][0]), at.port
    return HttpSender(address, at.host, pool, check, on_over, headers, connections)


class AnswerCheck:
    """Reads every answer that came with success: it must have one score for each candidate."""

    def __init__(self, pool: Pool, outcomes: Outcomes) -> None:
        self._read_scores = pool.scores
        self._expected = [payload.num_candidates for payload in pool]
        self.failure = outcomes.failure

    def scores(self, number: int, body: bytes) -> ScoreList:
        """Read the scores of an answer to request `number`. Raises AnswerError."""
        return self._read_scores(body)

    def __call__(self, number: int, body: bytes) -> int:
        """Give the code of an answer to request `number`."""
        try:
            scores = len(self.scores(number, body))
        except ShardrankError as error:
            return self.failure("bad_answer", str(error))
        if scores != self._expected[number]:
            return self.failure("bad_answer", f"{scores} scores for a request of {self._expected[number]} candidates")
        return OK


def host_and_port(host: str, port: int) -> str:
    """Write `host:port`, an address of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


OnAnswer: TypeAlias = Callable[["HttpConnection", int, bytes], None]
OnEnd: TypeAlias = Callable[["HttpConnection", str], None]


class PostRequest(NamedTuple):
    """A prepared request: its request line and headers, to which more can be added when it is sent, and its body."""

    head: bytes
    body: bytes


def post_request(host: str, port: int, path: str, headers: Mapping[str, str], body: bytes) -> PostRequest:
    """Return a POST request; `headers` must not have `host` or `content-length`."""
    lines = [f"POST {path} HTTP/1.1", f"host: {host_and_port(host, port)}", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return PostRequest(("\r\n".join(lines) + "\r\n").encode("latin-1"), body)


class HttpConnection(asyncio.Protocol):
    """One HTTP/1.1 connection that costs little: whole requests written as prepared bytes, one at a time.

    Args:
        on_answer: called with (self, status, body) for each whole answer. If `closed` is true by then, the answer was
            the last one.
        on_end: called once with (self, reason), when no answer will come any more. The request that was out, if any,
            has failed.

    Attributes:
        closed: whether no request may be sent.
        idle_since: for its owner, who may keep it for the next request.
    """

    def __init__(self, on_answer: OnAnswer, on_end: OnEnd) -> None:
        self.closed = False
        self.idle_since = 0.0
        self._on_answer = on_answer
        self._on_end = on_end
        self._ended = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio's protocol."""
        # uvloop's transports are not instances of asyncio's class.
        self._transport = cast(asyncio.Transport, transport)

    def send(self, request: PostRequest, headers: Iterable[tuple[str, str]] = ()) -> None:
        """Send a request, with further headers; the one before it must have been answered."""
        assert self._transport is not None
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
        self._transport.writelines([request.head, f"{lines}\r\n".encode("latin-1"), request.body])

    def data_received(self, data: bytes) -> None:
        """Part of asyncio's protocol."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            # What its owner's callback raised is a defect, and no fault of the server's.
            self._end("a defect of the client")
            raise
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body; called by the parser."""
        self._parts.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > MAX_BODY_BYTES:
            self._end(f"an answer of more than {MAX_BODY_BYTES} bytes")

    def on_message_complete(self) -> None:
        """End the answer; called by the parser."""
        if self._ended:
            return
        # Before the next request is sent, since an answer may say that it is the last one of its connection.
        last = self.closed = not self._parser.should_keep_alive()
        parts, self._parts, self._body_bytes = self._parts, [], 0
        self._on_answer(self, self._parser.get_status_code(), parts[0] if len(parts) == 1 else b"".join(parts))
        if last:
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
        self._on_end(self, reason)


class HttpSender:
    """A request goes out at once on a free connection; without one, a new one is opened, up to a limit.

    What can't be sent waits for whichever connection is free first, in the order in which requests came, and its
    waiting counts in its latency. Free connections take turns, so that every serving process behind the port gets some.
    No request is sent a second time, and none costs a task. `connection_class` is that of its connections.
    """

    connection_class: type[HttpConnection] = HttpConnection

    def __init__(
        self,
        address: tuple[str, int],
        host: str,
        pool: Pool,
        check: AnswerCheck,
        on_over: OnOver,
        headers: Iterator[Headers],
        max_connections: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.opened = 0
        self._address = address
        self._requests = [post_request(host, address[1], pool.path, dict(one.headers), one.body) for one in pool]
        self._check = check
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
        if not self._waiting and (connection := self._take()) is not None:
            self._write(connection, request)
            return
        self._waiting.append(request)
        self._open_more()

    def give_up(self, request: Outgoing) -> None:
        """Forget a request that is over; its connection, if it has one, can't be used again."""
        connection = self._on.pop(request, None)
        if connection is None:
            return
        self._out.pop(connection, None)
        connection.close()

    async def close(self) -> None:
        """End all connections; nothing may be out."""
        opening = list(self._opening)
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        while self._idle:
            self._idle.popleft().close()
        for connection in list(self._out):
            connection.close()

    def kind_of(self, connection: HttpConnection, status: int) -> str:
        """Name the kind of failure that an answer is, while its connection still knows it."""
        del connection
        return f"http_{status}"

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
        connection: HttpConnection | None = None
        reason = "closed by the server at once"
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: self.connection_class(self._answered, self._ended), *self._address
                )
        except TimeoutError:
            reason = f"no connection within {CONNECT_TIMEOUT_S:g} s"
        except OSError as error:
            reason = str(error)
        else:
            self._open += 1
            self.opened += 1
        if (task := asyncio.current_task()) is not None:
            self._opening.discard(task)
        if connection is not None and not connection.closed:
            self._free(connection)
            return
        # It was opened for one request, which fails with it; the next one tries again.
        if (request := self._next_waiting()) is not None:
            self._on_over(request, self._clock(), self._check.failure("connect", reason))
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
            code = self._check.failure(self.kind_of(connection, status), body.decode("utf-8", "replace"))
        self._on_over(request, ended, code)

    def _ended(self, connection: HttpConnection, reason: str) -> None:
        self._open -= 1
        request = self._out.pop(connection, None)
        if request is not None:
            del self._on[request]
            self._on_over(request, self._clock(), self._check.failure("connection", reason))
        self._open_more()


def open_channels(host: str, port: int, count: int) -> list[grpc.aio.Channel]:
    """Open channels with connections of their own, so that they reach different processes behind one port."""
    at = host_and_port(host, port)
    return [
        grpc.aio.insecure_channel(at, options=[*CHANNEL_OPTIONS, ("shardrank.channel", number)])
        for number in range(count)
    ]


def as_it_is(message: bytes) -> bytes:
    """Serialise a message that is serialised already."""
    return message


class GrpcSender:
    """Every request goes out at once over several channels in turn: a channel carries many at a time."""

    def __init__(
        self,
        at: LoadTarget,
        pool: Pool,
        check: AnswerCheck,
        on_over: OnOver,
        headers: Iterator[Headers],
        channels: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Each is one connection, opened again when it breaks.
        self.opened = channels
        self._channels = open_channels(at.host, at.port, channels)
        calls: list[Any] = [
            channel.unary_unary(pool.path, request_serializer=as_it_is, response_deserializer=as_it_is)
            for channel in self._channels
        ]
        self._calls = itertools.cycle(calls)
        self._bodies = [payload.body for payload in pool]
        self._check = check
        self._on_over = on_over
        self._headers = headers
        self._timeout_s = timeout_s
        self._clock = clock
        self._out: dict[Outgoing, asyncio.Task[None]] = {}

    async def open(self, within_s: float) -> None:
        """Connect all channels. One that can't is connected by its first call, whose failure it then is."""
        opening = [asyncio.ensure_future(channel.channel_ready()) for channel in self._channels]
        _, late = await asyncio.wait(opening, timeout=within_s)
        for one in late:
            one.cancel()
        await asyncio.gather(*opening, return_exceptions=True)

    def send(self, request: Outgoing) -> None:
        """Send it at once."""
        request.sent = self._clock()
        self._out[request] = asyncio.create_task(self._ask(request))

    def give_up(self, request: Outgoing) -> None:
        """Cancel the call of a request that is over."""
        if (task := self._out.get(request)) is not None:
            task.cancel()

    async def close(self) -> None:
        """End all channels."""
        for task in (tasks := list(self._out.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close(None)

    async def _ask(self, request: Outgoing) -> None:
        try:
            left_s = request.intended + self._timeout_s - request.sent
            body = await next(self._calls)(
                self._bodies[request.number], timeout=max(left_s, 0.001), metadata=next(self._headers)
            )
            ended = self._clock()
            code = self._check(request.number, body)
        except grpc.aio.AioRpcError as error:
            ended = self._clock()
            name = error.code().name.lower()
            kind = "timeout" if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else f"grpc_{name}"
            code = self._check.failure(kind, error.details() or "")
        finally:
            del self._out[request]
        self._on_over(request, ended, code)
