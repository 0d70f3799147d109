"""Load one version with its rows into this process, for callers who wait: `Ranker`, `shardrank verify`, benchmarks.

A server loads versions as its registry says: `serving.versions.fleet_member`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from pydantic import ConfigDict, Field

from loader.progress import Progress, no_progress
from loader.snapshot.reader import Snapshot
from router.plan import DEFAULT_REPLICATE_BYTES, Plan
from serving.errors import InternalError
from serving.rank.service import RankingService
from serving.versions.loaded_version import LoadedVersion, LoadOptions, ShardsFactory
from shard_node.buckets import Sharding
from shard_node.cuda.card_set import CardSet
from shard_node.engine.loading import load_tables
from shard_node.node import LocalShard, ShardNode


class ModelSource(LoadOptions):
    """Which version is loaded, and how its rows are divided.

    Attributes:
        snapshot: its folder.
        local_shards: shards in this process; 1 but for tests.
        cards: of each shard.
        memory_budget_bytes: RAM for rows, what does not fit stays in mapped files; None to hold all of them.
        card_set: the cards for rows; None to pool on the CPU.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    snapshot: Path
    local_shards: int = Field(default=1, ge=1, le=64)
    cards: int = Field(default=1, ge=1, le=64)
    sharding: Sharding = "hash"
    replicate_bytes: int = Field(default=DEFAULT_REPLICATE_BYTES, ge=0)
    memory_budget_bytes: int | None = Field(default=None, ge=0)
    card_set: CardSet | None = None


def load_served_model(
    source: ModelSource,
    service: RankingService,
    progress: Progress = no_progress,
    loop: asyncio.AbstractEventLoop | None = None,
) -> LoadedVersion:
    """Open, load and check a version. Blocks; `service.install` makes it live.

    `loop` runs in another thread, and is where requests come from; it ranks if `num_replicas` is 0, for rows in RAM.
    Raises ShardrankError if the version must not be served.
    """
    may_block = source.memory_budget_bytes is not None or source.card_set is not None
    if source.num_replicas == 0 and (loop is None or may_block):
        raise InternalError("num_replicas 0 ranks rows in RAM on the event loop of requests; allowed here is 1..64")
    snapshot = Snapshot.open(source.snapshot, verify=source.verify, progress=progress)
    model, version = snapshot.spec.model, snapshot.version
    division = source.local_shards, source.sharding, source.cards, source.replicate_bytes
    plan, nodes = Plan.of_snapshot(snapshot, *division, source.plan), list[ShardNode]()
    with ExitStack() as closing:
        for index in range(source.local_shards):
            tables = load_tables(
                snapshot,
                plan.partition(index),
                plan.digest,
                memory_budget_bytes=source.memory_budget_bytes,
                card_set=source.card_set,
                progress=progress,
            )
            nodes.append(ShardNode(plan.identity(index)))
            closing.callback(nodes[-1].close)
            nodes[-1].generations.stage(model, version, tables)
            nodes[-1].generations.flip(model, version)
        kept = ExitStack()
        served = LoadedVersion.load(
            snapshot,
            plan,
            local_shards(nodes),
            source,
            limits=service.limits,
            metrics=service.metrics,
            clock=service.clock,
            on_close=kept.close,
            loop=loop,
        )
        kept.push(closing.pop_all())
        return served


def local_shards(nodes: Sequence[ShardNode]) -> ShardsFactory:
    """Make shards in this process, in order."""
    return lambda events: [LocalShard(node) for node in nodes]
