"""One connection of a shard client: many requests in flight, answers matched by request id."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import TypeAlias

from shard_node.errors import (
    DeadlineExceededError,
    FrameTooLargeError,
    NodeUnavailableError,
    ShardNodeError,
    WireError,
)
from shard_node.wire.address import Address
from shard_node.wire.connection import FrameConnection
from shard_node.wire.frame import Frame, FrameType
from shard_node.wire.messages import Buffer, decode_error
from shard_node.wire.tls import connection_failure

logger = logging.getLogger(__name__)

# A node whose host has vanished acknowledges nothing; the kernel's own limit is a quarter of an hour.
UNACKNOWLEDGED_TIMEOUT_MS = 2000


Ended: TypeAlias = "Callable[[ClientConnection, type[NodeUnavailableError], str], None]"
"""Told that a connection is gone, as what kind of error, and why."""


class ClientConnection(FrameConnection):
    """Sends requests and hands each answer to whoever waits for it. Answers that nobody waits for are dropped.

    Args:
        address: of the node, for messages.
        max_frame_bytes: longest answer.
        max_unsent_bytes: above this, `writable` waits.
        going_away: told when the node wants no new requests on this connection.
        ended: told once when the connection is gone.
    """

    def __init__(
        self,
        address: Address,
        max_frame_bytes: int,
        max_unsent_bytes: int,
        going_away: Callable[[ClientConnection], None],
        ended: Ended,
    ) -> None:
        super().__init__(max_frame_bytes, max_unsent_bytes)
        self._address = address
        self._going_away = going_away
        self._ended = ended
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._last_request_id = 0
        self._refusal: Exception | None = None
        self._is_going_away = False
        self._writable: asyncio.Future[None] | None = None
        self.has_answered = False

    @property
    def num_waiting(self) -> int:
        """Requests without an answer."""
        return len(self._waiting)

    @property
    def is_usable(self) -> bool:
        """Whether a new request may be sent."""
        return self.is_open and not self._is_going_away

    def next_request_id(self) -> int:
        """A number for the next request."""
        self._last_request_id += 1
        return self._last_request_id

    async def writable(self, timeout_s: float) -> None:
        """Waits until the node has read enough of what was sent before.

        Raises:
            DeadlineExceededError: if that takes longer.
        """
        if self._writable is None:
            return
        done, _ = await asyncio.wait({self._writable}, timeout=max(timeout_s, 0.0))
        if not done:
            raise DeadlineExceededError(f"{self._address}: deadline passed before the request could be sent")

    async def exchange(self, request_id: int, buffers: Sequence[Buffer], timeout_s: float) -> Frame:
        """Sends a request and waits for its answer.

        Raises:
            DeadlineExceededError: after `timeout_s`.
            NodeUnavailableError: if the connection was lost.
        """
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
        """Sets the socket up."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_TIMEOUT_MS)

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
            # About the connection as a whole; the node closes it next.
            self._refusal = self._error_of(frame)
        else:
            self.stream_broken(WireError(f"frame type {frame.header.frame_type} without a request id"), 0)

    def stream_broken(self, error: WireError, request_id: int) -> None:
        """Ends the connection: an answer that is too long fails its own request, everything else fails all."""
        logger.warning("closing the connection to %s: %s", self._address, error)
        answer = self._waiting.get(request_id)
        if isinstance(error, FrameTooLargeError) and answer is not None and not answer.done():
            answer.set_exception(error)
        self._refusal = error
        self.abort()

    def pause_writing(self) -> None:
        """The node does not read: new requests wait."""
        if self._writable is None:
            self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        """The node reads again."""
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None

    def connection_ended(self, error: Exception | None) -> None:
        """Fails everything that waits."""
        kind, reason = connection_failure(self._refusal or error or ConnectionError("closed by the node"))
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(kind(f"{self._address}: connection lost before the answer came: {reason}"))
        self.resume_writing()
        self._ended(self, kind, reason)

    def _expire(self, request_id: int) -> None:
        answer = self._waiting.get(request_id)
        if answer is not None and not answer.done():
            late = DeadlineExceededError(f"{self._address}: deadline passed before the answer came")
            answer.set_exception(late)

    def _close_if_done(self) -> None:
        if self._is_going_away and not self._waiting:
            self.close()

    def _error_of(self, frame: Frame) -> ShardNodeError:
        try:
            return decode_error(frame)
        except WireError as error:
            return error
