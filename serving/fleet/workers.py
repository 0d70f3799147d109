"""Serving processes that share one HTTP and one gRPC port."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
from prometheus_client.multiprocess import mark_process_dead

from serving.errors import FleetError
from serving.fleet.supervisor import ChildSpec, NotYetError, Probe, shardrank_command

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def shared_port(host: str, port: int) -> Iterator[int]:
    """Holds a TCP port, 0 for any free one, for processes that will listen on it with SO_REUSEPORT. Gives its number.

    The socket is bound but never listens, so the kernel gives it no connection; while it is open, no other user can
    take the port, not even between the death of the last worker and its restart.

    Raises:
        FleetError: if the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as held:
        try:
            if port:
                # With SO_REUSEPORT alone, two fleets would share it unnoticed.
                with socket.socket(family, socket.SOCK_STREAM) as probe:
                    # Connections of a server that has just ended must not keep the port from its successor.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((host, port))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind((host, port))
        except OSError as error:
            free = "; use --http-port 0 / --grpc-port 0 for free ones" if error.errno == errno.EADDRINUSE else ""
            raise FleetError(f"can't bind {host} port {port}: {error.strerror or error}{free}") from error
        yield held.getsockname()[1]


def connectable_host(host: str) -> str:
    """The address at which a server that is bound to `host` answers on this machine."""
    return {"0.0.0.0": LOOPBACK, "::": "::1", "": LOOPBACK}.get(host, host)


@dataclass(frozen=True, slots=True)
class WorkerPorts:
    """Ports that are held for workers.

    Attributes:
        host: address of the public ports.
        http, grpc: public, shared by all workers.
        probes: a private port on loopback for each worker. At the shared port, whichever worker the kernel picks would
            answer the question whether this one is ready.
    """

    host: str
    http: int
    grpc: int
    probes: tuple[int, ...]


@contextlib.contextmanager
def held_ports(host: str, http_port: int, grpc_port: int, workers: int) -> Iterator[WorkerPorts]:
    """Holds the ports, and a private one for each worker, while the block runs; 0 is any free one.

    Raises FleetError if a port is taken.
    """
    with contextlib.ExitStack() as held:
        http = held.enter_context(shared_port(host, http_port))
        grpc = held.enter_context(shared_port(host, grpc_port))
        probes = tuple(held.enter_context(shared_port(LOOPBACK, 0)) for _ in range(workers))
        yield WorkerPorts(host, http, grpc, probes)


def worker_specs(
    run_directory: Path,
    ports: WorkerPorts,
    arguments: Sequence[Sequence[str]],
    log_level: str,
    environment: Mapping[str, str],
    probes: Sequence[Probe] = (),
) -> list[ChildSpec]:
    """One child for each probe port; what several workers count is added up by files in `run_directory`.

    Args:
        run_directory: of their supervisor.
        ports: held for as long as they run.
        arguments: of each worker, flags of `shardrank serve` that say what to serve, without ports.
        log_level: of each.
        environment: variables of each.
        probes: what else each worker must say before it is ready; empty for nothing.
    """
    on_exit = None
    if len(ports.probes) > 1:
        metrics = run_directory / "metrics"
        metrics.mkdir(mode=0o700, exist_ok=True)
        environment = {**environment, "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
        # A dead process' gauges must not be added up with those of the living.
        on_exit = partial(mark_process_dead, path=str(metrics))
    return [
        ChildSpec(
            name=f"serve-{worker}",
            command=shardrank_command(
                *("--log-level", log_level, "serve", *arguments[worker], "--host", ports.host),
                *("--http-port", str(ports.http), "--grpc-port", str(ports.grpc), "--probe-port", str(probe_port)),
            ),
            probe=partial(_ask_worker, (*probes[worker : worker + 1], partial(_ask_over_http, probe_port))),
            environment=environment,
            on_exit=on_exit,
        )
        for worker, probe_port in enumerate(ports.probes)
    ]


async def _ask_worker(probes: Sequence[Probe], process_id: int) -> None:
    for probe in probes:
        await probe(process_id)


async def _ask_over_http(port: int, process_id: int) -> None:
    url = f"http://{LOOPBACK}:{port}/readyz"
    try:
        async with httpx.AsyncClient(verify=False, trust_env=False) as client:
            answer = await client.get(url)
    except httpx.HTTPError as error:
        raise NotYetError(f"{url}: {error}") from error
    if not answer.is_success:
        raise NotYetError(f"{url} answered {answer.status_code}: {answer.text[:300]}")
