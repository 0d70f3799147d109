"""An arm's server, started as a user does: `shardrank serve`, or `shardrank up` with shard processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest.compare.config import Arm, Budgets
from loadtest.compare.errors import ArmServerError
from serving.fleet.child import describe_exit, shardrank_command
from serving.fleet.parent import PARENT_PID_VARIABLE

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
class Ports:
    """Where every arm's server listens, one after the other, on `HOST`."""

    http: int
    grpc: int


def free_ports(draw: random.Random) -> Ports:
    """Two ports that nobody has.

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


def server_arguments(arm: Arm, budgets: Budgets, snapshot: Path, ports: Ports, registry: Path) -> tuple[str, ...]:
    """The command line of an arm's server, after `shardrank`.

    Args:
        arm: which.
        budgets: of host memory, each of an arm's shard processes gets the same part.
        snapshot: what it serves.
        ports: where.
        registry: folder of the fleet's registry, a new one each time; not used without shards.
    """
    parts = arm.shards or 1
    flags: dict[str, object] = {
        "snapshot": snapshot,
        "http-port": ports.http,
        "grpc-port": ports.grpc,
        "cards": arm.cards,
        "replicate-bytes": budgets.replicate_bytes,
        "device": budgets.device,
        "card-memory-gb": budgets.card_memory_gb,
        "pinned-memory-gb": budgets.pinned_memory_gb / parts,
        "hot-gb": budgets.hot_gb,
        "memory-budget-gb": None if budgets.memory_budget_gb is None else budgets.memory_budget_gb / parts,
        "peer-access": budgets.peer_access,
    }
    command = "serve" if arm.shards is None else "up"
    flags |= {"shutdown-delay-s": 0} if arm.shards is None else {"shards": arm.shards, "registry": registry}
    given = [text for name, value in flags.items() if value is not None for text in (f"--{name}", str(value))]
    # Whoever compares has just written the files, or trusts the store.
    return (command, "--no-verify", *given)


@contextlib.asynccontextmanager
async def running_arm(arm: Arm, arguments: tuple[str, ...], ports: Ports, log: Path) -> AsyncIterator[tuple[int, ...]]:
    """Starts an arm's server, waits until it is ready, and ends it with the block.

    Yields the ids of its process and of all that this one started.

    Args:
        arm: for messages.
        arguments: as `server_arguments` gives them.
        ports: where it will listen.
        log: gets its output.

    Raises:
        ArmServerError: it ends, or is not ready in time; or has ended by itself when the block does.
    """
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *shardrank_command(*arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, PARENT_PID_VARIABLE: str(os.getpid())},
            # A terminal's Ctrl-C is for the process that started it.
            start_new_session=True,
        )
    try:
        await _until_ready(arm, process, ports, log)
        children = psutil.Process(process.pid).children(recursive=True)
        yield (process.pid, *(child.pid for child in children))
        if process.returncode is not None:
            raise ArmServerError(f"the server with {arm.name} ended while it was asked: {_end(process, log)}")
    finally:
        await _stop(process)


async def _until_ready(arm: Arm, process: asyncio.subprocess.Process, ports: Ports, log: Path) -> None:
    why = "it did not answer"
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while (why := await asyncio.to_thread(_not_ready, ports.http)) != "":
                if process.returncode is not None:
                    raise ArmServerError(f"the server with {arm.name} ended: {_end(process, log)}")
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise ArmServerError(
            f"the server with {arm.name} was not ready within {START_TIMEOUT_S:.0f} s: {why}\n{_tail(log)}"
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


def _end(process: asyncio.subprocess.Process, log: Path) -> str:
    assert process.returncode is not None
    return f"{describe_exit(process.returncode)}\n{_tail(log)}"


def _tail(log: Path) -> str:
    return log.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
