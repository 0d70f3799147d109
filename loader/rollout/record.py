"""The durable plan of a rollout: what is kept in the registry under `rollouts/<model>`.

One record a model: the running rollout, or the last one. Every change of it counts `epoch` up, and of two records that
differ the one of the higher epoch counts, so that a registry that lost its last writes can be given them back.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from loader.errors import RegistryRecordError
from loader.registry.records import (
    MAX_REASON_CHARACTERS,
    NodeId,
    Record,
    Version,
    VersionStats,
    parse_record,
    rollout_key,
)
from loader.rollout.guards import GuardLimits
from loader.snapshot.manifest import Name

Strategy = Literal["beside", "by-replica"]
Outcome = Literal["refused", "rolled_back", "aborted"]
RolloutState = Literal["running", "undoing", "done", "refused", "rolled_back", "aborted"]

MAX_EVENTS = 200
MAX_BAKE_S = 7 * 24 * 3600.0


class Event(Record):
    """Something that happened in a rollout.

    Attributes:
        at: seconds since the epoch.
        step: in which step.
        text: what.
    """

    at: float
    step: str
    text: Annotated[str, Field(max_length=MAX_REASON_CHARACTERS)]


class NodeBaseline(Record):
    """What a serving process had counted when a bake began.

    Attributes:
        process_id: another process of the same node began anew.
        live: of the version that is replaced.
        new: of the one that replaces it.
    """

    process_id: int
    live: VersionStats
    new: VersionStats


class Rollout(Record):
    """One rollout of one model.

    Attributes:
        model: whose versions.
        epoch: counts up with every write of this key.
        rollout_id: 32 hexadecimal digits.
        from_version: the version that is live when it starts; None for a model's first.
        to_version: the version that is to be live.
        previous_version: what a rollback returns to if this rollout is not done; see `rollback_target`.
        from_followed: deltas were applied to `from_version` when it started.
        delta_base, last_delta: of the published `to_version`: its stream of deltas, and the last one it contains.
        strategy: `beside` holds both versions on each shard node for a while, `by-replica` never does.
        canary_share: share of requests that the new version gets first; None for no canary.
        bake_s: how long it is held against the live one, in seconds; 0 for not at all.
        guards: what the comparison allows.
        steps: names of the steps; when it is undone, those of undoing come after the last one that was begun.
        step_index: the step it is in.
        undo_index: the first step of undoing.
        base_epoch: the epoch of the wanted record that the step's own write follows: up to it the step is still to be
            done, above it it was. It is also what keeps a coordinator with an old copy of this record from writing.
        step_began_at: seconds since the epoch; likewise `started_at` and `bake_began_at`.
        groups: by-replica only: node ids that are rolled together, in order.
        early_groups: how many of them are rolled before the flip.
        replay_until: the last delta of that stream when the step `replay` began; None before.
        baseline: what serving processes had counted when the bake began, by node id.
        state: `running` towards `to_version`, `undoing` back to `from_version`, or how it ended.
        outcome: how it will end once it is undone.
        reason: why it is undone.
        events: what happened, the last `MAX_EVENTS`.
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
    guards: GuardLimits = GuardLimits()
    steps: tuple[str, ...] = Field(min_length=1)
    step_index: int = Field(default=0, ge=0)
    undo_index: int | None = Field(default=None, ge=1)
    base_epoch: int = Field(default=0, ge=0)
    started_at: float
    step_began_at: float
    groups: tuple[tuple[NodeId, ...], ...] = ()
    early_groups: int = Field(default=0, ge=0)
    replay_until: int | None = None
    bake_began_at: float | None = None
    baseline: dict[NodeId, NodeBaseline] = Field(default_factory=dict)
    state: RolloutState = "running"
    outcome: Outcome | None = None
    reason: Annotated[str, Field(max_length=MAX_REASON_CHARACTERS)] = ""
    events: Annotated[tuple[Event, ...], Field(max_length=MAX_EVENTS)] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Rollout:
        if self.step_index >= len(self.steps):
            raise ValueError(f"step_index: {self.step_index}, but there are {len(self.steps)} steps")
        if self.from_version == self.to_version:
            raise ValueError(f"to_version: {self.to_version} is from_version as well")
        if self.state == "undoing" and (self.undo_index is None or self.outcome is None):
            raise ValueError("state: 'undoing' needs undo_index and outcome")
        return self

    @property
    def step(self) -> str:
        """The step it is in."""
        return self.steps[self.step_index]

    def named(self) -> frozenset[int]:
        """Lists the versions that it names or that a rollback after it would go to: none of them may be dropped."""
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
    def kept_version(self) -> int | None:
        """The version that is left when it ends as it now goes."""
        return self.to_version if self.forward else self.from_version

    @property
    def leaving_version(self) -> int | None:
        """The version that is gone when it ends as it now goes."""
        return self.from_version if self.forward else self.to_version

    @property
    def committed(self) -> bool:
        """There is no way back but another rollout: the old version is being retired, or there is none to flip to."""
        last = "flip" if self.from_version is None else "retire_serving"
        return self.forward and last in self.steps[: self.step_index + 1]

    @property
    def rollback_target(self) -> int | None:
        """The version that was live before the one that is live once this rollout has ended."""
        return self.from_version if self.forward else self.previous_version


def encode_rollout(rollout: Rollout) -> bytes:
    """Encodes a rollout as it is kept in the registry: JSON."""
    return rollout.model_dump_json().encode()


def decode_rollout(model: str, value: bytes) -> Rollout:
    """Reads a record. Raises RegistryRecordError, naming its key, if it is none of this model."""
    key = rollout_key(model)
    rollout = parse_record(f"{key}: not a rollout", value, Rollout)
    if rollout.model != model:
        raise RegistryRecordError(f"{key}: is of model {rollout.model!r}")
    return rollout
