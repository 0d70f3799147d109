"""Serving processes that share one HTTP and one gRPC port."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal

from prometheus_client.multiprocess import mark_process_dead
from pydantic import ConfigDict, Field

from loader.manifest import Frozen
from serving.errors import FleetError
from serving.fleet.probes import http_probe
from serving.fleet.supervisor import ChildSpec, Probe, Supervisor, shardrank_command
from shard_node.address import MAX_UNIX_PATH_BYTES


class SharedPort(contextlib.AbstractContextManager["SharedPort"]):
    """A TCP port held for processes that will listen on it with SO_REUSEPORT.

    The socket is bound but never listens, so the kernel gives it no connection; while it is open, no other user can
    take the port, not even between the death of the last worker and its restart.

    Args:
        host: the address that the workers will bind.
        port: the wanted port; 0 for any free one.

    Raises:
        FleetError: if the port is taken.
    """

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if port:
                # With SO_REUSEPORT alone, two fleets would share it unnoticed.
                with socket.socket(family, socket.SOCK_STREAM) as probe:
                    # Connections of a server that has just ended must not keep the port from its successor.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((host, port))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            free = "; use --http-port 0 / --grpc-port 0 for free ones" if error.errno == errno.EADDRINUSE else ""
            raise FleetError(f"can't bind {host} port {port}: {error.strerror or error}{free}") from error
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Lets the port go. Idempotent."""
        self._socket.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def socket_path(directory: Path, name: str) -> Path:
    """The path of a Unix socket. Raises FleetError if it is longer than the kernel takes."""
    path = directory / name
    if (size := len(str(path).encode())) > MAX_UNIX_PATH_BYTES:
        raise FleetError(
            f"socket path {str(path)!r} has {size} bytes, at most {MAX_UNIX_PATH_BYTES} are possible; "
            "set TMPDIR to a shorter folder"
        )
    return path


def connectable_host(host: str) -> str:
    """The address at which a server that is bound to `host` answers on this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


LOOPBACK = "127.0.0.1"


class WorkersConfig(Frozen):
    """Serving processes on one port.

    Attributes:
        arguments: flags of `shardrank serve` that say what to serve, without ports.
        own_arguments: further flags of each worker; empty for none.
        environment: variables of every process.
        probes: what else each worker must say before it is ready; empty for nothing.
        workers: how many processes.
        host: address of the public ports.
        log_level: of every process.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    arguments: tuple[str, ...]
    own_arguments: tuple[tuple[str, ...], ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)
    probes: tuple[Probe, ...] = ()
    workers: int = Field(default=1, ge=1, le=64)
    host: str = LOOPBACK
    log_level: Literal["debug", "info", "warning", "error"] = "info"


@dataclass(frozen=True, slots=True)
class WorkerPorts:
    """Ports that are held for workers.

    Attributes:
        http, grpc: public, shared by all workers.
        probes: a private port on loopback for each worker. At the shared port, whichever worker the kernel picks would
            answer the question whether this one is ready.
    """

    http: int
    grpc: int
    probes: tuple[int, ...]


@contextlib.contextmanager
def held_ports(host: str, http_port: int, grpc_port: int, workers: int) -> Iterator[WorkerPorts]:
    """Holds the ports while the block runs, so that nobody else takes one between a worker's death and its restart.

    Port 0 is any free one; each worker gets a private port too. Raises FleetError if a port is taken.
    """
    with contextlib.ExitStack() as held:
        http = held.enter_context(SharedPort(host, http_port))
        grpc = held.enter_context(SharedPort(host, grpc_port))
        probes = tuple(held.enter_context(SharedPort(LOOPBACK, 0)).port for _ in range(workers))
        yield WorkerPorts(http.port, grpc.port, probes)


async def start_workers(
    config: WorkersConfig,
    ports: WorkerPorts,
    supervisor: Supervisor,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Starts the workers and returns when each of them serves. Stopping them is the supervisor's.

    Raises ChildFailedError if a worker does not come up.
    """
    metrics = supervisor.run_directory / "metrics"
    if config.workers > 1:
        metrics.mkdir(mode=0o700, exist_ok=True)
    specs = [_worker_spec(config, ports, worker, metrics) for worker in range(config.workers)]
    await supervisor.start(specs, on_ready)


def _worker_spec(config: WorkersConfig, ports: WorkerPorts, worker: int, metrics: Path) -> ChildSpec:
    probe_port = ports.probes[worker]
    own = config.own_arguments[worker] if config.own_arguments else ()
    shared_metrics = config.workers > 1
    probes = (*config.probes[worker : worker + 1], http_probe(LOOPBACK, probe_port))

    async def probe(process_id: int) -> None:
        for one in probes:
            await one(process_id)

    return ChildSpec(
        name=f"serve-{worker}",
        command=shardrank_command(
            *("--log-level", config.log_level, "serve", *config.arguments, *own, "--host", config.host),
            *("--http-port", str(ports.http), "--grpc-port", str(ports.grpc), "--probe-port", str(probe_port)),
        ),
        probe=probe,
        environment={**config.environment, **({"PROMETHEUS_MULTIPROC_DIR": str(metrics)} if shared_metrics else {})},
        # A dead process' gauges must not be added up with those of the living.
        on_exit=partial(mark_process_dead, path=str(metrics)) if shared_metrics else None,
    )
