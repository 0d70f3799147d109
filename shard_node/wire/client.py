"""The shard client: a shard behind a socket, with the interface of one in this process."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pydantic import Field

from loader.access_counts import AccessCounts
from loader.errors import DeadlineExceededError, OverloadedError
from loader.snapshot.tables import Frozen
from shard_node.answer import FLOAT32_SUMS, Answer, ReplyEncoding
from shard_node.bags import KeyedBags
from shard_node.errors import CertificateRoleError, NodeUnavailableError, RemoteError, TlsHandshakeError, WireError
from shard_node.node import NodeInfo
from shard_node.tracing import TRACED_LOOKUP, SpanContext
from shard_node.wire.address import Address
from shard_node.wire.frame import (
    DEFAULT_MAX_FRAME_BYTES,
    MAX_BODY_BYTES,
    MAX_BUDGET_US,
    Buffer,
    Frame,
    FrameConnection,
    FrameType,
)
from shard_node.wire.messages import (
    decode_answer,
    decode_counts_answer,
    decode_error,
    decode_info_answer,
    encode_counts,
    encode_info,
    encode_pool,
)
from shard_node.wire.tls import NODES, SHUTDOWN_TIMEOUT_S, FileBacked, TlsContext, TlsPeers, tls_error

logger = logging.getLogger(__name__)
Reply = TypeVar("Reply")

# A node whose host has vanished acknowledges nothing; the kernel's own limit is a quarter of an hour.
UNACKNOWLEDGED_TIMEOUT_MS = 2000
FIRST_BACKOFF_S = 0.02
# More doublings than any backoff needs, few enough for a float.
MAX_DOUBLINGS = 32


class ClientLimits(Frozen):
    """What a client sends and takes: frames, and requests without an answer, of which more fail at once.

    With `max_unsent_bytes` that the node leaves unread new requests wait.
    """

    max_frame_bytes: int = Field(default=DEFAULT_MAX_FRAME_BYTES, ge=1024, le=MAX_BODY_BYTES)
    max_in_flight: int = Field(default=1024, ge=1)
    max_unsent_bytes: int = Field(default=16 << 20, ge=1)
    max_backoff_ms: int = Field(default=500, ge=1)
    info_timeout_ms: int = Field(default=5000, ge=1)


class ClientConnection(FrameConnection):
    """Sends requests and hands each answer to whoever waits for it. Answers that nobody waits for are dropped.

    `going_away` is told when the node wants no new requests on this connection; `ended` once when the connection is
    gone, with the reason.
    """

    def __init__(
        self,
        address: Address,
        limits: ClientLimits,
        going_away: Callable[[ClientConnection], None],
        ended: Callable[[ClientConnection, NodeUnavailableError], None],
        peers: TlsPeers | None,
    ) -> None:
        super().__init__(limits.max_frame_bytes, limits.max_unsent_bytes)
        self._address = address
        self._peers = peers
        self._going_away = going_away
        self._ended = ended
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._last_request_id = 0
        self._refusal: Exception | None = None
        self._is_going_away = False
        self._writable: asyncio.Future[None] | None = None
        self.has_answered = False

    @property
    def is_usable(self) -> bool:
        """Whether a new request may be sent."""
        return self.is_open and not self._is_going_away

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits for an answer."""
        return not self._waiting

    def next_request_id(self) -> int:
        """Return a number for the next request."""
        self._last_request_id += 1
        return self._last_request_id

    async def writable(self, timeout_s: float) -> None:
        """Wait until the node has read enough of what was sent before. Raises DeadlineExceededError."""
        if self._writable is None:
            return
        done, _ = await asyncio.wait({self._writable}, timeout=max(timeout_s, 0.0))
        if not done:
            raise DeadlineExceededError(f"{self._address}: deadline passed before the request could be sent")

    async def exchange(self, request_id: int, buffers: Sequence[Buffer], timeout_s: float) -> Frame:
        """Send a request and wait for its answer. Raises DeadlineExceededError, NodeUnavailableError."""
        answer: asyncio.Future[Frame] = self._loop.create_future()
        self._waiting[request_id] = answer
        timer = self._loop.call_later(timeout_s, self._expire, request_id)
        try:
            if not self.send(buffers):
                raise NodeUnavailableError(f"{self._address}: connection lost before the request was sent")
            return await answer
        finally:
            timer.cancel()
            self._waiting.pop(request_id, None)
            self._close_if_done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the socket up; leave a peer whose certificate is not a node's."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_TIMEOUT_MS)
        if self._peers is not None and self.certificate:
            try:
                self._peers.roles(self.certificate, str(self._address), NODES)
            except CertificateRoleError as error:
                self._refusal = error
                self.abort()

    def frame_received(self, frame: Frame) -> None:
        """Hands an answer to whoever waits for it."""
        if frame.header.request_id:
            self.has_answered = True
            answer = self._waiting.get(frame.header.request_id)
            if answer is not None and not answer.done():
                answer.set_result(frame)
        elif frame.header.frame_type == FrameType.GOAWAY:
            self._is_going_away = True
            self._going_away(self)
            self._close_if_done()
        elif frame.header.frame_type == FrameType.ERROR:
            # About the connection as a whole, which the node closes within a second: nobody waits for that.
            try:
                self._refusal = decode_error(frame)
            except WireError as error:
                self._refusal = error
            self.abort()
        else:
            self.stream_broken(WireError(f"frame type {frame.header.frame_type} without a request id"), 0)

    def stream_broken(self, error: WireError, request_id: int) -> None:
        """End the connection: an answer that is too long fails its own request, everything else fails all."""
        logger.warning("closing the connection to %s: %s", self._address, error)
        answer = self._waiting.get(request_id)
        if error.kind == "frame_too_large" and answer is not None and not answer.done():
            answer.set_exception(error)
        self._refusal = error
        self.abort()

    def pause_writing(self) -> None:
        """Has new requests wait: the node does not read."""
        if self._writable is None:
            self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        """Lets requests go on."""
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None

    def connection_ended(self, error: Exception | None) -> None:
        """Fails everything that waits."""
        failure = _unavailable(self._refusal or error or ConnectionError("closed by the node"))
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(_prefixed(f"{self._address}: connection lost before the answer came", failure))
        self.resume_writing()
        self._ended(self, failure)

    def _expire(self, request_id: int) -> None:
        answer = self._waiting.get(request_id)
        if answer is not None and not answer.done():
            answer.set_exception(DeadlineExceededError(f"{self._address}: deadline passed before the answer came"))

    def _close_if_done(self) -> None:
        if self._is_going_away and not self._waiting:
            self.close()


class ShardClient:
    """A shard behind a socket. Implements `Shard`; belongs to the event loop that it is first used on.

    There is one connection. The first call makes it, and its loss starts making it again, so that no request pays for
    finding out whether a node is back. Calls wait for the first attempt, bounded by their own time; once it has failed
    they fail at once, so that another replica can be asked, until a later attempt succeeds. Attempts are 20 ms apart at
    first, then twice as long each time. A call that fails with NodeUnavailableError may be repeated anywhere: lookups
    change nothing.

    Deadlines are on `clock`, monotonic seconds. `tls` is spoken to a TCP address, None for plain text. When the number
    of `connections` made so far changes, another process may answer.
    """

    def __init__(
        self,
        address: Address,
        *,
        connect_timeout_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        limits: ClientLimits | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        tls: FileBacked[TlsContext] | None = None,
    ) -> None:
        self.address = address
        self.in_flight = 0
        self.connections = 0
        # On which connection the node told which shard it is, and whether it takes traces: another one may be another.
        self._told = -1, 0, False
        self._connect_timeout_s = connect_timeout_s
        self._clock = clock
        self._limits = limits or ClientLimits()
        self._sleep = sleep
        self._tls = tls
        self._connection: ClientConnection | None = None
        # Every connection that has not ended, those that are going away included.
        self._open: set[ClientConnection] = set()
        self._connecting: asyncio.Task[None] | None = None
        self._first_attempt: asyncio.Future[None] | None = None
        self._num_failures = 0
        self._failure = NodeUnavailableError("not connected yet")
        self._is_closed = False

    @property
    def available(self) -> bool:
        """Whether there is a connection, or none was needed so far. While False, ask another replica."""
        if self._usable() is not None:
            return True
        return not self._is_closed and self._connecting is None and self._connection is None and not self._num_failures

    async def pool(
        self, model: str, version: int, bags: KeyedBags, deadline: float, forms: ReplyEncoding = FLOAT32_SUMS
    ) -> Answer:
        """As `Shard.pool`, but whether the answer fits the bags is not checked. It is views into the received frame.

        The arrays of `bags` must not be changed afterwards: they may still be on their way out. Raises
        DeadlineExceededError; NodeUnavailableError without a connection, or if it was lost; OverloadedError for too
        many requests in flight, in the node or here; WireError for a frame longer than `max_frame_bytes`; RemoteError
        if the node failed or its answer is malformed; and whatever else it answered, as the class of its kind.
        """
        lookup = TRACED_LOOKUP.get()
        if lookup is None:
            return await self._pool(model, version, bags, deadline, forms)
        attributes: dict[str, str | int] = {"server.address": str(self.address)}
        if self._told[0] == self.connections:
            attributes["shardrank.shard"] = self._told[1]
        with lookup.call_span(attributes) as context:
            return await self._pool(model, version, bags, deadline, forms, context)

    async def _pool(
        self,
        model: str,
        version: int,
        bags: KeyedBags,
        deadline: float,
        forms: ReplyEncoding,
        trace: SpanContext | None = None,
    ) -> Answer:
        def encode(request_id: int, budget_us: int) -> list[Buffer]:
            # Only now it is certain who gets it: the call may have waited for another connection.
            takes_trace = self._told[0] == self.connections and self._told[2]
            return encode_pool(request_id, budget_us, model, version, bags, forms, trace if takes_trace else None)

        expected = (FrameType.POOLED, FrameType.STORED) if forms.stored else (FrameType.POOLED,)
        return await self._ask(encode, expected, decode_answer, deadline)

    async def info(self) -> NodeInfo:
        """Return what the node serves. Raises as `pool`."""
        deadline, connections = self._clock() + self._limits.info_timeout_ms / 1e3, self.connections
        info = await self._ask(
            lambda request_id, _: encode_info(request_id),
            (FrameType.INFO_ANSWER,),
            lambda frame, _: decode_info_answer(frame),
            deadline,
        )
        if connections == self.connections:
            self._told = connections, info.identity.shard_index, info.takes_traces
        return info

    async def counts(self, model: str, version: int, deadline: float) -> dict[str, AccessCounts]:
        """Return how often rows of a version were looked up on the node, by table. Raises as `pool`."""
        return await self._ask(
            lambda request_id, budget_us: encode_counts(request_id, budget_us, model, version),
            (FrameType.COUNTS_ANSWER,),
            lambda frame, _: decode_counts_answer(frame),
            deadline,
        )

    async def close(self) -> None:
        """Cuts every connection and makes no new one; calls in flight fail with NodeUnavailableError. Idempotent."""
        self._is_closed = True
        self._failure = NodeUnavailableError("the client is closed")
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
            # Cancelled before it began, it had no chance to do this itself.
            self._connecting = None
            self._end_first_attempt()
        ended = [connection.closed for connection in self._open]
        for connection in tuple(self._open):
            connection.abort()
        if ended:
            await asyncio.wait(ended)

    async def _ask(
        self,
        encode: Callable[[int, int], list[Buffer]],
        expected: tuple[FrameType, ...],
        decode: Callable[[Frame, int], Reply],
        deadline: float,
    ) -> Reply:
        """Send a request and return its decoded answer; `decode` takes the frame and the bytes of the request."""
        if self.in_flight >= self._limits.max_in_flight:
            raise OverloadedError(
                f"{self.address}: {self.in_flight} requests in flight, at most {self._limits.max_in_flight} are sent",
                kind="node_overloaded",
            )
        self.in_flight += 1
        try:
            connection = self._usable() or await self._connect(deadline - self._clock())
            await connection.writable(deadline - self._clock())
            request_id = connection.next_request_id()
            timeout_s = min(deadline - self._clock(), MAX_BUDGET_US / 1e6)
            if timeout_s <= 0:
                raise DeadlineExceededError(f"{self.address}: deadline passed {-timeout_s * 1e3:.1f} ms before sending")
            buffers = encode(request_id, max(int(timeout_s * 1e6), 1))
            size = sum(map(len, buffers))
            if size > self._limits.max_frame_bytes:
                raise WireError(
                    f"request has {size} bytes, at most {self._limits.max_frame_bytes} are sent", kind="frame_too_large"
                )
            frame = await connection.exchange(request_id, buffers, timeout_s)
        finally:
            self.in_flight -= 1
        if frame.header.frame_type not in (*expected, FrameType.ERROR):
            raise RemoteError(f"{self.address}: frame type {frame.header.frame_type} is no answer to this request")
        try:
            if frame.header.frame_type != FrameType.ERROR:
                return decode(frame, size)
            error = decode_error(frame)
        except WireError as malformed:
            raise RemoteError(f"{self.address}: malformed answer: {malformed}") from malformed
        raise error

    def _usable(self) -> ClientConnection | None:
        connection = self._connection
        return connection if connection is not None and connection.is_usable else None

    async def _connect(self, timeout_s: float) -> ClientConnection:
        if self._connecting is None and self._connection is None:
            self._start()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    undecided = self._first_attempt
                    if self._connection is not None and not self._connection.is_usable:
                        undecided = self._connection.closed
                    if undecided is None:
                        break
                    await asyncio.wait({undecided})
        except TimeoutError:
            raise DeadlineExceededError(f"{self.address}: deadline passed while connecting") from None
        connection = self._usable()
        if connection is None:
            raise _prefixed(f"{self.address}: not connected", self._failure)
        return connection

    def _start(self, pause_s: float = 0.0) -> None:
        if self._is_closed or self._connecting is not None:
            return
        loop = asyncio.get_running_loop()
        if not self._num_failures:
            self._first_attempt = loop.create_future()
        self._connecting = loop.create_task(self._connect_until_done(pause_s))

    async def _connect_until_done(self, pause_s: float) -> None:
        try:
            while True:
                if pause_s:
                    await self._sleep(pause_s)
                connection = await self._attempt()
                if connection is not None and not connection.closed.done():
                    self._connection = connection
                    self.connections += 1
                    return
                pause_s = self._next_pause_s()
                self._end_first_attempt()
        finally:
            self._connecting = None
            self._end_first_attempt()

    async def _attempt(self) -> ClientConnection | None:
        loop = asyncio.get_running_loop()
        made: ClientConnection | None = None
        connection: ClientConnection | None = None
        context = None if self._tls is None else self._tls.get()

        def make() -> ClientConnection:
            nonlocal made
            peers = None if context is None else context.peers
            made = ClientConnection(self.address, self._limits, self._going_away, self._ended, peers)
            self._open.add(made)
            return made

        try:
            async with asyncio.timeout(self._connect_timeout_s):
                host, port = self.address.host, self.address.port
                if self.address.is_unix:
                    _, connection = await loop.create_unix_connection(make, self.address.path)
                elif context is None:
                    _, connection = await loop.create_connection(make, host, port)
                else:
                    _, connection = await loop.create_connection(
                        make, host, port, ssl=context, ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S
                    )
        except TimeoutError:
            self._failure = NodeUnavailableError(f"no connection within {self._connect_timeout_s} s")
        except OSError as error:
            self._failure = _unavailable(error)
        except Exception as error:
            # Not the network's doing, so not expected here: the log says where it came from.
            logger.exception("connecting to %s failed", self.address)
            self._failure = NodeUnavailableError(f"{type(error).__name__}: {error}")
        else:
            return connection
        finally:
            if made is not None and (connection is None or connection.closed.done()):
                # The attempt may have succeeded just when its time was over.
                made.abort()
                if not made.was_made:
                    self._open.discard(made)
        return None

    def _going_away(self, connection: ClientConnection) -> None:
        # Of a node that drains, it stays open until its answers are there, for no new requests.
        if self._connection is connection:
            self._connection = None
            self._failure = NodeUnavailableError("the node is draining")
            self._num_failures = 0
            # An idle connection may have been asked to go for that alone: calls wait for the next one.
            self._start(0.0 if connection.is_idle else self._next_pause_s())

    def _ended(self, connection: ClientConnection, failure: NodeUnavailableError) -> None:
        self._open.discard(connection)
        # An attempt that goes on while one ends: it was made and lost before the attempt could say so.
        if not self._is_closed and (self._connection is connection or self._connecting is not None):
            self._failure = _prefixed("connection lost", failure)
        if self._connection is not connection:
            return
        self._connection = None
        if connection.has_answered:
            # It worked until now: the first attempt to get it back need not wait.
            self._num_failures = 0
            self._start()
        else:
            self._start(self._next_pause_s())

    def _next_pause_s(self) -> float:
        pause_s = min(FIRST_BACKOFF_S * 2.0**self._num_failures, self._limits.max_backoff_ms / 1e3)
        self._num_failures = min(self._num_failures + 1, MAX_DOUBLINGS)
        return pause_s

    def _end_first_attempt(self) -> None:
        if self._first_attempt is not None:
            self._first_attempt.set_result(None)
            self._first_attempt = None


def _unavailable(error: BaseException) -> NodeUnavailableError:
    if isinstance(error, ssl.SSLError):
        return tls_error(error)
    return error if isinstance(error, TlsHandshakeError) else NodeUnavailableError(str(error) or type(error).__name__)


def _prefixed(text: str, failure: NodeUnavailableError) -> NodeUnavailableError:
    return type(failure)(f"{text}: {failure}", kind=failure.kind)
