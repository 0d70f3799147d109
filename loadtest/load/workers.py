"""Processes that are started to call functions: a call and its answer are a JSON document in a line each.

Arguments and answers are read and written by pydantic, as the function's annotations say.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from types import FrameType, TracebackType
from typing import IO, Any, BinaryIO, Self, TypeVar, get_type_hints

import uvloop
from pydantic import TypeAdapter
from pydantic_core import ArgsKwargs, to_json

from loader.errors import ShardrankError
from loadtest.errors import GeneratorError, LoadConfigError
from serving.fleet.process import PARENT_PID_VARIABLE, STOP_SIGNALS, StopRequestedError, die_with_parent
from serving.fleet.supervisor import describe_exit

LOG_TAIL_BYTES = 2000

Answer = TypeVar("Answer")
OnStatus = Callable[[int, Any], None]
"""Takes the number of a process and what it told, as JSON has it."""


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Raise StopRequestedError in the block at the first SIGINT or SIGTERM; further ones don't disturb the cleaning."""

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        for one in STOP_SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        raise StopRequestedError(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class _Process:
    child: subprocess.Popen[bytes]
    errors: IO[bytes]

    def log_tail(self) -> str:
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        return self.errors.read().decode("utf-8", "replace").strip()


class Workers:
    """Processes that call functions. `with` ends them.

    Args:
        count: how many.
    """

    def __init__(self, count: int = 1) -> None:
        self._told: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._processes: list[_Process] = []
        self._calls = 0
        # One thread for matrix products that a generator never makes: none may spin beside the one that sends.
        environment = {**os.environ, PARENT_PID_VARIABLE: str(os.getpid()), "OMP_NUM_THREADS": "1"}
        for number in range(count):
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
            child = subprocess.Popen(
                (sys.executable, "-c", f"from {__name__} import work; work()"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                # A terminal's Ctrl-C is for the process that started it.
                start_new_session=True,
            )
            self._processes.append(_Process(child, errors))
            assert child.stdout is not None
            threading.Thread(target=self._read, args=(number, child.stdout), daemon=True).start()

    def call(
        self,
        function: Callable[..., Answer],
        arguments: Sequence[tuple[object, ...]],
        limit_s: float,
        on_status: OnStatus = lambda process, status: None,
    ) -> tuple[Answer, ...]:
        """Call a function of a module in each of the first processes, and wait for all answers.

        Args:
            function: of a module's top level, with annotations; it is found by its name in the process.
            arguments: of each process.
            limit_s: for all of it.
            on_status: given what the function tells by `tell` meanwhile.

        Raises:
            LoadConfigError: a process can't do what was asked for.
            GeneratorError: one failed or ended, or does not answer in time.
        """
        self._calls += 1
        name, answer = f"{function.__module__}:{function.__qualname__}", TypeAdapter(get_type_hints(function)["return"])
        for given, process in zip(arguments, self._processes, strict=False):
            assert process.child.stdin is not None
            # If it has ended, reading from it will tell why.
            with contextlib.suppress(OSError):
                process.child.stdin.write(to_json((self._calls, name, given)) + b"\n")
                process.child.stdin.flush()
        ends, found = time.monotonic() + limit_s, dict[int, Answer]()
        while len(found) < len(arguments):
            try:
                number, told = self._told.get(timeout=max(ends - time.monotonic(), 0))
            except queue.Empty:
                raise GeneratorError(f"{function.__qualname__} was not done within {limit_s:g} s") from None
            if not told:
                raise self._ended(number)
            call, kind, value = json.loads(told)
            if call != self._calls:
                # Of a call that another process has failed.
                continue
            if kind == "status":
                on_status(number, value)
            elif kind == "answer":
                found[number] = answer.validate_python(value)
            else:
                raise (LoadConfigError if kind == "bad_config" else GeneratorError)(value)
        return tuple(found[number] for number in range(len(arguments)))

    def close(self) -> None:
        """End them. Idempotent."""
        for process in self._processes:
            process.child.kill()
        for process in self._processes:
            process.child.wait()
            assert process.child.stdin is not None
            with contextlib.suppress(OSError):
                process.child.stdin.close()
            process.errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, number: int, output: IO[bytes]) -> None:
        with output:
            for line in output:
                # The last one may be cut off, where the process was killed.
                if line.endswith(b"\n"):
                    self._told.put((number, line))
        self._told.put((number, b""))

    def _ended(self, number: int) -> GeneratorError:
        process = self._processes[number]
        code = process.child.wait()
        return GeneratorError(f"worker process {number} ended: {describe_exit(code)}\n{process.log_tail()}")


class _Caller:
    """The process that started this one."""

    def __init__(self) -> None:
        self._output: BinaryIO = os.fdopen(os.dup(1), "wb")
        # What a library prints is no answer.
        os.dup2(2, 1)
        self.call = 0

    def tell(self, kind: str, value: object) -> None:
        self._output.write(to_json((self.call, kind, value)) + b"\n")
        self._output.flush()


@cache
def _caller() -> _Caller:
    return _Caller()


@cache
def event_loop() -> asyncio.Runner:
    """Return the one event loop of this process."""
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def tell(status: object) -> None:
    """Tell the process that made this call how it gets on: something that JSON can say."""
    _caller().tell("status", status)


def work() -> None:
    """Call what is read from stdin until that ends. An error of ours is an answer too."""
    caller = _caller()
    die_with_parent(os.environ)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # A terminal's Ctrl-C is for the process that started this one, and so is a mark.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        caller.call, name, arguments = json.loads(line)
        function = resolve_name(name)
        answer = TypeAdapter(get_type_hints(function)["return"])
        try:
            told = TypeAdapter(function).validate_python(ArgsKwargs(tuple(arguments)))
            caller.tell("answer", answer.dump_python(told, mode="json"))
        except (ShardrankError, OSError) as error:
            caller.tell("bad_config" if getattr(error, "http_status", 400) == 400 else "error", str(error))
