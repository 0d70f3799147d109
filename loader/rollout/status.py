"""How far a rollout is: its record, what is wanted, and what each node tells, in one document."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from loader.registry.records import NodeKind, NodeRecord, VersionState, WantedModel
from loader.registry.typed import FleetRegistry
from loader.rollout.coverage import BakeTally, FleetView, cannot_roll, lags
from loader.rollout.guards import Verdict, compare
from loader.rollout.record import Event, Outcome, Rollout, RolloutState, Strategy
from loader.rollout.requests import read_rollout
from loader.rollout.steps import same_wish, wanted_in_step


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", from_attributes=True)


class StepStatus(_Part):
    """One step of a rollout."""

    name: str
    state: Literal["done", "running", "pending"]


class VersionStatus(_Part):
    """What a node tells of one version; see `VersionReport`."""

    version: int
    state: VersionState
    progress: float
    reason: str
    leases: int
    memory_bytes: int
    delta_sequence: int
    golden_difference: float | None
    golden_tolerance: float | None


class NodeStatus(_Part):
    """What a node tells of a model.

    Attributes:
        node_id, kind, address, shard_index, draining: of `NodeRecord`.
        live: the version that a serving process answers with.
        applied_epoch: of the wanted record that it has last acted on in full; 0 for none.
        versions: by version.
    """

    node_id: str
    kind: NodeKind
    address: str
    shard_index: int | None
    draining: bool
    live: int | None
    applied_epoch: int
    versions: tuple[VersionStatus, ...]


class RolloutStatus(_Part):
    """The state of one model's rollout. The fields of a rollout are None or empty if there was never one.

    Attributes:
        model: whose.
        live: the version that is wanted to answer; None before the first rollout.
        wanted: what is wanted in full; None before the first rollout.
        state, outcome, reason, strategy, from_version, to_version, canary_share, bake_s: of `Rollout`.
        rollout_id: of `Rollout`.
        started_at: seconds since the epoch; likewise `step_began_at` and `bake_began_at`.
        step: the step it is in, or ended in.
        steps: all of them.
        written: what the step wants is written; else it is on record and about to be.
        waiting_for: who lags behind the step.
        guards: the comparison since the bake began; None if there is none.
        nodes: what each node tells of the model.
        events: what happened, oldest first.
    """

    model: str
    live: int | None
    wanted: WantedModel | None
    state: RolloutState | None = None
    outcome: Outcome | None = None
    reason: str = ""
    rollout_id: str | None = None
    strategy: Strategy | None = None
    from_version: int | None = None
    to_version: int | None = None
    canary_share: float | None = None
    bake_s: float = 0.0
    started_at: float | None = None
    step_began_at: float | None = None
    bake_began_at: float | None = None
    step: str = ""
    steps: tuple[StepStatus, ...] = ()
    written: bool = False
    waiting_for: tuple[str, ...] = ()
    guards: Verdict | None = None
    nodes: tuple[NodeStatus, ...]
    events: tuple[Event, ...] = ()


async def read_status(fleet: FleetRegistry, model: str) -> RolloutStatus:
    """Reads how far a model's rollout is now.

    Raises:
        RegistryUnavailableError: the registry does not answer.
        RegistryRecordError: a record in it can't be read.
    """
    on_record = await read_rollout(fleet, model)
    wanted = await fleet.wanted_model(model)
    view = FleetView.of(await fleet.nodes(), await fleet.fleet()).for_model(model)
    return status_of(model, on_record.rollout if on_record is not None else None, wanted, view)


def status_of(model: str, rollout: Rollout | None, wanted: WantedModel | None, view: FleetView) -> RolloutStatus:
    """Returns the status that follows from what was read. Pure."""
    live = wanted.live if wanted is not None else None
    nodes = tuple(_node_status(model, node) for node in view.nodes)
    if rollout is None:
        return RolloutStatus(model=model, live=live, wanted=wanted, nodes=nodes)
    written = wanted is not None and wanted.epoch > rollout.base_epoch
    written = written and wanted is not None and same_wish(wanted, wanted_in_step(rollout, wanted.epoch))
    behind = cannot_roll(rollout, view) if not written else lags(rollout, view, wanted.epoch if wanted else 0)
    baked = rollout.bake_began_at is not None
    same = RolloutStatus.model_fields.keys() & Rollout.model_fields.keys() - {"steps", "guards"}
    return RolloutStatus(
        **{name: getattr(rollout, name) for name in same},
        live=live,
        wanted=wanted,
        step=rollout.step,
        steps=_steps(rollout),
        written=written,
        waiting_for=tuple(lag.text for lag in behind) if rollout.active else (),
        guards=compare(*BakeTally().totals(rollout, view.nodes), rollout.guards) if baked else None,
        nodes=nodes,
    )


def _steps(rollout: Rollout) -> tuple[StepStatus, ...]:
    found = []
    for index, name in enumerate(rollout.steps):
        ended = index < rollout.step_index or (index == rollout.step_index and not rollout.active)
        state: Literal["done", "running", "pending"] = "done" if ended else "pending"
        found.append(StepStatus(name=name, state="running" if not ended and index == rollout.step_index else state))
    return tuple(found)


def _node_status(model: str, node: NodeRecord) -> NodeStatus:
    versions = (VersionStatus.model_validate(report) for report in node.versions if report.model == model)
    return NodeStatus(
        node_id=node.node_id,
        kind=node.kind,
        address=node.address,
        shard_index=node.shard_index,
        draining=node.draining,
        live=node.live.get(model),
        applied_epoch=node.applied.get(model, 0),
        versions=tuple(sorted(versions, key=lambda version: version.version)),
    )
