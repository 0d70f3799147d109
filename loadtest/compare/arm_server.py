"""An arm's server, started as a user does: its processes, from their start until they have ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest.compare.arm_commands import Ports, ServerCommand
from loadtest.compare.config import Arm
from loadtest.compare.errors import ArmServerError
from serving.fleet.process import PARENT_PID_VARIABLE
from serving.fleet.supervisor import describe_exit

HOST = "127.0.0.1"
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 5.0
POLL_S = 0.05
LOG_TAIL_BYTES = 2000
LOWEST_PORT = 10_000
PORT_TRIES = 1000
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, slots=True)
class _Started:
    command: ServerCommand
    process: asyncio.subprocess.Process


def free_ports(draw: random.Random) -> Ports:
    """Two ports of `HOST` that nobody has.

    They are below those that the kernel gives to clients: between two servers no connection can come to have one.

    Raises:
        ArmServerError: none was found.
    """
    try:
        highest = int(_PORT_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        highest = 32_768
    found: list[int] = []
    for _ in range(PORT_TRIES):
        port = draw.randrange(LOWEST_PORT, max(highest, LOWEST_PORT + 100))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            found.append(port)
        if len(set(found)) == 2:
            return Ports(*sorted(set(found)))
    raise ArmServerError(f"no free ports from {LOWEST_PORT} to {highest} after {PORT_TRIES} tries")


@contextlib.asynccontextmanager
async def running_arm(arm: Arm, commands: Sequence[ServerCommand], ports: Ports) -> AsyncIterator[tuple[int, ...]]:
    """Starts an arm's server, waits until it is ready, and ends it with the block.

    Yields the ids of its processes and of all that these started.

    Args:
        arm: for messages.
        commands: as `server_commands` gives them; ended in the other order.
        ports: where the last one will listen.

    Raises:
        ArmServerError: one ends, or the last is not ready in time; or one has ended by itself when the block does.
    """
    async with contextlib.AsyncExitStack() as stack:
        started: list[_Started] = []
        for command in commands:
            process = await _start(command)
            stack.push_async_callback(_stop, process)
            started.append(_Started(command, process))
        await _until_ready(arm, started, ports)
        own = [one.process.pid for one in started]
        below = [child.pid for pid in own for child in psutil.Process(pid).children(recursive=True)]
        yield (*own, *below)
        if (ended := _ended(started)) is not None:
            raise ArmServerError(f"{_whose(arm, ended)} ended while it was asked: {_end(ended)}")


async def _start(command: ServerCommand) -> asyncio.subprocess.Process:
    with command.log.open("wb") as output:
        return await asyncio.create_subprocess_exec(
            *command.line,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, PARENT_PID_VARIABLE: str(os.getpid())},
            # A terminal's Ctrl-C is for the process that started it.
            start_new_session=True,
        )


async def _until_ready(arm: Arm, started: Sequence[_Started], ports: Ports) -> None:
    why = "it did not answer"
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while (why := await asyncio.to_thread(_not_ready, ports.http)) != "":
                if (ended := _ended(started)) is not None:
                    raise ArmServerError(f"{_whose(arm, ended)} ended: {_end(ended)}")
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        logs = "\n".join(f"{one.command.name}: {_tail(one.command.log)}" for one in started)
        raise ArmServerError(
            f"the server with {arm.name} was not ready within {START_TIMEOUT_S:.0f} s: {why}\n{logs}"
        ) from error


def _not_ready(port: int) -> str:
    """Why a server is not ready; empty if it is."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/readyz", timeout=ASK_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        return error.read(LOG_TAIL_BYTES).decode("utf-8", "replace")
    except OSError as error:
        return str(error)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            # Its children end with it.
            process.kill()
            await process.wait()


def _ended(started: Sequence[_Started]) -> _Started | None:
    return next((one for one in started if one.process.returncode is not None), None)


def _whose(arm: Arm, one: _Started) -> str:
    return f"the {one.command.name} with {arm.name}"


def _end(one: _Started) -> str:
    assert one.process.returncode is not None
    return f"{describe_exit(one.process.returncode)}\n{_tail(one.command.log)}"


def _tail(log: Path) -> str:
    return log.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
