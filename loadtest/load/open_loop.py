"""The open loop: comes to each request when it is due, whatever became of those before."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from loadtest.load.arrivals import Float64Array
from loadtest.load.outgoing import Outgoing, Sender
from loadtest.load.recorder import NEVER, Recorder
from loadtest.load.timer import PreciseTimer

# Beyond so many, answers are read before more requests are sent: a generator that is behind must not stop reading.
MAX_SENDS_AT_ONCE = 64


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
        self._in_flight = 0
        self._by_deadline: deque[Outgoing] = deque()
        self._expiry: asyncio.TimerHandle | None = None
        self._sending = False
        self._timed_out = recorder.failure("timeout")
        self._too_many = recorder.failure("too_many_in_flight")
        self._step()

    @property
    def in_flight(self) -> int:
        """Requests that are out or wait for a connection."""
        return self._in_flight

    async def run(self, sender: Sender) -> None:
        """Sends until the times end, and waits until every request is over.

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
        """Records a request that is over; what the sender calls. A second call for a request does nothing."""
        if request.over:
            return
        request.over = True
        self._in_flight -= 1
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
        elif self._in_flight == 0 and not self._over.done():
            self._over.set_result(None)

    def _step(self) -> None:
        offset_s = next(self._offsets, None)
        self._next = None if offset_s is None else self._begin + offset_s
        self._offset_s = offset_s or 0.0

    def _come_to(self, offset_s: float, due: float, now: float) -> None:
        if self._in_flight >= self._max_in_flight:
            self._record(offset_s, now, NEVER, now, self._too_many)
            return
        request = Outgoing(self._number % self._payloads, offset_s, due, now)
        self._number += 1
        self._in_flight += 1
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
