"""Serving processes that share their ports: one child for each, and what several count is added up by files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
from prometheus_client.multiprocess import mark_process_dead

from loader.registry import open_registry
from loader.registry.fleet import FleetRegistry, PublishedVersion
from loader.registry.memory import single_process_fleet
from loader.registry.registry import Registry
from loader.snapshot.publishing import newest, version_record
from loader.snapshot.reader import Snapshot
from loader.stores import open_store
from loader.stores.cache import StorePlace
from serving.cli import settings
from serving.config import FrontSettings, MemberSettings, ServeConfig
from serving.errors import FleetError
from serving.fleet.config import SupervisionConfig
from serving.fleet.process import WORKER_VARIABLE, notify_ready, run_until_signalled
from serving.fleet.supervisor import ChildSpec, NotYetError, Probe, configured_command, supervised
from serving.observe.logs import announce
from shard_node.agent.agent import AgentConfig
from shard_node.agent.version_loading import StagingConfig

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def shared_port(host: str, port: int) -> Iterator[int]:
    """Hold a TCP port, 0 for any free one, for processes that will listen on it with SO_REUSEPORT. Gives its number.

    The socket is bound but never listens, so the kernel gives it no connection; while it is open, no other user can
    take the port, not even between the death of the last worker and its restart. Raises FleetError if it is taken.
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
    """Return the address at which a server that is bound to `host` answers on this machine."""
    return {"0.0.0.0": LOOPBACK, "::": "::1", "": LOOPBACK}.get(host, host)


@dataclass(frozen=True, slots=True)
class Listening:
    """Where it listens, with real ports. `admin_port`: None for no such port.

    Of workers, which share these, `probes` has a private port on loopback for each: at a shared port, whichever worker
    the kernel picks would answer the question whether this one is ready.
    """

    host: str
    http_port: int
    grpc_port: int
    admin_port: int | None = None
    probes: tuple[int, ...] = ()

    def announce(self, scheme: str) -> None:
        """Print where the APIs, the metrics and the status page are."""
        base = f"{scheme}://{connectable_host(self.host)}"
        announce(f"HTTP: {base}:{self.http_port}/docs")
        announce(f"gRPC: {connectable_host(self.host)}:{self.grpc_port}")
        if (admin := self.admin_port) is None:
            announce(f"metrics: {base}:{self.http_port}/metrics; --admin-port PORT adds a status page")
        else:
            announce(f"probes and metrics: {base}:{admin}/metrics, status page: {base}:{admin}/")


@contextlib.contextmanager
def reserved_ports(config: FrontSettings, workers: int) -> Iterator[Listening]:
    """Hold the ports, and a private one for each worker, while the block runs. Raises FleetError if one is taken."""
    with contextlib.ExitStack() as held:
        http, grpc = (
            held.enter_context(shared_port(config.host, port)) for port in (config.http_port, config.grpc_port)
        )
        admin = config.admin_port
        if admin is not None:
            admin = held.enter_context(shared_port(config.host, admin))
        probes = tuple(held.enter_context(shared_port(LOOPBACK, 0)) for _ in range(workers))
        yield Listening(config.host, http, grpc, admin, probes)


def worker_specs(
    run_directory: Path,
    ports: Listening,
    configs: Sequence[ServeConfig],
    environment: Mapping[str, str],
    probes: Sequence[Probe] = (),
) -> list[ChildSpec]:
    """Make one child for each probe port; what several workers count is added up by files in `run_directory`.

    `configs` has each worker's settings but its ports, `probes` what else each must report, if anything.
    """
    on_exit, places = None, [dict[str, str]() for _ in ports.probes]
    if len(ports.probes) > 1:
        metrics = run_directory / "metrics"
        places = [{WORKER_VARIABLE: f"{worker}/{len(places)}"} for worker in range(len(places))]
        metrics.mkdir(mode=0o700, exist_ok=True)
        environment = {**environment, "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
        # A dead process' gauges must not be added up with those of the living.
        on_exit = partial(mark_process_dead, path=str(metrics))
    specs = []
    for worker, probe_port in enumerate(ports.probes):
        names, config = ("host", "http_port", "grpc_port", "admin_port"), configs[worker]
        listening = {name: getattr(config, name) or getattr(ports, name) for name in names}
        config = config.model_copy(update={**listening, "probe_port": probe_port})
        name = f"serve-{worker}"
        command = configured_command("serve", config, run_directory / f"{name}.toml")
        probe = partial(_ask_worker, probes[worker : worker + 1], probe_port)
        specs.append(ChildSpec(name, command, probe, {**environment, **places[worker]}, on_exit))
    return specs


async def _ask_worker(probes: Sequence[Probe], port: int, process_id: int) -> None:
    for probe in probes:
        await probe(process_id)
    url = f"http://{LOOPBACK}:{port}/readyz"
    try:
        async with httpx.AsyncClient(verify=False, trust_env=False) as client:
            answer = await client.get(url)
    except httpx.HTTPError as error:
        raise NotYetError(f"{url}: {error}") from error
    if not answer.is_success:
        raise NotYetError(f"{url} answered {answer.status_code}: {answer.text[:300]}")


def run_workers(config: ServeConfig) -> None:
    """Run the workers of `shardrank serve` until SIGTERM or SIGINT.

    Raises FleetError if a port is taken or a worker does not come up, SnapshotError for a version that can't be read.
    """
    # Only the manifest and the headers: each worker checks the files, at its start and at every restart.
    only = None if config.in_fleet else Membership.of(config).version
    if only is not None and config.snapshot is None:
        config = config.model_copy(update={"models": (only.model,), "version": only.version})
    workers = [worker_config(config, worker) for worker in range(config.workers)]

    async def program() -> None:
        with reserved_ports(config, len(workers)) as ports:
            # Workers leave their fleet once they have drained, which may take as long again as the default grace.
            grace_s = SupervisionConfig().stop_grace_s + config.shutdown_delay_s
            async with supervised(SupervisionConfig(stop_grace_s=grace_s)) as supervisor:
                await supervisor.start(worker_specs(supervisor.run_directory, ports, workers, {}))
                announce(f"logs: {supervisor.log_directory}")
                ports.announce(config.scheme)
                notify_ready()
                await asyncio.Event().wait()

    run_until_signalled(program)


def worker_config(config: ServeConfig, worker: int) -> ServeConfig:
    """Return the settings of a worker, but its ports.

    Node ids differ, and so do folders of recorded requests, each with its part of their bound.
    """
    update = config.of_worker(worker)
    if config.in_fleet:
        name = config.node_id or node_id("serve", str(config.http_port or f"pid{os.getpid()}"))
        update["node_id"] = f"{name}-{worker}"
    return config.model_copy(update=update)


@dataclass(frozen=True, slots=True)
class Membership:
    """What a process follows.

    Attributes:
        fleet: its registry, for the event loop that first uses it.
        open_registry: opens it once more.
        store: has the versions.
        version: the only one, of a process without a registry; None in a fleet.
    """

    fleet: FleetRegistry
    open_registry: Callable[[], Registry]
    store: StorePlace
    agent: AgentConfig
    version: PublishedVersion | None = None

    @classmethod
    def of(cls, options: MemberSettings) -> Membership:
        """Return what the settings of a process say. Raises UsageError, SnapshotError, RegistryRecordError."""
        store = options.store_place
        if options.registry is not None:
            staging = StagingConfig(retry_s=options.stage_retry_s)
            agent = settings.config_of(AgentConfig, {}, models=options.models or None, staging=staging)
            reopen = partial(open_registry, options.registry)
            return cls(FleetRegistry(reopen()), reopen, options.named_store, agent)
        if store is not None and options.takes_newest:
            model = options.models[0] if options.models else settings.only_model(open_store(store))
            if (readable := newest(store, model)) is not None:
                options = options.model_copy(update={"version": readable.version})
        named = store, next(iter(options.models), None), options.version, options.snapshot
        folder = settings.snapshot_folder(*named, with_rows=False, verify=options.verify).resolve()
        place = folder.parent.parent if store is None or isinstance(store, Path) else store
        version = version_record(Snapshot.open(folder, verify=False, rows_here=isinstance(place, Path)), time.time())
        fleet = single_process_fleet(f"process {os.getpid()}", version)
        agent = AgentConfig.for_only_process(version.model, options.stage_retry_s)
        return cls(fleet, lambda: fleet.registry, place, agent, version)


def node_id(kind: str, place: str) -> str:
    """Return `<kind>-<host>-<place>`, with `_` for what no id may have."""
    return re.sub(r"[^A-Za-z0-9_.:-]", "_", f"{kind}-{socket.gethostname()}-{place}")[:200]


def reachable_host(bound: str) -> str:
    """Return the host at which others reach what is bound: every interface stands for this host's name."""
    return socket.gethostname() if bound in ("0.0.0.0", "::", "") else bound
