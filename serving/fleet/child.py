"""One supervised process: how it is started, watched and stopped, and where its log is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from serving.fleet.parent import PARENT_PID_VARIABLE

Probe: TypeAlias = Callable[[int], Awaitable[None]]
"""Finds out whether the process of that id serves. Returns when it does; raises `NotReadyError` when not yet, and
`RefusedError` when it will not by itself."""

State: TypeAlias = Literal["starting", "ready", "waiting", "stopped"]

LOG_TAIL_LINES = 20
_LOG_TAIL_BYTES = 16_384
_ERROR_PREFIX = "error: "
"""How the command line prints an error that is raised on purpose; nothing but the exit follows it."""


class NotReadyError(Exception):
    """A probe's answer: not yet, and why. The supervisor asks again; it never leaves this package."""


class RefusedError(Exception):
    """A probe's answer: it runs, but will not serve what it shall, and why. It never leaves this package."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run and how to know that it serves.

    Attributes:
        name: unique in its fleet; names the log file.
        command: the whole argument list.
        probe: asked until it returns.
        environment: variables added to the supervisor's own.
        on_exit: told the id of each process that ended here, however it ended.
    """

    name: str
    command: tuple[str, ...]
    probe: Probe
    environment: Mapping[str, str] = field(default_factory=dict)
    on_exit: Callable[[int], None] | None = None


def shardrank_command(*arguments: str) -> tuple[str, ...]:
    """The argument list that runs this installation's command line in a new process."""
    return (sys.executable, "-m", "serving.cli", *arguments)


class Child:
    """A place in the fleet that one process after another may fill.

    Attributes:
        spec: what runs here.
        state: `starting` until the probe first answers, `waiting` between a death and a restart.
        restarts: how often a process has been started again.
    """

    def __init__(self, spec: ChildSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self.state: State = "starting"
        self.restarts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._exited: int | None = None

    @property
    def pid(self) -> int | None:
        """The process that fills this place now; None when there is none."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def spawn(self) -> None:
        """Starts a process in its own session, its output appended to the log file.

        Raises:
            OSError: if the command can't be run.
        """
        environment = {**os.environ, **self.spec.environment, PARENT_PID_VARIABLE: str(os.getpid())}
        # The file is the child's from here on; a pipe would make a stalled supervisor stall its children.
        log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        finally:
            os.close(log)

    async def wait(self) -> int:
        """Waits for the process to end. Returns its exit code, or minus the number of the signal that killed it."""
        if self._process is None:
            return 0
        process = self._process
        code = await process.wait()
        if self.spec.on_exit is not None and process.pid != self._exited:
            self._exited = process.pid
            self.spec.on_exit(process.pid)
        return code

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, then SIGKILL to its whole process group after `grace_s` seconds.

        Returns:
            Whether it ended by itself within the grace.
        """
        self.state = "stopped"
        self.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await self.wait()
            return False
        return True

    def send_signal(self, number: signal.Signals) -> None:
        """Signals the process, if there is one."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to the process and everything it started."""
        if (pid := self.pid) is not None:
            # Its session was made for it alone, so the group is its own; it may be gone before we are told.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def last_error(self) -> str | None:
        """The error on purpose that its log ends with; None if it ended in another way."""
        last = self.log_tail(1)
        return last.removeprefix(_ERROR_PREFIX) if last.startswith(_ERROR_PREFIX) else None

    def log_tail(self, max_lines: int = LOG_TAIL_LINES) -> str:
        """The last lines that it wrote, for a message about its end."""
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - _LOG_TAIL_BYTES))
                lines = log.read().decode("utf-8", "replace").splitlines()
        except FileNotFoundError:
            return "(no log)"
        return "\n".join(lines[-max_lines:]) or "(empty log)"


def describe_exit(code: int) -> str:
    """`exit code 1` or `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
