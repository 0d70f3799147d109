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
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

import click
import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field
from rich.console import Console

import loadtest
from loader.errors import ShardrankError
from loader.snapshot.manifest import Frozen
from loadtest.errors import LoadConfigError
from loadtest.load.config import OfferedLoad, bench_load
from loadtest.load.messages import Scores, Weighed
from loadtest.load.processes import READY_TIMEOUT_S, Generators, Workers
from loadtest.load.result import this_machine, versions
from loadtest.servers import HOST, Mode, Server, check_scores, in_turn, serving
from loadtest.serving_cost.limit_process import Compute, Computed, LimitConfig, Score
from loadtest.serving_cost.result import AgainstBench, Cost, Pair, Saturated, ServingBench, Unloaded, show, show_against
from loadtest.workloads.catalog import BenchShape, BenchWorkload, Head, bench_spec
from loadtest.workloads.cli import same_option
from loadtest.workloads.payloads import APIS, Api
from loadtest.workloads.prepare import write_random_snapshot
from serving.models.ranking_models import choose_dtype
from shard_node.bags import Float32Array

CHECKED_REQUESTS = 2
# Scores are between 0 and 1. The server's batches are of other sizes, so sums are rounded otherwise.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.02}
OLD_APIS: dict[Api, Api] = {"grpc-packed": "grpc"}
"""What the old server is asked in place of an API that it may not have."""
SERVED_PACKAGES = ("loader", "shard_node", "router", "serving")

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
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
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
    def served_dtype(self) -> Literal["float32", "bfloat16"]:
        """Name what servers compute their dense model in."""
        return "bfloat16" if choose_dtype(self.dtype) is torch.bfloat16 else "float32"

    def server_arguments(self, head: Head, mode: Mode = "local") -> tuple[str, ...]:
        """List the flags of a server, beside where it listens and what it serves."""
        arguments: tuple[str, ...] = ("--dtype", self.served_dtype, "--no-verify", "--workers", str(self.workers))
        if self.ranking_replicas is not None:
            arguments += ("--ranking-replicas", str(self.ranking_replicas))
        if self.profile_folder is not None and mode == "local":
            arguments += ("--profile", str(self.profile_folder / f"profile-{head}.json"))
        return arguments

    def about(self) -> dict[str, Any]:
        """Fill in what every result tells."""
        machine = this_machine()
        return {
            "began_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{machine.cpu}, {machine.cores} cores",
            "versions": {**versions(), "torch": torch.__version__, "numpy": np.__version__},
            "shape": self.shape,
            "dtype": self.served_dtype,
            "server_arguments": self.server_arguments(self.heads[0]),
            "in_flight": self.in_flight,
            "seconds": self.seconds,
            "rounds": self.rounds,
        }


@dataclass(frozen=True, slots=True)
class _Client:
    """Asks servers of one model."""

    config: BenchConfig
    head: Head
    generators: Generators

    def load(self, server: Server, hotness: int, api: Api) -> OfferedLoad:
        workload = BenchWorkload(shape=self.config.shape, head=self.head, hotness=hotness)
        return bench_load(server.target(api), api, workload)

    def busy(self, server: Server, hotness: int, api: Api, in_flight: int, seconds: float) -> Weighed:
        load = self.load(server, hotness, api)
        return self.generators.busy(load, in_flight, self.config.warmup_s, seconds, server.process_ids)

    def scores(self, server: Server, hotness: int, api: Api, request: int) -> Float32Array:
        return self.generators.scores(self.load(server, hotness, api), request)


def run_bench(config: BenchConfig, folder: Path, say: Say) -> ServingBench:
    """Measure servers against the same batches without one.

    Raises:
        LoadError: a process ended or a request failed.
        ShardrankError: the snapshots can't be written.
    """
    about = config.about()
    saturated: list[Saturated] = []
    unloaded: list[Unloaded] = []
    with Generators() as generators:
        for head in config.heads:
            say(f"{head}: writing {config.shape.rows} rows")
            snapshot = write_random_snapshot(bench_spec(config.shape, head), folder / "store")
            with contextlib.ExitStack() as stack:
                say(f"{head}: starting servers")
                limit_config = LimitConfig(
                    snapshot=str(snapshot), shape=config.shape, head=head, dtype=config.served_dtype
                )
                limit = stack.enter_context(
                    Workers("loadtest.serving_cost.limit_process", limit_config.model_dump_json())
                )
                servers: dict[Mode, Server] = {}
                for mode in dict.fromkeys(("local", *config.modes)):
                    arguments, log = config.server_arguments(head, mode), folder / f"{head}-{mode}.log"
                    servers[mode] = stack.enter_context(serving(mode, snapshot, arguments, log))
                measure = _Measure(_Client(config, head, generators), limit, servers, say)
                for hotness in config.hotness:
                    measure.check(hotness)
                for number in range(config.rounds):
                    for hotness in config.hotness:
                        saturated += measure.saturated(number, hotness)
                        unloaded += measure.unloaded(number, hotness)
    return ServingBench(**about, saturated=tuple(saturated), unloaded=tuple(unloaded))


@dataclass(frozen=True, slots=True)
class _Measure:
    """One model's servers, its limit and the client."""

    client: _Client
    limit: Workers
    servers: Mapping[Mode, Server]
    say: Say

    def check(self, hotness: int) -> None:
        """Compare a few answers of every server, over every API, with the limit's scores."""
        config, head = self.client.config, self.client.head
        self.say(f"{head}, hotness {hotness}: comparing scores")
        for request in range(CHECKED_REQUESTS):
            told = self.limit.ask([Score(hotness=hotness, request=request)], Scores, READY_TIMEOUT_S)[0]
            expected = np.array(told.scores, np.float32)
            for api in config.apis:
                for mode, server in self.servers.items():
                    scores = self.client.scores(server, hotness, api, request)
                    check_scores(f"{mode}, {api}", scores, expected, TOLERANCES[config.served_dtype])

    def saturated(self, number: int, hotness: int) -> list[Saturated]:
        """Put full load on over each API, with the limit right after each."""
        config, head, server = self.client.config, self.client.head, self.servers["local"]
        found = []
        for api in in_turn(config.apis, number):
            self.say(f"{head}, hotness {hotness}, round {number + 1}: {api} at {config.in_flight} in flight")
            before = _batches(server)
            load = self.client.busy(server, hotness, api, config.in_flight, config.seconds)
            after = _batches(server)
            batch_requests = max(1.0, (after[0] - before[0]) / (after[1] - before[1]))
            computed = self._compute(hotness, batch_requests, config.limit_s)
            cpu_ms = load.server_cpu_s / load.requests * 1e3
            limit_cpu_ms = computed.cpu_s / computed.requests * 1e3
            found.append(
                Saturated(
                    round=number,
                    head=head,
                    hotness=hotness,
                    api=api,
                    cpu_ms=cpu_ms,
                    limit_cpu_ms=limit_cpu_ms,
                    ratio=cpu_ms / limit_cpu_ms,
                    batch_requests=batch_requests,
                    requests_per_s=load.requests / load.seconds,
                    server_cores=load.server_cpu_s / load.seconds,
                    client_cores=load.client_cpu_s / load.seconds,
                    p50_ms=load.p50_ms,
                    p99_ms=load.p99_ms,
                )
            )
        return found

    def unloaded(self, number: int, hotness: int) -> list[Unloaded]:
        """Ask one request after the other, over each API and from each server."""
        config, head = self.client.config, self.client.head
        if not config.modes:
            return []
        self.say(f"{head}, hotness {hotness}, round {number + 1}: one request after the other")
        limit_ms = self._compute(hotness, 1.0, config.unloaded_s).batch_p50_ms
        found = []
        for mode in config.modes:
            for api in config.apis:
                p50_ms = self.client.busy(self.servers[mode], hotness, api, 1, config.unloaded_s).p50_ms
                cell = {"round": number, "head": head, "hotness": hotness, "api": api, "mode": mode}
                times = {"p50_ms": p50_ms, "limit_ms": limit_ms, "extra_ms": p50_ms - limit_ms}
                found.append(Unloaded.model_validate(cell | times))
        return found

    def _compute(self, hotness: int, batch_requests: float, seconds: float) -> Computed:
        asked = Compute(hotness=hotness, batch_requests=batch_requests, seconds=seconds)
        return self.limit.ask([asked], Computed, seconds + READY_TIMEOUT_S)[0]


def _batches(server: Server) -> tuple[float, float]:
    """Return requests in batches, and batches, so far."""
    with urllib.request.urlopen(f"http://{HOST}:{server.http_port}/metrics", timeout=60) as response:
        text = response.read().decode()
    found = {
        one.name: one.value
        for family in text_string_to_metric_families(text)
        if family.name == "shardrank_batch_requests"
        for one in family.samples
        if not one.name.endswith("_bucket")
    }
    return found.get("shardrank_batch_requests_sum", 0.0), found.get("shardrank_batch_requests_count", 0.0)


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
    checkouts: dict[Side, Path] = {"new": Path(loadtest.__file__).resolve().parents[1], "old": other.resolve()}
    # Where one is missing, Python would take that of another checkout, such as the installed one.
    if missing := [name for name in SERVED_PACKAGES if not (checkouts["old"] / name / "__init__.py").is_file()]:
        raise LoadConfigError(f"{other}: not a checkout of this repository; it has no {missing[0]}/__init__.py")
    config = config.model_copy(update={"profile_folder": None})
    about, pairs = config.about(), list[Pair]()
    with Generators() as generators:
        for head in config.heads:
            say(f"{head}: writing {config.shape.rows} rows")
            snapshot = write_random_snapshot(bench_spec(config.shape, head), folder / "store")
            for number in range(config.rounds):
                say(f"{head}, round {number + 1}: starting both servers")
                with contextlib.ExitStack() as stack:
                    servers: dict[Side, Server] = {}
                    for side, checkout in checkouts.items():
                        log = folder / f"{head}-{side}.log"
                        started = serving("local", snapshot, config.server_arguments(head), log, checkout)
                        servers[side] = stack.enter_context(started)
                    pairs += _round(_Client(config, head, generators), number, old_apis, servers, say)
    new_commit, old_commit = _commit(checkouts["new"]), _commit(checkouts["old"])
    return AgainstBench(**about, new_commit=new_commit, old_commit=old_commit, pairs=tuple(pairs))


def _round(
    client: _Client, number: int, old_apis: Mapping[Api, Api], servers: Mapping[Side, Server], say: Say
) -> list[Pair]:
    """Every hotness and API on both; in the first round, after their scores were compared."""
    config, head, found = client.config, client.head, []
    sides: tuple[Side, ...] = ("new", "old")
    order = in_turn(sides, number)
    for hotness in config.hotness:
        for api in config.apis:
            asked: dict[Side, Api] = {"new": api, "old": old_apis.get(api, api)}
            for request in range(CHECKED_REQUESTS if number == 0 else 0):
                scores = {side: client.scores(servers[side], hotness, asked[side], request) for side in order}
                check_scores(f"new, {api}", scores["new"], scores["old"], TOLERANCES[config.served_dtype])
            costs: dict[Side, Cost] = {}
            for side in order:
                say(f"{head}, hotness {hotness}, round {number + 1}: {asked[side]}, {side}")
                load = client.busy(servers[side], hotness, asked[side], config.in_flight, config.seconds)
                costs[side] = Cost.of(load)
            found.append(Pair(round=number, head=head, hotness=hotness, api=api, old_api=asked["old"], **costs))
    return found


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return f"{checkout.name}, not under git"


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
@same_option
@click.option("--rounds", type=click.IntRange(1, 100), help="Default: 5, with --quick 1.")
@click.option("--seconds", type=click.FloatRange(0.1), help="Of each full load. Default: 5, with --quick 2.")
@click.option("--in-flight", type=click.IntRange(1, 1024), default=32, show_default=True)
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", show_default=True)
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
                show(result, console)
            else:
                result = run_against(config, against, old_apis, Path(folder), console.print)
                show_against(result, console)
    except ShardrankError as error:
        raise click.ClickException(str(error)) from error
    if json_file is not None:
        json_file.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")


def bench_config(*, quick: bool, rows: int, varied: bool, **options: Any) -> BenchConfig:
    """Take what the flags ask for; what is not given is the default of the full or the quick form."""
    config = BenchConfig(shape=BenchShape.of(rows, varied=varied))
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if quick:
        config = config.quick()
    return BenchConfig.model_validate(config.model_dump() | given)


if __name__ == "__main__":
    main()
