"""Measure how evenly shards are asked: `python -m loadtest.hot.balance [--json FILE]`.

One table whose rows are in order of popularity, as a vocabulary gives them: row r is looked up in proportion to
(r + 1) ^ -S. Over four shards as processes, and over sixteen in this process, the same ranks are looked up twice: as
rows in that order, and as rows scattered over the table, in alternation. With hot rows at the router and without, each
shard counts what it was asked for; the busiest is compared with the mean, and p99 of a lookup with that of the
scattered rows.
"""

from __future__ import annotations

import asyncio
import json
import platform
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import torch
import uvloop
from rich.console import Console

from loader.snapshot.codecs import codec_for
from loader.snapshot.reader import Snapshot
from loadtest.bench_lookup import MODEL, LookupShape, make_node, node_process, write_snapshot
from loadtest.load.result import processor
from loadtest.tables import make_table
from loadtest.workloads.distributions import RowScatter, Zipf
from router.feature_schema import FeatureSchema
from router.hot_rows import HotRows
from router.id_mapping import IdMapper
from router.plan import Plan
from router.replicas import ReplicatedShard
from router.router import Router
from shard_node.bags import Int64Array, KeyedBags
from shard_node.node import LocalShard, Shard
from shard_node.wire.client import ShardClient

DIM = 16
CANDIDATES, HOTNESS = 100, 20
TIMEOUT_S = 60.0
WARM_UP = 50


@dataclass(frozen=True, slots=True)
class Balance:
    """What was measured of one fleet, with or without hot rows.

    Attributes:
        shards: how many, and `processes` whether they are processes.
        hot_rows: copies at the router, the most popular ones; `hit_rate` the share of lookups that they took.
        busiest: lookups of the busiest shard by the mean of all, of rows in order of popularity.
        busiest_scattered: the same of scattered rows.
        p99_ms, p99_scattered_ms: of one lookup, by round.
        p99_ratio: of rows in order to scattered ones, the median of all rounds.
    """

    shards: int
    processes: bool
    hot_rows: int
    hit_rate: float
    busiest: float
    busiest_scattered: float
    p99_ms: tuple[float, ...]
    p99_scattered_ms: tuple[float, ...]
    p99_ratio: float


@dataclass(frozen=True, slots=True)
class BalanceArm:
    """A router, and which row has which rank for it."""

    router: Router
    scatter: RowScatter | None

    def bags(self, ranks: Int64Array) -> KeyedBags:
        """Make the bags of one request from the ranks of its rows."""
        rows = ranks if self.scatter is None else self.scatter.rows(ranks, np.zeros(ranks.size, np.int64))
        lengths = np.full(CANDIDATES, HOTNESS)
        return KeyedBags.from_lengths(np.zeros(1, np.int32), np.array([CANDIDATES]), lengths, rows)


def hot_rows_of(snapshot: Snapshot, plan: Plan, rows: Int64Array) -> HotRows:
    """Hold copies of rows, int64 [n], of the only table."""
    tier, keys = HotRows(plan.layout), np.sort(rows)
    pending = tier.begin(keys)
    (table,) = snapshot.spec.tables
    stored = np.concatenate([snapshot.read_rows(table.name, row, 1) for row in keys.tolist()])
    tier.put(pending, 0, np.arange(keys.size), stored)
    tier.use(pending).close()
    return tier


def make_arm(
    snapshot: Snapshot, plan: Plan, shards: Sequence[Shard], hot_rows: int, scatter: RowScatter | None
) -> BalanceArm:
    """Make a router over the shards, with copies of the most popular rows."""
    schema, hot = FeatureSchema.of(snapshot.spec), None
    if hot_rows:
        ranks = np.arange(hot_rows)
        rows = ranks if scatter is None else scatter.rows(ranks, np.zeros(hot_rows, np.int64))
        hot = hot_rows_of(snapshot, plan, rows)
    return BalanceArm(Router(schema, IdMapper(schema, {}), plan, shards, hot=hot), scatter)


async def looked_up(shards: Sequence[Shard]) -> Int64Array:
    """Count the lookups of each shard so far, int64 [shards]."""
    told = [await shard.info() for shard in shards]
    return np.array([sum(one.rows for one in info.lookups) for info in told])


async def measure(
    snapshot: Snapshot, plan: Plan, shards: Sequence[Shard], hot_rows: int, zipf: float, requests: int, rounds: int
) -> Balance:
    """Look up the same ranks as rows in order and as scattered ones, by turns."""
    (table,) = snapshot.spec.tables
    num_rows = np.full(CANDIDATES * HOTNESS, table.num_embeddings)
    scatter, rng = RowScatter.of(num_rows[:1]), np.random.default_rng(1)
    arms = [make_arm(snapshot, plan, shards, hot_rows, one) for one in (None, scatter)]
    asked = [np.zeros(len(shards), np.int64) for _ in arms]
    p99: list[list[float]] = [[], []]
    for arm in arms:
        # What is looked up first touches pages and connections that later ones find.
        for _ in range(WARM_UP):
            bags = arm.bags(Zipf(zipf).ranks(rng, num_rows))
            await arm.router.lookup(MODEL, snapshot.version, bags, time.monotonic() + TIMEOUT_S)
    for number in range(rounds):
        taken: list[list[float]] = [[], []]
        batches = [Zipf(zipf).ranks(rng, num_rows) for _ in range(requests)]
        # By turns in short runs, so that both see the same machine; each round begins with the other.
        for first in range(0, requests, 50):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                before = await looked_up(shards)
                for ranks in batches[first : first + 50]:
                    bags, began = arms[which].bags(ranks), time.perf_counter()
                    await arms[which].router.lookup(MODEL, snapshot.version, bags, time.monotonic() + TIMEOUT_S)
                    taken[which].append(1e3 * (time.perf_counter() - began))
                asked[which] += await looked_up(shards) - before
        for which in (0, 1):
            p99[which].append(float(np.percentile(taken[which], 99)))
    ratios = [ordered / scattered for ordered, scattered in zip(*p99, strict=True)]
    router = arms[0].router
    return Balance(
        shards=plan.num_shards,
        processes=not isinstance(shards[0], LocalShard),
        hot_rows=hot_rows,
        hit_rate=router.hot_hits / max(1, router.hot_lookups),
        busiest=float(asked[0].max() / asked[0].mean()),
        busiest_scattered=float(asked[1].max() / asked[1].mean()),
        p99_ms=tuple(p99[0]),
        p99_scattered_ms=tuple(p99[1]),
        p99_ratio=float(np.median(ratios)),
    )


async def run(path: Path, hot_rows: int, zipf: float, requests: int, rounds: int) -> list[Balance]:
    """Measure four shards as processes, and sixteen in this one, without hot rows and with them."""
    snapshot, found = Snapshot.open(path, verify=False), []
    with ExitStack() as processes:
        plan = Plan.make(snapshot.spec, 4)
        addresses = [processes.enter_context(node_process(path, shard, 4)) for shard in range(4)]
        async with AsyncExitStack() as connections:
            remote = [
                ReplicatedShard(plan, shard, snapshot.identity, [ShardClient(address)])
                for shard, address in enumerate(addresses)
            ]
            for one in remote:
                connections.push_async_callback(one.close)
            for hot in (0, hot_rows):
                found.append(await measure(snapshot, plan, remote, hot, zipf, requests, rounds))
    plan = Plan.make(snapshot.spec, 16)
    local = [LocalShard(make_node(snapshot, plan, shard)) for shard in range(16)]
    for hot in (0, hot_rows):
        found.append(await measure(snapshot, plan, local, hot, zipf, requests, rounds))
    for shard_here in local:
        await asyncio.to_thread(shard_here.node.close)
    return found


def print_balance(found: Sequence[Balance], console: Console) -> None:
    """Print a row for each fleet."""
    table = make_table(
        ("shards", "in"),
        ("hot rows", "hit rate", "busiest / mean", "scattered", "p99, ms", "scattered, ms", "p99 ratio"),
        title="Lookups of the busiest shard, and p99 of a lookup",
    )
    for one in found:
        table.add_row(
            str(one.shards),
            "processes" if one.processes else "one process",
            str(one.hot_rows),
            f"{one.hit_rate:.3f}",
            f"{one.busiest:.3f}",
            f"{one.busiest_scattered:.3f}",
            f"{np.median(one.p99_ms):.2f}",
            f"{np.median(one.p99_scattered_ms):.2f}",
            f"{one.p99_ratio:.2f}",
        )
    console.print(table)


@click.command(help=__doc__)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results to this file.")
@click.option("--rows", type=click.IntRange(min=10_000), default=40_000_000, show_default=True)
@click.option("--zipf", type=click.FloatRange(min=0.1, max=3), default=1.05, show_default=True, help="Exponent.")
@click.option("--hot-rows", type=click.IntRange(min=1), default=1000, show_default=True, help="Copies at the router.")
@click.option("--requests", type=click.IntRange(min=50), default=1000, show_default=True, help="Of a round.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
def main(json_path: Path | None, rows: int, zipf: float, hot_rows: int, requests: int, rounds: int) -> None:
    """Run the benchmark."""
    console = Console(width=150)
    torch.set_num_threads(1)
    shape = LookupShape(DIM, 1, rows * codec_for("int8", DIM).row_bytes)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        console.print(f"exporting {rows} rows …")
        path = write_snapshot(Path(folder), shape)
        found = uvloop.run(run(path, hot_rows, zipf, requests, rounds))
    print_balance(found, console)
    if json_path is not None:
        report = {
            "benchmark": "bench_balance",
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": {"processor": processor(), "python": platform.python_version(), "torch": torch.__version__},
            "rows": rows,
            "zipf": zipf,
            "request": {"bags": CANDIDATES, "hotness": HOTNESS},
            "results": [asdict(one) for one in found],
        }
        json_path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
