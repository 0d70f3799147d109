"""The open loop: comes to each request when it is due, whatever became of those before."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from loadtest.load.recorder import Float64Array
from loadtest.load.result import Arrivals
from loadtest.load.senders import Failure, Outgoing, Sender

# Beyond so many, answers are read before more requests are sent: a generator that is behind must not stop reading.
MAX_SENDS_AT_ONCE = 64
TIMES_PER_CHUNK = 4096
_TFD_TIMER_ABSTIME = 1

Route = Callable[[int], Sender]
"""Chooses the sender of request `number` of a run."""
Record = Callable[[Outgoing, Failure | None], None]
"""Takes a request that is over, and its failure; None for a right answer."""


def arrival_times(
    arrivals: Arrivals, rate: float, until_s: float, *, seed: int = 0, process: int = 0, processes: int = 1
) -> Iterator[Float64Array]:
    """Draw the part of one process in the arrivals of a run, in chunks: ascending seconds below `until_s`.

    `constant`: request k of the run is due at k / rate; the processes take turns. `poisson`: independent exponential
    gaps of mean 1 / rate; each process draws its own at its share of the rate, and together they are such a process
    again, since a superposition of Poisson processes is one.
    """
    rng = np.random.default_rng([seed, process])
    first, begin = 0, 0.0
    while True:
        if arrivals == "constant":
            # Multiplied, not added up, so that an hour of requests has the rounding error of one.
            times = ((first + np.arange(TIMES_PER_CHUNK)) * processes + process) / rate
        else:
            times = begin + np.cumsum(rng.exponential(processes / rate, TIMES_PER_CHUNK))
        first, begin = first + TIMES_PER_CHUNK, float(times[-1])
        inside = int(np.searchsorted(times, until_s, side="left"))
        if inside:
            yield times[:inside]
        if inside < len(times):
            return


class PreciseTimer:
    """Waits until a time, right to some microseconds: Linux's timerfd (timerfd_create(2)) in the running loop.

    libuv and asyncio hand whole milliseconds to epoll, which would be added to each latency that counts from the
    intended time. Raises OSError without file descriptors.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._checked(self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        self._loop = asyncio.get_running_loop()
        self._expired = asyncio.Event()
        self._loop.add_reader(self._fd, self._on_expiry)

    async def until(self, when: float) -> None:
        """Wait until a time of CLOCK_MONOTONIC in seconds."""
        seconds, nanoseconds = divmod(int(when * 1e9), 1_000_000_000)
        # struct itimerspec: interval, then value; all zero would disarm it.
        setting = (ctypes.c_long * 4)(0, 0, seconds, max(nanoseconds, 1))
        self._checked(self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, setting, None))
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

    @staticmethod
    def _checked(value: int) -> int:
        if value < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"timerfd: {os.strerror(number)}")
        return value


class Loop:
    """Sends requests, and records each once it is answered, failed or timed out.

    Args:
        route: chooses a request's sender.
        record: called with each request that is over, and its failure.
        begin: of the run, CLOCK_MONOTONIC seconds.
        timeout_s: from a request's intended time until it is given up.

    Attributes:
        in_flight: requests that were sent, or wait for a connection.
    """

    def __init__(self, route: Route, record: Record, *, begin: float, timeout_s: float) -> None:
        self.in_flight = 0
        self._route = route
        self._record = record
        self._begin = begin
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._is_stopped = False

    def stop(self) -> None:
        """Send no more requests; the run ends when those in flight are over."""
        self._is_stopped = True

    def _next(self, offset_s: float, now: float) -> Outgoing:
        """Make the next request, which `_ask` must be called with."""
        intended = self._begin + offset_s
        self.in_flight += 1
        return Outgoing(next(self._numbers), offset_s, intended, intended + self._timeout_s, now)

    async def _ask(self, request: Outgoing) -> None:
        failure = await self._route(request.number).ask(request)
        self.in_flight -= 1
        self._record(request, failure)


class OpenLoop(Loop):
    """Sends at given times.

    Args:
        times: seconds since the run's begin, ascending, in chunks; they may be without end.
        route, record, begin, timeout_s: as in `Loop`.
        max_in_flight: a request beyond fails as `too_many_in_flight` without being sent.
    """

    def __init__(
        self,
        times: Iterable[Float64Array],
        route: Route,
        record: Record,
        *,
        begin: float,
        timeout_s: float,
        max_in_flight: int = 4096,
    ) -> None:
        super().__init__(route, record, begin=begin, timeout_s=timeout_s)
        self._times = times
        self._max_in_flight = max_in_flight

    async def run(self) -> None:
        """Send until the times end or `stop` is called, and wait until every request is over.

        Raises:
            ExceptionGroup: of what `record` or a judge raised.
        """
        timer, sends = PreciseTimer(), 0
        with contextlib.closing(timer):
            async with asyncio.TaskGroup() as group:
                for offset_s in itertools.chain.from_iterable(chunk.tolist() for chunk in self._times):
                    now, sends = time.monotonic(), sends + 1
                    if self._begin + offset_s > now:
                        await timer.until(self._begin + offset_s)
                        now, sends = time.monotonic(), 0
                    elif sends == MAX_SENDS_AT_ONCE:
                        await asyncio.sleep(0)
                        sends = 0
                    if self._is_stopped:
                        break
                    request = self._next(offset_s, now)
                    if self.in_flight <= self._max_in_flight:
                        group.create_task(self._ask(request))
                    else:
                        self.in_flight -= 1
                        request.ended = now
                        self._record(request, Failure("too_many_in_flight", f"{self.in_flight} are in flight"))
