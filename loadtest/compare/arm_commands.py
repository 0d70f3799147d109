"""The command lines of an arm's server: `shardrank serve`, `shardrank up`, or `serve` and shard nodes on hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.compare.config import Arm, CompareConfig
from loadtest.compare.hosts import Host
from serving.fleet.supervisor import shardrank_command

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
    arm: Arm, config: CompareConfig, snapshot: Path, ports: Ports, folder: Path, hosts: Sequence[Host] = ()
) -> tuple[ServerCommand, ...]:
    """What is started for an arm, in this order.

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


def server_arguments(arm: Arm, config: CompareConfig, snapshot: Path, ports: Ports, registry: Path) -> tuple[str, ...]:
    """`serve`, or `up` for shards; `registry` is the folder of the fleet's, not used without shards."""
    flags = _divided(arm, config, snapshot) | _rows(arm, config) | _serving(config, ports)
    if arm.shards is None:
        return ("serve", *_given(flags | {"shutdown-delay-s": 0}))
    return ("up", *_given(flags | {"shards": arm.shards, "registry": registry}))


def node_arguments(arm: Arm, config: CompareConfig, snapshot: Path, shard: int, address: str) -> tuple[str, ...]:
    """`shard-node` for one of an arm's shards, which listens at an address."""
    own = {"shard": f"{shard}/{arm.shards}", "listen": address}
    return ("shard-node", *_given(_divided(arm, config, snapshot) | _rows(arm, config) | own))


def asking_arguments(
    arm: Arm, config: CompareConfig, snapshot: Path, ports: Ports, addresses: Sequence[str]
) -> tuple[str, ...]:
    """`serve` for shard nodes at these addresses, the first one's first."""
    flags = _divided(arm, config, snapshot) | _serving(config, ports) | {"shutdown-delay-s": 0}
    return ("serve", *_given(flags), *(text for address in addresses for text in ("--shard", address)))


def _divided(arm: Arm, config: CompareConfig, snapshot: Path) -> dict[str, object]:
    """What every process of an arm must be told alike."""
    return {
        "snapshot": snapshot,
        "cards": arm.cards,
        "sharding": config.sharding,
        "replicate-bytes": config.budgets.replicate_bytes,
    }


def _rows(arm: Arm, config: CompareConfig) -> dict[str, object]:
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
