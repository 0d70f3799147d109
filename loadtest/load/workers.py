"""Processes that are started to call functions, and keep what those keep."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

import uvloop

from loader.errors import ShardrankError
from loadtest.errors import GeneratorError, LoadConfigError
from serving.fleet.process import PARENT_PID_VARIABLE, STOP_SIGNALS, StopRequestedError, die_with_parent

Answer = TypeVar("Answer")


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Raise StopRequestedError in the block at the first SIGINT or SIGTERM; further ones don't disturb the cleaning."""

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        for ignored in STOP_SIGNALS:
            signal.signal(ignored, signal.SIG_IGN)
        raise StopRequestedError(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Workers:
    """Processes that call functions. `with` ends them.

    Args:
        count: how many.

    Attributes:
        process_ids: of those that run.
    """

    def __init__(self, count: int = 1) -> None:
        context, arguments = multiprocessing.get_context("spawn"), (os.getpid(),)
        # A pool of one process each, so that every process gets its part of a call.
        self._pools = [ProcessPoolExecutor(1, context, _begin, arguments) for _ in range(count)]
        starting = [pool.submit(os.getpid) for pool in self._pools]
        self.process_ids = [process.result() for process in starting]

    def call(
        self, function: Callable[..., Answer], arguments: Sequence[tuple[object, ...]], limit_s: float
    ) -> tuple[Answer, ...]:
        """Call a function of a module in each of the first processes, and wait for all answers.

        Args:
            function: of a module's top level.
            arguments: of each process.
            limit_s: for all of it.

        Raises:
            LoadConfigError: a process can't do what was requested.
            GeneratorError: one failed or ended, or does not answer in time.
        """
        calls = [pool.submit(_call, function, given) for pool, given in zip(self._pools, arguments, strict=False)]
        done, waiting = wait(calls, limit_s, FIRST_EXCEPTION)
        for number, call in enumerate(calls):
            if call in done and isinstance(error := call.exception(), BrokenProcessPool):
                raise GeneratorError(f"worker process {number} ended by itself; its output has the reason") from error
            if call in done:
                call.result()
        if waiting:
            raise GeneratorError(f"{function.__qualname__} was not done within {limit_s:g} s")
        return tuple(call.result() for call in calls)

    def close(self) -> None:
        """End them. Idempotent."""
        for process_id in self.process_ids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        self.process_ids = []
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@cache
def event_loop() -> asyncio.Runner:
    """Return the event loop of this process."""
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def _begin(parent: int) -> None:
    die_with_parent({PARENT_PID_VARIABLE: str(parent)})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # A terminal's Ctrl-C is for the process that started this one, and so is a mark.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _call(function: Callable[..., Any], arguments: tuple[object, ...]) -> Any:
    try:
        return function(*arguments)
    except (ShardrankError, OSError) as error:
        is_config = getattr(error, "http_status", 400) == 400
        # The error itself may not be one that can be pickled.
        raise (LoadConfigError if is_config else GeneratorError)(str(error)) from None
    except Exception:
        raise GeneratorError(f"a bug of the generator:\n{traceback.format_exc()}") from None
