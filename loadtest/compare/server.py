"""Start and stop an arm's server: `shardrank serve`, `shardrank up`, or `serve` and shard nodes on hosts.

Hosts with a network between them are network namespaces (ip-netns(8)) on one machine, each with a link to this one. A
link is a veth pair: one end here, the other one in the host's namespace. Hosts have no way to each other; shard nodes
need none. netem (tc-netem(8)) delays what an end sends, so half of a delay on each end adds all of it to a round trip.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import random
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest.compare.config import CompareConfig, ServedArm
from loadtest.compare.errors import ArmServerError, HostsError, NoNetemError
from serving.fleet.process import PARENT_PID_VARIABLE
from serving.fleet.supervisor import describe_exit, shardrank_command

NAMESPACES = Path("/var/run/netns")
LINKS = Path("/sys/class/net")
NETWORK = ipaddress.IPv4Network("198.18.0.0/15")
"""RFC 2544: for benchmarks of networks, and so nobody's."""
BLOCK_PREFIX = 25
INSIDE = "eth0"
# netem drops what is beyond this many packets; its own default, 1000, would be full with some ten milliseconds of load.
QUEUE_PACKETS = 100_000
COMMAND_TIMEOUT_S = 30.0
_UNKNOWN_QDISC = ("qdisc kind is unknown", "No such file or directory")

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace, and its link to this machine.

    Attributes:
        namespace: its name, `shardrank-<process id>-<number>`.
        link: name of this machine's end, `sr<process id>-<number>`; the other end is `eth0`.
        near: address of this machine's end.
        address: of the host's.
    """

    namespace: str
    link: str
    near: str
    address: str

    def inside(self, command: Command) -> Command:
        """Make a command line that runs there, as the very process that is started."""
        # Not `ip netns exec`: it mounts a new /sys, in which a process does not find the limits of its control group.
        return ("nsenter", f"--net={NAMESPACES / self.namespace}", "--", *command)


def name_hosts(count: int, process_id: int, taken: Collection[str]) -> tuple[Host, ...]:
    """Choose names and addresses of hosts.

    Args:
        count: how many, up to 64.
        process_id: is part of all names.
        taken: addresses that this machine has; none of the block of 128 that hosts get is among them.

    Raises:
        HostsError: no block of addresses is free.
    """
    blocks = list(NETWORK.subnets(new_prefix=BLOCK_PREFIX))
    used = {ipaddress.IPv4Address(one) for one in taken}
    # By process id, so that runs that begin at once don't choose the same one.
    turned = (blocks[(process_id + place) % len(blocks)] for place in range(len(blocks)))
    block = next((one for one in turned if not any(address in one for address in used)), None)
    if block is None:
        raise HostsError(f"this machine has addresses in every block of {NETWORK}; hosts need one that is free")
    return tuple(
        Host(
            namespace=f"shardrank-{process_id}-{number}",
            link=f"sr{process_id}-{number}",
            near=str(block[2 * number]),
            address=str(block[2 * number + 1]),
        )
        for number in range(count)
    )


def link_commands(host: Host) -> list[Command]:
    """List what makes a host and its link."""
    within = ("ip", "-n", host.namespace)
    # RFC 3021: two ends need no more than a /31.
    return [
        ("ip", "netns", "add", host.namespace),
        ("ip", "link", "add", host.link, "type", "veth", "peer", "name", INSIDE, "netns", host.namespace),
        ("ip", "address", "add", f"{host.near}/31", "dev", host.link),
        ("ip", "link", "set", host.link, "up"),
        (*within, "address", "add", f"{host.address}/31", "dev", INSIDE),
        (*within, "link", "set", INSIDE, "up"),
        (*within, "link", "set", "lo", "up"),
    ]


def delay_commands(host: Host, delay_ms: float) -> list[Command]:
    """List what delays a host's packets, by half on each end of its link."""
    netem = ("root", "netem", "limit", str(QUEUE_PACKETS), "delay", f"{delay_ms * 500:.3f}us")
    return [
        ("tc", "qdisc", "add", "dev", host.link, *netem),
        ("tc", "-n", host.namespace, "qdisc", "add", "dev", INSIDE, *netem),
    ]


@contextlib.contextmanager
def running_hosts(count: int, delay_ms: float | None = None) -> Iterator[tuple[Host, ...]]:
    """Keep hosts there while the block runs. What is started in them must have ended before.

    Args:
        count: how many, up to 64.
        delay_ms: added to a round trip; None for no delay.

    Raises:
        HostsError: they can't be made, or not removed.
        NoNetemError: the kernel can't delay.
    """
    taken = [one.address for ends in psutil.net_if_addrs().values() for one in ends if one.family == socket.AF_INET]
    hosts = name_hosts(count, os.getpid(), taken)
    with contextlib.ExitStack() as stack:
        for host in hosts:
            if (NAMESPACES / host.namespace).exists():
                raise HostsError(
                    f"network namespace {host.namespace!r} is there already, left by a process that was killed; "
                    f"`ip netns delete {host.namespace}` removes it"
                )
            # Before it is made: making it takes several steps, after any of which the rest may fail. The link is
            # removed first: the kernel would remove it some time after the namespace.
            stack.callback(_remove, NAMESPACES / host.namespace, ("ip", "netns", "delete", host.namespace))
            stack.callback(_remove, LINKS / host.link, ("ip", "link", "delete", host.link))
            for command in link_commands(host):
                _run(command)
            for command in [] if delay_ms is None else delay_commands(host, delay_ms):
                _run_netem(command, delay_ms)
        yield hosts


def check_hosts(delay_ms: float | None) -> None:
    """Make a host, as a comparison would, and remove it.

    Raises:
        HostsError: as `running_hosts`; or a program is missing.
        NoNetemError: likewise.
    """
    programs = ("ip", "nsenter") if delay_ms is None else ("ip", "nsenter", "tc")
    if missing := [one for one in programs if shutil.which(one) is None]:
        raise HostsError(f"hosts need {', '.join(missing)}, of the packages iproute2 and util-linux")
    with running_hosts(1, delay_ms):
        pass


def _remove(there: Path, command: Command) -> None:
    if there.exists():
        _run(command)


def _run_netem(command: Command, delay_ms: float | None) -> None:
    try:
        _run(command)
    except HostsError as error:
        if any(text in str(error) for text in _UNKNOWN_QDISC):
            raise NoNetemError(
                f"a delay of {delay_ms:g} ms between hosts: this kernel has no netem (module sch_netem); {error}"
            ) from error
        raise


def _run(command: Command) -> None:
    """Runs a command. It takes milliseconds, and nothing is measured meanwhile: whoever calls may wait for it."""
    line = " ".join(command)
    try:
        # In a session of its own, so that a terminal's Ctrl-C does not end it half-way.
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostsError(f"`{line}`: {error}") from error
    if done.returncode:
        denied = any(text in done.stderr for text in ("not permitted", "ermission denied"))
        hint = "; hosts need root's rights" if denied else ""
        raise HostsError(f"`{line}` answered: {done.stderr.strip()}{hint}")


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
