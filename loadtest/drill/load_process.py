"""The load as a child process of a drill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from loadtest.drill.answers import Answers, details_path, read_answers, read_details
from loadtest.drill.errors import LoadProcessError
from loadtest.drill.load import LoadConfig
from serving.fleet.process import PARENT_PID_VARIABLE
from serving.fleet.supervisor import describe_exit

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True)
class RunningLoad:
    """A load that asks.

    Attributes:
        config: what it asks.
        process: it.
    """

    config: LoadConfig
    process: asyncio.subprocess.Process

    def check(self) -> None:
        """Raises LoadProcessError if the load has ended by itself."""
        if self.process.returncode is not None:
            code = describe_exit(self.process.returncode)
            raise LoadProcessError(f"the load ended: {code}; its log: {_log_path(self.config.answers)}")

    def answers(self, first: int = 0) -> Answers:
        """What was logged so far. Raises LoadProcessError if the load has ended by itself."""
        self.check()
        return read_answers(self.config.answers, first)

    def details(self, max_lines: int = 20) -> list[str]:
        """Why the first answers that are not right are not."""
        return read_details(self.config.answers, max_lines)

    async def stop(self) -> Answers:
        """Ends it after the answers that are out; returns all answers. Raises LoadProcessError if it failed."""
        if self.process.returncode is None:
            self.process.terminate()
        code = await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT_S)
        if code != 0:
            raise LoadProcessError(f"the load ended: {describe_exit(code)}; its log: {_log_path(self.config.answers)}")
        return read_answers(self.config.answers)


@contextlib.asynccontextmanager
async def running_load(config: LoadConfig) -> AsyncIterator[RunningLoad]:
    """Starts the load and yields once it asks; kills it when the block ends, unless it was stopped.

    Raises:
        LoadProcessError: if it does not begin.
    """
    settings = config.answers.with_suffix(".json")
    settings.write_text(config.model_dump_json(), encoding="utf-8")
    with _log_path(config.answers).open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "loadtest.drill.load", str(settings)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, PARENT_PID_VARIABLE: str(os.getpid())},
            # A terminal's Ctrl-C is for the drill, which stops the load when it has what it wants.
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), READY_TIMEOUT_S)
        if line != b"ready\n":
            text = _log_path(config.answers).read_text(encoding="utf-8", errors="replace")
            raise LoadProcessError(f"the load did not begin: {text[-2000:]}")
        yield RunningLoad(config, process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _log_path(answers: Path) -> Path:
    return details_path(answers).with_suffix(".log")
