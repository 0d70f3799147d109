"""What serving costs beyond computing: `python -m loadtest.bench_serving [--quick] [--json FILE]`.

Real servers on this machine, with a client of its own process: processor time of a server's processes for each request
when 32 are always in flight, as the operating system counts it, over gRPC, binary HTTP and JSON, against the same
batches computed without a server; and the median time of one request after the other, against a batch of one. Each
number of a server is taken next to its limit, and everything is repeated in rounds: trust the ratios.

With `--against FOLDER`, another checkout of this repository: processor time of a request, this checkout's server and
that one's in alternation, and their ratio.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

import click
import numpy as np
import torch
from pydantic import Field
from rich.console import Console

from loader.errors import ShardrankError
from loader.snapshot.tables import Frozen
from loadtest.load.closed_loop import Weighed
from loadtest.load.config import OfferedLoad, bench_load
from loadtest.load.generator import Generators
from loadtest.load.result import this_machine, versions
from loadtest.load.workers import Workers
from loadtest.rounds import in_turn
from loadtest.servers import (
    THIS_CHECKOUT,
    Mode,
    Server,
    check_scores,
    checked_checkout,
    commit_of,
    serving,
    summed,
)
from loadtest.serving_limit import LimitConfig, LimitProcess
from loadtest.tables import Number, Spread, grouped_table, median_of
from loadtest.workloads.catalog import BenchShape, BenchWorkload, Head, SideSplit, bench_spec
from loadtest.workloads.cli import same_option, side_split_option
from loadtest.workloads.payloads import APIS, Api
from loadtest.workloads.prepare import write_random_snapshot
from serving.models.layers import NumberFormat
from serving.models.ranking_models import DtypeChoice, choose_dtype
from shard_node.bags import Float32Array

CHECKED_REQUESTS = 2
# Scores are between 0 and 1. The server's batches are of other sizes, so sums are rounded otherwise.
TOLERANCES: dict[NumberFormat, float] = {"float32": 1e-4, "bfloat16": 0.02, "int8": 0.03}
OLD_APIS: dict[Api, Api] = {"grpc-packed": "grpc"}
"""What the old server is asked in place of an API that it may not have."""
MAX_CPU_RATIO: dict[Api, float] = {"grpc-packed": 1.25, "grpc": 1.25, "oip-grpc": 1.25, "oip-http": 1.25, "json": 1.6}
MAX_EXTRA_MS: dict[Mode, float] = {"local": 0.5, "two_shards": 1.0}
"""What is aimed at: processor time beyond the limit's, and time beyond that of its batch of one request."""
MAX_RATIO: dict[Api, float] = {"grpc-packed": 1.0, "oip-http": 1.05, "oip-grpc": 1.05, "json": 1.1, "grpc": 1.25}
"""What is aimed at: processor time of a request, the new server's to the old one's."""

Say = Callable[[str], None]
Side = Literal["new", "old"]


class BenchConfig(Frozen):
    """What is measured, and for how long.

    Attributes:
        hotness: ids for each feature of each candidate.
        in_flight: requests of the client under full load.
        rounds: how often everything is measured.
        warmup_s: of each load.
        seconds: that a full load is weighed for.
        limit_s: that the limit computes for.
        unloaded_s: that one request after the other is sent for.
        modes: that are asked without load; full load is put on `local` alone.
        workers: processes of each server.
        ranking_replicas: of each of them; None for the server's default.
        profile_folder: where the servers under full load write their profiles; None for nowhere.
    """

    shape: BenchShape = BenchShape()
    heads: tuple[Head, ...] = Field(default=("mlp", "dlrm"), min_length=1)
    hotness: tuple[int, ...] = Field(default=(1, 20), min_length=1)
    apis: tuple[Api, ...] = Field(default=("grpc-packed", "grpc", "oip-http", "json"), min_length=1)
    modes: tuple[Mode, ...] = ("local", "two_shards")
    dtype: DtypeChoice = "auto"
    in_flight: int = Field(default=32, ge=1, le=1024)
    rounds: int = Field(default=5, ge=1, le=100)
    warmup_s: float = Field(default=1.0, ge=0)
    seconds: float = Field(default=5.0, gt=0)
    limit_s: float = Field(default=3.0, gt=0)
    unloaded_s: float = Field(default=2.0, gt=0)
    workers: int = Field(default=1, ge=1, le=64)
    ranking_replicas: int | None = Field(default=None, ge=1, le=64)
    profile_folder: Path | None = None

    def quick(self) -> BenchConfig:
        """Take the same in about a minute: the MLP alone, once, for short times. Its numbers are rough."""
        short = {"rounds": 1, "warmup_s": 0.5, "seconds": 2.0, "limit_s": 1.0, "unloaded_s": 1.0}
        return self.model_copy(update={"heads": self.heads[:1], **short})

    @property
    def served_dtype(self) -> NumberFormat:
        """Name what servers compute their dense model in."""
        return choose_dtype(self.dtype)

    def server_arguments(self, head: Head, mode: Mode = "local") -> tuple[str, ...]:
        """List the flags of a server, beside where it listens and what it serves."""
        arguments: tuple[str, ...] = ("--dtype", self.served_dtype, "--no-verify", "--workers", str(self.workers))
        if self.ranking_replicas is not None:
            arguments += ("--ranking-replicas", str(self.ranking_replicas))
        if self.profile_folder is not None and mode == "local":
            arguments += ("--profile", str(self.profile_folder / f"profile-{head}.json"))
        return arguments


class AskedInRound(Frozen):
    """What was asked in a round."""

    round: int
    head: Head
    hotness: int
    api: Api


class Saturated(AskedInRound):
    """One server under full load, and the limit right after it.

    Attributes:
        cpu_ms: processor time of the server's processes for each request.
        limit_cpu_ms: that of the same batches without a server.
        ratio: the one to the other.
        batch_requests: mean size of the server's batches, and of the limit's.
        requests_per_s: answered.
        server_cores, client_cores: processor seconds a second.
        p50_ms, p99_ms: of requests, under this load.
    """

    cpu_ms: float
    limit_cpu_ms: float
    ratio: float
    batch_requests: float
    requests_per_s: float
    server_cores: float
    client_cores: float
    p50_ms: float
    p99_ms: float


class Unloaded(AskedInRound):
    """One request after the other, and the limit's batches of one.

    Attributes:
        p50_ms: from sending to answer.
        limit_ms: median time of a batch of one request without a server.
        extra_ms: the difference.
    """

    mode: Mode
    p50_ms: float
    limit_ms: float
    extra_ms: float


class Cost(Frozen):
    """Of one server under full load.

    Attributes:
        cpu_us: processor time of its processes for each request.
        requests_per_s: answered.
        client_cores: processor seconds a second of the client.
        p50_ms: of requests, under this load.
    """

    cpu_us: float
    requests_per_s: float
    client_cores: float
    p50_ms: float


class Pair(AskedInRound):
    """Both servers, one right after the other; each was asked in its API."""

    old_api: Api
    new: Cost
    old: Cost

    @property
    def ratio(self) -> float:
        """Processor time of a request, new to old."""
        return self.new.cpu_us / self.old.cpu_us


class ServingRun(Frozen):
    """What every run of the benchmark tells.

    Attributes:
        began_at: wall clock, ISO 8601 with UTC offset.
        machine: processor and cores.
        versions: of shardrank, Python and the main libraries.
        server_arguments: flags of the servers beside those that every run has.
        in_flight: requests of the client under full load.
        seconds: that each full load was weighed for.
    """

    began_at: str
    machine: str
    versions: dict[str, str]
    shape: BenchShape
    dtype: NumberFormat
    server_arguments: tuple[str, ...]
    in_flight: int
    seconds: float
    rounds: int = Field(ge=1)


class ServingBench(ServingRun):
    """The document of `--json`: servers against the same batches without one."""

    kind: Literal["serving_bench"] = "serving_bench"
    format_version: Literal[1] = 1
    saturated: tuple[Saturated, ...]
    unloaded: tuple[Unloaded, ...]


class AgainstBench(ServingRun):
    """The document of `--json` with `--against`.

    Attributes:
        new_commit, old_commit: as `git describe` names what was run, with `-dirty` where files differ from it.
    """

    kind: Literal["serving_against"] = "serving_against"
    format_version: Literal[1] = 1
    new_commit: str
    old_commit: str
    pairs: tuple[Pair, ...]


@dataclass(frozen=True, slots=True)
class _Bench:
    """Everything that is measured of one model, by one client."""

    config: BenchConfig
    head: Head
    snapshot: Path
    generators: Generators
    say: Say

    def load(self, server: Server, hotness: int, api: Api) -> OfferedLoad:
        workload = BenchWorkload(shape=self.config.shape, head=self.head, hotness=hotness)
        return bench_load(server.target(api), api, workload)

    def busy(self, server: Server, hotness: int, api: Api, in_flight: int, seconds: float) -> Weighed:
        load = self.load(server, hotness, api)
        return self.generators.busy(load, in_flight, self.config.warmup_s, seconds, server.process_ids)

    def scores(self, server: Server, hotness: int, api: Api, request: int) -> Float32Array:
        return self.generators.scores(self.load(server, hotness, api), request)

    def told(self, number: int, hotness: int, what: str) -> None:
        self.say(f"{self.head}, hotness {hotness}, round {number + 1}: {what}")


def _of_each_head(config: BenchConfig, folder: Path, say: Say) -> Iterator[_Bench]:
    with Generators() as generators:
        for head in config.heads:
            say(f"{head}: writing {config.shape.rows} rows")
            snapshot = write_random_snapshot(bench_spec(config.shape, head), folder / "store")
            yield _Bench(config, head, snapshot, generators, say)


def _about(config: BenchConfig) -> dict[str, Any]:
    machine = this_machine()
    return {
        "began_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{machine.cpu}, {machine.cores} cores",
        "versions": {**versions(), "torch": torch.__version__, "numpy": np.__version__},
        "dtype": config.served_dtype,
        "server_arguments": config.server_arguments(config.heads[0]),
        **{name: getattr(config, name) for name in ("shape", "in_flight", "seconds", "rounds")},
    }


def run_bench(config: BenchConfig, folder: Path, say: Say) -> ServingBench:
    """Measure servers against the same batches without one.

    Raises:
        LoadError: a process ended or a request failed.
        ShardrankError: the snapshots can't be written.
    """
    about, saturated, unloaded = _about(config), list[Saturated](), list[Unloaded]()
    for bench in _of_each_head(config, folder, say):
        head = bench.head
        with contextlib.ExitStack() as stack:
            say(f"{head}: starting servers")
            limit_config = LimitConfig(bench.snapshot, config.shape, head, config.served_dtype)
            limit = LimitProcess(stack.enter_context(Workers()), limit_config)
            servers: dict[Mode, Server] = {}
            for mode in dict.fromkeys(("local", *config.modes)):
                arguments, log = config.server_arguments(head, mode), folder / f"{head}-{mode}.log"
                servers[mode] = stack.enter_context(serving(mode, bench.snapshot, arguments, log))
            for hotness in config.hotness:
                _check(bench, limit, servers, hotness)
            for number in range(config.rounds):
                for hotness in config.hotness:
                    saturated += _saturated(bench, limit, servers["local"], number, hotness)
                    unloaded += _unloaded(bench, limit, servers, number, hotness)
    return ServingBench(**about, saturated=tuple(saturated), unloaded=tuple(unloaded))


def _check(bench: _Bench, limit: LimitProcess, servers: Mapping[Mode, Server], hotness: int) -> None:
    """Compare a few answers of every server, over every API, with the limit's scores."""
    bench.say(f"{bench.head}, hotness {hotness}: comparing scores")
    for request in range(CHECKED_REQUESTS):
        expected = limit.score(hotness, request)
        for api in bench.config.apis:
            for mode, server in servers.items():
                scores = bench.scores(server, hotness, api, request)
                check_scores(f"{mode}, {api}", scores, expected, TOLERANCES[bench.config.served_dtype])


def _saturated(bench: _Bench, limit: LimitProcess, server: Server, number: int, hotness: int) -> Iterator[Saturated]:
    """Put full load on over each API, with the limit right after each."""
    config = bench.config
    for api in in_turn(config.apis, number):
        bench.told(number, hotness, f"{api} at {config.in_flight} in flight")
        before = _batches(server)
        load = bench.busy(server, hotness, api, config.in_flight, config.seconds)
        after = _batches(server)
        batch_requests = max(1.0, (after[0] - before[0]) / (after[1] - before[1]))
        computed = limit.compute(hotness, batch_requests, config.limit_s)
        limit_cpu_ms = computed.cpu_s / computed.requests * 1e3
        yield Saturated(
            round=number,
            head=bench.head,
            hotness=hotness,
            api=api,
            cpu_ms=load.cpu_ms,
            limit_cpu_ms=limit_cpu_ms,
            ratio=load.cpu_ms / limit_cpu_ms,
            batch_requests=batch_requests,
            requests_per_s=load.requests_per_s,
            server_cores=load.server_cpu_s / load.seconds,
            client_cores=load.client_cpu_s / load.seconds,
            p50_ms=load.p50_ms,
            p99_ms=load.p99_ms,
        )


def _unloaded(
    bench: _Bench, limit: LimitProcess, servers: Mapping[Mode, Server], number: int, hotness: int
) -> Iterator[Unloaded]:
    """Ask one request after the other, over each API and from each server."""
    config = bench.config
    if not config.modes:
        return
    bench.told(number, hotness, "one request after the other")
    limit_ms = limit.compute(hotness, 1.0, config.unloaded_s).batch_p50_ms
    for mode in config.modes:
        for api in config.apis:
            p50_ms = bench.busy(servers[mode], hotness, api, 1, config.unloaded_s).p50_ms
            yield Unloaded(
                round=number,
                head=bench.head,
                hotness=hotness,
                api=api,
                mode=mode,
                p50_ms=p50_ms,
                limit_ms=limit_ms,
                extra_ms=p50_ms - limit_ms,
            )


def _batches(server: Server) -> tuple[float, float]:
    """Return requests in batches, and batches, so far."""
    text = server.metrics()
    requests, batches = (
        sum(summed(text, f"shardrank_batch_requests_{of}").values(), start=0.0) for of in ("sum", "count")
    )
    return requests, batches


def run_against(config: BenchConfig, other: Path, old_apis: Mapping[Api, Api], folder: Path, say: Say) -> AgainstBench:
    """Measure this checkout's server against another one's: what a request costs each under full load.

    Both serve the same snapshot, run by the same Python, and are asked the same requests. In each round both are
    started anew, so that what differs from one start to the next is in the spread; each API is then weighed on one
    right after the other, and which of the two goes first turns with the rounds.

    Args:
        config: what, as far as it is of the full load; nothing is profiled.
        other: the old checkout.
        old_apis: what the old server is asked in place of an API; for others, the same.
        folder: for snapshots and logs.
        say: told what is being done.

    Raises:
        LoadError: `other` is no checkout, a process ended, a request failed, or the servers' scores differ.
        ShardrankError: the snapshots can't be written.
    """
    checkouts: dict[Side, Path] = {"new": THIS_CHECKOUT, "old": checked_checkout(other)}
    config = config.model_copy(update={"profile_folder": None})
    about, pairs = _about(config), list[Pair]()
    for bench in _of_each_head(config, folder, say):
        for number in range(config.rounds):
            say(f"{bench.head}, round {number + 1}: starting both servers")
            with contextlib.ExitStack() as stack:
                servers: dict[Side, Server] = {}
                for side, checkout in checkouts.items():
                    arguments, log = config.server_arguments(bench.head), folder / f"{bench.head}-{side}.log"
                    servers[side] = stack.enter_context(serving("local", bench.snapshot, arguments, log, checkout))
                pairs += _pairs(bench, number, old_apis, servers)
    commits = {f"{side}_commit": commit_of(checkout) for side, checkout in checkouts.items()}
    return AgainstBench(**about, **commits, pairs=tuple(pairs))


def _pairs(bench: _Bench, number: int, old_apis: Mapping[Api, Api], servers: Mapping[Side, Server]) -> Iterator[Pair]:
    """Every hotness and API on both; in the first round, after their scores were compared."""
    config = bench.config
    order: list[Side] = in_turn(("new", "old"), number)
    for hotness in config.hotness:
        for api in config.apis:
            asked: dict[Side, Api] = {"new": api, "old": old_apis.get(api, api)}
            for request in range(CHECKED_REQUESTS if number == 0 else 0):
                scores = {side: bench.scores(servers[side], hotness, asked[side], request) for side in order}
                check_scores(f"new, {api}", scores["new"], scores["old"], TOLERANCES[config.served_dtype])
            costs: dict[Side, Cost] = {}
            for side in order:
                bench.told(number, hotness, f"{asked[side]}, {side}")
                load = bench.busy(servers[side], hotness, asked[side], config.in_flight, config.seconds)
                costs[side] = Cost(
                    cpu_us=load.cpu_ms * 1e3,
                    requests_per_s=load.requests_per_s,
                    client_cores=load.client_cpu_s / load.seconds,
                    p50_ms=load.p50_ms,
                )
            yield Pair(round=number, head=bench.head, hotness=hotness, api=api, old_api=asked["old"], **costs)


def show(result: ServingBench | AgainstBench, console: Console) -> None:
    """Print what the benchmark found, beside what is aimed at."""
    console.print(
        f"{result.began_at}, {result.machine}, dense model in {result.dtype}, {result.rounds} rounds\n"
        f"requests: {result.shape.requests}"
    )
    under_load = f"{result.in_flight} in flight: processor time of the server for each request"
    keys = {"head": "head", "hotness": "hotness", "api": "api"}
    if isinstance(result, AgainstBench):
        console.print(f"new: {result.new_commit}, old: {result.old_commit}")
        numbers: dict[str, Number[Pair]] = {
            "new µs (least–most)": lambda pairs: Spread.of(one.new.cpu_us for one in pairs).shown(0),
            "old µs (least–most)": lambda pairs: Spread.of(one.old.cpu_us for one in pairs).shown(0),
            "new /s": lambda pairs: f"{np.median([one.new.requests_per_s for one in pairs]):.0f}",
            "old /s": lambda pairs: f"{np.median([one.old.requests_per_s for one in pairs]):.0f}",
            "client cores": lambda pairs: (
                f"{max(cost.client_cores for one in pairs for cost in (one.new, one.old)):.2f}"
            ),
        }
        keys["old api"] = "old_api"
        spread = ("new / old", "ratio", "×")
        title = f"{under_load}, new to old"
        console.print(grouped_table(title, result.pairs, keys, spread, lambda one: MAX_RATIO[one.api], numbers))
        return
    of_load: dict[str, Number[Saturated]] = {
        "CPU ms": median_of("cpu_ms", 3),
        "limit ms": median_of("limit_cpu_ms", 3),
        "requests/s": median_of("requests_per_s", 0),
        "batch": median_of("batch_requests", 1),
        "server cores": median_of("server_cores", 2),
        "client cores": median_of("client_cores", 2),
        "p50 ms": median_of("p50_ms", 2),
        "p99 ms": median_of("p99_ms", 2),
    }
    spread, title = ("ratio", "ratio", "×"), f"{under_load}, to its limit"
    console.print(grouped_table(title, result.saturated, keys, spread, lambda one: MAX_CPU_RATIO[one.api], of_load))
    if result.unloaded:
        keys = {"head": "head", "hotness": "hotness", "rows": "mode", "api": "api"}
        times: dict[str, Number[Unloaded]] = {"p50 ms": median_of("p50_ms", 2), "limit ms": median_of("limit_ms", 2)}
        spread, title = (
            ("beyond the limit, ms", "extra_ms", ""),
            "One in flight: p50, and what it is beyond the limit's batch of one",
        )
        console.print(grouped_table(title, result.unloaded, keys, spread, lambda one: MAX_EXTRA_MS[one.mode], times))


def _old_apis(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> dict[Api, Api]:
    """Read `NEW=OLD`, each an API."""
    del ctx, param
    found = dict(OLD_APIS)
    for text in texts:
        new, _, old = text.partition("=")
        if new not in APIS or old not in APIS:
            raise click.BadParameter(f"{text!r} is not NEW=OLD with two of {', '.join(APIS)}")
        found[new] = old
    return found


@click.command(help=__doc__)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here.")
@click.option("--quick", is_flag=True, help="About a minute: the MLP alone, one round, short times.")
@click.option("--head", "heads", type=click.Choice(get_args(Head)), multiple=True, help="Repeatable. Default: both.")
@click.option("--hotness", type=click.IntRange(1, 1000), multiple=True, help="Repeatable. Default: 1 and 20.")
@click.option("--api", "apis", type=click.Choice(APIS), multiple=True, help="Repeatable. Default: all but oip-grpc.")
@click.option(
    "--mode",
    "modes",
    type=click.Choice(get_args(Mode)),
    multiple=True,
    help="Where the rows are when one request is in flight. Repeatable. Default: both.",
)
@click.option("--rows", type=click.IntRange(1), default=1_000_000, show_default=True, help="Of the one table.")
@side_split_option("candidates")
@same_option
@click.option("--rounds", type=click.IntRange(1, 100), help="Default: 5, with --quick 1.")
@click.option("--seconds", type=click.FloatRange(0.1), help="Of each full load. Default: 5, with --quick 2.")
@click.option("--in-flight", type=click.IntRange(1, 1024), default=32, show_default=True)
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "int8"]), default="auto", show_default=True)
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True, help="Processes of each server.")
@click.option("--ranking-replicas", type=click.IntRange(1, 64), help="Of each process. Default: the server's.")
@click.option(
    "--profile",
    "profile_folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True, resolve_path=True),
    help="A folder for the profiles of the servers under full load; keeping them costs a little.",
)
@click.option(
    "--against",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="FOLDER",
    help="Another checkout: full load alone, on its server and this one's.",
)
@click.option(
    "--against-api",
    "old_apis",
    multiple=True,
    callback=_old_apis,
    metavar="NEW=OLD",
    help="With --against: what the old server is asked in place of an API that it lacks. Repeatable. "
    "Default: grpc-packed=grpc.",
)
def main(json_file: Path | None, against: Path | None, old_apis: dict[Api, Api], **options: Any) -> None:
    """Run the benchmark."""
    console = Console(width=160)
    config = bench_config(**options)
    result: ServingBench | AgainstBench
    try:
        with tempfile.TemporaryDirectory(prefix="bench-serving-") as folder:
            if against is None:
                result = run_bench(config, Path(folder), console.print)
            else:
                result = run_against(config, against, old_apis, Path(folder), console.print)
    except ShardrankError as error:
        raise click.ClickException(str(error)) from error
    show(result, console)
    if json_file is not None:
        json_file.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")


def bench_config(
    *, quick: bool, rows: int, varied: bool, side_split: SideSplit = "candidates", **options: Any
) -> BenchConfig:
    """Take what the flags ask for; what is not given is the default of the full or the quick form."""
    config = BenchConfig(shape=BenchShape.of(rows, varied=varied, side_split=side_split))
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if quick:
        config = config.quick()
    return BenchConfig.model_validate(config.model_dump() | given)


if __name__ == "__main__":
    main()
