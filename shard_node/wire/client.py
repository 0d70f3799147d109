"""The shard client: a shard behind a socket, with the interface of one in this process."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable

from pydantic import Field

from loader.snapshot.manifest import Frozen
from shard_node.bags import Float32Array, KeyedBags
from shard_node.errors import (
    DeadlineExceededError,
    FrameTooLargeError,
    NodeOverloadedError,
    RemoteError,
    WireError,
)
from shard_node.node import NodeInfo
from shard_node.wire.address import Address
from shard_node.wire.client_connection import ClientConnection, Ended
from shard_node.wire.connector import Connector, Sleep
from shard_node.wire.frame import DEFAULT_MAX_FRAME_BYTES, MAX_BODY_BYTES, MAX_BUDGET_US, Frame, FrameType
from shard_node.wire.messages import (
    Buffer,
    decode_error,
    decode_info_answer,
    decode_pooled,
    encode_info,
    encode_pool,
)


class ClientLimits(Frozen):
    """What a client sends and takes.

    Attributes:
        max_frame_bytes: longest frame, request or answer.
        max_in_flight: requests without an answer; more fail at once.
        max_unsent_bytes: requests that the node leaves unread before new ones wait.
        max_backoff_ms: longest pause between two attempts to connect.
        info_timeout_ms: how long `info` may take.
    """

    max_frame_bytes: int = Field(default=DEFAULT_MAX_FRAME_BYTES, ge=1024, le=MAX_BODY_BYTES)
    max_in_flight: int = Field(default=1024, ge=1)
    max_unsent_bytes: int = Field(default=16 << 20, ge=1)
    max_backoff_ms: int = Field(default=500, ge=1)
    info_timeout_ms: int = Field(default=5000, ge=1)


class ShardClient:
    """A shard behind a socket. Implements `Shard`; belongs to the event loop that it is first used on.

    There is one connection, made by the first call. When it is lost, the client brings it back by itself; see
    `Connector`. Calls meanwhile fail at once so that another replica can be asked. A call that fails with
    NodeUnavailableError may be repeated anywhere: lookups change nothing.

    Args:
        address: of the node.
        connect_timeout_s: how long an attempt to connect may take.
        clock: monotonic seconds; deadlines are on it.
        limits: what is sent and taken.
        sleep: waits for that many seconds, between attempts to connect.
        tls: speaks TLS to a TCP address, as `shard_node.wire.tls.client_context` makes it; None for plain text.
    """

    def __init__(
        self,
        address: Address,
        *,
        connect_timeout_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        limits: ClientLimits | None = None,
        sleep: Sleep = asyncio.sleep,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.address = address
        self._clock = clock
        self._limits = limits or ClientLimits()
        self._in_flight = 0
        self._connector = Connector(
            address, self._make_connection, connect_timeout_s, self._limits.max_backoff_ms / 1e3, sleep, tls
        )

    @property
    def in_flight(self) -> int:
        """Calls that have not returned."""
        return self._in_flight

    @property
    def connections(self) -> int:
        """Connections made so far. A change means that another process may answer now."""
        return self._connector.num_made

    @property
    def available(self) -> bool:
        """Whether there is a connection, or none was needed so far. While False, ask another replica."""
        return self._connector.available

    async def pool(self, model: str, version: int, bags: KeyedBags, deadline: float) -> list[Float32Array]:
        """As `Shard.pool`. The blocks are views into the received frame.

        The arrays of `bags` must not be changed afterwards, not even when the call has failed: they may still be
        on their way out.

        Raises:
            DeadlineExceededError: when the deadline passes, wherever the request is then.
            NodeUnavailableError: if there is no connection, or it was lost. Another replica may be asked.
            TlsHandshakeError: as NodeUnavailableError, whose subclass it is; its subclasses say why.
            NodeOverloadedError: if the node, or this client, has too many requests in flight.
            FrameTooLargeError: if request or answer is longer than `max_frame_bytes`.
            RemoteError: if the node failed, or its answer does not fit the request.
            ShardNodeError: whatever else the node answered, as the class of its kind.
        """

        def encode(request_id: int, budget_us: int) -> list[Buffer]:
            return encode_pool(request_id, budget_us, model, version, bags)

        frame = await self._ask(encode, FrameType.POOLED, deadline)
        try:
            blocks = decode_pooled(frame)
        except WireError as error:
            raise RemoteError(f"{self.address}: malformed answer: {error}") from error
        num_rows = sum(block.shape[0] for block in blocks)
        if num_rows != bags.num_bags:
            raise RemoteError(f"{self.address}: the answer has {num_rows} rows for {bags.num_bags} bags")
        return blocks

    async def info(self) -> NodeInfo:
        """What the node serves. Raises as `pool`."""
        deadline = self._clock() + self._limits.info_timeout_ms / 1e3
        frame = await self._ask(lambda request_id, _: encode_info(request_id), FrameType.INFO_ANSWER, deadline)
        try:
            return decode_info_answer(frame)
        except WireError as error:
            raise RemoteError(f"{self.address}: malformed answer: {error}") from error

    async def close(self) -> None:
        """Cuts the connection; calls in flight fail with NodeUnavailableError. Idempotent."""
        await self._connector.close()

    async def _ask(self, encode: Callable[[int, int], list[Buffer]], expected: FrameType, deadline: float) -> Frame:
        if self._in_flight >= self._limits.max_in_flight:
            raise NodeOverloadedError(
                f"{self.address}: {self._in_flight} requests in flight, at most {self._limits.max_in_flight} are sent"
            )
        self._in_flight += 1
        try:
            frame = await self._exchange(encode, deadline)
        finally:
            self._in_flight -= 1
        if frame.header.frame_type == expected:
            return frame
        if frame.header.frame_type != FrameType.ERROR:
            raise RemoteError(f"{self.address}: frame type {frame.header.frame_type} is no answer to this request")
        try:
            error = decode_error(frame)
        except WireError as malformed:
            raise RemoteError(f"{self.address}: malformed answer: {malformed}") from malformed
        raise error

    async def _exchange(self, encode: Callable[[int, int], list[Buffer]], deadline: float) -> Frame:
        connection = self._connector.usable() or await self._connector.connect(deadline - self._clock())
        await connection.writable(deadline - self._clock())
        request_id = connection.next_request_id()
        timeout_s = min(deadline - self._clock(), MAX_BUDGET_US / 1e6)
        if timeout_s <= 0:
            raise DeadlineExceededError(f"{self.address}: deadline passed {-timeout_s * 1e3:.1f} ms before sending")
        buffers = encode(request_id, max(int(timeout_s * 1e6), 1))
        size = sum(map(len, buffers))
        if size > self._limits.max_frame_bytes:
            raise FrameTooLargeError(f"request has {size} bytes, at most {self._limits.max_frame_bytes} are sent")
        return await connection.exchange(request_id, buffers, timeout_s)

    def _make_connection(self, going_away: Callable[[ClientConnection], None], ended: Ended) -> ClientConnection:
        limits = self._limits
        return ClientConnection(self.address, limits.max_frame_bytes, limits.max_unsent_bytes, going_away, ended)
