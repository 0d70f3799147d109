"""A gRPC call: a stream whose data are messages."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from loader.errors import ShardrankError
from serving.errors import MalformedRequestError, RequestTimeoutError
from serving.grpc_api.call_head import ANSWER_HEAD, OK_TRAILERS, CallHead, status_block
from serving.grpc_api.message_reader import PREFIX_BYTES, MessageReader
from serving.http2.connection import Http2Connection
from serving.http2.stream import Stream

MAX_STREAMED_BYTES = 2**16
STOPPING = "the server stops"
_NOT_COMPRESSED = b"\x00"


class Method(Protocol):
    """What answers the calls of one path."""

    @property
    def is_streamed(self) -> bool:
        """Whether a call may have more than one message, in either direction."""

    async def run(self, call: CallStream) -> None:
        """Answers a call, with an error if need be."""


@dataclass(slots=True)
class Methods:
    """The methods of a server.

    Attributes:
        by_path: such as `/shardrank.v1.RankingService/Rank`.
        max_message_bytes: of a request.
        tasks: of calls under way.
        takes_streamed: whether calls may begin that may go on for ever.
    """

    by_path: Mapping[bytes, Method]
    max_message_bytes: int
    tasks: dict[asyncio.Task[None], Method] = field(default_factory=dict)
    takes_streamed: bool = True

    def make_stream(self, connection: Http2Connection[CallHead], stream_id: int, head: CallHead) -> CallStream:
        """The stream of a new call."""
        return CallStream(connection, stream_id, head, self)

    def end_streamed(self) -> None:
        """Ends the calls that may go on for ever, and takes no more of them."""
        self.takes_streamed = False
        for task, method in list(self.tasks.items()):
            if method.is_streamed:
                task.cancel()


class CallStream(Stream[CallHead]):
    """One call.

    Args:
        connection, stream_id, head: as of every stream.
        methods: of the server.
    """

    __slots__ = (
        "_began",
        "_error",
        "_has_head",
        "_ignores_more",
        "_is_streamed",
        "_loop",
        "_messages",
        "_method",
        "_methods",
        "_reader",
        "_task",
        "_waiter",
    )

    def __init__(self, connection: Http2Connection[CallHead], stream_id: int, head: CallHead, methods: Methods) -> None:
        super().__init__(connection, stream_id, head)
        self._loop = connection.loop
        self._began = self._loop.time()
        self._methods = methods
        method = self._method = methods.by_path.get(head.path)
        self._is_streamed = method is not None and method.is_streamed
        max_bytes = MAX_STREAMED_BYTES if self._is_streamed else methods.max_message_bytes
        self._reader = MessageReader(head.coding, max_bytes)
        # With their flags, and compressed as they came: what waits is bounded by the window that way.
        self._messages: deque[tuple[int, bytes]] = deque()
        self._error: ShardrankError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_head = False
        self._ignores_more = method is None

    def begin(self) -> None:
        """Starts the method."""
        if self.head.problem is not None:
            self.end(*self.head.problem)
        elif self._is_streamed and not self._methods.takes_streamed:
            self.end(grpc.StatusCode.UNAVAILABLE, STOPPING)
        elif self._method is None:
            self.end(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {self.head.path.decode('latin-1')}")
        else:
            tasks = self._methods.tasks
            task = self._task = self._loop.create_task(self._method.run(self))
            tasks[task] = self._method
            task.add_done_callback(tasks.__delitem__)

    def take(self, data: bytes, start: int, end: int) -> None:
        """Puts messages together. Behind the one message of a call that has one, nothing is kept."""
        if self._ignores_more:
            return
        reader = self._reader
        try:
            while start < end:
                start = reader.feed(data, start, end)
                if reader.message is not None:
                    self._messages.append((reader.flag, reader.message))
                    reader.message = None
                    self._wake()
                    if not self._is_streamed:
                        self._ignores_more = True
                        return
        except ShardrankError as error:
            self._error = error
            self._ignores_more = True
            self._wake()
            return
        if reader.missing > self.receive_window:
            self.grant(reader.missing - self.receive_window)

    def remote_ended(self) -> None:
        """No further message comes."""
        if not self._ignores_more and not self._reader.is_between:
            self._error = MalformedRequestError("", "the call ends before its request message does")
        self._wake()

    def dropped(self) -> None:
        """Cancels the method."""
        if self._task is not None:
            self._task.cancel()

    async def receive(self, timeout_s: float) -> bytes:
        """The message of a call that has one.

        Raises:
            RequestTimeoutError: if it does not come in time.
            MalformedRequestError: if there is none.
            ShardrankError: what was wrong with it.
        """
        if not self._messages:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wait()
            except TimeoutError:
                raise RequestTimeoutError(
                    f"the request was not complete after receive_timeout_s = {timeout_s} s"
                ) from None
        if self._messages:
            return self._reader.plain(*self._messages.popleft())
        if self._error is not None:
            raise self._error
        raise MalformedRequestError("", "the call has no request message")

    async def messages(self) -> AsyncIterator[bytes]:
        """All messages. Raises ShardrankError for one that can't be read."""
        while True:
            await self._wait()
            if self._messages:
                flag, message = self._messages.popleft()
                self.grant(PREFIX_BYTES + len(message))
                yield self._reader.plain(flag, message)
            elif self._error is not None:
                raise self._error
            else:
                return

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None if it has none."""
        timeout_s = self.head.timeout_s
        return None if timeout_s is None else max(0.0, timeout_s - (self._loop.time() - self._began))

    def answer(self, message: bytes) -> None:
        """Sends the answer of a call that has one, and ends it."""
        self.send(ANSWER_HEAD, b"".join((_NOT_COMPRESSED, len(message).to_bytes(4, "big"), message)), OK_TRAILERS)

    async def write(self, message: bytes) -> None:
        """Sends one message of several; returns when the peer has taken it."""
        head = b"" if self._has_head else ANSWER_HEAD
        self._has_head = True
        self.send(head, b"".join((_NOT_COMPRESSED, len(message).to_bytes(4, "big"), message)))
        await self.drained()

    def end(self, code: grpc.StatusCode, details: str = "", metadata: Iterable[tuple[str, str]] = ()) -> None:
        """Ends the call with a status."""
        status = None if self._has_head else self.head.http_status
        self.send(b"", b"", status_block(code, details, metadata, http_status=status))

    async def _wait(self) -> None:
        """Until there is a message, an error, or the end."""
        if not self._messages and self._error is None and not self.has_all:
            self._waiter = self._loop.create_future()
            await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
