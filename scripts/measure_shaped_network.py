"""Measure lookups over shaped links, and compare bytes and times with what `shardrank plan` calculates.

    python scripts/measure_shaped_network.py [--mbit 100] [--delay-ms 1] [--shards 2,4,8] --json FILE
    python scripts/measure_shaped_network.py --tc 1000,10000 --json FILE    (as root; links by tc)
    python scripts/measure_shaped_network.py --balance

Each shard node is a process behind a link of its own: directions of `loadtest.drill.proxy`, all in one more process, or
with --tc a veth pair with a token bucket. One router asks them, with and without the 5,000 hottest rows. Proxies cost
CPU: choose links so slow that they bind, and not the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import numpy as np
import uvloop

from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import ArrayRows
from loader.snapshot.tables import RowDtype, TableSpec
from loader.snapshot.writer import export_snapshot
from loadtest.drill.proxy import Direction, TcpProxy, listening
from router.feature_schema import FeatureSchema
from router.hot_rows import HotRows, HotSet
from router.id_mapping import IdMapper
from router.plan import BucketOwners, Plan
from router.planning.capacity import capacity
from router.planning.division import PlacedModel
from router.planning.inputs import CapacityOptions, CpuNode, LookupProfile, NetworkOptions
from router.router import Router
from router.shard import ReplicaSource, ReplicatedShard
from serving.models.ranking_models import build_model
from shard_node.answer import ReplyEncoding, SumFormat
from shard_node.bags import Bags, TableLayout
from shard_node.engine.loading import load_tables
from shard_node.node import ShardNode
from shard_node.planning.hotness import Head
from shard_node.wire.address import Address
from shard_node.wire.server import NodeServer

DIM = 128
HEAD_ROWS, HEAD_SHARE, EXPONENT = 5000, 0.85, 1.1
CLONE_NEWNET = 0x40000000
FORKED = multiprocessing.get_context("fork")
ROWS_PER_S = 20e6
"""Of a core: what `shardrank plan` assumes."""


@dataclass(frozen=True)
class Case:
    """What is looked up, in which form sums travel, and with which rows at the router."""

    name: str
    dtype: RowDtype
    bags: int
    ids_per_bag: int
    sums: SumFormat = "float16"
    head: bool = True
    hot: bool = False


FORMS = [
    Case("stored rows", "int8", 36_000, 1),
    Case("float16 sums", "int8", 5000, 40),
    Case("int8 sums", "int8", 8000, 40, "int8"),
]
CONTROL = Case("whole float32 rows", "fp32", 12_000, 1, "float32")


@functools.cache
def spec_of(dtype: RowDtype, rows: int) -> ModelSpec:
    """Describe one table of so many rows of 128 columns."""
    table = TableSpec(name="items", num_embeddings=rows, embedding_dim=DIM, feature_names=("item",), dtype=dtype)
    features = (FeatureSpec(name="item", side="candidate"),)
    return ModelSpec(model=f"table-{dtype}", tables=(table,), features=features, dense_model=DenseModelSpec(kind="mlp"))


def exported(folder: str, dtype: RowDtype, rows: int) -> Snapshot:
    """Write a snapshot of random rows."""
    spec = spec_of(dtype, rows)
    random = np.random.default_rng(1).standard_normal((rows, DIM), dtype=np.float32)
    path = export_snapshot(
        folder, spec, rows={"items": ArrayRows(random)}, dense=build_model(spec).state_dict(), version=1
    )
    return Snapshot.open(path)


def draw_ids(rng: np.random.Generator, case: Case, rows: int, count: int) -> np.ndarray:
    """Draw ids, int64 [count]: rank = row; 85 % of them from a head, or all by a power law."""
    ranks = np.arange(1, (HEAD_ROWS if case.head else rows) + 1, dtype=np.float64)
    sums = np.cumsum(ranks**-EXPONENT)
    hot = sums.searchsorted(rng.random(count) * sums[-1])
    return np.where(rng.random(count) < HEAD_SHARE, hot, rng.integers(0, rows, count)) if case.head else hot


def draw_bags(rng: np.random.Generator, case: Case, rows: int) -> Bags:
    """Draw a batch: bags of as many ids each."""
    ids = draw_ids(rng, case, rows, case.bags * case.ids_per_bag)
    lengths = np.full(case.bags, case.ids_per_bag)
    return Bags.from_lengths(np.zeros(1, np.int32), np.array([case.bags]), lengths, ids)


def serve_shard(snapshots: list[Snapshot], shards: int, shard: int, pipe: Connection, *, own_network: bool) -> None:
    """Serve a shard of all snapshots until the process is ended; send its port, or with a network its address."""
    if own_network:
        ctypes.CDLL(None).unshare(CLONE_NEWNET)
        pipe.send("unshared")
        host, rate = pipe.recv()
        shape(f"w{shard}", f"10.9.{shard}.2/24", rate)
    host = host if own_network else "127.0.0.1"

    async def program() -> None:
        plans = [Plan.make(snapshot.spec, shards, "hash", replicate_bytes=0) for snapshot in snapshots]
        node = ShardNode(plans[0].identity(shard))
        for snapshot, plan in zip(snapshots, plans, strict=True):
            node.generations.stage(snapshot.spec.model, 1, load_tables(snapshot, plan.partition(shard), plan.digest))
            node.generations.flip(snapshot.spec.model, 1)
        server = NodeServer(node)
        await server.start([Address(host, 0)])
        pipe.send(server.addresses[0].port)
        await asyncio.Event().wait()

    uvloop.run(program())


def serve_links(ports: list[int], bits_per_s: float, delay_s: float, pipe: Connection) -> None:
    """Serve a shaped link to each port until the process is ended; send the ports of the links."""

    async def program() -> None:
        async with contextlib.AsyncExitStack() as stack:
            links = []
            for port in ports:
                connect = functools.partial(asyncio.open_connection, "127.0.0.1", port)
                ways = [Direction(delay_s=delay_s / 2, bits_per_s=bits_per_s) for _ in range(2)]
                links.append(await stack.enter_async_context(listening(TcpProxy(connect, *ways))))
            pipe.send([link.port for link in links])
            await asyncio.Event().wait()

    # Its timers are as fine as uvloop's last half millisecond, which is spent on a core that shards need.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(program())


def shape(device: str, address: str, mbit: float) -> None:
    """Give a veth device an address and a token bucket."""
    bucket = f"root tbf rate {mbit:g}mbit burst {mbit * 0.256:g}kb latency 100ms"
    for command in (
        f"ip address add {address} dev {device}",
        f"ip link set {device} up",
        f"tc qdisc add dev {device} {bucket}",
    ):
        subprocess.run(command.split(), check=True, env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"})


@contextlib.contextmanager
def processes() -> Iterator[Any]:
    """Start forked processes, each with its end of a pipe; end them with the block."""
    children = []

    def start(target: Any, *args: Any, **options: Any) -> tuple[Any, Connection]:
        here, there = FORKED.Pipe()
        child = FORKED.Process(target=target, args=(*args, there), kwargs=options, daemon=True)
        child.start()
        children.append(child)
        return child, here

    try:
        yield start
    finally:
        for child in children:
            child.kill()
            child.join()


@contextlib.contextmanager
def fleet(
    snapshots: list[Snapshot], shards: int, mbit: float, delay_s: float, *, by_tc: bool
) -> Iterator[list[Address]]:
    """Run shards behind shaped links; yield the addresses that the router knows."""
    with processes() as start:
        started = [start(serve_shard, snapshots, shards, shard, own_network=by_tc) for shard in range(shards)]
        if by_tc:
            for shard, (child, pipe) in enumerate(started):
                pipe.recv()
                add = f"ip link add v{shard} type veth peer name w{shard} netns {child.pid}"
                subprocess.run(add.split(), check=True)
                shape(f"v{shard}", f"10.9.{shard}.1/24", mbit)
                pipe.send((f"10.9.{shard}.2", mbit))
            yield [Address(f"10.9.{shard}.2", pipe.recv()) for shard, (_, pipe) in enumerate(started)]
            for shard in range(shards):
                subprocess.run(f"ip link delete v{shard}".split(), check=True)
            return
        ports = [pipe.recv() for _, pipe in started]
        _, links = start(serve_links, ports, mbit * 1e6, delay_s)
        yield [Address("127.0.0.1", port) for port in links.recv()]


def hot_rows(snapshot: Snapshot) -> HotRows:
    """Hold copies of the head."""
    layout = TableLayout.of(snapshot.spec)
    hot, pending = HotRows(layout), HotSet(layout, np.arange(HEAD_ROWS))
    hot.begin(pending)
    hot.fill(pending, np.arange(HEAD_ROWS), [snapshot.read_rows("items", 0, HEAD_ROWS)])
    hot.use(pending)
    return hot


@contextlib.asynccontextmanager
async def router_of(snapshot: Snapshot, addresses: list[Address], *, hot: bool) -> AsyncIterator[Router]:
    """Make a router whose shards are at these addresses."""
    plan = Plan.make(snapshot.spec, len(addresses), "hash", replicate_bytes=0)
    schema = FeatureSchema.of(snapshot.spec)
    shards = [
        ReplicatedShard(plan, shard, snapshot, ReplicaSource.fixed([address]))
        for shard, address in enumerate(addresses)
    ]
    copies = hot_rows(snapshot) if hot else None
    router = Router(schema, IdMapper.of_snapshot(snapshot, schema), plan, shards, hot=copies)
    try:
        yield router
    finally:
        await router.close()


def planned(case: Case, rows: int, shards: int, mbit: float, delay_s: float) -> dict[str, Any]:
    """Return what `plan` says of a batch: bytes to shards and back, and microseconds."""
    spec = spec_of(case.dtype, rows)
    row_bytes = {"int8": DIM + 8, "fp32": 4 * DIM}[case.dtype]
    network = NetworkOptions(
        gb_per_s=1000.0, shard_gb_per_s=mbit / 8000, latency_us=delay_s * 1e6, sums=case.sums,
        hot_rows_gb=HEAD_ROWS * row_bytes / 1e9 if case.hot else 0.0,
    )  # fmt: skip
    node = CpuNode.of(100.0, ROWS_PER_S, cores=1, disk_gb=100)
    options = CapacityOptions(
        system=node, cards=1, card_memory_gb=100, pinned_memory_gb=100, shards=shards, replicate_bytes=0,
        candidates=case.bags, network=network,
    )  # fmt: skip
    head = Head(HEAD_ROWS, HEAD_SHARE) if case.head else None
    profile = LookupProfile({"item": case.ids_per_bag}, EXPONENT, head)
    use = capacity(spec, profile, options)["network"]
    plan = Plan.make(spec, shards, "hash", replicate_bytes=0)
    sent = PlacedModel(spec, plan, options, profile).sent
    return {
        "out_bytes": float(sent.requests.sum()), "back_bytes": float(sent.replies.sum()),
        "ms": use["request_us"] / 1e3, "busy_ms": use["time"]["busy_us"] / 1e3, "hit_rate": use["hit_rate"],
        "busiest_to_mean": use["busiest_to_mean"],
    }  # fmt: skip


async def measured(
    case: Case, snapshot: Snapshot, addresses: list[Address], rows: int, batches: int, seconds: float
) -> dict[str, Any]:
    """Look batches up one after the other, then several at a time; return bytes and milliseconds of a batch."""
    rng, forms = np.random.default_rng(7), ReplyEncoding(stored=True, sums=case.sums)
    drawn = [draw_bags(rng, case, rows) for _ in range(batches + 2)]
    async with router_of(snapshot, addresses, hot=case.hot) as router:

        async def lookup(bags: Bags) -> tuple[float, Any]:
            begin = time.monotonic()
            found = await router.lookup(snapshot.spec.model, 1, bags, begin + 60, forms)
            return time.monotonic() - begin, found.times

        for bags in drawn[:2]:
            await lookup(bags)
        alone = [await lookup(bags) for bags in drawn[2:]]
        done, until, in_flight = 0, time.monotonic() + seconds, 4
        begin = time.monotonic()

        async def repeat(first: int) -> None:
            nonlocal done
            while time.monotonic() < until:
                await lookup(drawn[(first + done) % len(drawn)])
                done += 1

        if seconds:
            await asyncio.gather(*(repeat(first) for first in range(in_flight)))
        rate = done / (time.monotonic() - begin) if seconds else None
    return {
        "ms": 1e3 * statistics.median(took for took, _ in alone),
        "wait_ms": 1e3 * statistics.median(times.shard_wait_s for _, times in alone),
        "out_bytes": statistics.mean(times.wire_bytes[0] for _, times in alone),
        "back_bytes": statistics.mean(sum(times.wire_bytes[1:]) for _, times in alone),
        "batches_per_s": rate,
        "fastest_ms": 1e3 * min(times.shard_wait_s for _, times in alone),
    }


def of_shards(case: Case, shards: int) -> Case:
    """Have as many rows for each shard, where rows travel as they are: sums are as many on each link already."""
    return replace(case, bags=case.bags * shards // 2) if case.ids_per_bag == 1 else case


def run(args: argparse.Namespace, mbit: float, cases: list[Case], *, by_tc: bool) -> list[dict[str, Any]]:
    """Measure cases with every number of shards."""
    results, delay_s = [], 0.0 if by_tc else args.delay_ms / 1e3
    with tempfile.TemporaryDirectory() as folder:
        snapshots = [exported(folder, dtype, args.rows) for dtype in sorted({case.dtype for case in cases})]
        for shards in map(int, args.shards.split(",")):
            with fleet(snapshots, shards, mbit, delay_s, by_tc=by_tc) as addresses:
                for case in (of_shards(case, shards) for case in cases):
                    snapshot = next(each for each in snapshots if each.spec.model == f"table-{case.dtype}")
                    seen = uvloop.run(measured(case, snapshot, addresses, args.rows, args.batches, args.seconds))
                    plan = planned(case, args.rows, shards, mbit, delay_s)
                    results.append({"mbit": mbit, "shards": shards, "case": case, "measured": seen, "plan": plan})
                    click.echo(line_of(results[-1]))
    return results


def line_of(result: dict[str, Any]) -> str:
    """Format a line of the table."""
    case, seen, plan = result["case"], result["measured"], result["plan"]
    off = [
        f"{seen[name] / plan[name.removeprefix('wait_')] - 1:+.1%}" for name in ("out_bytes", "back_bytes", "wait_ms")
    ]
    rate = "" if seen["batches_per_s"] is None else f"{seen['batches_per_s']:.1f} ({1e3 / plan['busy_ms']:.1f})"
    law = f"{HEAD_ROWS} rows" if case.head else "Zipf"
    return (
        f"| {result['mbit']:g} | {result['shards']} | {case.name} | {law} | {plan['hit_rate']:.0%} "
        f"| {plan['busiest_to_mean']:.2f} | {seen['out_bytes'] / 1e3:.0f} ({off[0]}) "
        f"| {seen['back_bytes'] / 1e3:.0f} ({off[1]}) | {seen['wait_ms']:.1f} | {plan['ms']:.1f} | {off[2]} | {rate} |"
    )


def balance(rows: int = 2_000_000_000, shards: int = 16, lookups: int = 4_000_000) -> None:
    """Print how much more than the mean the busiest of 16 shards is asked for, of a table that is never stored."""
    rng, case = np.random.default_rng(0), FORMS[0]
    for bucketing, sharding in (("mixed", "hash"), ("range", "range")):
        table = spec_of("int8", rows).tables[0].model_copy(update={"bucketing": bucketing})
        spec = spec_of("int8", rows).model_copy(update={"tables": (table,)})
        owners = BucketOwners(Plan.make(spec, shards, sharding, replicate_bytes=0))
        ids = draw_ids(rng, case, rows, lookups)
        ratios = []
        for kept in (ids, ids[ids >= HEAD_ROWS]):
            bags = Bags.from_lengths(np.zeros(1, np.int32), np.array([1]), np.array([kept.size]), kept)
            counts = np.bincount(owners.of(bags, lambda: np.zeros(1, np.int16), 0), minlength=shards)
            ratios.append(counts.max() / counts.mean())
        alone, with_copies = ratios
        click.echo(f"{bucketing}: busiest of {shards} {alone:.3f}x of the mean, with hot rows {with_copies:.3f}x")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="Of each link, in each direction.")
    parser.add_argument("--delay-ms", type=float, default=1.0, help="Of a round trip.")
    parser.add_argument("--shards", default="2,4,8")
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--batches", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="Of four batches at a time; 0 for none.")
    parser.add_argument("--tc", default="", help="Links by tc, of these rates in Mbit/s, in place of the proxy.")
    parser.add_argument("--in-namespace", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--balance", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.balance:
        balance()
        return
    if args.tc and not args.in_namespace:
        sys.exit(subprocess.run(["unshare", "-n", sys.executable, *sys.argv, "--in-namespace"], check=False).returncode)
    click.echo("| Mbit/s | shards | replies | ids | hot | busiest | KB out | KB back | ms | plan | off | batches/s |")
    click.echo("|--:|--:|---|---|--:|--:|---|---|--:|--:|--:|---|")
    hot_and_cold = [replace(case, hot=hot) for case in FORMS for hot in (False, True)]
    results = []
    if args.tc:
        for mbit in map(float, args.tc.split(",")):
            results += run(args, mbit, hot_and_cold, by_tc=True)
    else:
        laws = [*hot_and_cold, *(replace(case, head=False) for case in hot_and_cold)]
        results = run(args, args.mbit, [*laws, CONTROL, replace(CONTROL, hot=True)], by_tc=False)
    if args.json:
        args.json.write_text(json.dumps(results, default=vars, indent=1))


if __name__ == "__main__":
    main()
