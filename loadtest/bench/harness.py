"""The harness of every benchmark: subjects are measured in rounds, in alternation, and compared with the first one.

Each round measures every subject of every table, and their order turns with the rounds, so that what changes with time
is in all of them alike. `UniformTables` are embedding tables of one size, to be looked up by routers over nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import click
import numpy as np
import numpy.typing as npt
import torch
import uvloop
from rich.console import Console

from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import ArrayRows
from loader.snapshot.tables import TableSpec
from loader.snapshot.writer import export_snapshot
from loadtest.load.config import WARM_UP_SHARE, OfferedLoad, RunConfig
from loadtest.load.generator import Generators
from loadtest.load.loops import not_busy_because
from loadtest.load.result import this_machine, versions
from loadtest.servers import THIS_CHECKOUT, Server, ServerCommand, commit_of, running
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper
from router.plan import Plan
from router.router import Router
from router.shard import ReplicaSource, ReplicatedShard
from serving.cli import WithExamples
from serving.cli import options as opts
from serving.cli.output import table_of, text_of
from serving.fleet.supervisor import shardrank_command
from shard_node.bags import Bags, Float32Array
from shard_node.engine.loading import load_tables
from shard_node.node import Shard, ShardNode
from shard_node.wire.address import Address

WIDTH = 160
ROUNDS, QUICK_ROUNDS = 5, 2
QUICK_SHARE = 0.2
"""Of the seconds that each measurement takes otherwise."""

Item = TypeVar("Item")
Better: TypeAlias = Literal["lower", "higher"]
Values: TypeAlias = Mapping[str, float]
"""A round of a subject: a value for each measure that it has."""

CONFIDENCE = 0.95
RESAMPLES = 10_000
# 97.5% quantiles of Student's t for 1 to 30 degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2).
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def ratio_of(logs: npt.NDArray[np.float64]) -> tuple[float, tuple[float, float] | None]:
    """Compute the ratio to the baseline, the geometric mean, and its interval from the logarithm of each round's ratio.

    One round has no interval.
    """
    rounds, value = len(logs), math.exp(float(logs.mean()))
    if rounds < 2:
        return value, None
    # The same rounds are drawn for every ratio: all come from one set of resampled experiments.
    drawn = np.random.default_rng(0).integers(0, rounds, (RESAMPLES, rounds))
    # Beyond 30 degrees of freedom Student's distribution is nearly the normal one.
    quantile = _T_975[rounds - 2] if rounds - 2 < len(_T_975) else NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    tail = NormalDist().cdf(-math.sqrt(rounds / (rounds - 1)) * quantile)
    low, high = np.quantile(logs[drawn].mean(axis=1), [tail, 1 - tail])
    # The mean of equal numbers may differ from them in the last bit.
    return value, (min(math.exp(low), value), max(math.exp(high), value))


class Measure(NamedTuple):
    """A row of a comparison; `better` is the good direction."""

    name: str
    unit: str
    better: Better = "lower"


class Compared(NamedTuple):
    """One measure of one subject: a value for each round, 0 for none, and the ratio to the baseline with its interval.

    There is no ratio where some subject has 0 in some round.
    """

    unit: str
    better: Better
    values: tuple[float, ...]
    median: float
    ratio: float | None = None
    interval: tuple[float, float] | None = None

    def __str__(self) -> str:
        """Write the ratio as `0.610 × [0.580, 0.640]`."""
        interval = "" if self.interval is None else " [{:#.3g}, {:#.3g}]".format(*self.interval)
        return "" if self.ratio is None else f"{self.ratio:#.3g} ×{interval}"


def rotated(items: Sequence[Item], number: int) -> list[Item]:
    """Return the order in which a round, from 0, measures: each item is first in turn."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


def compare_rounds(
    subjects: Mapping[str, Sequence[Values]], measures: Sequence[Measure]
) -> dict[str, dict[str, Compared]]:
    """Compute ratios to the first subject from all rounds of each; return measures by name, by subject.

    A measure has no ratios where some subject has 0 or no value, and is left out if all have none.
    """
    compared: dict[str, dict[str, Compared]] = {name: {} for name in subjects}
    for measure in measures:
        values = [[values.get(measure.name) for values in rounds] for rounds in subjects.values()]
        if any(value is not None for of_subject in values for value in of_subject):
            table = np.array([[value or 0.0 for value in of_subject] for of_subject in values])
            ratios: list[tuple[float | None, tuple[float, float] | None]] = [(None, None)] * len(table)
            if (table > 0).all():
                ratios = [(1.0, None), *map(ratio_of, np.log(table / table[0])[1:])]
            for of_subject, rounds, ratio in zip(compared.values(), table, ratios, strict=True):
                median = float(np.median(rounds))
                of_subject[measure.name] = Compared(*measure[1:], tuple(rounds.tolist()), median, *ratio)
    return compared


def show_comparison(title: str, subjects: Mapping[str, Mapping[str, Compared]], problems: Sequence[str]) -> None:
    """Print a row for each subject of each measure: the median, and the ratio to the baseline with its interval."""
    click.echo(title)
    baseline, rows, num_rounds = next(iter(subjects)), list[tuple[str, ...]](), 0
    for name, measure in subjects[baseline].items():
        num_rounds = len(measure.values)
        for subject, measures in subjects.items():
            head, ratio = (f"{name}, {measure.unit}", "") if subject == baseline else ("", str(measures[name]))
            rows.append((head, subject, text_of("", measures[name].median), ratio))
    Console(width=WIDTH).print(table_of("", ("", "", "#median", "#ratio"), rows, no_wrap=True))
    medians, sure = "values of one round", "(one round has no confidence interval)"
    if num_rounds > 1:
        medians, sure = f"medians of {num_rounds} rounds", f"with {CONFIDENCE:.0%} confidence intervals"
    click.echo(f"{medians}, and ratios to {baseline} {sure}")
    for problem in problems:
        click.echo(f"not valid: {problem}")


AT_RATE = {"p50": "p50_ms", "p99": "p99_ms", "p99.9": "p999_ms"}
CPU = "CPU of a request"
BUSY_MEASURES = (
    Measure(CPU, "ms"),
    Measure("requests", "/s", "higher"),
    Measure("p50", "ms"),
    Measure("p99", "ms"),
    Measure("CPU of the client", "cores"),
)
"""Of a server that is kept busy."""
Subject: TypeAlias = Callable[[int], Values]
"""Measures once, given the number of the round, from 0."""


@dataclass(slots=True)
class BenchTable:
    """Subjects by name, the baseline first, their measures, and the set-up that all have alike; titles are unique.

    With a `baseline`, that is computed from each round of all subjects instead, and has this name.
    """

    title: str
    measures: Sequence[Measure]
    subjects: Mapping[str, Subject]
    setup: dict[str, str] = field(default_factory=dict)
    baseline: tuple[str, Callable[[Mapping[str, Values]], Values]] | None = None


class Bench:
    """A run of one benchmark, in a temporary `folder`; `results` are not compared, but are in the JSON form by name.

    `problems` are why its numbers can't be believed.
    """

    def __init__(self, name: str, rounds: int | None, folder: Path, runner: asyncio.Runner, *, quick: bool) -> None:
        self.name = name
        self.rounds = rounds or (QUICK_ROUNDS if quick else ROUNDS)
        self.folder = folder
        self.runner = runner
        self.results: dict[str, Any] = {}
        self.problems: list[str] = []
        self._measured = ""
        self._is_quick = quick
        self._started_at = datetime.now(UTC)
        self._tables: dict[str, dict[str, Any]] = {}

    def busy_values(
        self, generators: Generators, load: OfferedLoad, server: Server, in_flight: int, seconds: float
    ) -> dict[str, float]:
        """Keep a server busy with so many requests in flight, after a warm-up of a fifth; see `BUSY_MEASURES`."""
        busy = generators.busy(load, in_flight, min(1.0, seconds / 5), seconds, server.process_ids)
        self.problems += [f"{self._measured}: {problem}" for problem in not_busy_because(busy)]
        return {
            CPU: busy.cpu_ms,
            "requests": busy.requests_per_s,
            "p50": busy.p50_ms,
            "p99": busy.p99_ms,
            "CPU of the client": busy.client_cpu_s / busy.seconds,
            **{f"{CPU}, {role}": cpu_s / busy.requests * 1e3 for role, cpu_s in busy.server_cpu_s.items()},
        }

    def values_at(
        self, rate: float, generators: Generators, load: OfferedLoad, number: int, seconds: float
    ) -> dict[str, float]:
        """Offer a load at a rate, at the same times to every subject of a round, after a warm-up of `WARM_UP_SHARE`.

        Latency by `AT_RATE`, and how many failed, which count as later than any answer.
        """
        run = RunConfig(rate=rate, warmup_s=seconds * WARM_UP_SHARE, duration_s=seconds, seed=number)
        result = generators.offer(load, run)
        problems = [*result.invalid_because, *([f"requests failed: {result.errors}"] if result.errors else ())]
        self.problems += [f"{self._measured}: {problem}" for problem in problems]
        values = {name: getattr(result.latency_of_due, percentile) for name, percentile in AT_RATE.items()}
        values["failed"] = sum(result.errors.values())
        return {name: value for name, value in values.items() if value is not None}

    def seconds(self, seconds: float) -> float:
        """Return how long a measurement takes that takes `seconds` when it is not quick."""
        return seconds * QUICK_SHARE if self._is_quick else seconds

    def run(
        self,
        tables: Sequence[BenchTable],
        around: Callable[[int], contextlib.AbstractContextManager[None]] | None = None,
    ) -> None:
        """Measure all subjects of the tables in each round, with `around` of its number entered; print the tables.

        The baseline comes last in the first round, so it may depend on what the others gave.
        """
        rounds: dict[tuple[str, str], list[Values]] = defaultdict(list)
        for number in range(self.rounds):
            with contextlib.nullcontext() if around is None else around(number):
                for table in tables:
                    click.echo(f"round {number + 1} of {self.rounds}: {table.title}")
                    baseline, *others = table.subjects
                    values: dict[str, Values] = {}
                    for name in rotated([*others, baseline], number):
                        self._measured = f"{table.title}, {name}, round {number + 1}"
                        values[name] = table.subjects[name](number)
                    if table.baseline is not None:
                        name, compute = table.baseline
                        values[name] = compute(values)
                    for name, of_subject in values.items():
                        rounds[table.title, name].append(of_subject)
        for table in tables:
            names = [*(() if table.baseline is None else table.baseline[:1]), *table.subjects]
            subjects = compare_rounds({name: rounds[table.title, name] for name in names}, table.measures)
            show_comparison(table.title, subjects, self.problems)
            measured = {
                name: {measure: compared._asdict() for measure, compared in measures.items()}
                for name, measures in subjects.items()
            }
            self._tables[table.title] = {"setup": table.setup, "baseline": names[0], "subjects": measured}

    def document(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "kind": "bench",
            "format_version": 1,
            "bench": self.name,
            "quick": self._is_quick,
            "began_at": self._started_at.isoformat(timespec="seconds"),
            "commit": commit_of(THIS_CHECKOUT),
            "machine": this_machine().model_dump(),
            "versions": {**versions(), "torch": torch.__version__, "numpy": np.__version__},
            "rounds": self.rounds,
            "problems": self.problems,
            "tables": self._tables,
            **self.results,
        }


def bench_command(function: Callable[..., None]) -> click.Command:
    """Make a command of a benchmark, with `--rounds`, `--quick` and `--json` beside its own options.

    The function is called with a `Bench` and the options. The exit code is 1 if its numbers can't be believed.
    """
    name = function.__name__.replace("_", "-")

    @click.option("--rounds", type=click.IntRange(1, 1000), help=f"Default: {ROUNDS}; with --quick {QUICK_ROUNDS}.")
    @click.option("--quick", is_flag=True, help="A fifth of the time for each measurement; its numbers are rough.")
    @opts.option("--json", "Write the results to this file.", opts.WRITABLE_FILE, name="json_file")
    @wraps(function)
    def command(rounds: int | None, quick: bool, json_file: Path | None, **options: Any) -> None:
        torch.set_num_threads(1)
        with (
            tempfile.TemporaryDirectory(prefix="bench-") as folder,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            bench = Bench(name, rounds, Path(folder), runner, quick=quick)
            function(bench, **options)
        if json_file is not None:
            json_file.write_text(json.dumps(bench.document(), indent=1) + "\n", encoding="utf-8")
        click.get_current_context().exit(1 if bench.problems else 0)

    return click.command(name, cls=WithExamples)(command)


MODEL = "bench"
DISTINCT_ROWS = 1 << 16
"""Rows repeat after so many: random enough to fill codes, few enough to write gigabytes in seconds."""


@dataclass(frozen=True, slots=True)
class UniformTables:
    """So many tables of equal size, one feature each: int8 rows, whose numbers are the ids."""

    count: int
    rows: int
    embedding_dim: int

    def all_rows(self) -> Float32Array:
        """Draw float32 [rows, embedding_dim], the same for every table."""
        drawn = np.random.default_rng(7).standard_normal((DISTINCT_ROWS, self.embedding_dim), dtype=np.float32)
        return np.resize(drawn, (self.rows, self.embedding_dim))

    def export(self, store: Path, changed: Mapping[str, Any] | None = None, **more: Any) -> Snapshot:
        """Write and open the snapshot, of tables that are `changed`; takes some seconds for each gigabyte."""
        shape: dict[str, Any] = {"num_embeddings": self.rows, "embedding_dim": self.embedding_dim}
        shape |= changed or {}
        names = [f"f{number:02d}" for number in range(self.count)]
        tables = tuple(TableSpec(name=name, feature_names=(name,), **shape) for name in names)
        features = tuple(FeatureSpec(name=name, side="candidate") for name in names)
        spec = ModelSpec(model=MODEL, tables=tables, features=features, dense_model=DenseModelSpec(kind="mlp"))
        rows = dict.fromkeys(names, ArrayRows(self.all_rows()))
        dense = {"unused": torch.zeros(1)}
        return Snapshot.open(export_snapshot(store, spec, rows=rows, dense=dense, **more), verify=False)

    def draw(self, rng: np.random.Generator, bags: int, hotness: int) -> Bags:
        """Draw uniform ids, the worst case for caches, for so many bags of each table."""
        num_bags = self.count * bags
        return Bags.from_lengths(
            np.arange(self.count, dtype=np.int32),
            np.full(self.count, bags, np.int64),
            np.full(num_bags, hotness, np.int64),
            rng.integers(0, self.rows, num_bags * hotness),
        )


def make_node(snapshot: Snapshot, plan: Plan, shard: int = 0) -> ShardNode:
    """Load one shard of a model on a node."""
    node, version = ShardNode(plan.identity(shard)), (snapshot.spec.model, snapshot.version)
    node.generations.stage(*version, load_tables(snapshot, plan.partition(shard), plan.digest))
    node.generations.flip(*version)
    return node


def make_router(snapshot: Snapshot, plan: Plan, shards: Sequence[Shard]) -> Router:
    """Make a router over all shards."""
    schema = FeatureSchema.of(snapshot.spec)
    return Router(schema, IdMapper.of_snapshot(snapshot, schema), plan, shards)


@contextlib.contextmanager
def node_process(snapshot: Snapshot) -> Iterator[Address]:
    """Run the node of the only shard, as users start it, behind a Unix socket; yield its address."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        address = Address(path=f"{folder}/node.sock")
        where = ("--snapshot", str(snapshot.path), "--shard", "0/1", "--listen", str(address))
        line = shardrank_command("shard-node", "--no-verify", "--device", "cpu", *where)
        command = ServerCommand("shard 0", line, Path(folder, "node.log"))
        listens = Path(address.path).exists
        with running("nodes", [command], lambda: "" if listens() else "it does not listen"):
            yield address


def remote_shards(snapshot: Snapshot, plan: Plan, nodes: Sequence[Address]) -> list[Shard]:
    """Return what asks each shard's node."""
    return [
        ReplicatedShard(plan, shard, snapshot, ReplicaSource.fixed([address])) for shard, address in enumerate(nodes)
    ]
