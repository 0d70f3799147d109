"""The open loop: comes to each request when it is due, whatever became of those before."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from loadtest.load.recorder import NEVER, Float64Array, Recorder
from loadtest.load.result import Arrivals
from loadtest.load.senders import GrpcSender, HttpSender, Outgoing

# Beyond so many, answers are read before more requests are sent: a generator that is behind must not stop reading.
MAX_SENDS_AT_ONCE = 64
TIMES_PER_CHUNK = 4096
_TFD_TIMER_ABSTIME = 1


def arrival_times(
    arrivals: Arrivals, rate: float, until_s: float, *, seed: int, process: int = 0, processes: int = 1
) -> Iterator[Float64Array]:
    """Draw the part of one process in the arrivals of a run, in chunks: ascending seconds below `until_s`.

    `constant`: request k of the run is due at k / rate; the processes take turns. `poisson`: independent exponential
    gaps of mean 1 / rate; each process draws its own at its share of the rate, and together they are such a process
    again, since a superposition of Poisson processes is one.
    """
    if arrivals == "constant":
        times = _constant(rate, process, processes)
    else:
        times = _poisson(rate / processes, np.random.default_rng([seed, process]))
    for chunk in times:
        inside = int(np.searchsorted(chunk, until_s, side="left"))
        if inside:
            yield chunk[:inside]
        if inside < len(chunk):
            return


def _constant(rate: float, process: int, processes: int) -> Iterator[Float64Array]:
    first = 0
    while True:
        # Multiplied, not added up, so that an hour of requests has the rounding error of one.
        yield ((first + np.arange(TIMES_PER_CHUNK)) * processes + process) / rate
        first += TIMES_PER_CHUNK


def _poisson(rate: float, rng: np.random.Generator) -> Iterator[Float64Array]:
    begin = 0.0
    while True:
        times = begin + np.cumsum(rng.exponential(1 / rate, TIMES_PER_CHUNK))
        yield times
        begin = float(times[-1])


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
        """Take it out of the loop. Idempotent."""
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


class OpenLoop:
    """Sends at given times and records each request once: answered, failed, timed out or not sent.

    Args:
        times: seconds since the run's begin, ascending, in chunks.
        begin: the run's begin, CLOCK_MONOTONIC seconds.
        payloads: how many there are; requests take them in turn.
        recorder: of what happens.
        timeout_s: from a request's intended time until it is given up.
        max_in_flight: requests that are out or wait for a connection; one beyond fails without being sent.
        clock: CLOCK_MONOTONIC in seconds.
    """

    def __init__(
        self,
        times: Iterator[Float64Array],
        begin: float,
        payloads: int,
        recorder: Recorder,
        *,
        timeout_s: float,
        max_in_flight: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.in_flight = 0
        self._offsets: Iterator[float] = (offset for chunk in times for offset in chunk.tolist())
        self._offset_s = 0.0
        self._next: float | None = None
        self._begin = begin
        self._payloads = payloads
        self._recorder = recorder
        self._timeout_s = timeout_s
        self._max_in_flight = max_in_flight
        self._clock = clock
        self._number = 0
        self._by_deadline: deque[Outgoing] = deque()
        self._expiry: asyncio.TimerHandle | None = None
        self._sending = False
        self._timed_out = recorder.failure("timeout")
        self._too_many = recorder.failure("too_many_in_flight")
        self._step()

    async def run(self, sender: HttpSender | GrpcSender) -> None:
        """Send until the times end, and wait until every request is over.

        Raises:
            Exception: whatever is raised in a callback of the event loop: a defect of the generator.
        """
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._sender = sender
        self._over: asyncio.Future[None] = loop.create_future()
        self._timer = PreciseTimer(self._send_due)
        loop.set_exception_handler(self._on_defect)
        try:
            self._send_due()
            await self._over
        finally:
            loop.set_exception_handler(None)
            self._timer.close()
            if self._expiry is not None:
                self._expiry.cancel()

    def on_over(self, request: Outgoing, ended: float, code: int) -> None:
        """Record a request that is over; what the sender calls. A second call for a request does nothing."""
        if request.over:
            return
        request.over = True
        self.in_flight -= 1
        self._record(request.offset_s, request.turn, request.sent, ended, code)
        # Many answers may stand before the timer in the event loop's queue.
        if self._next is None or ended >= self._next:
            self._send_due()

    def _send_due(self) -> None:
        if self._sending:
            return
        self._sending = True
        sends = 0
        now = self._clock()
        while (due := self._next) is not None and due <= now and sends < MAX_SENDS_AT_ONCE:
            offset_s = self._offset_s
            self._step()
            self._come_to(offset_s, due, now)
            sends += 1
            now = self._clock()
        self._sending = False
        if self._next is not None:
            self._timer.set(self._next)
        elif self.in_flight == 0 and not self._over.done():
            self._over.set_result(None)

    def _step(self) -> None:
        offset_s = next(self._offsets, None)
        self._next = None if offset_s is None else self._begin + offset_s
        self._offset_s = offset_s or 0.0

    def _come_to(self, offset_s: float, due: float, now: float) -> None:
        if self.in_flight >= self._max_in_flight:
            self._record(offset_s, now, NEVER, now, self._too_many)
            return
        request = Outgoing(self._number % self._payloads, offset_s, due, now)
        self._number += 1
        self.in_flight += 1
        self._by_deadline.append(request)
        if self._expiry is None:
            self._expire_later(request, now)
        self._sender.send(request)

    def _expire_later(self, request: Outgoing, now: float) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        # A millisecond more, since the event loop's timers may be that early.
        self._expiry = self._loop.call_later(max(request.intended + self._timeout_s - now, 0) + 0.001, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        now = self._clock()
        while self._by_deadline:
            request = self._by_deadline[0]
            if not request.over:
                if request.intended + self._timeout_s > now:
                    self._expire_later(request, now)
                    return
                self.on_over(request, now, self._timed_out)
                self._sender.give_up(request)
            self._by_deadline.popleft()

    def _record(self, offset_s: float, turn: float, sent: float, ended: float, code: int) -> None:
        # The offset as it was drawn: `begin` plus it and minus `begin` again may be in the second before.
        begin = self._begin
        self._recorder.add(offset_s, turn - begin, sent if sent == NEVER else sent - begin, ended - begin, code)

    def _on_defect(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None:
            loop.default_exception_handler(context)
        elif not self._over.done():
            self._over.set_exception(error)
