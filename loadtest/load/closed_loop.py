"""The closed loop: always the same number of requests in flight, while the server and the client are weighed.

Each answer is followed by the next request at once. It has no say in latency; it shows what a server costs when it
never waits for work, and, with one request in flight, how fast it answers when it has nothing else to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import psutil

from loadtest.errors import LateAnswerError, RequestFailedError
from loadtest.load.config import OfferedLoad
from loadtest.load.open_loop import Loop, Record, Route
from loadtest.load.recorder import MAX_CPU_SHARE, Recorder
from loadtest.load.senders import AnswerCheck, Failure, Outgoing, make_sender
from loadtest.workloads.payloads import Pool, changing_headers

ANSWER_TIMEOUT_S = 60.0
LATE_KINDS = frozenset({"timeout", "http_504", "grpc_deadline_exceeded"})
"""Kinds of failed requests that had too little time."""

Role: TypeAlias = Literal["serve", "nodes"]
"""Of a server's processes: those that run `shard-node`, and all others."""


class ClosedLoop(Loop):
    """Keeps requests in flight. What `route` returns may change: a sender that it leaves gets no more requests.

    Args:
        route, record, begin, timeout_s: as in `Loop`.
        in_flight: requests that are always out.
    """

    def __init__(
        self, route: Route, record: Record, *, in_flight: int, begin: float, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        super().__init__(route, record, begin=begin, timeout_s=timeout_s)
        self._requests = in_flight

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send while the block runs, then wait for the answers that are out.

        Raises:
            ExceptionGroup: of what `record` or a judge raised, which ends the block.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(self._requests):
                group.create_task(self._keep_asking())
            yield
            self.stop()

    async def _keep_asking(self) -> None:
        while not self._is_stopped:
            now = time.monotonic()
            await self._ask(self._next(now - self._begin, now))


class CpuTime(NamedTuple):
    """Processor time of some processes, in their code and in the kernel."""

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
        server_cpu: processor time of the server's processes by role; a role that none has is not there.
        client_cpu_s: that of the generator's process.
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
        return sum(cpu.all_s for cpu in self.server_cpu.values())

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
    total: dict[Role, CpuTime] = {}
    for process in map(psutil.Process, process_ids):
        role: Role = "nodes" if "shard-node" in process.cmdline() else "serve"
        before, times = total.get(role, CpuTime()), process.cpu_times()
        total[role] = CpuTime(before.user_s + times.user, before.kernel_s + times.system)
    return total


def cpu_seconds(process_ids: Iterable[int]) -> float:
    """Add up the processor time that processes have used so far. Raises psutil.NoSuchProcess."""
    return sum(cpu.all_s for cpu in cpu_by_role(process_ids).values())


async def keep_busy(
    load: OfferedLoad, pool: Pool, *, in_flight: int, warmup_s: float, seconds: float, process_ids: Sequence[int]
) -> Weighed:
    """Keep a server busy.

    Args:
        load: where requests go.
        pool: of them.
        in_flight: requests that are always out.
        warmup_s: before the seconds.
        seconds: that are counted.
        process_ids: of the server, weighed at the begin and the end of the seconds.

    Raises:
        RequestFailedError: a request failed, or its answer has another number of scores than candidates.
        LateAnswerError: its deadline has passed.
        psutil.NoSuchProcess: the server has ended.
    """
    recorder = Recorder(time.monotonic())

    def record(request: Outgoing, failure: Failure | None) -> None:
        if failure is not None:
            error = LateAnswerError if failure.kind in LATE_KINDS else RequestFailedError
            raise error(f"{pool.api}: {failure.kind}: {failure.message[:300]}")
        recorder.add(request, failure)

    limits = {"connections": in_flight, "channels": min(load.grpc_channels, in_flight)}
    sender = await make_sender(load.at, pool, AnswerCheck(pool), changing_headers(load.varied), **limits)
    loop = ClosedLoop(lambda number: sender, record, in_flight=in_flight, begin=recorder.begin)
    client = (psutil.Process().pid,)
    try:
        await sender.open(ANSWER_TIMEOUT_S)
        async with loop.running():
            await asyncio.sleep(warmup_s)
            began, cpu, client_s = time.monotonic(), cpu_by_role(process_ids), cpu_seconds(client)
            answered = len(recorder)
            await asyncio.sleep(seconds)
            while len(recorder) == answered:  # noqa: ASYNC110 - a slow server, which answers after the seconds
                await asyncio.sleep(0.01)
            after, client_s = cpu_by_role(process_ids), cpu_seconds(client) - client_s
            ended = time.monotonic()
    except* RequestFailedError as errors:
        raise errors.exceptions[0] from None
    finally:
        await sender.close()
    rows = recorder.records().rows
    rows = rows[(rows["ended"] >= began - recorder.begin) & (rows["ended"] < ended - recorder.begin)]
    p50, p99 = (np.percentile(rows["ended"] - rows["turn"], (50, 99)) * 1e3).tolist()
    return Weighed(
        requests=rows.size,
        seconds=ended - began,
        server_cpu={
            role: CpuTime(used.user_s - cpu[role].user_s, used.kernel_s - cpu[role].kernel_s)
            for role, used in after.items()
        },
        client_cpu_s=client_s,
        p50_ms=p50,
        p99_ms=p99,
    )
