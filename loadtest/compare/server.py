"""Start and stop an arm's server: `shardrank serve`, `shardrank up`, or `serve` and shard nodes on hosts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest.compare.config import CompareConfig, ServedArm
from loadtest.compare.errors import ArmServerError
from loadtest.compare.hosts import Host
from serving.fleet.process import PARENT_PID_VARIABLE
from serving.fleet.supervisor import describe_exit, shardrank_command

HOST = "127.0.0.1"
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 5.0
POLL_S = 0.05
LOG_TAIL_BYTES = 2000
LOWEST_PORT = 10_000
PORT_TRIES = 1000
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
NODE_PORT = 7000
"""Of shard nodes on hosts; each host has all ports for itself."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Where every arm's server listens, one after the other."""

    http: int
    grpc: int


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """One process of an arm's server.

    Attributes:
        name: for messages.
        line: the whole argument list.
        log: gets its output.
    """

    name: str
    line: tuple[str, ...]
    log: Path


def server_commands(
    arm: ServedArm, config: CompareConfig, snapshot: Path, ports: Ports, folder: Path, hosts: Sequence[Host] = ()
) -> tuple[ServerCommand, ...]:
    """List what is started for an arm, in this order.

    Args:
        arm: which.
        config: what all arms have alike.
        snapshot: what it serves.
        ports: where.
        folder: for logs and the fleet's registry, a new one each time.
        hosts: of its shards; none for shards on this one.
    """
    if not hosts:
        arguments = server_arguments(arm, config, snapshot, ports, folder / "registry")
        return (ServerCommand("server", shardrank_command(*arguments), folder / "server.log"),)
    nodes = [
        ServerCommand(
            f"shard {number}",
            host.inside(shardrank_command(*node_arguments(arm, config, snapshot, number, _address(host)))),
            folder / f"shard-{number}.log",
        )
        for number, host in enumerate(hosts)
    ]
    asks = shardrank_command(*asking_arguments(arm, config, snapshot, ports, [_address(host) for host in hosts]))
    return (*nodes, ServerCommand("server", asks, folder / "server.log"))


def server_arguments(
    arm: ServedArm, config: CompareConfig, snapshot: Path, ports: Ports, registry: Path
) -> tuple[str, ...]:
    """Make the arguments of `serve`, or of `up` for shards, which alone use the registry's folder."""
    flags = _divided(arm, config, snapshot) | _rows(arm, config) | _serving(config, ports)
    if arm.shards is None:
        return ("serve", *_given(flags | {"shutdown-delay-s": 0}))
    return ("up", *_given(flags | {"shards": arm.shards, "registry": registry}))


def node_arguments(arm: ServedArm, config: CompareConfig, snapshot: Path, shard: int, address: str) -> tuple[str, ...]:
    """Make the arguments of `shard-node` for one of an arm's shards, which listens at an address."""
    own = {"shard": f"{shard}/{arm.shards}", "listen": address}
    return ("shard-node", *_given(_divided(arm, config, snapshot) | _rows(arm, config) | own))


def asking_arguments(
    arm: ServedArm, config: CompareConfig, snapshot: Path, ports: Ports, addresses: Sequence[str]
) -> tuple[str, ...]:
    """Make the arguments of `serve` for shard nodes at these addresses, the first one's first."""
    flags = _divided(arm, config, snapshot) | _serving(config, ports) | {"shutdown-delay-s": 0}
    return ("serve", *_given(flags), *(text for address in addresses for text in ("--shard", address)))


def _divided(arm: ServedArm, config: CompareConfig, snapshot: Path) -> dict[str, object]:
    """What every process of an arm must be told alike."""
    return {
        "snapshot": snapshot,
        "cards": arm.cards,
        "sharding": config.sharding,
        "replicate-bytes": config.budgets.replicate_bytes,
    }


def _rows(arm: ServedArm, config: CompareConfig) -> dict[str, object]:
    """Of a process that holds rows. Without shards each of several serving processes does, on the same cards."""
    budgets = config.budgets
    holders, sharers = (config.workers, config.workers) if arm.shards is None else (arm.shards, 1)
    return {
        "device": budgets.device,
        "card-memory-gb": _part(budgets.card_memory_gb, sharers),
        "pinned-memory-gb": _part(budgets.pinned_memory_gb, holders),
        "hot-gb": _part(budgets.hot_gb, sharers),
        "memory-budget-gb": _part(budgets.memory_budget_gb, holders),
        "peer-access": budgets.peer_access,
    }


def _part(total: float | None, parts: int) -> float | None:
    return None if total is None else total / parts


def _serving(config: CompareConfig, ports: Ports) -> dict[str, object]:
    return {"http-port": ports.http, "grpc-port": ports.grpc, "workers": config.workers, "dtype": config.dtype}


def _given(flags: Mapping[str, object]) -> tuple[str, ...]:
    given = [text for name, value in flags.items() if value is not None for text in (f"--{name}", str(value))]
    # Whoever compares has just written the files, or trusts the store.
    return ("--no-verify", *given)


def _address(host: Host) -> str:
    return f"{host.address}:{NODE_PORT}"


@dataclass(frozen=True, slots=True)
class _Started:
    command: ServerCommand
    process: asyncio.subprocess.Process


def free_ports(draw: random.Random) -> Ports:
    """Find two ports of `HOST` that nobody has.

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
async def running_arm(
    arm: ServedArm, commands: Sequence[ServerCommand], ports: Ports
) -> AsyncIterator[tuple[int, ...]]:
    """Start an arm's server, wait until it is ready, and end it with the block.

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


async def _until_ready(arm: ServedArm, started: Sequence[_Started], ports: Ports) -> None:
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


def _whose(arm: ServedArm, one: _Started) -> str:
    return f"the {one.command.name} with {arm.name}"


def _end(one: _Started) -> str:
    assert one.process.returncode is not None
    return f"{describe_exit(one.process.returncode)}\n{_tail(one.command.log)}"


def _tail(log: Path) -> str:
    return log.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
