"""What a tier of hot rows does at a real router: `python -m loadtest.hot.shards cost [--json FILE]`.

Shard nodes are processes behind Unix sockets; the router, with a tier that its keeper fills from these nodes, is in
this process. Lookups are timed with and without a tier, of the same ids in turns, at chosen hit rates.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
import torch
import uvloop

from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import RowsFromBlocks
from loader.snapshot.tables import Frozen, RowDtype, TableSpec
from loader.snapshot.writer import export_snapshot
from loadtest.bench_lookup import DISTINCT_ROWS, distinct_rows, node_process
from router.feature_schema import FeatureSchema
from router.hot_keeper import HotBudget, HotRowsKeeper
from router.hot_rows import TABLE_SHIFT, HotRowsConfig
from router.id_mapping import IdMapper
from router.plan import Plan
from router.replicas import ReplicatedShard
from router.router import Router
from serving.cli.output import print_table
from shard_node.answer import EXACT
from shard_node.bags import Int64Array, KeyedBags
from shard_node.engine.memory import RowMemory
from shard_node.wire.address import Address
from shard_node.wire.client import ShardClient

MODEL = "hot"
TIMEOUT_S = 60.0
WARMUP_LOOKUPS = 10


@dataclass(frozen=True, slots=True)
class Tables:
    """What is looked up: tables of equal size, one feature each."""

    count: int
    rows: int
    dim: int
    dtype: RowDtype

    def spec(self) -> ModelSpec:
        """Describe the model; ids are rows."""
        names = [f"f{number:02d}" for number in range(self.count)]
        return ModelSpec(
            model=MODEL,
            tables=tuple(
                TableSpec(
                    name=name,
                    num_embeddings=self.rows,
                    embedding_dim=self.dim,
                    feature_names=(name,),
                    dtype=self.dtype,
                )
                for name in names
            ),
            features=tuple(FeatureSpec(name=name, side="candidate") for name in names),
            dense_model=DenseModelSpec(kind="mlp"),
        )

    def export(self, store: Path) -> Path:
        """Write the snapshot; takes some seconds for each gigabyte."""
        block = distinct_rows(self.dim)

        def blocks() -> Iterator[np.ndarray]:
            for first in range(0, self.rows, DISTINCT_ROWS):
                yield block[: self.rows - first]

        spec = self.spec()
        rows = {one.name: RowsFromBlocks(blocks(), self.rows, self.dim) for one in spec.tables}
        return export_snapshot(store, spec, rows=rows, dense={"unused": torch.zeros(1)})


@dataclass(frozen=True, slots=True)
class Shards:
    """Shard nodes that run, as child processes, one for each shard."""

    snapshot: Snapshot
    plan: Plan
    addresses: tuple[Address, ...]

    def connect(self) -> list[ReplicatedShard]:
        """Make connections of one's own to all of them."""
        return [
            ReplicatedShard(self.plan, index, self.snapshot.identity, [ShardClient(address)])
            for index, address in enumerate(self.addresses)
        ]

    def cpu_s(self) -> float:
        """Seconds of processor time that the nodes have taken."""
        used = [one.cpu_times() for one in psutil.Process().children()]
        return sum(one.user + one.system for one in used)

    @contextmanager
    def keeping(self, keys: Int64Array) -> Iterator[HotRowsKeeper]:
        """Hold these rows, ascending keys, in a tier of this process while the block runs."""
        config = HotRowsConfig(size_bytes=(64 << 20) + 4096 * keys.size, policy="static")

        def first(budget: HotBudget) -> Int64Array:
            return keys

        claim = RowMemory().take(config.size_bytes)
        keeper = HotRowsKeeper(
            self.snapshot, self.plan, self.connect, config, first, None, claim, on_status=lambda status: None
        )
        keeper.start()
        try:
            if keeper.rows.current.keys.size != keys.size:
                raise TimeoutError(f"the tier holds {keeper.rows.current.keys.size} of {keys.size} rows")
            yield keeper
        finally:
            keeper.close()

    def router(self, keeper: HotRowsKeeper | None) -> Router:
        """Make a router over them."""
        schema = FeatureSchema.of(self.snapshot.spec)
        return Router(
            schema, IdMapper(schema, {}), self.plan, self.connect(), hot=None if keeper is None else keeper.rows
        )

    async def look_up(self, router: Router, bags: KeyedBags) -> tuple[int, ...]:
        """Look a batch up; return its bytes on sockets as `LookupTimes.wire_bytes`."""
        deadline = time.monotonic() + TIMEOUT_S
        found = await router.lookup(MODEL, self.snapshot.version, bags, deadline, EXACT)
        return found.times.wire_bytes()


@contextmanager
def running_shards(tables: Tables, num_shards: int) -> Iterator[Shards]:
    """Export tables, and run a node for each shard in a process of its own while the block runs."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hot-")))
        path = tables.export(folder / "store")
        nodes = [stack.enter_context(node_process(path, index, num_shards)) for index in range(num_shards)]
        snapshot = Snapshot.open(path, verify=False)
        yield Shards(snapshot, Plan.make(snapshot.spec, num_shards), tuple(nodes))


class CostRow(Frozen):
    """One hit rate, with a tier and without, of the same ids in turns.

    Attributes:
        values: looked up in a request.
        off_ms, on_ms: of a lookup, median.
        ratio: median of the ratios of neighbouring lookups, on to off.
        off_router_ms, on_router_ms: processor time of a lookup in this process, mean.
        off_nodes_ms, on_nodes_ms: and on all nodes.
        off_kb, on_kb: bytes on sockets of a lookup, both ways.
    """

    hotness: int
    values: int
    hit_rate: float
    off_ms: float
    on_ms: float
    ratio: float
    off_router_ms: float
    on_router_ms: float
    off_nodes_ms: float
    on_nodes_ms: float
    off_kb: float
    on_kb: float


@dataclass(slots=True)
class _Arm:
    router: Router
    taken_s: list[float]
    router_s: float = 0.0
    nodes_s: float = 0.0
    wire_bytes: int = 0

    async def measure(self, shards: Shards, bags: list[KeyedBags]) -> None:
        """Look up some batches; what nodes take is read off before and after, in steps of 10 ms."""
        nodes_s, router_s = shards.cpu_s(), time.process_time()
        for one in bags:
            began = time.perf_counter()
            self.wire_bytes += sum(await shards.look_up(self.router, one))
            self.taken_s.append(time.perf_counter() - began)
        self.router_s += time.process_time() - router_s
        self.nodes_s += shards.cpu_s() - nodes_s

    def mean_ms(self, seconds: float) -> float:
        return 1e3 * seconds / len(self.taken_s)


def drawn_bags(
    rng: np.random.Generator, tables: Tables, bags: int, hotness: int, hot_rows: int, hit_rate: float
) -> KeyedBags:
    """Draw bags of every table; an id is one of its first `hot_rows` with chance `hit_rate`, else one of the others."""
    count = tables.count * bags * hotness
    is_hot = rng.random(count) < hit_rate
    ids = np.where(is_hot, rng.integers(0, hot_rows, count), rng.integers(hot_rows, tables.rows, count))
    lengths = np.full(tables.count * bags, hotness, np.int64)
    keys = np.arange(tables.count, dtype=np.int32)
    return KeyedBags.from_lengths(keys, np.full(tables.count, bags), lengths, ids)


async def cost_rows(shards: Shards, tables: Tables, bags: int, hot_rows: int, turns: int) -> list[CostRow]:
    """Measure hotness 1 and 20 at hit rates 0, 0.5 and 0.9, in turns of ten lookups."""
    keys = (np.arange(tables.count)[:, None] << TABLE_SHIFT) + np.arange(hot_rows)
    rng, found = np.random.default_rng(0), list[CostRow]()
    with shards.keeping(keys.reshape(-1)) as keeper:
        routers = shards.router(None), shards.router(keeper)
        for hotness in (1, 20):
            for hit_rate in (0.0, 0.5, 0.9):
                batches = [drawn_bags(rng, tables, bags, hotness, hot_rows, hit_rate) for _ in range(WARMUP_LOOKUPS)]
                arms = [_Arm(router, []) for router in routers]
                for turn in range(turns + 1):
                    for arm in arms:
                        await arm.measure(shards, batches)
                        if turn == 0:
                            arm.taken_s, arm.router_s, arm.nodes_s, arm.wire_bytes = [], 0.0, 0.0, 0
                off, on = arms
                found.append(_cost_row(hotness, batches[0].num_values, hit_rate, off, on))
        for router in routers:
            await router.close()
    return found


def _cost_row(hotness: int, values: int, hit_rate: float, off: _Arm, on: _Arm) -> CostRow:
    times = np.array([off.taken_s, on.taken_s]) * 1e3
    return CostRow(
        hotness=hotness,
        values=values,
        hit_rate=hit_rate,
        off_ms=float(np.median(times[0])),
        on_ms=float(np.median(times[1])),
        ratio=float(np.median(times[1] / times[0])),
        off_router_ms=off.mean_ms(off.router_s),
        on_router_ms=on.mean_ms(on.router_s),
        off_nodes_ms=off.mean_ms(off.nodes_s),
        on_nodes_ms=on.mean_ms(on.nodes_s),
        off_kb=off.wire_bytes / len(off.taken_s) / 1e3,
        on_kb=on.wire_bytes / len(on.taken_s) / 1e3,
    )


def _report(rows: list[Any], title: str, json_file: Path | None, setup: dict[str, Any]) -> None:
    told = [one.model_dump() for one in rows]
    print_table(title, tuple(f"#{name}" for name in told[0]), [tuple(map(_shown, one.values())) for one in told])
    if json_file is not None:
        head = {"benchmark": "hot_shards", "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        machine = {"cpus": len(os.sched_getaffinity(0)), "load_average": os.getloadavg()}
        json_file.write_text(json.dumps({**head, **machine, "setup": setup, "rows": told}, indent=2) + "\n")


def _shown(value: float) -> str:
    return f"{value:.5g}" if isinstance(value, float) else f"{value}"


def _run(work: Callable[[], Coroutine[Any, Any, list[Any]]]) -> list[Any]:
    torch.set_num_threads(1)
    found: list[Any] = uvloop.run(work())
    return found


json_option = click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write these.")
shards_option = click.option("--shards", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes.")


@click.group()
def main() -> None:
    """Drive a tier of hot rows at a real router."""


@main.command()
@json_option
@shards_option
@click.option("--tables", "count", type=click.IntRange(1), default=26, show_default=True)
@click.option("--rows", type=click.IntRange(2), default=100_000, show_default=True, help="Of each table.")
@click.option("--dim", type=click.IntRange(1), default=64, show_default=True, help="Of the int8 rows.")
@click.option("--hot-rows", type=click.IntRange(1), default=10_000, show_default=True, help="Of each table.")
@click.option("--bags", type=click.IntRange(1), default=100, show_default=True, help="Of each table in a request.")
@click.option("--turns", type=click.IntRange(1), default=20, show_default=True, help="Of ten lookups, for each kind.")
def cost(
    json_file: Path | None, shards: int, count: int, rows: int, dim: int, hot_rows: int, bags: int, turns: int
) -> None:
    """Time lookups with and without a tier."""
    tables = Tables(count, rows, dim, "int8")

    async def work() -> list[CostRow]:
        with running_shards(tables, shards) as running:
            return await cost_rows(running, tables, bags, hot_rows, turns)

    setup = {"shards": shards, "tables": count, "rows": rows, "dim": dim, "hot_rows": hot_rows, "bags": bags}
    _report(_run(work), f"{count} tables, {shards} shards, {hot_rows} hot rows of each", json_file, setup)


if __name__ == "__main__":
    main()
