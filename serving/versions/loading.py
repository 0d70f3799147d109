"""From a snapshot's folder to a served model: with its rows in this process, or on shard nodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

from pydantic import ConfigDict, Field, model_validator

from loader.errors import ShardrankError
from loader.progress import Progress, no_progress
from loader.snapshot.reader import Snapshot, VerifiedFiles
from router.hot_keeper import HotRowsKeeper
from router.outliers import ReplicaEvents, ReplicaPolicy
from router.plan import DEFAULT_REPLICATE_BYTES, Plan
from router.shard import ReplicaSource, ReplicatedShard
from router.shard_client import ShardClient
from serving.errors import InternalError
from serving.rank.service import RankingService
from serving.versions.loaded_version import LoadedVersion, LoadOptions, ShardsFactory
from shard_node.buckets import Sharding
from shard_node.cuda.card_set import CardSet
from shard_node.engine.loading import load_tables
from shard_node.node import LocalShard, ShardNode
from shard_node.wire.address import Address
from shard_node.wire.tls import client_context

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


class ModelSource(LoadOptions):
    """Which version to serve, and where its rows are.

    Attributes:
        rows_here: whether row files are in the snapshot's folder; needed for rows in this process.
        shards: the addresses of each shard's replicas. Empty: the rows are loaded into this process.
        local_shards: shards that rows in this process are divided over; 1 but for tests.
        cards: of each shard.
        sharding, replicate_bytes: as on all nodes.
        memory_budget_bytes: RAM for rows in this process; None to hold all of them.
        card_set: the cards for rows of this process; None to pool on the CPU.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    snapshot: Path
    rows_here: bool = True
    shards: tuple[tuple[Address, ...], ...] = ()
    local_shards: int = Field(default=1, ge=1, le=64)
    cards: int = Field(default=1, ge=1, le=64)
    sharding: Sharding = "hash"
    replicate_bytes: int = Field(default=DEFAULT_REPLICATE_BYTES, ge=0)
    memory_budget_bytes: int | None = Field(default=None, ge=0)
    card_set: CardSet | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.shards and self.memory_budget_bytes is not None:
            raise ValueError("memory_budget_bytes is for rows in this process, but shards were given")
        if self.shards and self.card_set is not None:
            raise ValueError("card_set is for rows in this process, but shards were given")
        if self.num_replicas == 0 and (self.memory_budget_bytes is not None or self.card_set is not None):
            raise ValueError("num_replicas 0 is for rows in this process's memory, or on shard nodes")
        if self.hot_rows is not None and not self.shards:
            raise ValueError("hot_rows are copies of rows on shard nodes, but no shards were given")
        if any(not replicas for replicas in self.shards):
            raise ValueError("every shard needs the address of at least one replica")
        return self


def load_served_model(
    source: ModelSource,
    service: RankingService,
    progress: Progress = no_progress,
    loop: asyncio.AbstractEventLoop | None = None,
) -> LoadedVersion:
    """Open, load and check a version. Blocks; `service.install` makes it live.

    `loop` runs in another thread, and is where requests come from; it ranks if `num_replicas` is 0. Raises
    ShardrankError: with status 503 or 504 if its shards can't be asked now, else if it must not be served.
    """
    if source.num_replicas == 0 and loop is None:
        raise InternalError("num_replicas 0 ranks on an event loop, and there is none here; allowed is 1..64")
    files: VerifiedFiles = "all" if source.rows_here else "other"
    snapshot = Snapshot.open(
        source.snapshot, verify=source.verify, files=files, rows_here=source.rows_here, progress=progress
    )
    count, clock = len(source.shards) or source.local_shards, service.clock
    cards = None if source.shards else source.cards
    plan = Plan.of_snapshot(snapshot, count, source.sharding, cards, source.replicate_bytes, source.plan)
    nodes, closing, hot = list[ShardNode](), ExitStack(), None
    try:
        shards: ShardsFactory
        if source.shards:
            tls = None if source.node_tls is None else client_context(source.node_tls)

            def replicas(index: int) -> ReplicaSource:
                return ReplicaSource.fixed(source.shards[index], partial(ShardClient, tls=tls))

            shards = replicated = replicated_shards(snapshot, plan, replicas, clock, source.replica_policy)
            if source.hot_rows is not None:
                connect, on_status = partial(replicated, ReplicaEvents()), service.metrics.hot_rows
                keeper = HotRowsKeeper(source.hot_rows, snapshot, plan, connect, on_status=on_status)
                closing.callback(keeper.close)
                keeper.start()
                hot = keeper.rows
        else:
            for index in range(count):
                load = partial(load_tables, memory_budget_bytes=source.memory_budget_bytes, card_set=source.card_set)
                tables = load(snapshot, plan.partition(index), plan.digest, progress=progress)
                nodes.append(ShardNode(plan.identity(index)))
                closing.callback(nodes[-1].close)
                nodes[-1].generations.stage(snapshot.spec.model, snapshot.version, tables)
                nodes[-1].generations.flip(snapshot.spec.model, snapshot.version)
            shards = local_shards(nodes)
        return LoadedVersion.load(
            snapshot,
            plan,
            shards,
            source,
            limits=service.limits,
            metrics=service.metrics,
            clock=clock,
            on_close=closing.close,
            loop=loop,
            hot=hot,
        )
    except BaseException:
        closing.close()
        raise


async def load_when_possible(
    source: ModelSource,
    service: RankingService,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> LoadedVersion:
    """Load and install a version; while its shards can't be asked, try again. Raises as `load_served_model`."""
    pause_s, loop = FIRST_PAUSE_S, asyncio.get_running_loop()
    while True:
        began = time.monotonic()
        try:
            served = await asyncio.to_thread(load_served_model, source, service, no_progress, loop)
        except ShardrankError as error:
            if error.http_status not in (503, 504):
                raise
            logger.warning("%s can't be served yet: %s", source.snapshot, error)
        else:
            service.install(served)
            logger.info("serving %s %d, loaded in %.1f s", served.model, served.version, time.monotonic() - began)
            return served
        await sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def local_shards(nodes: Sequence[ShardNode]) -> ShardsFactory:
    """Make shards in this process, in order."""
    return lambda events: [LocalShard(node) for node in nodes]


def replicated_shards(
    snapshot: Snapshot,
    plan: Plan,
    replicas: Callable[[int], ReplicaSource],
    clock: Callable[[], float],
    policy: ReplicaPolicy,
) -> Callable[[ReplicaEvents], list[ReplicatedShard]]:
    """Make shards on nodes; `replicas` gives those of a shard by its index."""
    return lambda events: [
        ReplicatedShard(plan, index, snapshot, replicas(index), events, clock, policy)
        for index in range(plan.num_shards)
    ]
