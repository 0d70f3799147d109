"""A whole fleet on this machine: shard nodes on private Unix sockets, serving processes on one public port."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from serving.fleet.child import Child, ChildSpec, shardrank_command
from serving.fleet.config import FleetConfig
from serving.fleet.errors import ChildFailedError
from serving.fleet.ports import connectable_host, socket_path
from serving.fleet.probes import shard_node_probe
from serving.fleet.supervisor import SupervisionConfig, Supervisor
from serving.fleet.workers import WorkerPorts, WorkersConfig, held_ports, start_workers
from shard_node.address import Address

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalFleet:
    """A fleet that serves.

    Attributes:
        host, http_port, grpc_port: where it answers.
        supervisor: keeps the children running; its run directory has their sockets and logs.
    """

    host: str
    http_port: int
    grpc_port: int
    supervisor: Supervisor

    @property
    def children(self) -> dict[str, Child]:
        """The processes by name: `shard-<shard>-<replica>` and `serve-<worker>`."""
        return self.supervisor.children


@contextlib.asynccontextmanager
async def running_fleet(
    config: FleetConfig, on_ready: Callable[[str], None] | None = None, held: WorkerPorts | None = None
) -> AsyncIterator[LocalFleet]:
    """Starts a fleet, waits until all of it serves, and stops it when the block ends.

    Args:
        config: its shape.
        on_ready: called with a child's name when it first serves.
        held: ports that the caller holds already, a probe's for each worker; None to hold those that `config` names.

    Raises:
        ChildFailedError: if a child does not come up.
        FleetError: if a port is taken or a socket path too long.
    """
    workers = config.workers
    with contextlib.ExitStack() as stack:
        ports = held or stack.enter_context(held_ports(config.host, config.http_port, config.grpc_port, workers))
        async with supervised(config.supervision) as supervisor:
            addresses = shard_addresses(config, supervisor.run_directory)
            await supervisor.start(shard_node_specs(config, addresses), on_ready)
            serve = WorkersConfig(
                arguments=(*_worker_arguments(config, addresses), *config.serve_arguments),
                workers=workers,
                host=config.host,
                log_level=config.log_level,
            )
            await start_workers(serve, ports, supervisor, on_ready)
            yield LocalFleet(connectable_host(config.host), ports.http, ports.grpc, supervisor)


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


def shard_addresses(config: FleetConfig, run_directory: Path) -> list[list[Address]]:
    """The socket of each replica of each shard. Raises FleetError if a path is too long."""
    return [
        [
            Address(path=str(socket_path(run_directory, f"shard-{shard}-{replica}.sock")))
            for replica in range(config.replicas)
        ]
        for shard in range(config.shards)
    ]


def shard_node_specs(config: FleetConfig, addresses: list[list[Address]]) -> list[ChildSpec]:
    """One child for each replica of each shard."""
    budget = () if config.memory_budget_gb is None else ("--memory-budget-gb", str(config.memory_budget_gb))
    return [
        ChildSpec(
            name=f"shard-{shard}-{replica}",
            command=shardrank_command(
                *("--log-level", config.log_level, "shard-node", *_snapshot_arguments(config)),
                *("--shard", f"{shard}/{config.shards}", "--cards", str(config.cards)),
                *("--sharding", config.sharding, "--replicate-bytes", str(config.replicate_bytes)),
                *("--listen", str(address), *budget),
            ),
            probe=shard_node_probe(address, config.model, config.version),
        )
        for shard, replicas in enumerate(addresses)
        for replica, address in enumerate(replicas)
    ]


def _snapshot_arguments(config: FleetConfig) -> tuple[str, ...]:
    # A restart may come days after the first start: what the files were then says nothing about what they are now.
    return ("--snapshot", str(config.snapshot), "--verify" if config.verify else "--no-verify")


def _worker_arguments(config: FleetConfig, addresses: list[list[Address]]) -> tuple[str, ...]:
    shards = (
        argument for replicas in addresses for argument in ("--shard", ",".join(str(address) for address in replicas))
    )
    return (
        *(*_snapshot_arguments(config), *shards),
        *("--sharding", config.sharding, "--replicate-bytes", str(config.replicate_bytes)),
    )
