"""`bench deltas`: what row updates cost lookups."""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.synchronize import Event
from typing import Any, TypeAlias

import click
import numpy as np
from anyio.from_thread import start_blocking_portal

from loader.deltas.blocking_publisher import DeltaPublisher
from loader.progress import BACKGROUND_SWITCH_INTERVAL_S
from loader.snapshot.publishing import register
from loader.snapshot.tables import TableSpec
from loadtest.bench import harness
from loadtest.errors import LoadError
from router.plan import Plan
from serving.cli.settings import opened_registry, with_registry
from serving.fleet.supervisor import describe_exit
from shard_node.agent.delta_follower import DeltaFollower
from shard_node.node import LoadedTables

DIM, BAGS, HOTNESS = 64, 64, 20
PUBLISHES_PER_S = 10
BATCHES = 32
WAIT_S = 60.0
MEASURES = (
    harness.Measure("p50 of a lookup", "ms"),
    harness.Measure("p99 of a lookup", "ms"),
    harness.Measure("lookups", "/s", "higher"),
    harness.Measure("rows applied", "/s", "higher"),
    harness.Measure("staleness", "s"),
)

Updates: TypeAlias = Callable[[], Iterable[Sequence[tuple[Any, ...]]]]
"""Draws what is published each time: methods of a `DeltaPublisher` with their arguments."""


def drawn_rows(table: TableSpec, rows_per_s: int) -> list[list[tuple[Any, ...]]]:
    """Draw changed rows of a table."""
    rng, step = np.random.default_rng(1), max(1, rows_per_s // PUBLISHES_PER_S)
    values = rng.standard_normal((step, table.embedding_dim), dtype=np.float32)
    drawn = (rng.choice(table.num_embeddings, step, replace=False) for _ in range(BATCHES))
    return [[("publish", table.name, rows, values)] for rows in drawn]


def _train(url: str, model: str, version: int, draw: Updates, begun: Event, ended: Event) -> None:
    # Drawn beforehand, since lookups share the processor.
    updates = itertools.cycle(draw())
    with DeltaPublisher(url, model, version) as publisher:
        due = time.monotonic()
        while not ended.is_set():
            for method, *arguments in next(updates):
                getattr(publisher, method)(*arguments)
            begun.set()
            due += 1 / PUBLISHES_PER_S
            time.sleep(max(0.0, due - time.monotonic()))


@contextmanager
def training(url: str, model: str, version: int, draw: Updates) -> Iterator[None]:
    """Have another process publish updates, `PUBLISHES_PER_S` times a second. Raises LoadError if it fails."""
    context = multiprocessing.get_context("spawn")
    begun, ended = context.Event(), context.Event()
    process = context.Process(target=_train, args=(url, model, version, draw, begun, ended), daemon=True)
    process.start()
    try:
        if not begun.wait(WAIT_S):
            raise LoadError(f"the trainer has published nothing within {WAIT_S:g} s")
        yield
        if process.exitcode is not None:
            raise LoadError(f"the trainer {describe_exit(process.exitcode)}")
    finally:
        ended.set()
        process.join(WAIT_S)
        process.kill()


def _wait_for(condition: Callable[[], bool], problem: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{problem} within {WAIT_S:g} s")
        time.sleep(0.01)


@contextmanager
def _following(url: str, version: int, tables: LoadedTables) -> Iterator[None]:
    """Apply deltas in an event loop in another thread, as a shard node does."""

    async def follow() -> None:
        async with opened_registry(url) as fleet:
            await DeltaFollower(fleet, harness.MODEL, version, tables.engine, tables.deltas, tables.partition).run()

    with start_blocking_portal() as portal:
        following = portal.start_task_soon(follow)
        yield
        if not following.cancel():
            following.result()


@harness.bench_command
@click.option("--seconds", type=click.FloatRange(0.01), default=2.0, show_default=True, help="Of each measurement.")
@click.option("--rows-per-s", type=click.IntRange(1), default=50_000, show_default=True, help="Published.")
@click.option("--rows", type=click.IntRange(1), default=2_000_000, show_default=True, help="Of the table.")
def deltas(bench: harness.Bench, seconds: float, rows_per_s: int, rows: int) -> None:
    """Measure what row updates cost lookups.

    A trainer in another process publishes changed rows through a real registry; a shard node in this process applies
    them in a thread while the main thread looks rows up. After each measurement with row updates, nothing is measured
    until all of them are applied.

    Examples:
      shardrank loadtest bench deltas --quick
      shardrank loadtest bench deltas --rows-per-s 60000 --json deltas.json
    """
    sys.setswitchinterval(BACKGROUND_SWITCH_INTERVAL_S)
    tables = harness.UniformTables(1, rows, DIM)
    rows_per_s = min(rows_per_s, rows * PUBLISHES_PER_S)
    click.echo(f"writing {rows} rows")
    snapshot = tables.export(bench.folder / "store")
    url = f"{bench.folder}/registry"
    with_registry(url, lambda fleet: register(fleet, snapshot, clock=time.time), may_be_new=True)
    seconds = bench.seconds(seconds)
    node, rng = harness.make_node(snapshot, Plan.make(snapshot.spec)), np.random.default_rng(0)
    batches = [tables.draw(rng, BAGS, HOTNESS) for _ in range(BATCHES)]
    with (
        node.generations.lease(harness.MODEL, snapshot.version) as lease,
        _following(url, snapshot.version, followed := lease.payload),
    ):

        def without_deltas(number: int) -> harness.Values:
            times, end = list[float](), time.perf_counter() + seconds
            while (begin := time.perf_counter()) < end:
                node.pool(harness.MODEL, snapshot.version, batches[len(times) % BATCHES])
                times.append(time.perf_counter() - begin)
            p50_ms, p99_ms = (1e3 * np.percentile(times, (50, 99))).tolist()
            return {"p50 of a lookup": p50_ms, "p99 of a lookup": p99_ms, "lookups": len(times) / seconds}

        def with_deltas(number: int) -> harness.Values:
            before = followed.deltas.now.rows
            with training(
                url, harness.MODEL, snapshot.version, partial(drawn_rows, snapshot.spec.tables[0], rows_per_s)
            ):
                _wait_for(lambda: followed.deltas.now.rows > before, "no deltas came")
                first, started_at = followed.deltas.now.rows, time.perf_counter()
                values = without_deltas(number)
                progress, took_s = followed.deltas.now, time.perf_counter() - started_at
                staleness_s = progress.age_ms(time.time()) / 1000
            if progress.refused:
                raise LoadError(f"{progress.refused} deltas were refused")
            stopped_at = time.time()
            # Fresh as of a moment after the last append: nothing waits.
            _wait_for(lambda: (followed.deltas.now.fresh_at or 0) >= stopped_at, "deltas were not applied")
            return {**values, "rows applied": (progress.rows - first) / took_s, "staleness": staleness_s}

        without_deltas(0)
        subjects: dict[str, harness.Subject] = {"without deltas": without_deltas, "with deltas": with_deltas}
        setup = {"rows": f"{rows}", "rows published a second": f"{rows_per_s}"}
        bench.run([harness.BenchTable("lookups beside row updates", MEASURES, subjects, setup)])
    node.close()
