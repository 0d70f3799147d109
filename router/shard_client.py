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
from shard_node.training.push import Push
from shard_node.wire import frame as frames
from shard_node.wire import messages
from shard_node.wire.address import Address
from shard_node.wire.frame import Frame, FrameType
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
Reply: TypeAlias = Frame | ShardrankError
"""What a request ends with: a frame, or why there is none."""


class ClientLimits(Frozen):
    """Limits of a connection; above `max_unsent_bytes` that the node has not read yet new requests wait."""

    max_frame_bytes: int = Field(default=frames.DEFAULT_MAX_FRAME_BYTES, ge=1024, le=frames.MAX_BODY_BYTES)
    max_in_flight: int = Field(default=1024, ge=1)
    max_unsent_bytes: int = Field(default=16 << 20, ge=1)


class ShardConnection(frames.FrameConnection):
    """One connection to a node. A reply that is not awaited any more is dropped.

    `on_leave` is called when no new requests may be sent on this connection, with the reason; `on_end` once when the
    connection is gone.

    Attributes:
        blocked: until the node has read enough of what was sent before; None while requests may be sent.
        failure: why the connection has ended; None before.
        has_replied: whether the node has replied to any request.
        is_leaving: whether no new requests may be sent on it.
        takes_traces: whether the node reported so.
    """

    def __init__(
        self,
        address: Address,
        limits: ClientLimits,
        peers: TlsPeers | None,
        on_leave: Callable[[ShardConnection, str], None],
        on_end: Callable[[ShardConnection], None],
    ) -> None:
        super().__init__(limits.max_frame_bytes, limits.max_unsent_bytes)
        self._address = address
        self._limits = limits
        self._peers = peers
        self._on_leave = on_leave
        self._on_end = on_end
        self._waiting: dict[int, Callable[[Reply], None]] = {}
        self._last_request_id = 0
        self._refusal: Exception | None = None
        self.is_leaving = False
        self.blocked: asyncio.Future[None] | None = None
        self.failure: NodeUnavailableError | None = None
        self.has_replied = False
        self.takes_traces = False

    @property
    def is_idle(self) -> bool:
        """Whether no request is in flight."""
        return not self._waiting

    def start(
        self, on_reply: Callable[[Reply], None], encode: Callable[..., list[frames.Buffer]], *arguments: Any
    ) -> tuple[int, int]:
        """Send the request `encode(request_id, *arguments)`; return its id and its size in bytes.

        `on_reply` is called once, unless `forget` is called before. Raises OverloadedError for too many requests in
        flight, WireError for a frame that is too long, NodeUnavailableError if the connection is closing.
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
            error = messages.decode_error(reply) if frame_type == FrameType.ERROR else None
        except WireError as malformed:
            raise RemoteError(f"{self._address}: malformed reply: {malformed}") from malformed
        raise error or RemoteError(f"{self._address}: frame type {frame_type} is no reply to this request")

    async def exchange(
        self, expected: tuple[FrameType, ...], decode: Callable[[Frame], Decoded], *request: Any
    ) -> Decoded:
        """Send a request and return its decoded reply; the caller limits the time. Raises as `start` and `decoded`."""
        reply: asyncio.Future[Reply] = self._loop.create_future()
        request_id, _ = self.start(reply.set_result, *request)
        try:
            return self.decoded(await asyncio.shield(reply), expected, decode)
        finally:
            self.forget(request_id)

    async def info(self) -> NodeInfo:
        """Return what the node serves."""
        return await self.exchange((FrameType.INFO_ANSWER,), messages.decode_info_answer, messages.encode_info)

    def leave(self, reason: str) -> None:
        """Send no new requests on this connection, and close it after the last reply."""
        if not self.is_leaving:
            self.is_leaving = True
            self._on_leave(self, reason)
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
        """Pass a reply on."""
        header = frame.header
        if header.request_id:
            self.has_replied = True
            if (on_reply := self._waiting.pop(header.request_id, None)) is not None:
                on_reply(frame)
                self._close_if_done()
        elif header.frame_type == FrameType.GOAWAY:
            self.leave("the node is draining")
        elif header.frame_type == FrameType.ERROR:
            # About the connection, which the node closes within a second: there is nothing to wait for.
            try:
                self._refusal = messages.decode_error(frame)
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
        cause = _unavailable(self._refusal or error or ConnectionError("closed by the node"))
        self.failure = type(cause)(f"connection lost: {cause}", kind=cause.kind)
        failed = type(cause)(f"{self._address}: {self.failure}", kind=cause.kind)
        waiting, self._waiting = self._waiting, {}
        self._on_end(self)
        self.resume_writing()
        for on_reply in waiting.values():
            on_reply(failed)

    def _close_if_done(self) -> None:
        if self.is_leaving and not self._waiting:
            self.close()


class ShardClient:
    """The connection to one shard node. Belongs to one event loop.

    `connect` makes it, and its loss starts making it again, so that no request pays for finding out whether a node is
    back. Who needs it waits for the first attempt; once that has failed others fail at once, so that another replica
    can be used, until a later attempt succeeds. Attempts are 20 ms apart at first, then twice as long each time, up to
    0.5 s. `tls` is for TCP addresses, None for plain text.

    Attributes:
        check: raises if the node does not serve what it must; before each connection is used. None checks nothing.
        limits: of each connection; lookups that wait for one count towards `max_in_flight`, too.
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
        self.check: Callable[[NodeInfo], None] | None = None
        self.connection: ShardConnection | None = None
        self.num_connections = 0
        self._connect_timeout_s = connect_timeout_s
        self.limits = limits or ClientLimits()
        self._sleep = sleep
        self._tls = tls
        # Every connection that has not ended, those that are leaving included.
        self._open: set[ShardConnection] = set()
        self._connecting: asyncio.Task[None] | None = None
        self._num_failures = 0
        self._failure: ShardrankError = NodeUnavailableError("not connected")
        self._is_closed = False

    @property
    def is_available(self) -> bool:
        """Whether there is a connection, or nothing has failed yet. While False, use another replica."""
        return self.connection is not None or (self._connecting is not None and not self._num_failures)

    def pending(self) -> asyncio.Future[None] | None:
        """Return what must be waited for before a request can be sent; None if one can be sent on `connection`.

        Raises why there is no connection: NodeUnavailableError, or as `check`.
        """
        connection = self.connection
        if connection is not None:
            return connection.blocked if connection.is_open else connection.closed
        if self._connecting is None or self._num_failures:
            raise type(self._failure)(f"{self.address}: {self._failure}", kind=self._failure.kind)
        return self._connecting

    async def ready(self) -> ShardConnection:
        """Connect, and return the connection when a request can be sent on it. Raises as `pending`."""
        self.connect()
        while (event := self.pending()) is not None:
            await asyncio.wait({event})
        assert self.connection is not None
        return self.connection

    async def info(self, timeout_s: float = INFO_TIMEOUT_S) -> NodeInfo:
        """Return what the node serves. Raises as `ready` and `ShardConnection.exchange`; DeadlineExceededError."""
        async with within(timeout_s, f"{self.address}: no reply to INFO"):
            return await (await self.ready()).info()

    async def counts(self, model: str, version: int, timeout_s: float) -> dict[str, AccessCounts]:
        """Return how often rows of a version were looked up on the node, by table. Raises as `info`."""
        request = messages.encode_counts, min(int(timeout_s * 1e6), frames.MAX_BUDGET_US), model, version
        async with within(timeout_s, f"{self.address}: no reply to COUNTS"):
            connection = await self.ready()
            return await connection.exchange((FrameType.COUNTS_ANSWER,), messages.decode_counts_answer, *request)

    async def push(self, model: str, version: int, push: Push, timeout_s: float) -> int:
        """Push gradients of a step; return the slowest worker's step once they are applied, or were, and durable.

        Nobody knows whether a push is applied whose answer did not come: push it again. Raises as `info`, and what
        `Trainer.submit` answers with.
        """
        request = messages.encode_push, min(int(timeout_s * 1e6), frames.MAX_BUDGET_US), model, version, push
        async with within(timeout_s, f"{self.address}: no reply to PUSH of step {push.step}"):
            connection = await self.ready()
            return await connection.exchange((FrameType.PUSHED,), messages.decode_pushed, *request)

    def connect(self, pause_s: float = 0.0) -> None:
        """Make a connection, after a pause, unless there is one or one is being made."""
        if not self._is_closed and self._connecting is None and self.connection is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect(pause_s))

    async def close(self) -> None:
        """Cut every connection and make no new one; requests in flight fail with NodeUnavailableError. Idempotent."""
        self._is_closed, self.check = True, None
        self._failure = NodeUnavailableError("the client is closed")
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
            self._connecting = None
        closed = [connection.closed for connection in self._open]
        for connection in tuple(self._open):
            connection.abort()
        if closed:
            await asyncio.wait(closed)

    async def _connect(self, pause_s: float) -> None:
        if pause_s:
            await self._sleep(pause_s)
        try:
            self.connection = await self._attempt()
            self.num_connections += 1
        except Exception as error:
            if not isinstance(error, (ShardrankError, OSError)):
                # Not the network's doing, so not expected: the log has the traceback.
                logger.exception("connecting to %s failed", self.address)
            self._failure = error if isinstance(error, ShardrankError) else _unavailable(error)
        self._connecting = None
        if self.connection is None:
            self.connect(self._next_pause_s())

    async def _attempt(self) -> ShardConnection:
        loop, context = asyncio.get_running_loop(), None if self._tls is None else self._tls.get()
        peers = None if context is None else context.peers
        connection = ShardConnection(self.address, self.limits, peers, self._leave, self._end)
        self._open.add(connection)
        try:
            async with within(self._connect_timeout_s, "no connection", NodeUnavailableError):
                if self.address.is_unix:
                    await loop.create_unix_connection(lambda: connection, self.address.path)
                else:
                    shutdown_s = None if context is None else SHUTDOWN_TIMEOUT_S
                    host, port = self.address.host, self.address.port
                    await loop.create_connection(
                        lambda: connection, host, port, ssl=context, ssl_shutdown_timeout=shutdown_s
                    )
            if not connection.is_open:
                await connection.closed
            if connection.failure is not None:
                raise connection.failure
            if self.check is not None:
                async with within(INFO_TIMEOUT_S, "no reply to INFO", NodeUnavailableError):
                    info = await connection.info()
                self.check(info)
                connection.takes_traces = info.takes_traces
            if connection.is_leaving:
                raise NodeUnavailableError("the node is draining")
            return connection
        except BaseException:
            connection.abort()
            # Cancelled between its start and its report, uvloop never reports its end.
            self._open.discard(connection)
            raise

    def _leave(self, connection: ShardConnection, reason: str) -> None:
        if self.connection is connection:
            self.connection = None
            self._failure = NodeUnavailableError(reason)
            self._num_failures = 0
            # An idle connection may end for that alone: requests wait for the next one.
            self.connect(0.0 if connection.is_idle else self._next_pause_s())

    def _end(self, connection: ShardConnection) -> None:
        self._open.discard(connection)
        if self.connection is not connection:
            return
        self.connection = None
        if not self._is_closed and connection.failure is not None:
            self._failure = connection.failure
        if connection.has_replied:
            # It worked until now: the first attempt to get it back need not wait.
            self._num_failures = 0
        self.connect(0.0 if connection.has_replied else self._next_pause_s())

    def _next_pause_s(self) -> float:
        pause_s = min(FIRST_BACKOFF_S * 2.0**self._num_failures, MAX_BACKOFF_S)
        self._num_failures = min(self._num_failures + 1, MAX_DOUBLINGS)
        return pause_s


@contextlib.asynccontextmanager
async def within(
    timeout_s: float, message: str, error: type[ShardrankError] = DeadlineExceededError
) -> AsyncIterator[None]:
    """Raise an error unless the block ends within a time."""
    try:
        async with asyncio.timeout(max(timeout_s, 0.0)):
            yield
    except TimeoutError:
        raise error(f"{message} within {timeout_s:.3g} s") from None


def _unavailable(error: Exception) -> NodeUnavailableError:
    """Return why there is no connection: an error of TLS as it is, others by their text."""
    if isinstance(error, ssl.SSLError):
        return tls_error(error)
    return error if isinstance(error, TlsHandshakeError) else NodeUnavailableError(str(error) or repr(error))
