"""The node server: one shard node behind TCP and Unix sockets."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from pydantic import Field

from loader.errors import ShardrankError
from loader.snapshot.tables import Frozen
from shard_node.access_counts import MAX_PART_ROWS
from shard_node.errors import (
    CertificateRoleError,
    DeadlineExceededError,
    FrameTooLargeError,
    InvalidBagsError,
    NodeOverloadedError,
    RemoteError,
    WireError,
)
from shard_node.node import ShardNode
from shard_node.tracing import Span, error_text
from shard_node.wire.address import Address, Listener, listen
from shard_node.wire.connection import FrameConnection
from shard_node.wire.frame import DEFAULT_MAX_FRAME_BYTES, HEADER, MAX_BODY_BYTES, Frame, FrameType
from shard_node.wire.messages import (
    MAX_NAME_BYTES,
    Buffer,
    CountsRequest,
    PoolRequest,
    array_section_bytes,
    decode_counts,
    decode_pool,
    encode_answer,
    encode_counts_answer,
    encode_error,
    encode_goaway,
    encode_info_answer,
)
from shard_node.wire.roles import CLIENTS, Role, check_frame
from shard_node.wire.tls import ReloadingContext

logger = logging.getLogger(__name__)

Answer = list[Buffer]
# Of the event loop's time, for requests that a thread could pool as well; and what it may take at once after a pause.
SPARE_SHARE = 0.5
SPARE_SAVED_S = 0.005
# What the kernel keeps of a Unix socket's unread bytes, 208 KB by default, is less than the answer to a batch: both
# ends would wake up for each piece of it. The kernel may allow less; TCP's buffers grow by themselves.
UNIX_SEND_BUFFER_BYTES = 1 << 20
# Of an answer with access counts, beside the counts: its numbers and a name.
_COUNTS_ANSWER_BYTES = HEADER.size + array_section_bytes(1) + 64 + MAX_NAME_BYTES


class ServerLimits(Frozen):
    """What a node server takes from its peers.

    Attributes:
        max_frame_bytes: longest frame, request or answer.
        max_in_flight: requests waiting for a thread or being pooled, over all connections.
        max_in_flight_bytes: bytes of their frames and of the answers that they will get.
        max_connections: more are answered with an ERROR frame and closed.
        max_values_per_request: rows in one request.
        max_unsent_bytes: answers that a peer leaves unread before no more of its requests are taken.
        max_inline_bytes: requests whose frame and answer are both at most this long are pooled by the event loop
            itself, which saves handing them to a thread and back. 0 for rows that may have to be read from disk:
            then the loop pools nothing.
        max_spare_inline_bytes: the same for longer ones, while that takes no more than half of the loop's time.
        receive_timeout_ms: from the first byte of a frame to its last.
        send_timeout_ms: how long a peer may leave `max_unsent_bytes` unread.
        threads: that pool. More than there are cores does not help.
    """

    max_frame_bytes: int = Field(default=DEFAULT_MAX_FRAME_BYTES, ge=1024, le=MAX_BODY_BYTES)
    max_in_flight: int = Field(default=256, ge=1)
    max_in_flight_bytes: int = Field(default=1 << 30, ge=1024)
    max_connections: int = Field(default=1024, ge=1)
    max_values_per_request: int = Field(default=4 << 20, ge=1)
    max_unsent_bytes: int = Field(default=16 << 20, ge=1)
    max_inline_bytes: int = Field(default=16 << 10, ge=0)
    max_spare_inline_bytes: int = Field(default=1 << 20, ge=0)
    receive_timeout_ms: int = Field(default=5000, ge=1)
    send_timeout_ms: int = Field(default=30_000, ge=1)
    threads: int = Field(default_factory=lambda: len(os.sched_getaffinity(0)), ge=1, le=1024)


class SpareTime:
    """A share of the event loop's time, for pooling that a thread could do as well.

    Handing work to a thread and back takes longer than a small batch's rows. The loop pools while it has time to spare;
    under a load that would take more than its `share`, work goes to the threads. `saved_s` is the most that is saved
    up: what may be spent at once after a pause.
    """

    def __init__(self, share: float, saved_s: float, now: float) -> None:
        self._share = share
        self._most_s = saved_s
        self._saved_s = saved_s
        self._as_of = now

    def is_left(self, now: float) -> bool:
        """Whether any is left at this time, in monotonic seconds."""
        self._saved_s = min(self._most_s, self._saved_s + (now - self._as_of) * self._share)
        self._as_of = now
        return self._saved_s > 0

    def spend(self, seconds: float) -> None:
        """Count what work took. It may be more than was left: then the next has to wait for longer."""
        self._saved_s -= seconds


class RequestWatch(Protocol):
    """Is told what becomes of requests, from any thread; it must take no longer than a number takes to be kept."""

    def answered(self, model: str, seconds: float) -> None:
        """Take the time from a whole POOL frame to its answer, which may be an error."""

    def refused(self, kind: str) -> None:
        """Count an ERROR frame by its kind."""


class RequestHandler:
    """Answers request frames from one shard node: limits, admission, checks, pooling. Knows no socket.

    `handle` runs on the event loop; large requests go to threads. `watch` is told of each, if there is one.
    """

    def __init__(
        self, node: ShardNode, limits: ServerLimits, clock: Callable[[], float], watch: RequestWatch | None = None
    ) -> None:
        self._node = node
        self._limits = limits
        self._clock = clock
        self._watch = watch
        self._executor = ThreadPoolExecutor(limits.threads, thread_name_prefix="pool")
        self._spare_inline_bytes = limits.max_spare_inline_bytes if limits.max_inline_bytes else 0
        self._spare_time = SpareTime(SPARE_SHARE, SPARE_SAVED_S, clock())
        self.in_flight = 0
        self.in_flight_bytes = 0

    def handle(
        self,
        frame: Frame,
        deadline: float | None,
        answer: Callable[[Answer], None],
        is_wanted: Callable[[], bool],
        roles: frozenset[Role] = CLIENTS,
    ) -> None:
        """Answers a frame, now or from a thread later; `answer` is always called on the event loop, exactly once.

        Args:
            frame: as received.
            deadline: on the clock, in seconds; None for none.
            answer: takes the answer's frame.
            is_wanted: whether anyone still waits for the answer; asked from another thread.
            roles: of the peer.
        """
        request_id = frame.header.request_id
        try:
            check_frame(roles, frame.header.frame_type)
            if frame.header.frame_type == FrameType.POOL:
                self._handle_pool(frame, deadline, answer, is_wanted)
            elif frame.header.frame_type == FrameType.INFO:
                answer(self._fitting(encode_info_answer(request_id, self._node.info())))
            elif frame.header.frame_type == FrameType.COUNTS:
                asked = decode_counts(frame)
                size_bytes = _COUNTS_ANSWER_BYTES + 4 * min(asked.max_rows, MAX_PART_ROWS)
                self._refuse_large_answer(size_bytes)
                self._in_thread(request_id, partial(self._counts, request_id, asked), size_bytes, answer)
            else:
                raise WireError(
                    f"frame type {frame.header.frame_type} is not a request, requests are {FrameType.POOL:d} (POOL), "
                    f"{FrameType.INFO:d} (INFO) and {FrameType.COUNTS:d} (COUNTS)"
                )
        except Exception as error:
            answer(self.failure(request_id, error))

    def failure(self, request_id: int, error: Exception) -> Answer:
        """Return the ERROR frame for whatever was raised, and count it. Runs in any thread.

        What nobody raised on purpose is logged, and is a RemoteError.
        """
        if not isinstance(error, ShardrankError):
            logger.error("request %d failed", request_id, exc_info=error)
            error = RemoteError(f"the node failed: {type(error).__name__}: {error}")
        if self._watch is not None:
            self._watch.refused(error.kind)
        return encode_error(request_id, error)

    async def close(self) -> None:
        """Wait for the pooling that has begun, and drop what has not. Idempotent."""
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)

    def _handle_pool(
        self, frame: Frame, deadline: float | None, answer: Callable[[Answer], None], is_wanted: Callable[[], bool]
    ) -> None:
        request_id, request, begun = frame.header.request_id, decode_pool(frame), self._clock()
        if request.values.size > self._limits.max_values_per_request:
            raise InvalidBagsError(
                f"values has {request.values.size} entries, "
                f"a request may have at most {self._limits.max_values_per_request}"
            )
        layout = self._node.table_layout(request.model, request.version)
        if self._watch is not None:
            answer = partial(self._answer_watched, self._watch, answer, request.model, begun)
        answer_bytes = (
            HEADER.size
            + array_section_bytes(2 * len(layout.groups))
            + layout.answer_bytes(request.keys, request.bags_per_key, request.offsets.size - 1)
        )
        self._refuse_large_answer(answer_bytes)
        work = partial(self._pool, request_id, request, deadline, is_wanted, begun)
        longest = max(frame.body.size, answer_bytes)
        if longest <= self._limits.max_inline_bytes:
            answer(work())
        elif longest <= self._spare_inline_bytes and self._spare_time.is_left(begun):
            answer(work())
            self._spare_time.spend(self._clock() - begun)
        else:
            self._in_thread(request_id, work, frame.body.size + answer_bytes, answer)

    def _answer_watched(
        self, watch: RequestWatch, answer: Callable[[Answer], None], model: str, begun: float, frame: Answer
    ) -> None:
        answer(frame)
        watch.answered(model, self._clock() - begun)

    def _in_thread(
        self, request_id: int, work: Callable[[], Answer], size_bytes: int, answer: Callable[[Answer], None]
    ) -> None:
        """Have a thread work on a request that takes so many bytes; `work` raises nothing."""
        self._admit(size_bytes)
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)

        def finished(done: asyncio.Future[Answer]) -> None:
            self.in_flight -= 1
            self.in_flight_bytes -= size_bytes
            if done.cancelled():
                error = NodeOverloadedError("the node is closing, the request was not started")
                answer(self.failure(request_id, error))
            else:
                answer(done.result())

        future.add_done_callback(finished)

    def _admit(self, size_bytes: int) -> None:
        """Count a request that goes to a thread. Raises NodeOverloadedError."""
        limits = self._limits
        if self.in_flight >= limits.max_in_flight:
            raise NodeOverloadedError(f"{self.in_flight} requests in flight, at most {limits.max_in_flight} are taken")
        # One request alone is always taken: it has passed max_frame_bytes.
        if self.in_flight and self.in_flight_bytes + size_bytes > limits.max_in_flight_bytes:
            raise NodeOverloadedError(
                f"{self.in_flight_bytes} bytes in flight, with this request's {size_bytes} more than "
                f"the {limits.max_in_flight_bytes} that are taken"
            )
        self.in_flight += 1
        self.in_flight_bytes += size_bytes

    def _pool(
        self,
        request_id: int,
        request: PoolRequest,
        deadline: float | None,
        is_wanted: Callable[[], bool],
        received: float,
    ) -> Answer:
        """Pools; what fails becomes an ERROR frame. Runs in any thread."""
        began, failure = self._clock(), ""
        try:
            if not is_wanted():
                raise DeadlineExceededError("the client is gone, the request was not started")
            late_s = -1.0 if deadline is None else began - deadline
            if late_s >= 0:
                raise DeadlineExceededError(f"deadline passed {late_s * 1e3:.1f} ms before pooling could start")
            pooled = self._node.answer(request.model, request.version, request.bags(), request.forms)
            answer = self._fitting(encode_answer(request_id, pooled, tell_sequence=request.takes_sequence))
        except Exception as error:
            answer, failure = self.failure(request_id, error), error_text(error)
        self._tell(request, answer, received, began, failure)
        return answer

    def _tell(self, request: PoolRequest, answer: Answer, received: float, began: float, error: str) -> None:
        """Make a span of a request that is traced, from when it had come to its encoded answer."""
        if request.trace is None or self._node.sink is None:
            return
        attributes: dict[str, str | int | float] = {
            "shardrank.model": request.model,
            "shardrank.version": request.version,
            "shardrank.shard": self._node.identity.shard_index,
            "shardrank.bags": request.offsets.size - 1,
            "shardrank.values": request.values.size,
            "shardrank.queue_ms": 1e3 * (began - received),
            "shardrank.answer_bytes": sum(map(len, answer)),
        }
        own, ended = request.trace.child(), self._clock()
        span = Span("shardrank.pool", "server", own, request.trace, received, ended, attributes, (), error)
        self._node.sink.put(span)

    def _counts(self, request_id: int, asked: CountsRequest) -> Answer:
        """Tell access counts; what fails becomes an ERROR frame. Runs in any thread: estimates take milliseconds."""
        try:
            part = self._node.counts(asked.model, asked.version, asked.table, asked.first_row, asked.max_rows)
            return self._fitting(encode_counts_answer(request_id, part))
        except Exception as error:
            return self.failure(request_id, error)

    def _fitting(self, answer: Answer) -> Answer:
        self._refuse_large_answer(sum(map(len, answer)))
        return answer

    def _refuse_large_answer(self, size_bytes: int) -> None:
        if size_bytes > self._limits.max_frame_bytes:
            raise FrameTooLargeError(
                f"answer has {size_bytes} bytes, a frame may have at most {self._limits.max_frame_bytes}"
            )


class ServerConnection(FrameConnection):
    """Serves one peer. A bad request is answered with an ERROR frame; only a broken stream ends the connection.

    When the peer leaves answers unread, no more of its requests are taken, so what it can make the node hold is
    bounded by `max_unsent_bytes` and what was in flight by then.
    """

    def __init__(
        self, server: NodeServer, handler: RequestHandler, limits: ServerLimits, clock: Callable[[], float]
    ) -> None:
        super().__init__(limits.max_frame_bytes, limits.max_unsent_bytes)
        self._server = server
        self._handler = handler
        self._limits = limits
        self._clock = clock
        self._receive_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._frame_begun_at = 0.0
        self.roles = CLIENTS

    def go_away(self) -> None:
        """Asks the peer to send no more requests; it closes the connection when it has its answers."""
        self.send(encode_goaway())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Announces itself to the server, which may refuse it."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SEND_BUFFER_BYTES)
        self._server.opened(self)

    def buffer_updated(self, nbytes: int) -> None:
        """Take frames, and start the time limit of one that is not whole yet."""
        if self._receive_timer is None:
            self._frame_begun_at = self._clock()
        super().buffer_updated(nbytes)
        self._watch_receiving()

    def frame_received(self, frame: Frame) -> None:
        """Has it answered."""
        # A frame that came in pieces spent its budget from its first byte on.
        begun_at = self._frame_begun_at
        self._stop_receive_timer()
        budget_us = frame.header.budget_us
        deadline = begun_at + budget_us * 1e-6 if budget_us else None
        self._handler.handle(frame, deadline, self._send_answer, self._is_wanted, self.roles)
        self._frame_begun_at = self._clock()

    def stream_broken(self, error: WireError, request_id: int) -> None:
        """Says what is wrong, and closes."""
        logger.warning("closing the connection from %s: %s", self.peer, error)
        self.refuse(self._handler.failure(request_id, error))

    def pause_writing(self) -> None:
        """Take nothing more from a peer that does not read."""
        self._stop_receive_timer()
        self.hold_reading()
        self._send_timer = self._loop.call_later(self._limits.send_timeout_ms / 1e3, self._send_timed_out)

    def resume_writing(self) -> None:
        """Take requests again."""
        self._stop_send_timer()
        self._frame_begun_at = self._clock()
        self.release_reading()
        self._watch_receiving()

    def connection_ended(self, error: Exception | None) -> None:
        """Forgets its timers. Requests that have not begun will not be."""
        del error
        self._stop_receive_timer()
        self._stop_send_timer()
        self._server.ended(self)

    def _send_answer(self, buffers: Answer) -> None:
        # False means that the peer has gone: nobody is left to be told.
        self.send(buffers)

    def _is_wanted(self) -> bool:
        return not self.closed.done()

    def _watch_receiving(self) -> None:
        if self._receive_timer is None and self._receiver.is_mid_frame and self.is_open and not self.is_reading_held:
            timeout_s = self._limits.receive_timeout_ms / 1e3
            self._receive_timer = self._loop.call_later(timeout_s, self._receive_timed_out)

    def _receive_timed_out(self) -> None:
        self._receive_timer = None
        error = WireError(f"frame was not whole {self._limits.receive_timeout_ms} ms after its first byte")
        self.stream_broken(error, self._receiver.request_id)

    def _send_timed_out(self) -> None:
        logger.warning(
            "closing the connection from %s: it left answers unread for %d ms", self.peer, self._limits.send_timeout_ms
        )
        self.abort()

    def _stop_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()


class NodeServer:
    """Serves a shard node over the wire protocol on the running event loop, asyncio's or uvloop's.

    The node stays open when the server closes. `tls` is what TCP connections must speak, None for plain text; Unix
    sockets never speak it. `watch` is told of every request, if there is one.
    """

    def __init__(
        self,
        node: ShardNode,
        limits: ServerLimits | None = None,
        tls: ReloadingContext | None = None,
        watch: RequestWatch | None = None,
    ) -> None:
        self._limits = limits or ServerLimits()
        self._tls = tls
        self._handler = RequestHandler(node, self._limits, time.monotonic, watch)
        self._listeners: list[Listener] = []
        self._connections: set[ServerConnection] = set()
        self._is_draining = False
        self._all_ended = asyncio.Event()

    @property
    def addresses(self) -> tuple[Address, ...]:
        """What is bound, with real ports; a host name that has several addresses gives one each."""
        return tuple(address for listener in self._listeners for address in listener.addresses)

    @property
    def in_flight(self) -> int:
        """Requests waiting for a thread or being pooled."""
        return self._handler.in_flight

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self._connections)

    async def start(self, addresses: Sequence[Address]) -> None:
        """Listen on every address, or on none. Raises AddressError."""
        try:
            for address in addresses:
                self._listeners.append(await listen(address, self._make_connection, tls=self._tls))
        except BaseException:
            self._stop_listening()
            raise

    async def drain(self, timeout_s: float) -> bool:
        """Stop accepting, ask every peer to go elsewhere, and wait until all have their answers and are gone.

        Requests that cross the wire with the GOAWAY frame are still answered. Returns whether all connections ended
        within the time; `close` ends the others.
        """
        self._is_draining = True
        self._stop_listening()
        for connection in tuple(self._connections):
            connection.go_away()
        if not self._connections:
            return True
        self._all_ended.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_ended.wait()
        except TimeoutError:
            left = self.num_connections, self.in_flight, timeout_s
            logger.warning("drain: %d connections and %d requests left after %.1f s", *left)
            return False
        return True

    async def close(self) -> None:
        """Stop at once: connections are cut, what is being pooled is waited for and dropped. Idempotent."""
        self._is_draining = True
        self._stop_listening()
        ended = [connection.closed for connection in self._connections]
        for connection in tuple(self._connections):
            connection.abort()
        await self._handler.close()
        if ended:
            await asyncio.wait(ended)

    def opened(self, connection: ServerConnection) -> None:
        """Take in a connection, or refuse it (called by it)."""
        self._connections.add(connection)
        if len(self._connections) > self._limits.max_connections:
            error = NodeOverloadedError(f"at most {self._limits.max_connections} connections are taken")
            logger.warning("refusing the connection from %s: %s", connection.peer, error)
            connection.refuse(self._handler.failure(0, error))
            return
        if self._tls is not None and connection.certificate:
            host = connection.peer.rpartition(":")[0]
            try:
                connection.roles = self._tls.roles.check(connection.certificate, host, CLIENTS)
            except CertificateRoleError as error:
                self._tls.refusals.add(host, error)
                connection.refuse(self._handler.failure(0, error))
                return
        if self._is_draining:
            connection.go_away()

    def ended(self, connection: ServerConnection) -> None:
        """Forgets a connection that is gone (called by it)."""
        self._connections.discard(connection)
        if not self._connections:
            self._all_ended.set()

    def _make_connection(self) -> ServerConnection:
        return ServerConnection(self, self._handler, self._limits, time.monotonic)

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()
