"""`loadtest changing`: what users wait at worst while versions, rows, dense weights and processes change.

The same load is offered, at half of what the server can do, while a change goes on, and while none does. Measurements
of both take turns on one fleet, so each change meets what those before have left.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import click
from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal, start_blocking_portal

from loader.deltas.publisher import AsyncDeltaPublisher
from loader.registry.fleet import delta_stream
from loader.snapshot.publishing import register, retain
from loader.snapshot.reader import Snapshot
from loader.snapshot.store import Store
from loader.stores import open_store
from loadtest.bench.deltas import training
from loadtest.bench.harness import AT_RATE, Bench, BenchTable, Measure, Subject, Values, bench_command
from loadtest.cli import side_split_option
from loadtest.drill.fleet import READY_TIMEOUT_S, ROLLOUT_TIMEOUT_S, ServedFleet, polled
from loadtest.drill.upgrade import restart
from loadtest.errors import LoadError
from loadtest.load.config import OfferedLoad, RunConfig, bench_load
from loadtest.load.generator import Generators
from loadtest.peers.run import CHANNELS, ENVIRONMENTS, PEERS, peer_serving, write_model
from loadtest.servers import HOST, Server
from loadtest.workloads.catalog import BenchShape, BenchWorkload, SideSplit
from serving.cli import options as opts
from serving.fleet.config import FleetConfig, SupervisionConfig
from serving.fleet.local_fleet import running_fleet

RATE_SHARE: Final = 0.5
"""Of what a server answers when it is kept busy."""
IN_FLIGHT: Final = 32
WARM_UP_SHARE: Final = 0.2
"""Of the seconds of a measurement, before it; the change has begun by then."""
DENSE_EVERY_S: Final = 2.0
KILL_AFTER_SHARE: Final = 0.3
SETTLE_S: Final = 2.0
RELOAD_TIMEOUT_S: Final = 60.0
MEASURES = (*(Measure(name, "ms") for name in AT_RATE), Measure("failed", "requests"))
Change: TypeAlias = Callable[..., Awaitable[None]]
"""Called with an event, and by anyio's protocol for tasks that say when they have begun; ends once the event is set."""
Begun: TypeAlias = TaskStatus[None]


async def nothing(ended: asyncio.Event, *, task_status: Begun) -> None:
    """Change nothing."""
    task_status.started()
    await ended.wait()


@asynccontextmanager
async def served_fleet(snapshot: Snapshot, shards: int, replicas: int, workers: int) -> AsyncIterator[ServedFleet]:
    """Run a fleet that serves the newest version of a store, its files beside that."""
    store = snapshot.path.parent.parent
    config = FleetConfig(
        store=store,
        models=(snapshot.spec.model,),
        registry=str(store.with_name("registry")),
        shards=shards,
        replicas=replicas,
        workers=workers,
        http_port=0,
        grpc_port=0,
        log_dir=store.parent,
        supervision=SupervisionConfig(ready_timeout_s=READY_TIMEOUT_S, healthy_after_s=1.0),
        shard_node={"admin_listen": f"{HOST}:0"},
        serve={"shutdown_delay_s": 5.0},
    )
    async with running_fleet(config) as local:
        server = Server(local.ports.http_port, local.ports.grpc_port, ())
        yield ServedFleet(local=local, server=server, store=store, spec=snapshot.spec)


@dataclass(slots=True)
class Changes:
    """What happens to a fleet, whose processes take turns; `seconds` are those of a measurement, with its warm-up."""

    fleet: ServedFleet
    snapshot: Snapshot
    rows_per_s: int
    seconds: float
    _numbers: Iterator[int] = field(init=False)
    _store: Store = field(init=False)
    _versions: deque[int] = field(default_factory=deque)
    _steps: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    _turns: dict[str, Iterator[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers, self._store = itertools.count(self.snapshot.version + 1), open_store(self.fleet.store)

    def by_name(self) -> dict[str, Change]:
        """Return them, with none at all first."""
        return {
            "steady": nothing,
            "swaps": self.swaps,
            f"{self.rows_per_s:,} changed rows/s": self.row_updates,
            f"dense steps every {DENSE_EVERY_S:g} s": self.dense_steps,
            "restarts": self.restarts,
            "kill -9 of a replica": self.kill,
        }

    async def settle(self) -> None:
        """Wait until nothing goes on, and have as many versions ready as swaps may need. Raises LoadError."""
        model, registry = self.snapshot.spec.model, self.fleet.registry
        while len(self._versions) < self.seconds:
            made = self.snapshot.as_version(next(self._numbers))
            await asyncio.to_thread(self._store.put, made.path, made.identity, renumbered=made.manifest)
            await register(registry, made, clock=time.time, store=self.fleet.store)
            self._versions.append(made.version)
        await retain(registry, self.fleet.store, model, keep=len(self._versions))
        if lag := await polled(self.lag, lambda lag: not lag, READY_TIMEOUT_S):
            raise LoadError(lag)
        await asyncio.sleep(SETTLE_S)

    async def lag(self) -> str:
        """Return what goes on; empty if nothing does."""
        live, registry = await self.fleet.live_version(), self.fleet.registry
        last = (await registry.registry.bounds(delta_stream(self.snapshot.spec.model, live))).last
        of_shards = [node for node in await registry.nodes() if node.kind == "shard"]
        behind = [node.node_id for node in of_shards if any(one.delta_sequence < last for one in node.versions)]
        return f"{behind}: deltas up to {last} are not applied" if behind else await self.fleet.lag()

    async def swaps(self, ended: asyncio.Event, *, task_status: Begun) -> None:
        """Roll out one version after the other."""
        task_status.started()
        while not ended.is_set() and self._versions:
            await self.fleet.swap_to(self._versions.popleft())

    async def row_updates(self, ended: asyncio.Event, *, task_status: Begun) -> None:
        """Publish changed rows, from another process."""
        version = await self.fleet.live_version()
        url, table = self.fleet.registry.registry.url, self.snapshot.spec.tables[0]
        trainer = training(url, self.snapshot.spec.model, version, table, self.rows_per_s)
        await asyncio.to_thread(trainer.__enter__)
        task_status.started()
        await ended.wait()
        await asyncio.to_thread(trainer.__exit__, None, None, None)

    async def dense_steps(self, ended: asyncio.Event, *, task_status: Begun) -> None:
        """Publish the dense weights, changed by one in a thousand."""
        task_status.started()
        version, dense = await self.fleet.live_version(), self.snapshot.dense_tensors()
        publisher = AsyncDeltaPublisher(
            self.fleet.registry.registry, self.snapshot.spec.model, version, self.fleet.store
        )
        while not ended.is_set():
            step = next(self._steps)
            changed = {name: tensor * (1 + step % 2 / 1000) for name, tensor in dense.items()}
            await publisher.publish_dense(step, changed)
            await asyncio.wait({asyncio.ensure_future(ended.wait())}, timeout=DENSE_EVERY_S)

    async def restarts(self, ended: asyncio.Event, *, task_status: Begun) -> None:
        """End each process by SIGTERM, and go on when it is ready again."""
        task_status.started()
        while not ended.is_set():
            await restart(self.fleet.local.supervisor.children[self.next_of("")])

    async def kill(self, ended: asyncio.Event, *, task_status: Begun) -> None:
        """Kill a shard node."""
        task_status.started()
        await asyncio.sleep(KILL_AFTER_SHARE * self.seconds)
        self.fleet.local.supervisor.children[self.next_of("shard-")].kill()
        await ended.wait()

    def next_of(self, prefix: str) -> str:
        """Return the process whose turn it is, of those whose names begin so."""
        names = [name for name in self.fleet.local.supervisor.children if name.startswith(prefix)]
        return next(self._turns.setdefault(prefix, itertools.cycle(names)))


async def reload_triton(server: Server, models: Path, ended: asyncio.Event, *, task_status: Begun) -> None:
    """Have Triton load one version after the other: a new folder, and its API for loading a model."""
    task_status.started()
    url, versions = f"{server.target('flat')}/v2/repository/models/rank/load", itertools.count(2)
    while not ended.is_set():
        version = next(number for number in versions if not (models / f"{number}").exists())
        await asyncio.to_thread(shutil.copytree, models / "1", models / f"{version}")
        request = urllib.request.Request(url, data=b"{}")
        (await asyncio.to_thread(urllib.request.urlopen, request, timeout=RELOAD_TIMEOUT_S)).close()


def subjects_of(
    bench: Bench,
    generators: Generators,
    portal: BlockingPortal,
    load: OfferedLoad,
    seconds: float,
    rate: float,
    changes: dict[str, Change],
    settle: Callable[[], Awaitable[None]],
) -> dict[str, Subject]:
    """Return what measures each change."""

    def measured(change: Change, number: int) -> Values:
        portal.call(settle)
        ended = portal.call(asyncio.Event)
        going_on, _ = portal.start_task(change, ended)
        run = RunConfig(rate=rate, warmup_s=seconds * WARM_UP_SHARE, duration_s=seconds, seed=number)
        try:
            return bench.values_at(run, generators, load)
        finally:
            portal.call(ended.set)
            going_on.result(READY_TIMEOUT_S + ROLLOUT_TIMEOUT_S)

    return {name: partial(measured, change) for name, change in changes.items()}


@bench_command
@opts.option("--seconds S", "Of each measurement.", click.FloatRange(1, 600), 20.0)
@opts.option("--rate R", "Requests a second. Default: half of what the server answers.", click.FloatRange(0.1))
@opts.count("--hotness", "Ids a bag.", 1, 1000, 1)
@opts.count("--rows", "Of the one table.", 1, 2**31, 1_000_000)
@side_split_option("product")
@opts.count("--rows-per-s", "Changed, and published.", 1, 10_000_000, 50_000)
@opts.count("--shards", "Of the fleet.", 1, 64, 2)
@opts.count("--replicas", "Nodes of each shard.", 1, 16, 2)
@opts.count("--workers", "Serving processes, of Triton too.", 1, 64, 2)
@opts.switch("--triton", "Measure it as well, while it loads versions.")
@opts.option("--env-dir", "Has Triton's environment.", opts.FOLDER, ENVIRONMENTS, name="environments")
def changing(
    bench: Bench,
    seconds: float,
    rate: float | None,
    hotness: int,
    rows: int,
    side_split: SideSplit,
    rows_per_s: int,
    shards: int,
    replicas: int,
    workers: int,
    triton: bool,
    environments: Path,
) -> None:
    """Measure what users wait at worst while versions, rows, weights and processes change.

    A fleet of shard nodes and serving processes is offered half of what it can answer: steady, during swaps to versions
    that were exported before, under changed rows, with dense steps, while its processes are restarted one after the
    other, and after a kill -9 of a replica, in turns. No request may fail. With --triton the same for NVIDIA Triton,
    steady and while it loads versions by its API; its environment is that of `loadtest peers`.

    Examples:
      shardrank loadtest changing --json changing.json
      shardrank loadtest changing --triton --env-dir ~/peers --rounds 5
    """
    shape, seconds = BenchShape.of(rows, varied=True, side_split=side_split), bench.seconds(seconds)
    workload = BenchWorkload(shape=shape, head="mlp", hotness=hotness)
    python = PEERS["triton"].python(environments) if triton else None
    with Generators() as generators, start_blocking_portal() as portal, ExitStack() as stack:
        path, weights = write_model(bench.folder, shape, [hotness])
        click.echo("starting the fleet")
        snapshot = Snapshot.open(path, verify=False)
        starting = portal.wrap_async_context_manager(served_fleet(snapshot, shards, replicas, workers))
        fleet = stack.enter_context(starting)
        changes = Changes(fleet, snapshot, rows_per_s, seconds * (1 + WARM_UP_SHARE))

        def table(
            who: str, load: OfferedLoad, changes: dict[str, Change], settle: Callable[[], Awaitable[None]]
        ) -> BenchTable:
            offered = rate or RATE_SHARE * generators.busy(load, IN_FLIGHT, 1.0, bench.seconds(10.0), ()).requests_per_s
            setup = {"requests": shape.requests, "rate": f"{offered:.1f}/s", "each": f"{seconds:g} s"}
            subjects = subjects_of(bench, generators, portal, load, seconds, offered, changes, settle)
            return BenchTable(f"{who} while things change", MEASURES, subjects, setup)

        load = bench_load(fleet.server.target("grpc-packed"), "grpc-packed", workload, grpc_channels=CHANNELS)
        tables = [table("shardrank", load, changes.by_name(), changes.settle)]
        if python is not None:
            click.echo("starting Triton")
            peer = PEERS["triton"]
            load = bench_load(fleet.server.target(peer.encodings[-1]), peer.encodings[-1], workload)
            server = stack.enter_context(peer_serving(peer, python, weights, workers, load))
            load = load.model_copy(update={"target": server.target(peer.encodings[-1])})
            models = weights.parent / f"triton-{server.http_port}" / "models" / "rank"
            reload = partial(reload_triton, server, models)
            reloads: dict[str, Change] = {"steady": nothing, "loading versions": reload}
            tables.append(table("Triton", load, reloads, partial(asyncio.sleep, SETTLE_S)))
        bench.run(tables)
