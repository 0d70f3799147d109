"""Start a rollout, abort it, roll back, and read how far it is, and what a registry says of the fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from loader.errors import RegistryConflictError, RolloutError
from loader.registry import fleet as records
from loader.registry.fleet import FleetRegistry, NodeRecord, WantedModel
from loader.rollout import plan
from loader.rollout.coverage import BakeTally, FleetView, cannot_roll, step_blockers
from loader.rollout.guards import GuardLimits, GuardReport, compare
from loader.snapshot.tables import Frozen

MAX_ATTEMPTS = 16


async def start_rollout(
    fleet: FleetRegistry,
    model: str,
    version: int,
    *,
    canary_share: float | None = None,
    bake_s: float = 0.0,
    bake_timeout_s: float | None = None,
    strategy: plan.Strategy = "beside",
    guards: GuardLimits | None = None,
    clock: Callable[[], float] = time.time,
    rollout_id: str,
    after: plan.OnRecord | None = None,
    warn: Callable[[str], object] = lambda warning: None,
) -> plan.Rollout:
    """Put a rollout on record; a coordinator carries it out.

    `canary_share` of the requests, in (0, 1), go to it first; None: no canary. For `bake_s` seconds it is compared with
    the live version, if any; after `bake_timeout_s` (None: 10 bakes) a bake short of `guards.min_requests` is undone.
    `strategy` is `beside`, or `by-replica` where no shard node can hold two versions. `clock` is seconds since the
    epoch, `rollout_id` 32 random hexadecimal digits; `after` the model's last rollout as the caller decided on it, None
    to read it. `warn` is called before it begins.

    Raises RolloutError if one is running, or this one can't be carried out; the message says why.
    """
    # First the rollout, then what is wanted: while the first is not running nobody changes the second.
    last = after or await plan.read_rollout(fleet, model)
    if last is not None and last.rollout.active:
        raise RolloutError(
            f"{model}: the rollout of version {last.rollout.to_version} is {last.rollout.state}, in {last.rollout.step}"
        )
    if (published := await fleet.version(model, version)) is None:
        versions = [record.version for record in await fleet.versions(model)]
        raise RolloutError(f"{model}: version {version} is not published; published are {versions}")
    wanted = await fleet.wanted_model(model)
    everyone = FleetView.of(await fleet.nodes(), await fleet.fleet())
    # Without shard nodes that only hold versions of an earlier number of shards.
    everyone = everyone.divided(everyone.num_shards)
    view = everyone.for_model(model)
    _check_nodes(everyone, view, model, wanted)
    live = None if wanted is None else wanted.live
    if live == version:
        raise RolloutError(f"{model}: version {version} is live already")
    if live is None and canary_share is not None:
        raise RolloutError(f"{model}: no version is live that a canary could be compared with; leave out the canary")
    groups, early, warnings = _replica_groups(view, model, wanted) if strategy == "by-replica" else ((), 0, ())
    list(map(warn, warnings))
    trials = {"canary": canary_share is not None, "bake": bake_s > 0 and live is not None}
    steps = plan.plan_steps(strategy, **trials, early_groups=early, groups=len(groups))
    rollout = plan.new_rollout(
        *(published, wanted, None if last is None else last.rollout, clock()),
        rollout_id=rollout_id,
        canary_share=canary_share,
        bake_s=bake_s,
        bake_timeout_s=bake_timeout_s,
        guards=guards or GuardLimits(),
        strategy=strategy,
        to_shards=view.num_shards if view.needs_shards() else None,
        groups=groups,
        early_groups=early,
        steps=steps,
        warnings=warnings,
    )
    try:
        await fleet.registry.put(records.rollout_key(model), rollout.encode(), 0 if last is None else last.revision)
    except RegistryConflictError as error:
        raise RolloutError(f"{model}: another rollout was started at the same time") from error
    return rollout


class SeenRollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model's last rollout and live version, as a page showed them to its user."""

    rollout_id: str
    is_active: bool
    live: int | None


async def _read_seen(fleet: FleetRegistry, model: str, seen: SeenRollout | None) -> plan.OnRecord | None:
    last, live = await plan.read_rollout(fleet, model), await fleet.live_version(model)
    shown = seen and (seen.rollout_id, seen.is_active, seen.live)
    if shown and last is not None and shown != (last.rollout.rollout_id, last.rollout.active, live):
        raise RolloutError(
            f"{model}: its rollout has changed since the page showed it, with version {shown[2]} live (now {live}): "
            "look again"
        )
    return last


async def abort_rollout(
    fleet: FleetRegistry,
    model: str,
    reason: str,
    *,
    clock: Callable[[], float] = time.time,
    seen: SeenRollout | None = None,
) -> plan.Rollout:
    """Undo a running rollout.

    Raises RolloutError if none is running, its old version is being retired, or it is not as it was `seen`.
    """
    for _ in range(MAX_ATTEMPTS):
        if (last := await _read_seen(fleet, model, seen)) is None:
            raise RolloutError(f"{model}: no rollout is running")
        aborted = plan.undone(last.rollout, clock(), "aborted", reason or "no reason given")
        with suppress(RegistryConflictError):
            await fleet.registry.put(records.rollout_key(model), aborted.encode(), last.revision)
            return aborted
    raise RolloutError(f"{model}: its rollout changed {MAX_ATTEMPTS} times while it was to be aborted: try again")


async def roll_back(
    fleet: FleetRegistry,
    model: str,
    *,
    clock: Callable[[], float] = time.time,
    rollout_id: str,
    seen: SeenRollout | None = None,
    warn: Callable[[str], object] = lambda warning: None,
) -> plan.Rollout:
    """Return to the version before the live one, by a rollout of it; while one is running, abort that instead.

    It has the strategy of the last one. Raises RolloutError if there is no such version, a running rollout can no
    longer be aborted, or what was `seen` has changed.
    """
    last = await _read_seen(fleet, model, seen)
    if last is None or ((target := last.rollout.rollback_target) is None and not last.rollout.active):
        raise RolloutError(f"{model}: there is no earlier version to go back to")
    if last.rollout.active or target is None:
        return await abort_rollout(fleet, model, "rolled back by hand", clock=clock, seen=seen)
    strategy = last.rollout.strategy
    begin: dict[str, Any] = {"clock": clock, "rollout_id": rollout_id, "after": last, "warn": warn}
    return await start_rollout(fleet, model, target, strategy=strategy, **begin)


async def reshard(fleet: FleetRegistry, num_shards: int) -> None:
    """Divide versions that are rolled out from now on over another number of shards.

    What is wanted now stays where it is. Nodes of both numbers may join: each holds the versions of its number. Raises
    RolloutError if no shard node has ever joined, or a rollout is running.
    """
    entry, record = await fleet.registry.get(records.FLEET), await fleet.fleet()
    if entry is None or record is None:
        raise RolloutError(f"registry {fleet.name}: no shard node has joined, so there is nothing to divide anew")
    before = record.num_shards
    if before == num_shards:
        return
    for model in await fleet.wanted():
        last = await plan.read_rollout(fleet, model)
        if last is not None and last.rollout.active:
            raise RolloutError(
                f"{model}: the rollout of version {last.rollout.to_version} is {last.rollout.state}: the number of "
                f"shards is {before} until it has ended"
            )
        # Before the new number is on record: its nodes would hold what nobody says is another one's.
        await fleet.update_wanted(
            model,
            lambda now: now and now.model_copy(update={"num_shards": now.divided(before).num_shards | now.num_shards}),
        )
    await fleet.registry.put(
        records.FLEET, record.model_copy(update={"num_shards": num_shards}).encode(), entry.revision
    )


def _check_nodes(everyone: FleetView, view: FleetView, model: str, wanted: WantedModel | None) -> None:
    others = [node.node_id for node in (*everyone.serving(), *everyone.shard_nodes()) if not node.is_for(model)]
    restart = f"; started for other models are {', '.join(others)}: restart them with --model {model} too, or with none"
    hint = restart if others else ""
    if not view.serving():
        raise RolloutError(f"{model}: no serving process is announced{hint}")
    if view.needs_shards():
        announced = {node.shard_index for node in view.shard_nodes()}
        if bare := [shard for shard in range(view.num_shards or 0) if shard not in announced]:
            raise RolloutError(f"{model}: no node is announced of shards {bare}{hint}")
        if not announced:
            raise RolloutError(f"{model}: no shard node{hint}")
    epoch = 0 if wanted is None else wanted.epoch
    if ahead := [node.node_id for node in view.nodes if node.applied.get(model, 0) > epoch]:
        raise RolloutError(
            f"{model}: the registry has lost its last changes: {', '.join(ahead[:5])} knows of later ones than epoch "
            f"{epoch} and gives them back; try again in a moment"
        )


def _replica_groups(
    view: FleetView, model: str, wanted: WantedModel | None
) -> tuple[tuple[tuple[str, ...], ...], int, tuple[str, ...]]:
    """Return as `replica_groups`, and what may fail. Raises RolloutError where nodes can't be rolled one by one."""
    if wanted is None or (live := wanted.live) is None:
        raise RolloutError(f"{model}: no version is live that could be rolled by replica: use strategy 'beside'")
    if (shards := wanted.num_shards.get(live, view.num_shards)) != view.num_shards:
        raise RolloutError(
            f"{model}: version {live} is divided over {shards} shards, the next one is to be over {view.num_shards}: "
            "by-replica keeps their number; use strategy 'beside'"
        )
    # Bytes that each node lacks to hold a second version like the live one.
    by_shard: dict[int, dict[str, int]] = {shard: {} for shard in range(view.num_shards or 0)}
    for node in view.shard_nodes():
        report = node.report(model, live)
        if node.shard_index in by_shard and report is not None and report.state == "ready":
            # What cards have left is not announced.
            has_cards = any(tier in ("card", "hot") for tier in report.memory_tiers)
            lacking = report.memory_bytes - node.memory_available_bytes
            by_shard[node.shard_index][node.node_id] = 0 if has_cards else lacking
    few = [f"shard {shard}: {len(nodes)}" for shard, nodes in by_shard.items() if len(nodes) < 2]
    if few or not by_shard:
        counts = ", ".join(few) or "no shard nodes"
        raise RolloutError(f"{model}: by-replica needs two nodes of each shard with version {live} ready; {counts}")
    # While one of two nodes loads, nobody can take the other one's place; of three, one has either version.
    lacking = max((max(nodes.values()) for nodes in by_shard.values() if len(nodes) == 2), default=0)
    warning = (
        "there are two replicas, and memory for one version: if a node is lost while the other one of its shard loads, "
        "requests fail until it is back; three replicas of each shard, or about "
        f"{lacking / 1e9:.3g} GB more memory for each node, avoid it"
    )
    return *plan.replica_groups(by_shard), (warning,) if lacking > 0 else ()


class StepStatus(Frozen):
    """One step of a rollout."""

    name: str
    state: Literal["done", "running", "pending"]


class NodeStatus(records.Record):
    """A node's report of a model; see `NodeRecord`. `applied_epoch` is 0 for none."""

    node_id: str
    kind: records.NodeKind
    address: str
    shard_index: int | None
    draining: bool
    live: int | None
    applied_epoch: int
    versions: tuple[records.VersionStatus, ...]

    @classmethod
    def from_record(cls, model: str, node: NodeRecord) -> NodeStatus:
        """Return what a node announces, of one model."""
        reports = sorted((item for item in node.versions if item.model == model), key=lambda item: item.version)
        of_model = {"live": node.live.get(model), "applied_epoch": node.applied.get(model, 0)}
        return cls.model_validate({**dict(node), **of_model, "versions": list(map(dict, reports))})


class RolloutStatus(Frozen):
    """The state of one model's rollout; see `Rollout`. Its fields are None or empty if there was never one.

    Attributes:
        live: the version that is wanted to answer; None before the first rollout, as is `wanted`.
        step: the step it is in, or ended in.
        written: what the step wants is written; else it is on record and about to be.
        waiting_for: who lags behind the step, or how many requests a bake is short of.
        guards: the comparison since the bake began; None if there is none.
    """

    model: str
    live: int | None
    wanted: WantedModel | None
    state: plan.RolloutState | None = None
    outcome: plan.Outcome | None = None
    reason: str = ""
    rollout_id: str | None = None
    strategy: plan.Strategy | None = None
    from_version: int | None = None
    to_version: int | None = None
    canary_share: float | None = None
    bake_s: float = 0.0
    baked_s: float = 0.0
    started_at: float | None = None
    step_began_at: float | None = None
    bake_began_at: float | None = None
    warnings: tuple[str, ...] = ()
    step: str = ""
    steps: tuple[StepStatus, ...] = ()
    written: bool = False
    waiting_for: tuple[str, ...] = ()
    guards: GuardReport | None = None
    nodes: tuple[NodeStatus, ...]
    events: tuple[plan.Event, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetState:
    """What is wanted of a fleet, and what it is.

    Attributes:
        division: how the fleet divides rows; None before its first shard node.
        rollouts: by model, as is `wanted`; of a rollout that has ended, the last one.
        published: by model and version.
        stream_ends: the last delta by model and by the version that its stream began with, of versions in use.
        coordinator: who carries rollouts; None if nobody does.
        qualities: by model, where somebody measures it.
    """

    nodes: tuple[NodeRecord, ...] = ()
    division: records.FleetRecord | None = None
    wanted: Mapping[str, WantedModel] = field(default_factory=dict)
    rollouts: Mapping[str, plan.Rollout] = field(default_factory=dict)
    published: Mapping[tuple[str, int], records.PublishedVersion] = field(default_factory=dict)
    stream_ends: Mapping[tuple[str, int], int] = field(default_factory=dict)
    coordinator: str | None = None
    qualities: Mapping[str, records.Quality] = field(default_factory=dict)

    def models(self) -> list[str]:
        """List the models that anything is known of."""
        reported = {report.model for node in self.nodes for report in node.versions}
        return sorted({*self.wanted, *self.rollouts, *reported, *(model for model, _ in self.published)})

    def view(self, model: str) -> FleetView:
        """Return the nodes that are for a model."""
        return FleetView.of(self.nodes, self.division).for_model(model)

    def status(self, model: str) -> RolloutStatus:
        """Return the status of a model's rollout that follows from what was read."""
        rollout, wanted, view = self.rollouts.get(model), self.wanted.get(model), self.view(model)
        live = None if wanted is None else wanted.live
        nodes = tuple(NodeStatus.from_record(model, node) for node in view.nodes)
        if rollout is None:
            return RolloutStatus(model=model, live=live, wanted=wanted, nodes=nodes)
        written = wanted is not None and wanted.epoch > rollout.base_epoch
        if wanted is not None and written and wanted.wants_same(plan.wanted_in_step(rollout, wanted.epoch)):
            lagging = step_blockers(rollout, view, wanted.epoch)
        else:
            written, lagging = False, cannot_roll(rollout, view)
        waiting_for = [lag.text for lag in lagging]
        guards = None
        if rollout.bake_began_at is not None:
            totals, live_answers = BakeTally().totals(rollout, view.nodes), rollout.step == plan.Step.CANARY
            guards = compare(*totals, rollout.guards, live_answers=live_answers)
            if guards.missing:
                each = "each version" if live_answers else f"version {rollout.to_version}"
                missing = f"{guards.missing} of {rollout.guards.min_requests} requests to {each}"
                waiting_for.append(f"{missing}, until the bake has lasted {rollout.longest_bake_s:g} s")
        states = ["done" if index <= rollout.step_index else "pending" for index in range(len(rollout.steps))]
        if rollout.active:
            states[rollout.step_index] = "running"
        same = RolloutStatus.model_fields.keys() & plan.Rollout.model_fields.keys() - {"steps", "guards"}
        return RolloutStatus(
            **{name: getattr(rollout, name) for name in same},
            live=live,
            wanted=wanted,
            step=rollout.step,
            steps=tuple(StepStatus(name=name, state=state) for name, state in zip(rollout.steps, states, strict=True)),
            written=written,
            waiting_for=tuple(waiting_for) if rollout.active else (),
            guards=guards,
            nodes=nodes,
        )

    def last_delta(self, model: str, version: int) -> int | None:
        """Return the last delta of a version's stream; None if it is not published, or nothing is known of it."""
        published = self.published.get((model, version))
        return None if published is None else self.stream_ends.get((model, published.delta_base))


async def read_fleet(fleet: FleetRegistry) -> FleetState:
    """Read it; not as of one moment, since a registry has none. Raises RegistryError."""
    # Nodes first: what they say of a version that was just wanted or published is never newer than these are.
    nodes = await fleet.nodes()
    division, wanted, published, entries, coordinator, qualities = await asyncio.gather(
        fleet.fleet(),
        fleet.wanted(),
        fleet.versions(),
        fleet.registry.entries(records.ROLLOUTS),
        fleet.registry.holder(records.COORDINATOR_LOCK),
        fleet.qualities(),
    )
    versions = {(record.model, record.version): record for record in published}
    used = {(model, version) for model, record in wanted.items() for version in record.named()}
    bases = sorted({(model, versions[model, version].delta_base) for model, version in used & versions.keys()})
    ends = await asyncio.gather(*(fleet.registry.bounds(records.delta_stream(*base)) for base in bases))
    models = {key: key.removeprefix(records.ROLLOUTS) for key in entries}
    return FleetState(
        nodes=tuple(nodes),
        division=division,
        wanted=wanted,
        rollouts={model: plan.decode_rollout(model, entries[key].value) for key, model in models.items()},
        published=versions,
        stream_ends={base: end.last for base, end in zip(bases, ends, strict=True)},
        coordinator=coordinator,
        qualities=qualities,
    )
