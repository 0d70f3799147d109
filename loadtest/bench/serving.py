"""`bench serving`: what serving costs beyond computing.

The limit of serving are the same batches, from raw ids to scores, computed in this process without a server: nothing is
received, parsed, queued, joined, counted, sorted or encoded. What a server uses beyond it is what it costs to be one.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, get_args

import click
import numpy as np

from loader.memory import settle_heap
from loader.snapshot.reader import Snapshot
from loadtest.bench import harness
from loadtest.bench.harness import Bench, BenchTable, Measure, Subject, Values
from loadtest.cli import side_split_option
from loadtest.load.config import TOLERANCES, bench_load
from loadtest.load.generator import Generators
from loadtest.servers import THIS_CHECKOUT, Server, check_scores, checked_checkout, commit_of, summed
from loadtest.servers import serving as serving_process
from loadtest.workloads import catalog
from loadtest.workloads.payloads import APIS, Api
from loadtest.workloads.prepare import write_random_snapshot
from router.plan import Plan
from serving.cli import options as opts
from serving.description import NumberFormat
from serving.embedded import ModelSource, load_served_model
from serving.formats.requests import RankRequest
from serving.models.layers import DtypeChoice, choose_dtype
from serving.observe.calls import STAGES, VersionCounter
from serving.observe.metrics import ServingMetrics
from serving.rank.ranking import MergedBatch, Ranking, merge
from serving.rank.service import RankingService
from shard_node.bags import Float32Array
from shard_node.node import LocalShard

DEADLINE_S = 600.0


class Limit:
    """A model in this process. Raises ShardrankError as loading a snapshot."""

    def __init__(self, path: Path, dtype: NumberFormat) -> None:
        snapshot = Snapshot.open(path, verify=False)
        self._model, self._version = snapshot.spec.model, snapshot.version
        plan = Plan.make(snapshot.spec)
        shard = LocalShard(harness.make_node(snapshot, plan))
        self._router = harness.make_router(snapshot, plan, [shard])
        source = ModelSource(snapshot=path, dtype=dtype, verify=False)
        with contextlib.closing(load_served_model(source, RankingService())) as served:
            parts = served.rankings[0].parts
        self._ranking = Ranking(parts, self._router, [shard], ServingMetrics(), VersionCounter())
        # As servers do once they have started.
        settle_heap()

    async def compute(self, workload: catalog.BenchWorkload, batch_requests: float, seconds: float) -> Values:
        """Score batches for some time; sizes next to the mean, `batch_requests`, are mixed to it."""
        requests, times, small = 0, list[float](), int(batch_requests)
        batches = {size: _batches(workload, size) for size in (small, small + 1)}
        # Once before the clock, so that every buffer is there.
        await self.scores(batches[small][0])
        started_at, cpu_s = time.perf_counter(), time.process_time()
        now = started_at
        while now - started_at < seconds:
            # Of the whole numbers below and above the mean, the one that keeps the sum closest to it.
            size = small + (requests + small < batch_requests * (len(times) + 1) - 0.5)
            await self.scores(batches[size][len(times) % len(batches[size])])
            before, now = now, time.perf_counter()
            times.append(now - before)
            requests += size
        return {
            "CPU of a request": 1e3 * (time.process_time() - cpu_s) / requests,
            "requests": requests / (now - started_at),
            "batch": requests / len(times),
            "time of a batch": 1e3 * float(np.median(times)),
        }

    async def scores(self, batch: MergedBatch) -> Float32Array:
        """Score a batch: float32 [candidates]."""
        deadline = time.monotonic() + DEADLINE_S
        embeddings = await self._router.lookup(self._model, self._version, batch.bags, deadline)
        scores: Float32Array = self._ranking.score_rows(batch, embeddings)[0]
        return scores


@lru_cache(maxsize=4)
def requests_of(workload: catalog.BenchWorkload) -> list[RankRequest]:
    """Make the pool's requests, not encoded."""
    made, rng = catalog.bench_workload(workload), np.random.default_rng(catalog.BENCH_SEED)
    return [made.request(rng) for _ in range(catalog.BENCH_REQUESTS)]


@lru_cache(maxsize=8)
def _batches(workload: catalog.BenchWorkload, size: int) -> list[MergedBatch]:
    """Every request of the pool once or twice, in batches of `size`."""
    requests = requests_of(workload)
    cycled = [requests[number % len(requests)] for number in range(-(-len(requests) // size) * size)]
    return [merge(cycled[first : first + size]) for first in range(0, len(cycled), size)]


CHECKED_REQUESTS = 2
FULL_LOAD = 32
"""Requests in flight."""
LIMIT = "without a server"
P50 = "p50"
LOADED_MEASURES = (*harness.BUSY_MEASURES, Measure("batch", "requests", "higher"))
SINGLE_MEASURES = (Measure(P50, "ms"), Measure("p50 beyond computing", "ms"))


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that servers serve to one client, measured for so many seconds each time."""

    bench: Bench
    generators: Generators
    shape: catalog.BenchShape
    head: catalog.Head
    snapshot: Path
    dtype: NumberFormat
    seconds: float

    def workload(self, hotness: int, changed: Mapping[str, Any] | None = None) -> catalog.BenchWorkload:
        """Return requests for this model, with changes of their shape."""
        return catalog.BenchWorkload(shape=self.shape.model_copy(update=changed), head=self.head, hotness=hotness)

    def served(self, name: str, *flags: str, checkout: Path | None = None) -> AbstractContextManager[Server]:
        """Serve it; the log has the server's name."""
        arguments, log = ("--dtype", self.dtype, "--no-verify", *flags), self.bench.folder / f"{name}.log"
        click.echo(f"starting a server: {name}")
        return serving_process(self.snapshot, arguments, log, checkout)

    def load(self, server: Server, workload: catalog.BenchWorkload, api: Api, in_flight: int = FULL_LOAD) -> Values:
        """Measure a server that is kept busy."""
        load, before = bench_load(server.target(api), api, workload), _batch_counts(server)
        values = self.bench.busy_values(self.generators, load, server, in_flight, self.seconds)
        requests, batches = (after - count for after, count in zip(_batch_counts(server), before, strict=True))
        return {**values, "batch": requests / batches}

    def scores(self, server: Server, workload: catalog.BenchWorkload, api: Api) -> list[Float32Array]:
        """Return a server's scores of a few requests."""
        load = bench_load(server.target(api), api, workload)
        return [self.generators.scores(load, request) for request in range(CHECKED_REQUESTS)]


def _batch_counts(server: Server) -> tuple[float, ...]:
    text = server.metrics()
    return tuple(sum(summed(text, f"shardrank_batch_requests_{part}").values()) for part in ("sum", "count"))


def _ids(hotness: int) -> str:
    return f"{hotness} id{'s' * (hotness > 1)} a bag"


def tables_of(model: ServedModel, limit: Limit, server: Server, hotness: int, apis: Sequence[Api]) -> list[BenchTable]:
    """Compare a server with the same batches without it, under full load and one request after the other.

    A third table compares requests that vary with requests that are alike, of as many candidates in the mean.
    """
    workload, sizes = model.workload(hotness), list[float]()

    def compute(batch_requests: float) -> Values:
        return model.bench.runner.run(limit.compute(workload, batch_requests, model.seconds))

    def loaded(api: Api, number: int) -> Values:
        values = model.load(server, workload, api)
        sizes.append(values["batch"])
        return values

    @cache
    def limit_ms(number: int) -> float:
        return compute(1.0)["time of a batch"]

    def single(api: Api, number: int) -> Values:
        p50_ms = model.load(server, workload, api, 1)[P50]
        return {P50: p50_ms, "p50 beyond computing": p50_ms - limit_ms(number)}

    def changed(shape: Mapping[str, Any], number: int) -> Values:
        return model.load(server, model.workload(hotness, shape), apis[0])

    title, setup = f"{model.head}, {_ids(hotness)}", {"requests": model.shape.requests}
    loads: dict[str, Subject] = {LIMIT: lambda number: compute(max(1.0, float(np.mean(sizes[-len(apis) :]))))}
    loads |= {api: partial(loaded, api) for api in apis}
    singles: dict[str, Subject] = {LIMIT: lambda number: {P50: limit_ms(number)}}
    singles |= {api: partial(single, api) for api in apis}
    varied = {"candidates": "50-150:100", "varied": True}
    forms: dict[str, Subject] = {"equal": partial(changed, catalog.EQUAL_REQUESTS), "varied": partial(changed, varied)}
    return [
        BenchTable(f"{title}, {FULL_LOAD} in flight", LOADED_MEASURES, loads, setup),
        BenchTable(f"{title}, one in flight", SINGLE_MEASURES, singles, setup),
        BenchTable(f"{title}, {apis[0]}, varied against equal", LOADED_MEASURES, forms),
    ]


def measure_server(model: ServedModel, hotness: Sequence[int], apis: Sequence[Api]) -> None:
    """Measure a server of this checkout."""
    limit = Limit(model.snapshot, model.dtype)
    with model.served("this checkout") as server:
        for ids, api in itertools.product(hotness, apis):
            requests = requests_of(model.workload(ids))[:CHECKED_REQUESTS]
            expected = [model.bench.runner.run(limit.scores(merge([request]))) for request in requests]
            check_scores(api, model.scores(server, model.workload(ids), api), expected, TOLERANCES[model.dtype])
        model.bench.run([table for ids in hotness for table in tables_of(model, limit, server, ids, apis)])


def measure_account(model: ServedModel, hotness: int, apis: Sequence[Api]) -> None:
    """Measure where the time of a request under full load goes, by the server's histograms.

    `stages_us` are means of a request, or of a batch; `busy_us` shares a batch's time among its requests.
    """
    bench = model.bench
    accounts = bench.results["account"] = dict[Api, dict[str, Any]]()
    for api in apis:
        with model.served(f"{api} by stage") as server:
            model.load(server, model.workload(hotness), api)
            text = server.metrics()
        seconds, counts = (summed(text, f"shardrank_stage_seconds_{part}", "stage") for part in ("sum", "count"))
        requests, stages = counts["encode"], [stage for stage in STAGES if stage in seconds]
        accounts[api] = {
            "requests": requests,
            "whole_us": 1e6 * seconds["total"] / requests,
            "stages_us": {stage: 1e6 * seconds[stage] / counts[stage] for stage in stages},
            "busy_us": {stage: 1e6 * seconds[stage] / requests for stage in stages},
        }
        click.echo(f"{api}: µs of a request under full load, {_ids(hotness)}, at work in a stage, and its mean")
        for stage, busy_us in accounts[api]["busy_us"].items():
            click.echo(f"  {stage}: {busy_us:.1f}, {accounts[api]['stages_us'][stage]:.1f}")


def measure_sides(
    sides: Mapping[str, tuple[ServedModel, Path | None]],
    setup: dict[str, str],
    hotness: Sequence[int],
    apis: Sequence[Api],
) -> None:
    """Measure servers of two models, by the side's name with their checkouts, under full load.

    They must give the same scores. Both are started anew in each round, so that what differs from one start to the next
    is in the intervals.
    """
    servers, cells, (first, second) = dict[str, Server](), list(itertools.product(hotness, apis)), sides
    model = sides[first][0]

    @contextmanager
    def both_served(number: int) -> Iterator[None]:
        with ExitStack() as stack:
            for side, (served, checkout) in sides.items():
                servers[side] = stack.enter_context(served.served(side, checkout=checkout))
            for ids, api in cells:
                scores = {side: model.scores(server, model.workload(ids), api) for side, server in servers.items()}
                check_scores(f"{second}, {api}", scores[second], scores[first], TOLERANCES[model.dtype])
            yield

    def loaded(side: str, ids: int, api: Api, number: int) -> Values:
        return model.load(servers[side], model.workload(ids), api)

    tables = []
    for ids, api in cells:
        subjects: dict[str, Subject] = {side: partial(loaded, side, ids, api) for side in sides}
        tables.append(BenchTable(f"{model.head}, {_ids(ids)}, {api}", LOADED_MEASURES, subjects, setup))
    model.bench.run(tables, both_served)


@harness.bench_command
@click.option("--head", type=click.Choice(get_args(catalog.Head)), default="mlp", show_default=True)
@click.option("--hotness", type=click.IntRange(1, 1000), multiple=True, default=(1, 20), help="Ids a bag. Repeatable.")
@click.option("--api", "apis", type=click.Choice(APIS), multiple=True, default=("grpc-packed", "oip-http", "json"))
@click.option("--rows", type=click.IntRange(1), default=1_000_000, show_default=True, help="Of the one table.")
@side_split_option("candidates")
@click.option("--seconds", type=click.FloatRange(0.05), default=4.0, show_default=True, help="Of each measurement.")
@click.option("--dtype", type=click.Choice(get_args(DtypeChoice)), default="auto", show_default=True)
@opts.option(
    "--against", "Another checkout of this repository: its server and this one's, compared.", opts.EXISTING_FOLDER
)
@opts.switch("--keyed", "Rows named by keys, compared with rows named by a vocabulary.")
def serving(
    bench: Bench,
    head: catalog.Head,
    hotness: tuple[int, ...],
    apis: tuple[Api, ...],
    rows: int,
    side_split: catalog.SideSplit,
    seconds: float,
    dtype: DtypeChoice,
    against: Path | None,
    keyed: bool,
) -> None:
    """Measure what serving costs beyond computing.

    A real server on this machine, with a client in another process: processor time of the server's processes for each
    request under full load, to that of the same batches computed without a server; the median time of one request after
    the other, beyond that of a batch of one; requests that vary against requests that are alike. Then the stages of a
    request in a server's histograms.

    With --against or --keyed, processor time of a request, of two servers in alternation.

    Examples:
      shardrank loadtest bench serving --quick --hotness 1
      shardrank loadtest bench serving --head dlrm --json serving.json
      shardrank loadtest bench serving --keyed --rows 10000000
      git worktree add --detach ../before HEAD~10
      shardrank loadtest bench serving --against ../before --json against.json
    """
    shape = catalog.BenchShape.of(rows, varied=True, side_split=side_split)
    if keyed and against is not None:
        raise click.UsageError("--keyed goes without --against")
    old = None if against is None else checked_checkout(against)
    with Generators() as generators:

        def written(**changed: Any) -> ServedModel:
            click.echo(f"writing {rows} rows")
            of = shape.model_copy(update=changed)
            workloads = [
                catalog.bench_workload(catalog.BenchWorkload(shape=of, head=head, hotness=ids)) for ids in hotness
            ]
            store = bench.folder / "-".join(["store", *changed.values()])
            snapshot = write_random_snapshot(catalog.bench_spec(of, head), store, workloads=workloads)
            return ServedModel(bench, generators, of, head, snapshot, choose_dtype(dtype), bench.seconds(seconds))

        if keyed:
            sides = {name: (written(named_by=name), None) for name in ("vocabulary", "keys")}
            measure_sides(sides, {"requests": shape.requests}, hotness, apis)
            return
        model = written()
        if old is not None:
            # Both serve the same snapshot, and are run by the same Python.
            checkouts = {"old": old, "new": THIS_CHECKOUT}
            setup = {**{side: commit_of(path) for side, path in checkouts.items()}, "requests": shape.requests}
            measure_sides({side: (model, checkout) for side, checkout in checkouts.items()}, setup, hotness, apis)
        else:
            measure_server(model, hotness, apis)
            measure_account(model, hotness[0], apis)
