"""Compare what nodes announce with what a rollout wants: who lags, who refuses, and what a bake answered. Pure.

A node that is not announced does not block, but each shard needs a node. A process that has just started and does not
answer for the model yet holds up no flip: it stages what is live first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import starmap, zip_longest
from operator import sub

from loader.registry.fleet import FleetRecord, NodeRecord, VersionReport, VersionStats, WantedModel
from loader.rollout.plan import (
    BAKE,
    CANARY,
    FLIP,
    REPLAY,
    RETIRE_SERVING,
    RETIRE_SHARDS,
    ROLL,
    SHADOW,
    STAGE_SERVING,
    STAGE_SHARDS,
    UNFLIP,
    NodeBaseline,
    Rollout,
    group_of,
)

NOTHING = VersionStats()
_SUMMED = [name for name in VersionStats.model_fields if name != "latency_counts"]


def answering_version(wanted: WantedModel, node_id: str, num_shards: int | None) -> int | None:
    """Return the version that a shard node answers with: the live one, or in a rollout by replica the one in its place.

    None where nothing is live, or what is live is divided over another number of shards.
    """
    held = wanted.held_by(node_id, num_shards)
    if wanted.live is None or wanted.live in held:
        return wanted.live
    return next(iter(held), None) if node_id in wanted.node_hold else None


@dataclass(frozen=True, slots=True)
class FleetView:
    """What is known of a fleet's nodes at one moment.

    Attributes:
        num_shards: how the fleet divides rows; None if no shard node was ever there.
        nodes: what is announced.
        missing: what was announced a moment ago, and did not say that it would go.
        settled: nodes were listened to for long enough that each one that lives was heard of.
    """

    num_shards: int | None
    nodes: tuple[NodeRecord, ...]
    missing: tuple[NodeRecord, ...] = ()
    settled: bool = True

    @classmethod
    def of(cls, nodes: Sequence[NodeRecord], fleet: FleetRecord | None) -> FleetView:
        """Return what is announced now. A fleet whose record is lost is divided as its shard nodes say."""
        told = [node.num_shards for node in nodes if node.kind == "shard" and node.num_shards is not None]
        return cls(fleet.num_shards if fleet is not None else max(told, default=None), tuple(nodes))

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
        """Return the shard nodes that take requests."""
        return tuple(node for node in self.nodes if node.kind == "shard" and not node.draining)

    def serving(self) -> tuple[NodeRecord, ...]:
        """Return the serving processes that take requests."""
        return tuple(node for node in self.nodes if node.kind == "serving" and not node.draining)

    def needs_shards(self) -> bool:
        """Tell whether rows are on shard nodes: not if there are none and each serving process holds its own."""
        if self.shard_nodes():
            return True
        serving = self.serving()
        return not serving or any(node.num_shards is not None for node in serving)


class RecentNodes:
    """Remembers who was there for `settle_s` seconds, above the pause between two announcements of a node."""

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._since: float | None = None
        self._seen: dict[str, tuple[float, NodeRecord]] = {}

    def observe(self, nodes: Sequence[NodeRecord], fleet: FleetRecord | None, now: float) -> FleetView:
        """Return what is announced at `now` (seconds), with who was there a moment ago."""
        # A clock that was set back would keep everybody missing for that long.
        if self._since is None or now < self._since:
            self._since = now
        self._seen.update({node.node_id: (now, node) for node in nodes})
        self._seen = {key: (at, node) for key, (at, node) in self._seen.items() if 0 <= now - at <= self._settle_s}
        there = {node.node_id for node in nodes}
        missing = [node for key, (_, node) in self._seen.items() if key not in there and not node.draining]
        settled = now - self._since >= self._settle_s
        return replace(FleetView.of(nodes, fleet), missing=tuple(missing), settled=settled)

    def lose_sight(self) -> None:
        """Listen to nodes from the start again: the registry did not answer, or somebody else looked."""
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
    if step == STAGE_SHARDS:
        return _without(of_new.shard_nodes(), model, new) + _bare_shards(of_new, model, new)
    if step.startswith(ROLL):
        return _behind_in_group(rollout, of_new)
    if step == STAGE_SERVING:
        none = [] if view.serving() else [StepBlocker("no serving process is announced")]
        return none + _without(view.serving(), model, new)
    if step == REPLAY:
        return _behind_in_deltas(rollout, of_new)
    if step in (SHADOW, CANARY):
        return _not_applied(view, model, new, wanted_epoch) + _lost_shards(rollout, view)
    if step in (FLIP, BAKE):
        return _elsewhere(view, model, new) + _lost_shards(rollout, view)
    if step == UNFLIP:
        return _elsewhere(view, model, old)
    if step == RETIRE_SERVING:
        # Those that are about to end as well: they may still answer with a version.
        everyone = [node for node in view.nodes if node.kind == "serving"]
        kept, leaving = (new, old) if rollout.forward else (old, new)
        return _elsewhere(view, model, kept) + _with(everyone, model, leaving)
    if step == RETIRE_SHARDS and rollout.forward:
        return _with(view.shard_nodes(), model, old) + _bare_shards(of_new, model, new)
    if step == RETIRE_SHARDS:
        return _with(view.shard_nodes(), model, new) + _not_back(of_old, model, old)
    return [StepBlocker(f"step {step!r} is not known to this release")]


def refusals(rollout: Rollout, view: FleetView) -> str:
    """Return which nodes refuse the new version, and why; empty if none does."""
    reports = (
        (node, node.report(rollout.model, rollout.to_version)) for node in (*view.shard_nodes(), *view.serving())
    )
    return "; ".join(
        f"{node.node_id}: {report.reason or 'no reason given'}"
        for node, report in reports
        if report is not None and report.state == "refused"
    )


def cannot_roll(rollout: Rollout, view: FleetView) -> tuple[StepBlocker, ...]:
    """Return why the group of a `roll:` step can't be taken out now; empty if it can, and for other steps.

    Each shard must keep a node outside of it with the version that is live. After the flip a group has none of it to
    take away: it has the old version, which nobody asks for any more, and may be all that can replace a lost node.
    """
    if not rollout.step.startswith(ROLL) or rollout.committed:
        return ()
    if not view.settled:
        return (StepBlocker("nodes are listened to first"),)
    live, view = rollout.from_version, view.divided(rollout.from_shards)
    out = {node_id for step in rollout.steps[: rollout.step_index + 1] for node_id in group_of(rollout, step)}
    ready = [node for node in view.shard_nodes() if node.has(rollout.model, live, "ready")]
    there = {node.shard_index for node in ready if node.node_id not in out}
    return tuple(
        StepBlocker(f"shard {shard} would be left without a node that has version {live} ready")
        for shard in range(view.num_shards or 0)
        if shard not in there
    )


def _without(nodes: Iterable[NodeRecord], model: str, version: int) -> list[StepBlocker]:
    return [
        StepBlocker(f"{node.node_id}: {_report_text(version, node.report(model, version))}", staging=True)
        for node in nodes
        if not node.has(model, version, "ready")
    ]


def _report_text(version: int, report: VersionReport | None) -> str:
    if report is None:
        return f"does not have version {version} yet"
    progress = f" {report.progress:.0%}" if report.state == "staging" else ""
    return f"version {version} is {report.state}{progress}{f': {report.reason}' if report.reason else ''}"


def _with(nodes: Iterable[NodeRecord], model: str, version: int | None) -> list[StepBlocker]:
    return [
        # What is told of a version that drains is from when it began to.
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
    there = {node.shard_index for node in view.shard_nodes() if node.has(model, version, "ready")}
    return [
        StepBlocker(f"shard {shard}: no node has version {version} ready", staging=True)
        for shard in range(view.num_shards)
        if shard not in there
    ]


def _lost_shards(rollout: Rollout, view: FleetView) -> list[StepBlocker]:
    # Shards that have lost the new version since it was staged: until they have it back the old one stays.
    bare = _bare_shards(view.divided(rollout.to_shards), rollout.model, rollout.to_version)
    of_old = view.divided(rollout.from_shards)
    if rollout.from_version is None or _bare_shards(of_old, rollout.model, rollout.from_version):
        return bare
    # The old version answers everything now: a node that is lost is not waited for as long as one that loads.
    return [replace(lag, staging=False) for lag in bare]


def _behind_in_group(rollout: Rollout, view: FleetView) -> list[StepBlocker]:
    group = set(group_of(rollout, rollout.step))
    nodes = [node for node in view.shard_nodes() if node.node_id in group]
    if rollout.committed:
        # There is no way back: one that refuses it now is left behind, and told in the events.
        there = [node for node in nodes if not node.has(rollout.model, rollout.to_version, "refused")]
        return _without(there, rollout.model, rollout.to_version)
    last_early = rollout.step == f"{ROLL}{rollout.early_groups - 1}"
    bare = _bare_shards(view, rollout.model, rollout.to_version) if last_early else []
    return _without(nodes, rollout.model, rollout.to_version) + bare


def _behind_in_deltas(rollout: Rollout, view: FleetView) -> list[StepBlocker]:
    until = rollout.replay_until or 0
    # A serving process that holds rows itself tells by which plan; one that asks shard nodes applies no deltas.
    found = [
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
    return found + _bare_shards(view, rollout.model, rollout.to_version)


def _not_applied(view: FleetView, model: str, version: int, epoch: int) -> list[StepBlocker]:
    return [
        StepBlocker(
            f"{node.node_id}: has not acted on epoch {epoch} yet", staging=not node.has(model, version, "ready")
        )
        for node in view.serving()
        if model in node.live and node.applied.get(model, 0) < epoch
    ]


def _elsewhere(view: FleetView, model: str, version: int | None) -> list[StepBlocker]:
    # Without a version a process has nothing to turn to until it retires what it has.
    if version is None:
        return []
    found = []
    for node in view.serving():
        live, ready = node.live.get(model), node.has(model, version, "ready")
        if live != version and (live is not None or ready):
            found.append(StepBlocker(f"{node.node_id}: answers with version {live}", staging=not ready))
    if not found and not any(node.live.get(model) == version for node in view.serving()):
        found.append(StepBlocker(f"no serving process answers with version {version}", staging=True))
    return found


def _not_back(view: FleetView, model: str, version: int | None) -> list[StepBlocker]:
    if version is None:
        return []
    nodes = [node for node in view.shard_nodes() if not node.has(model, version, "refused")]
    # Undone before a single node was there, there is nothing to come back.
    return _without(nodes, model, version) + (_bare_shards(view, model, version) if view.shard_nodes() else [])


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
    """Follows one bake of one model.

    What a process had counted when it died is remembered here, and so is lost only if the coordinator ends as well.
    """

    def __init__(self) -> None:
        self._bake: tuple[str, float] | None = None
        self._last: dict[tuple[str, int], tuple[VersionStats, VersionStats]] = {}

    def totals(self, rollout: Rollout, nodes: Sequence[NodeRecord]) -> tuple[VersionStats, VersionStats]:
        """Add up what the live and the new version answered since the bake began, as `nodes` and earlier ones tell.

        After a flip the old version answers no more: all that it answered before stands for it then.
        """
        bake = (rollout.rollout_id, rollout.bake_began_at or 0.0)
        if bake != self._bake:
            self._bake = bake
            self._last = {(key, one.process_id): (one.live, one.new) for key, one in rollout.baseline.items()}
        for node in nodes:
            if node.kind != "serving":
                continue
            key = (node.node_id, node.process_id)
            live, new = self._last.get(key, (NOTHING, NOTHING))
            self._last[key] = (
                _stats(node, rollout.model, rollout.from_version) or live,
                _stats(node, rollout.model, rollout.to_version) or new,
            )
        live_parts, new_parts = [], []
        for (node_id, process_id), (live, new) in self._last.items():
            base = rollout.baseline.get(node_id)
            same = base is not None and base.process_id == process_id
            live_parts.append(since(live, base.live) if same and base and rollout.step != BAKE else live)
            new_parts.append(since(new, base.new) if same and base else new)
        return added(live_parts), added(new_parts)


def since(now: VersionStats, then: VersionStats) -> VersionStats:
    """Return what was counted between two moments; all of `now` if the counts began anew in between."""
    counts = zip_longest(now.latency_counts, then.latency_counts, fillvalue=0)
    difference = VersionStats(
        latency_counts=tuple(starmap(sub, counts)),
        **{name: getattr(now, name) - getattr(then, name) for name in _SUMMED},
    )
    grown = (difference.requests, difference.errors, difference.score_count, *difference.latency_counts)
    return now if min(grown) < 0 else difference


def added(parts: Sequence[VersionStats]) -> VersionStats:
    """Return the sum of counts."""
    columns = zip_longest(*(part.latency_counts for part in parts), fillvalue=0)
    totals = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
    return VersionStats(latency_counts=tuple(map(sum, columns)), **totals)


def _stats(node: NodeRecord, model: str, version: int | None) -> VersionStats | None:
    report = node.report(model, version)
    return report.stats if report is not None else None
