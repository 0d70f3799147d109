"""What row updates cost lookups: `python -m loadtest.bench_deltas [--json FILE] [--rows-per-s 50000]`.

A trainer in a process of its own publishes changed rows through a real registry; a shard node's engine in this process
applies them with its follower, in a thread, while the main thread looks rows up without a pause. Windows with and
without deltas take turns in one run, so that both see the same noise; between them nothing is measured until what was
published is applied. With `--hot-rows-gb` the lookups, and the rows that are updated, are those of a router's tier of
hot rows: copies of the table's first rows, as many as fit.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console

from loader.deltas.publisher import DeltaPublisher
from loader.registry.fleet import FleetRegistry
from loader.registry.opening import open_registry
from loader.snapshot.codecs import codec_for
from loader.snapshot.publishing import register
from loader.snapshot.reader import Snapshot
from loadtest.bench_lookup import MODEL, LookupShape, make_batch, make_node, write_snapshot
from router.hot_keeper import HotBudget
from router.hot_rows import HotRows, HotRowsConfig
from router.plan import Plan
from shard_node.agent.delta_follower import DeltaFollower, FollowedRows
from shard_node.answer import EXACT
from shard_node.bags import KeyedBags, TableLayout
from shard_node.node import DeltaPosition
from shard_node.split import whole

WINDOW_S = 1.0
PUBLISHES_PER_S = 10
BATCHES = 32
WAIT_S = 60.0
TABLE = "f00"
# What serving processes set: how long a thread that waits for the interpreter lets another one have it.
SWITCH_INTERVAL_S = 0.0005


def _train(url: str, rows: int, dim: int, rows_per_s: int, publishing: Event, ended: Event, idle: Event) -> None:
    """Publish at a steady rate while `publishing` is set."""
    rng = np.random.default_rng(1)
    step = max(1, rows_per_s // PUBLISHES_PER_S)
    # Drawn beforehand: a trainer has better things to do on a processor that the lookups share.
    drawn = [rng.choice(rows, step, replace=False) for _ in range(BATCHES)]
    values = rng.standard_normal((step, dim), dtype=np.float32)
    with DeltaPublisher(url, MODEL, 1) as publisher:
        due = time.monotonic()
        idle.set()
        while not ended.is_set():
            if not publishing.is_set():
                idle.set()
                publishing.wait(0.01)
                due = time.monotonic()
                continue
            idle.clear()
            publisher.publish(TABLE, drawn[publisher.sequence % BATCHES], values)
            due += 1 / PUBLISHES_PER_S
            time.sleep(max(0.0, due - time.monotonic()))


@contextmanager
def _trainer(url: str, rows: int, dim: int, rows_per_s: int) -> Iterator[tuple[Event, Event]]:
    context = multiprocessing.get_context("spawn")
    publishing, ended, idle = context.Event(), context.Event(), context.Event()
    arguments = (url, rows, dim, rows_per_s, publishing, ended, idle)
    process = context.Process(target=_train, args=arguments, daemon=True)
    process.start()
    try:
        if not idle.wait(WAIT_S):
            raise TimeoutError(f"the trainer was not ready within {WAIT_S} s")
        yield publishing, idle
    finally:
        ended.set()
        process.join(WAIT_S)
        process.kill()


@contextmanager
def _following(url: str, snapshot: Snapshot, tables: FollowedRows) -> Iterator[None]:
    """Apply deltas in an event loop of its own, as a shard node's does."""
    ended = threading.Event()

    async def follow() -> None:
        registry = open_registry(url)
        follower = DeltaFollower(registry, MODEL, snapshot.version, tables)
        try:
            async with asyncio.TaskGroup() as group:
                following = group.create_task(follower.run())
                await asyncio.to_thread(ended.wait)
                following.cancel()
        finally:
            await registry.close()

    with ThreadPoolExecutor(1, "follower") as thread:
        work = thread.submit(asyncio.run, follow())
        try:
            yield
        finally:
            ended.set()
            work.result(WAIT_S)


def _look_up(pool: Callable[[KeyedBags], object], batches: list[KeyedBags], seconds: float) -> list[float]:
    """Look up without a pause; give the seconds that each lookup took."""
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        pool(batches[len(taken) % len(batches)])
        taken.append(time.perf_counter() - begin)
    return taken


def _hot_rows(snapshot: Snapshot, layout: TableLayout, hot_rows_gb: float) -> HotRows:
    """Make a tier of the table's first rows, as the snapshot has them."""
    budget = HotBudget(HotRowsConfig(size_bytes=int(hot_rows_gb * 1e9), policy="static"), layout)
    keys = budget.fitting(np.arange(layout.tables[0].num_embeddings, dtype=np.int64))
    hot = HotRows(layout)
    hot.deltas = DeltaPosition(*snapshot.manifest.delta_start)
    pending = hot.begin(keys)
    hot.put(pending, 0, np.arange(keys.size), snapshot.read_rows(TABLE, 0, keys.size))
    hot.use(pending).close()
    return hot


def _pool_hot(hot: HotRows, bags: KeyedBags) -> None:
    """Look up rows that are all hot, as a router does."""
    with hot.used() as (rows, _):
        rows.find(bags).answer(whole(bags), EXACT)


def _wait_until_applied(tables: FollowedRows, idle: Event) -> None:
    deadline = time.monotonic() + WAIT_S
    if not idle.wait(WAIT_S):
        raise TimeoutError(f"the trainer did not stop within {WAIT_S} s")
    looked_at = time.time()
    # Fresh as of a moment after the last append: nothing waits.
    while (fresh_at := tables.deltas.snapshot().fresh_at) is None or fresh_at < looked_at:
        if time.monotonic() > deadline:
            raise TimeoutError(f"deltas were not applied within {WAIT_S} s: {tables.deltas.snapshot()}")
        time.sleep(0.01)


def measure(
    url: str,
    snapshot: Snapshot,
    shape: LookupShape,
    rows_per_s: int,
    seconds: float,
    batch: int,
    hotness: int,
    hot_rows_gb: float = 0.0,
) -> dict[str, Any]:
    """Take turns for about `seconds` of each kind of window; in the result `rows` are those that are looked up."""
    node = make_node(snapshot, Plan.make(snapshot.spec))
    rng = np.random.default_rng(0)
    pool: Callable[[KeyedBags], object] = partial(node.pool, MODEL, snapshot.version)
    taken: dict[bool, list[float]] = {False: [], True: []}
    applied, applied_s, staleness = 0, 0.0, 0.0
    with node.generations.lease(MODEL, snapshot.version) as lease:
        tables: FollowedRows = lease.payload
        if hot_rows_gb:
            tables = hot = _hot_rows(snapshot, lease.payload.engine.layout, hot_rows_gb)
            pool = partial(_pool_hot, hot)
            shape = replace(shape, table_bytes=hot.current.keys.size * lease.payload.engine.layout.groups[0].row_bytes)
        batches = [make_batch(shape, rng, batch, hotness).bags for _ in range(BATCHES)]
        follower = _following(url, snapshot, tables)
        with _trainer(url, shape.rows_per_table, shape.embedding_dim, rows_per_s) as (publishing, idle), follower:
            _look_up(pool, batches, WINDOW_S / 2)
            for window in range(2 * max(1, round(seconds / WINDOW_S))):
                with_deltas = window % 2 == 1
                if with_deltas:
                    idle.clear()
                    publishing.set()
                before, began = tables.deltas.snapshot().rows, time.perf_counter()
                taken[with_deltas] += _look_up(pool, batches, WINDOW_S)
                if with_deltas:
                    applied += tables.deltas.snapshot().rows - before
                    applied_s += time.perf_counter() - began
                    staleness = max(staleness, tables.deltas.snapshot().staleness_s(time.time()) or 0.0)
                    publishing.clear()
                _wait_until_applied(tables, idle)
        progress = tables.deltas.snapshot()
    node.close()
    without, beside = (np.percentile(np.array(taken[kind]) * 1e3, (50, 99)).tolist() for kind in (False, True))
    return {
        "rows_per_s_wanted": rows_per_s,
        "rows_per_s_applied": applied / applied_s,
        "rows": shape.rows_per_table,
        "deltas_applied": progress.batches,
        "deltas_refused": progress.refused,
        "staleness_s_largest": staleness,
        "lookups": {"without_deltas": len(taken[False]), "with_deltas": len(taken[True])},
        "p50_ms": {"without_deltas": without[0], "with_deltas": beside[0]},
        "p99_ms": {"without_deltas": without[1], "with_deltas": beside[1]},
        "ratio_p50": beside[0] / without[0],
        "ratio_p99": beside[1] / without[1],
    }


async def _register(url: str, snapshot: Snapshot) -> None:
    registry = open_registry(url)
    try:
        await register(FleetRegistry(registry), snapshot, clock=time.time)
    finally:
        await registry.close()


@click.command(help=__doc__)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results to this file.")
@click.option("--seconds", type=click.FloatRange(min=0), default=10.0, show_default=True, help="For each kind.")
@click.option("--rows-per-s", type=click.IntRange(min=1), default=50_000, show_default=True, help="Published.")
@click.option("--dim", type=click.IntRange(min=1), default=64, show_default=True, help="Of the int8 rows.")
@click.option("--rows", type=click.IntRange(min=1), default=2_000_000, show_default=True, help="Of the table.")
@click.option("--batch", type=click.IntRange(min=1), default=64, show_default=True, help="Bags of a lookup.")
@click.option("--hotness", type=click.IntRange(min=1), default=20, show_default=True, help="Rows of a bag.")
@click.option("--hot-rows-gb", type=click.FloatRange(min=0), default=0.0, show_default=True, help="A tier's memory.")
@click.option("--registry", help="URL of an empty registry; by default a directory of its own.")
def main(
    json_path: Path | None,
    seconds: float,
    rows_per_s: int,
    dim: int,
    rows: int,
    batch: int,
    hotness: int,
    hot_rows_gb: float,
    registry: str | None,
) -> None:
    """Run the benchmark."""
    console = Console()
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    shape = LookupShape(dim, 1, rows * codec_for("int8", dim).row_bytes)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        console.print(f"exporting {rows} rows of dim {dim} …")
        snapshot = Snapshot.open(write_snapshot(Path(folder) / "store", shape), verify=False)
        url = registry or f"{folder}/registry"
        asyncio.run(_register(url, snapshot))
        rows_per_s = min(rows_per_s, rows * PUBLISHES_PER_S)
        result = measure(url, snapshot, shape, rows_per_s, seconds, batch, hotness, hot_rows_gb)
    console.print_json(data=result)
    if json_path is not None:
        setup = {
            "dim": dim,
            "rows": rows,
            "batch": batch,
            "hotness": hotness,
            "hot_rows_gb": hot_rows_gb,
            "registry": "given" if registry else "directory",
        }
        head = {"benchmark": "bench_deltas", "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        report = {**head, "cpus": len(os.sched_getaffinity(0)), "setup": setup, "results": result}
        json_path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
