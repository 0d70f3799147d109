"""Compare what nodes announce with what a rollout wants: who lags, who refuses, and what a bake answered. Pure.

A node that is not announced does not block, but each shard needs a node. A process that has just started and does not
answer for the model yet holds up no flip: it stages what is live first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import starmap, zip_longest
from operator import sub

from loader.registry.fleet import FleetRecord, NodeRecord, VersionStats, WantedModel
from loader.rollout.plan import NodeBaseline, Rollout, Step, group_of

NOTHING = VersionStats()
_SUMMED = [name for name in VersionStats.model_fields if name != "latency_counts"]


def answering_version(wanted: WantedModel, node_id: str, num_shards: int | None) -> int | None:
    """Return the version that a shard node answers with: the live one, or in a rollout by replica its replacement.

    None where nothing is live, or what is live is divided over another number of shards.
    """
    versions = wanted.held_by(node_id, num_shards)
    if wanted.live is None or wanted.live in versions:
        return wanted.live
    return next(iter(versions), None) if node_id in wanted.node_hold else None


@dataclass(frozen=True, slots=True)
class FleetView:
    """What is known of a fleet's nodes at one moment.

    Attributes:
        num_shards: how the fleet divides rows; None if no shard node was ever there.
        missing: announced a moment ago, not now, and not draining.
        settled: nodes were listened to for longer than their heartbeat interval.
    """

    num_shards: int | None
    nodes: tuple[NodeRecord, ...]
    missing: tuple[NodeRecord, ...] = ()
    settled: bool = True

    @classmethod
    def of(cls, nodes: Sequence[NodeRecord], fleet: FleetRecord | None) -> FleetView:
        """Return what is announced now. A fleet whose record is lost is divided as its shard nodes say."""
        announced = [node.num_shards for node in nodes if node.kind == "shard" and node.num_shards is not None]
        return cls(max(announced, default=None) if fleet is None else fleet.num_shards, tuple(nodes))

    def for_model(self, model: str) -> FleetView:
        """Return the view without the nodes that are for other models."""
        nodes = tuple(node for node in self.nodes if node.is_for(model))
        return replace(self, nodes=nodes, missing=tuple(node for node in self.missing if node.is_for(model)))

    def divided(self, num_shards: int | None) -> FleetView:
        """Return the view without shard nodes of other numbers of shards; None: nobody said."""
        if num_shards is None:
            return self
        nodes = tuple(node for node in self.nodes if node.kind != "shard" or node.num_shards in (None, num_shards))
        return replace(self, num_shards=num_shards, nodes=nodes)

    def shard_nodes(self) -> tuple[NodeRecord, ...]:
        """Return the shard nodes that are not draining."""
        return tuple(node for node in self.nodes if node.kind == "shard" and not node.draining)

    def serving(self) -> tuple[NodeRecord, ...]:
        """Return the serving processes that are not draining."""
        return tuple(node for node in self.nodes if node.kind == "serving" and not node.draining)

    def needs_shards(self) -> bool:
        """Return whether rows are on shard nodes: not if there are none and each serving process holds its rows."""
        serving = self.serving()
        return bool(self.shard_nodes()) or not serving or any(node.num_shards is not None for node in serving)


class RecentNodes:
    """Nodes announced in the last `settle_s` seconds, which must exceed the heartbeat interval."""

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._since: float | None = None
        self._seen: dict[str, tuple[float, NodeRecord]] = {}

    def observe(self, nodes: Sequence[NodeRecord], fleet: FleetRecord | None, now: float) -> FleetView:
        """Return what is announced at `now` (seconds that never go back), with the nodes that were a moment ago."""
        if self._since is None:
            self._since = now
        self._seen.update({node.node_id: (now, node) for node in nodes})
        self._seen = {key: (at, node) for key, (at, node) in self._seen.items() if now - at <= self._settle_s}
        announced = {node.node_id for node in nodes}
        missing = [node for key, (_, node) in self._seen.items() if key not in announced and not node.draining]
        settled = now - self._since >= self._settle_s
        return replace(FleetView.of(nodes, fleet), missing=tuple(missing), settled=settled)

    def restart(self) -> None:
        """Begin a new settling period: the registry was unreachable, or another coordinator had the lock."""
        self._since = None


@dataclass(frozen=True, slots=True)
class StepBlocker:
    """One reason why a step is not done; `staging`: a version is loaded or deltas are replayed, which may take long."""

    text: str
    staging: bool = False


def step_blockers(rollout: Rollout, view: FleetView, wanted_epoch: int) -> tuple[StepBlocker, ...]:
    """Return who is behind the step that a rollout is in; empty if it is done.

    `wanted_epoch` is of the wanted record in which the step was written.
    """
    if not view.settled:
        return (StepBlocker("nodes are listened to first"),)
    silent = [StepBlocker(f"{node.node_id}: not heard of for a moment") for node in view.missing]
    return (*silent, *_step_lags(rollout, view, wanted_epoch))


def _step_lags(rollout: Rollout, view: FleetView, wanted_epoch: int) -> Sequence[StepBlocker]:
    model, step, old, new = rollout.model, rollout.step, rollout.from_version, rollout.to_version
    of_old, of_new = view.divided(rollout.from_shards), view.divided(rollout.to_shards)
    if step == Step.STAGE_SHARDS:
        return _without(of_new.shard_nodes(), model, new) + _bare_shards(of_new, model, new)
    if step.startswith(Step.ROLL):
        group = set(group_of(rollout, step))
        nodes = [node for node in of_new.shard_nodes() if node.node_id in group]
        if rollout.committed:
            # There is no way back: nodes that refuse it now are left behind, and named in the events.
            nodes = [node for node in nodes if not node.has(model, new, "refused")]
        is_needed = rollout.fallback is not None or step == f"{Step.ROLL}{rollout.early_groups - 1}"
        return _without(nodes, model, new) + (_bare_shards(of_new, model, new) if is_needed else [])
    if step == Step.STAGE_SERVING:
        none = [] if view.serving() else [StepBlocker("no serving process is announced")]
        return none + _without(view.serving(), model, new)
    if step == Step.REPLAY:
        return _delta_lags(rollout, of_new) + _bare_shards(of_new, model, new)
    if step == Step.CANARY:
        lagging = [node for node in view.serving() if model in node.live and node.applied.get(model, 0) < wanted_epoch]
        text = f"has not acted on epoch {wanted_epoch} yet"
        lags = [StepBlocker(f"{node.node_id}: {text}", not node.has(model, new, "ready")) for node in lagging]
        return lags + _lost_shards(rollout, view)
    if step in (Step.FLIP, Step.BAKE):
        return _elsewhere(view, model, new) + _lost_shards(rollout, view)
    if step == Step.UNFLIP:
        return _elsewhere(view, model, old)
    if step == Step.RETIRE_SERVING:
        # Those that are about to end as well: they may still answer with a version.
        everyone = [node for node in view.nodes if node.kind == "serving"]
        kept, leaving = (new, old) if rollout.forward else (old, new)
        return _elsewhere(view, model, kept) + _with(everyone, model, leaving)
    if step == Step.RETIRE_SHARDS and rollout.forward:
        return _with(view.shard_nodes(), model, old) + _bare_shards(of_new, model, new)
    if step == Step.RETIRE_SHARDS:
        lags = _with(view.shard_nodes(), model, new)
        if old is None:
            return lags
        nodes = [node for node in of_old.shard_nodes() if not node.has(model, old, "refused")]
        # Undone before a single node was there, there is nothing to come back.
        bare = _bare_shards(of_old, model, old) if of_old.shard_nodes() else []
        return lags + _without(nodes, model, old) + bare
    return [StepBlocker(f"step {step!r} is not known to this release")]


def refusals(rollout: Rollout, view: FleetView) -> str:
    """Return which nodes refuse the new version, and why; empty if none does.

    What may pass by itself counts only once the rollout is committed: until then the step waits for it.
    """
    return "; ".join(
        f"{node.node_id}: {report.reason or 'no reason given'}"
        for node in (*view.shard_nodes(), *view.serving())
        if (report := node.report(rollout.model, rollout.to_version)) is not None
        and report.state == "refused"
        and (rollout.committed or not report.passing)
    )


def cannot_roll(rollout: Rollout, view: FleetView) -> tuple[StepBlocker, ...]:
    """Return why the group of a `roll:` step can't change its version now; empty if it can, and for other steps.

    Each shard must keep a node outside of it with the version that is live or, after the flip, with the old one, which
    is the fallback then. Without a fallback a group has nothing to lose, and may be all that can replace a lost node.
    """
    if not rollout.step.startswith(Step.ROLL) or (rollout.committed and rollout.fallback is None):
        return ()
    if not view.settled:
        return (StepBlocker("nodes are listened to first"),)
    group, view = group_of(rollout, rollout.step), view.divided(rollout.from_shards)
    answering = (rollout.from_version,) if rollout.fallback is None else (rollout.from_version, rollout.to_version)
    kept = [node for node in view.shard_nodes() if node.node_id not in group]
    versions = " or ".join(map(str, answering))
    return tuple(
        StepBlocker(f"shard {shard} would be left without a node that has version {versions} ready")
        for shard in _shards_without(kept, view, rollout.model, *answering)
    )


def _shards_without(nodes: Iterable[NodeRecord], view: FleetView, model: str, *versions: int | None) -> list[int]:
    ready = {node.shard_index for node in nodes if any(node.has(model, version, "ready") for version in versions)}
    return [shard for shard in range(view.num_shards or 0) if shard not in ready]


def _without(nodes: Iterable[NodeRecord], model: str, version: int) -> list[StepBlocker]:
    lags = []
    for node in nodes:
        if (report := node.report(model, version)) is None:
            lags.append(StepBlocker(f"{node.node_id}: does not have version {version} yet", staging=True))
        elif report.state != "ready":
            progress = f" {report.progress:.0%}" if report.state == "staging" else " for now" if report.passing else ""
            state = f"{report.state}{progress}{f': {report.reason}' if report.reason else ''}"
            lags.append(StepBlocker(f"{node.node_id}: version {version} is {state}", staging=True))
    return lags


def _with(nodes: Iterable[NodeRecord], model: str, version: int | None) -> list[StepBlocker]:
    return [
        # The leases of a version that drains are from when it began to.
        StepBlocker(
            f"{node.node_id}: version {version} is {report.state} still"
            f"{f', with {report.leases} leases' if report.state == 'ready' else ''}"
        )
        for node in nodes
        if (report := node.report(model, version)) is not None
    ]


def _bare_shards(view: FleetView, model: str, version: int) -> list[StepBlocker]:
    if not view.needs_shards():
        return []
    if view.num_shards is None or not view.shard_nodes():
        return [StepBlocker("no shard node is announced")]
    bare = _shards_without(view.shard_nodes(), view, model, version)
    return [StepBlocker(f"shard {shard}: no node has version {version} ready", staging=True) for shard in bare]


def _lost_shards(rollout: Rollout, view: FleetView) -> list[StepBlocker]:
    # Shards that have lost the new version since it was staged: until they have it back the old version stays.
    bare = _bare_shards(view.divided(rollout.to_shards), rollout.model, rollout.to_version)
    of_old = view.divided(rollout.from_shards)
    if rollout.from_version is None or _bare_shards(of_old, rollout.model, rollout.from_version):
        return bare
    # The old version answers everything now: a node that is lost is not waited for as long as a node that loads.
    return [replace(lag, staging=False) for lag in bare]


def _delta_lags(rollout: Rollout, view: FleetView) -> list[StepBlocker]:
    until = rollout.replay_until or 0
    # A serving process that holds rows itself reports by which plan; the others apply no deltas.
    return [
        StepBlocker(
            f"{node.node_id}: applied delta {report.delta_sequence} of {until}"
            f"{f': {report.reason}' if report.reason else ''}",
            # A long replay is loading as well, unless something keeps it from going on.
            staging=not report.reason,
        )
        for node in (*view.shard_nodes(), *view.serving())
        if (report := node.report(rollout.model, rollout.to_version)) is not None
        and report.delta_sequence < until
        and (node.kind == "shard" or report.plan_digest)
    ]


def _elsewhere(view: FleetView, model: str, version: int | None) -> list[StepBlocker]:
    # Without a version a process has nothing to change to until it retires what it has.
    if version is None:
        return []
    lags = []
    for node in view.serving():
        live, ready = node.live.get(model), node.has(model, version, "ready")
        if live != version and (live is not None or ready):
            lags.append(StepBlocker(f"{node.node_id}: answers with version {live}", staging=not ready))
    if not lags and not any(node.live.get(model) == version for node in view.serving()):
        lags.append(StepBlocker(f"no serving process answers with version {version}", staging=True))
    return lags


def baseline_of(nodes: Iterable[NodeRecord], rollout: Rollout) -> dict[str, NodeBaseline]:
    """Return what serving processes have counted by now, by node id."""
    return {
        node.node_id: NodeBaseline(
            process_id=node.process_id,
            live=_stats(node, rollout.model, rollout.from_version) or NOTHING,
            new=_stats(node, rollout.model, rollout.to_version) or NOTHING,
        )
        for node in nodes
        if node.kind == "serving"
    }


class BakeTally:
    """Counts of one bake of one model; those of a process that died are lost only if the coordinator ends as well."""

    def __init__(self) -> None:
        self._bake: tuple[str, float] | None = None
        self._last: dict[tuple[str, int], tuple[VersionStats, VersionStats]] = {}

    def totals(self, rollout: Rollout, nodes: Sequence[NodeRecord]) -> tuple[VersionStats, VersionStats]:
        """Return what the live and the new version answered since the bake began, by these nodes and earlier ones.

        After a flip the old version answers no more: all that it answered before counts for it then.
        """
        bake = (rollout.rollout_id, rollout.bake_began_at or 0.0)
        before = {(node_id, base.process_id): (base.live, base.new) for node_id, base in rollout.baseline.items()}
        if bake != self._bake:
            self._bake, self._last = bake, before.copy()
        for node in nodes:
            if node.kind == "serving":
                key = (node.node_id, node.process_id)
                live, new = self._last.get(key, (NOTHING, NOTHING))
                live = _stats(node, rollout.model, rollout.from_version) or live
                self._last[key] = (live, _stats(node, rollout.model, rollout.to_version) or new)
        live_parts, new_parts = [], []
        for key, (live, new) in self._last.items():
            live_before, new_before = before.get(key, (NOTHING, NOTHING))
            live_parts.append(live if rollout.step == Step.BAKE else since(live, live_before))
            new_parts.append(since(new, new_before))
        return added(live_parts), added(new_parts)


def since(now: VersionStats, then: VersionStats) -> VersionStats:
    """Return what was counted between two moments; all of `now` if the counts began anew in between."""
    counts = tuple(starmap(sub, zip_longest(now.latency_counts, then.latency_counts, fillvalue=0)))
    sums = {name: getattr(now, name) - getattr(then, name) for name in _SUMMED}
    is_grown = min(sums["requests"], sums["errors"], sums["score_count"], *counts) >= 0
    return VersionStats(latency_counts=counts, **sums) if is_grown else now


def added(parts: Sequence[VersionStats]) -> VersionStats:
    """Return the sum of counts."""
    columns = zip_longest(*(part.latency_counts for part in parts), fillvalue=0)
    totals = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
    return VersionStats(latency_counts=tuple(map(sum, columns)), **totals)


def _stats(node: NodeRecord, model: str, version: int | None) -> VersionStats | None:
    report = node.report(model, version)
    return report.stats if report is not None else None
