"""A serving process as a member of a fleet: it discovers shard nodes, follows the desired versions, and reports.

A version is loaded in a separate thread, without rows: these are on shard nodes, or are staged into this process first,
at a lower priority. Flip, canary and retirement are pointers of the service.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from pydantic import Field

from loader.deltas.chain import FORMAT as DELTA_FORMAT
from loader.errors import SnapshotCorruptError, SnapshotError
from loader.progress import CancelToken, Progress, ended, in_background, throttled
from loader.registry.fleet import (
    FleetRecord,
    FleetRegistry,
    HotReport,
    NodeId,
    NodeRecord,
    PublishedVersion,
    VersionReport,
    WantedModel,
    cut_reason,
)
from loader.registry.registry import Registry
from loader.snapshot.publishing import fall_back
from loader.snapshot.reader import Snapshot
from loader.snapshot.store import Store
from loader.stores import open_store
from loader.stores.cache import StoreUrl
from router.errors import HotRowsError
from router.hot_keeper import HotRowsKeeper, HotStatus, reason_off
from router.hot_rows import HotRows
from router.outliers import ReplicaEvents
from router.plan import Plan
from router.replica_directory import ReplicaDirectory
from router.shard import ReplicaSource, ReplicatedShard
from router.shard_client import ShardClient
from serving.api.warming import warm, warming_requests
from serving.errors import RankingModelError, not_ready
from serving.formats.requests import RankRequest
from serving.observe.watch import Readiness
from serving.rank.service import RankingService
from serving.settings import WhenStale
from serving.versions.dense_steps import DenseSteps, poll
from serving.versions.loaded_version import LoadedVersion, LoadOptions, ShardsFactory
from shard_node.agent.agent import Agent, AgentConfig
from shard_node.agent.node_agent import NodeActions
from shard_node.engine.memory import RowMemory, available_memory_bytes, total_memory_bytes
from shard_node.errors import MemoryBudgetError
from shard_node.freshness import FreshnessBound
from shard_node.node import LocalShard, NodeInfo, ShardNode
from shard_node.wire.address import Address
from shard_node.wire.tls import client_context

logger = logging.getLogger(__name__)

DRAINED_POLL_S = 0.02
LIVE_POLL_S = 0.05
OPENED = 0.5
ANNOUNCE_S = 1.0
TTL_S = 60.0
"""Of what `FixedShards` announces."""


class ServingConfig(LoadOptions):
    """A serving process of a fleet; checking files takes at most `stage_cpu_share` of one core.

    `falls_back`: the only process of its fleet serves the store's next older version in place of one that is refused.
    Versions are warmed by golden requests and the last that were recorded in the folder `record`. `dense_step_wait_s`
    is that of `DenseSteps`.
    """

    node_id: NodeId
    store: Path | StoreUrl
    falls_back: bool = False
    stage_cpu_share: float = Field(default=0.5, gt=0, le=1)
    record: Path | None = None
    max_staleness: Mapping[str, float] = {}
    when_stale: Mapping[str, WhenStale] = {}
    dense_step_wait_s: float = Field(default=30.0, ge=0)


@dataclass(frozen=True, slots=True)
class LocalRows:
    """Rows in this process: `actions` stage them into `node`, by the plan that `plan_of` returns."""

    node: ShardNode
    actions: NodeActions
    plan_of: Callable[[Snapshot], Plan]


@dataclass(frozen=True, slots=True)
class FixedShards:
    """The shard nodes of `--shard`: each shard's replicas, how they divide rows, and the version that they are to have.

    The one process that uses them announces them, in its private registry, for good.
    """

    shards: Sequence[Sequence[Address]]
    division: FleetRecord
    version: PublishedVersion

    async def announce(self, fleet: FleetRegistry, readiness: Readiness) -> None:
        """Announce all of them, with what `readiness` last heard of them, until cancelled.

        Each is said to have the version ready: whether it does is checked before it is used, as with all replicas.
        """
        await fleet.join_fleet(self.division)
        while True:
            reported = {address: info for _, address, info in readiness.nodes()}
            for index, replicas in enumerate(self.shards):
                for number, address in enumerate(map(str, replicas)):
                    record = NodeRecord(
                        node_id=f"shard-{index}-{number}",
                        kind="shard",
                        process_id=0,
                        address=address,
                        shard_index=index,
                        versions=(self._report(reported.get(address)),),
                        **self.division.model_dump(),
                    )
                    await fleet.announce_node(record, TTL_S)
            await asyncio.sleep(ANNOUNCE_S)

    def _report(self, info: NodeInfo | None) -> VersionReport:
        key, tiers, served = (self.version.model, self.version.version), Counter[str](), None
        if info is not None:
            served = next((served for served in info.versions if (served.model, served.version) == key), None)
            for use in info.memory:
                if (use.model, use.version) == key:
                    tiers[use.tier] += use.size_bytes
        return VersionReport(
            model=key[0],
            version=key[1],
            state="ready",
            identity=self.version.identity,
            memory_tiers=dict(tiers),
            plan_digest="" if served is None else served.plan_digest,
            delta_sequence=0 if served is None else served.delta_sequence,
        )


class FleetMember:
    """Does what its agent requests, until `leave`. Belongs to the registry's event loop.

    If `agent_config` names no models, the process is not ready without those that are desired at the start. Without
    `local` rows they are on shard nodes, which announce themselves unless they are `fixed`. `open_registry` opens the
    registry once more for each version with hot rows; None if there are no deltas. `address` is its HTTP address, to be
    set before `load`. Raises TlsConfigError, or HotRowsError for hot rows with `local` rows.
    """

    def __init__(
        self,
        fleet: FleetRegistry,
        service: RankingService,
        config: ServingConfig,
        agent_config: AgentConfig,
        local: LocalRows | None = None,
        open_registry: Callable[[], Registry] | None = None,
        fixed: FixedShards | None = None,
        *,
        store: Store | None = None,
        load: Callable[..., LoadedVersion] = LoadedVersion.load,
        random: Random | None = None,
    ) -> None:
        if config.hot_rows is not None and local is not None:
            raise HotRowsError("hot rows are copies of rows on shard nodes, but all rows are in this process")
        self._open_registry, self._fixed = open_registry, fixed
        self._hot_rows: dict[str, HotRows] = {}
        self._hot_memory = RowMemory()
        if config.hot_rows is not None and config.hot_rows.is_default:
            # Of two versions, as during a rollout.
            self._hot_memory.cap_bytes = 2 * config.hot_rows.size_bytes
        self._hot_reports: dict[tuple[str, int], HotReport] = {}
        self.address = ""
        self.fleet, self._service, self._config = fleet, service, config
        self._models = agent_config.models
        self._node_tls = None if config.node_tls is None else client_context(config.node_tls)
        self._local = local
        self._store, self._load_version = store or open_store(config.store), load
        self._random, self._poll_s = random or Random(), agent_config.poll_s
        self._dense = DenseSteps(fleet, self._store, service.metrics, service.clock, config.dense_step_wait_s)
        self._tasks: list[asyncio.Task[None]] = []
        self.directory = ReplicaDirectory(service.clock)
        self.agent = Agent(fleet, self, agent_config, service.clock, random=self._random)
        service.watch.registry_problem = lambda: fleet.foreign

    async def load(self) -> None:
        """Begin, and return once each expected model is live. The process is in the fleet until `leave`.

        Raises the error of a version that is refused, if `StagingConfig.must_serve` says so.
        """
        follow = partial(self._dense.follow, self._service.generations)
        running = [self.agent.run(), poll(follow, self._poll_s, "reading dense steps", self._random)]
        if self._local is None:
            running.append(poll(self._watch_nodes, self._poll_s, "reading which nodes there are", self._random))
        if self._fixed is not None:
            running.append(self._fixed.announce(self.fleet, self._service.watch))
        self._tasks = [asyncio.create_task(work) for work in running]
        while not self._is_live():
            if self._tasks[0].done() and (error := self._tasks[0].exception()) is not None:
                desired = next(iter(self.agent.desired.values()))
                # A lack of memory says nothing about the version.
                may_fall_back = self._config.falls_back and isinstance(error, SnapshotError | RankingModelError)
                if not may_fall_back or await fall_back(self.fleet, self._config.store, desired, str(error)) is None:
                    raise error
                self._tasks[0] = asyncio.create_task(self.agent.run())
            await asyncio.sleep(LIVE_POLL_S)

    async def leave(self) -> None:
        """Tell the fleet, unless the registry is down, that the process ends. What it serves stays live."""
        self._service.watch.begin_shutdown()
        if self._tasks:
            await self.agent.leave()
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        if self._local is not None:
            await self._local.actions.close()
        await self.fleet.registry.close()

    def desired_versions(self, desired: WantedModel) -> Sequence[int]:
        """List the live version, those to be flipped to, and the one that answers here until the pointer has moved."""
        versions = (desired.live, *desired.serve, self._service.live(desired.model))
        return tuple(dict.fromkeys(version for version in versions if version is not None))

    def loaded(self) -> set[tuple[str, int]]:
        """List (model, version) of what could answer requests."""
        return self._loaded() if self._local is None else self._loaded() & set(self._local.actions.loaded())

    async def stage(self, model: str, version: int, desired: WantedModel, tell: Callable[[float], None]) -> None:
        """Load, check and warm a version, and put it beside the live one.

        Raises UnavailableError if it is not published or a shard lacks it, another ShardrankError with status 503 or
        504 if its shards can't be asked now, else if it must not be served.
        """
        published = await self.fleet.version(model, version)
        await self.fleet.check_identity()
        if published is None:
            raise not_ready(f"version {version} of model {model!r} is not on record as published")
        topology = None
        if self._local is None:
            topology = await self._topology(model, version, desired.num_shards.get(version))
        elif (model, version) not in self._local.actions.loaded():
            await self._local.actions.stage(model, version, desired, lambda share: tell(share * OPENED))
        if (model, version) in self._loaded():
            return  # its rows were staged anew; what ranks with them is still here
        try:
            await self._load(published, topology, tell)
        except BaseException:
            if self._local is not None and (model, version) in self._local.actions.loaded():
                # No other task knows of these rows: they are freed, however often this one is cancelled meanwhile.
                going = asyncio.ensure_future(self._local.actions.retire(model, version))
                await ended(going)
                going.result()
            raise

    async def reconcile(self, desired: WantedModel) -> bool:
        """Point to live version, canary and fallback, as far as they are here. True if the first two are as wanted."""
        model, live, canary = desired.model, desired.live, desired.canary
        if self._local is not None:
            await self._local.actions.reconcile(desired)
        loaded = {version for name, version in self.loaded() if name == model}
        if live is not None and live in loaded and (before := self._service.live(model)) != live:
            self._service.flip(model, live)
            logger.info("version %d of %s is live%s", live, model, f", in place of {before}" if before else "")
        if canary is None or canary.version not in loaded:
            self._service.set_canary(model, None)
        else:
            self._service.set_canary(model, canary.version, canary.share)
        self._service.fallbacks[model] = desired.fallback
        return (live is None or live in loaded) and (canary is None or canary.version in loaded)

    async def retire(self, model: str, version: int) -> None:
        """Withdraw a version; return when its last request has ended and it is freed."""
        if (model, version) in self._loaded():
            generation = self._service.retire(model, version)
            deadline = self._service.clock() + self._service.limits.max_timeout_ms / 1000
            while not generation.retired.is_set():
                if self._service.clock() >= deadline:
                    logger.error("%d requests still use version %d of %s", generation.leases, version, model)
                    deadline = float("inf")
                await asyncio.sleep(DRAINED_POLL_S)
        if self._local is not None and (model, version) in self._local.actions.loaded():
            await self._local.actions.retire(model, version)

    def reports(self) -> list[VersionReport]:
        """Report each version that could answer requests."""
        of_rows = () if self._local is None else self._local.actions.reports()
        rows = {(report.model, report.version): report for report in of_rows}
        loaded, reports = self.loaded(), []
        for generation in self._service.generations.all():
            if (key := (generation.model, generation.version)) not in loaded:
                continue
            served, report = generation.payload, rows.get(key)
            refused = self._dense.refused[key][1] if key in self._dense.refused else ""
            update = {
                "progress": 1.0,
                "identity": served.description.identity,
                "leases": generation.leases,
                "golden_difference": served.checked.difference,
                "golden_tolerance": served.checked.tolerance,
                "stats": served.counter.stats(),
                "hot": self._hot_reports.get(key),
                "dense_step": served.dense_step,
                "dense_refused": cut_reason("; ".join(filter(None, (served.dense_fallback, refused)))),
            }
            report = report or VersionReport(model=served.model, version=served.version, state="ready")
            reports.append(report.model_copy(update=update))
        return reports

    def record(self, reports: Sequence[VersionReport], applied: Mapping[str, int]) -> NodeRecord:
        """Make the record that is announced."""
        topology = self.directory.topology()
        return NodeRecord(
            node_id=self._config.node_id,
            kind="serving",
            process_id=os.getpid(),
            address=self.address,
            # Where rows are on shard nodes this is a number, if only to say so before any of them was seen.
            num_shards=None if self._local is not None else 1 if topology is None else topology.num_shards,
            memory_total_bytes=total_memory_bytes(),
            memory_available_bytes=available_memory_bytes(),
            applied=dict(applied),
            live=self._service.generations.live_versions(),
            delta_format=DELTA_FORMAT,
            versions=tuple(reports),
        )

    async def _topology(self, model: str, version: int, num_shards: int | None) -> FleetRecord:
        """Return how the fleet divides a version. Raises UnavailableError unless each shard has a node with it."""
        await self._watch_nodes()
        # A registry that was emptied has none until a shard node restarts; the nodes still tell.
        topology = await self.fleet.fleet() or self.directory.topology()
        if topology is None:
            raise not_ready("no shard node has joined the fleet yet")
        topology = topology.model_copy(update={} if num_shards is None else {"num_shards": num_shards})
        count = topology.num_shards
        if missing := [index for index in range(count) if not self.directory.current(model, version, index)[1]]:
            where = f"shard {', '.join(map(str, missing))} of {count}"
            raise not_ready(f"no node of {where} has version {version} of model {model!r} ready")
        return topology

    async def _load(
        self, published: PublishedVersion, topology: FleetRecord | None, tell: Callable[[float], None]
    ) -> None:
        loop, requests = asyncio.get_running_loop(), list[list[RankRequest]]()

        def work(wish: CancelToken) -> LoadedVersion:
            # OpenMP would give this thread helpers of its own.
            torch.set_num_threads(1)
            progress = wish.over(lambda what, done, total: tell(OPENED + 0.5 * OPENED * done / max(1, total)))
            paced = throttled(progress, self._config.stage_cpu_share, wish.rest)
            with ExitStack() as closing:
                snapshot = self._open(published, paced, closing)
                wish.check()
                plan, shards, hot = self._connect(snapshot, topology, closing)
                kept = ExitStack()
                served = self._load_version(
                    snapshot,
                    plan,
                    shards,
                    self._config,
                    limits=self._service.limits,
                    metrics=self._service.metrics,
                    clock=self._service.clock,
                    on_close=kept.close,
                    loop=loop,
                    hot=hot,
                )
                kept.push(closing.pop_all())
                if (action := self._config.when_stale.get(served.model, "answer")) != "answer":
                    bound = FreshnessBound(max_age_ms=int(1000 * self._config.max_staleness[served.model]))
                    for ranking in served.rankings:
                        ranking.desired, ranking.required = bound, bound if action == "refuse" else None
                requests.extend(warming_requests(served, snapshot, self._config.record))
                return served

        started_at = self._service.clock()
        name = f"load-{published.model}-{published.version}"
        served = await in_background(work, name, self._discard, self._service.begin_thread, low_priority=False)
        try:
            # A version that comes back answers with the dense weights that it had.
            await self._dense.update(served)
            await warm(self._service, served, requests)
            self._service.install_staged(served)
        except BaseException:
            self._discard(served)
            raise
        duration_s = self._service.clock() - started_at
        logger.info("version %d of %s is loaded, in %.1f s", served.version, served.model, duration_s)

    def _open(self, published: PublishedVersion, progress: Progress, closing: ExitStack) -> Snapshot:
        """Open a version without its row files, which are fetched and checked by whoever loads them."""
        model, version, identity = published.model, published.version, published.identity
        options: dict[str, Any] = {"verify": self._config.verify, "progress": progress}
        files = closing.enter_context(self._store.hold(model, version, identity=identity, with_rows=False, **options))
        with_rows = isinstance(self._config.store, Path)
        return Snapshot.open(files.path, identity, files="other", rows_here=with_rows, **options)

    def _connect(
        self, snapshot: Snapshot, topology: FleetRecord | None, closing: ExitStack
    ) -> tuple[Plan, ShardsFactory, HotRows | None]:
        """Return a version's plan and its shards, in this process or elsewhere, and copies of its hot rows."""
        model, version, clock, config = snapshot.spec.model, snapshot.version, self._service.clock, self._config
        if self._local is not None:
            with self._local.node.generations.lease(model, version) as lease:
                if snapshot.identity != lease.payload.manifest_identity:
                    problem = (
                        f"its manifest has SHA-256 {snapshot.identity}, but {lease.payload.manifest_identity} is of"
                    )
                    where = f"the rows of version {version} of model {model!r} that are in this process"
                    raise SnapshotCorruptError(f"{snapshot.path}: {problem} {where}")
            return self._local.plan_of(snapshot), lambda events: [LocalShard(self._local.node)], None
        assert topology is not None
        division = topology.num_shards, topology.sharding, None, topology.replicate_bytes
        plan = Plan.of_snapshot(snapshot, *division, config.plan)
        connect = partial(ShardClient, tls=self._node_tls)
        sources = [
            ReplicaSource(partial(self.directory.current, model, version, index), connect)
            for index in range(plan.num_shards)
        ]

        def shards(events: ReplicaEvents) -> list[ReplicatedShard]:
            return [
                ReplicatedShard(plan, index, snapshot, source, events, clock, config.replica_policy)
                for index, source in enumerate(sources)
            ]

        hot_rows, name = config.hot_rows, f"hot rows of version {version} of model {model!r}"
        reason = reason_off(hot_rows, snapshot, plan)
        if hot_rows is None or reason:
            logger.info("%s: off: %s", name, reason)
            return plan, shards, None
        # Runs after the keeper has ended and reported for the last time.
        closing.callback(self._hot_reports.pop, (model, version), None)
        fleet = None if self._open_registry is None else self._open_fleet
        followed = fleet, self._report_hot, self._hot_memory, self._hot_rows.get(model)
        try:
            keeper = HotRowsKeeper(hot_rows, snapshot, plan, partial(shards, ReplicaEvents()), *followed)
        except (HotRowsError, MemoryBudgetError) as error:
            if not hot_rows.is_default:
                raise
            logger.warning("%s: off: %s", name, error)
            return plan, shards, None
        logger.info("%s: on, in at most %d bytes", name, hot_rows.size_bytes)
        closing.callback(keeper.close)
        self._hot_rows[model] = keeper.rows
        keeper.start()
        return plan, shards, keeper.rows

    def _open_fleet(self) -> FleetRegistry:
        """Open the registry once more, for another event loop; it must be the same one as well."""
        assert self._open_registry is not None
        fleet = copy.copy(self.fleet)
        fleet.registry = self._open_registry()
        return fleet

    def _report_hot(self, status: HotStatus) -> None:
        self._service.metrics.hot_rows(status)
        key = status.model, status.version
        before = self._hot_reports.get(key, HotReport())
        lookups, hits = before.lookups + int(status.lookups.sum()), before.hits + int(status.hits.sum())
        self._hot_reports[key] = HotReport(rows=status.rows, size_bytes=status.size_bytes, lookups=lookups, hits=hits)

    def _discard(self, served: LoadedVersion) -> None:
        def discard() -> None:
            served.close()
            if not self._service.generations.has(served.model, served.version):
                self._service.metrics.forget_version(served.model, served.version)

        self._service.begin_thread(discard, f"discard-{served.model}-{served.version}", low_priority=False)

    def _loaded(self) -> set[tuple[str, int]]:
        generations = self._service.generations.all()
        return {(loaded.model, loaded.version) for loaded in generations if loaded.state != "draining"}

    def _is_live(self) -> bool:
        desired = self.agent.desired.values()
        expected = self._models or tuple(sorted(record.model for record in desired if record.live is not None))
        if not expected:
            return False
        self._service.expected = expected
        return self._service.generations.live_versions().keys() >= set(expected)

    async def _watch_nodes(self) -> None:
        nodes = await self.fleet.nodes()
        await self.fleet.check_identity(self.agent.desired.values())
        self.directory.update(nodes)
