"""What a fleet on one machine looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from loader.manifest import Frozen
from serving.fleet.supervisor import SupervisionConfig

STORE_REGISTRY = ".registry"
"""Folder in a store that is the registry of a fleet for which no other was named."""


class FleetConfig(Frozen):
    """A coordinator, shard nodes and serving processes over one store.

    Attributes:
        store: where the versions lie.
        models: what is served.
        versions: what a model begins with, by model. One that is not named goes on with the version that the registry
            has live; the first time, with the store's latest.
        registry: its URL or folder; None for the folder `.registry` in the store.
        shards: shards; each has the rows that the plan gives it.
        replicas: nodes of each shard.
        cards: cards of each node.
        sharding: how tables are divided.
        replicate_bytes: tables of at most this size go to every shard.
        workers: serving processes on one HTTP and one gRPC port.
        host: address of the public ports.
        http_port, grpc_port: public ports; 0 for any free one.
        memory_budget_gb: RAM for rows of each node; None to hold all rows in RAM.
        verify: every process compares the SHA-256 of the files that it reads, at each start and for each new version.
        shard_node_arguments, serve_arguments, coordinator_arguments: further flags of those commands.
        log_level: of every child.
    """

    store: Path
    models: tuple[str, ...] = Field(min_length=1, max_length=256)
    versions: dict[str, int] = Field(default_factory=dict)
    registry: str | None = None
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
    shard_node_arguments: tuple[str, ...] = ()
    serve_arguments: tuple[str, ...] = ()
    coordinator_arguments: tuple[str, ...] = ()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    supervision: SupervisionConfig = SupervisionConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.models)) != len(self.models):
            raise ValueError(f"models has duplicates: {list(self.models)}")
        if unknown := sorted(self.versions.keys() - set(self.models)):
            raise ValueError(f"versions of models that are not served: {unknown}")
        return self

    @property
    def registry_url(self) -> str:
        """The registry that was named, or the store's own."""
        return str(self.store.resolve() / STORE_REGISTRY) if self.registry is None else self.registry

    @property
    def shard_node_names(self) -> tuple[tuple[str, ...], ...]:
        """By shard and replica; children and nodes have the same names."""
        return tuple(
            tuple(f"shard-{shard}-{replica}" for replica in range(self.replicas)) for shard in range(self.shards)
        )

    @property
    def worker_names(self) -> tuple[str, ...]:
        """Of the serving processes."""
        return tuple(f"serve-{worker}" for worker in range(self.workers))
