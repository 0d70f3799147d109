"""An event loop on simulated time: nothing is waited for, blocking work is done at once, and sockets lead nowhere.

Every callback belongs to the process whose code scheduled it (`PROCESS`, by its context). Those of a process that was
killed never run: no `finally` of it does either, as after `kill -9`.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from asyncio import events, futures, tasks
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.network import Network
    from tests.simulation.processes import Process

PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class StuckError(Exception):
    """Nothing is left to happen, or far too much happened at one moment."""


class SimulatedLoop(asyncio.AbstractEventLoop):
    """Runs what is due, then moves the clock on to what is due next. `network` is asked for connections."""

    def __init__(self) -> None:
        self.now = 0.0
        self.network: Network | None = None
        self.work_s: Callable[[], float] = lambda: 0.001
        self.thread_s: Callable[[], float] = lambda: 0.001
        self.in_executor = False
        self.failures: list[dict[str, Any]] = []
        # Tasks of killed processes stay until the end: collected, their `finally` clauses would run.
        self._tasks: list[asyncio.Task[Any]] = []
        self._ready: deque[events.Handle] = deque()
        self._timers: list[tuple[float, int, events.Handle]] = []
        self._count = 0

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> events.Handle:
        handle = events.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        handle = events.TimerHandle(when, callback, args, self, context)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, handle))
        return handle

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        pass

    def create_future(self) -> asyncio.Future[Any]:
        return futures.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Any = None) -> Any:
        task = tasks.Task(coro, loop=self, name=name, context=context)
        task.add_done_callback(self._ended)
        self._tasks.append(task)
        if len(self._tasks) > 4096:
            self._tasks = [task for task in self._tasks if not task.done()]
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append({"message": f"task {task.get_name()}", "exception": error})

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.failures.append(context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Do it a moment later, all at once; nothing else happens meanwhile."""
        return self._run_after(self.work_s(), func, *args)

    def begin_thread(self, work: Callable[[], object], name: str, *, low_priority: bool) -> None:
        """Do work that has a thread of its own elsewhere, as `run_in_executor` does."""
        self._run_after(self.thread_s(), work)

    def _run_after(self, delay_s: float, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            self.in_executor = True
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)
            finally:
                self.in_executor = False

        self.call_later(delay_s, run)
        return future

    async def create_connection(self, protocol_factory: Any, host: str, port: int, **options: Any) -> Any:
        assert self.network is not None
        return await self.network.connect(protocol_factory, (host, port))

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run until `main` is done. Raises as it does, or StuckError."""
        task = self.create_task(main)
        events._set_running_loop(self)
        try:
            steps, moment = 0, -1.0
            while not task.done():
                while self._ready:
                    handle = self._ready.popleft()
                    if handle._cancelled:
                        continue
                    process = handle._context.get(PROCESS)
                    if process is None or process.is_running:
                        handle._run()
                        steps += 1
                if task.done():
                    break
                if not self._timers:
                    raise StuckError("nothing is left to happen")
                when, _, timer = heapq.heappop(self._timers)
                if when > moment:
                    steps, moment = 0, when
                elif steps > 200_000:
                    raise StuckError(f"200,000 steps at {when:.6f}: {timer!r}")
                if not timer._cancelled:
                    self.now = max(self.now, when)
                    self._ready.append(timer)
        finally:
            events._set_running_loop(None)
        return task.result()
