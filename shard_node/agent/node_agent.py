"""What an agent has done in a shard node: rows staged, versions followed and retired."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pydantic import Field

from loader.deltas.chain import FORMAT as DELTA_FORMAT
from loader.errors import DeltaError, RolloutError, ShardrankError, UnavailableError
from loader.progress import CancelToken, Progress, end_tasks, in_background, no_progress, throttled
from loader.registry import fleet as records
from loader.registry.fleet import FleetRegistry, NodeRecord, VersionReport, WantedModel
from loader.rollout.coverage import answering_version
from loader.snapshot.reader import Snapshot
from loader.snapshot.store import Store
from loader.snapshot.tables import Frozen
from loader.stores import open_store
from loader.stores.cache import FETCHING, StoreUrl
from shard_node.agent import delta_follower
from shard_node.agent.agent import Agent
from shard_node.buckets import Partition
from shard_node.engine.loading import prepare_load
from shard_node.engine.memory import RowMemory, total_memory_bytes
from shard_node.errors import CardError, MemoryBudgetError
from shard_node.generation import Generation
from shard_node.node import LoadedTables, ShardNode
from shard_node.planning.hotness import ObservedCounts

if TYPE_CHECKING:
    from shard_node.cuda.card_set import CardSet
    from shard_node.cuda.cupy_cards import Cards

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_ASK_CARDS_EVERY_S = 1.0
ANNOUNCED_S = 2.0
"""Until every process of a fleet knows what a node announces."""
ENOUGH_FAULTS = 2
"""Of cards, in a row: what a card does not get over, it also answers when it is asked again."""
PlanOf = Callable[[Snapshot], tuple[Partition, str]]
"""The buckets of a model that a shard holds, and the digest of the plan that says so."""


def stage_tables(
    folder: Path,
    published: records.PublishedVersion,
    plan_of: PlanOf,
    *,
    memory: RowMemory,
    memory_budget_bytes: int | None = None,
    card_set: CardSet | None = None,
    observed: ObservedCounts | None = None,
    verify: bool = True,
    progress: Progress = no_progress,
) -> LoadedTables:
    """Load what a shard holds of a version. Blocks for long; allocates only what `memory` and the cards grant.

    Nothing is taken on trust. Checked are: that it is the version that was `published`; sizes, headers, shapes and
    SHA-256 (unless `verify` is False, for a local store that is trusted) of its row files; that it has every table of
    its spec; that each row here decodes to finite values. `progress` is given bytes; the rest is as of `prepare_load`.

    Raises MemoryBudgetError, with the numbers; SnapshotError as `Snapshot.open`, and for a version of another identity,
    or with a row that is not finite; PlanError as `plan_of`.
    """
    snapshot = Snapshot.open(folder, published.identity, verify=False, files="rows")
    partition, plan_digest = plan_of(snapshot)
    load = prepare_load(
        snapshot, partition, plan_digest, memory_budget_bytes=memory_budget_bytes, card_set=card_set, observed=observed
    )
    # One thread: it is background work, and shares a budget.
    check = partial(snapshot.check_content, "rows", threads=1, progress=progress) if verify else lambda: None
    return load.run(load.take(memory), progress, check)


def share_of(tell: Callable[[float], None]) -> Progress:
    """Make the progress of `stage_tables` one number, 0 to 1: half of it is fetching or checking, half is loading."""
    begins = {FETCHING: 0.0, "checking SHA-256": 0.0, "load": 0.5}

    def report(what: str, done: int, total: int) -> None:
        if what in begins:
            tell(begins[what] + (done / total if total else 1.0) / 2)

    return report


class NodeConfig(Frozen):
    """What a shard node is told of itself: its id, stable over restarts, where routers reach it, and limits.

    The rows of all versions together may take `memory_cap_bytes` of RAM, None for what is available; those of one
    version `memory_budget_bytes`, rows beyond that stay on disk. Staging takes `stage_cpu_share`
    of one core. `verify` compares SHA-256 of row files; tables of up to `replicate_bytes` are on every shard.
    """

    node_id: records.NodeId
    address: str
    store: Path | StoreUrl
    replicate_bytes: int = Field(ge=0)
    verify: bool = True
    memory_cap_bytes: int | None = Field(default=None, ge=0)
    memory_budget_bytes: int | None = Field(default=None, ge=0)
    stage_cpu_share: float = Field(default=0.5, gt=0, le=1)


async def join_fleet(fleet: FleetRegistry, record: records.FleetRecord) -> None:
    """Make sure that a node divides rows as its fleet does, or did for a version that is still wanted.

    Raises RolloutError, RegistryUnavailableError.
    """
    there = await fleet.join_fleet(record)
    if there == record:
        return
    desired = (await fleet.wanted()).values()
    earlier = there.model_copy(update={"num_shards": record.num_shards})
    if earlier != record or not any(record.num_shards in model.num_shards.values() for model in desired):
        raise RolloutError(
            f"this node has num_shards {record.num_shards}, sharding {record.sharding!r}, replicate_bytes "
            f"{record.replicate_bytes}; its fleet in {fleet.name} has {there.num_shards}, {there.sharding!r}, "
            f"{there.replicate_bytes}"
        )


class NodeActions:
    """What an agent has done in a shard node. Implements `Actions`; belongs to one event loop."""

    def __init__(
        self,
        node: ShardNode,
        fleet: FleetRegistry,
        plan_of: PlanOf,
        config: NodeConfig,
        card_set: CardSet | None = None,
        store: Store | None = None,
        following: delta_follower.FollowerConfig = delta_follower.DEFAULT_CONFIG,
        memory: RowMemory | None = None,
    ) -> None:
        self._node = node
        self._fleet = fleet
        self._plan_of = plan_of
        self._config = config
        self._memory = memory or RowMemory(config.memory_cap_bytes)
        self._card_set = card_set
        self._store = store or open_store(config.store)
        self._followers = delta_follower.Followers(fleet, node.wall_clock, following)
        node.forks = self._followers.forks
        self._live: dict[str, int | None] = {}
        self._changing = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._mending: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._going: set[tuple[str, int]] = set()
        self._desired: dict[str, WantedModel] = {}
        self._crowded: set[str] = set()  # models of which there is no memory for two versions

    def desired_versions(self, desired: WantedModel) -> Sequence[int]:
        """As `Actions.desired_versions`. The live one is first: without it this node answers nobody."""
        versions = {*desired.held_by(self._config.node_id, self._node.identity.num_shards), *self._kept(desired)}
        return sorted(versions, key=lambda version: (version != desired.live, version))

    def _kept(self, desired: WantedModel) -> list[int]:
        """Return what stays here beside what this node is rolled to, for the case that another replica is lost."""
        if self._config.node_id not in desired.node_hold or desired.model in self._crowded:
            return []
        return [version for version in desired.hold if (desired.model, version) in self.loaded()]

    def loaded(self) -> Collection[tuple[str, int]]:
        """As `Actions.loaded`: what the node pools from, and what is freed to be staged anew."""
        return set(self._generations()) | self._going

    async def stage(self, model: str, version: int, desired: WantedModel, tell: Callable[[float], None]) -> None:
        """Load this shard's rows in a thread; one that is followed catches up. Raises as `stage_tables`."""
        limit_s = delta_follower.CATCH_UP_LIMIT_S if version in desired.follow else 0
        try:
            async with self._loaded(model, version, limit_s, tell) as tables:
                self._node.generations.stage(model, version, tables)
        except MemoryBudgetError as error:
            # Of any model: what only stays for the case of a loss gives way to what is wanted.
            kept = {name: spare for name, other in self._desired.items() if (spare := self._kept(other))}
            if not kept:
                raise
            self._crowded |= kept.keys()
            first = ", ".join(f"version {spare[0]} of {name}" for name, spare in sorted(kept.items()))
            raise UnavailableError(f"{first} is retired first: {error}", kind=error.kind) from error

    @asynccontextmanager
    async def _loaded(
        self, model: str, version: int, limit_s: float | None, tell: Callable[[float], None] = lambda share: None
    ) -> AsyncIterator[LoadedTables]:
        """Yield tables that may catch up for `limit_s`; they are closed if the block fails."""
        published = await self._fleet.version(model, version)
        await self._fleet.check_identity()
        if published is None:
            problem = f"version {version} of {model!r} is not published in {self._fleet.name}"
            raise UnavailableError(problem, kind="not_ready")
        config = self._config

        def work(wish: CancelToken) -> LoadedTables:
            progress = throttled(wish.over(share_of(tell)), config.stage_cpu_share, wish.rest)
            with ExitStack() as stack:
                files = stack.enter_context(
                    self._store.hold(
                        model, version, identity=published.identity, verify=config.verify, progress=progress
                    )
                )
                tables = stage_tables(
                    files.path,
                    published,
                    self._plan_of,
                    memory=self._memory,
                    memory_budget_bytes=config.memory_budget_bytes,
                    card_set=self._card_set,
                    observed=self._observed(model),
                    verify=config.verify and not files.is_checked,
                    progress=progress,
                )
                if any(use.tier == "disk" for use in tables.engine.memory()):
                    stack.pop_all()
                    return replace(tables, files=files)
            return tables

        tables = await in_background(work, f"stage-{model}-{version}", LoadedTables.close, self._node.begin_thread)
        try:
            if limit_s != 0:
                await delta_follower.catch_up(self._fleet, model, version, tables, limit_s, self._node.wall_clock)
                self._followers.forks[model, version] += tables.deltas.now.forked
            yield tables
        except BaseException:
            tables.close()
            raise

    async def reconcile(self, desired: WantedModel) -> bool:
        """As `Actions.reconcile`: starts and stops followers, has forked rows mended, and marks the live version."""
        model = desired.model
        self._live[model], self._desired[model] = desired.live, desired
        if self._config.node_id not in desired.node_hold:
            self._crowded.discard(model)
        # What follows must not be freed meanwhile.
        async with self._changing[model]:
            loaded = {version: each for (name, version), each in self._generations().items() if name == model}
            if desired.live in loaded and loaded[desired.live].state != "live":
                self._node.generations.flip(model, desired.live)
            follow = {version: loaded[version].payload for version in desired.follow if version in loaded}
            await self._followers.reconcile(model, follow)
        for version, tables in follow.items():
            before = self._mending.get((model, version))
            if tables.deltas.now.forked and (before is None or before.done()):
                mending = asyncio.create_task(self._mend(model, version), name=f"mend {model} {version}")
                self._mending[model, version] = mending
        return set(self.desired_versions(desired)) == set(loaded)

    async def retire(self, model: str, version: int) -> None:
        """As `Actions.retire`: stops following, and waits until the last lease has ended and the rows are freed."""
        if (mending := self._mending.pop((model, version), None)) is not None:
            await end_tasks([mending])
        await self._withdraw(model, version)

    async def _withdraw(self, model: str, version: int) -> None:
        async with self._changing[model]:
            await self._followers.stop(model, version)
            generations = {(each.model, each.version): each for each in self._node.generations.all()}
            # It drains already if it was to be staged anew.
            generation = generations.get((model, version))
            if generation is not None and generation.state != "draining":
                self._node.generations.retire(model, version)
        while generation is not None and not generation.retired.is_set():  # noqa: ASYNC110  # set by threads
            await asyncio.sleep(_POLL_S)

    async def _mend(self, model: str, version: int) -> None:
        """Replace rows of which the stream has forked by the snapshot's, with the deltas that the stream has now."""
        try:
            try:
                await self._load_and_replace(model, version)
            except MemoryBudgetError as error:
                logger.warning("version %d of %s is to be staged anew, not mended beside: %s", version, model, error)
                await self._stage_anew(model, version)
        except Exception as error:
            unforeseen = None if isinstance(error, ShardrankError) else error
            logger.error("version %d of %s is not mended yet: %s", version, model, error, exc_info=unforeseen)
            await asyncio.sleep(delta_follower.RETRY_S)

    async def _load_and_replace(self, model: str, version: int) -> None:
        async with self._loaded(model, version, limit_s=None) as tables:
            progress = tables.deltas.now
            if progress.forked or not (progress.has_caught_up or progress.reason):
                raise DeltaError(progress.reason or "its deltas can't be read", kind="delta_fork")
            await self._check_stream(model, version)
            async with self._changing[model]:
                await self._followers.stop(model, version)
                self._node.generations.replace(model, version, tables)
        logger.warning("version %d of %s is mended: its rows have delta %d", version, model, progress.sequence)

    async def _check_stream(self, model: str, version: int) -> None:
        """Raise DeltaError if the registry was emptied since: rows stay then, as what is lost is not known."""
        stream = records.delta_stream(model, self._node.generations.payload(model, version).deltas.now.delta_base)
        if not (await self._fleet.registry.bounds(stream)).last:
            raise DeltaError(f"the registry has no {stream} any more", kind="delta_lost")

    async def _stage_anew(self, model: str, version: int) -> None:
        """Withdraw a version, and so have it staged anew, once other replicas allow it."""
        before = ""
        await asyncio.sleep(ANNOUNCED_S)
        while obstacle := await self._obstacle(model, version):
            if obstacle != before:
                logger.warning("version %d of %s is not staged anew yet: %s", version, model, obstacle)
            before = obstacle
            await asyncio.sleep(ANNOUNCED_S)
        await self._check_stream(model, version)
        self._going.add((model, version))
        try:
            await asyncio.sleep(ANNOUNCED_S)
            await self._withdraw(model, version)
        finally:
            self._going.discard((model, version))

    async def _obstacle(self, model: str, version: int) -> str:
        """Return why forked rows may not go before others come: replica by replica, while another one answers."""
        nodes = {node.node_id: node for node in await self._fleet.nodes()}
        if (this := nodes.pop(self._config.node_id, None)) is None:
            return "the registry does not have this node"
        shard = attrgetter("kind", "num_shards", "shard_index")
        replicas = [node for node in nodes.values() if shard(node) == shard(this)]
        reports = {node.node_id: report for node in replicas if (report := node.report(model, version)) is not None}
        desired = await self._fleet.wanted_model(model) or self._desired[model]
        # What a replica has freed and will stage again is in none of its reports.
        missing = [
            node.node_id
            for node in replicas
            if node.is_for(model)
            and not (node.draining or node.node_id in reports)
            and version in desired.held_by(node.node_id, node.num_shards)
        ]
        waited_for = missing + [
            node_id
            for node_id, report in sorted(reports.items())
            if report.state in ("waiting", "staging", "draining")
            or (report.state == "ready" and report.forked and node_id < this.node_id)
        ]
        if not waited_for and not any(report.state == "ready" for report in reports.values()):
            logger.error("version %d of %s has forked, and no other replica answers until it is staged", version, model)
        return f"it comes after {', '.join(waited_for)}" if waited_for else ""

    def reports(self) -> Sequence[VersionReport]:
        """As `Actions.reports`. A version that can't take up its deltas is refused, unless it is live."""
        return [self._report(*key, generation) for key, generation in self._generations().items()]

    def record(self, reports: Sequence[VersionReport], applied: Mapping[str, int]) -> NodeRecord:
        """As `Actions.record`."""
        return NodeRecord(
            node_id=self._config.node_id,
            kind="shard",
            process_id=os.getpid(),
            address=self._config.address,
            replicate_bytes=self._config.replicate_bytes,
            memory_total_bytes=total_memory_bytes(),
            memory_available_bytes=self._memory.available_bytes(),
            applied=dict(applied),
            delta_format=DELTA_FORMAT,
            versions=tuple(reports),
            **dict(self._node.identity),
        )

    def problems(self, agent: Agent) -> dict[str, str]:
        """Return why the node is not ready, by model ("" for the node itself); empty if it is. Thread-safe.

        A node is ready once its fleet knows that it has what answers, and the deltas published before it first looked.
        """
        if (announced := agent.announced) is None:
            return {"": "it has not joined its fleet yet"}
        if announced.draining:
            return {"": "it is leaving its fleet"}
        if self._fleet.foreign:
            return {"": self._fleet.foreign}
        reasons = {desired.model: self._problem(announced, desired) for desired in list(agent.desired.values())}
        return {model: reason for model, reason in reasons.items() if reason}

    def _problem(self, announced: NodeRecord, desired: WantedModel) -> str:
        version = answering_version(desired, announced.node_id, announced.num_shards)
        report = announced.report(desired.model, version)
        generation = self._generations().get((desired.model, version or 0))
        if version is None:
            return ""
        if report is None or report.state != "ready" or generation is None:
            state = "not loaded yet" if report is None else f"{report.state} {report.reason}".rstrip()
            return f"version {version} is {state}"
        deltas = generation.payload.deltas.now
        if deltas.forked:
            return f"row updates of version {version} have forked: {deltas.reason}"
        if version not in desired.follow or deltas.has_caught_up:
            return ""
        until = "what its stream has" if deltas.catch_up_to is None else deltas.catch_up_to
        reason = deltas.reason and f": {deltas.reason}"
        return f"version {version} has applied delta {deltas.sequence}, not yet {until}{reason}"

    async def close(self) -> None:
        """Stop all followers, and call off what is being mended. Idempotent."""
        await end_tasks(list(self._mending.values()))
        await self._followers.close()

    def _observed(self, model: str) -> ObservedCounts | None:
        if self._card_set is None and self._config.memory_budget_bytes is None:
            return None
        for generation in self._node.generations.all():
            if (generation.model, generation.state) == (model, "live"):
                return generation.payload.engine.access.counts() or None
        return None

    def _generations(self) -> dict[tuple[str, int], Generation[LoadedTables]]:
        loaded = (generation for generation in self._node.generations.all() if generation.state != "draining")
        return {(generation.model, generation.version): generation for generation in loaded}

    def _report(self, model: str, version: int, generation: Generation[LoadedTables]) -> VersionReport:
        tables = generation.payload
        deltas = tables.deltas.now
        gap = self._followers.gaps.get((model, version), "")
        tiers = Counter[str]()
        for use in tables.engine.memory():
            tiers[use.tier] += use.size_bytes
        is_refused = gap and not deltas.forked and self._live.get(model) != version
        return VersionReport(
            model=model,
            version=version,
            state="refused" if is_refused else "draining" if (model, version) in self._going else "ready",
            progress=1.0,
            reason=records.cut_reason(gap or deltas.reason),
            identity=tables.manifest_identity,
            plan_digest=tables.plan_digest,
            memory_bytes=tiers.total() - tiers["disk"],
            memory_tiers=dict(tiers),
            leases=generation.leases,
            delta_sequence=deltas.sequence,
            delta_published_at=deltas.published_at,
            forked=deltas.forked,
            delta_refusal=deltas.refusal,
        )


async def watch_cards(
    node: ShardNode, cards: Cards | None = None, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> NoReturn:
    """Ask the cards of all versions, and `cards`, time and again, until cancelled. On the CPU there is nothing to ask.

    A node whose cards have failed has to end: until then CUDA answers everything with the first error. Raises CardError
    if they failed, and go on failing.
    """

    def ask() -> None:
        for card in cards.cards if cards is not None else ():
            card.free_bytes()
        for generation in node.generations.all():
            generation.payload.engine.cards()

    faults = 0
    while True:
        try:
            await asyncio.to_thread(ask)
        except CardError as error:
            faults += 1
            logger.critical("the cards fail: %s", error)
            if faults >= ENOUGH_FAULTS:
                raise
        else:
            if faults:
                logger.info("the cards work again")
            faults = 0
        await sleep(_ASK_CARDS_EVERY_S)
