"""What a fleet on one machine looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from loader.manifest import Frozen
from serving.fleet.supervisor import SupervisionConfig


class FleetConfig(Frozen):
    """Shard nodes and serving processes over one snapshot.

    Attributes:
        snapshot: the snapshot's folder.
        model, version: what it holds; nodes are ready when they serve exactly this.
        shards: shards; each has the rows that the plan gives it.
        replicas: nodes of each shard.
        cards: cards of each node.
        sharding: how tables are divided.
        replicate_bytes: tables of at most this size go to every shard.
        workers: serving processes on one HTTP and one gRPC port.
        host: address of the public ports.
        http_port, grpc_port: public ports; 0 for any free one.
        memory_budget_gb: RAM for rows of each node; None to hold all rows in RAM.
        verify: every process compares the SHA-256 of all files whenever it starts, so also after a restart.
        serve_arguments: further flags of `shardrank serve`.
        log_level: of every child.
    """

    snapshot: Path
    model: str
    version: int = Field(ge=1)
    shards: int = Field(default=2, ge=1, le=64)
    replicas: int = Field(default=1, ge=1, le=16)
    cards: int = Field(default=1, ge=1, le=64)
    sharding: Literal["hash", "range", "table"] = "hash"
    replicate_bytes: int = Field(default=1 << 20, ge=0)
    workers: int = Field(default=1, ge=1, le=64)
    host: str = "127.0.0.1"
    http_port: int = Field(default=8080, ge=0, le=65535)
    grpc_port: int = Field(default=8081, ge=0, le=65535)
    memory_budget_gb: float | None = Field(default=None, ge=0)
    verify: bool = True
    serve_arguments: tuple[str, ...] = ()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    supervision: SupervisionConfig = SupervisionConfig()
