"""What a shard node does with a request frame: limits, admission, checks, pooling. Knows no socket."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

from pydantic import Field, model_validator

from loader.errors import DeadlineExceededError, OverloadedError, ShardrankError
from loader.snapshot.tables import Frozen
from shard_node.access_counts import MAX_FILE_BYTES
from shard_node.byte_budget import ByteAccount, Cause, check_buffer_bytes, default_buffer_bytes
from shard_node.errors import CertificateRoleError, InvalidBagsError, PushRefusedError, RemoteError, WireError
from shard_node.node import ShardNode
from shard_node.tracing import Span, error_text
from shard_node.wire import messages
from shard_node.wire.frame import DEFAULT_MAX_FRAME_BYTES, HEADER, MAX_BODY_BYTES, Buffer, Frame, FrameType
from shard_node.wire.tls import CLIENTS, SCHEME, Role

logger = logging.getLogger(__name__)

Answer = list[Buffer]
# Of the event loop's time, for requests that a thread could pool as well, since handing work to a thread and back takes
# longer than a small batch's rows; and what it may take at once after a pause.
SPARE_SHARE = 0.5
SPARE_SAVED_S = 0.005
# Of an answer to a push, at most: that of an error.
MAX_ERROR_BYTES = messages.MAX_ERROR_MESSAGE_BYTES + 256


class ServerLimits(Frozen):
    """What a node server takes from its peers.

    Attributes:
        max_frame_bytes: longest frame, request or answer.
        max_in_flight: requests waiting for a thread or being pooled. Once half of these places are taken, a connection
            may have its equal share of all.
        max_buffered_bytes: of frames, from their first byte, and of answers, until they are sent; see `ByteBudget`.
        max_connections: more are answered with an ERROR frame and closed.
        max_unsent_bytes: answers that a peer leaves unread before no more of its requests are taken.
        max_inline_bytes: requests whose frame and answer are both at most this long are pooled by the event loop
            itself. 0 for rows that may have to be read from disk: then the loop pools nothing.
        max_spare_inline_bytes: the same for longer ones, while that takes no more than half of the loop's time.
        receive_timeout_ms: from the first byte of a frame to its last.
        idle_timeout_ms: without a request, after which a peer is asked to go; it is cut off after as long again.
        send_timeout_ms: how long a peer may leave `max_unsent_bytes` unread.
    """

    max_frame_bytes: int = Field(default=DEFAULT_MAX_FRAME_BYTES, ge=1024, le=MAX_BODY_BYTES)
    max_in_flight: int = Field(default=256, ge=1)
    max_buffered_bytes: int = Field(
        default_factory=lambda limits: default_buffer_bytes(limits["max_frame_bytes"]), ge=1024
    )
    max_connections: int = Field(default=1024, ge=1)
    max_values_per_request: int = Field(default=4 << 20, ge=1)
    max_unsent_bytes: int = Field(default=16 << 20, ge=1)
    max_inline_bytes: int = Field(default=16 << 10, ge=0)
    max_spare_inline_bytes: int = Field(default=1 << 20, ge=0)
    receive_timeout_ms: int = Field(default=5000, ge=1)
    idle_timeout_ms: int = Field(default=600_000, ge=1)
    send_timeout_ms: int = Field(default=30_000, ge=1)
    threads: int = Field(default_factory=lambda: len(os.sched_getaffinity(0)), ge=1, le=1024)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_buffer_bytes(self.max_buffered_bytes, "max_frame_bytes", self.max_frame_bytes)
        return self


class RequestWatch(Protocol):
    """Notified of what becomes of requests, from any thread; it must return at once."""

    def answered(self, model: str, seconds: float) -> None:
        """Take the time from a whole POOL frame to its answer, which may be an error."""

    def refused(self, kind: str) -> None:
        """Count an ERROR frame by its kind."""

    def buffer_refused(self, cause: Cause) -> None:
        """Count a message that was refused because no more bytes may be held."""


@dataclass(slots=True, eq=False)
class Peer:
    """What one connection may ask, and has a node hold: bytes, and requests that wait for a thread or are pooled.

    `is_wanted` tells whether anyone still waits for its answers; it is asked from other threads.
    """

    account: ByteAccount
    is_wanted: Callable[[], bool]
    roles: frozenset[Role] = CLIENTS
    in_flight: int = 0


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
        # What is left of the loop's time for such requests, in seconds, and when it was counted.
        self._spare_s, self._spare_counted_at = SPARE_SAVED_S, clock()
        self.in_flight = 0
        self._busy_peers: set[Peer] = set()

    def handle(self, frame: Frame, deadline: float | None, answer: Callable[[Answer], None], peer: Peer) -> None:
        """Answer a frame, now or from a thread later; `answer` is always called on the event loop, exactly once.

        `deadline` is on the clock, in seconds; None for none.
        """
        request_id = frame.header.request_id
        try:
            frame_type = frame.header.frame_type
            role: Role = "trainer" if frame_type == FrameType.PUSH else "router"
            if role not in peer.roles and frame_type not in (FrameType.INFO, FrameType.COUNTS):
                raise CertificateRoleError(
                    f"frame type {frame_type} is for {SCHEME}{role}; allowed here are INFO and COUNTS"
                )
            if frame_type == FrameType.POOL:
                self._handle_pool(frame, deadline, answer, peer)
            elif frame_type == FrameType.INFO:
                answer(self._fitting(messages.encode_info_answer(request_id, self._node.info())))
            elif frame_type == FrameType.PUSH:
                self._handle_push(frame, answer, peer)
            elif frame_type == FrameType.COUNTS:
                work = partial(self._counts, request_id, *messages.decode_counts(frame))
                self._in_thread(request_id, work, min(MAX_FILE_BYTES, self._limits.max_frame_bytes), answer, peer)
            else:
                raise WireError(
                    f"frame type {frame_type} is not a request, requests are {FrameType.POOL:d} (POOL), "
                    f"{FrameType.INFO:d} (INFO), {FrameType.COUNTS:d} (COUNTS) and {FrameType.PUSH:d} (PUSH)"
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
        return messages.encode_error(request_id, error)

    async def close(self) -> None:
        """Wait for the pooling that has begun, and drop what has not. Idempotent."""
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)

    def _handle_pool(self, frame: Frame, deadline: float | None, answer: Callable[[Answer], None], peer: Peer) -> None:
        request_id, request, begun = frame.header.request_id, messages.decode_pool(frame), self._clock()
        if request.values.size > self._limits.max_values_per_request:
            raise InvalidBagsError(
                f"values has {request.values.size} entries, "
                f"a request may have at most {self._limits.max_values_per_request}"
            )
        layout = self._node.generations.payload(request.model, request.version).engine.layout
        watch = self._watch

        def answer_watched(frame: Answer) -> None:
            answer(frame)
            if watch is not None:
                watch.answered(request.model, self._clock() - begun)

        answer_bytes = (
            HEADER.size
            + messages.array_section_bytes(2 * len(layout.groups))
            + layout.answer_bytes(request.keys, request.bags_per_key, request.offsets.size - 1)
        )
        self._refuse_large_answer(answer_bytes)
        work = partial(self._pool, request_id, request, deadline, peer.is_wanted, begun)
        longest = max(frame.body.size, answer_bytes)
        self._spare_s = min(SPARE_SAVED_S, self._spare_s + (begun - self._spare_counted_at) * SPARE_SHARE)
        self._spare_counted_at = begun
        if longest <= self._limits.max_inline_bytes:
            answer_watched(work())
        elif longest <= self._spare_inline_bytes and self._spare_s > 0:
            answer_watched(work())
            self._spare_s -= self._clock() - begun
        else:
            self._in_thread(request_id, work, answer_bytes, answer_watched, peer)

    def _in_thread(
        self,
        request_id: int,
        work: Callable[[], Answer],
        answer_bytes: int,
        answer: Callable[[Answer], None],
        peer: Peer,
    ) -> None:
        self._count_in(answer_bytes, peer)
        try:
            future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        except RuntimeError:
            # The node is closing.
            self._count_out(answer_bytes, peer)
            raise

        def finished(done: asyncio.Future[Answer]) -> None:
            self._count_out(answer_bytes, peer)
            if done.cancelled():
                error = OverloadedError("the node is closing, the request was not started", kind="node_overloaded")
                answer(self.failure(request_id, error))
            else:
                answer(done.result())

        future.add_done_callback(finished)

    def _handle_push(self, frame: Frame, answer: Callable[[Answer], None], peer: Peer) -> None:
        request_id, trainer, loop = frame.header.request_id, self._node.trainer, asyncio.get_running_loop()
        if trainer is None:
            raise PushRefusedError("this node does not train: start it with --train", kind="not_training")
        model, version, push = messages.decode_push(frame)
        num_ids, most = sum(ids.size for ids, _ in push.gradients.values()), self._limits.max_values_per_request
        if num_ids > most:
            raise PushRefusedError(f"a push has {num_ids} ids, a request may have at most {most}")
        answer_bytes, frame_bytes = HEADER.size + MAX_ERROR_BYTES, HEADER.size + frame.body.size
        self._count_in(answer_bytes, peer)
        is_kept = False

        def kept() -> None:
            # It may wait for workers whose pushes need the place and the bytes.
            nonlocal is_kept
            is_kept = True
            self._count_out(answer_bytes, peer)
            peer.account.refund(frame_bytes)

        def finished(reply: int | Exception) -> None:
            if is_kept:
                # Whoever sends the answer gives back what the frame took.
                peer.account.hold(frame_bytes)
            else:
                self._count_out(answer_bytes, peer)
            if isinstance(reply, Exception):
                answer(self.failure(request_id, reply))
            else:
                answer(messages.encode_pushed(request_id, reply))

        # From the trainer's thread, which ends before the loop does.
        trainer.submit(
            model,
            version,
            frame.body,
            push,
            lambda: loop.call_soon_threadsafe(kept),
            lambda reply: loop.call_soon_threadsafe(finished, reply),
        )

    def _count_in(self, answer_bytes: int, peer: Peer) -> None:
        """Let a request wait for a thread, or raise OverloadedError."""
        most = self._limits.max_in_flight
        if self.in_flight >= most:
            raise OverloadedError(
                f"{self.in_flight} requests in flight, at most {most} are taken", kind="node_overloaded"
            )
        num_busy = len(self._busy_peers | {peer})
        if 2 * self.in_flight >= most and peer.in_flight >= max(1, most // num_busy):
            says = f"{peer.in_flight} of {self.in_flight} requests in flight are of this connection"
            raise OverloadedError(
                f"{says}, one of {num_busy}; at most {most} are taken, in equal shares", kind="node_overloaded"
            )
        try:
            peer.account.charge(answer_bytes)
        except OverloadedError as error:
            raise OverloadedError(str(error), kind="node_overloaded") from None
        self.in_flight += 1
        peer.in_flight += 1
        self._busy_peers.add(peer)

    def _count_out(self, answer_bytes: int, peer: Peer) -> None:
        self.in_flight -= 1
        peer.in_flight -= 1
        if not peer.in_flight:
            self._busy_peers.discard(peer)
        peer.account.refund(answer_bytes)

    def _pool(
        self,
        request_id: int,
        request: messages.PoolRequest,
        deadline: float | None,
        is_wanted: Callable[[], bool],
        received: float,
    ) -> Answer:
        began, failure = self._clock(), ""
        try:
            if not is_wanted():
                raise DeadlineExceededError("the client is gone, the request was not started")
            late_s = -1.0 if deadline is None else began - deadline
            if late_s >= 0:
                raise DeadlineExceededError(f"deadline passed {late_s * 1e3:.1f} ms before pooling could start")
            pooled = self._node.answer(request.model, request.version, request.bags(), request.forms)
            answer = self._fitting(messages.encode_answer(request_id, pooled, request.num_fields))
        except Exception as error:
            answer, failure = self.failure(request_id, error), error_text(error)
        self._tell(request, answer, received, began, failure)
        return answer

    def _tell(self, request: messages.PoolRequest, answer: Answer, received: float, began: float, error: str) -> None:
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

    def _counts(self, request_id: int, model: str, version: int) -> Answer:
        try:
            access = self._node.generations.payload(model, version).engine.access
            return self._fitting(messages.encode_counts_answer(request_id, access.estimated_lookups()))
        except Exception as error:
            return self.failure(request_id, error)

    def _fitting(self, answer: Answer) -> Answer:
        self._refuse_large_answer(sum(map(len, answer)))
        return answer

    def _refuse_large_answer(self, size_bytes: int) -> None:
        if size_bytes > self._limits.max_frame_bytes:
            raise WireError(
                f"answer has {size_bytes} bytes, a frame may have at most {self._limits.max_frame_bytes}",
                kind="frame_too_large",
            )
