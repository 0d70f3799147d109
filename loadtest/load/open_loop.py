"""The open loop: comes to each request when it is due, whatever became of those before."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from loadtest.load.recorder import Float64Array
from loadtest.load.result import Arrivals
from loadtest.load.senders import Failure, OnOver, Outgoing, Sender

# Beyond so many, answers are read before more requests are sent: a generator that is behind must not stop reading.
MAX_SENDS_AT_ONCE = 64
TIMES_PER_CHUNK = 4096
_TFD_TIMER_ABSTIME = 1

Route = Callable[[int], Sender]
"""Chooses the sender of request `number` of a run."""


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


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class PreciseTimer:
    """Calls when a time has come, right to some microseconds: Linux's timerfd (timerfd_create(2)) in the running loop.

    libuv and asyncio hand whole milliseconds to epoll, which would be added to each latency that counts from the
    intended time. A time that is set before another one has come replaces it. Raises OSError without file descriptors.
    """

    def __init__(self, on_time: Callable[[], None]) -> None:
        self._on_time = on_time
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise _last_error()
        self._setting = _Setting()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._expired)

    def set(self, when: float) -> None:
        """Arm it for an absolute time of CLOCK_MONOTONIC in seconds; one that has passed comes at once."""
        # All zero would disarm it.
        whole, rest = divmod(max(int(when * 1e9), 1), 1_000_000_000)
        self._setting.value.seconds, self._setting.value.nanoseconds = whole, rest
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(self._setting), None):
            raise _last_error()

    def close(self) -> None:
        """Remove it from the loop. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _expired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            # It was set anew between the event and this call.
            return
        self._on_time()


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"timerfd: {os.strerror(number)}")


class Loop:
    """Sends requests, each to the sender of its route, and records each once: answered, failed or timed out.

    Args:
        route: by the request's number, from 0.
        record: called with each request that is over.
        begin: of the run, CLOCK_MONOTONIC seconds.
        timeout_s: from a request's intended time until it is given up.

    Attributes:
        in_flight: requests that were sent, or wait for a connection.
    """

    def __init__(self, route: Route, record: OnOver, *, begin: float, timeout_s: float) -> None:
        self.in_flight = 0
        self._route = route
        self._record = record
        self._begin = begin
        self._timeout_s = timeout_s
        self._number = 0
        self._is_stopped = False
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()

    def stop(self) -> None:
        """Send no more requests; the run ends when those in flight are over."""
        self._is_stopped = True
        self._end_if_over()

    def fail(self, error: BaseException) -> None:
        """Send no more requests, and end the run with an error."""
        self._is_stopped = True
        if not self._over.done():
            self._over.set_exception(error)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Let an exception in a callback of the event loop, which is a bug of the generator, end the run."""

        def on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            if (error := context.get("exception")) is None:
                loop.default_exception_handler(context)
            else:
                self.fail(error)

        self._loop.set_exception_handler(on_exception)
        try:
            yield
        finally:
            self._loop.set_exception_handler(None)

    def _send(self, offset_s: float, now: float) -> None:
        intended = self._begin + offset_s
        request = Outgoing(self._number, offset_s, intended, now, intended + self._timeout_s, self._on_over)
        self._number += 1
        self.in_flight += 1
        # A millisecond more, since the event loop's timers may be that early.
        wait_s = max(request.deadline - now, 0) + 0.001
        request.expiry = self._loop.call_later(wait_s, request.give_up, Failure("timeout"))
        self._route(request.number).send(request)

    def _on_over(self, request: Outgoing, ended: float, failure: Failure | None) -> None:
        self.in_flight -= 1
        self._record(request, ended, failure)
        self._send_more(ended)
        self._end_if_over()

    def _send_more(self, now: float) -> None:
        raise NotImplementedError

    def _end_if_over(self) -> None:
        if self._is_stopped and self.in_flight == 0 and not self._over.done():
            self._over.set_result(None)


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
        record: OnOver,
        *,
        begin: float,
        timeout_s: float,
        max_in_flight: int = 4096,
    ) -> None:
        super().__init__(route, record, begin=begin, timeout_s=timeout_s)
        self._offsets: Iterator[float] = (offset for chunk in times for offset in chunk.tolist())
        self._offset_s = 0.0
        self._next = 0.0
        self._max_in_flight = max_in_flight
        self._sending = False
        self._step()

    async def run(self) -> None:
        """Send until the times end or `stop` is called, and wait until every request is over.

        Raises:
            Exception: what `record`, a judge or another callback raised.
        """
        self._timer = PreciseTimer(self._send_due)
        try:
            with self._watched():
                self._send_due()
                await self._over
        finally:
            self._timer.close()

    def _send_more(self, now: float) -> None:
        # Many answers may be before the timer in the event loop's queue.
        if now >= self._next:
            self._send_due()

    def _send_due(self) -> None:
        if self._sending:
            return
        self._sending = True
        sends, now = 0, time.monotonic()
        while not self._is_stopped and self._next <= now and sends < MAX_SENDS_AT_ONCE:
            offset_s = self._offset_s
            self._step()
            if self.in_flight < self._max_in_flight:
                self._send(offset_s, now)
            else:
                failure = Failure("too_many_in_flight", f"{self.in_flight} requests are in flight")
                unsent = Outgoing(self._number, offset_s, self._begin + offset_s, now, now, self._record)
                self._number += 1
                unsent.finish(now, failure)
            sends += 1
            now = time.monotonic()
        self._sending = False
        if not self._is_stopped:
            self._timer.set(self._next)
        self._end_if_over()

    def _step(self) -> None:
        offset_s = next(self._offsets, None)
        if offset_s is None:
            self._is_stopped = True
        else:
            self._offset_s, self._next = offset_s, self._begin + offset_s
