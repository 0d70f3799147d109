"""A fleet in this process: a registry, shard nodes behind real sockets, and serving processes, each with its agent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from loader.registry import open_registry
from loader.registry.fleet import FleetRecord, FleetRegistry, NodeRecord, WantedModel
from loader.snapshot.publishing import register
from loader.snapshot.reader import Snapshot
from loader.stores.cache import StoreUrl
from router.hot_rows import HotRowsConfig
from router.plan import Plan
from serving.limits import RequestLimits
from serving.rank.service import RankingService
from serving.versions.fleet_member import FleetMember, LocalRows, ServingConfig
from shard_node.agent.agent import Agent, AgentConfig
from shard_node.agent.node_agent import NodeActions, NodeConfig, join_fleet
from shard_node.buckets import NodeIdentity, Partition
from shard_node.cuda.card_set import CardSet
from shard_node.node import ShardNode
from shard_node.wire.address import Address
from shard_node.wire.server import NodeServer
from shardrank_testing.agents import QUICK
from shardrank_testing.registered_fleet import change_wanted
from shardrank_testing.serving_api import MODEL, ApiModel

LOOK_S = 0.01


@dataclass
class RunningShardNode:
    """A shard node with its agent."""

    node: ShardNode
    server: NodeServer
    actions: NodeActions
    agent: Agent
    task: asyncio.Task[None]

    async def leave(self) -> None:
        """As on SIGTERM."""
        self.task.cancel()
        await asyncio.wait([self.task])
        await self.agent.leave()
        await self.server.drain(5)
        await self.die()

    async def die(self) -> None:
        """Without a word."""
        self.task.cancel()
        await asyncio.wait([self.task])
        await self.server.close()
        await self.actions.close()
        await asyncio.to_thread(self.node.close)


@dataclass
class AgentFleet:
    """A fleet; `agent_fleet` makes one."""

    folder: Path
    store: Path | StoreUrl
    num_shards: int
    fleet: FleetRegistry
    config: AgentConfig = QUICK
    nodes: dict[str, RunningShardNode] = field(default_factory=dict)
    servings: list[tuple[FleetMember, RankingService]] = field(default_factory=list)

    async def publish(self, snapshot: Path) -> None:
        """Puts a version that lies in the store on record."""
        await register(self.fleet, Snapshot.open(snapshot), clock=time.time)

    async def want(self, model: str, **changes: Any) -> WantedModel:
        """Changes what is wanted of a model."""
        return await change_wanted(self.fleet, model, **changes)

    async def start_node(self, shard: int, replica: int = 0) -> RunningShardNode:
        """Start a shard node, or start it again."""
        name = f"shard-{shard}-{replica}"
        address = Address(path=str(self.folder / f"{name}.sock"))
        await join_fleet(self.fleet, FleetRecord(num_shards=self.num_shards, sharding="hash", replicate_bytes=0))
        node, actions = self._node(self.fleet, name, shard, self.num_shards, address=str(address))
        server = NodeServer(node)
        await server.start([address])
        agent = Agent(self.fleet, actions, self.config)
        running = RunningShardNode(node, server, actions, agent, asyncio.create_task(agent.run()))
        self.nodes[name] = running
        return running

    def serving(
        self,
        local: bool = False,
        limits: RequestLimits | None = None,
        card_set: CardSet | None = None,
        hot_rows: HotRowsConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> tuple[FleetMember, RankingService]:
        """A serving process that has not begun to load; with `local` it has rows of its own, on cards if there are."""
        service = RankingService(limits, expected_models=None, clock=clock)
        name = f"serve-{len(self.servings)}"
        config = ServingConfig(
            node_id=name,
            store=self.store,
            dtype="float32",
            wire_dtype="float32",
            num_replicas=2,
            hot_rows=hot_rows,
        )
        # It closes its registry when it leaves.
        reopen = partial(open_registry, self.fleet.registry.url)
        fleet = FleetRegistry(reopen())
        local_rows = None
        if local:
            cards = 1 if card_set is None else len(card_set.cards.cards)
            rows = self._node(fleet, name, 0, 1, cards, card_set=card_set)
            local_rows = LocalRows(*rows, lambda snapshot: plan_by(1, snapshot, cards))
        node = FleetMember(fleet, service, config, self.config, local_rows, reopen)
        self.servings.append((node, service))
        return node, service

    async def until(self, node_id: str, is_so: Callable[[NodeRecord], bool]) -> NodeRecord:
        """Waits until what a node announces is so."""
        while True:
            for node in await self.fleet.nodes():
                if node.node_id == node_id and is_so(node):
                    return node
            await asyncio.sleep(LOOK_S)

    async def until_state(self, node_id: str, model: str, version: int, state: str | None) -> NodeRecord:
        """Waits until a node tells that a version is in a state; None: that it has it no more."""

        def is_so(node: NodeRecord) -> bool:
            report = node.report(model, version)
            return (None if report is None else report.state) == state

        return await self.until(node_id, is_so)

    async def close(self) -> None:
        for node, service in self.servings:
            await node.leave()
            await asyncio.to_thread(service.close)
        for running in self.nodes.values():
            await running.die()
        await self.fleet.registry.close()

    def _node(
        self,
        fleet: FleetRegistry,
        name: str,
        shard: int,
        num_shards: int,
        cards: int = 1,
        address: str = "",
        card_set: CardSet | None = None,
    ) -> tuple[ShardNode, NodeActions]:
        def plan_of(snapshot: Snapshot) -> tuple[Partition, str]:
            plan = plan_by(num_shards, snapshot, cards)
            return plan.partition(shard), plan.digest

        identity = NodeIdentity(shard_index=shard, num_shards=num_shards, num_cards=cards, sharding="hash")
        config = NodeConfig(node_id=name, address=address, store=self.store, replicate_bytes=0)
        node = ShardNode(identity)
        return node, NodeActions(node, fleet, plan_of, config, card_set=card_set)


def plan_by(num_shards: int, snapshot: Snapshot, cards: int) -> Plan:
    """Who owns what in a fleet."""
    return Plan.make(snapshot.spec, num_shards, "hash", cards, 0)


async def with_live(
    fleet: AgentFleet, versions: Mapping[int, ApiModel], **options: Any
) -> tuple[FleetMember, RankingService]:
    """A serving process with version 1 live, and all versions published; `options` as of `AgentFleet.serving`."""
    for model in versions.values():
        await fleet.publish(model.path)
    await fleet.want(MODEL, live=1, hold=(1,), serve=(1,), follow=(1,))
    node, service = fleet.serving(**options)
    await node.load()
    return node, service


@asynccontextmanager
async def agent_fleet(
    folder: Path, store: Path | StoreUrl, shards: int = 2, replicas: int = 2, registry: str | None = None
) -> AsyncIterator[AgentFleet]:
    """A fleet with its shard nodes, and without serving processes.

    Args:
        folder: for sockets and the registry; its path must be short.
        store: where versions are stored.
        shards: of the fleet.
        replicas: of each shard.
        registry: its URL; None for a directory in `folder`.
    """
    running = AgentFleet(folder, store, shards, FleetRegistry(open_registry(registry or folder / "registry")))
    try:
        for shard in range(shards):
            for replica in range(replicas):
                await running.start_node(shard, replica)
        yield running
    finally:
        await running.close()
