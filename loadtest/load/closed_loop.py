"""The closed loop: always the same number of requests out, while the server and the client are weighed.

Each answer is followed by the next request at once. It has no say in latency; it shows what a server costs when it
never waits for work, and, with one request in flight, how fast it answers when it has nothing else to do.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import psutil

from loadtest.errors import LateAnswerError, RequestFailedError
from loadtest.load.config import OfferedLoad
from loadtest.load.recorder import MAX_CPU_SHARE, OK
from loadtest.load.senders import GrpcSender, HttpSender, Outgoing, make_sender
from loadtest.workloads.payloads import Headers, Payloads

ANSWER_TIMEOUT_S = 60.0
LATE_KINDS = frozenset({"timeout", "http_504", "grpc_deadline_exceeded"})
"""Kinds of failed requests that had too little time."""
_FAILED = 1

Role: TypeAlias = Literal["serve", "nodes"]
"""Of a server's processes: those that run `shard-node`, and all others."""


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Processor time of some processes, in their own code and in the kernel."""

    user_s: float = 0.0
    kernel_s: float = 0.0

    @property
    def all_s(self) -> float:
        """Add both up."""
        return self.user_s + self.kernel_s


@dataclass(frozen=True, slots=True)
class Weighed:
    """What a busy server took.

    Attributes:
        requests: answered right within the seconds.
        seconds: that it were.
        server_cpu: processor time of the server's processes by role; a role that none has is not there.
        client_cpu_s: that of the generator's own process.
        p50_ms, p99_ms: from sending to answer.
    """

    requests: int
    seconds: float
    server_cpu: dict[Role, CpuTime]
    client_cpu_s: float
    p50_ms: float
    p99_ms: float

    @property
    def server_cpu_s(self) -> float:
        """Processor time of all of the server's processes."""
        return sum(one.all_s for one in self.server_cpu.values())

    @property
    def requests_per_s(self) -> float:
        """Answers a second."""
        return self.requests / self.seconds

    @property
    def cpu_ms(self) -> float:
        """Processor time of the server for each answer."""
        return self.server_cpu_s / self.requests * 1e3


def not_busy_because(busy: Weighed) -> tuple[str, ...]:
    """Say why a closed loop's throughput would be the client's rather than the server's."""
    share = busy.client_cpu_s / busy.seconds
    if share <= MAX_CPU_SHARE:
        return ()
    return (f"throughput: the client used {share:.0%} of a core; at most {MAX_CPU_SHARE:.0%} is allowed",)


def cpu_by_role(process_ids: Iterable[int]) -> dict[Role, CpuTime]:
    """Add up the processor time that processes have used so far, by what they run. Raises psutil.NoSuchProcess."""
    found: dict[Role, CpuTime] = {}
    for process in map(psutil.Process, process_ids):
        role: Role = "nodes" if "shard-node" in process.cmdline() else "serve"
        before, times = found.get(role, CpuTime()), process.cpu_times()
        found[role] = CpuTime(before.user_s + times.user, before.kernel_s + times.system)
    return found


def cpu_seconds(process_ids: Iterable[int]) -> float:
    """Add up the processor time that processes have used so far. Raises psutil.NoSuchProcess."""
    return sum(one.all_s for one in cpu_by_role(process_ids).values())


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


async def keep_busy(
    load: OfferedLoad,
    pool: Payloads,
    headers: Iterator[Headers],
    *,
    in_flight: int,
    warmup_s: float,
    seconds: float,
    process_ids: Sequence[int],
) -> Weighed:
    """Keep a server busy, each request sent with the next of `headers` beside its own.

    Args:
        load: where requests go.
        pool: of them.
        headers: one after the other.
        in_flight: requests that are always out.
        warmup_s: before the seconds.
        seconds: that are counted.
        process_ids: of the server, weighed at the begin and the end of the seconds.

    Raises:
        RequestFailedError: a request failed, or its answer has another number of scores than candidates.
        LateAnswerError: its deadline has passed.
        psutil.NoSuchProcess: the server has ended.
    """
    loop = _ClosedLoop(pool)
    sender = await make_sender(
        load.at,
        pool,
        loop,
        loop.on_over,
        headers,
        connections=in_flight,
        channels=min(load.grpc_channels, in_flight),
        timeout_s=ANSWER_TIMEOUT_S,
    )
    own = (psutil.Process().pid,)
    try:
        await sender.open(ANSWER_TIMEOUT_S)
        loop.begin(sender, in_flight)
        await loop.go_on(warmup_s)
        began, cpu, own_s = time.perf_counter(), cpu_by_role(process_ids), cpu_seconds(own)
        loop.is_counting = True
        await loop.go_on(seconds)
        while not loop.latencies_s:
            await loop.go_on(0.01)
        loop.is_counting = False
        took_s = time.perf_counter() - began
        after, own_s = cpu_by_role(process_ids), cpu_seconds(own) - own_s
    finally:
        asyncio.get_running_loop().set_exception_handler(None)
        await sender.close()
    p50, p99 = (np.percentile(loop.latencies_s, (50, 99)) * 1e3).tolist()
    return Weighed(
        requests=len(loop.latencies_s),
        seconds=took_s,
        server_cpu={
            role: CpuTime(one.user_s - cpu[role].user_s, one.kernel_s - cpu[role].kernel_s)
            for role, one in after.items()
        },
        client_cpu_s=own_s,
        p50_ms=p50,
        p99_ms=p99,
    )
