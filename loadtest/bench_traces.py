"""What traces cost a server: `python -m loadtest.bench_traces [--json FILE]`.

Two servers of this checkout, one without traces and one that sends those of 1% of its requests to a collector, which is
a socket of this process that takes everything: processor time of the servers' processes for each request under full
load, in alternation. In each round both are started anew and loaded several times by turns; a round is one ratio.
Varied requests bring a `traceparent`, one in a hundred of them sampled; those of `--same` bring none, and the server
draws.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import click
from pydantic import Field
from rich.console import Console

from loader.errors import ShardrankError
from loader.snapshot.tables import Frozen
from loadtest.load.config import bench_load
from loadtest.load.generator import Generators
from loadtest.load.result import this_machine, versions
from loadtest.report.comparison import Arm, Comparison
from loadtest.rounds import FORM, Measure, compare_rounds, in_turn, show_comparison
from loadtest.servers import HOST, Mode, Server, serving, summed
from loadtest.workloads.catalog import BenchShape, BenchWorkload, Head, bench_spec
from loadtest.workloads.cli import same_option
from loadtest.workloads.payloads import APIS, FORMS, SAMPLED_SHARE, Api
from loadtest.workloads.prepare import write_random_snapshot

Side: TypeAlias = Literal["off", "on"]
SIDES: tuple[Side, ...] = get_args(Side)
MAX_RATIO = 1.02
"""What is aimed at: processor time of a request with traces, to that without."""
# Spans are sent within the load that they belong to, or the one before it is counted in full.
EXPORT_EVERY_MS, WARMUP_S = 1000, 1.5


class TracesBenchConfig(Frozen):
    """What is measured, and for how long.

    Attributes:
        modes: where the rows are: in the serving process, or on two shard nodes.
        share: of requests that are traced, of those that bring no `traceparent`.
        rounds: starts of both servers.
        turns: loads of each in a round.
        seconds: of each load, beside its warmup.
        in_flight: requests of the client.
    """

    shape: BenchShape = BenchShape()
    head: Head = "mlp"
    hotness: int = Field(default=1, ge=1)
    modes: tuple[Mode, ...] = Field(default=("local", "two_shards"), min_length=1)
    apis: tuple[Api, ...] = Field(default=("grpc-packed", "json"), min_length=1)
    share: float = Field(default=SAMPLED_SHARE, ge=0, le=1)
    rounds: int = Field(default=8, ge=1, le=100)
    turns: int = Field(default=4, ge=1, le=100)
    seconds: float = Field(default=4.0, gt=0)
    in_flight: int = Field(default=32, ge=1, le=1024)


@dataclass(slots=True)
class Spent:
    """What one server took in one round."""

    cpu_s: float = 0.0
    requests: int = 0
    seconds: float = 0.0

    @property
    def cpu_us(self) -> float:
        """Processor time of a request."""
        return 1e6 * self.cpu_s / max(1, self.requests)


_MEASURES: tuple[Measure[Spent], ...] = (
    Measure("CPU of a request", "µs", "lower", lambda one: one.cpu_us),
    Measure("answers", "/s", "higher", lambda one: one.requests / one.seconds),
)


class TracesBench(Frozen):
    """The document of `--json`.

    Attributes:
        comparisons: one for each mode and API: CPU a request, on to off, with its interval.
        spans: by what became of them, of all servers that sent any.
        collected: posts and bytes that the collector took.
    """

    kind: Literal["traces_bench"] = "traces_bench"
    format_version: Literal[1] = 1
    config: TracesBenchConfig
    comparisons: tuple[Comparison, ...]
    spans: dict[str, int]
    collected: tuple[int, int]


@dataclass(slots=True)
class Collected:
    """What a collector took, and where it listens."""

    url: str = ""
    posts: int = 0
    size_bytes: int = 0


@contextlib.contextmanager
def collecting() -> Iterator[Collected]:
    """Take whatever is posted while the block runs."""
    found = Collected()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            size = int(self.headers["content-length"])
            self.rfile.read(size)
            found.posts, found.size_bytes = found.posts + 1, found.size_bytes + size
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer((HOST, 0), Handler) as server:
        found.url = f"http://{HOST}:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, name="collector")
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


@dataclass(frozen=True, slots=True)
class _Bench:
    config: TracesBenchConfig
    snapshot: Path
    folder: Path
    generators: Generators
    collected: Collected
    spans: dict[str, int]
    say: Callable[[str], None]

    def compared(self, mode: Mode) -> Iterator[Comparison]:
        """Measure one mode over every API."""
        config = self.config
        spent = {(api, side): list[Spent]() for api in config.apis for side in SIDES}
        for number in range(config.rounds):
            self.say(f"{mode}, round {number + 1}: starting both servers")
            with contextlib.ExitStack() as stack:
                servers = {
                    side: stack.enter_context(self._server(mode, side, number)) for side in in_turn(SIDES, number)
                }
                for api in config.apis:
                    for side, one in self._round(servers, api, number).items():
                        spent[api, side].append(one)
                    self.say(f"{mode}, {api}: " + ", ".join(f"{s} {spent[api, s][-1].cpu_us:.0f} µs" for s in SIDES))
                for outcome, count in summed(servers["on"].metrics(), "shardrank_trace_spans_total", "outcome").items():
                    self.spans[outcome] = self.spans.get(outcome, 0) + int(count)
        for api in config.apis:
            yield self._comparison(mode, api, spent[api, "off"], spent[api, "on"])

    def _server(self, mode: Mode, side: Side, number: int) -> contextlib.AbstractContextManager[Server]:
        arguments: tuple[str, ...] = ("--no-verify",)
        if mode == "two_shards":
            # They run at once, and each is a fleet.
            arguments += ("--registry", str(self.folder / f"registry-{side}-{number}"))
        if side == "on":
            arguments += ("--trace-endpoint", self.collected.url, "--trace-sample-share", str(self.config.share))
        return serving(mode, self.snapshot, arguments, self.folder / f"{mode}-{side}.log")

    def _round(self, servers: dict[Side, Server], api: Api, number: int) -> dict[Side, Spent]:
        config, spent = self.config, {side: Spent() for side in SIDES}
        workload = BenchWorkload(shape=config.shape, head=config.head, hotness=config.hotness)
        for turn in range(config.turns):
            for side in in_turn(SIDES, number + turn):
                load = bench_load(servers[side].target(api), api, workload)
                pids = servers[side].process_ids
                weighed = self.generators.busy(load, config.in_flight, WARMUP_S, config.seconds, pids)
                own = spent[side]
                own.cpu_s, own.requests = own.cpu_s + weighed.server_cpu_s, own.requests + weighed.requests
                own.seconds += weighed.seconds
        return spent

    def _comparison(self, mode: Mode, api: Api, off: list[Spent], on: list[Spent]) -> Comparison:
        config, spans = self.config, self.spans
        wrong = [f"{spans[bad]} spans were {bad}" for bad in ("failed", "dropped") if spans.get(bad)]
        if config.share and not spans.get("exported"):
            wrong.append("no span was exported")
        return compare_rounds(
            [(Arm(name="without traces"), off), (Arm(name=f"{config.share:.0%} traced"), on)],
            _MEASURES,
            title=f"traces, rows {mode}, over {api}",
            setup={FORM: FORMS[config.shape.varied], "loads of a server in a round": str(config.turns)},
            invalid_because=wrong,
            machine=this_machine(),
            versions=versions(),
        )


def run_bench(config: TracesBenchConfig, folder: Path, say: Callable[[str], None]) -> TracesBench:
    """Measure. Raises LoadError if a process ends or a request fails; ShardrankError if there can be no snapshot."""
    say(f"{config.head}: writing {config.shape.rows} rows")
    snapshot, spans = write_random_snapshot(bench_spec(config.shape, config.head), folder / "store"), dict[str, int]()
    # Of both servers; the one without traces does not look at it.
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = str(EXPORT_EVERY_MS)
    with Generators() as generators, collecting() as collected:
        bench = _Bench(config, snapshot, folder, generators, collected, spans, say)
        found = tuple(comparison for mode in config.modes for comparison in bench.compared(mode))
        return TracesBench(
            config=config, comparisons=found, spans=spans, collected=(collected.posts, collected.size_bytes)
        )


@click.command(help=__doc__)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here.")
@click.option("--mode", "modes", type=click.Choice(get_args(Mode)), multiple=True, help="Repeatable. Default: both.")
@click.option("--api", "apis", type=click.Choice(APIS), multiple=True, help="Default: grpc-packed and json.")
@click.option("--head", type=click.Choice(get_args(Head)), default="mlp", show_default=True)
@click.option("--hotness", type=click.IntRange(1, 1000), default=1, show_default=True)
@click.option("--rows", type=click.IntRange(1), default=1_000_000, show_default=True, help="Of the one table.")
@same_option
@click.option("--share", type=click.FloatRange(0, 1), default=SAMPLED_SHARE, show_default=True)
@click.option("--rounds", type=click.IntRange(1, 100), default=8, show_default=True)
@click.option("--turns", type=click.IntRange(1, 100), default=4, show_default=True)
@click.option("--seconds", type=click.FloatRange(0.1), default=4.0, show_default=True)
@click.option("--in-flight", type=click.IntRange(1, 1024), default=32, show_default=True)
def main(json_file: Path | None, rows: int, varied: bool, **options: object) -> None:
    """Run the benchmark."""
    console = Console(width=160)
    given = {name: value for name, value in options.items() if value != ()}
    config = TracesBenchConfig.model_validate({"shape": BenchShape.of(rows, varied=varied), **given})
    try:
        with tempfile.TemporaryDirectory(prefix="bench-traces-") as folder:
            result = run_bench(config, Path(folder), console.print)
    except ShardrankError as error:
        raise click.ClickException(str(error)) from error
    for one in result.comparisons:
        show_comparison(console, one)
    console.print(
        f"aimed at: a ratio of at most {MAX_RATIO}; spans: {result.spans}, posts and bytes: {result.collected}"
    )
    if json_file is not None:
        json_file.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
