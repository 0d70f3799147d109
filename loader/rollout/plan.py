"""Define the durable plan of a rollout and its steps: what is wanted of a fleet in each, and how it changes.

The plan is kept in the registry under `rollouts/<model>`: the running rollout of a model, or the last one. Every change
counts `epoch` up, and of two records the one of the higher epoch counts, so that a registry that lost its last writes
can be given them back. What is wanted in a step follows from this record alone, never from what was wanted before: a
step may be done twice, and a registry that lost everything can be written anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import zip_longest
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import Field, model_validator

from loader.errors import RegistryRecordError, RolloutError
from loader.registry import fleet as records
from loader.registry.fleet import FleetRegistry, NodeId, NumShards, Record, Version, VersionStats, WantedModel
from loader.rollout.guards import GuardLimits
from loader.snapshot.tables import Name, refused_as

Strategy = Literal["beside", "by-replica"]
Outcome = Literal["refused", "rolled_back", "aborted"]
RolloutState = Literal["running", "undoing", "done", "refused", "rolled_back", "aborted"]

MAX_EVENTS = 200
MAX_BAKE_S = 7 * 24 * 3600.0
BAKE_TIMEOUT = 10
"""Times the bake, where no timeout is given."""


class Step:
    """Names of the steps of rollouts."""

    STAGE_SHARDS: Final = "stage_shards"
    STAGE_SERVING: Final = "stage_serving"
    REPLAY: Final = "replay"
    CANARY: Final = "canary"
    FLIP: Final = "flip"
    BAKE: Final = "bake"
    UNFLIP: Final = "unflip"
    RETIRE_SERVING: Final = "retire_serving"
    RETIRE_SHARDS: Final = "retire_shards"
    ROLL: Final = "roll:"  # and the number of a group
    UNDO: Final = (UNFLIP, RETIRE_SERVING, RETIRE_SHARDS)


class Event(Record):
    """Something that happened in a rollout, `at` seconds since the epoch."""

    at: float
    step: str
    text: Annotated[str, Field(max_length=records.MAX_REASON_CHARACTERS)]


class NodeBaseline(Record):
    """What a serving process had counted of both versions when a bake began; another process counts anew."""

    process_id: int
    live: VersionStats
    new: VersionStats


class Rollout(Record):
    """One rollout of one model. Times `_at` are seconds since the epoch, for people: clocks differ, and step.

    Attributes:
        epoch: counts up with every write of this key but those of elapsed times alone, which may be lost.
        from_version: the version that is live when it starts; None for a model's first.
        previous_version: what a rollback returns to if this rollout is not done; see `rollback_target`.
        from_followed: deltas were applied to `from_version` when it started.
        delta_base, last_delta: of `to_version`, as published.
        strategy: `beside` loads both versions on each shard node for a while, `by-replica` only where there is memory.
        canary_share: share of requests that the new version gets first; None for no canary.
        bake_s: how long it is compared with the live one, in seconds; 0 for not at all.
        bake_timeout_s: longest that a bake waits for `guards.min_requests`, in seconds; None for `BAKE_TIMEOUT` bakes.
        steps: when it is undone, those of undoing, from `undo_index` on, come after the last one that was begun.
        base_epoch: of the wanted record that the step's write follows: up to it the step is still to be done. It also
            keeps a coordinator with an old copy of this record from writing.
        groups: by-replica only: node ids that are rolled together, in order; `early_groups` of them before the flip.
        from_shards, to_shards: over how many shards the rows of the two versions are divided; None if unknown.
        replay_until: the last delta of that stream when the step `replay` began; None before.
        baked_s: how long coordinators have observed the bake, in seconds.
        waited_s: how long they have observed that the step can't go on, in seconds, towards the limit of staging if
            `waited_staging`, else towards that of other steps.
        baseline: what serving processes had counted when the bake began, by node id.
        warnings: what was said before it began.
        state: `running` towards `to_version`, `undoing` back to `from_version`, or how it ended.
    """

    model: Name
    epoch: int = Field(ge=1)
    rollout_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    from_version: Version | None
    to_version: Version
    previous_version: Version | None = None
    from_followed: bool = False
    delta_base: Version
    last_delta: int = Field(ge=0)
    strategy: Strategy = "beside"
    canary_share: float | None = Field(default=None, gt=0, lt=1)
    bake_s: float = Field(default=0.0, ge=0, le=MAX_BAKE_S)
    bake_timeout_s: float | None = Field(default=None, ge=0, le=BAKE_TIMEOUT * MAX_BAKE_S)
    guards: GuardLimits = GuardLimits()
    steps: tuple[str, ...] = Field(min_length=1)
    step_index: int = Field(default=0, ge=0)
    undo_index: int | None = Field(default=None, ge=1)
    base_epoch: int = Field(default=0, ge=0)
    started_at: float
    step_began_at: float
    groups: tuple[tuple[NodeId, ...], ...] = ()
    early_groups: int = Field(default=0, ge=0)
    from_shards: NumShards | None = None
    to_shards: NumShards | None = None
    warnings: tuple[str, ...] = ()
    replay_until: int | None = None
    bake_began_at: float | None = None
    baked_s: float = Field(default=0.0, ge=0)
    waited_s: float = Field(default=0.0, ge=0)
    waited_staging: bool = False
    baseline: dict[NodeId, NodeBaseline] = Field(default_factory=dict)
    state: RolloutState = "running"
    outcome: Outcome | None = None
    reason: Annotated[str, Field(max_length=records.MAX_REASON_CHARACTERS)] = ""
    events: Annotated[tuple[Event, ...], Field(max_length=MAX_EVENTS)] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Rollout:
        if self.step_index >= len(self.steps):
            raise ValueError(f"step_index: {self.step_index}, but there are {len(self.steps)} steps")
        if self.from_version == self.to_version:
            raise ValueError(f"to_version: {self.to_version} is from_version as well")
        if self.longest_bake_s < self.bake_s:
            raise ValueError(f"bake_timeout_s: {self.bake_timeout_s:g}, allowed is bake_s = {self.bake_s:g} or more")
        if self.state == "undoing" and (self.undo_index is None or self.outcome is None):
            raise ValueError("state: 'undoing' needs undo_index and outcome")
        return self

    @property
    def step(self) -> str:
        """The step it is in."""
        return self.steps[self.step_index]

    @property
    def longest_bake_s(self) -> float:
        """Seconds after which a bake that is short of requests is undone."""
        return BAKE_TIMEOUT * self.bake_s if self.bake_timeout_s is None else self.bake_timeout_s

    def named(self) -> frozenset[int]:
        """List the versions that it names or that a rollback after it would go to: none of them may be dropped."""
        named = (self.from_version, self.to_version, self.previous_version)
        return frozenset(version for version in named if version is not None)

    @property
    def active(self) -> bool:
        """It has not ended."""
        return self.state in ("running", "undoing")

    @property
    def forward(self) -> bool:
        """It goes, or went, towards `to_version`."""
        return self.state in ("running", "done")

    @property
    def committed(self) -> bool:
        """There is no way back but another rollout: the old version is being retired, or there is none to flip to."""
        # In plans of earlier releases late groups are rolled after `retire_serving`.
        last = (Step.FLIP,) if self.from_version is None else (Step.RETIRE_SERVING, f"{Step.ROLL}{self.early_groups}")
        return self.forward and any(step in last for step in self.steps[: self.step_index + 1])

    @property
    def fallback(self) -> int | None:
        """The old version of a by-replica rollout, from the flip until serving processes retire it."""
        begun = self.steps[: self.step_index + 1]
        is_held = self.state == "running" and Step.FLIP in begun and Step.RETIRE_SERVING not in begun
        return self.from_version if is_held and self.strategy == "by-replica" else None

    @property
    def rollback_target(self) -> int | None:
        """The version that was live before the one that is live once this rollout has ended."""
        return self.from_version if self.forward else self.previous_version


class OnRecord(NamedTuple):
    """A rollout as it was read, with the revision that a write of it must follow."""

    rollout: Rollout
    revision: int


async def read_rollout(fleet: FleetRegistry, model: str) -> OnRecord | None:
    """Return the running rollout of a model, or its last one, with its revision; None if there was never one."""
    entry = await fleet.registry.get(records.rollout_key(model))
    return None if entry is None else OnRecord(decode_rollout(model, entry.value), entry.revision)


def decode_rollout(model: str, value: bytes) -> Rollout:
    """Read a record. Raises RegistryRecordError, naming its key, if it is none of this model."""
    key = records.rollout_key(model)
    rollout = records.parse_record(f"{key}: not a rollout", value, Rollout)
    if rollout.model != model:
        raise RegistryRecordError(f"{key}: is of model {rollout.model!r}")
    return rollout


def new_rollout(
    published: records.PublishedVersion, wanted: WantedModel | None, last: Rollout | None, now: float, **fields: object
) -> Rollout:
    """Return a rollout to a published version, from what is wanted `now` and after the model's last rollout.

    Raises RolloutError, naming the fields that are not allowed.
    """
    live = None if wanted is None else wanted.live
    previous = None if last is None else last.rollback_target
    known = {
        "model": published.model,
        "epoch": 1 if last is None else last.epoch + 1,
        "from_version": live,
        "from_shards": None if wanted is None or live is None else wanted.num_shards.get(live),
        "from_followed": wanted is not None and live in wanted.follow,
        "to_version": published.version,
        "previous_version": None if previous == live else previous,
        "delta_base": published.delta_base,
        "last_delta": published.last_delta,
        "base_epoch": 0 if wanted is None else wanted.epoch,
        "started_at": now,
        "step_began_at": now,
        "events": [Event(at=now, step="start", text=f"rollout of version {published.version} in place of {live}")],
    }
    with refused_as(RolloutError, f"{published.model}: ", Rollout):
        return Rollout.model_validate({**known, **fields})


def plan_steps(
    strategy: Strategy, *, canary: bool, bake: bool, early_groups: int = 0, groups: int = 0
) -> tuple[str, ...]:
    """Return the names of a rollout's steps in order.

    With a canary, the bake is part of that step. Of `groups` of shard nodes `early_groups` are rolled before the flip.
    """
    rolls = [f"{Step.ROLL}{group}" for group in range(groups)]
    before_flip = rolls[:early_groups] if strategy == "by-replica" else [Step.STAGE_SHARDS]
    trial = [Step.CANARY, Step.FLIP] if canary else [Step.FLIP, Step.BAKE] if bake else [Step.FLIP]
    retire = [*rolls[early_groups:], Step.RETIRE_SERVING, Step.RETIRE_SHARDS]
    return (*before_flip, Step.STAGE_SERVING, Step.REPLAY, *trial, *retire)


def replica_groups(nodes_by_shard: Mapping[int, Collection[str]]) -> tuple[tuple[tuple[str, ...], ...], int]:
    """Return groups of shard nodes to roll together, at most one of each shard, and how many come before the flip.

    Of each shard, half of its nodes (at least one, by id) are in the groups before the flip and the rest in those after
    it, so that both versions have a node of each shard in between.
    """
    by_shard = [sorted(nodes) for _, nodes in sorted(nodes_by_shard.items())]
    early = [nodes[: max(1, len(nodes) // 2)] for nodes in by_shard]
    remaining = [nodes[max(1, len(nodes) // 2) :] for nodes in by_shard]
    groups = [
        tuple(node_id for node_id in group if node_id is not None)
        for halves in (early, remaining)
        for group in zip_longest(*halves)
    ]
    return tuple(groups), max(map(len, early), default=0)


def group_of(rollout: Rollout, step: str) -> tuple[str, ...]:
    """Return the node ids that a `roll:` step rolls; empty for other steps."""
    return rollout.groups[int(step.removeprefix(Step.ROLL))] if step.startswith(Step.ROLL) else ()


def wanted_in_step(rollout: Rollout, epoch: int) -> WantedModel:
    """Return what is wanted of the fleet in the step that a rollout is in."""
    old, undo_index = _versions(rollout.from_version), rollout.undo_index
    begun = rollout.steps[: rollout.step_index + 1 if undo_index is None else undo_index]
    undone = () if undo_index is None else rollout.steps[undo_index : rollout.step_index + 1]
    # Before serving processes were sent the new version, shard nodes can let go of it at once. They must: the last
    # step that was begun may never have been written, because it would have taken away a shard's last node.
    if Step.RETIRE_SHARDS in undone or (undone and Step.STAGE_SERVING not in begun):
        follow = old if rollout.from_followed else ()
        change: dict[str, object] = {"live": rollout.from_version, "hold": old, "serve": old, "follow": follow}
    else:
        change = _forward(rollout, begun)
        if undone:
            change |= {"live": rollout.from_version, "canary": None}
        if Step.RETIRE_SERVING in undone:
            change["serve"] = old
    change |= {"model": rollout.model, "epoch": epoch, "fallback": rollout.fallback}
    wanted = WantedModel.model_validate(change)
    divided = {rollout.from_version: rollout.from_shards, rollout.to_version: rollout.to_shards}
    shards = {version: number for version in sorted(wanted.named()) if (number := divided[version]) is not None}
    return wanted.model_copy(update={"num_shards": shards})


def _forward(rollout: Rollout, begun: tuple[str, ...]) -> dict[str, object]:
    old, new = _versions(rollout.from_version), _versions(rollout.to_version)
    followed = old if rollout.from_followed else ()
    is_last = Step.RETIRE_SHARDS in begun
    rolled = [node_id for step in begun for node_id in group_of(rollout, step)]
    in_canary = begun[-1] == Step.CANARY and rollout.canary_share is not None
    return {
        "live": rollout.to_version if Step.FLIP in begun else rollout.from_version,
        "hold": new if is_last else (*old, *new) if Step.STAGE_SHARDS in begun else old,
        "serve": new if Step.RETIRE_SERVING in begun else (*old, *new) if Step.STAGE_SERVING in begun else old,
        "follow": new if is_last else (*followed, *new) if Step.REPLAY in begun else followed,
        "canary": records.Canary(version=rollout.to_version, share=rollout.canary_share or 0.0) if in_canary else None,
        "node_hold": {} if is_last else dict.fromkeys(rolled, new),
    }


def _versions(version: int | None) -> tuple[int, ...]:
    return () if version is None else (version,)


def advanced(rollout: Rollout, now: float, wanted_epoch: int, text: str) -> Rollout:
    """Move to the next step, or end. Its write follows `wanted_epoch`; `text` says how this step was done."""
    if rollout.step == Step.RETIRE_SHARDS:
        return changed(rollout, now, text, state=rollout.outcome if rollout.state == "undoing" else "done")
    change = {"step_index": rollout.step_index + 1, "step_began_at": now, "base_epoch": wanted_epoch}
    return changed(rollout, now, text, bake_began_at=None, baked_s=0.0, waited_s=0.0, baseline={}, **change)


def undone(rollout: Rollout, now: float, outcome: Outcome, reason: str) -> Rollout:
    """Return the rollout on its way back, to end as `outcome`: its steps begun so far, then those of undoing.

    Raises RolloutError if it has ended, is undone already, or there is no way back any more.
    """
    name = f"{rollout.model}: the rollout of version {rollout.to_version}"
    if not rollout.active:
        raise RolloutError(f"{name} is not running: it is {rollout.state}")
    if rollout.state == "undoing":
        raise RolloutError(f"{name} is being undone already: {rollout.outcome}: {rollout.reason}")
    if rollout.committed:
        old = rollout.from_version
        why = "there is no version to go back to" if old is None else f"version {old} is being retired"
        raise RolloutError(f"{name} can't be undone in step {rollout.step!r}: {why}; once it is done, use rollback")
    begun = rollout.steps[: rollout.step_index + 1]
    steps = {"steps": (*begun, *Step.UNDO), "step_index": len(begun), "undo_index": len(begun), "step_began_at": now}
    change = {"state": "undoing", "outcome": outcome, "reason": records.cut_reason(reason), "waited_s": 0.0}
    return changed(rollout, now, f"{outcome}: {reason}", **change, **steps)


def changed(rollout: Rollout, now: float, text: str, **change: object) -> Rollout:
    """Return the rollout with one more event, of the step that it is in, and with these fields changed."""
    event = Event(at=now, step=rollout.step, text=records.cut_reason(text))
    update = {"epoch": rollout.epoch + 1, "events": (*rollout.events, event)[-MAX_EVENTS:], **change}
    # Not model_copy: what comes out must be a record that can be read again.
    return Rollout.model_validate({**dict(rollout), **update})
