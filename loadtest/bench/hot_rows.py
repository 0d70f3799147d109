"""`bench hot-rows`: what copies of hot rows at the router save."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import click
import numpy as np

from loader.snapshot.reader import Snapshot
from loadtest.bench import harness
from loadtest.load.loops import cpu_by_role
from router.hot_rows import HotRows, HotSet
from router.plan import Plan
from router.router import Router
from shard_node.access_counts import TABLE_SHIFT
from shard_node.answer import EXACT
from shard_node.bags import Bags

TIMEOUT_S = 60.0
SHARDS, BAGS, BATCHES = 2, 100, 10
HIT_RATES = (0.0, 0.5, 0.9)
COST_MEASURES = (
    harness.Measure("time of a lookup", "ms"),
    harness.Measure("CPU of the router", "ms"),
    harness.Measure("CPU of the nodes", "ms"),
    harness.Measure("bytes on sockets", "kB"),
)


def hot_rows_of(snapshot: Snapshot, plan: Plan, count: int) -> HotRows:
    """Hold copies of the first rows of each table."""
    hot, tables = HotRows(plan.layout), snapshot.spec.tables
    keys = (np.arange(len(tables))[:, None] << TABLE_SHIFT) + np.arange(count)
    pending = HotSet(plan.layout, keys.reshape(-1))
    stored = np.concatenate([snapshot.read_rows(table.name, 0, count) for table in tables])
    hot.fill(pending, np.arange(keys.size), [stored])
    hot.use(pending).close()
    return hot


def measure_lookups(
    bench: harness.Bench, process_ids: Sequence[int], seconds: float, batches: Sequence[Bags], router: Router, _: int
) -> harness.Values:
    """Look batches up in turns for some seconds."""
    wire_bytes = list[int]()

    async def lookup(batch: Bags) -> None:
        embeddings = await router.lookup(harness.MODEL, 1, batch, time.monotonic() + TIMEOUT_S, EXACT)
        wire_bytes.append(sum(embeddings.times.wire_bytes))

    nodes_s, router_s = cpu_by_role(process_ids)["nodes"], time.process_time()
    median_us = bench.median_call_us(lookup, batches, seconds)
    return {
        "time of a lookup": median_us / 1e3,
        "CPU of the router": 1e3 * (time.process_time() - router_s) / len(wire_bytes),
        "CPU of the nodes": 1e3 * (cpu_by_role(process_ids)["nodes"] - nodes_s) / len(wire_bytes),
        "bytes on sockets": float(np.mean(wire_bytes)) / 1e3,
    }


def draw_hits(
    tables: harness.UniformTables, rng: np.random.Generator, hotness: int, hot_rows: int, hit_rate: float
) -> Bags:
    """Draw bags of every table; an id is one of its first `hot_rows` with chance `hit_rate`, else one of the others."""
    drawn = tables.draw(rng, BAGS, hotness)
    is_hot = rng.random(drawn.values.size) < hit_rate
    drawn.values[is_hot] %= hot_rows
    drawn.values[~is_hot] = rng.integers(hot_rows, tables.rows, np.count_nonzero(~is_hot))
    return drawn


@harness.bench_command
@click.option("--rows", type=click.IntRange(2), default=100_000, show_default=True, help="Of each of 26 tables.")
@click.option("--hot-rows", type=click.IntRange(1), default=10_000, show_default=True, help="Of each table.")
@click.option("--seconds", type=click.FloatRange(0), default=1.0, show_default=True, help="Of each measurement.")
def hot_rows(bench: harness.Bench, rows: int, hot_rows: int, seconds: float) -> None:
    """Measure what copies of hot rows at the router save: lookups over shard processes without them and with them.

    Examples:
      shardrank loadtest bench hot-rows --quick
      shardrank loadtest bench hot-rows --json hot-rows.json
    """
    if hot_rows >= rows:
        raise click.UsageError("--hot-rows: fewer than the rows of a table")
    tables, seconds = harness.UniformTables(26, rows, 64), bench.seconds(seconds)
    rng = np.random.default_rng(0)
    with ExitStack() as stack:
        click.echo(f"writing {tables.count} tables of {tables.rows} rows")
        snapshot = tables.export(bench.folder)
        plan = Plan.make(snapshot.spec, SHARDS)
        nodes = [stack.enter_context(harness.node_process(snapshot, plan, shard)) for shard in range(SHARDS)]
        shards = harness.remote_shards(snapshot, plan, [address for address, _ in nodes])
        process_ids = [number for _, numbers in nodes for number in numbers]
        copies = {"without hot rows": None, "with hot rows": hot_rows_of(snapshot, plan, hot_rows)}
        routers = {name: harness.make_router(snapshot, plan, shards, hot) for name, hot in copies.items()}
        cells = []
        for hotness, hit_rate in itertools.product((1, 20), HIT_RATES):
            batches = [draw_hits(tables, rng, hotness, hot_rows, hit_rate) for _ in range(BATCHES)]
            measure = partial(measure_lookups, bench, process_ids, seconds, batches)
            subjects = {name: partial(measure, router) for name, router in routers.items()}
            for measure_once in subjects.values():
                measure_once(0)
            title = f"cost, {hotness} id{'s' * (hotness > 1)} a bag, hit rate {hit_rate:g}"
            cells.append(harness.BenchTable(title, COST_MEASURES, subjects, {"shards": f"{SHARDS}"}))
        bench.run(cells)
        for router in routers.values():
            bench.runner.run(router.close())
