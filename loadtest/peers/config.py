"""What a comparison measures, and how shardrank is started in it."""

from __future__ import annotations

from typing import Literal, TypedDict

import torch
from pydantic import Field

from loader.snapshot.manifest import Frozen
from loadtest.peers.catalog import PEERS
from loadtest.serving_cost.shape import Shape
from loadtest.workloads.payloads import Api
from serving.models.ranking_models import choose_dtype

SHARDRANK: dict[str, Api] = {"shardrank": "oip-http", "shardrank-grpc": "grpc-packed"}
"""shardrank's one server, by the name that each of its measured APIs has."""


# Few connections would fall unevenly on the processes behind a port, which the kernel chooses by chance.
CHANNELS = 16


class LoadShape(TypedDict):
    """What every load has alike, as messages to the client say it."""

    channels: int
    warmup_s: float
    seconds: float


class PeersConfig(Frozen):
    """What is measured, and for how long.

    Attributes:
        peers: names in `PEERS`.
        hotness: ids for each feature of each candidate.
        in_flight: requests of the client under full load.
        rounds: how often everything is measured.
        warmup_s: of each load.
        seconds: that each load is weighed for.
        workers: processes of each peer, one thread each.
        batch: requests that a peer with batching scores together at most.
        shardrank_workers: processes of shardrank's server.
        dtype: of shardrank's dense model; `auto` is bfloat16 where the processor has it.
        offered_share: of the best peer's throughput in a round, the rate that every server is then offered in it.
    """

    shape: Shape = Shape()
    peers: tuple[str, ...] = Field(default=tuple(PEERS), min_length=1)
    hotness: tuple[int, ...] = Field(default=(1, 20), min_length=1)
    in_flight: int = Field(default=32, ge=1, le=1024)
    rounds: int = Field(default=5, ge=1, le=100)
    warmup_s: float = Field(default=1.0, ge=0)
    seconds: float = Field(default=5.0, gt=0)
    workers: int = Field(default=2, ge=1, le=64)
    batch: int = Field(default=8, ge=1, le=64)
    shardrank_workers: int = Field(default=2, ge=1, le=64)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    offered_share: float = Field(default=0.6, gt=0, lt=1)

    @property
    def load(self) -> LoadShape:
        """What every load has alike."""
        return {"channels": CHANNELS, "warmup_s": self.warmup_s, "seconds": self.seconds}

    @property
    def servers(self) -> tuple[str, ...]:
        """All that are measured, shardrank first."""
        return (*SHARDRANK, *self.peers)


def shardrank_arguments(config: PeersConfig) -> tuple[str, ...]:
    """The flags of shardrank's server, beside where it listens and what it serves."""
    dtype = "bfloat16" if choose_dtype(config.dtype) is torch.bfloat16 else "float32"
    return ("--no-verify", "--workers", str(config.shardrank_workers), "--dtype", dtype)
