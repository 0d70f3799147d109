"""The arms of a comparison, and the command lines of their servers, as users start them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from loader.snapshot.tables import Frozen
from loadtest.load.config import MAX_RATE, MAX_RUN_S
from loadtest.servers import HOST, ServerCommand
from serving.fleet.supervisor import shardrank_command
from shard_node.partition import Sharding

MAX_ARMS = 16

Dtype: TypeAlias = Literal["float32", "bfloat16"]
Transport: TypeAlias = Literal["unix", "tcp"]
TRANSPORTS: dict[Transport, str] = {"unix": "Unix socket", "tcp": "TCP"}
"""Between serving and shard processes, as names of arms spell it."""
Count: TypeAlias = Annotated[int, Field(ge=1, le=64)]
Gigabytes: TypeAlias = Annotated[float, Field(ge=0)]


class ServedArm(Frozen):
    """What is compared.

    Attributes:
        cards: of the serving process, or of each shard process.
        shards: shard processes; None for rows in the serving process.
        transport: between these and the serving process; of no meaning without.
    """

    cards: int
    shards: int | None = None
    transport: Transport = "unix"

    @property
    def name(self) -> str:
        """Write it as `2 cards`, `2 shards, Unix socket`, or `2 shards of 4 cards, TCP`."""
        cards = f"{self.cards} card{'s' if self.cards > 1 else ''}"
        if self.shards is None:
            return cards
        each = "" if self.cards == 1 else f" of {cards}"
        return f"{self.shards} shard{'s' if self.shards > 1 else ''}{each}, {TRANSPORTS[self.transport]}"


class CompareConfig(Frozen):
    """Which arms, how each is measured, and what all of them are served with. GB are 10^9 bytes.

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
        seed: of the times; round i of every arm has the same.
        device: as `shardrank serve --device` reads it.
        card_memory_gb, hot_gb: of each card; None for the server's default.
        pinned_memory_gb, memory_budget_gb: of all processes of an arm that hold rows; None for no bound on RAM.
        peer_access: of cards.
        replicate_bytes: tables of at most so many bytes are held whole by every shard; by default none, so that what
            dividing rows costs is not hidden by small tables.
        sharding: how rows are divided over shards and cards.
        workers: serving processes of every arm; without shards each holds all rows.
        dtype: of the dense model; `auto` is the server's choice.
        wire_dtype: of sums that shards send, likewise.
    """

    cards: tuple[Count, ...] = Field(default=(1, 2, 4), min_length=1)
    shards: tuple[Count, ...] = ()
    transports: tuple[Transport, ...] | None = Field(default=None, min_length=1)
    rounds: int = Field(default=6, ge=1, le=1000)
    rate: float = Field(default=50.0, gt=0, le=MAX_RATE)
    cold_s: float = Field(default=2.0, gt=0, le=MAX_RUN_S)
    warmup_s: float = Field(default=2.0, ge=0, le=MAX_RUN_S)
    duration_s: float = Field(default=10.0, gt=0, le=MAX_RUN_S)
    in_flight: int = Field(default=32, ge=1, le=4096)
    shares: tuple[Annotated[int, Field(ge=1, le=100)], ...] = (30, 60, 80)
    seed: int = Field(default=0, ge=0, lt=2**31)
    device: str = "auto"
    card_memory_gb: float | None = Field(default=None, gt=0)
    hot_gb: Gigabytes | None = None
    pinned_memory_gb: Gigabytes = 16.0
    memory_budget_gb: Gigabytes | None = None
    peer_access: Literal["auto", "required"] = "auto"
    replicate_bytes: int = Field(default=0, ge=0)
    sharding: Sharding = "hash"
    workers: Count = 1
    dtype: Literal["auto"] | Dtype = "auto"
    wire_dtype: Literal["auto", "float32", "float16"] = "auto"

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
        if len(set(self.shares)) != len(self.shares):
            raise ValueError(f"shares: {list(self.shares)} are not different percents")
        return self

    @property
    def arms(self) -> tuple[ServedArm, ...]:
        """List the arms in the order of the table; the first is the baseline."""
        return (
            *(ServedArm(cards=cards) for cards in self.cards),
            *(
                ServedArm(cards=self.cards[0], shards=shards, transport=transport)
                for shards in self.shards
                for transport in self.transports or ("unix",)
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
    # Without shards each of several serving processes holds all rows, on the same cards.
    holders, sharers = (config.workers, config.workers) if arm.shards is None else (arm.shards, 1)
    divided = {
        "snapshot": snapshot,
        "cards": arm.cards,
        "sharding": config.sharding,
        "replicate-bytes": config.replicate_bytes,
    }
    rows = {
        "device": config.device,
        "card-memory-gb": _part(config.card_memory_gb, sharers),
        "pinned-memory-gb": _part(config.pinned_memory_gb, holders),
        "hot-gb": _part(config.hot_gb, sharers),
        "memory-budget-gb": _part(config.memory_budget_gb, holders),
        "peer-access": config.peer_access,
    }
    serves = {
        "http-port": 0,
        "grpc-port": 0,
        "workers": config.workers,
        "dtype": config.dtype,
        "wire-dtype": config.wire_dtype,
        "shutdown-delay-s": 0,
    }
    addresses = node_addresses(arm, folder)
    nodes = [
        _command(
            "shard-node", f"shard {number}", folder, divided | rows | {"shard": f"{number}/{arm.shards}", "listen": at}
        )
        for number, at in enumerate(addresses)
    ]
    asked = [text for address in addresses for text in ("--shard", address)]
    return (*nodes, _command("serve", "server", folder, divided | serves | ({} if addresses else rows), *asked))


def _part(total: float | None, parts: int) -> float | None:
    return None if total is None else total / parts


def _command(verb: str, name: str, folder: Path, flags: Mapping[str, object], *arguments: str) -> ServerCommand:
    given = [text for flag, value in flags.items() if value is not None for text in (f"--{flag}", str(value))]
    # The files have just been written, or the store is trusted.
    line = shardrank_command(verb, "--no-verify", *given, *arguments)
    return ServerCommand(name, line, folder / f"{name.replace(' ', '-')}.log")


def node_addresses(arm: ServedArm, folder: Path) -> tuple[str, ...]:
    """Choose where an arm's shard nodes listen, the first one's first."""
    shards = range(arm.shards or 0)
    if arm.transport == "unix":
        return tuple(f"unix:{folder / f'{number}.sock'}" for number in shards)
    # All are held until all are chosen. If another program takes one before its node does, the node ends and says why.
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((HOST, 0))) for _ in shards]
        return tuple(f"{HOST}:{listening.getsockname()[1]}" for listening in sockets)
