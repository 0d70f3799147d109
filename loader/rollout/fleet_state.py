"""Read everything that a registry says of a fleet at once: for those who show it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from loader.registry.fleet import (
    COORDINATOR_LOCK,
    ROLLOUTS,
    FleetRecord,
    FleetRegistry,
    NodeRecord,
    PublishedVersion,
    WantedModel,
    delta_stream,
)
from loader.rollout.coverage import FleetView
from loader.rollout.plan import Rollout, decode_rollout
from loader.rollout.requests import RolloutStatus, status_of


@dataclass(frozen=True, slots=True)
class FleetState:
    """What is wanted of a fleet, and what it is.

    Attributes:
        nodes: what is announced, by node id.
        division: how the fleet divides rows; None before its first shard node.
        wanted, rollouts: by model; of a rollout that has ended, the last one.
        published: by model and version.
        stream_ends: the last delta by model and by the version that its stream began with, of versions in use.
        coordinator: who carries rollouts; None if nobody does.
    """

    nodes: tuple[NodeRecord, ...] = ()
    division: FleetRecord | None = None
    wanted: Mapping[str, WantedModel] = field(default_factory=dict)
    rollouts: Mapping[str, Rollout] = field(default_factory=dict)
    published: Mapping[tuple[str, int], PublishedVersion] = field(default_factory=dict)
    stream_ends: Mapping[tuple[str, int], int] = field(default_factory=dict)
    coordinator: str | None = None

    def models(self) -> list[str]:
        """List the models that anything is known of."""
        held = {report.model for node in self.nodes for report in node.versions}
        return sorted({*self.wanted, *self.rollouts, *held, *(model for model, _ in self.published)})

    def view(self, model: str) -> FleetView:
        """Return the nodes that are for a model."""
        return FleetView.of(self.nodes, self.division).for_model(model)

    def status(self, model: str, *, with_nodes: bool = True) -> RolloutStatus:
        """Return how far a model's rollout is, as `status_of`."""
        return status_of(
            model, self.rollouts.get(model), self.wanted.get(model), self.view(model), with_nodes=with_nodes
        )

    def last_delta(self, model: str, version: int) -> int | None:
        """Return the last delta of a version's stream; None if it is not published, or nothing is known of it."""
        published = self.published.get((model, version))
        return None if published is None else self.stream_ends.get((model, published.delta_base))

    def last_deltas(self) -> dict[tuple[str, int], int]:
        """Return the last delta that whoever holds a version should have applied, of versions that follow some."""
        followed = ((model, version) for model, wanted in self.wanted.items() for version in wanted.follow)
        return {one: last for one in followed if (last := self.last_delta(*one)) is not None}


async def read_fleet(fleet: FleetRegistry) -> FleetState:
    """Read it; not as of one moment, since a registry has none. Raises RegistryError."""
    # Nodes first: what they say of a version that was just wanted or published is never newer than these are.
    nodes = await fleet.nodes()
    division, wanted, published, entries, coordinator = await asyncio.gather(
        fleet.fleet(),
        fleet.wanted(),
        fleet.versions(),
        fleet.registry.entries(ROLLOUTS),
        fleet.registry.holder(COORDINATOR_LOCK),
    )
    versions = {(one.model, one.version): one for one in published}
    used = {(model, version) for model, record in wanted.items() for version in record.named()}
    bases = sorted({(model, versions[model, version].delta_base) for model, version in used & versions.keys()})
    ends = await asyncio.gather(*(fleet.registry.bounds(delta_stream(*base)) for base in bases))
    models = {key: key.removeprefix(ROLLOUTS) for key in entries}
    return FleetState(
        nodes=tuple(nodes),
        division=division,
        wanted=wanted,
        rollouts={model: decode_rollout(model, entries[key].value) for key, model in models.items()},
        published=versions,
        stream_ends={base: end.last for base, end in zip(bases, ends, strict=True)},
        coordinator=coordinator,
    )
