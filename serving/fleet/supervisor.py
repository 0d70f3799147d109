"""Keeps child processes running: waits until they serve, restarts the dead, and stops them all in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from loader.errors import RegistryError
from loader.progress import all_or_first_error
from serving.errors import FleetError
from serving.fleet.config import KNOWN_VARIABLES, SupervisionConfig
from serving.fleet.fork_server import FORK_SERVER_VARIABLE, ForkedProcess, running_fork_server
from serving.fleet.process import PARENT_PID_VARIABLE
from serving.observe.logs import ERROR_PREFIX, message_of
from serving.settings import Settings

logger = logging.getLogger(__name__)

Probe: TypeAlias = Callable[[int], Awaitable[None]]
"""Finds out whether the process of that id serves. Returns when it does; raises `NotYetError` or RegistryError when not
yet, and `RefusedError` when it will not by itself."""

LOG_TAIL_LINES = 20
_LOG_TAIL_BYTES = 16_384


class NotYetError(Exception):
    """A probe's answer: not yet, and why. The supervisor asks again."""


class RefusedError(Exception):
    """A probe's answer: it runs, but will not serve what it shall, and why."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run and how to know that it serves; the name is unique in its fleet, and the log's.

    `environment` is added to the supervisor's but the variables of settings; `on_exit` is called with the id of each
    process that ended by itself.
    """

    name: str
    command: tuple[str, ...]
    probe: Probe
    environment: Mapping[str, str] = field(default_factory=dict)
    on_exit: Callable[[int], None] | None = None


def shardrank_command(*arguments: str) -> tuple[str, ...]:
    """Return the argument list that runs this installation's command line in a new process."""
    return (sys.executable, "-m", "serving.cli", *arguments)


def configured_command(command: str, config: Settings, file: Path) -> tuple[str, ...]:
    """Write a process' settings to a file, and return the argument list that runs it by them."""
    config.write(file)
    return shardrank_command(command, "--config", str(file))


class Child:
    """A place in the fleet that one process after another may fill.

    It is `starting` until the probe first answers, and `waiting` between a death and a restart.
    """

    def __init__(self, spec: ChildSpec, log_path: Path, fork_server: str | None = None) -> None:
        self.spec = spec
        self.log_path = log_path
        self.fork_server = fork_server
        self.state: Literal["starting", "ready", "waiting"] = "starting"
        self.restarts = 0
        self.last_pid = 0
        self._process: asyncio.subprocess.Process | ForkedProcess | None = None

    @property
    def pid(self) -> int | None:
        """The process that fills this place now; None when there is none."""
        return self.last_pid if self._process is not None and self._process.returncode is None else None

    async def spawn(self) -> None:
        """Start a process in a session of its own, its output appended to the log file. Raises OSError."""
        command = self.spec.command
        inherited = {name: value for name, value in os.environ.items() if name not in KNOWN_VARIABLES}
        environment = {**inherited, **self.spec.environment, PARENT_PID_VARIABLE: str(os.getpid())}
        # Its supervisor says when all are ready.
        environment.pop("NOTIFY_SOCKET", None)
        # A pipe in place of the file would make a stalled supervisor stall its children.
        opener = partial(os.open, mode=0o600)
        with open(self.log_path, "ab", opener=opener) as log, open(os.devnull) as nothing:  # noqa: ASYNC230
            self._log_begins = log.tell()
            process: asyncio.subprocess.Process | ForkedProcess | None = None
            if self.fork_server is not None:
                files = (nothing.fileno(), log.fileno(), log.fileno())
                process = await ForkedProcess.start(self.fork_server, command, files, environment)
            if process is None:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=nothing, stdout=log, stderr=log, env=environment, start_new_session=True
                )
        self._process = process
        self.last_pid = process.pid

    async def wait(self) -> int:
        """Wait for the process to end. Returns its exit code, or minus the number of the signal that killed it."""
        return 0 if self._process is None else await self._process.wait()

    async def stop(self, grace_s: float) -> int:
        """Send SIGTERM, then SIGKILL to its whole process group after `grace_s` seconds. Returns what `wait` does."""
        if self._process is not None and self.pid is not None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            logger.warning("%s did not end within %g s: killed", self.spec.name, grace_s)
            self.kill()
            return await self.wait()

    def kill(self) -> None:
        """Send SIGKILL to the process and everything it started."""
        if (pid := self.pid) is not None:
            # Its session was made for it alone, so the group is its own; it may be gone before we are told.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def failure(self, what: str) -> FleetError:
        """Make the error for a child that does not serve, with the error that its log ends with, or its last lines."""
        with self.log_path.open("rb") as log:
            # What is before this process's own lines is of another one, perhaps of another day.
            log.seek(max(self._log_begins, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()
        if lines and (last := message_of(lines[-1])).startswith(ERROR_PREFIX):
            reason = f": {last.removeprefix(ERROR_PREFIX)}"
        else:
            tail = "\n".join(lines[-LOG_TAIL_LINES:]) or "(empty log)"
            reason = f". The end of its log:\n{tail}"
        return FleetError(f"{self.spec.name} {what}{reason}\nits log: {self.log_path}", kind="child_failed")


def describe_exit(code: int) -> str:
    """Says `exit code 1` or `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


@dataclass(eq=False, repr=False)
class Supervisor:
    """The children of one fleet.

    Children are started in groups, each group ready before the next is started, and stopped in reverse. A child that
    ends before it was first ready fails the start; one that ends later is started again after a pause that doubles
    from `first_backoff_s` to `max_backoff_s` and is forgotten once it has lived for `healthy_after_s`. Logs go to
    `log_directory`, by default the run directory; both must exist. Processes are forked by the fork server at a socket,
    if one is named.
    """

    run_directory: Path
    config: SupervisionConfig
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    fork_server: str | None = None
    log_directory: Path | None = None
    _groups: list[list[Child]] = field(default_factory=list, init=False)
    _watchers: list[asyncio.Task[None]] = field(default_factory=list, init=False)

    @property
    def children(self) -> dict[str, Child]:
        """Every child by name, in the order in which they were started."""
        return {child.spec.name: child for group in self._groups for child in group}

    async def start(self, specs: Sequence[ChildSpec], on_ready: Callable[[str], None] = lambda name: None) -> None:
        """Start a group of children at once and wait until every one of them serves.

        Raises:
            FleetError: a name is taken, or a child ends or is not ready within `ready_timeout_s`; the others are left
                for `stop`.
        """
        if taken := self.children.keys() & {spec.name for spec in specs}:
            raise FleetError(f"a child named {min(taken)!r} is here already")
        folder = self.log_directory or self.run_directory
        group = [Child(spec, folder / f"{spec.name}.log", self.fork_server) for spec in specs]
        self._groups.append(group)

        async def start_one(child: Child) -> None:
            await child.spawn()
            await self._until_ready(child)
            on_ready(child.spec.name)

        # After a failure the others are not waited for; `stop` ends their processes.
        await all_or_first_error(map(start_one, group))
        self._watchers.extend(asyncio.create_task(self._watch(child)) for child in group)

    async def stop(self) -> None:
        """Stop all children, the last group first. Never raises for a child that will not end: it is killed."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for group in reversed(self._groups):
            await asyncio.gather(*(child.stop(self.config.stop_grace_s) for child in group))

    async def _until_ready(self, child: Child) -> None:
        """Wait until a child that was just spawned serves.

        One that was restarted and refuses is asked for as long as it does: it may serve other models, and can still be
        put right. Each reason is logged once. Raises FleetError if it ends or is not ready in time.
        """
        config, told = self.config, set[str]()
        deadline = self.clock() + config.ready_timeout_s
        ended = asyncio.create_task(child.wait())
        reason = "it was not checked yet"
        try:
            while self.clock() < deadline:
                try:
                    async with asyncio.timeout(config.probe_timeout_s):
                        await child.spec.probe(child.pid or 0)
                except (NotYetError, RegistryError) as not_ready:
                    reason = str(not_ready)
                except RefusedError as refused:
                    reason = str(refused)
                    if not child.restarts:
                        raise FleetError(
                            f"{child.spec.name} does not serve: {reason}\nits log: {child.log_path}",
                            kind="child_failed",
                        ) from None
                    if reason not in told:
                        told.add(reason)
                        logger.error("restart %d of %s failed: %s", child.restarts, child.spec.name, reason)
                    deadline = self.clock() + config.ready_timeout_s
                except TimeoutError:
                    reason = f"no answer within {config.probe_timeout_s:g} s"
                else:
                    if not ended.done():
                        child.state = "ready"
                        return
                await asyncio.wait([ended], timeout=config.probe_interval_s)
                if ended.done():
                    raise child.failure(f"ended with {describe_exit(ended.result())} before it served")
            raise child.failure(f"was not ready within {config.ready_timeout_s:g} s: {reason}")
        finally:
            ended.cancel()

    async def _watch(self, child: Child) -> None:
        backoff_s = self.config.first_backoff_s
        while True:
            started = self.clock()
            code = await child.wait()
            if child.spec.on_exit is not None:
                child.spec.on_exit(child.last_pid)
            child.state = "waiting"
            if self.clock() - started >= self.config.healthy_after_s:
                backoff_s = self.config.first_backoff_s
            logger.warning("%s: %s; restart in %.1f s", child.spec.name, describe_exit(code), backoff_s)
            await self.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self.config.max_backoff_s)
            child.restarts += 1
            child.state = "starting"
            try:
                await child.spawn()
                await self._until_ready(child)
            except (FleetError, OSError) as error:
                logger.error("restart %d of %s failed: %s", child.restarts, child.spec.name, error)
                child.kill()
            else:
                logger.info("%s serves again (restart %d)", child.spec.name, child.restarts)


@contextlib.asynccontextmanager
async def supervised(config: SupervisionConfig, log_directory: Path | None = None) -> AsyncIterator[Supervisor]:
    """Make a supervisor with a temporary run directory; that of logs stays if it is named, or something failed.

    Its children are forked by the fork server that the environment names, or one that is started for them. Raises
    OSError if the directory of logs can't be made.
    """
    logs, has_failed = log_directory or Path(tempfile.mkdtemp(prefix="shardrank-logs-")), False
    os.makedirs(logs, exist_ok=True)
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="shardrank-", ignore_cleanup_errors=True)
        run_directory, fork_server = Path(stack.enter_context(temporary)), os.environ.get(FORK_SERVER_VARIABLE)
        if fork_server is None:
            fork_server = str(run_directory / "fork.sock")
            stack.enter_context(running_fork_server(fork_server))
        supervisor = Supervisor(run_directory, config, fork_server=fork_server, log_directory=logs)
        try:
            yield supervisor
        except Exception:
            has_failed = True
            raise
        finally:
            await supervisor.stop()
            has_failed = has_failed or any(child.restarts for child in supervisor.children.values())
            if log_directory is None and has_failed:
                logger.warning("a process failed: the logs are kept in %s", logs)
            elif log_directory is None:
                shutil.rmtree(logs, ignore_errors=True)
