"""A fleet on this machine: a coordinator, shard nodes on private Unix sockets, serving processes on public ports."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loader.registry.keys import COORDINATOR_LOCK
from loader.registry.opening import open_registry
from loader.registry.typed import FleetRegistry
from serving.fleet.beginning import Beginning, begin
from serving.fleet.child import Child, ChildSpec, shardrank_command
from serving.fleet.config import FleetConfig
from serving.fleet.errors import ChildFailedError
from serving.fleet.ports import connectable_host, socket_path
from serving.fleet.probes import lock_probe, node_probe
from serving.fleet.supervisor import SupervisionConfig, Supervisor
from serving.fleet.workers import WorkerPorts, WorkersConfig, held_ports, start_workers
from shard_node.address import Address

logger = logging.getLogger(__name__)

COORDINATOR = "coordinator"
REGISTRY_VARIABLE = "SHARDRANK_REGISTRY"
"""How children are told the registry: it may have a password, and anybody can read the flags of a process."""


@dataclass(frozen=True)
class LocalFleet:
    """A fleet that serves.

    Attributes:
        host, http_port, grpc_port: where it answers.
        supervisor: keeps the children running; its run directory has their sockets and logs.
        registry: open for as long as the fleet runs.
        beginnings: what it began with.
    """

    host: str
    http_port: int
    grpc_port: int
    supervisor: Supervisor
    registry: FleetRegistry
    beginnings: tuple[Beginning, ...]

    @property
    def children(self) -> dict[str, Child]:
        """The processes by name: `coordinator`, `shard-<shard>-<replica>` and `serve-<worker>`."""
        return self.supervisor.children


@contextlib.asynccontextmanager
async def running_fleet(
    config: FleetConfig,
    on_ready: Callable[[str], None] | None = None,
    held: WorkerPorts | None = None,
    on_begin: Callable[[Sequence[Beginning]], None] | None = None,
) -> AsyncIterator[LocalFleet]:
    """Starts a fleet, waits until all of it serves, and stops it when the block ends.

    Args:
        config: its shape.
        on_ready: called with a child's name when it first serves.
        held: ports that the caller holds already, a probe's for each worker; None to hold those that `config` names.
        on_begin: told what will be live, before anything is started.

    Raises:
        ChildFailedError: if a child does not come up.
        FleetError: if a port is taken, a socket path too long, or another fleet in the way.
        ShardrankError: as `begin`.
    """
    async with contextlib.AsyncExitStack() as stack:
        ports = held or stack.enter_context(held_ports(config.host, config.http_port, config.grpc_port, config.workers))
        registry = open_registry(config.registry_url)
        stack.push_async_callback(registry.close)
        fleet = FleetRegistry(registry)
        beginnings = await begin(fleet, config)
        if on_begin is not None:
            on_begin(beginnings)
        supervisor = await stack.enter_async_context(supervised(config.supervision))
        nodes = shard_node_specs(config, fleet, supervisor.run_directory)
        await supervisor.start([coordinator_spec(config, fleet, supervisor.run_directory), *nodes], on_ready)
        await start_workers(_workers(config, fleet), ports, supervisor, on_ready)
        yield LocalFleet(connectable_host(config.host), ports.http, ports.grpc, supervisor, fleet, beginnings)


@contextlib.asynccontextmanager
async def supervised(config: SupervisionConfig) -> AsyncIterator[Supervisor]:
    """A supervisor with a private run directory; all its children are stopped when the block ends.

    The directory is removed at the end, but kept when the block fails: it has the children's logs.
    """
    run_directory = Path(tempfile.mkdtemp(prefix="shardrank-"))
    supervisor = Supervisor(run_directory, config)
    try:
        try:
            yield supervisor
        finally:
            await supervisor.stop()
    except ChildFailedError:
        raise  # its message ends with the path of the log
    except Exception:
        logger.error("the logs of the child processes are kept in %s", run_directory)
        raise
    except BaseException:
        shutil.rmtree(run_directory, ignore_errors=True)
        raise
    shutil.rmtree(run_directory, ignore_errors=True)


def coordinator_spec(config: FleetConfig, fleet: FleetRegistry, run_directory: Path) -> ChildSpec:
    """The coordinator.

    Its processes, one after another, are the same owner of its lock, so that none waits for the last one's to expire.
    """
    owner = f"{COORDINATOR}-{run_directory.name}"
    return ChildSpec(
        name=COORDINATOR,
        command=shardrank_command(
            *("--log-level", config.log_level, "coordinator", "--owner", owner), *config.coordinator_arguments
        ),
        probe=lock_probe(fleet, COORDINATOR_LOCK),
        environment={REGISTRY_VARIABLE: config.registry_url},
    )


def shard_node_specs(config: FleetConfig, fleet: FleetRegistry, run_directory: Path) -> list[ChildSpec]:
    """One child for each replica of each shard. Raises FleetError if a socket's path is too long."""
    budget = () if config.memory_budget_gb is None else ("--memory-budget-gb", str(config.memory_budget_gb))
    return [
        ChildSpec(
            name=name,
            command=shardrank_command(
                *("--log-level", config.log_level, "shard-node", *_store_arguments(config), "--node-id", name),
                *("--shard", f"{shard}/{config.shards}", "--cards", str(config.cards)),
                *("--sharding", config.sharding, "--replicate-bytes", str(config.replicate_bytes)),
                *("--listen", str(Address(path=str(socket_path(run_directory, f"{name}.sock")))), *budget),
                *config.shard_node_arguments,
            ),
            probe=node_probe(fleet, name, config.models),
            environment={REGISTRY_VARIABLE: config.registry_url},
        )
        for shard, names in enumerate(config.shard_node_names)
        for name in names
    ]


def _store_arguments(config: FleetConfig) -> tuple[str, ...]:
    # A restart may come days after the first start: what the files were then says nothing about what they are now.
    models = (argument for model in config.models for argument in ("--model", model))
    return ("--store", str(config.store.resolve()), *models, "--verify" if config.verify else "--no-verify")


def _workers(config: FleetConfig, fleet: FleetRegistry) -> WorkersConfig:
    return WorkersConfig(
        arguments=(*_store_arguments(config), *config.serve_arguments),
        own_arguments=tuple(("--node-id", name) for name in config.worker_names),
        environment={REGISTRY_VARIABLE: config.registry_url},
        workers=config.workers,
        host=config.host,
        log_level=config.log_level,
        probes=tuple(node_probe(fleet, name, config.models) for name in config.worker_names),
    )
