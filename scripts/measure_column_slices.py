"""Measure a wide table divided by row, by column and by both: bytes, CPU and p50 of a lookup, and what `plan` chooses.

    python scripts/measure_column_slices.py [--rows N] [--seconds S] [--rounds N] [--sums float16] [--json FILE]

Shard nodes are processes behind Unix sockets, started as users start them; the router is this process. Requests have 50
to 500 bags of 0 to twice the mean ids, drawn alike from all rows; each is looked up alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
import numpy as np

from loader.snapshot.buckets import RowBuckets
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.reader import Snapshot
from loadtest.bench import harness
from loadtest.servers import ServerCommand, running
from router.errors import PlanError
from router.plan import Plan, table_bytes
from router.plan_file import PlanFile, RanksOfBuckets, ShardingType, TablePlan
from router.planning.inputs import CapacityOptions, CpuNode, LookupProfile, NetworkOptions
from router.planning.tables import TablePlanner
from router.router import Router
from serving.cli.plan import ROWS_PER_S
from serving.fleet.supervisor import shardrank_command
from shard_node.answer import ReplyEncoding, SumFormat
from shard_node.bags import Bags, Float32Array
from shard_node.wire.address import Address

REQUESTS, MIN_BAGS, MAX_BAGS = 64, 50, 500
TIMEOUT_S = 60.0
ROOM = 1.3
"""Of a shard's part of the table, the memory that `plan` is given for it: an undivided table does not fit."""
TO, BACK = "bytes to shards", "bytes back"
ROUTER, NODES, ALL = "CPU of the router", "CPU of the shards", "CPU of a request"
MEASURES = (
    harness.Measure(TO, "B"),
    harness.Measure(BACK, "B"),
    harness.Measure(ROUTER, "ms"),
    harness.Measure(NODES, "ms"),
    harness.Measure(ALL, "ms"),
    harness.Measure("p50", "ms"),
)


@dataclass(frozen=True, slots=True)
class Way:
    """A division of the table: how many slices of its columns, and over how many shards the rows of each are."""

    kind: ShardingType
    slices: int
    spread: int

    def plan_file(self, spec: ModelSpec, shards: int) -> PlanFile:
        """Write down who owns what: the slices have shards in turn, and the rows of each slice are dealt to its own."""
        (table,) = spec.tables
        count = RowBuckets.of(table).count
        slices = tuple(
            RanksOfBuckets.of((number * self.spread + np.arange(count) % self.spread) % shards)
            for number in range(self.slices)
        )
        planned = TablePlan(
            table=table.name, num_embeddings=table.num_embeddings, bucketing=table.bucketing,
            sharding_type=self.kind, column_dims=table.column_dims, slices=slices,
        )  # fmt: skip
        return PlanFile.of(spec.model, shards, 1, [planned])


def ways_over(shards: int) -> dict[str, Way]:
    """Return the ways that are compared; over two shards both have some rows of both slices."""
    return {
        "row": Way("row_wise", 1, shards),
        "column": Way("column_wise", shards, 1),
        "both": Way("grid_shard", 2, max(2, shards // 2)),
    }


@contextlib.contextmanager
def fleet_of(snapshot: Snapshot, file: PlanFile, runner: Any, folder: Path) -> Iterator[tuple[Router, Sequence[int]]]:
    """Run a node for each shard of a plan; yield a router over them, and the processes of the nodes."""
    folder.mkdir()
    (plan_path := folder / "plan.json").write_text(file.to_json())
    addresses = [Address(path=f"{folder}/{shard}.sock") for shard in range(file.num_shards)]
    commands = [
        ServerCommand(
            f"shard {shard}",
            shardrank_command(
                "shard-node", "--no-verify", "--device", "cpu", "--snapshot", str(snapshot.path), "--plan",
                str(plan_path), "--shard", f"{shard}/{file.num_shards}", "--listen", str(address),
            ),
            folder / f"{shard}.log",
        )
        for shard, address in enumerate(addresses)
    ]  # fmt: skip

    def why_not_ready() -> str:
        return "" if all(Path(address.path).exists() for address in addresses) else "not all of them listen"

    with running("nodes", commands, why_not_ready) as process_ids:
        plan = Plan.of_file(snapshot.spec, file, file.num_shards, 1)
        router = harness.make_router(snapshot, plan, harness.remote_shards(snapshot, plan, addresses))
        yield router, process_ids
        runner.run(router.close())


def drawn_requests(rows: int, hotness: int) -> list[Bags]:
    """Draw requests: bags of 0 to twice the mean ids."""
    rng, requests = np.random.default_rng(hotness), []
    for _ in range(REQUESTS):
        bags = int(rng.integers(MIN_BAGS, MAX_BAGS, endpoint=True))
        lengths = rng.integers(0, 2 * hotness, bags, endpoint=True)
        ids = rng.integers(0, rows, int(lengths.sum()))
        requests.append(Bags.from_lengths(np.zeros(1, np.int32), np.array([bags]), lengths, ids))
    return requests


async def check_sums(router: Router, request: Bags, rows: Float32Array, forms: ReplyEncoding) -> None:
    """Raise AssertionError unless a lookup gives the sums of the rows, but for their rounding."""
    found = await router.lookup(harness.MODEL, 1, request, time.monotonic() + TIMEOUT_S, forms)
    owner = np.repeat(np.arange(request.num_bags), request.lengths)
    expected = np.zeros((request.num_bags, rows.shape[1]), np.float32)
    np.add.at(expected, owner, rows[request.values])
    np.testing.assert_allclose(found.feature(0), expected, rtol=0.02, atol=0.02 * (1 + request.lengths.max()))


def measured(
    runner: Any, router: Router, nodes: Sequence[int], requests: Sequence[Bags], seconds: float,
    forms: ReplyEncoding, _: int,
) -> dict[str, float]:  # fmt: skip
    """Look up all requests, one after the other, again and again for some seconds."""

    def nodes_cpu_s() -> float:
        tasks = [task for node in nodes for task in Path(f"/proc/{node}/task").iterdir()]
        # Nanoseconds; the times of `/proc/PID/stat` are in hundredths of a second.
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    async def look_up() -> dict[str, float]:
        times, wire = list[float](), np.zeros(5)
        await router.lookup(harness.MODEL, 1, requests[0], time.monotonic() + TIMEOUT_S, forms)
        of_nodes, of_router, started_at = nodes_cpu_s(), time.process_time(), time.perf_counter()
        while time.perf_counter() - started_at < seconds:
            for request in requests:
                before = time.perf_counter()
                found = await router.lookup(harness.MODEL, 1, request, time.monotonic() + TIMEOUT_S, forms)
                times.append(time.perf_counter() - before)
                wire += found.times.wire_bytes
        of_router, of_nodes = time.process_time() - of_router, nodes_cpu_s() - of_nodes
        count = len(times)
        return {
            TO: wire[0] / count,
            BACK: wire[1:].sum() / count,
            ROUTER: 1e3 * of_router / count,
            NODES: 1e3 * of_nodes / count,
            ALL: 1e3 * (of_router + of_nodes) / count,
            "p50": 1e3 * float(np.median(times)),
        }

    values: dict[str, float] = runner.run(look_up())
    return values


def planned(spec: ModelSpec, shards: int, hotness: int) -> str:
    """Return how `shardrank plan --out` divides the table over CPUs that can't hold all of it."""
    ram_gb = ROOM * table_bytes(spec.tables[0]) / shards / 1e9
    node = CpuNode.of(cores=1, ram_gb=ram_gb, disk_gb=0, rows_per_s=ROWS_PER_S)
    fleet = CapacityOptions(
        system=node, cards=1, card_memory_gb=ram_gb, pinned_memory_gb=0, shards=shards,
        candidates=(MIN_BAGS + MAX_BAGS) // 2, network=NetworkOptions(gb_per_s=12.5, latency_us=20),
    )  # fmt: skip
    try:
        (table,) = TablePlanner(spec, fleet, LookupProfile(hotness={"f00": hotness})).best().tables
    except PlanError as error:
        return f"refused: {error}"
    return table.sharding_type + (f" {list(table.column_dims)}" if table.column_dims else "")


def measure_fleets(
    bench: harness.Bench,
    tables: harness.UniformTables,
    snapshots: Mapping[int, Snapshot],
    shards: int,
    hotnesses: Sequence[int],
    seconds: float,
    forms: ReplyEncoding,
) -> dict[str, str]:
    """Compare the ways of one table over so many shards; return what is planned, by title."""
    chosen = dict[str, str]()
    with ExitStack() as stack:
        fleets = {}
        for name, way in ways_over(shards).items():
            snapshot, folder = snapshots[way.slices], bench.folder / f"{tables.embedding_dim}-{shards}-{name}"
            file = way.plan_file(snapshot.spec, shards)
            fleets[name] = stack.enter_context(fleet_of(snapshot, file, bench.runner, folder))
        cells = []
        for hotness in hotnesses:
            requests, title = (
                drawn_requests(tables.rows, hotness),
                f"dim {tables.embedding_dim}, {shards} shards, {hotness} ids a bag",
            )
            for router, _ in fleets.values():
                bench.runner.run(check_sums(router, requests[0], tables.all_rows(), forms))
            subjects = {
                name: partial(measured, bench.runner, *fleet, requests, seconds, forms)
                for name, fleet in fleets.items()
            }
            chosen[title] = planned(snapshots[1].spec, shards, hotness)
            cells.append(harness.BenchTable(title, MEASURES, subjects, {"planned": chosen[title]}))
        bench.run(cells)
    return chosen


@click.option("--rows", default=200_000, help="Of the table.")
@click.option("--dim", "dims", default=(512, 1024), multiple=True, help="Of the table's rows.")
@click.option("--shards", "counts", default=(2, 4), multiple=True, help="Nodes.")
@click.option("--hotness", "hotnesses", default=(1, 5, 20), multiple=True, help="Ids in a bag, in the mean.")
@click.option("--seconds", default=1.0, help="Of one measurement of one way.")
@click.option("--sums", default="float16", type=click.Choice(get_args(SumFormat)), help="Number format of sums.")
def column_slices(
    bench: harness.Bench, rows: int, dims: Sequence[int], counts: Sequence[int], hotnesses: Sequence[int],
    seconds: float, sums: SumFormat,
) -> None:  # fmt: skip
    """Measure a wide table divided by row, by column and by both."""
    forms, chosen = ReplyEncoding(stored=True, sums=sums), dict[str, str]()
    for dim in dims:
        tables, snapshots = harness.UniformTables(1, rows, dim), dict[int, Snapshot]()
        for slices in sorted({way.slices for shards in counts for way in ways_over(shards).values()}):
            column_dims = (dim // slices,) * slices if slices > 1 else ()
            snapshots[slices] = tables.export(bench.folder / f"{dim}-{slices}", {"column_dims": column_dims})
        for shards in counts:
            chosen |= measure_fleets(bench, tables, snapshots, shards, hotnesses, bench.seconds(seconds), forms)
    bench.results["planned"] = chosen
    for title, choice in chosen.items():
        click.echo(f"{title}: planned {choice}")


if __name__ == "__main__":
    harness.bench_command(column_slices)()
