"""The arms of a comparison, and the command lines of their servers, as users start them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from loader.snapshot.manifest import Frozen
from loadtest.compare.hosts import Host
from loadtest.load.config import MAX_RATE, MAX_RUN_S
from loadtest.servers import ServerCommand
from serving.fleet.supervisor import shardrank_command
from shard_node.node import Sharding

MAX_ARMS = 16
MAX_CARDS = 64
MAX_SHARDS = 64
MAX_WORKERS = 64
MAX_DELAY_MS = 1000.0
NODE_PORT = 7000
"""Of shard nodes on hosts; each host has all ports for itself."""

Dtype: TypeAlias = Literal["float32", "bfloat16"]


class ServedArm(Frozen):
    """What is compared.

    Attributes:
        cards: of the serving process, or of each shard process.
        shards: shard processes; None for rows in the serving process.
    """

    cards: int = Field(ge=1, le=MAX_CARDS)
    shards: int | None = Field(default=None, ge=1, le=MAX_SHARDS)

    @property
    def name(self) -> str:
        """Write it as `2 cards`, or `2 shards of 1 card`."""
        cards = _counted(self.cards, "card")
        return cards if self.shards is None else f"{_counted(self.shards, 'shard')} of {cards}"


class Budgets(Frozen):
    """Where rows may lie; the same for every arm. GB are 10^9 bytes.

    Attributes:
        device: as `shardrank serve --device` reads it.
        card_memory_gb, hot_gb: of each card; None for the server's default.
        pinned_memory_gb: of an arm, all its processes that hold rows together.
        memory_budget_gb: RAM for rows, likewise; None for no bound.
        peer_access: of cards.
        replicate_bytes: tables of at most so many bytes are held whole by every shard.
    """

    device: str = "auto"
    card_memory_gb: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    pinned_memory_gb: float = Field(default=16.0, ge=0, allow_inf_nan=False)
    hot_gb: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    memory_budget_gb: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    peer_access: Literal["auto", "required"] = "auto"
    replicate_bytes: int = Field(default=1 << 20, ge=0)


class CompareConfig(Frozen):
    """Which arms, and how each is measured.

    Attributes:
        cards: each number of them is an arm; the first one is what the others are compared to.
        shards: with each number of them; empty for rows in the serving process.
        rounds: how often every arm is measured.
        rate: requests a second, cold and warm.
        cold_s: of sending from a server's start.
        warmup_s, duration_s: of the warm measures after that; only the duration counts.
        in_flight: requests that are always out while the throughput is measured, in a closed loop.
        budgets: of every arm.
        sharding: how rows are divided over shards and cards.
        workers: serving processes of every arm; without shards each holds all rows.
        dtype: of the dense model; `auto` is the server's choice.
        hosts: each shard process in a network namespace of its own, asked over TCP; without, over Unix sockets.
        delay_ms: that the network between hosts adds to a round trip; None to leave it as it is.
        seed: of the times; round i of every arm has the same.
    """

    cards: tuple[int, ...] = Field(default=(1, 2, 4), min_length=1)
    shards: tuple[int, ...] = ()
    rounds: int = Field(default=6, ge=1, le=1000)
    rate: float = Field(default=50.0, gt=0, le=MAX_RATE)
    cold_s: float = Field(default=2.0, gt=0, le=MAX_RUN_S)
    warmup_s: float = Field(default=2.0, ge=0, le=MAX_RUN_S)
    duration_s: float = Field(default=10.0, gt=0, le=MAX_RUN_S)
    in_flight: int = Field(default=32, ge=1, le=4096)
    budgets: Budgets = Budgets()
    sharding: Sharding = "hash"
    workers: int = Field(default=1, ge=1, le=MAX_WORKERS)
    dtype: Literal["auto"] | Dtype = "auto"
    hosts: bool = False
    delay_ms: float | None = Field(default=None, gt=0, le=MAX_DELAY_MS, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, lt=2**31)

    @model_validator(mode="after")
    def _arms_fit(self) -> Self:
        arms = self.arms
        if len(set(arms)) != len(arms) or not 2 <= len(arms) <= MAX_ARMS:
            raise ValueError(
                f"cards: {list(self.cards)} and shards: {list(self.shards)} are {len(arms)} arms; a comparison has 2 "
                f"to {MAX_ARMS} different ones"
            )
        return self

    @model_validator(mode="after")
    def _hosts_fit(self) -> Self:
        if self.hosts and not self.shards:
            raise ValueError("hosts: there are none without shards")
        if self.delay_ms is not None and not self.hosts:
            raise ValueError(f"delay_ms: {self.delay_ms:g} is of the network between hosts; it needs hosts")
        return self

    @property
    def arms(self) -> tuple[ServedArm, ...]:
        """List the arms in the order of the table; the first is the baseline."""
        return tuple(
            ServedArm(cards=cards, shards=shards) for shards in (self.shards or (None,)) for cards in self.cards
        )


def server_commands(
    arm: ServedArm, config: CompareConfig, snapshot: Path, folder: Path, hosts: Sequence[Host] = ()
) -> tuple[ServerCommand, ...]:
    """List what is started for an arm, in this order; the last one serves."""
    log = folder / "server.log"
    if not hosts:
        arguments = server_arguments(arm, config, snapshot, folder / "registry")
        return (ServerCommand("server", shardrank_command(*arguments), log),)
    addresses = [f"{host.address}:{NODE_PORT}" for host in hosts]
    nodes = [
        ServerCommand(
            f"shard {number}",
            host.inside(shardrank_command(*node_arguments(arm, config, snapshot, number, addresses[number]))),
            folder / f"shard-{number}.log",
        )
        for number, host in enumerate(hosts)
    ]
    asks = shardrank_command(*asking_arguments(arm, config, snapshot, addresses))
    return (*nodes, ServerCommand("server", asks, log))


def server_arguments(arm: ServedArm, config: CompareConfig, snapshot: Path, registry: Path) -> tuple[str, ...]:
    """Make the arguments of `serve`, or of `up` for shards, which alone use the registry's folder."""
    flags = _divided(arm, config, snapshot) | _rows(arm, config) | _serving(config)
    if arm.shards is None:
        return ("serve", *_given(flags | {"shutdown-delay-s": 0}))
    return ("up", *_given(flags | {"shards": arm.shards, "registry": registry}))


def node_arguments(arm: ServedArm, config: CompareConfig, snapshot: Path, shard: int, address: str) -> tuple[str, ...]:
    """Make the arguments of `shard-node` for one of an arm's shards, which listens at an address."""
    own = {"shard": f"{shard}/{arm.shards}", "listen": address}
    return ("shard-node", *_given(_divided(arm, config, snapshot) | _rows(arm, config) | own))


def asking_arguments(
    arm: ServedArm, config: CompareConfig, snapshot: Path, addresses: Sequence[str]
) -> tuple[str, ...]:
    """Make the arguments of `serve` for shard nodes at these addresses, the first one's first."""
    flags = _divided(arm, config, snapshot) | _serving(config) | {"shutdown-delay-s": 0}
    return ("serve", *_given(flags), *(text for address in addresses for text in ("--shard", address)))


def _divided(arm: ServedArm, config: CompareConfig, snapshot: Path) -> dict[str, object]:
    """Return what every process of an arm must be told alike."""
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


def _serving(config: CompareConfig) -> dict[str, object]:
    return {"http-port": 0, "grpc-port": 0, "workers": config.workers, "dtype": config.dtype}


def _given(flags: Mapping[str, object]) -> tuple[str, ...]:
    given = [text for name, value in flags.items() if value is not None for text in (f"--{name}", str(value))]
    # Whoever compares has just written the files, or trusts the store.
    return ("--no-verify", *given)


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
