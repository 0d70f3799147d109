"""A fleet on a Ray cluster: what runs is a fleet's description, Ray says where, and starts again what ended.

Each process is the child of an actor and ends with it; the actor ends with its child, so that Ray restarts both, on
another host if theirs is lost. The nodes of a shard, and the serving processes, have a placement group each that keeps
them on hosts of their own. Who is where is told by the registry, as everywhere.

Actors import this file in processes of their own, so nothing heavy stands at its top; and Ray is imported here alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from loader.errors import RegistryError
from loader.progress import all_or_first_error
from serving.errors import FleetError
from serving.fleet.supervisor import Child, ChildSpec, NotYetError, RefusedError, describe_exit, shardrank_command
from serving.settings import write_private

if TYPE_CHECKING:
    from loader.registry.fleet import FleetRegistry
    from serving.fleet.config import FleetConfig
    from serving.fleet.local_fleet import Beginning, GiveWay

logger = logging.getLogger(__name__)

HOST: Final = "{host}"
"""Stands in the settings of a process for the address of the host that Ray places it on."""
STOP_GRACE_S = 20.0
READY_TIMEOUT_S = 600.0
_HEALTHY_AFTER_S = 30.0
_PAUSE_S = 1.0
"""Before the end of an actor whose child did not live for long: nothing else would slow Ray's restarts down."""
_LOOK_S = 0.2
_CALL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class PlacedProcess:
    """One process: the command of `shardrank`, its settings as TOML, in which HOST may stand, and its claims."""

    name: str
    command: str
    settings: str
    claims: Mapping[str, float]


Groups: TypeAlias = Mapping[str, Sequence[PlacedProcess]]
"""Processes by group, such as the replicas of a shard; those of one group need a host each."""


def groups_of(config: FleetConfig) -> Groups:
    """Return what runs: a coordinator, a group for each shard, and one of the serving processes."""
    from shard_node.cuda.card_set import DeviceChoice

    # Ray shows an actor the GPUs that were set aside for it, and no others.
    device, any_host = DeviceChoice.parse(config.device), {"CPU": config.cpus}
    node = any_host | ({"GPU": float(len(device.devices) or config.cards)} if device.kind == "cuda" else {})
    node |= {} if config.max_memory_gb is None else {"memory": config.max_memory_gb * 1e9}
    coordinator = config.coordinator_config("coordinator-on-ray")
    groups: dict[str, list[PlacedProcess]] = {
        "coordinator": [PlacedProcess("coordinator-0", "coordinator", coordinator.to_toml(), any_host)]
    }
    for name in config.shard_nodes:
        settings = config.shard_node_config(name, f"{HOST}:0").to_toml()
        groups.setdefault(_group_of(name), []).append(PlacedProcess(name, "shard-node", settings, node))
    groups["serve"] = [
        PlacedProcess(name, "serve", config.serve_config(name).to_toml(), any_host) for name in config.worker_names
    ]
    return groups


def check_hosts(groups: Groups, hosts: Sequence[Mapping[str, float]]) -> None:
    """Raise FleetError if a group has more processes than there are hosts with what each of them claims."""
    for name, processes in groups.items():
        claims = processes[0].claims
        able = sum(all(host.get(resource, 0.0) >= amount for resource, amount in claims.items()) for host in hosts)
        if able < len(processes):
            needs = ", ".join(f"{amount:g} {resource}" for resource, amount in claims.items())
            raise FleetError(
                f"{name}: {len(processes)} processes need as many hosts with {needs} each; of the {len(hosts)} hosts "
                f"of the Ray cluster {able} have that"
            )


def missing_of(groups: Groups, running: Collection[str]) -> Groups:
    """Return the groups that do not run. Raises FleetError for one that runs with other processes."""
    missing = {}
    for group, processes in groups.items():
        there, expected = (
            {name for name in running if _group_of(name) == group},
            {process.name for process in processes},
        )
        if there and there != expected:
            raise FleetError(
                f"{group} runs as {sorted(there)}, asked for is {sorted(expected)}: a group keeps its size while its "
                "fleet runs; see shardrank down"
            )
        if not there:
            missing[group] = processes
    return missing


def shards_of(name: str) -> int | None:
    """Return the number of shards of which a process of that name holds one; None if it is no shard node."""
    found = re.fullmatch(r"shard-\d+-of-(\d+)-\d+", name)
    return None if found is None else int(found[1])


def _group_of(name: str) -> str:
    return name.rpartition("-")[0]


class RayProcess:
    """The actor: starts one process, and ends with it so that Ray restarts both. Its methods are called by `up`."""

    def __init__(self, name: str, command: str, settings: str) -> None:
        # This host's address in the cluster, and the folder of Ray's logs, to which ours go.
        host: str = _imported("ray.util").get_node_ip_address()
        folder = Path(_imported("ray._private.worker")._global_node.get_logs_dir_path())
        self._settings = tempfile.TemporaryDirectory(prefix="shardrank-")
        file = Path(self._settings.name) / f"{name}.toml"
        write_private(file, settings.replace(HOST, host))
        arguments = shardrank_command(command, "--config", str(file))
        spec = ChildSpec(name, arguments, _nobody_asks, {"PYTHONUNBUFFERED": "1"})
        self._child = Child(spec, folder / f"shardrank-{name}.log")
        self._failure: str | None = None
        self._is_stopping = False
        self._loop = asyncio.new_event_loop()
        # The kernel ends a child with the thread that started it: this one lives as long as the child.
        threading.Thread(target=self._loop.run_until_complete, args=(self._live(),), daemon=True).start()

    def look(self) -> tuple[int | None, str | None]:
        """Return the process id of the child, None while there is none, and why the child has ended, if it has."""
        return self._child.pid, self._failure

    def stop(self, grace_s: float) -> None:
        """End the child in order; returns when it has ended."""
        self._is_stopping = True
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._child.stop(grace_s), self._loop).result()
        self._settings.cleanup()

    async def _live(self) -> None:
        started = time.monotonic()
        try:
            await self._child.spawn()
            code = await self._child.wait()
            self._failure = str(self._child.failure(f"ended with {describe_exit(code)}"))
        except OSError as error:
            self._failure = f"{self._child.spec.name} can't be started: {error}"
        if not self._is_stopping:
            await asyncio.sleep(0 if time.monotonic() - started > _HEALTHY_AFTER_S else _PAUSE_S)
            self._settings.cleanup()
            # Not an orderly exit: after that Ray would not restart it.
            os._exit(1)
        # What `stop` waits for is answered by this loop.
        await asyncio.sleep(STOP_GRACE_S)


async def _nobody_asks(process_id: int) -> None:
    raise NotYetError


def _imported(name: str) -> Any:
    """Import a module of Ray. Raises FleetError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise FleetError(f"Ray can't be imported ({error}): pip install 'shardrank[ray]'") from error


@contextlib.contextmanager
def connected(address: str | None, registry_name: str, *, detached: bool = False) -> Iterator[RayCluster]:
    """Connect to a Ray cluster while the block runs. A fleet's actors have the namespace `shardrank <its registry>`.

    `address` is None for that of RAY_ADDRESS, or the one that runs on this machine. What is started is ended with the
    block, unless it is `detached`. Raises FleetError if Ray is not installed, or no cluster answers.
    """
    # Nothing is told to the makers of Ray.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = _imported("ray")
    namespace, on_sigterm = f"shardrank {registry_name}", signal.getsignal(signal.SIGTERM)
    where = address or "RAY_ADDRESS, nor on this machine"
    if address is not None:
        # Where nothing listens Ray would try for minutes.
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise FleetError(f"address {address!r} is not HOST:PORT of a Ray cluster, such as 10.0.0.1:6379")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CALL_TIMEOUT_S).close()
        except (OSError, OverflowError) as error:
            raise FleetError(f"no Ray cluster answers at {address}: {error}") from error
    try:
        ray.init(address or "auto", namespace=namespace, log_to_driver=False, logging_level="ERROR")
    # RuntimeError: its Python or Ray is of another version.
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise FleetError(f"no Ray cluster can be used at {where}: {error}") from error
    if threading.current_thread() is threading.main_thread():
        # Ray's would exit, and leave a fleet that is not detached to be killed.
        signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield RayCluster(detached)
    finally:
        ray.shutdown()


class RayCluster:
    """A cluster that this process is connected to, and what of one fleet runs there; `connected` makes one."""

    def __init__(self, detached: bool) -> None:
        self._ray = _imported("ray")
        self._lifetime = "detached" if detached else None
        # An actor that is not detached ends with the last reference to it.
        self._actors: list[Any] = []

    def names(self) -> list[str]:
        """Return the names of the processes that run, or are about to be started again."""
        return sorted(self._ray.util.list_named_actors())

    def hosts(self) -> list[dict[str, float]]:
        """Return what each host that is up has in all."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def start(self, group: str, processes: Sequence[PlacedProcess]) -> None:
        """Have a group started; that its hosts are found, and its processes run, is not waited for."""
        bundles = [dict(process.claims) for process in processes]
        placement = self._ray.util.placement_group(bundles, "STRICT_SPREAD", name=group, lifetime=self._lifetime)
        actor = self._ray.remote(RayProcess)
        for index, process in enumerate(processes):
            options = actor.options(
                name=process.name,
                lifetime=self._lifetime,
                num_cpus=process.claims["CPU"],
                num_gpus=process.claims.get("GPU", 0),
                memory=process.claims.get("memory"),
                max_restarts=-1,
                scheduling_strategy=self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    placement, index
                ),
            )
            self._actors.append(options.remote(process.name, process.command, process.settings))

    async def look(self, name: str) -> tuple[int, str | None]:
        """Return `RayProcess.look` of a process that runs, or has just ended. Raises NotYetError."""
        process_id, failure = await self._call(name, "look", _CALL_TIMEOUT_S)
        if process_id is None and failure is None:
            raise NotYetError("its process was not started yet")
        return process_id or 0, failure

    async def end(self, names: Sequence[str]) -> None:
        """End processes in order, all at once, and give back what was set aside for groups of which nothing is left."""
        await asyncio.gather(*map(self._end, names))
        left = {_group_of(name) for name in self.names() if name not in names}
        for group in {_group_of(name) for name in names} - left:
            with contextlib.suppress(ValueError):  # there is none of that name
                self._ray.util.remove_placement_group(self._ray.util.get_placement_group(group))

    async def _end(self, name: str) -> None:
        with contextlib.suppress(NotYetError):
            await self._call(name, "stop", STOP_GRACE_S + _CALL_TIMEOUT_S, STOP_GRACE_S)
        with contextlib.suppress(ValueError):
            await asyncio.to_thread(self._ray.kill, self._ray.get_actor(name), no_restart=True)

    async def _call(self, name: str, method: str, timeout_s: float, *arguments: object) -> Any:
        def call() -> Any:
            actor = self._ray.get_actor(name)
            return self._ray.get(getattr(actor, method).remote(*arguments), timeout=timeout_s)

        try:
            return await asyncio.to_thread(call)
        except self._ray.exceptions.GetTimeoutError:
            raise NotYetError("Ray has not placed it, or its host does not answer") from None
        except (self._ray.exceptions.RayActorError, ValueError) as error:
            raise NotYetError(f"its actor does not run: {error}") from error


@dataclass(frozen=True)
class RayFleet:
    """A fleet that serves.

    Attributes:
        addresses: at which its serving processes say that they are reached.
        ended: processes that were needed no more.
        earlier: by model, another number of shards that its live version is divided over until a rollout.
    """

    registry: FleetRegistry
    addresses: tuple[str, ...]
    ended: tuple[str, ...]
    earlier: Mapping[str, int]


@contextlib.asynccontextmanager
async def fleet_on_ray(
    config: FleetConfig,
    on_ready: Callable[[str], None] = lambda name: None,
    on_begin: Callable[[Sequence[Beginning]], None] = lambda beginnings: None,
) -> AsyncIterator[RayFleet]:
    """Start a fleet, wait until all of it serves, and end it with the block, unless it is detached.

    Arguments are as those of `running_fleet`. Of a fleet that runs already, what is missing is started: shard nodes of
    another number of shards beside those that are there, for versions that are rolled out from then on. Nodes of a
    number that no wanted version is divided over any more are ended.

    Raises:
        FleetError: no cluster answers or it has too few hosts, or another fleet is in the way.
        RolloutError: the number of shards is another one, and a rollout is running.
        FleetError: a process does not come up. What was started is ended then.
        ShardrankError: as `local_fleet.begin`.
    """
    from loader.registry import open_registry
    from loader.registry.fleet import FleetRegistry
    from serving.fleet.local_fleet import GiveWay, begin

    registry = open_registry(config.registry_url)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(registry.close)
        fleet = FleetRegistry(registry)
        cluster = stack.enter_context(connected(config.address, fleet.name, detached=config.detached))
        running = set(cluster.names())
        groups = groups_of(config)
        check_hosts(groups, cluster.hosts())
        missing = missing_of(groups, running)
        give_way = None
        if not running:
            on_begin(begun := await begin(fleet, config))
            give_way = GiveWay(fleet, config, begun)
        elif not config.detached:
            raise FleetError(f"the fleet of {fleet.name} runs already; --detach adds to it what is missing")
        else:
            await _divide_anew(fleet, config)
        started = [process.name for processes in missing.values() for process in processes]
        try:
            for group, processes in missing.items():
                cluster.start(group, processes)
            waiting = [_until_ready(cluster, fleet, config, name, on_ready, give_way) for name in started]
            await all_or_first_error(waiting)
        except BaseException:
            await end_in_order(cluster, started)
            raise
        wanted = (await fleet.wanted()).values()
        numbers = {config.shards}.union(*(one.num_shards.values() for one in wanted))
        unused = [name for name in sorted(running) if shards_of(name) not in {None, *numbers}]
        await end_in_order(cluster, unused)
        live = {one.model: one.num_shards.get(one.live or 0, config.shards) for one in wanted}
        try:
            yield RayFleet(
                fleet,
                tuple(node.address for node in await fleet.nodes() if node.kind == "serving"),
                tuple(unused),
                {model: number for model, number in live.items() if number != config.shards},
            )
        finally:
            if not config.detached:
                await end_in_order(cluster, cluster.names())


async def _divide_anew(fleet: FleetRegistry, config: FleetConfig) -> None:
    """Have further versions of a running fleet divided as `config` says. Raises FleetError, RolloutError."""
    from loader.registry.fleet import FleetRecord
    from loader.rollout.requests import reshard

    asked = FleetRecord(num_shards=config.shards, sharding=config.sharding, replicate_bytes=config.replicate_bytes)
    there = await fleet.join_fleet(asked)
    if there == asked:
        return
    if there.model_copy(update={"num_shards": config.shards}) != asked:
        raise FleetError(f"the fleet of {fleet.name} runs with {there.model_dump()}: only num_shards can change")
    if config.plan_file is not None:
        raise FleetError(
            f"--plan {config.plan_file}: is for one number of shards, the fleet of {fleet.name} is about to have two: "
            "leave it out; a snapshot carries its own plan"
        )
    await reshard(fleet, config.shards)


async def end_in_order(cluster: RayCluster, names: Sequence[str]) -> None:
    """End serving processes first, so that no request meets shard nodes that are gone."""
    serving = [name for name in names if _group_of(name) == "serve"]
    for some in (serving, [name for name in names if name not in serving]):
        if some:
            await cluster.end(some)


async def _until_ready(
    cluster: RayCluster,
    fleet: FleetRegistry,
    config: FleetConfig,
    name: str,
    on_ready: Callable[[str], None],
    give_way: GiveWay | None,
) -> None:
    """Wait until a process serves. Raises FleetError if it ends before, or in vain."""
    from serving.fleet.local_fleet import ask_coordinator, ask_node

    deadline, reason = time.monotonic() + READY_TIMEOUT_S, ""
    while time.monotonic() < deadline:
        try:
            process_id, failure = await cluster.look(name)
            if failure is not None:
                raise FleetError(failure, kind="child_failed")
            if _group_of(name) == "coordinator":
                await ask_coordinator(fleet, process_id)
            else:
                await ask_node(fleet, name, config.models, process_id, give_way)
        except (NotYetError, RegistryError) as not_ready:
            reason = str(not_ready)
            await asyncio.sleep(_LOOK_S)
        except RefusedError as refused:
            raise FleetError(f"{name} does not serve: {refused}", kind="child_failed") from None
        else:
            on_ready(name)
            return
    raise FleetError(f"{name} was not ready within {READY_TIMEOUT_S:g} s: {reason}", kind="child_failed")
