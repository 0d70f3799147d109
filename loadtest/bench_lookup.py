"""What a lookup costs beyond the rows it reads: `python -m loadtest.bench_lookup [--json FILE]`.

Side by side in one run, on the same ids: the bare torch op on one int8 arena (the floor), the router with the rows in
this process (one card and two), the router with the rows in another process behind a Unix socket, and float32
`nn.EmbeddingBag`. Calls are interleaved batch by batch, so that all see the same noise; ratios are to the bare op.
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import uvloop
from rich.console import Console
from rich.table import Table

from loader.snapshot.reader import Snapshot
from loadtest.lookup_setup import (
    MODEL,
    Batch,
    Shape,
    bare_arena,
    float32_table,
    local_router,
    make_batch,
    node_process,
    remote_router,
    write_snapshot,
)
from router.router import Router
from shard_node.bags import Float32Array

BATCHES_PER_CELL = 8
MIN_ROUNDS, MAX_ROUNDS = 3, 400
Call = Callable[[Batch], Awaitable[Float32Array]]


def _router_call(router: Router, version: int) -> Call:
    async def call(batch: Batch) -> Float32Array:
        embeddings = await router.lookup(MODEL, version, batch.bags, time.monotonic() + 60)
        return embeddings.blocks[0]

    return call


async def measure_shape(
    shape: Shape, snapshot_path: Path, seconds_per_cell: float, console: Console
) -> list[dict[str, Any]]:
    """Measures all batch sizes and hotnesses of one shape, each for about `seconds_per_cell`."""
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
    shape: Shape, calls: dict[str, Call], batch_size: int, hotness: int, seconds_per_cell: float
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
    table = Table(title="ns per row (ratio to the bare op)")
    for column in ("dim", "hotness", "batch", *names, "local overhead µs"):
        table.add_column(column, justify="right")
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
    """Runs the benchmark."""
    console = Console(width=150)
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    for dim in dims:
        shape = Shape(dim, features, int(table_gb * 1e9))
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            console.print(f"exporting {table_gb} GB, dim {dim} …")
            path = write_snapshot(Path(folder), shape)
            results += uvloop.run(measure_shape(shape, path, seconds, console))
    _print(results, console)
    if json_path is not None:
        report = {
            "benchmark": "bench_lookup",
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": {"processor": _processor(), "python": platform.python_version(), "torch": torch.__version__},
            "table_gb": table_gb,
            "features": features,
            "results": results,
        }
        json_path.write_text(json.dumps(report, indent=2) + "\n")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
