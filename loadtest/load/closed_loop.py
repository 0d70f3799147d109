"""The closed loop: always the same number of requests out, while the server and the client are weighed.

Each answer is followed by the next request at once. It has no say in latency; it shows what a server costs when it
never waits for work, and, with one request in flight, how fast it answers when it has nothing else to do.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator

import numpy as np
import psutil

from loadtest.errors import LateAnswerError, RequestFailedError
from loadtest.load.messages import Busy, Weighed
from loadtest.load.recorder import OK
from loadtest.load.senders import GrpcSender, HttpSender, Outgoing, make_sender
from loadtest.workloads.payloads import Headers, Payloads

ANSWER_TIMEOUT_S = 60.0
LATE_KINDS = frozenset({"timeout", "http_504", "grpc_deadline_exceeded"})
"""Kinds of failed requests that had too little time."""
_FAILED = 1


def cpu_seconds(process_ids: Iterable[int]) -> float:
    """Add up the processor time that processes have used so far, user and system. Raises psutil.NoSuchProcess."""
    times = [psutil.Process(one).cpu_times() for one in process_ids]
    return sum(one.user + one.system for one in times)


class _ClosedLoop:
    def __init__(self, pool: Payloads) -> None:
        self.latencies_s: list[float] = []
        self.is_counting = False
        self._numbers = itertools.cycle(range(len(pool)))
        self._name = pool.api
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self._fail(context.get("exception")))

    def begin(self, sender: HttpSender | GrpcSender, in_flight: int) -> None:
        self._sender = sender
        for _ in range(in_flight):
            self._send()

    async def go_on(self, seconds: float) -> None:
        """Wait; raise the first failure."""
        await asyncio.wait([self._failed], timeout=seconds)
        if self._failed.done():
            self._failed.result()

    def failure(self, kind: str, message: str = "") -> int:
        error = LateAnswerError if kind in LATE_KINDS else RequestFailedError
        self._fail(error(f"{self._name}: {kind}: {message[:300]}"))
        return _FAILED

    def on_over(self, request: Outgoing, ended: float, code: int) -> None:
        if code != OK:
            return
        if self.is_counting:
            self.latencies_s.append(ended - request.turn)
        self._send()

    def _send(self) -> None:
        now = time.monotonic()
        self._sender.send(Outgoing(next(self._numbers), 0.0, now, now))

    def _fail(self, error: BaseException | None) -> None:
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)


async def keep_busy(asked: Busy, pool: Payloads, headers: Iterator[Headers]) -> Weighed:
    """Keep a server busy, each request sent with the next of `headers` beside its own.

    Raises:
        RequestFailedError: a request failed, or its answer has another number of scores than candidates.
        LateAnswerError: its deadline has passed.
        psutil.NoSuchProcess: the server has ended.
    """
    loop = _ClosedLoop(pool)
    sender = await make_sender(
        asked.load.at,
        pool,
        loop,
        loop.on_over,
        headers,
        connections=asked.in_flight,
        channels=min(asked.load.grpc_channels, asked.in_flight),
        timeout_s=ANSWER_TIMEOUT_S,
    )
    own = (psutil.Process().pid,)
    try:
        await sender.open(ANSWER_TIMEOUT_S)
        loop.begin(sender, asked.in_flight)
        await loop.go_on(asked.warmup_s)
        began, cpu_s, own_s = time.perf_counter(), cpu_seconds(asked.process_ids), cpu_seconds(own)
        loop.is_counting = True
        await loop.go_on(asked.seconds)
        while not loop.latencies_s:
            await loop.go_on(0.01)
        loop.is_counting = False
        seconds = time.perf_counter() - began
        cpu_s, own_s = cpu_seconds(asked.process_ids) - cpu_s, cpu_seconds(own) - own_s
    finally:
        asyncio.get_running_loop().set_exception_handler(None)
        await sender.close()
    p50, p99 = (np.percentile(loop.latencies_s, (50, 99)) * 1e3).tolist()
    return Weighed(
        requests=len(loop.latencies_s),
        seconds=seconds,
        server_cpu_s=cpu_s,
        client_cpu_s=own_s,
        p50_ms=p50,
        p99_ms=p99,
    )
