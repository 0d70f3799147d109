"""`bench lookup`: what a lookup costs beyond the rows that it reads."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeAlias

import click
import numpy as np
import torch

from loader.memory import allocate_rows
from loader.snapshot.codecs import RowCodec
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import VocabularyMapping
from loadtest.bench import harness
from router.plan import Plan
from router.router import Router
from shard_node.bags import Bags, Float32Array, Int64Array
from shard_node.engine.arena import Arena
from shard_node.node import LocalShard

FEATURES, BATCHES = 26, 8
TIMEOUT_S = 60.0
BARE, FLOAT32 = "bare op", "nn.EmbeddingBag fp32"
MEASURES = (harness.Measure("time of a batch", "µs"),)
Batch: TypeAlias = tuple[Bags, Int64Array]
"""Raw ids by feature, and the same rows as int64 [n] in the order of all tables one after the other."""
Call: TypeAlias = Callable[[Batch], Awaitable[Float32Array]]


def calls_of(snapshot: Snapshot, tables: harness.UniformTables, remote: Router) -> dict[str, Call]:
    """Make the subjects, all tables one after the other in memory; the first is the floor."""
    codes = allocate_rows(tables.rows * tables.count, RowCodec("int8", tables.embedding_dim).row_bytes)
    for number, table in enumerate(snapshot.spec.tables):
        codes[number * tables.rows :][: tables.rows] = snapshot.read_rows(table.name, 0, tables.rows)
    arena = Arena("int8", tables.embedding_dim, codes, {0: codes.nbytes})
    weight = torch.from_numpy(tables.all_rows()).repeat(tables.count, 1)
    module = torch.nn.EmbeddingBag.from_pretrained(weight, mode="sum", include_last_offset=True)

    async def call_bare(batch: Batch) -> Float32Array:
        bags, rows = batch
        return arena.pool(rows, bags.offsets, None)

    async def call_float32(batch: Batch) -> Float32Array:
        bags, rows = batch
        pooled: torch.Tensor = module(torch.from_numpy(rows), torch.from_numpy(bags.offsets))
        return pooled.numpy()

    def local(cards: int) -> Router:
        plan = Plan.make(snapshot.spec, cards_per_shard=cards)
        return harness.make_router(snapshot, plan, [LocalShard(harness.make_node(snapshot, plan))])

    async def call_router(router: Router, batch: Batch) -> Float32Array:
        deadline = time.monotonic() + TIMEOUT_S
        return (await router.lookup(harness.MODEL, snapshot.version, batch[0], deadline)).blocks[0]

    routers = {"local": local(1), "local, 2 cards": local(2), "Unix socket": remote}
    return {
        BARE: call_bare,
        **{name: partial(call_router, router) for name, router in routers.items()},
        FLOAT32: call_float32,
    }


def time_calls(
    bench: harness.Bench, batches: Sequence[Batch], seconds: float, call: Call, number: int
) -> harness.Values:
    """Call with each batch in turn, for some seconds; return the median microseconds of a call.

    One call more comes first and is not counted; each batch comes once at least.
    """

    async def measure() -> list[float]:
        await call(batches[0])
        times, started_at = list[float](), time.perf_counter()
        while len(times) < len(batches) or time.perf_counter() - started_at < seconds:
            before = time.perf_counter()
            await call(batches[len(times) % len(batches)])
            times.append(time.perf_counter() - before)
        return times

    return {"time of a batch": 1e6 * float(np.median(bench.runner.run(measure())))}


async def check_same(calls: Mapping[str, Call], batch: Batch) -> None:
    """Raise AssertionError unless all give the same; float32 differs by the rounding of each int8 row."""
    expected = await calls[BARE](batch)
    largest = 10 * float(np.sqrt(batch[0].num_values / batch[0].num_bags))
    for name, call in calls.items():
        tolerance = 0.02 if name == FLOAT32 else 1e-5
        pooled = await call(batch)
        np.testing.assert_allclose(pooled, expected, rtol=tolerance, atol=tolerance * largest, err_msg=name)


def measure_dim(bench: harness.Bench, tables: harness.UniformTables, seconds: float) -> None:
    """Measure batches of all sizes, with 1 and with 20 ids a bag."""
    with ExitStack() as stack:
        click.echo(f"writing {tables.count} tables of {tables.rows} rows of dim {tables.embedding_dim}")
        snapshot = tables.export(bench.folder / f"{tables.embedding_dim}")
        plan = Plan.make(snapshot.spec)
        address = stack.enter_context(harness.node_process(snapshot))
        remote = harness.make_router(snapshot, plan, harness.remote_shards(snapshot, plan, [address]))
        stack.callback(lambda: bench.runner.run(remote.close()))
        calls, cells = calls_of(snapshot, tables, remote), []
        for hotness, size in itertools.product((1, 20), (1, 64, 512)):
            rng = np.random.default_rng(size * 1000 + hotness)
            first = np.repeat(np.arange(tables.count) * tables.rows, size * hotness)
            drawn = [tables.draw(rng, size, hotness) for _ in range(BATCHES)]
            batches = [(bags, bags.values + first) for bags in drawn]
            bench.runner.run(check_same(calls, batches[0]))
            title = f"dim {tables.embedding_dim}, {hotness} id{'s' * (hotness > 1)} a bag, batch {size}"
            subjects = {name: partial(time_calls, bench, batches, seconds, call) for name, call in calls.items()}
            cells.append(harness.BenchTable(title, MEASURES, subjects, {"rows of a batch": f"{first.size}"}))
        bench.run(cells)


async def check_equal(calls: Mapping[str, Call], batch: Batch) -> None:
    """Raise AssertionError unless all give the same bits."""
    first, *others = [await call(batch) for call in calls.values()]
    for other in others:
        np.testing.assert_array_equal(other, first)


KEYED_IDS = 2_600, 52_000
"""Of a batch: 100 candidates of 26 features with one id, and with 20."""


def measure_keyed(bench: harness.Bench, rows: int, dim: int, seconds: float) -> None:
    """Measure a table whose rows are named by keys, against one with a vocabulary of the same numbers."""
    click.echo(f"writing two tables of {rows} rows of dim {dim}")
    rng = np.random.default_rng(1)
    ids = np.unique(rng.integers(0, 2**63 - 1, rows + rows // 1000 + 100))[:rows]
    rng.shuffle(ids)
    plain = harness.UniformTables(1, rows, dim)
    keyed = {"num_embeddings": rows * 5 // 4, "keys": "int64"}
    snapshots = {
        "rows": plain.export(bench.folder / "rows", {"id_mapping": VocabularyMapping()}, vocabularies={"f00": ids}),
        "keys": plain.export(bench.folder / "keys", keyed, keys={"f00": ids}),
    }
    plans = {name: Plan.make(snapshot.spec) for name, snapshot in snapshots.items()}
    nodes = {name: harness.make_node(snapshot, plans[name]) for name, snapshot in snapshots.items()}
    engines = {name: node.generations.payload(harness.MODEL, 1).engine for name, node in nodes.items()}
    routers = {
        name: harness.make_router(snapshots[name], plans[name], [LocalShard(node)]) for name, node in nodes.items()
    }

    async def pool(name: str, batch: Batch) -> Float32Array:
        bags, numbers = batch
        return engines[name].pool(bags if name == "keys" else bags.with_values(numbers, None))[0]

    async def route(name: str, batch: Batch) -> Float32Array:
        return (await routers[name].lookup(harness.MODEL, 1, batch[0], time.monotonic() + TIMEOUT_S)).blocks[0]

    calls: dict[str, Call] = {f"engine, {name}": partial(pool, name) for name in snapshots}
    calls |= {f"router, {'vocabulary' if name == 'rows' else name}": partial(route, name) for name in snapshots}
    cells = []
    for hotness, size in itertools.product((1, 20), KEYED_IDS):
        drawn = [plain.draw(rng, size // hotness, hotness) for _ in range(BATCHES)]
        batches = [(bags.with_values(ids[bags.values], None), bags.values) for bags in drawn]
        bench.runner.run(check_equal(calls, batches[0]))
        title = f"{rows} rows, dim {dim}, {hotness} id{'s' * (hotness > 1)} a bag, {size} ids"
        subjects = {name: partial(time_calls, bench, batches, seconds, call) for name, call in calls.items()}
        cells.append(harness.BenchTable(title, MEASURES, subjects))
    bench.run(cells)


@harness.bench_command
@click.option("--table-gb", type=click.FloatRange(min=0.001), default=2.0, show_default=True, help="int8 GB of rows.")
@click.option("--dim", "dims", type=int, multiple=True, default=(64, 128), show_default=True, help="Repeatable.")
@click.option("--seconds", type=click.FloatRange(0), default=0.3, show_default=True, help="Of each measurement.")
@click.option("--keyed", is_flag=True, help="One table with keys against one with a vocabulary.")
def lookup(bench: harness.Bench, table_gb: float, dims: tuple[int, ...], seconds: float, *, keyed: bool) -> None:
    """Measure what a lookup costs beyond the rows that it reads.

    On the same ids: the bare torch op on one int8 arena (the floor), the router with the rows in this process (one card
    and two), the router with the rows in another process behind a Unix socket, and float32 `nn.EmbeddingBag`. Ids are
    uniform, the worst case for caches.

    Examples:
      shardrank loadtest bench lookup --quick
      shardrank loadtest bench lookup --dim 64 --json lookup.json
      shardrank loadtest bench lookup --keyed --dim 64 --table-gb 0.72
    """
    for dim in dims:
        rows = int(table_gb * 1e9) // RowCodec("int8", dim).row_bytes
        if keyed:
            measure_keyed(bench, max(1, rows), dim, bench.seconds(seconds))
            continue
        rows //= FEATURES
        measure_dim(bench, harness.UniformTables(FEATURES, max(1, rows), dim), bench.seconds(seconds))
