"""What a lookup costs beyond the rows it reads: `python -m loadtest.bench_lookup [--json FILE]`.

Side by side in one run, on the same ids: the bare torch op on one int8 arena (the floor), the router with the rows in
this process (one card and two), the router with the rows in another process behind a Unix socket, and float32
`nn.EmbeddingBag`. Calls are interleaved batch by batch, so that all see the same noise; ratios are to the bare op.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import platform
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import uvloop
from rich.console import Console

from loader.snapshot.codecs import codec_for
from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import RowsFromBlocks
from loader.snapshot.tables import TableSpec
from loader.snapshot.writer import export_snapshot
from loadtest.load.result import processor
from loadtest.tables import make_table
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper
from router.plan import Plan
from router.replicas import ReplicatedShard
from router.router import Router
from shard_node.bags import Float32Array, Int64Array, KeyedBags
from shard_node.engine.arena import Arena, allocate_rows
from shard_node.engine.loading import load_tables
from shard_node.node import LocalShard, Shard, ShardNode
from shard_node.wire.address import Address
from shard_node.wire.client import ShardClient
from shard_node.wire.server import NodeServer

MODEL = "bench"
# Rows repeat after this many: random enough to fill codes, small enough to make gigabytes in seconds.
DISTINCT_ROWS = 1 << 16
SERVER_START_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class LookupShape:
    """Size of the tables: `num_tables` of equal size, `table_bytes` together, one feature each."""

    embedding_dim: int
    num_tables: int
    table_bytes: int

    @property
    def rows_per_table(self) -> int:
        """Count the rows of each table."""
        return max(1, self.table_bytes // codec_for("int8", self.embedding_dim).row_bytes // self.num_tables)

    def spec(self) -> ModelSpec:
        """Describe the model: int8 rows, ids that are rows."""
        names = [f"f{number:02d}" for number in range(self.num_tables)]
        return ModelSpec(
            model=MODEL,
            tables=tuple(
                TableSpec(
                    name=name,
                    num_embeddings=self.rows_per_table,
                    embedding_dim=self.embedding_dim,
                    feature_names=(name,),
                )
                for name in names
            ),
            features=tuple(FeatureSpec(name=name, side="candidate") for name in names),
            dense_model=DenseModelSpec(kind="mlp"),
        )


def distinct_rows(embedding_dim: int) -> Float32Array:
    """Draw float32 [DISTINCT_ROWS, embedding_dim], the block that every table repeats."""
    rows: Float32Array = np.random.default_rng(7).standard_normal((DISTINCT_ROWS, embedding_dim), dtype=np.float32)
    return rows


def write_snapshot(store: Path, shape: LookupShape) -> Path:
    """Export the shape's snapshot; takes some seconds for each gigabyte."""
    block = distinct_rows(shape.embedding_dim)

    def blocks() -> Iterator[Float32Array]:
        for first in range(0, shape.rows_per_table, DISTINCT_ROWS):
            yield block[: shape.rows_per_table - first]

    rows = {
        table.name: RowsFromBlocks(blocks(), table.num_embeddings, table.embedding_dim) for table in shape.spec().tables
    }
    return export_snapshot(store, shape.spec(), rows=rows, dense={"unused": torch.zeros(1)})


def make_node(snapshot: Snapshot, plan: Plan, shard: int = 0) -> ShardNode:
    """Load one shard of the model on a node."""
    node = ShardNode(plan.identity(shard))
    node.stage(snapshot.spec.model, snapshot.version, load_tables(snapshot, plan.partition(shard), plan.digest))
    node.flip(snapshot.spec.model, snapshot.version)
    return node


def make_router(snapshot: Snapshot, plan: Plan, shard: Shard) -> Router:
    """Make a router over one shard."""
    schema = FeatureSchema.of(snapshot.spec)
    return Router(schema, IdMapper(schema, {}), plan, [shard])


def local_router(snapshot: Snapshot, num_cards: int) -> Router:
    """Make the embedded default: the node is in this process."""
    plan = Plan.make(snapshot.spec, cards_per_shard=num_cards)
    return make_router(snapshot, plan, LocalShard(make_node(snapshot, plan)))


@contextmanager
def node_process(snapshot_path: Path, shard: int = 0, num_shards: int = 1) -> Iterator[Address]:
    """Run one shard's node in a process of its own behind a Unix socket, one card, one thread."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        address = f"unix:{folder}/node.sock"
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(snapshot_path, shard, num_shards, address, theirs), daemon=True)
        process.start()
        try:
            if not ours.poll(SERVER_START_TIMEOUT_S):
                raise TimeoutError(f"the shard node was not ready within {SERVER_START_TIMEOUT_S} s")
            ours.recv()
            yield Address.parse(address)
        finally:
            process.terminate()
            process.join()


def _serve(snapshot_path: Path, shard: int, num_shards: int, address: str, ready: Connection) -> None:
    torch.set_num_threads(1)
    snapshot = Snapshot.open(snapshot_path, verify=False)
    node = make_node(snapshot, Plan.make(snapshot.spec, num_shards), shard)

    async def run() -> None:
        server = NodeServer(node)
        await server.start([Address.parse(address)])
        ready.send("ready")
        await asyncio.Event().wait()

    uvloop.run(run())


def remote_router(snapshot: Snapshot, address: Address) -> Router:
    """Make a router whose only shard is behind a socket."""
    plan = Plan.make(snapshot.spec)
    shard = ReplicatedShard(plan, 0, snapshot.identity, [ShardClient(address)])
    return make_router(snapshot, plan, shard)


def bare_arena(snapshot: Snapshot, shape: LookupShape) -> Arena:
    """Load all tables into one arena, for calling the torch op with nothing around it."""
    rows = allocate_rows(shape.rows_per_table * shape.num_tables, codec_for("int8", shape.embedding_dim).row_bytes)
    for number, table in enumerate(snapshot.spec.tables):
        first = number * shape.rows_per_table
        for begin in range(0, shape.rows_per_table, DISTINCT_ROWS):
            count = min(DISTINCT_ROWS, shape.rows_per_table - begin)
            rows[first + begin : first + begin + count] = snapshot.read_rows(table.name, begin, count)
    return Arena("int8", shape.embedding_dim, rows, {0: rows.nbytes}, "ram")


def float32_table(shape: LookupShape) -> torch.nn.EmbeddingBag:
    """Make the same rows in float32, all tables in one, as `nn.EmbeddingBag` users have them."""
    rows = shape.rows_per_table * shape.num_tables
    weight = torch.empty(rows, shape.embedding_dim)
    block = torch.from_numpy(distinct_rows(shape.embedding_dim))
    for table in range(shape.num_tables):
        part = weight[table * shape.rows_per_table : (table + 1) * shape.rows_per_table]
        for first in range(0, part.shape[0], DISTINCT_ROWS):
            part[first : first + DISTINCT_ROWS] = block[: part.shape[0] - first]
    return torch.nn.EmbeddingBag.from_pretrained(weight, mode="sum", include_last_offset=True)


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch: raw ids by feature, and int64 [n] rows in the order of all tables one after the other."""

    bags: KeyedBags
    slots: Int64Array


def make_batch(shape: LookupShape, rng: np.random.Generator, batch: int, hotness: int) -> Batch:
    """Draw uniform ids: the worst case for caches."""
    num_bags = shape.num_tables * batch
    values = rng.integers(0, shape.rows_per_table, num_bags * hotness)
    bags = KeyedBags.from_lengths(
        np.arange(shape.num_tables, dtype=np.int32),
        np.full(shape.num_tables, batch, np.int64),
        np.full(num_bags, hotness, np.int64),
        values,
    )
    base = np.arange(shape.num_tables, dtype=np.int64) * shape.rows_per_table
    return Batch(bags, values + np.repeat(base, batch * hotness))


BATCHES_PER_CELL = 8
MIN_ROUNDS, MAX_ROUNDS = 3, 400
Call = Callable[[Batch], Awaitable[Float32Array]]


def _router_call(router: Router, version: int) -> Call:
    async def call(batch: Batch) -> Float32Array:
        embeddings = await router.lookup(MODEL, version, batch.bags, time.monotonic() + 60)
        return embeddings.blocks[0]

    return call


async def measure_shape(
    shape: LookupShape, snapshot_path: Path, seconds_per_cell: float, console: Console
) -> list[dict[str, Any]]:
    """Measure all batch sizes and hotnesses of one shape, each for about `seconds_per_cell`."""
    console.print(f"loading {shape.table_bytes / 1e9:.1f} GB, dim {shape.embedding_dim} …")
    snapshot = Snapshot.open(snapshot_path, verify=False)
    arena = bare_arena(snapshot, shape)
    module = float32_table(shape)

    async def bare(batch: Batch) -> Float32Array:
        return arena.pool(batch.slots, batch.bags.offsets, None)

    async def float32(batch: Batch) -> Float32Array:
        pooled: torch.Tensor = module(torch.from_numpy(batch.slots), torch.from_numpy(batch.bags.offsets))
        return pooled.numpy()

    with node_process(snapshot_path) as address:
        remote = remote_router(snapshot, address)
        calls: dict[str, Call] = {
            "bare_op": bare,
            "local": _router_call(local_router(snapshot, 1), snapshot.version),
            "local_2_cards": _router_call(local_router(snapshot, 2), snapshot.version),
            "unix_socket": _router_call(remote, snapshot.version),
            "embedding_bag_fp32": float32,
        }
        results = []
        for hotness in (1, 20):
            for batch_size in (1, 64, 512):
                results.append(await _measure_cell(shape, calls, batch_size, hotness, seconds_per_cell))
        await remote.close()
    return results


async def _measure_cell(
    shape: LookupShape, calls: dict[str, Call], batch_size: int, hotness: int, seconds_per_cell: float
) -> dict[str, Any]:
    rng = np.random.default_rng(batch_size * 1000 + hotness)
    batches = [make_batch(shape, rng, batch_size, hotness) for _ in range(BATCHES_PER_CELL)]
    await _check_same_answers(calls, batches[0])
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    started = time.perf_counter()
    rounds = 0
    while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and time.perf_counter() - started < seconds_per_cell):
        for batch in batches:
            for name, call in calls.items():
                begin = time.perf_counter()
                await call(batch)
                seconds[name].append(time.perf_counter() - begin)
        rounds += 1
    rows = shape.num_tables * batch_size * hotness
    median = {name: float(np.median(taken)) for name, taken in seconds.items()}
    return {
        "embedding_dim": shape.embedding_dim,
        "batch": batch_size,
        "hotness": hotness,
        "features": shape.num_tables,
        "rows_per_batch": rows,
        "calls": rounds * len(batches),
        "us_per_batch": {name: taken * 1e6 for name, taken in median.items()},
        "ns_per_row": {name: taken * 1e9 / rows for name, taken in median.items()},
        "ratio_to_bare_op": {name: taken / median["bare_op"] for name, taken in median.items()},
        "local_overhead_us": (median["local"] - median["bare_op"]) * 1e6,
    }


async def _check_same_answers(calls: dict[str, Call], batch: Batch) -> None:
    # A benchmark of wrong answers is worth nothing. float32 differs by the int8 rounding of each row.
    expected = await calls["bare_op"](batch)
    for name, call in calls.items():
        tolerance = 0.02 if name == "embedding_bag_fp32" else 1e-5
        largest = float(np.sqrt(batch.bags.num_values / batch.bags.num_bags)) * 10
        np.testing.assert_allclose(await call(batch), expected, rtol=tolerance, atol=tolerance * largest, err_msg=name)


def _print(results: list[dict[str, Any]], console: Console) -> None:
    names = list(results[0]["us_per_batch"])
    columns = ("dim", "hotness", "batch", *names, "local overhead µs")
    table = make_table([], columns, title="ns per row (ratio to the bare op)")
    for result in results:
        cells = [f"{result['ns_per_row'][name]:.1f} ({result['ratio_to_bare_op'][name]:.2f}×)" for name in names]
        shape = [str(result[key]) for key in ("embedding_dim", "hotness", "batch")]
        table.add_row(*shape, *cells, f"{result['local_overhead_us']:.0f}")
    console.print(table)


@click.command(help=__doc__)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results to this file.")
@click.option("--table-gb", type=click.FloatRange(min=0.001), default=2.0, show_default=True, help="int8 GB of rows.")
@click.option("--dim", "dims", type=int, multiple=True, default=(64, 128), show_default=True, help="Repeatable.")
@click.option("--features", type=click.IntRange(min=1), default=26, show_default=True, help="One table each.")
@click.option("--seconds", type=click.FloatRange(min=0), default=6.0, show_default=True, help="For each cell.")
def main(json_path: Path | None, table_gb: float, dims: tuple[int, ...], features: int, seconds: float) -> None:
    """Run the benchmark."""
    console = Console(width=150)
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    for dim in dims:
        shape = LookupShape(dim, features, int(table_gb * 1e9))
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            console.print(f"exporting {table_gb} GB, dim {dim} …")
            path = write_snapshot(Path(folder), shape)
            results += uvloop.run(measure_shape(shape, path, seconds, console))
    _print(results, console)
    if json_path is not None:
        report = {
            "benchmark": "bench_lookup",
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": {"processor": processor(), "python": platform.python_version(), "torch": torch.__version__},
            "table_gb": table_gb,
            "features": features,
            "results": results,
        }
        json_path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
