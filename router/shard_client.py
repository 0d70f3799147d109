"""A shard node behind a socket: requests and replies on a connection, which is made again when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

from pydantic import Field

from loader.access_counts import AccessCounts
from loader.errors import DeadlineExceededError, OverloadedError, ShardrankError
from loader.snapshot.tables import Frozen
from shard_node.errors import CertificateRoleError, NodeUnavailableError, RemoteError, TlsHandshakeError, WireError
from shard_node.node import NodeInfo
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
    decode_counts_answer,
    decode_error,
    decode_info_answer,
    encode_counts,
    encode_info,
)
from shard_node.wire.tls import NODES, SHUTDOWN_TIMEOUT_S, FileBacked, TlsContext, TlsPeers, tls_error

logger = logging.getLogger(__name__)
Decoded = TypeVar("Decoded")

# A node whose host has vanished acknowledges nothing; the kernel's limit is a quarter of an hour.
UNACKNOWLEDGED_TIMEOUT_MS = 2000
INFO_TIMEOUT_S = 5.0
FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 0.5
# More doublings than any backoff needs, few enough for a float.
MAX_DOUBLINGS = 32


class ClientLimits(Frozen):
    """Limits of a connection: bytes of a frame, requests in flight (more fail at once), and bytes that the node has
    not read yet, above which new requests wait.
    """

    max_frame_bytes: int = Field(default=DEFAULT_MAX_FRAME_BYTES, ge=1024, le=MAX_BODY_BYTES)
    max_in_flight: int = Field(default=1024, ge=1)
    max_unsent_bytes: int = Field(default=16 << 20, ge=1)


Reply: TypeAlias = Frame | ShardrankError
"""What a request ends with: a frame, or why there is none."""


class ShardConnection(FrameConnection):
    """One connection to a node. A reply that is not awaited any more is dropped.

    `going_away` is called when the node accepts no new requests on this connection; `lost` once when the connection
    is gone, with the reason.

    Attributes:
        blocked: until the node has read enough of what was sent before; None while requests may be sent.
        has_replied: whether the node has replied to any request.
    """

    def __init__(
        self,
        address: Address,
        limits: ClientLimits,
        going_away: Callable[[ShardConnection], None],
        lost: Callable[[ShardConnection, NodeUnavailableError], None],
        peers: TlsPeers | None,
    ) -> None:
        super().__init__(limits.max_frame_bytes, limits.max_unsent_bytes)
        self._address = address
        self._limits = limits
        self._peers = peers
        self._going_away = going_away
        self._lost = lost
        self._waiting: dict[int, Callable[[Reply], None]] = {}
        self._last_request_id = 0
        self._refusal: Exception | None = None
        self._is_going_away = False
        self.blocked: asyncio.Future[None] | None = None
        self.has_replied = False

    @property
    def is_idle(self) -> bool:
        """Whether no request is in flight."""
        return not self._waiting

    def start(
        self, on_reply: Callable[[Reply], None], encode: Callable[..., list[Buffer]], *arguments: Any
    ) -> tuple[int, int]:
        """Send the request `encode(request_id, *arguments)`; return its id and its size in bytes.

        `on_reply` is called once, unless `forget` is called before. Raises OverloadedError for too many requests in
        flight, WireError for a frame that is too long, NodeUnavailableError if the connection is closing; then nothing
        was sent.
        """
        if len(self._waiting) >= self._limits.max_in_flight:
            raise OverloadedError(
                f"{self._address}: {len(self._waiting)} requests in flight, the limit is {self._limits.max_in_flight}",
                kind="node_overloaded",
            )
        self._last_request_id = request_id = self._last_request_id + 1
        buffers = encode(request_id, *arguments)
        size = sum(map(len, buffers))
        if size > self._limits.max_frame_bytes:
            raise WireError(
                f"request has {size} bytes, the limit is {self._limits.max_frame_bytes}", kind="frame_too_large"
            )
        if not self.send(buffers):
            raise NodeUnavailableError(f"{self._address}: connection lost before the request was sent")
        self._waiting[request_id] = on_reply
        return request_id, size

    def forget(self, request_id: int) -> None:
        """Drop the reply to a request, if there is none yet."""
        self._waiting.pop(request_id, None)
        self._close_if_done()

    def decoded(
        self, reply: Reply, expected: tuple[FrameType, ...], decode: Callable[..., Decoded], *arguments: Any
    ) -> Decoded:
        """Return `decode(reply, *arguments)`. Raises the error that the reply is; RemoteError if it is malformed."""
        if isinstance(reply, ShardrankError):
            raise reply
        frame_type = reply.header.frame_type
        try:
            if frame_type in expected:
                return decode(reply, *arguments)
            error = decode_error(reply) if frame_type == FrameType.ERROR else None
        except WireError as malformed:
            raise RemoteError(f"{self._address}: malformed reply: {malformed}") from malformed
        raise error or RemoteError(f"{self._address}: frame type {frame_type} is no reply to this request")

    async def exchange(
        self, expected: FrameType, decode: Callable[[Frame], Decoded], encode: Callable[..., list[Buffer]], *args: Any
    ) -> Decoded:
        """Send a request and return its decoded reply; the caller limits the time. Raises as `start` and `decoded`."""
        reply: asyncio.Future[Reply] = self._loop.create_future()
        request_id, _ = self.start(lambda outcome: reply.done() or reply.set_result(outcome), encode, *args)
        try:
            return self.decoded(await reply, (expected,), decode)
        finally:
            self.forget(request_id)

    async def info(self) -> NodeInfo:
        """Return what the node serves, by this connection."""
        return await self.exchange(FrameType.INFO_ANSWER, decode_info_answer, encode_info)

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
        """Pass a reply on."""
        header = frame.header
        if header.request_id:
            self.has_replied = True
            on_reply = self._waiting.pop(header.request_id, None)
            if on_reply is not None:
                on_reply(frame)
                self._close_if_done()
        elif header.frame_type == FrameType.GOAWAY:
            self._is_going_away = True
            self._going_away(self)
            self._close_if_done()
        elif header.frame_type == FrameType.ERROR:
            # About the connection, which the node closes within a second: there is nothing to wait for.
            try:
                self._refusal = decode_error(frame)
            except WireError as error:
                self._refusal = error
            self.abort()
        else:
            self.stream_broken(WireError(f"frame type {header.frame_type} without a request id"), 0)

    def stream_broken(self, error: WireError, request_id: int) -> None:
        """End the connection: a reply that is too long fails its request, everything else fails all."""
        logger.warning("closing the connection to %s: %s", self._address, error)
        self._refusal = error
        self.abort()
        if error.kind == "frame_too_large" and (on_reply := self._waiting.pop(request_id, None)) is not None:
            on_reply(error)

    def pause_writing(self) -> None:
        """Let new requests wait: the node does not read."""
        if self.blocked is None:
            self.blocked = self._loop.create_future()

    def resume_writing(self) -> None:
        """Let requests go on."""
        if self.blocked is not None:
            self.blocked.set_result(None)
            self.blocked = None

    def connection_ended(self, error: Exception | None) -> None:
        """Fail every request in flight."""
        failure = _unavailable(self._refusal or error or ConnectionError("closed by the node"))
        waiting, self._waiting = self._waiting, {}
        self._lost(self, failure)
        self.resume_writing()
        for on_reply in waiting.values():
            on_reply(_prefixed(f"{self._address}: connection lost before the reply", failure))

    def _close_if_done(self) -> None:
        if self._is_going_away and not self._waiting:
            self.close()


class ShardClient:
    """The connection to one shard node. Belongs to the event loop that it is first used on.

    The first use makes the connection, and its loss starts making it again, so that no request pays for finding out
    whether a node is back. Users wait for the first attempt; once it has failed they fail at once, so that another
    replica can be used, until a later attempt succeeds. Attempts are 20 ms apart at first, then twice as long each
    time, up to 0.5 s. `tls` is for TCP addresses, None for plain text.

    Attributes:
        connection: where requests are sent; None while there is none that accepts them.
        num_connections: made so far.
    """

    def __init__(
        self,
        address: Address,
        *,
        connect_timeout_s: float = 1.0,
        limits: ClientLimits | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        tls: FileBacked[TlsContext] | None = None,
    ) -> None:
        self.address = address
        self.connection: ShardConnection | None = None
        self.num_connections = 0
        self._connect_timeout_s = connect_timeout_s
        self._limits = limits or ClientLimits()
        self._sleep = sleep
        self._tls = tls
        # Every connection that has not ended, those that are going away included.
        self._open: set[ShardConnection] = set()
        self._connecting: asyncio.Task[None] | None = None
        self._first_attempt: asyncio.Future[None] | None = None
        self._num_failures = 0
        self._failure = NodeUnavailableError("not connected yet")
        self._is_closed = False

    @property
    def is_available(self) -> bool:
        """Whether there is a connection, or none was needed so far. While False, use another replica."""
        return self.connection is not None or not (self._is_closed or self._connecting or self._num_failures)

    async def ready(self) -> ShardConnection:
        """Wait for a connection on which a request may be sent now. Raises NodeUnavailableError if there is none."""
        if self.connection is None:
            self._start()
        while True:
            connection = self.connection
            if connection is None:
                event = self._first_attempt
            elif connection.is_open:
                event = connection.blocked
                if event is None:
                    return connection
            else:
                event = connection.closed
            if event is None:
                raise _prefixed(f"{self.address}: not connected", self._failure)
            await asyncio.wait({event})

    async def info(self, timeout_s: float = INFO_TIMEOUT_S) -> NodeInfo:
        """Return what the node serves. Raises as `ShardConnection.exchange`, and DeadlineExceededError."""
        async with within(timeout_s, f"{self.address}: no reply to INFO"):
            return await (await self.ready()).info()

    async def counts(self, model: str, version: int, timeout_s: float) -> dict[str, AccessCounts]:
        """Return how often rows of a version were looked up on the node, by table. Raises as `info`."""
        budget_us = min(int(timeout_s * 1e6), MAX_BUDGET_US)
        async with within(timeout_s, f"{self.address}: no reply to COUNTS"):
            connection, request = await self.ready(), (encode_counts, budget_us, model, version)
            return await connection.exchange(FrameType.COUNTS_ANSWER, decode_counts_answer, *request)

    async def close(self) -> None:
        """Cut every connection and make no new one; requests in flight fail with NodeUnavailableError. Idempotent."""
        self._is_closed = True
        self._failure = NodeUnavailableError("the client is closed")
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
            # Cancelled before its first step, it had no chance to do this itself.
            self._connecting = None
            self._end_first_attempt()
        closed = [connection.closed for connection in self._open]
        for connection in tuple(self._open):
            connection.abort()
        if closed:
            await asyncio.wait(closed)

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
                    self.connection = connection
                    self.num_connections += 1
                    return
                pause_s = self._next_pause_s()
                self._end_first_attempt()
        finally:
            self._connecting = None
            self._end_first_attempt()

    async def _attempt(self) -> ShardConnection | None:
        loop = asyncio.get_running_loop()
        made: ShardConnection | None = None
        connection: ShardConnection | None = None
        context = None if self._tls is None else self._tls.get()

        def make() -> ShardConnection:
            nonlocal made
            peers = None if context is None else context.peers
            made = ShardConnection(self.address, self._limits, self._going_away, self._lost, peers)
            self._open.add(made)
            return made

        try:
            async with asyncio.timeout(self._connect_timeout_s):
                if self.address.is_unix:
                    _, connection = await loop.create_unix_connection(make, self.address.path)
                else:
                    shutdown_s = None if context is None else SHUTDOWN_TIMEOUT_S
                    _, connection = await loop.create_connection(
                        make, self.address.host, self.address.port, ssl=context, ssl_shutdown_timeout=shutdown_s
                    )
        except TimeoutError:
            self._failure = NodeUnavailableError(f"no connection within {self._connect_timeout_s} s")
        except OSError as error:
            self._failure = _unavailable(error)
        except Exception as error:
            # Not the network's doing, so not expected: the log has the traceback.
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

    def _going_away(self, connection: ShardConnection) -> None:
        # The connection to a node that drains stays open for its replies, not for new requests.
        if self.connection is connection:
            self.connection = None
            self._failure = NodeUnavailableError("the node is draining")
            self._num_failures = 0
            # An idle connection may end for that alone: requests wait for the next one.
            self._start(0.0 if connection.is_idle else self._next_pause_s())

    def _lost(self, connection: ShardConnection, failure: NodeUnavailableError) -> None:
        self._open.discard(connection)
        # During an attempt: its connection was made and lost before the attempt could report it.
        if not self._is_closed and (self.connection is connection or self._connecting is not None):
            self._failure = _prefixed("connection lost", failure)
        if self.connection is not connection:
            return
        self.connection = None
        if connection.has_replied:
            # It worked until now: the first attempt to get it back need not wait.
            self._num_failures = 0
        self._start(0.0 if connection.has_replied else self._next_pause_s())

    def _next_pause_s(self) -> float:
        pause_s = min(FIRST_BACKOFF_S * 2.0**self._num_failures, MAX_BACKOFF_S)
        self._num_failures = min(self._num_failures + 1, MAX_DOUBLINGS)
        return pause_s

    def _end_first_attempt(self) -> None:
        if self._first_attempt is not None:
            self._first_attempt.set_result(None)
            self._first_attempt = None


@contextlib.asynccontextmanager
async def within(timeout_s: float, message: str) -> AsyncIterator[None]:
    """Raise DeadlineExceededError unless the block ends within a time."""
    try:
        async with asyncio.timeout(max(timeout_s, 0.0)):
            yield
    except TimeoutError:
        raise DeadlineExceededError(f"{message} within {timeout_s:.3g} s") from None


def _unavailable(error: BaseException) -> NodeUnavailableError:
    if isinstance(error, ssl.SSLError):
        return tls_error(error)
    return error if isinstance(error, TlsHandshakeError) else NodeUnavailableError(str(error) or type(error).__name__)


def _prefixed(text: str, failure: NodeUnavailableError) -> NodeUnavailableError:
    return type(failure)(f"{text}: {failure}", kind=failure.kind)
