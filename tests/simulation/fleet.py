"""The processes of a fleet, made of the real classes over simulated time, network, registry and files."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from loader.deltas.publisher import AsyncDeltaPublisher
from loader.errors import RegistryError, ShardrankError
from loader.registry.fleet import FleetRecord, FleetRegistry, WantedModel
from loader.rollout import CoordinatorConfig
from loader.rollout.coordinator import Coordinator
from loader.snapshot.reader import Snapshot
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper
from router.plan import Plan
from router.router import Router
from serving.description import ModelInfo
from serving.errors import RankingModelError
from serving.formats.json_reader import JsonCodec
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from serving.observe.calls import Call, VersionCounter
from serving.rank.batcher import Batcher
from serving.rank.ranking import Ranking
from serving.rank.replica import LoopReplica
from serving.rank.service import RankingService, answer
from serving.versions import fleet_member
from serving.versions.fleet_member import FleetMember, ServingConfig
from serving.versions.loaded_version import CheckedVersion, LoadedVersion, ranking_parts
from shard_node.agent import node_agent
from shard_node.agent.agent import Agent, AgentConfig
from shard_node.agent.delta_follower import FollowerConfig
from shard_node.agent.node_agent import NodeActions, NodeConfig, join_fleet
from shard_node.agent.version_loading import StagingConfig
from shard_node.bags import Bags
from shard_node.buckets import NodeIdentity, Partition
from shard_node.engine import cpu
from shard_node.engine.memory import RowMemory
from shard_node.node import ShardNode
from shard_node.wire.server import NodeServer
from tests.simulation.model import KEYS, MARK, MODEL, NUM_ROWS, VERSIONS, bytes_of, dense_weights, row_values, rows_of
from tests.simulation.processes import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

# Of the machine that the simulation runs on, which is none of its fleet's, and slow to read.
for _module in (node_agent, fleet_member):
    setattr(_module, "total_memory_bytes", lambda: 1 << 40)  # noqa: B010
    setattr(_module, "available_memory_bytes", lambda: 1 << 39)  # noqa: B010
PORT = 1
# Memory of rows that come is claimed row by row: of versions as small as these a MiB has any number.
setattr(cpu, "CLAIM_BYTES", 1)  # noqa: B010
STAGING = StagingConfig(live_retry_s=5.0, retry_s=6.0)
AGENT = AgentConfig(poll_s=1.0, heartbeat_s=2.0, ttl_s=5.0, models=(MODEL,), staging=STAGING)
COORDINATOR = CoordinatorConfig(tick_s=1.0, lock_ttl_s=5.0, settle_s=3.5, stage_timeout_s=40.0, step_timeout_s=25.0)
FOLLOWER = FollowerConfig(poll_s=1.0, retry_s=1.0)
LIMITS = RequestLimits(default_timeout_ms=2000)


class SimulatedReplica(LoopReplica):
    """A replica on the loop; what blocking work calls on it is done at once."""

    def call(self, function: Callable[[Ranking], Coroutine[Any, Any, Any]]) -> concurrent.futures.Future[Any]:
        if not getattr(self._loop, "in_executor", False):
            return super().call(function)
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        running = function(self.ranking)
        try:
            running.send(None)
        except StopIteration as stop:
            done.set_result(stop.value)
        else:
            running.close()
            raise AssertionError("blocking work waits for the loop")
        return done


def load_version(snapshot: Snapshot, plan: Plan, shards: Callable[..., Any], _: Any, **given: Any) -> LoadedVersion:
    """Load a version as `LoadedVersion.load` does, without threads; golden scores are those of `VERSIONS`."""
    limits, metrics, clock = given["limits"], given["metrics"], given["clock"]
    spec = snapshot.spec
    if VERSIONS[snapshot.version].is_broken:
        raise RankingModelError(f"version {snapshot.version}: golden scores differ", kind="golden_mismatch")
    schema = RequestSchema(FeatureSchema.of(spec), limits)
    parts = ranking_parts(snapshot, schema, "float32")
    batcher, counter = Batcher(limits, clock, None), VersionCounter()
    connected = shards(metrics.replica_events(spec.model))
    router = Router(schema.features, IdMapper.of_snapshot(snapshot, schema.features), plan, connected)
    ranking = Ranking(parts, router, connected, metrics, counter, clock)
    replica: Any = SimulatedReplica(ranking, batcher, given["loop"], clock)
    replica.start()
    info, checked = ModelInfo.of(snapshot, limits, "float32", ""), CheckedVersion("float32")
    return LoadedVersion(schema, info, batcher, [replica], given["on_close"], counter, checked, list)


class Member(FleetMember):
    """A serving process, which connects to the shards of a version once it is loaded, not before."""

    async def stage(self, model: str, version: int, desired: WantedModel, tell: Callable[[float], None]) -> None:
        await super().stage(model, version, desired, tell)
        with self._service.lease(model, version) as lease:
            rankings = lease.payload.rankings
        try:
            for ranking in rankings:
                await ranking.connect(self._service.clock() + 5.0)
        except ShardrankError:
            await self.retire(model, version)
            raise


class Client:
    """Whoever asks; nobody leaves."""

    connection = "client"

    def watch(self, callback: Callable[[], None]) -> None:
        pass

    def once_sent(self, callback: Callable[[], None]) -> None:
        callback()


class ShardProcess(Process):
    """A shard node."""

    def __init__(self, world: World, name: str, shard: int) -> None:
        super().__init__(world.loop, name, world.clocks[name])
        self.world, self.shard = world, shard
        self.fleet = FleetRegistry(world.open_registry())
        identity = NodeIdentity(shard_index=shard, num_shards=world.num_shards, num_cards=1, sharding="hash")
        self.node = ShardNode(identity, None, self.clocks.wall, world.loop.begin_thread)
        process: Any = {"node_id": name, "store": world.store_path, "verify": False, "stage_cpu_share": 1.0}
        config = NodeConfig(address=f"tcp://{name}:{PORT}", replicate_bytes=0, **process)
        # For so many versions and a half.
        memory = RowMemory((2 * world.memory_versions + 1) * bytes_of(world.num_shards) // 2, lambda: 1 << 40)
        options: dict[str, Any] = {"store": world.stores[name], "following": FOLLOWER, "memory": memory}
        self.actions = NodeActions(self.node, self.fleet, self._plan_of, config, **options)
        self.agent = Agent(self.fleet, self.actions, AGENT, self.clocks.monotonic, random=Random(world.random.random()))
        self.start(self._main())

    def _plan_of(self, snapshot: Snapshot) -> tuple[Partition, str]:
        plan = Plan.of_snapshot(snapshot, self.world.num_shards, "hash", None, 0)
        return plan.partition(self.shard), plan.digest

    async def _main(self) -> None:
        record = FleetRecord(num_shards=self.world.num_shards, sharding="hash", replicate_bytes=0)
        while True:
            try:
                await join_fleet(self.fleet, record)
                break
            except RegistryError:
                await asyncio.sleep(0.5)
        server = NodeServer(self.node, clock=self.clocks.monotonic)
        self.world.network.listening[self.name, PORT] = self, partial(server.make, "")
        await self.agent.run()

    def kept_versions(self) -> list[int]:
        """Return the versions that are here, answer, and are to stay."""
        wanted = self.agent.desired.get(MODEL)
        kept = () if wanted is None else self.actions.desired_versions(wanted)
        return [one.version for one in self.node.generations.all() if one.state != "draining" and one.version in kept]

    def rows(self, version: int) -> dict[int, float] | None:
        """Return the first number of each row of this shard, 0 of missing ones; None if the version is not here."""
        if not self.node.generations.has(MODEL, version):
            return None
        mine = rows_of(self.shard, self.world.num_shards)
        counts, ones = np.bincount(list(mine.values())), np.ones(len(mine), np.int64)
        bags = Bags.from_lengths(np.arange(2, dtype=np.int32), counts, ones, np.array(list(mine)))
        (values,) = self.node.pool(MODEL, version, bags)
        return dict(zip(mine, values.reshape(len(mine), -1)[:, 0].tolist(), strict=True))


class ServingProcess(Process):
    """A serving process."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.loop, name, world.clocks[name])
        self.fleet = FleetRegistry(world.open_registry())
        self.service = RankingService(
            LIMITS, None, self.clocks.monotonic, wall_clock=self.clocks.wall, begin=world.loop.begin_thread
        )
        lease_fallback = self.service.lease_fallback

        def counted(call: Call, error: BaseException) -> Any:
            if lease := lease_fallback(call, error):
                world.history.answers_of[call.version].append(world.loop.now)
            return lease

        setattr(self.service, "lease_fallback", counted)  # noqa: B010
        process: Any = {"node_id": name, "store": world.store_path, "verify": False, "stage_cpu_share": 1.0}
        process |= {"dtype": "float32", "wire_dtype": "float32", "num_replicas": 0, "dense_step_wait_s": 6.0}
        options: Any = {"store": world.stores[name], "load": load_version, "random": Random(world.random.random())}
        self.member = self.run(partial(Member, self.fleet, self.service, ServingConfig(**process), AGENT, **options))
        self.member.address = f"http://{name}:80"
        self.is_ready = False
        self.start(self._main())

    async def _main(self) -> None:
        await self.member.load()
        self.is_ready = True

    async def ask(self, body: bytes) -> dict[str, Any]:
        """Answer a request. Raises ShardrankError, or ConnectionError if it is not ready."""
        if not self.is_ready:
            raise ConnectionRefusedError(f"{self.name} is not ready")
        call = self.service.admit("http", "rank", None)
        encoded = await answer(self.service, call, JsonCodec("rank", MODEL), body, Client())
        return dict(json.loads(bytes(encoded.body)))


class CoordinatorProcess(Process):
    """A coordinator."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.loop, name, world.clocks[name])
        fleet, clocks = FleetRegistry(world.open_registry()), self.clocks
        self.coordinator = Coordinator(fleet, name, clocks.wall, config=COORDINATOR, monotonic=clocks.monotonic)
        self.start(self.coordinator.run())


class PublisherProcess(Process):
    """A trainer: rows of a stream every now and then, and dense steps of the version that it goes on from."""

    def __init__(self, world: World, name: str, base_version: int, min_replicas: int) -> None:
        super().__init__(world.loop, name, world.clocks[name])
        self.world, self.version = world, base_version
        self._random = Random(world.random.random())
        options: Any = {"name": name, "min_replicas": min_replicas, "retry_s": 8.0}
        options |= {"clock": self.clocks.wall, "monotonic": self.clocks.monotonic, "store": world.stores[name]}
        self.publisher = AsyncDeltaPublisher(world.open_registry(), MODEL, base_version, **options)
        # Whether it was told last that a node refuses keys; None before a last call.
        self.is_refused: bool | None = None
        self.start(self._main())

    async def _main(self) -> None:
        world, random = self.world, self._random
        while not world.is_quiet and world.loop.now < world.scenario.train_until_s:
            await asyncio.sleep(random.expovariate(1 / 2.5))
            if world.is_quiet:
                break
            if random.random() < 0.2 and (step := world.next_step(self.version)):
                await self._try(self._publish_step, step)
            elif stamp := world.next_stamp():
                # Some rows are written time and again, others seldom, so that what is lost is not written over.
                kind = random.choice(("items", "items", "upsert", "upsert", "delete"))
                of, power = (range(NUM_ROWS), 3) if kind == "items" else (KEYS, 1.5)
                count = random.randint(1, 2 if kind == "delete" else 4)
                drawn = {of[int(len(of) * random.random() ** power)] for _ in range(count)}
                await self._try(self._publish, stamp, kind, sorted(drawn))
        # Whoever trains to the end is told by last calls what was lost, and, of what nodes say by now, what is refused.
        stamp = world.next_stamp() if world.is_quiet else 0
        await asyncio.sleep(3 * AGENT.heartbeat_s)
        if not stamp or await self._try(self._publish, stamp, "items", [0]):
            world.history.died(self.name)
        elif stamp := world.next_stamp():
            self.is_refused = await self._try(self._publish, stamp, "delete", [KEYS[0]]) == "key_capacity"
        world.quiet_publishers += 1

    async def _try(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> str:
        """Do it; return the kind of error that it ends with, or "" if it is done."""
        kind = "unavailable"
        for _ in range(4):
            try:
                await work(*arguments)
                return ""
            except (ShardrankError, OSError) as error:
                self.world.note(self.name, f"{type(error).__name__}: {error}")
                if sequences := getattr(error, "sequences", ()):
                    self.world.history.lost_told(self.name, sequences)
                if (kind := getattr(error, "kind", "") or kind) in ("publisher_superseded", "key_capacity"):
                    break
            await asyncio.sleep(0.5)
        return kind

    async def _publish(self, stamp: int, kind: str, rows: list[int]) -> None:
        history, base = self.world.history, VERSIONS[self.version].base
        history.attempted(stamp, base, rows, self.name, deletes=kind == "delete")
        values = row_values(base, np.array(rows), stamp)
        if kind == "items":
            sequence = await self.publisher.publish("items", rows, values)
        elif kind == "upsert":
            sequence = await self.publisher.upsert("keys", rows, values)
        else:
            sequence = await self.publisher.delete("keys", [*rows, MARK + stamp])
        self.world.note(self.name, f"stamp {stamp} is delta {sequence} of {base}")
        history.acknowledged(stamp, sequence)

    async def _publish_step(self, step: int) -> None:
        await self.publisher.publish_dense(step, dense_weights(self.version, step))
        self.world.note(self.name, f"dense step {step} of version {self.version}")
