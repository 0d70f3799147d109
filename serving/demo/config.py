"""The demo's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from loader.manifest import Frozen


class DemoConfig(Frozen):
    """What `shardrank demo` was asked to do.

    Attributes:
        movielens: folder with the files of MovieLens 100K; None generates interactions.
        ratings: how many interactions are generated.
        epochs: passes over the training data; None for the trainer's own choice.
        seed: of the split, the training and what is generated.
        store: where the snapshot goes; None for a folder that is removed at the end.
        shards, cards, sharding: the fleet's shape.
        device: where rows lie, as `DeviceChoice.parse` reads it.
        replicate_bytes: tables of at most this size go to every shard. Small, because the demo's tables are: with the
            default of a real fleet nothing would be divided.
        local: everything in this process.
        host, http_port, grpc_port: where it answers; 0 for any free port.
        warmup_requests: sent over each API before latency is measured.
        timeout_ms: deadline of each request.
    """

    movielens: Path | None = None
    ratings: int = Field(default=40_000, ge=1000, le=10_000_000)
    epochs: int | None = Field(default=None, ge=1, le=1000)
    seed: int = Field(default=0, ge=0, lt=2**32)
    store: Path | None = None
    shards: int = Field(default=2, ge=1, le=64)
    cards: int = Field(default=2, ge=1, le=64)
    device: str = "cpu"
    sharding: Literal["hash", "range", "table"] = "hash"
    replicate_bytes: int = Field(default=4096, ge=0)
    local: bool = False
    host: str = "127.0.0.1"
    http_port: int = Field(default=8080, ge=0, le=65535)
    grpc_port: int = Field(default=8081, ge=0, le=65535)
    warmup_requests: int = Field(default=50, ge=0)
    timeout_ms: int = Field(default=2000, ge=1)
