"""Long work in a thread of its own, at a low priority, that an asyncio program can call off."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from loader.errors import ShardrankError
from loader.pace import lower_own_priority
from loader.progress import Progress, no_progress

Result = TypeVar("Result")


class CalledOffError(ShardrankError):
    """Background work that nobody wants any more."""

    kind = "called_off"


class Wish:
    """Whether background work is still wanted. Thread-safe."""

    def __init__(self) -> None:
        self._called_off = threading.Event()

    def call_off(self) -> None:
        """Ends the work at its next look."""
        self._called_off.set()

    def check(self) -> None:
        """Raises CalledOffError if the work is not wanted any more."""
        if self._called_off.is_set():
            raise CalledOffError("called off")

    def rest(self, duration_s: float) -> None:
        """Sleeps, no longer than the work is wanted. Raises CalledOffError as `check`."""
        self._called_off.wait(duration_s)
        self.check()

    def over(self, progress: Progress = no_progress) -> Progress:
        """A progress that raises CalledOffError once the work is not wanted any more."""

        def checked(what: str, done: int, total: int) -> None:
            self.check()
            progress(what, done, total)

        return checked


async def in_background(
    work: Callable[[Wish], Result], name: str, free: Callable[[Result], None], *, low_priority: bool = True
) -> Result:
    """Runs `work` in a thread of its own.

    When the caller is cancelled, the work is called off, and this ends only once the work has; a result that came
    nevertheless is given to `free`.

    Args:
        work: looks at the wish now and then.
        name: of the thread.
        free: of a result that nobody takes.
        low_priority: lower the thread's priority. Right for work that copies and hashes without the interpreter's lock;
            wrong for work in Python: where cores are busy, a thread of low priority that has the lock is kept waiting
            with it, and every request of the process with that thread.

    Raises:
        Exception: as `work`.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()
    wish = Wish()

    def run() -> None:
        if low_priority:
            lower_own_priority()
        try:
            result = work(wish)
        except BaseException as error:
            _tell(loop, done.set_exception, error)
        else:
            _tell(loop, done.set_result, result)

    # Not a daemon: an interpreter that ends while a thread works with tensors aborts.
    threading.Thread(target=run, name=name).start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        wish.call_off()
        await ended(done)
        if not done.cancelled() and done.exception() is None:
            free(done.result())
        raise


async def ended(done: asyncio.Future[Any]) -> None:
    """Waits until it is done, however often the waiting itself is cancelled; looks at no result.

    Whoever calls something off may say so again and again, and what lets go of memory must come to its end.
    """
    while not done.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([done])


def _tell(loop: asyncio.AbstractEventLoop, take: Callable[..., None], value: object) -> None:
    # The loop may be closed by the time that the thread ends; then nobody waits for it.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(take, value)
