"""What a fleet on this machine begins with: its record, and a live version of each model.

A registry outlives the fleets that use it. What it says is live goes on being live; only what it does not know yet, or
what nobody runs, is set here. Everything after that is a rollout's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from loader.publishing import register
from loader.reader import Snapshot
from loader.registry.keys import FLEET, rollout_key
from loader.registry.records import FleetRecord, NodeRecord, WantedModel
from loader.registry.typed import FleetRegistry
from loader.rollout.record import decode_rollout
from loader.store import Store
from router.plan import Plan
from serving.fleet.config import FleetConfig
from serving.fleet.errors import FleetError

EXPIRY_S = 5.0
"""Longer than what a node that was killed announced stays in a registry."""
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Beginning:
    """One model at the start of a fleet.

    Attributes:
        model, version: what is live.
        plan: who holds which of its rows.
        latest: the store's highest version, which may be another one.
    """

    model: str
    version: int
    plan: Plan
    latest: int


async def begin(
    fleet: FleetRegistry,
    config: FleetConfig,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> tuple[Beginning, ...]:
    """Makes the registry ready for a fleet of this shape.

    Returns:
        The models, in the order of `config.models`.

    Raises:
        FleetError: a fleet with these nodes runs already, nodes of another shape do, or a version was asked for while
            another one is live on running nodes, or in a rollout.
        SnapshotError, PlanError: the live version can't be divided like this. Nothing was written then.
        RegistryError: it does not answer, or has another snapshot on record as that version.
    """
    waited_s = 0.0
    while True:
        try:
            return await _begin(fleet, config, await fleet.nodes(), clock)
        except _OccupiedError:
            # Perhaps by nodes that were killed a moment ago: what they announced has not expired.
            if waited_s >= EXPIRY_S:
                raise
        await sleep(_POLL_S)
        waited_s += _POLL_S


class _OccupiedError(FleetError):
    """Announced nodes are in the way."""


async def _begin(
    fleet: FleetRegistry, config: FleetConfig, nodes: list[NodeRecord], clock: Callable[[], float]
) -> tuple[Beginning, ...]:
    own = {*config.worker_names, *(name for names in config.shard_node_names for name in names)}
    if taken := sorted(node.node_id for node in nodes if node.node_id in own):
        raise _OccupiedError(
            f"a fleet with nodes {taken} runs with registry {fleet.name} already: "
            "stop it first, or give this one another --registry"
        )
    store, wanted = Store(config.store), await fleet.wanted()
    found = []
    for model in config.models:
        chosen = await _choose(fleet, config, model, wanted.get(model), nodes)
        snapshot = await asyncio.to_thread(Snapshot.open, store.snapshot_path(model, chosen), verify=False)
        plan = Plan.make(snapshot.spec, config.shards, config.sharding, config.cards, config.replicate_bytes)
        found.append((snapshot, Beginning(model, chosen, plan, store.latest(model))))
    await _write_fleet_record(fleet, config, nodes)
    for snapshot, one in found:
        await register(fleet, snapshot, clock=clock)
        await fleet.update_wanted(one.model, partial(_first_wanted, one.model, one.version))
    return tuple(one for _, one in found)


async def _choose(
    fleet: FleetRegistry, config: FleetConfig, model: str, wanted: WantedModel | None, nodes: list[NodeRecord]
) -> int:
    """The version that a model begins with. Raises FleetError or SnapshotNotFoundError."""
    asked = config.versions.get(model)
    live = None if wanted is None else wanted.live
    if live is None or asked == live:
        return Store(config.store).latest(model) if asked is None else asked
    if asked is None:
        return live
    hint = f"start without a version, then: shardrank rollout start {model} {asked}"
    if nodes:
        raise _OccupiedError(f"version {asked} of {model!r}: nodes run and have version {live} live; {hint}")
    if await _is_rolling_out(fleet, model):
        raise FleetError(f"version {asked} of {model!r}: a rollout from version {live} has not ended; {hint}")
    return asked


async def _is_rolling_out(fleet: FleetRegistry, model: str) -> bool:
    entry = await fleet.raw(rollout_key(model))
    return entry is not None and decode_rollout(model, entry.value).active


def _first_wanted(model: str, version: int, record: WantedModel | None) -> WantedModel | None:
    """What is wanted where nothing is live yet, or by nobody who runs; None to leave what is wanted as it is."""
    if record is not None and record.live == version:
        return None
    only = (version,)
    # The epoch is set by who writes it.
    return WantedModel(model=model, epoch=1, live=version, hold=only, serve=only, follow=only)


async def _write_fleet_record(fleet: FleetRegistry, config: FleetConfig, nodes: list[NodeRecord]) -> None:
    """Puts the shape on record; one of a fleet that does not run any more is replaced."""
    record = FleetRecord(num_shards=config.shards, sharding=config.sharding, replicate_bytes=config.replicate_bytes)
    present = await fleet.join_fleet(record)
    if present == record:
        return
    if any(node.kind == "shard" for node in nodes):
        raise _OccupiedError(
            f"registry {fleet.name}: shard nodes run with {present.model_dump()}, not {record.model_dump()}"
        )
    entry = await fleet.registry.get(FLEET)
    await fleet.registry.put(FLEET, record.model_dump_json().encode(), 0 if entry is None else entry.revision)
