"""A drill's child processes: how they are started, told what to do and ended, and what memory processes hold."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

from loader.snapshot.tables import Frozen
from loadtest.errors import LoadProcessError
from serving.fleet.process import PARENT_PID_VARIABLE, die_with_parent
from serving.fleet.supervisor import describe_exit

READY = "ready\n"
READY_TIMEOUT_S = 120.0
LOG_TAIL_CHARS = 2000

Config = TypeVar("Config", bound=Frozen)


@contextlib.asynccontextmanager
async def child_process(
    command: Sequence[str], log: Path, checkout: Path | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a command whose errors go to `log`; it is killed when the block ends, or with this process.

    With `checkout`, the absolute folder of a repository, that one's code is run, and its output goes to `log` too.

    A terminal's Ctrl-C is for the drill alone, which ends its processes when it has what it wants.
    """
    environment = {**os.environ, PARENT_PID_VARIABLE: str(os.getpid())}
    if checkout is not None:
        environment["PYTHONPATH"] = str(checkout)
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if checkout is None else errors,
            stderr=errors,
            env=environment,
            cwd=checkout,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def module_command(module: str, config: Frozen, file: Path) -> list[str]:
    """Write a module's settings to a file, and return the command that runs it with them."""
    file.write_text(config.model_dump_json(), encoding="utf-8")
    return [sys.executable, "-m", module, str(file)]


def module_config(schema: type[Config]) -> Config:
    """Read the settings that `module_command` wrote, in the process that it started."""
    die_with_parent(os.environ)
    return schema.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))


def say_ready() -> None:
    """Tell the parent that the process does its work from now on."""
    sys.stdout.write(READY)
    sys.stdout.flush()


async def until_ready(process: asyncio.subprocess.Process, log: Path) -> None:
    """Wait for `say_ready` in a process. Raises LoadProcessError."""
    assert process.stdout is not None
    async with asyncio.timeout(READY_TIMEOUT_S):
        if await process.stdout.readline() != READY.encode():
            raise ended(await process.wait(), log)


async def finished(process: asyncio.subprocess.Process, log: Path) -> bytes:
    """Wait for the end of a process, and return its output. Raises LoadProcessError if it failed."""
    output, _ = await process.communicate()
    if process.returncode:
        raise ended(process.returncode, log)
    return output


def ended(code: int, log: Path) -> LoadProcessError:
    """Make the error of a process that has ended, with the last characters of its log."""
    tail = log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARS:]
    return LoadProcessError(f"{log.stem} ended: {describe_exit(code)}: {tail}")


def memory_of(process_ids: Iterable[int]) -> int:
    """Return the resident memory of processes in bytes; those that have ended count 0."""
    total = 0
    for process_id in process_ids:
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(process_id).memory_info().rss
    return total
