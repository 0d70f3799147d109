"""Loops that send requests: the open loop when each is due, the closed loop as soon as an answer is there.

The closed loop always has the same number in flight, while server and client are weighed. It has no say in latency; it
shows what a server costs that never waits for work, and, with one request in flight, how fast it answers when idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
import psutil

from loadtest.errors import RequestFailedError
from loadtest.load.config import Arrivals, OfferedLoad
from loadtest.load.result import MAX_CPU_SHARE, Recorder
from loadtest.load.senders import Failure, Outgoing, check_answer, make_sender
from loadtest.workloads.payloads import Pool, changing_headers

ANSWER_TIMEOUT_S = 60.0

Role: TypeAlias = Literal["serve", "nodes"]
"""Of a server's processes: those that run `shard-node`, and all others."""
# Beyond so many, answers are read before more requests are sent: a generator that is behind must not stop reading.
MAX_SENDS_AT_ONCE = 64
_TFD_TIMER_ABSTIME = 1


def arrival_times(
    arrivals: Arrivals, rate: float, until_s: float, *, seed: int = 0, process: int = 0, processes: int = 1
) -> Iterator[float]:
    """Draw the part of one process in the arrivals of a run: ascending seconds below `until_s`.

    `constant`: request k of the run is due at k / rate; the processes take turns. `poisson`: independent exponential
    gaps of mean 1 / rate; each process draws its own at its share of the rate, and together they are such a process
    again, since a superposition of Poisson processes is one.
    """
    # Multiplied, not added up, so that an hour of requests has the rounding error of one.
    times: Iterable[float] = ((number * processes + process) / rate for number in itertools.count())
    if arrivals == "poisson":
        rng = np.random.default_rng([seed, process])
        times = itertools.accumulate(rng.exponential(processes / rate) for _ in itertools.count())
    return itertools.takewhile(lambda time_s: time_s < until_s, times)


class PreciseTimer:
    """Waits until a time, right to some microseconds: Linux's timerfd (timerfd_create(2)) in the running loop.

    libuv and asyncio hand whole milliseconds to epoll, which would be added to each latency that counts from the
    intended time. Raises OSError without file descriptors.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = asyncio.get_running_loop()
        self._expired = asyncio.Event()
        self._loop.add_reader(self._fd, self._on_expiry)

    async def until(self, when: float) -> None:
        """Wait until a time of CLOCK_MONOTONIC in seconds."""
        seconds, nanoseconds = divmod(int(when * 1e9), 1_000_000_000)
        # struct itimerspec: interval, then value; all zero would disarm it.
        setting = (ctypes.c_long * 4)(0, 0, seconds, max(nanoseconds, 1))
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, setting, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        self._expired.clear()
        await self._expired.wait()

    def close(self) -> None:
        """Remove it from the loop."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _on_expiry(self) -> None:
        # It may have been set anew between the event and this call.
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
            self._expired.set()


async def open_loop(
    times: Iterable[float],
    ask: Callable[[Outgoing], Coroutine[None, None, Failure | None]],
    recorder: Recorder,
    *,
    timeout_s: float,
    max_in_flight: int,
) -> None:
    """Send a request at each time, in seconds since the recorder's begin, ascending, and wait until every one is over.

    Args:
        times: may be without end.
        ask: sends a request and waits for its answer until its deadline; returns its failure, None for a right answer.
        recorder: of each request that is over.
        timeout_s: from a request's intended time to its deadline.
        max_in_flight: one beyond fails as `too_many_in_flight` without being sent.

    Raises ExceptionGroup: of what the recorder or a judge raised.
    """
    timer, sends, in_flight = PreciseTimer(), 0, 0

    async def ask_and_record(request: Outgoing) -> None:
        nonlocal in_flight
        failure = await ask(request)
        in_flight -= 1
        recorder.add(request, failure)

    with contextlib.closing(timer):
        async with asyncio.TaskGroup() as group:
            for number, offset_s in enumerate(times):
                intended, now, sends = recorder.begin + offset_s, time.monotonic(), sends + 1
                if intended > now:
                    await timer.until(intended)
                    now, sends = time.monotonic(), 0
                elif sends == MAX_SENDS_AT_ONCE:
                    await asyncio.sleep(0)
                    sends = 0
                request = Outgoing(number, offset_s, intended, intended + timeout_s, now)
                if in_flight < max_in_flight:
                    in_flight += 1
                    group.create_task(ask_and_record(request))
                else:
                    request.finished_at = now
                    recorder.add(request, Failure("too_many_in_flight", f"{in_flight} are in flight"))


@dataclass(frozen=True, slots=True)
class Weighed:
    """What a busy server took for the requests that it answered right within the seconds; times are from sending.

    Processor time is that of the server's processes by role, where there are some, and of the generator's process.
    """

    requests: int
    seconds: float
    server_cpu_s: dict[Role, float]
    client_cpu_s: float
    p50_ms: float
    p99_ms: float

    @property
    def requests_per_s(self) -> float:
        """Answers a second."""
        return self.requests / self.seconds

    @property
    def cpu_ms(self) -> float:
        """Processor time of the server for each answer."""
        return sum(self.server_cpu_s.values()) / self.requests * 1e3


def not_busy_because(busy: Weighed) -> tuple[str, ...]:
    """Say why a closed loop's throughput would be the client's rather than the server's."""
    share = busy.client_cpu_s / busy.seconds
    if share <= MAX_CPU_SHARE:
        return ()
    return (f"throughput: the client used {share:.0%} of a core; at most {MAX_CPU_SHARE:.0%} is allowed",)


def cpu_by_role(process_ids: Iterable[int]) -> dict[Role, float]:
    """Add up the processor seconds that processes have used so far, by what they run. Raises psutil.NoSuchProcess."""
    total_s: dict[Role, float] = {}
    for process in map(psutil.Process, process_ids):
        role: Role = "nodes" if "shard-node" in process.cmdline() else "serve"
        total_s[role] = total_s.get(role, 0.0) + sum(process.cpu_times()[:2])
    return total_s


async def keep_busy(
    load: OfferedLoad, pool: Pool, *, in_flight: int, warmup_s: float, seconds: float, process_ids: Sequence[int]
) -> Weighed:
    """Keep a server of these processes busy, with `in_flight` requests out, for `seconds` after a warm-up.

    Raises RequestFailedError: a request failed. psutil.NoSuchProcess: the server has ended.
    """
    recorder, numbers, stopped = Recorder(time.monotonic()), itertools.count(), asyncio.Event()
    limits = {"connections": in_flight, "channels": min(load.grpc_channels, in_flight)}
    sender = await make_sender(load.target, pool, partial(check_answer, pool), changing_headers(load.varied), **limits)

    async def keep_sending() -> None:
        while not stopped.is_set():
            now = time.monotonic()
            request = Outgoing(next(numbers), now - recorder.begin, now, now + ANSWER_TIMEOUT_S, now)
            if (failure := await sender.ask(request)) is not None:
                why = f"{failure.kind}: {failure.message[:300]} ({in_flight} in flight)"
                raise RequestFailedError(f"{pool.api}: {why}")
            recorder.add(request, None)

    try:
        await sender.open(ANSWER_TIMEOUT_S)
        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(keep_sending())
            await asyncio.sleep(warmup_s)
            begin, cpu, client_s = time.monotonic(), cpu_by_role(process_ids), time.process_time()
            answered = len(recorder)
            await asyncio.sleep(seconds)
            while len(recorder) == answered:  # noqa: ASYNC110 - a slow server, which answers after the seconds
                await asyncio.sleep(0.01)
            after, client_s = cpu_by_role(process_ids), time.process_time() - client_s
            end = time.monotonic()
            # The answers that are out are waited for.
            stopped.set()
    except* RequestFailedError as errors:
        raise errors.exceptions[0] from None
    finally:
        await sender.aclose()
    rows = recorder.records().rows
    rows = rows[(rows["ended"] >= begin - recorder.begin) & (rows["ended"] < end - recorder.begin)]
    p50, p99 = (np.percentile(rows["ended"] - rows["turn"], (50, 99)) * 1e3).tolist()
    return Weighed(
        requests=rows.size,
        seconds=end - begin,
        server_cpu_s={role: used_s - cpu[role] for role, used_s in after.items()},
        client_cpu_s=client_s,
        p50_ms=p50,
        p99_ms=p99,
    )
