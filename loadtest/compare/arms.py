"""The arms of a comparison, and the command lines of their servers, as users start them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from loader.snapshot.tables import Frozen
from loadtest.load.config import MAX_RATE, MAX_RUN_S
from loadtest.servers import HOST, ServerCommand
from serving.fleet.supervisor import shardrank_command
from shard_node.partition import Sharding

MAX_ARMS = 16
MAX_CARDS = 64
MAX_SHARDS = 64
MAX_WORKERS = 64
MAX_SHARE = 100

Dtype: TypeAlias = Literal["float32", "bfloat16"]
Transport: TypeAlias = Literal["unix", "tcp"]
TRANSPORTS: dict[Transport, str] = {"unix": "Unix socket", "tcp": "TCP"}
"""How shard processes are asked, as names of arms say it."""


class ServedArm(Frozen):
    """What is compared.

    Attributes:
        cards: of the serving process, or of each shard process.
        shards: shard processes; None for rows in the serving process.
        transport: between these and the serving process; of no meaning without.
    """

    cards: int = Field(ge=1, le=MAX_CARDS)
    shards: int | None = Field(default=None, ge=1, le=MAX_SHARDS)
    transport: Transport = "unix"

    @property
    def name(self) -> str:
        """Write it as `2 cards`, `2 shards, Unix socket`, or `2 shards of 4 cards, TCP`."""
        cards = _counted(self.cards, "card")
        if self.shards is None:
            return cards
        each = "" if self.cards == 1 else f" of {cards}"
        return f"{_counted(self.shards, 'shard')}{each}, {TRANSPORTS[self.transport]}"


class Budgets(Frozen):
    """Where rows may lie; the same for every arm. GB are 10^9 bytes.

    Attributes:
        device: as `shardrank serve --device` reads it.
        card_memory_gb, hot_gb: of each card; None for the server's default.
        pinned_memory_gb: of an arm, all its processes that hold rows together.
        memory_budget_gb: RAM for rows, likewise; None for no bound.
        peer_access: of cards.
        replicate_bytes: tables of at most so many bytes are held whole by every shard; by default none, so that what
            dividing rows costs is not hidden by small tables.
    """

    device: str = "auto"
    card_memory_gb: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    pinned_memory_gb: float = Field(default=16.0, ge=0, allow_inf_nan=False)
    hot_gb: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    memory_budget_gb: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    peer_access: Literal["auto", "required"] = "auto"
    replicate_bytes: int = Field(default=0, ge=0)


class CompareConfig(Frozen):
    """Which arms, and how each is measured.

    Attributes:
        cards: each number of them in the serving process is an arm; the first one is what the others are compared to.
        shards: each number of them is an arm with each of the transports; each shard has the first number of cards.
        transports: between shards and the serving process; None for Unix sockets.
        rounds: how often every arm is measured.
        rate: requests a second, cold and warm.
        cold_s: of sending from a server's start.
        warmup_s, duration_s: of each measure after that; only the duration counts.
        in_flight: requests that are always out while the throughput is measured, in a closed loop.
        shares: percent of the smallest capacity of all arms that each is offered, in an open loop; empty for none.
        budgets: of every arm.
        sharding: how rows are divided over shards and cards.
        workers: serving processes of every arm; without shards each holds all rows.
        dtype: of the dense model; `auto` is the server's choice.
        wire_dtype: of sums that shards send, likewise.
        seed: of the times; round i of every arm has the same.
    """

    cards: tuple[int, ...] = Field(default=(1, 2, 4), min_length=1)
    shards: tuple[int, ...] = ()
    transports: tuple[Transport, ...] | None = Field(default=None, min_length=1)
    rounds: int = Field(default=6, ge=1, le=1000)
    rate: float = Field(default=50.0, gt=0, le=MAX_RATE)
    cold_s: float = Field(default=2.0, gt=0, le=MAX_RUN_S)
    warmup_s: float = Field(default=2.0, ge=0, le=MAX_RUN_S)
    duration_s: float = Field(default=10.0, gt=0, le=MAX_RUN_S)
    in_flight: int = Field(default=32, ge=1, le=4096)
    shares: tuple[int, ...] = (30, 60, 80)
    budgets: Budgets = Budgets()
    sharding: Sharding = "hash"
    workers: int = Field(default=1, ge=1, le=MAX_WORKERS)
    dtype: Literal["auto"] | Dtype = "auto"
    wire_dtype: Literal["auto", "float32", "float16"] = "auto"
    seed: int = Field(default=0, ge=0, lt=2**31)

    @model_validator(mode="after")
    def _arms_fit(self) -> Self:
        arms = self.arms
        if len(set(arms)) != len(arms) or not 2 <= len(arms) <= MAX_ARMS:
            raise ValueError(
                f"cards: {list(self.cards)}, and shards: {list(self.shards)} with each transport, are {len(arms)} "
                f"arms; a comparison has 2 to {MAX_ARMS} different ones"
            )
        if self.transports is not None and not self.shards:
            raise ValueError(f"transports: {list(self.transports)} are between shards, of which there are none")
        return self

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if len(set(self.shares)) != len(self.shares) or any(not 1 <= one <= MAX_SHARE for one in self.shares):
            raise ValueError(f"shares: {list(self.shares)} are not different percents from 1 to {MAX_SHARE}")
        return self

    @property
    def arms(self) -> tuple[ServedArm, ...]:
        """List the arms in the order of the table; the first is the baseline."""
        transports: tuple[Transport, ...] = self.transports or ("unix",)
        return (
            *(ServedArm(cards=cards) for cards in self.cards),
            *(
                ServedArm(cards=self.cards[0], shards=shards, transport=transport)
                for shards in self.shards
                for transport in transports
            ),
        )


def server_commands(arm: ServedArm, config: CompareConfig, snapshot: Path, folder: Path) -> tuple[ServerCommand, ...]:
    """List what is started for an arm, in this order: its shard nodes, and last what serves.

    Args:
        arm: which.
        config: of all arms.
        snapshot: its folder.
        folder: for logs and sockets, of this start alone.
    """
    addresses = node_addresses(arm, folder)
    commands = []
    for number, address in enumerate(addresses):
        line = shardrank_command(*node_arguments(arm, config, snapshot, number, address))
        commands.append(ServerCommand(f"shard {number}", line, folder / f"shard-{number}.log"))
    serves = shardrank_command(*serve_arguments(arm, config, snapshot, addresses))
    return (*commands, ServerCommand("server", serves, folder / "server.log"))


def node_addresses(arm: ServedArm, folder: Path) -> tuple[str, ...]:
    """Choose where an arm's shard nodes listen, the first one's first."""
    shards = range(arm.shards or 0)
    if arm.transport == "unix":
        return tuple(f"unix:{folder / f'{number}.sock'}" for number in shards)
    # All are held until all are chosen. If another program takes one before its node does, the node ends and says why.
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server((HOST, 0))) for _ in shards]
        return tuple(f"{HOST}:{one.getsockname()[1]}" for one in held)


def node_arguments(arm: ServedArm, config: CompareConfig, snapshot: Path, shard: int, address: str) -> tuple[str, ...]:
    """Make the arguments of `shard-node` for one of an arm's shards, which listens at an address."""
    own = {"shard": f"{shard}/{arm.shards}", "listen": address}
    return ("shard-node", *_given(_divided(arm, config, snapshot) | _rows(arm, config) | own))


def serve_arguments(
    arm: ServedArm, config: CompareConfig, snapshot: Path, addresses: Sequence[str] = ()
) -> tuple[str, ...]:
    """Make the arguments of `serve`, which holds rows itself or asks shard nodes at these addresses."""
    rows = {} if addresses else _rows(arm, config)
    flags = _divided(arm, config, snapshot) | rows | _serving(config)
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
    return {
        "http-port": 0,
        "grpc-port": 0,
        "workers": config.workers,
        "dtype": config.dtype,
        "wire-dtype": config.wire_dtype,
        "shutdown-delay-s": 0,
    }


def _given(flags: Mapping[str, object]) -> tuple[str, ...]:
    given = [text for name, value in flags.items() if value is not None for text in (f"--{name}", str(value))]
    # Whoever compares has just written the files, or trusts the store.
    return ("--no-verify", *given)


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
