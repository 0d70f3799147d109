"""From a request frame to its answer: limits, admission, checks, pooling. Knows no socket."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pydantic import Field

from loader.errors import ShardrankError
from loader.snapshot.manifest import Frozen
from shard_node.bags import TableLimits
from shard_node.errors import (
    DeadlineExceededError,
    FrameTooLargeError,
    InvalidBagsError,
    NodeOverloadedError,
    RemoteError,
    WireError,
)
from shard_node.node import ShardNode
from shard_node.wire.frame import DEFAULT_MAX_FRAME_BYTES, HEADER, MAX_BODY_BYTES, Frame, FrameType
from shard_node.wire.messages import (
    Buffer,
    PoolRequest,
    array_section_bytes,
    decode_pool,
    encode_error,
    encode_info_answer,
    encode_pooled,
)
from shard_node.wire.spare_time import SpareTime

logger = logging.getLogger(__name__)

Answer = list[Buffer]
# Layouts whose limits are kept; a node serves a handful of versions.
MAX_KEPT_LIMITS = 64
# Of the event loop's time, for requests that a thread could pool as well; and what it may take at once after a pause.
SPARE_SHARE = 0.5
SPARE_SAVED_S = 0.005


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


@dataclass(frozen=True, slots=True)
class _Job:
    request_id: int
    request: PoolRequest
    deadline: float | None
    is_wanted: Callable[[], bool]


class RequestHandler:
    """Answers request frames from one shard node. `handle` runs on the event loop; large requests go to threads.

    Args:
        node: what pools.
        limits: what is taken.
        clock: monotonic seconds.
    """

    def __init__(self, node: ShardNode, limits: ServerLimits, clock: Callable[[], float]) -> None:
        self._node = node
        self._limits = limits
        self._clock = clock
        self._executor = ThreadPoolExecutor(limits.threads, thread_name_prefix="pool")
        self._kept_limits: dict[tuple[str, int], TableLimits] = {}
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
    ) -> None:
        """Answers a frame, now or from a thread later; `answer` is always called on the event loop, exactly once.

        Args:
            frame: as received.
            deadline: on the clock, in seconds; None for none.
            answer: takes the answer's frame.
            is_wanted: whether anyone still waits for the answer; asked from another thread.
        """
        request_id = frame.header.request_id
        try:
            if frame.header.frame_type == FrameType.POOL:
                self._pool(frame, deadline, answer, is_wanted)
            elif frame.header.frame_type == FrameType.INFO:
                answer(self._fitting(encode_info_answer(request_id, self._node.info())))
            else:
                raise WireError(
                    f"frame type {frame.header.frame_type} is not a request, "
                    f"requests are {FrameType.POOL:d} (POOL) and {FrameType.INFO:d} (INFO)"
                )
        except Exception as error:
            answer(encode_failure(request_id, error))

    async def close(self) -> None:
        """Waits for the pooling that has begun, and drops what has not. Idempotent."""
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)

    def _pool(
        self, frame: Frame, deadline: float | None, answer: Callable[[Answer], None], is_wanted: Callable[[], bool]
    ) -> None:
        request = decode_pool(frame)
        if request.values.size > self._limits.max_values_per_request:
            raise InvalidBagsError(
                f"values has {request.values.size} entries, "
                f"a request may have at most {self._limits.max_values_per_request}"
            )
        limits = self._limits_of(request.model, request.version)
        answer_bytes = (
            HEADER.size
            + array_section_bytes(len(limits.layout.groups))
            + limits.answer_bytes(request.keys, request.bags_per_key, request.offsets.size - 1)
        )
        self._refuse_large_answer(answer_bytes)
        job = _Job(frame.header.request_id, request, deadline, is_wanted)
        longest = max(frame.body.size, answer_bytes)
        if longest <= self._limits.max_inline_bytes:
            answer(self._answer(job))
        elif longest <= self._spare_inline_bytes and self._spare_time.is_left(begun := self._clock()):
            answer(self._answer(job))
            self._spare_time.spend(self._clock() - begun)
        else:
            self._submit(job, frame.body.size + answer_bytes, answer)

    def _submit(self, job: _Job, size_bytes: int, answer: Callable[[Answer], None]) -> None:
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
        future = asyncio.get_running_loop().run_in_executor(self._executor, self._answer, job)

        def finished(done: asyncio.Future[Answer]) -> None:
            self.in_flight -= 1
            self.in_flight_bytes -= size_bytes
            if done.cancelled():
                error = NodeOverloadedError("the node is closing, the request was not started")
                answer(encode_error(job.request_id, error))
            else:
                answer(done.result())

        future.add_done_callback(finished)

    def _answer(self, job: _Job) -> Answer:
        """Pools; what fails becomes an ERROR frame. Runs in any thread."""
        try:
            if not job.is_wanted():
                raise DeadlineExceededError("the client is gone, the request was not started")
            late_s = -1.0 if job.deadline is None else self._clock() - job.deadline
            if late_s >= 0:
                raise DeadlineExceededError(f"deadline passed {late_s * 1e3:.1f} ms before pooling could start")
            bags = job.request.bags()
            return self._fitting(
                encode_pooled(job.request_id, self._node.pool(job.request.model, job.request.version, bags))
            )
        except Exception as error:
            return encode_failure(job.request_id, error)

    def _limits_of(self, model: str, version: int) -> TableLimits:
        layout = self._node.table_layout(model, version)
        kept = self._kept_limits.get((model, version))
        if kept is None or kept.layout is not layout:
            if len(self._kept_limits) >= MAX_KEPT_LIMITS:
                self._kept_limits.clear()
            kept = TableLimits(layout)
            self._kept_limits[model, version] = kept
        return kept

    def _fitting(self, answer: Answer) -> Answer:
        self._refuse_large_answer(sum(map(len, answer)))
        return answer

    def _refuse_large_answer(self, size_bytes: int) -> None:
        if size_bytes > self._limits.max_frame_bytes:
            raise FrameTooLargeError(
                f"answer has {size_bytes} bytes, a frame may have at most {self._limits.max_frame_bytes}"
            )


def encode_failure(request_id: int, error: Exception) -> Answer:
    """The ERROR frame for whatever was raised. What nobody raised on purpose is logged, and is a RemoteError."""
    if isinstance(error, ShardrankError):
        return encode_error(request_id, error)
    logger.error("request %d failed", request_id, exc_info=error)
    return encode_error(request_id, RemoteError(f"the node failed: {type(error).__name__}: {error}"))
