"""A fleet on this machine: a coordinator, shard nodes on private Unix sockets, serving processes on public ports.

A registry outlives its fleets: what it says is live goes on being live. Only what it does not know yet, or what nobody
runs, is set when a fleet begins; everything after that is a rollout's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loader.registry import open_registry
from loader.registry.fleet import COORDINATOR_LOCK, FLEET, FleetRecord, FleetRegistry, NodeRecord, WantedModel
from loader.rollout.coverage import answering_version
from loader.rollout.plan import read_rollout
from loader.snapshot.publishing import fall_back, newest, register
from loader.snapshot.reader import Snapshot
from loader.snapshot.store import Store
from loader.stores import open_store
from router.plan import Plan
from serving.cli import settings
from serving.errors import FleetError
from serving.fleet.config import FleetConfig
from serving.fleet.supervisor import ChildSpec, NotYetError, RefusedError, Supervisor, configured_command, supervised
from serving.fleet.workers import Listening, reserved_ports, worker_specs
from shard_node.wire.address import Address

logger = logging.getLogger(__name__)

COORDINATOR = "coordinator"
EXPIRY_S = 5.0
"""Longer than what a node that was killed announced stays in a registry."""
_POLL_S = 0.1
_GONE = "the store has no version of it any more"


@dataclass(frozen=True, slots=True)
class Beginning:
    """One model at the start of a fleet: what is live, whether for the first time, its plan, the highest version."""

    model: str
    version: int
    is_first: bool
    plan: Plan
    latest: int


class _OccupiedError(FleetError):
    """Announced nodes are in the way."""


async def begin(
    fleet: FleetRegistry,
    config: FleetConfig,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> tuple[Beginning, ...]:
    """Make the registry ready for a fleet of this shape. Returns its models: `config.models`, or all of the store.

    Raises:
        FleetError: a fleet with these nodes runs already, nodes of another shape do, a version was asked for while
            another one is live on running nodes or in a rollout, or a rollout is over another number of shards.
        SnapshotError, PlanError: the live version can't be divided like this. Nothing was written then.
        RegistryError: it does not answer, or has another snapshot on record as that version.
    """
    # What is in the way may be nodes that were killed a moment ago, whose announcements have not expired.
    for _ in range(math.ceil(EXPIRY_S / _POLL_S)):
        with contextlib.suppress(_OccupiedError):
            return await _begin(fleet, config, clock)
        await sleep(_POLL_S)
    return await _begin(fleet, config, clock)


async def _begin(fleet: FleetRegistry, config: FleetConfig, clock: Callable[[], float]) -> tuple[Beginning, ...]:
    nodes, own = await fleet.nodes(), {*config.worker_names, *config.shard_nodes}
    if taken := sorted(node.node_id for node in nodes if node.node_id in own):
        raise _OccupiedError(
            f"a fleet with nodes {taken} runs with registry {fleet.name} already: "
            "stop it first, or give this one another --registry"
        )
    store, wanted = open_store(config.named_store), await fleet.wanted()
    found, models = [], config.models or tuple(await asyncio.to_thread(store.models))
    for model in models:
        chosen = await _choose(fleet, config, model, wanted.get(model), nodes)
        snapshot, plan = await asyncio.to_thread(_planned, store, config, models, model, chosen)
        latest, is_first = await asyncio.to_thread(store.latest, model), model not in wanted or not wanted[model].live
        found.append((snapshot, Beginning(model, snapshot.version, is_first, plan, latest)))
    has_shard_nodes = any(node.kind == "shard" for node in nodes)
    record = FleetRecord(num_shards=config.shards, sharding=config.sharding, replicate_bytes=config.replicate_bytes)
    if (present := await fleet.join_fleet(record)) != record:
        if has_shard_nodes:
            raise _OccupiedError(
                f"registry {fleet.name}: shard nodes run with {present.model_dump()}, not {record.model_dump()}"
            )
        # That of a fleet that does not run any more is replaced.
        entry = await fleet.registry.get(FLEET)
        await fleet.registry.put(FLEET, record.model_dump_json().encode(), 0 if entry is None else entry.revision)
    for model in () if config.models or nodes else sorted(wanted.keys() - {*models}):
        logger.warning("%s is not served: %s", model, _GONE)
        await fleet.update_wanted(model, lambda now: now and now.replaced(now.live, None, _GONE))
    # Where no shard node runs all of them are about to be of this number of shards.
    shards = None if has_shard_nodes else config.shards
    for snapshot, one in found:
        await register(fleet, snapshot, clock=clock, store=config.named_store)
        await fleet.update_wanted(one.model, partial(_first_wanted, one.model, one.version, shards))
    return tuple(one for _, one in found)


def _planned(
    store: Store, config: FleetConfig, models: Sequence[str], model: str, version: int | None
) -> tuple[Snapshot, Plan]:
    """Read what divides a version, None for the newest that can be read; children fetch and check what they load."""
    file = settings.read_plan(config, models)
    readable = newest(config.named_store, model) if version is None else None
    version = version if readable is None else readable.version
    with store.hold(model, version, with_rows=False, verify=False) as held:
        snapshot = Snapshot.open(held.path, verify=False, rows_here=isinstance(config.named_store, Path))
        return snapshot, settings.plan_of(config, file, config.shards, snapshot)


async def _choose(
    fleet: FleetRegistry, config: FleetConfig, model: str, wanted: WantedModel | None, nodes: list[NodeRecord]
) -> int | None:
    """Choose the version that a model begins with, None for the newest. Raises FleetError."""
    last = await read_rollout(fleet, model)
    rollout = last.rollout if last is not None and last.rollout.active else None
    numbers = () if rollout is None else (rollout.from_shards, rollout.to_shards)
    if rollout is not None and (other := {*numbers} - {None, config.shards}):
        raise FleetError(
            f"{model!r}: the rollout of version {rollout.to_version} has not ended and is over {other.pop()} shards: "
            "start with so many until it has"
        )
    asked = config.versions.get(model)
    live = None if wanted is None else wanted.live
    if live is None or asked == live:
        return asked
    if asked is None:
        return live
    hint = f"start without a version, then: shardrank rollout start {model} {asked}"
    if nodes:
        raise _OccupiedError(f"version {asked} of {model!r}: nodes run and have version {live} live; {hint}")
    if rollout is not None:
        raise FleetError(f"version {asked} of {model!r}: a rollout from version {live} has not ended; {hint}")
    return asked


def _first_wanted(model: str, version: int, shards: int | None, record: WantedModel | None) -> WantedModel | None:
    """Wants a version where nothing is live yet, or by nobody who runs; None to leave what is wanted as it is.

    It is divided over `shards`, if that is for whoever starts to say.
    """
    if record is not None and record.live == version:
        # What nobody said is true of whichever nodes there are.
        return record.divided(shards) if shards is not None and record.num_shards else None
    only = (version,)
    # The epoch is set by who writes it.
    wanted = WantedModel(model=model, epoch=1, live=version, hold=only, serve=only, follow=only)
    return wanted if shards is None else wanted.divided(shards)


class GiveWay:
    """Has versions that nodes of a fleet refuse at its start give way to the store's next older ones.

    Only of models of which nobody has named a version, and none was live before: what was rolled out, people take back.
    """

    def __init__(self, fleet: FleetRegistry, config: FleetConfig, begun: Sequence[Beginning]) -> None:
        self._fleet, self._config = fleet, config
        self._models = {one.model for one in begun if one.is_first} - config.versions.keys()
        # Nodes refuse at once.
        self._lock = asyncio.Lock()
        self.is_over = False

    async def __call__(self, model: str, version: int, reason: str) -> bool:
        """Return whether another version is expected now, or none of that model since others are served."""
        async with self._lock:
            wanted, last = await self._fleet.wanted(), await read_rollout(self._fleet, model)
            is_rolling = last is not None and last.rollout.active
            # A lack of memory says nothing about the version.
            is_bad = reason.startswith(("Snapshot", "RankingModelError"))
            if self.is_over or is_rolling or not is_bad or model not in self._models:
                return False
            if wanted[model].live == version:
                if any(node.live.get(model) == version for node in await self._fleet.nodes()):
                    return False
                await fall_back(self._fleet, self._config.named_store, wanted[model], reason)
            now = await self._fleet.wanted()
        return now[model].live is not None or (not self._config.models and any(one.live for one in now.values()))


async def ask_node(
    fleet: FleetRegistry, node_id: str, models: Sequence[str], process_id: int, give_way: GiveWay | None = None
) -> None:
    """Raise NotYetError or RefusedError unless a node announces that it has the live version of each model.

    A `Probe` of `process_id`. No models stand for all; one of which no version is live yet asks for nothing.
    """
    announced = {node.node_id: node for node in await fleet.nodes() if node.process_id == process_id}
    if node_id not in announced:
        raise NotYetError(f"{node_id} has not announced itself yet")
    record = announced[node_id]
    for model, wanted in (await fleet.wanted()).items():
        version = wanted.live
        if record.kind == "shard":
            version = answering_version(wanted, record.node_id, record.num_shards)
        if (models and model not in models) or version is None:
            continue
        report = record.report(model, version)
        if report is not None and report.state == "refused":
            if give_way is not None and await give_way(model, version, report.reason):
                raise NotYetError(f"version {version} of {model!r} gives way")
            raise RefusedError(f"version {version} of {model!r}: {report.reason}")
        if report is None or report.state != "ready":
            state = "not loaded yet" if report is None else f"{report.state} {report.reason}".rstrip()
            raise NotYetError(f"version {version} of {model!r} is {state}")
        if record.kind == "serving" and record.live.get(model) != version:
            raise NotYetError(f"version {version} of {model!r} is not live yet")


async def ask_coordinator(fleet: FleetRegistry, process_id: int) -> None:
    """Find out whether anybody coordinates: a process that stands by is as good as the one that does. A `Probe`."""
    if await fleet.registry.holder(COORDINATOR_LOCK) is None:
        raise NotYetError("no coordinator leads yet")


@dataclass(frozen=True)
class LocalFleet:
    """A fleet that serves: `coordinator`, `shard-<shard>-<replica>` and `serve-<worker>`, with an open registry."""

    supervisor: Supervisor
    registry: FleetRegistry
    ports: Listening


@contextlib.asynccontextmanager
async def running_fleet(
    config: FleetConfig,
    on_ready: Callable[[str], None] = lambda name: None,
    reserved: Listening | None = None,
    on_begin: Callable[[Sequence[Beginning]], None] = lambda beginnings: None,
) -> AsyncIterator[LocalFleet]:
    """Start a fleet, wait until all of it serves, and stop it when the block ends.

    `on_ready` is told each child that first serves, `on_begin` what will be live, before anything is started. The
    caller may hold the ports already.

    Raises:
        FleetError: a child does not come up, a port is taken, or another fleet in the way.
        ConfigError: a socket's path is too long.
        ShardrankError: as `begin`.
    """
    async with contextlib.AsyncExitStack() as stack:
        ports = reserved or stack.enter_context(reserved_ports(config, config.workers))
        registry = open_registry(config.registry_url)
        stack.push_async_callback(registry.close)
        fleet = FleetRegistry(registry)
        begun = await begin(fleet, config)
        on_begin(begun)
        give_way = GiveWay(fleet, config, begun)
        supervisor = await stack.enter_async_context(supervised(config.supervision, config.log_dir))
        folder = supervisor.run_directory
        # A coordinator's processes, one after another, are the same owner of its lock: none waits for it to expire.
        owner = config.coordinator_config(f"{COORDINATOR}-{folder.name}")
        command = configured_command("coordinator", owner, folder / f"{COORDINATOR}.toml")
        specs = [ChildSpec(COORDINATOR, command, partial(ask_coordinator, fleet), config.environment)]
        for name in config.shard_nodes:
            node = config.shard_node_config(name, str(Address.parse(f"unix:{folder / name}.sock")))
            command = configured_command("shard-node", node, folder / f"{name}.toml")
            probe = partial(ask_node, fleet, name, config.models, give_way=give_way)
            specs.append(ChildSpec(name, command, probe, config.environment))
        await supervisor.start(specs, on_ready)
        workers = [config.serve_config(name) for name in config.worker_names]
        probes = [partial(ask_node, fleet, name, config.models, give_way=give_way) for name in config.worker_names]
        await supervisor.start(worker_specs(folder, ports, workers, config.environment, probes), on_ready)
        give_way.is_over = True
        yield LocalFleet(supervisor, fleet, ports)
