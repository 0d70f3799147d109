"""What tests do with the registry of a fleet of processes: publish versions, say what is desired, see who is there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from loader.registry.fleet import FleetRegistry, NodeRecord, WantedModel
from loader.snapshot.publishing import register
from loader.snapshot.reader import Snapshot
from shardrank_testing.registries import with_open


def publish(registry: Path | str, *snapshots: Path) -> None:
    """Put versions on record, where they are."""
    for path in snapshots:
        snapshot = Snapshot.open(path)
        with_open(str(registry), lambda opened, one=snapshot: register(FleetRegistry(opened), one, clock=time.time))


async def change_wanted(fleet: FleetRegistry, model: str, **changes: Any) -> WantedModel:
    """Change what is desired of a model, and return it."""

    def change(now: WantedModel | None) -> WantedModel:
        return (now or WantedModel(model=model, epoch=1)).model_copy(update=changes)

    wanted = await fleet.update_wanted(model, change)
    assert wanted is not None
    return wanted


def want(registry: Path | str, model: str, **changes: Any) -> None:
    """The same, by the URL of a registry."""
    with_open(str(registry), lambda opened: change_wanted(FleetRegistry(opened), model, **changes))


def nodes(registry: Path | str) -> dict[str, NodeRecord]:
    """Return the announced processes by their ids."""
    found = with_open(str(registry), lambda opened: FleetRegistry(opened).nodes())
    return {node.node_id: node for node in found}
