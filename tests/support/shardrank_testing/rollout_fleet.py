"""A fleet that a test plays: nodes that announce themselves and do what is wanted, one small step at a time.

Shard nodes and serving processes are played; the registry, its records and the coordinator are the real ones.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from loader.errors import RegistryUnavailableError
from loader.registry.fleet import (
    FleetRecord,
    FleetRegistry,
    NodeRecord,
    PublishedVersion,
    VersionReport,
    VersionStats,
    WantedModel,
    epoch_of,
    rollout_key,
)
from loader.registry.registry import Registry
from loader.rollout.coordinator import Coordinator, CoordinatorConfig
from loader.rollout.guards import GuardLimits
from loader.rollout.plan import Rollout, read_rollout
from loader.rollout.requests import abort_rollout, roll_back, start_rollout

MODEL = "films"
OLD, NEW = 1, 2
TTL_S = 3.0
MAX_ROUNDS = 200
CONFIG = CoordinatorConfig(settle_s=0.5, restore_wait_s=2.0, stage_timeout_s=600.0, step_timeout_s=60.0)


class Clock:
    """A clock that a test moves. All of a test's registries, nodes and coordinators share it.

    Attributes:
        now: how much time has passed.
        ahead_s: by how much the time of day differs from it; a test that changes this steps the clock.
    """

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return self.now + self.ahead_s

    def monotonic(self) -> float:
        return self() - self.ahead_s


def canary_of(wanted: WantedModel) -> int | None:
    return wanted.canary.version if wanted.canary is not None else None


class PlayedNode:
    """One node. `react` is one round: read what is wanted, take one step towards it, announce.

    Attributes:
        held: by version, how far staging is; from 1.0 on it is ready.
        refuses: versions that it refuses, with the reason.
        stage_rounds: how many rounds staging takes.
        stuck: versions that it never lets go of.
        told, machine: what else it tells of a version, and of its machine.
    """

    def __init__(self, node_id: str, *, shard: int | None = None, num_shards: int | None = None) -> None:
        self.node_id = node_id
        self.shard = shard
        self.num_shards = num_shards
        self.process_id = 100
        self.alive = True
        self.draining = False
        self.wanted: WantedModel | None = None
        self.rollout: tuple[int, bytes] | None = None
        self.held: dict[int, float] = {}
        self.live: int | None = None
        self.canary: int | None = None
        self.leaving: set[int] = set()
        self.stuck: set[int] = set()
        self.refuses: dict[int, str] = {}
        self.stage_rounds = 2
        self.delta_sequence: dict[int, int] = {}
        self.stats: dict[int, VersionStats] = {}
        self.told: dict[int, dict[str, Any]] = {}
        self.machine: dict[str, int] = {}

    @property
    def serving(self) -> bool:
        return self.shard is None

    def kill(self) -> None:
        """It is gone, and says nothing."""
        self.alive = False

    def restart(self) -> None:
        """It is back with nothing in memory."""
        self.process_id += 1
        self.alive, self.wanted, self.rollout, self.live, self.canary = True, None, None, None, None
        self.held, self.leaving, self.stats = {}, set(), {}

    def ready(self) -> set[int]:
        return {version for version, progress in self.held.items() if progress >= 1 and version not in self.leaving}

    async def react(self, fleet: FleetRegistry) -> None:
        """One round. A registry that does not answer changes nothing."""
        if not self.alive:
            return
        try:
            await self._look(fleet)
            if self.wanted is not None:
                self._step(self.wanted)
            await fleet.announce_node(self.record(), TTL_S)
        except RegistryUnavailableError:
            return

    async def _look(self, fleet: FleetRegistry) -> None:
        if self.wanted is not None:
            await fleet.restore_wanted(self.wanted)
        self.wanted = await fleet.wanted_model(MODEL) or self.wanted
        key = rollout_key(MODEL)
        if self.rollout is not None:
            await fleet.restore_raw(key, self.rollout[1], self.rollout[0])
        entry = await fleet.registry.get(key)
        if entry is not None:
            self.rollout = (epoch_of(key, entry.value), entry.value)

    def _step(self, wanted: WantedModel) -> None:
        keep = self._keeps(wanted)
        if self.serving:
            self._point(wanted)
        self.leaving -= set(keep)
        for version in sorted(self.leaving - self.stuck):
            del self.held[version]
            self.leaving.discard(version)
        gone = {version for version in self.held if version not in keep and version not in (self.live, self.canary)}
        self.leaving |= gone
        for version in sorted(keep, key=lambda one: one != wanted.live):
            if version not in self.refuses and self.held.get(version, 0.0) < 1:
                self.held[version] = self.held.get(version, 0.0) + 1 / self.stage_rounds
                break

    def _keeps(self, wanted: WantedModel) -> tuple[int, ...]:
        return wanted.serve if self.serving else wanted.held_by(self.node_id, self.num_shards)

    def _point(self, wanted: WantedModel) -> None:
        if wanted.live in self.ready() or (wanted.live is None and not wanted.serve):
            self.live = wanted.live
        canary = canary_of(wanted)
        self.canary = canary if canary in self.ready() else None

    def _applied(self) -> dict[str, int]:
        wanted = self.wanted
        if wanted is None or (self.serving and (self.live, self.canary) != (wanted.live, canary_of(wanted))):
            return {}
        return {MODEL: wanted.epoch}

    def record(self) -> NodeRecord:
        reports = [self._report(version) for version in sorted(self.held)]
        kept = () if self.wanted is None else self._keeps(self.wanted)
        reports += [
            VersionReport(model=MODEL, version=version, state="refused", reason=reason)
            for version, reason in self.refuses.items()
            if version in kept
        ]
        return NodeRecord(
            node_id=self.node_id,
            kind="serving" if self.serving else "shard",
            process_id=self.process_id,
            address=f"unix:/{self.node_id}",
            shard_index=self.shard,
            num_shards=self.num_shards,
            draining=self.draining,
            applied=self._applied(),
            live={MODEL: self.live} if self.live is not None else {},
            versions=tuple(reports),
            **self.machine,
        )

    def _report(self, version: int) -> VersionReport:
        progress = min(self.held[version], 1.0)
        return VersionReport(
            model=MODEL,
            version=version,
            state="draining" if version in self.leaving else "ready" if progress >= 1 else "staging",
            progress=progress,
            plan_digest="" if self.serving and self.num_shards is not None else "c" * 64,
            delta_sequence=self.delta_sequence.get(version, 0),
            stats=self.stats.get(version, VersionStats()) if self.serving else None,
            **self.told.get(version, {}),
        )


class PlayedFleet:
    """Nodes, a coordinator that can be killed at any moment, and the clock that they share."""

    def __init__(self, registry: Registry, clock: Clock, config: CoordinatorConfig = CONFIG) -> None:
        self.registry = registry
        self.clock = clock
        self.config = config
        self.fleet = FleetRegistry(registry)
        self.nodes: list[PlayedNode] = []
        self.coordinator = self.new_coordinator()

    def new_coordinator(
        self, registry: Registry | None = None, owner: str = "the one", ahead_s: float = 0.0
    ) -> Coordinator:
        """Another one, whose time of day is ahead; with the same owner it believes to hold the lock as well."""
        fleet = FleetRegistry(registry or self.registry)
        monotonic = self.clock.monotonic
        return Coordinator(fleet, owner, lambda: self.clock() + ahead_s, config=self.config, monotonic=monotonic)

    async def begin(
        self,
        shards: int,
        replicas: int,
        serving: int,
        *,
        live: int | None = OLD,
        records: Iterable[PublishedVersion] | None = None,
    ) -> None:
        """Announces all nodes, with `live` (if any) held and live everywhere; publishes `records`, or versions 1-4."""
        for record in map(published, range(1, 5)) if records is None else records:
            await self.fleet.put_version(record)
        if shards:
            await self.fleet.join_fleet(FleetRecord(num_shards=shards, sharding="hash", replicate_bytes=0))
        for shard in range(shards):
            self.nodes += [
                PlayedNode(f"shard-{shard}-{one}", shard=shard, num_shards=shards) for one in range(replicas)
            ]
        self.nodes += [PlayedNode(f"serve-{one}", num_shards=shards or None) for one in range(serving)]
        if live is not None:
            for node in self.nodes:
                node.held, node.live = {live: 1.0}, live if node.serving else None
            everywhere = (live,)
            record = WantedModel(model=MODEL, epoch=1, live=live, hold=everywhere, serve=everywhere, follow=everywhere)
            await self.fleet.put_wanted(record, None)
        await self.react()
        await self.round()

    def node(self, node_id: str) -> PlayedNode:
        return next(node for node in self.nodes if node.node_id == node_id)

    def shard_nodes(self) -> list[PlayedNode]:
        return [node for node in self.nodes if not node.serving]

    def serving(self) -> list[PlayedNode]:
        return [node for node in self.nodes if node.serving]

    async def react(self, nodes: Iterable[PlayedNode] | None = None) -> None:
        for node in self.nodes if nodes is None else nodes:
            await node.react(self.fleet)

    async def start(self, version: int = NEW, **options: Any) -> Rollout:
        """Start a rollout whose bake needs no requests; `options` as of `start_rollout`."""
        options = {"guards": GuardLimits(min_requests=0), **options}
        return await start_rollout(
            self.fleet, MODEL, version, clock=self.clock, rollout_id=secrets.token_hex(16), **options
        )

    async def abort(self, reason: str = "by hand") -> Rollout:
        return await abort_rollout(self.fleet, MODEL, reason, clock=self.clock)

    async def roll_back(self) -> Rollout:
        return await roll_back(self.fleet, MODEL, clock=self.clock, rollout_id=secrets.token_hex(16))

    async def round(self, seconds: float = 0.3, times: int = 1) -> None:
        """Time passes, every node reacts, the coordinator looks."""
        for _ in range(times):
            self.clock.now += seconds
            await self.react()
            await self.coordinator.tick()
            self.check_answers()

    async def rollout(self) -> Rollout:
        on_record = await read_rollout(self.fleet, MODEL)
        assert on_record is not None
        return on_record.rollout

    async def wanted(self) -> WantedModel | None:
        return await self.fleet.wanted_model(MODEL)

    async def until(self, is_so: Callable[[Rollout, WantedModel | None], bool]) -> Rollout:
        """Rounds until the rollout, and what is wanted, are so."""
        for _ in range(MAX_ROUNDS):
            rollout = await self.rollout()
            if is_so(rollout, await self.wanted()):
                return rollout
            await self.round()
        problems = self.coordinator.problems()
        raise AssertionError(f"{MAX_ROUNDS} rounds: {rollout.state} {rollout.step} {rollout.events[-3:]} {problems}")

    async def until_ended(self) -> Rollout:
        """Rounds until the rollout has ended."""
        return await self.until(lambda rollout, _: not rollout.active)

    async def until_bake(self) -> Rollout:
        """Rounds until the bake has begun."""
        return await self.until(lambda rollout, _: rollout.bake_began_at is not None)

    async def until_step(self, step: str, *, written: bool = True) -> Rollout:
        """Rounds until the rollout is in a step, and with `written` until what it wants is written."""

        def is_so(rollout: Rollout, wanted: WantedModel | None) -> bool:
            done = wanted is not None and wanted.epoch > rollout.base_epoch
            return rollout.step == step and (done or not written)

        return await self.until(is_so)

    async def ends(self, state: str, version: int | None) -> Rollout:
        """Rounds until the rollout has ended in a state; then nothing but one version is loaded or wanted anywhere."""
        rollout = await self.until_ended()
        assert rollout.state == state, (rollout.reason, [event.text for event in rollout.events])
        await self.check_all_in(version)
        return rollout

    def check_answers(self) -> None:
        """Each version that a serving process answers with can be answered by every shard."""
        divisions = {node.num_shards for node in self.shard_nodes()}
        for process in self.serving():
            for version in {process.live, process.canary} - {None}:
                if not process.alive:
                    continue
                assert version in process.held, f"{process.node_id} answers with {version}, which it has freed"
                there = {
                    (node.num_shards, node.shard)
                    for node in self.shard_nodes()
                    # Of a shard whose nodes all died, nothing can be asked; that is not the rollout's doing.
                    if (node.alive and version in node.ready()) or not node.alive or node.process_id > 100
                }
                whole = not divisions or any(
                    there >= {(number, shard) for shard in range(number or 0)} for number in divisions
                )
                assert whole, f"{process.node_id} answers with {version}, only {there} have it"

    async def check_all_in(self, version: int | None) -> None:
        """Nothing but one version is held, answered with, or wanted anywhere."""
        versions = () if version is None else (version,)
        wanted = await self.wanted()
        assert wanted is not None
        assert (wanted.live, wanted.hold, wanted.serve) == (version, versions, versions)
        assert (wanted.canary, wanted.node_hold) == (None, {})
        assert set(wanted.follow) <= set(versions)
        for node in self.nodes:
            if node.alive:
                assert set(node.held) == set(versions), f"{node.node_id} holds {node.held}"
                assert not node.serving or node.live == version, f"{node.node_id} answers with {node.live}"


def published(
    version: int, *, delta_base: int | None = None, last_delta: int = 0, identity: str = ""
) -> PublishedVersion:
    """A published version."""
    return PublishedVersion(
        model=MODEL,
        version=version,
        identity=identity or f"{version:064x}",
        delta_base=delta_base or version,
        last_delta=last_delta,
        rows_bytes=1 << 20,
        published_at=1.0,
    )


def stats(requests: int, errors: int = 0, *, bucket: int = 20, score: float = 0.5, spread: float = 0.1) -> VersionStats:
    """Counts of answers that all took as long as a bucket, with scores of a mean and a standard deviation."""
    counts: Sequence[int] = [0] * bucket + [requests]
    return VersionStats(
        requests=requests,
        errors=errors,
        latency_counts=tuple(counts),
        score_count=100 * requests,
        score_sum=100 * requests * score,
        score_square_sum=100 * requests * (score * score + spread * spread),
    )


def rollout_record(**fields: Any) -> Rollout:
    """The record of a rollout of model `m` from version 1 to 2, at its first step unless `fields` say otherwise."""
    known = {"model": "m", "epoch": 1, "rollout_id": "a" * 32, "from_version": 1, "to_version": 2, "delta_base": 2}
    return Rollout(**{**known, "last_delta": 0, "started_at": 1.0, "step_began_at": 1.0, **fields})
