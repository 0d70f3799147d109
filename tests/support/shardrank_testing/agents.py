"""Agents in tests: a clock that is moved by hand, and actions that do what a test tells them to."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loader.registry import open_registry
from loader.registry.fleet import FleetRegistry, NodeRecord, VersionReport, WantedModel
from loader.snapshot.publishing import register
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from shard_node.agent.agent import Agent, AgentConfig
from shard_node.agent.node_agent import NodeActions, NodeConfig
from shard_node.agent.version_loading import StagingConfig
from shard_node.buckets import NodeIdentity, Partition
from shard_node.cuda.card_set import CardSet
from shard_node.node import ShardNode
from shardrank_testing.bags import bags_of
from shardrank_testing.nodes import until
from shardrank_testing.registered_fleet import change_wanted
from shardrank_testing.snapshots import make_spec, write_snapshot
from shardrank_testing.waiting import Clock

PROMPT = AgentConfig(unannounce_grace_s=0.5, staging=StagingConfig(jitter_s=0.0))


class HandClock(Clock):
    """Who sleeps on it wakes up when a test moves it."""

    def __init__(self) -> None:
        super().__init__()
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    async def sleep(self, duration_s: float) -> None:
        if duration_s <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.Event()
        self._sleepers.append((self.now + duration_s, woken))
        await woken.wait()

    def advance(self, duration_s: float) -> None:
        self.now += duration_s
        for due, woken in self._sleepers:
            if due <= self.now:
                woken.set()
        self._sleepers = [(due, woken) for due, woken in self._sleepers if due > self.now]


@dataclass
class ScriptedActions:
    """Actions of a shard node without rows. `gates` delay stagings, `faults` make them fail."""

    node_id: str = "shard-0-a"
    ready: dict[tuple[str, int], VersionReport] = field(default_factory=dict)
    gates: dict[tuple[str, int], asyncio.Event] = field(default_factory=dict)
    faults: dict[tuple[str, int], list[BaseException]] = field(default_factory=dict)
    begun: list[tuple[str, int]] = field(default_factory=list)
    cancelled: list[tuple[str, int]] = field(default_factory=list)
    retired: list[tuple[str, int]] = field(default_factory=list)
    reconciled: list[WantedModel] = field(default_factory=list)
    reconcile_faults: dict[str, Exception] = field(default_factory=dict)
    reconcile_gates: dict[str, asyncio.Event] = field(default_factory=dict)
    retire_gate: asyncio.Event | None = None

    def desired_versions(self, desired: WantedModel) -> Sequence[int]:
        return sorted(desired.held_by(self.node_id), key=lambda version: (version != desired.live, version))

    def loaded(self) -> set[tuple[str, int]]:
        return set(self.ready)

    async def stage(self, model: str, version: int, desired: WantedModel, progress: Callable[[float], None]) -> None:
        key = (model, version)
        self.begun.append(key)
        progress(0.5)
        try:
            if (gate := self.gates.get(key)) is not None:
                await gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(key)
            raise
        if self.faults.get(key):
            raise self.faults[key].pop(0)
        self.ready[key] = VersionReport(model=model, version=version, state="ready", progress=1.0, identity="i")

    async def reconcile(self, desired: WantedModel) -> bool:
        if (fault := self.reconcile_faults.get(desired.model)) is not None:
            raise fault
        if (gate := self.reconcile_gates.get(desired.model)) is not None:
            await gate.wait()
        self.reconciled.append(desired)
        return set(self.desired_versions(desired)) == {
            version for model, version in self.ready if model == desired.model
        }

    async def retire(self, model: str, version: int) -> None:
        if self.retire_gate is not None:
            await self.retire_gate.wait()
        del self.ready[model, version]
        self.retired.append((model, version))

    def reports(self) -> Sequence[VersionReport]:
        return list(self.ready.values())

    def record(self, reports: Sequence[VersionReport], applied: Mapping[str, int]) -> NodeRecord:
        return NodeRecord(
            node_id=self.node_id,
            kind="shard",
            process_id=1,
            address="unix:/run/node.sock",
            shard_index=0,
            num_shards=1,
            applied=dict(applied),
            versions=tuple(reports),
        )


@dataclass
class OnRegistry:
    """What is desired of an agent, and what it announces, on its registry."""

    fleet: FleetRegistry
    agent: Agent
    node_id: str

    async def step(self) -> None:
        """Let the agent go on."""
        raise NotImplementedError

    async def want(self, model: str, **changes: Any) -> WantedModel:
        """Write what is desired."""
        return await change_wanted(self.fleet, model, **changes)

    async def record(self) -> NodeRecord | None:
        """What it has announced."""
        return next((node for node in await self.fleet.nodes() if node.node_id == self.node_id), None)

    async def report(self, model: str, version: int) -> VersionReport | None:
        """What it has announced of a version."""
        record = await self.record()
        return None if record is None else record.report(model, version)

    async def announced(self, model: str, version: int, state: str | None) -> VersionReport | None:
        """Wait until it has announced a version in that state; None: until it has no such version."""
        while True:
            await self.step()
            report = await self.report(model, version)
            if (report.state if report else None) == state:
                return report


@dataclass
class AgentUnderTest(OnRegistry):
    """An agent, and all that it works with."""

    actions: ScriptedActions
    clock: HandClock

    async def step(self) -> None:
        await self.until(lambda: True)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Goes round until the condition holds. No time passes."""
        while True:
            await self.agent.round()
            for _ in range(20):
                await asyncio.sleep(0)
            if condition():
                return

    async def pass_time(self, duration_s: float) -> None:
        """Lets time pass, round by round."""
        for _ in range(round(duration_s / 0.1)):
            self.clock.advance(0.1)
            await self.agent.round()
            await asyncio.sleep(0)

    async def pass_time_until(self, condition: Callable[[], bool]) -> None:
        """Lets as much time pass as it takes."""
        while not condition():
            await self.pass_time(0.1)


@asynccontextmanager
async def agent_on(
    url: str, actions: ScriptedActions | None = None, config: AgentConfig = PROMPT
) -> AsyncIterator[AgentUnderTest]:
    """An agent on a real registry, whose own time is moved by hand."""
    registry = open_registry(url)
    fleet, clock, actions = FleetRegistry(registry), HandClock(), actions or ScriptedActions()
    agent = Agent(fleet, actions, config, clock, clock.sleep, random.Random(7))
    try:
        yield AgentUnderTest(fleet, agent, actions.node_id, actions, clock)
    finally:
        for gate in (*actions.gates.values(), actions.retire_gate):
            if gate is not None:
                gate.set()
        await agent.close()
        await registry.close()


QUICK = AgentConfig(
    poll_s=0.02,
    heartbeat_s=0.2,
    unannounce_grace_s=0.05,
    staging=StagingConfig(jitter_s=0.0, retry_first_s=0.02, retry_max_s=0.1),
)


@dataclass
class NodeUnderTest(OnRegistry):
    """A shard node without its socket whose agent runs, in the task `agent_runs`."""

    node: ShardNode
    store: Path
    actions: NodeActions
    agent_runs: asyncio.Task[None]

    async def publish(self, version: int) -> Snapshot:
        """Export a version of films, with random rows, and register it."""
        snapshot = Snapshot.open(write_snapshot(self.store, make_spec(), seed=version, version=version)[0])
        await register(self.fleet, snapshot, clock=time.time)
        return snapshot

    async def step(self) -> None:
        await asyncio.sleep(0.01)


@asynccontextmanager
async def running_node(
    url: str, store: Path, card_set: CardSet | None = None, **settings: Any
) -> AsyncIterator[NodeUnderTest]:
    """The only shard node of a fleet, called `node`. Settings are those of `NodeConfig`."""
    registry = open_registry(url)
    fleet = FleetRegistry(registry)
    num_cards = 1 if card_set is None else len(card_set.cards.cards)
    node = ShardNode(NodeIdentity(shard_index=0, num_shards=1, num_cards=num_cards, sharding="hash"))
    config = NodeConfig(
        node_id="node", address="unix:/run/node", store=store, replicate_bytes=0, stage_cpu_share=1.0, **settings
    )
    actions = NodeActions(node, fleet, functools.partial(plan_of, num_cards=num_cards), config, card_set=card_set)
    agent = Agent(fleet, actions, QUICK)
    running = asyncio.create_task(agent.run())
    try:
        yield NodeUnderTest(fleet, agent, "node", node, store, actions, running)
    finally:
        running.cancel()
        await asyncio.wait([running])
        await actions.close()
        await registry.close()
        node.close()


def plan_of(snapshot: Snapshot, num_cards: int = 1) -> tuple[Partition, str]:
    """Of a fleet of one shard."""
    plan = Plan.of_snapshot(snapshot, 1, cards_per_shard=num_cards)
    return plan.partition(0), plan.digest


def user_3(under: NodeUnderTest) -> list[float]:
    """The row of user 3, as the node pools it."""
    user = under.node.generations.payload("films", 1).engine.layout.index["user"]
    blocks = under.node.pool("films", 1, bags_of({user: [[3]]}))
    return next(block for block in blocks if block.size)[0].tolist()


async def reached(under: NodeUnderTest, sequence: int) -> None:
    """Wait until its only version has a delta."""
    await until(lambda: under.actions.reports()[0].delta_sequence == sequence)
