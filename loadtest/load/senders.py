"""Send prepared requests over kept connections of HTTP or gRPC, and have every answer judged."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import grpc
import grpc.aio
import httptools

from loader.errors import ShardrankError
from loadtest.load.config import parse_target
from loadtest.workloads.payloads import Headers, Payload, Pool

NEVER = -1.0
"""The time at which a request was sent that was not."""
# Servers close connections that were idle for 5 s and more; a request may not meet that.
IDLE_LIMIT_S = 4.0
READ_BYTES = 1 << 16
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # After a serving process was killed, its port is tried again at once, not after gRPC's second and more.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
)


class Failure(NamedTuple):
    """Why a request has no right answer: a kind as in `Measured.errors`, and that header of an HTTP answer."""

    kind: str
    message: str = ""
    retry_after: str = ""


@dataclass(slots=True, eq=False)
class Outgoing:
    """A request that is sent or about to be; times are CLOCK_MONOTONIC seconds.

    Attributes:
        number: of the request in its run, from 0; a sender sends its payload `number` modulo their count.
        offset_s: from the run's begin until `intended`, when it is due.
        reached_at: when the generator came to it.
        sent: when it was written to a connection; `NEVER` until then.
        verdict: what a judge keeps of its answer.
    """

    number: int
    offset_s: float
    intended: float
    deadline: float
    reached_at: float
    sent: float = NEVER
    finished_at: float = NEVER
    verdict: Any = None


Judge: TypeAlias = Callable[[Outgoing, bytes], Failure | None]
"""Checks an answer that came with success: an HTTP body or a gRPC message; None if it is right."""


async def make_sender(
    target: str,
    payloads: Iterable[Payload],
    judge: Judge,
    headers: Iterator[Headers] | None = None,
    *,
    connections: int = 512,
    channels: int = 4,
) -> Sender:
    """Make the sender of a target's URL: with at most so many connections of HTTP at a time, or channels of gRPC.

    To each request the next of the `headers` is added. Raises OSError: no such host.
    """
    headers, parts = itertools.repeat(()) if headers is None else headers, parse_target(target)
    if parts.scheme == "grpc":
        return GrpcSender(parts.netloc, list(payloads), judge, headers, max(1, channels))
    # Resolved once, so that no connection waits for its name again.
    port = parts.port or http.client.HTTP_PORT
    addresses = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    return HttpSender(parts.netloc, list(payloads), judge, headers, connections, str(addresses[0][4][0]), port)


def check_answer(pool: Pool, request: Outgoing, body: bytes) -> Failure | None:
    """Return why an answer has not one score for each candidate; None if it has."""
    try:
        scores = len(pool.scores(body))
    except ShardrankError as error:
        return Failure("bad_answer", str(error))
    expected = pool[request.number % len(pool)].num_candidates
    if scores != expected:
        return Failure("bad_answer", f"{scores} scores for a request of {expected} candidates")
    return None


@dataclass(eq=False)
class Sender(ABC):
    """Sends requests to one host and port over at most so many connections, of which `opened` were made so far.

    None is sent a second time.
    """

    host: str
    payloads: Sequence[Payload]
    judge: Judge
    headers: Iterator[Headers]
    connections: int

    opened = 0

    async def ask(self, request: Outgoing) -> Failure | None:
        """Send a request and wait for its answer, until its deadline. Returns its failure; None if it is right."""
        try:
            async with asyncio.timeout(request.deadline - time.monotonic()):
                answer = await self._exchange(request, request.number % len(self.payloads))
        except TimeoutError:
            answer = Failure("timeout")
        if request.finished_at == NEVER:
            request.finished_at = time.monotonic()
        return answer if isinstance(answer, Failure) else self.judge(request, answer)

    async def open(self, within_s: float) -> None:
        """Connect before the first request, as far as connections can be made in time."""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(within_s):
                await self._open()

    @abstractmethod
    async def aclose(self) -> None:
        """End all connections; no request may be in flight."""

    @abstractmethod
    async def _open(self) -> None: ...

    @abstractmethod
    async def _exchange(self, request: Outgoing, number: int) -> bytes | Failure:
        """Send payload `number`, note when that was and when its answer was complete, and return the answer."""


class _Response:
    """A response as httptools reads it; it calls `on_...`."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.body = bytearray()
        self.retry_after = ""
        self.is_complete = self.is_last = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self.retry_after = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        # The parser forgets it afterwards.
        self.is_complete, self.is_last = True, not self.parser.should_keep_alive()


class _Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since: float


@dataclass(eq=False)
class HttpSender(Sender):
    """A request goes out on a free connection; without one, a new one is opened, up to a limit.

    Beyond it requests wait in the order in which they came, and their waiting counts in their latency. Free connections
    take turns, so that every serving process behind the port gets some.
    """

    ip: str
    port: int

    def __post_init__(self) -> None:
        self._heads = []
        for payload in self.payloads:
            headers = ("host", self.host), ("content-length", len(payload.body)), *payload.headers
            lines = [f"POST {payload.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
            # Without the empty line, so that headers can be added.
            self._heads.append(("\r\n".join(lines) + "\r\n").encode("latin-1"))
        self._free = asyncio.Semaphore(self.connections)
        self._idle: deque[_Connection] = deque()

    async def aclose(self) -> None:
        """End all connections."""
        while self._idle:
            self._idle.popleft().writer.close()

    async def _open(self) -> None:
        # One after the other: of many that come at once, one process of a server whose processes share a listening
        # socket would accept all.
        while len(self._idle) < self.connections:
            self._idle.append(await self._connect())

    async def _exchange(self, request: Outgoing, number: int) -> bytes | Failure:
        lines = "".join([f"{name}: {value}\r\n" for name, value in next(self.headers)])
        buffers = self._heads[number], f"{lines}\r\n".encode("latin-1"), self.payloads[number].body
        async with self._free:
            try:
                reader, writer, _ = await self._connection()
            except OSError as error:
                return Failure("connect", str(error))
            response = _Response()
            try:
                request.sent = time.monotonic()
                writer.writelines(buffers)
                while not response.is_complete:
                    if not (data := await reader.read(READ_BYTES)):
                        raise ConnectionError("the connection ended before the answer")
                    response.parser.feed_data(data)
                request.finished_at = time.monotonic()
            except (OSError, httptools.HttpParserError) as error:
                return Failure("connection", str(error))
            finally:
                if response.is_complete and not response.is_last:
                    self._idle.append(_Connection(reader, writer, request.finished_at))
                else:
                    writer.close()
        status, body = response.parser.get_status_code(), bytes(response.body)
        if status == http.client.OK:
            return body
        return Failure(f"http_{status}", body.decode("utf-8", "replace"), response.retry_after)

    async def _connection(self) -> _Connection:
        """Return the connection that was idle for the longest time, or a new one."""
        while self._idle:
            connection = self._idle.popleft()
            if not connection.reader.at_eof() and time.monotonic() - connection.idle_since < IDLE_LIMIT_S:
                return connection
            connection.writer.close()
        return await self._connect()

    async def _connect(self) -> _Connection:
        connection = _Connection(*await asyncio.open_connection(self.ip, self.port), time.monotonic())
        self.opened += 1
        return connection


@dataclass(eq=False)
class GrpcSender(Sender):
    """Every request goes out at once over several channels in turn: a channel carries many at a time."""

    def __post_init__(self) -> None:
        # Each channel is one connection, opened again when it breaks.
        self.opened = self.connections
        # With an option of its own, a channel has a connection of its own, and reaches another process of the port.
        self._channels = [
            grpc.aio.insecure_channel(self.host, options=[*CHANNEL_OPTIONS, ("shardrank.channel", number)])
            for number in range(self.opened)
        ]
        paths = {payload.path for payload in self.payloads}
        calls = [{path: channel.unary_unary(path, None, None) for path in paths} for channel in self._channels]
        self._calls: Iterator[dict[str, Any]] = itertools.cycle(calls)

    async def aclose(self) -> None:
        """End all channels."""
        for channel in self._channels:
            await channel.close(None)

    async def _open(self) -> None:
        await asyncio.gather(*(channel.channel_ready() for channel in self._channels))

    async def _exchange(self, request: Outgoing, number: int) -> bytes | Failure:
        payload = self.payloads[number]
        request.sent = time.monotonic()
        left_s = max(request.deadline - request.sent, 0.001)
        try:
            call = next(self._calls)[payload.path]
            answer: bytes = await call(payload.body, timeout=left_s, metadata=next(self.headers))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return Failure("timeout", error.details() or "")
            return Failure(f"grpc_{error.code().name.lower()}", error.details() or "")
        request.finished_at = time.monotonic()
        return answer
