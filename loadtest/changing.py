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
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import click
from anyio.from_thread import BlockingPortal, start_blocking_portal

from loader.deltas.publisher import AsyncDeltaPublisher
from loader.registry.fleet import delta_stream
from loader.snapshot.publishing import register, retain
from loader.snapshot.reader import Snapshot
from loader.stores import open_store
from loadtest.bench.deltas import PUBLISHES_PER_S, drawn_rows, training
from loadtest.bench.harness import AT_RATE, Bench, BenchTable, Measure, Values, bench_command
from loadtest.cli import side_split_option
from loadtest.drill.config import UpdatingDrillConfig
from loadtest.drill.fleet import READY_TIMEOUT_S, ROLLOUT_TIMEOUT_S, ServedFleet, polled, served_fleet
from loadtest.drill.upgrade import restart
from loadtest.errors import LoadError
from loadtest.load.config import RATE_SHARE, WARM_UP_SHARE, OfferedLoad
from loadtest.load.generator import Generators
from loadtest.peers.run import ENVIRONMENTS, PEERS, Subject, peer_serving, write_model
from loadtest.servers import Server
from loadtest.workloads.catalog import BenchShape, SideSplit
from serving.cli import options as opts

IN_FLIGHT: Final = 32
DENSE_EVERY_S: Final = 2.0
KILL_AFTER_SHARE: Final = 0.3
SETTLE_S: Final = 2.0
MEASURES = (*(Measure(name, "ms") for name in AT_RATE), Measure("failed", "requests"))
Change: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Goes on while the block runs."""


@contextmanager
def going_on(portal: BlockingPortal, change: Callable[[asyncio.Event], Awaitable[None]]) -> Iterator[None]:
    """Have a change go on until it sees, at the end of the block, that it is to end. Raises what it raised."""
    over = portal.call(asyncio.Event)
    changing = portal.start_task_soon(change, over)
    try:
        yield
    finally:
        portal.call(over.set)
        changing.result(READY_TIMEOUT_S + ROLLOUT_TIMEOUT_S)


class Changes:
    """What happens to a fleet, whose processes take turns; `seconds` are those of a measurement, with its warm-up."""

    def __init__(self, fleet: ServedFleet, snapshot: Snapshot, rows_per_s: int, seconds: float) -> None:
        # No delta has a row twice.
        rows_per_s = min(rows_per_s, snapshot.spec.tables[0].num_embeddings * PUBLISHES_PER_S)
        self._fleet, self._snapshot, self._rows_per_s, self._seconds = fleet, snapshot, rows_per_s, seconds
        self._numbers, self._steps = itertools.count(snapshot.version + 1), itertools.count(1)
        self._versions = deque[int]()
        children = fleet.local.supervisor.children
        self._restarted = itertools.cycle(children.values())
        self._killed = itertools.cycle([child for name, child in children.items() if name.startswith("shard-")])

    def by_name(self, portal: BlockingPortal) -> dict[str, Change]:
        """Return them, with none at all first."""
        return {
            "steady": nullcontext,
            "swaps": partial(going_on, portal, self.swaps),
            f"{self._rows_per_s:,} changed rows/s": partial(self.row_updates, portal),
            f"dense steps every {DENSE_EVERY_S:g} s": partial(going_on, portal, self.dense_steps),
            "restarts": partial(going_on, portal, self.restarts),
            "kill -9 of a replica": partial(going_on, portal, self.kill),
        }

    async def settle(self) -> None:
        """Wait until nothing goes on, and have as many versions ready as swaps may need. Raises LoadError."""
        registry, address, store = self._fleet.registry, self._fleet.store, open_store(self._fleet.store)
        while len(self._versions) < self._seconds:
            made = self._snapshot.as_version(next(self._numbers))
            await asyncio.to_thread(store.put, made.path, made.identity, renumbered=made.manifest)
            await register(registry, made, clock=time.time, store=address)
            self._versions.append(made.version)
        await retain(registry, address, self._snapshot.spec.model, keep=len(self._versions))
        if lag := await polled(self.lag, lambda lag: not lag, READY_TIMEOUT_S):
            raise LoadError(lag)
        await asyncio.sleep(SETTLE_S)

    async def lag(self) -> str:
        """Return what goes on; empty if nothing does."""
        live, registry, model = await self._fleet.live_version(), self._fleet.registry, self._snapshot.spec.model
        last, dense = (await registry.registry.bounds(delta_stream(model, live))).last, 0
        if (newest := await registry.dense_step(model, live)) is not None:
            dense = newest.step
        reports = [(node, report) for node in await registry.nodes() for report in node.versions]
        shards = [node.node_id for node, one in reports if node.kind == "shard" and one.delta_sequence < last]
        serving = [node.node_id for node, one in reports if node.kind == "serving" and one.dense_step < dense]
        behind = f"{shards} have not applied delta {last}, {serving} do not answer with dense step {dense}"
        return behind if shards or serving else await self._fleet.lag()

    async def swaps(self, over: asyncio.Event) -> None:
        """Roll out one version after the other."""
        while not over.is_set() and self._versions:
            await self._fleet.swap_to(self._versions.popleft())

    def row_updates(self, portal: BlockingPortal) -> AbstractContextManager[None]:
        """Publish changed rows, from another process."""
        spec, version = self._snapshot.spec, portal.call(self._fleet.live_version)
        draw = partial(drawn_rows, spec.tables[0], self._rows_per_s)
        return training(self._fleet.registry.registry.url, spec.model, version, draw)

    async def dense_steps(self, over: asyncio.Event) -> None:
        """Publish the dense weights, changed by one in a thousand."""
        fleet, dense = self._fleet, self._snapshot.dense_tensors()
        registry, version = fleet.registry.registry, await fleet.live_version()
        publisher = AsyncDeltaPublisher(registry, self._snapshot.spec.model, version, fleet.store)
        while not over.is_set():
            step = next(self._steps)
            await publisher.publish_dense(step, {name: part * (1 + step % 2 / 1000) for name, part in dense.items()})
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), DENSE_EVERY_S)

    async def restarts(self, over: asyncio.Event) -> None:
        """End each process by SIGTERM, and go on when it is ready again."""
        while not over.is_set():
            await restart(next(self._restarted))

    async def kill(self, over: asyncio.Event) -> None:
        """Kill a shard node."""
        await asyncio.sleep(KILL_AFTER_SHARE * self._seconds)
        next(self._killed).kill()


async def reload_triton(server: Server, models: Path, over: asyncio.Event) -> None:
    """Have Triton load one version after the other: a new folder, and its API for loading a model."""
    request = urllib.request.Request(f"{server.target('flat')}/v2/repository/models/rank/load", data=b"{}")
    versions = (models / f"{number}" for number in itertools.count(2))
    while not over.is_set():
        folder = next(version for version in versions if not version.exists())
        await asyncio.to_thread(shutil.copytree, models / "1", folder)
        (await asyncio.to_thread(urllib.request.urlopen, request, timeout=READY_TIMEOUT_S)).close()


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
    triton: bool,
    environments: Path,
    **fleet_size: int,
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
    peer = PEERS["triton"]
    python = peer.python(environments) if triton else None
    with Generators() as generators, start_blocking_portal() as portal, ExitStack() as stack:

        def table(
            who: str, load: OfferedLoad, changes: Mapping[str, Change], settle: Callable[[], object]
        ) -> BenchTable:
            offered = rate or RATE_SHARE * generators.busy(load, IN_FLIGHT, 1.0, bench.seconds(10.0), ()).requests_per_s

            def measured(change: Change, number: int) -> Values:
                settle()
                with change():
                    return bench.values_at(offered, generators, load, number, seconds)

            setup = {"requests": shape.requests, "rate": f"{offered:.1f}/s", "each": f"{seconds:g} s"}
            subjects = {name: partial(measured, change) for name, change in changes.items()}
            return BenchTable(f"{who} while things change", MEASURES, subjects, setup)

        path, weights = write_model(bench.folder, shape, [hotness])
        snapshot, served = Snapshot.open(path, verify=False), bench.folder / "served"
        served.mkdir()
        # Versions that are over are dropped there; they are made of this one.
        open_store(served).put(path, snapshot.identity)
        click.echo("starting the fleet")
        # As drills do that restart processes.
        restarting = UpdatingDrillConfig(**fleet_size)
        settings = restarting.model_dump(include={*fleet_size, "shard_node", "serve"})
        starting = served_fleet(served, snapshot.spec, registry=f"{bench.folder}/registry", **settings)
        fleet = stack.enter_context(portal.wrap_async_context_manager(starting))
        changes = Changes(fleet, snapshot, rows_per_s, seconds * (1 + WARM_UP_SHARE))
        load = Subject("shardrank", None, "grpc-packed").load(shape, fleet.server, hotness)
        tables = [table("shardrank", load, changes.by_name(portal), partial(portal.call, changes.settle))]
        if python is not None:
            click.echo("starting Triton")
            subject = Subject("Triton", peer, peer.encodings[-1])
            first = subject.load(shape, fleet.server, hotness)
            server = stack.enter_context(peer_serving(peer, python, weights, fleet_size["workers"], first))
            models = weights.parent / f"triton-{server.http_port}" / "models" / "rank"
            reload = partial(going_on, portal, partial(reload_triton, server, models))
            reloads: dict[str, Change] = {"steady": nullcontext, "loading versions": reload}
            settle = partial(time.sleep, SETTLE_S)
            tables.append(table("Triton", subject.load(shape, server, hotness), reloads, settle))
        bench.run(tables)
