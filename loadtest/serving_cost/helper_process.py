"""A process that answers questions, one line each: how the benchmark asks it, and how it answers."""

from __future__ import annotations

import selectors
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from loader.errors import ShardrankError
from loader.snapshot.manifest import Frozen
from loadtest.serving_cost.errors import HelperProcessError
from loadtest.serving_cost.messages import TOLD, AtServer, Failed

STOP_TIMEOUT_S = 10.0
ANSWER_SLACK_S = 300.0
"""What an answer may take beyond the time that was asked for."""

Answer = TypeVar("Answer", bound=Frozen)


class HelperProcess:
    """One such process. It ends when its input does, so it never outlives the benchmark.

    Args:
        module: run as `python -m module CONFIG`.
        config: what it is started with.
    """

    def __init__(self, module: str, config: Frozen) -> None:
        self._module = module
        command = [sys.executable, "-m", module, config.model_dump_json()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, question: Frozen, answer: type[Answer], timeout_s: float) -> Answer:
        """Asks, and waits.

        Raises:
            HelperProcessError: it has failed or ended, or does not answer in time.
        """
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None
        assert sink is not None
        try:
            sink.write(question.model_dump_json() + "\n")
            sink.flush()
        except BrokenPipeError:
            raise self._ended() from None
        with selectors.DefaultSelector() as ready:
            ready.register(source, selectors.EVENT_READ)
            if not ready.select(timeout_s):
                raise HelperProcessError(f"{self._module} did not answer within {timeout_s:g} s")
        line = source.readline()
        if not line:
            raise self._ended()
        told = TOLD.validate_json(line)
        if isinstance(told, Failed):
            raise HelperProcessError(f"{self._module}: {told.message}")
        if not isinstance(told, answer):
            raise HelperProcessError(f"{self._module} answered {told.kind!r} to {question!r}")
        return told

    def measure(self, load: AtServer, answer: type[Answer]) -> Answer:
        """Asks for a load, and waits as long as that takes. Raises as `ask`."""
        return self.ask(load, answer, load.warmup_s + load.seconds + ANSWER_SLACK_S)

    def close(self) -> None:
        """Ends it. Idempotent."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ended(self) -> HelperProcessError:
        try:
            code: object = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = "unknown"
        return HelperProcessError(f"{self._module} has ended with exit code {code}; its error output says more")


def answer_lines(answer: Callable[[str], Frozen]) -> None:
    """What such a process does: answers line after line until its input ends. An error of ours is an answer too."""
    for line in sys.stdin:
        try:
            told = answer(line)
        except ShardrankError as error:
            told = Failed(message=f"{type(error).__name__}: {error}")
        sys.stdout.write(told.model_dump_json() + "\n")
        sys.stdout.flush()
