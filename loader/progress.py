"""Run long work: report its progress, leave time for requests, and call it off from asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from loader.errors import ShardrankError

logger = logging.getLogger(__name__)
PIECE_BYTES: Final = 4 << 20
"""Paced work reports its progress at least this often."""
BACKGROUND_NICENESS: Final = 10
BACKGROUND_SWITCH_INTERVAL_S: Final = 0.0005
"""For `sys.setswitchinterval`, where requests share an interpreter with background work: how long they wait for it."""
_MIN_PAUSE_S: Final = 0.002
_MAX_PAUSE_S: Final = 5.0
Result = TypeVar("Result")

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called now and then during long work, by one thread at a time, with what is done, and how many rows or bytes of how
many; at its last call all are."""


def no_progress(what: str, done: int, total: int) -> None:
    """Ignore progress."""


def counting(progress: Progress, what: str, total: int) -> Callable[[int], None]:
    """Return a function that adds to what is done, and reports it. Thread-safe."""
    done, lock = 0, threading.Lock()

    def add(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress(what, done, total)

    return add


def throttled(
    progress: Progress,
    cpu_share: float,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Return a progress that sleeps after each piece of work, beginning now, so that it takes a share of the time.

    Time in which the work itself waits for a disk or a core counts as work, so that a busy machine slows it further
    down. To end work from outside, let `sleep` raise, or `progress`; `clock` returns monotonic seconds.
    """
    started_at = clock()

    def paced(what: str, done: int, total: int) -> None:
        nonlocal started_at
        progress(what, done, total)
        pause_s = (clock() - started_at) * (1 / cpu_share - 1)
        if pause_s >= _MIN_PAUSE_S or (pause_s > 0 and done == total):
            sleep(min(pause_s, _MAX_PAUSE_S))
            started_at = clock()

    return paced


class BeginThread(Protocol):
    """Begins work that blocks; `begin_thread`, or what a simulation has in its place."""

    def __call__(self, work: Callable[[], object], name: str, *, low_priority: bool) -> None:
        """Begin, and return at once."""


def begin_thread(work: Callable[[], object], name: str, *, low_priority: bool) -> None:
    """Do work in a thread of its own, which is no daemon: an interpreter aborts if it ends while tensors are used.

    A low priority is right for work that copies and hashes without the interpreter's lock, wrong for work in Python: on
    busy cores such a thread waits with the lock, and all requests with it. On Linux each thread, and those that it
    starts, has a niceness (setpriority(2), "C library/kernel differences").
    """

    def run() -> None:
        if low_priority:
            try:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICENESS)
            except OSError as error:
                logger.warning("%s has the usual priority: %s", name, error)
        work()

    threading.Thread(target=run, name=name).start()


class CalledOffError(ShardrankError, kind="called_off"):
    """Background work was called off."""


class CancelToken:
    """A request to end background work. Thread-safe."""

    def __init__(self) -> None:
        self._called_off = threading.Event()

    def call_off(self) -> None:
        """End the work at its next check."""
        self._called_off.set()

    def check(self) -> None:
        """Raise CalledOffError if the work was called off."""
        if self._called_off.is_set():
            raise CalledOffError("called off")

    def rest(self, duration_s: float) -> None:
        """Sleep until the work is called off, at most so long. Raises CalledOffError as `check`."""
        self._called_off.wait(duration_s)
        self.check()

    def over(self, progress: Progress) -> Progress:
        """Return a progress that raises CalledOffError once the work was called off."""

        def checked(what: str, done: int, total: int) -> None:
            self.check()
            progress(what, done, total)

        return checked


async def in_background(
    work: Callable[[CancelToken], Result],
    name: str,
    free: Callable[[Result], None],
    begin: BeginThread = begin_thread,
    *,
    low_priority: bool = True,
) -> Result:
    """Run `work`, which checks its token now and then, in a thread. Raises as `work`.

    When the caller is cancelled, the work is called off, and this ends only once the work has; a result that came
    nevertheless is passed to `free`.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()
    token = CancelToken()

    def run() -> None:
        resolve: Callable[[Any], None] = done.set_result
        value: object
        try:
            value = work(token)
        except BaseException as error:
            resolve, value = done.set_exception, error
        # The loop may be closed by the time that the thread ends; then no caller waits for it.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(resolve, value)

    begin(run, name, low_priority=low_priority)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        token.call_off()
        await ended(done)
        if not done.cancelled() and done.exception() is None:
            free(done.result())
        raise


async def ended(done: asyncio.Future[Any]) -> None:
    """Wait until it is done, however often the waiting itself is cancelled; read no result."""
    while not done.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([done])


async def all_or_first_error(waiting: Iterable[Awaitable[Any]]) -> None:
    """Run all at once; when one fails, or the waiting is cancelled, end the others. Raises the first failure."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in waiting]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end_tasks(tasks)


async def end_tasks(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
