"""The client: a process that always has the same number of requests in flight, and weighs the server meanwhile.

A closed loop: each answer is followed by the next request at once. It shows what a server costs when it never waits for
work, and, with one request in flight, how fast it answers when it has nothing else to do.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import lru_cache, partial
from typing import Protocol

import grpc
import grpc.aio
import numpy as np
import psutil
import uvloop

from loader.memory import settle_heap
from loadtest.grpc_channels import as_it_is, open_channels
from loadtest.http_connection import HttpConnection, PostRequest, post_request
from loadtest.serving_cost.errors import LateAnswerError, WrongAnswerError
from loadtest.serving_cost.helper_process import answer_lines
from loadtest.serving_cost.messages import Load, ServerLoad, Weighed
from loadtest.serving_cost.shape import SEED, Shape, payloads
from loadtest.workloads.payloads import Headers, Payload, changing_headers

ANSWER_TIMEOUT_S = 60.0
OK_STATUS = 200
LATE_STATUS = 504

Call = Callable[[int], Awaitable[bytes]]
"""Sends one request of the pool and gives its answer."""


class RequestPool(Protocol):
    """What the client asks of the encoded requests; `Payloads` are such a pool."""

    @property
    def is_grpc(self) -> bool:
        """Whether bodies are gRPC messages, not HTTP bodies."""

    @property
    def path(self) -> str:
        """Where they go."""

    @property
    def api(self) -> str:
        """What an error names."""

    def check(self, answer: bytes) -> int:
        """How many scores an answer has."""

    def __getitem__(self, index: int, /) -> Payload: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Payload]: ...


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Processor time that they have used so far, user and system."""
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


class _Window:
    """Counts answers from its begin to its end."""

    def __init__(self) -> None:
        self.is_open = False
        self.is_over = False
        self.has_answer = asyncio.Event()
        self.latencies_s: list[float] = []

    def answered(self, latency_s: float) -> None:
        if self.is_open:
            self.latencies_s.append(latency_s)
            self.has_answer.set()


async def weigh(load: ServerLoad, pool: RequestPool, headers: Iterator[Headers], name: str = "") -> Weighed:
    """Does one load.

    Args:
        load: what.
        pool: its requests.
        headers: that each is sent with beside its own, as gRPC's metadata or HTTP's headers.
        name: of the server in errors; without one, the pool's API.

    Raises:
        WrongAnswerError: a request failed, or its answer has another number of scores than candidates.
        LateAnswerError: its deadline has passed.
        psutil.NoSuchProcess: the server has ended.
    """
    try:
        return await _weigh(load, pool, headers)
    except BaseExceptionGroup as errors:
        # Several requests fail together when a server does; the first says why.
        first = errors.exceptions[0]
        kind = type(first) if isinstance(first, WrongAnswerError) else WrongAnswerError
        raise kind(f"{name or pool.api}: {first}") from errors


async def _weigh(load: ServerLoad, pool: RequestPool, headers: Iterator[Headers]) -> Weighed:
    server, client = [psutil.Process(pid) for pid in load.process_ids], psutil.Process()
    window, numbers = _Window(), itertools.cycle(range(len(pool)))
    async with AsyncExitStack() as stack:
        calls = await (_grpc_calls if pool.is_grpc else _http_calls)(load, pool, headers, stack)
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(_keep_asking(call, pool, numbers, window))
            await asyncio.sleep(load.warmup_s)
            began, cpu_s, own_s = time.perf_counter(), cpu_seconds(server), cpu_seconds([client])
            window.is_open = True
            await asyncio.sleep(load.seconds)
            await window.has_answer.wait()
            window.is_open, window.is_over = False, True
            seconds = time.perf_counter() - began
            cpu_s, own_s = cpu_seconds(server) - cpu_s, cpu_seconds([client]) - own_s
    p50, p99 = np.percentile(window.latencies_s, (50, 99)) * 1e3
    return Weighed(
        requests=len(window.latencies_s),
        seconds=seconds,
        server_cpu_s=cpu_s,
        client_cpu_s=own_s,
        p50_ms=float(p50),
        p99_ms=float(p99),
    )


async def _keep_asking(call: Call, pool: RequestPool, numbers: Iterator[int], window: _Window) -> None:
    while not window.is_over:
        number, sent = next(numbers), time.perf_counter()
        answer = await call(number)
        window.answered(time.perf_counter() - sent)
        if (scores := pool.check(answer)) != (expected := pool[number].num_candidates):
            raise WrongAnswerError(f"{scores} scores for a request of {expected} candidates")


async def _grpc_calls(
    load: ServerLoad, pool: RequestPool, headers: Iterator[Headers], stack: AsyncExitStack
) -> list[Call]:
    channels = open_channels(load.host, load.grpc_port, min(load.channels, load.in_flight))
    for channel in channels:
        stack.push_async_callback(channel.close, None)
    methods = [channel.unary_unary(pool.path, as_it_is, as_it_is) for channel in channels]

    async def call(method: Callable[..., Awaitable[bytes]], number: int) -> bytes:
        try:
            return await method(pool[number].body, timeout=ANSWER_TIMEOUT_S, metadata=next(headers))
        except grpc.aio.AioRpcError as error:
            is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            raise (LateAnswerError if is_late else WrongAnswerError)(
                f"gRPC status {error.code().name}: {error.details()}"
            ) from error

    return [partial(call, methods[number % len(methods)]) for number in range(load.in_flight)]


async def _http_calls(
    load: ServerLoad, pool: RequestPool, headers: Iterator[Headers], stack: AsyncExitStack
) -> list[Call]:
    requests = [
        post_request(load.host, load.http_port, pool.path, dict(one.headers), one.body)
        for one in map(pool.__getitem__, range(len(pool)))
    ]
    calls: list[Call] = []
    for _ in range(load.in_flight):
        asker = _HttpAsker(requests, headers)
        await asker.connect(load.host, load.http_port)
        stack.callback(asker.close)
        calls.append(asker.call)
    return calls


class _HttpAsker:
    """One connection, with one request out at a time."""

    def __init__(self, requests: list[PostRequest], headers: Iterator[Headers]) -> None:
        self._requests = requests
        self._headers = headers
        self._connection = HttpConnection(self._answered, self._ended)
        self._answer: asyncio.Future[bytes] | None = None

    async def connect(self, host: str, port: int) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self._connection, host, port)

    async def call(self, number: int) -> bytes:
        self._answer = asyncio.get_running_loop().create_future()
        if self._connection.closed:
            raise WrongAnswerError("the server has closed the connection")
        self._connection.send(self._requests[number], next(self._headers))
        return await self._answer

    def close(self) -> None:
        self._connection.close()

    def _answered(self, connection: HttpConnection, status: int, body: bytes) -> None:
        del connection
        if self._answer is None or self._answer.done():
            return
        if status == OK_STATUS:
            self._answer.set_result(body)
        else:
            kind = LateAnswerError if status == LATE_STATUS else WrongAnswerError
            self._answer.set_exception(kind(f"HTTP status {status}: {body[:300]!r}"))

    def _ended(self, connection: HttpConnection, reason: str) -> None:
        del connection
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(WrongAnswerError(reason))


def main() -> None:
    """`python -m loadtest.serving_cost.client_process SHAPE`."""
    shape = Shape.model_validate_json(sys.argv[1])
    # One model and hotness is measured after the other, over all APIs in turn.
    pool_of = lru_cache(maxsize=4)(partial(payloads, shape))
    headers = changing_headers(shape.varied, SEED)

    def answer(line: str) -> Weighed:
        load = Load.model_validate_json(line)
        pool = pool_of(load.head, load.hotness, load.api)
        # A collection that walks all modules and requests would take longer than most answers.
        settle_heap()
        return uvloop.run(weigh(load, pool, headers))

    answer_lines(answer)


if __name__ == "__main__":
    main()
