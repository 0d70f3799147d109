"""Processes that are started to call functions, and keep what those keep."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

import uvloop

from loader.errors import ShardrankError
from loadtest.errors import GeneratorError, LoadConfigError
from serving.fleet.process import PARENT_PID_VARIABLE, STOP_SIGNALS, StopRequestedError, die_with_parent
from serving.fleet.supervisor import describe_exit

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


class _Worker:
    def __init__(self) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        # One thread for matrix products that a generator never makes: none may spin beside the one that sends.
        environment = {**os.environ, PARENT_PID_VARIABLE: str(os.getpid()), "OMP_NUM_THREADS": "1"}
        with theirs:
            self.process = subprocess.Popen(
                (sys.executable, "-c", f"from {__name__} import work; work({theirs.fileno()})"),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                # A terminal's Ctrl-C is for the process that started it.
                start_new_session=True,
            )


class Workers:
    """Processes that call functions. `with` ends them.

    Args:
        count: how many.
    """

    def __init__(self, count: int = 1) -> None:
        self._workers = [_Worker() for _ in range(count)]
        self._calls = 0

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
        self._calls += 1
        waiting: dict[Any, int] = {}
        for number, (given, worker) in enumerate(zip(arguments, self._workers, strict=False)):
            waiting[worker.connection] = number
            # If it has ended, reading from it will tell why.
            with contextlib.suppress(OSError):
                worker.connection.send((self._calls, function, given))
        ends, answers = time.monotonic() + limit_s, dict[int, Answer]()
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(ends - time.monotonic(), 0))
            if not ready:
                raise GeneratorError(f"{function.__qualname__} was not done within {limit_s:g} s")
            for connection in ready:
                number = waiting[connection]
                call, value = self._receive(number)
                # Others are of a call that another process has failed.
                if call == self._calls:
                    if isinstance(value, LoadConfigError | GeneratorError):
                        raise value
                    answers[number] = value
                    del waiting[connection]
        return tuple(answers[number] for number in range(len(arguments)))

    def close(self) -> None:
        """End them. Idempotent."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
            worker.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self, number: int) -> tuple[int, Any]:
        worker = self._workers[number]
        try:
            call, value = worker.connection.recv()
        except (EOFError, OSError):
            ended = describe_exit(worker.process.wait())
            raise GeneratorError(f"worker process {number} ended: {ended}; its output has the reason") from None
        return call, value


@cache
def event_loop() -> asyncio.Runner:
    """Return the event loop of this process."""
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def work(descriptor: int) -> None:
    """Answer the calls that come over a connection, until it ends."""
    die_with_parent(os.environ)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # A terminal's Ctrl-C is for the process that started this one, and so is a mark.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    with multiprocessing.connection.Connection(descriptor) as connection, contextlib.suppress(EOFError):
        while True:
            call, function, arguments = connection.recv()
            try:
                value = function(*arguments)
            except (ShardrankError, OSError) as error:
                is_config = getattr(error, "http_status", 400) == 400
                value = (LoadConfigError if is_config else GeneratorError)(str(error))
            except Exception:
                value = GeneratorError(f"a bug of the generator:\n{traceback.format_exc()}")
            connection.send((call, value))
