"""`shardrank loadtest` and its command `run`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from loadtest.report.cli import PAGE
from loadtest.workloads.cli import request_options, workload_options
from serving.cli import WithExamples

COMMANDS = {
    "run": "loadtest.load.cli:run",
    "replay": "loadtest.load.cli:replay",
    "prepare": "loadtest.workloads.cli:prepare",
    "report": "loadtest.report.cli:report",
    "peers": "loadtest.peers.cli:peers",
    "compare-cards": "loadtest.compare.cli:compare_cards",
    "bench": "loadtest.bench.cli:bench",
}


class LazyGroup(WithExamples, click.Group):
    """Loads a command's module when the command is named.

    Args:
        modules: `module:attribute` by the command's name, in the order in which one meets them.
    """

    def __init__(self, name: str | None, *, modules: Mapping[str, str], **more: Any) -> None:
        super().__init__(name, **more)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name, or None."""
        if cmd_name not in self._modules:
            return None
        module, attribute = self._modules[cmd_name].split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, modules=COMMANDS)
def loadtest() -> None:
    """Measure how a server stands a load.

    Examples:
      shardrank loadtest prepare --workload dlrm-v2:0.01 --store models
      shardrank loadtest run --target http://127.0.0.1:8080 --workload dlrm-v2:0.01 --rate 200 --html run.html
    """


FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(cls=WithExamples)
@click.option("--target", required=True, metavar="URL", help="http://HOST[:PORT] or grpc://HOST:PORT.")
@click.option(
    "--rate",
    type=click.FloatRange(0, 200_000, min_open=True),
    metavar="R",
    help="Requests a second, whatever the server does. With --sweep, the first one; default: 50.",
)
@click.option("--sweep", "sweeps", is_flag=True, help="Search the highest rate that keeps p99 within --slo-ms.")
@click.option("--max-rate", type=click.FloatRange(1, 200_000), default=100_000, help="A sweep goes no further.")
@click.option(
    "--duration", "duration_s", type=click.FloatRange(0, 3600, min_open=True), metavar="S", help="Default: 10."
)
@click.option(
    "--warmup", "warmup_s", type=click.FloatRange(0, 3600), metavar="S", help="Before it; not counted. Default: 2."
)
@workload_options
@click.option("--model", metavar="NAME", help="Default: the workload's own name.")
@click.option(
    "--api",
    type=click.Choice(["json", "oip-http", "grpc", "grpc-packed", "oip-grpc"]),
    help="oip: Open Inference Protocol, over HTTP with binary tensors; grpc-packed: features as arrays in the order of "
    "the model's schema. Default: json at http://, grpc at grpc://.",
)
@request_options
@click.option("--arrivals", type=click.Choice(["poisson", "constant"]), help="Default: poisson.")
@click.option("--slo-ms", type=click.FloatRange(0, 60_000, min_open=True), metavar="MS", help="Deadline. Default: 60.")
@click.option(
    "--timeout-ms",
    type=click.FloatRange(0, 60_000, min_open=True),
    metavar="MS",
    help="A request is given up after it. Default: 1000.",
)
@click.option("--processes", type=click.IntRange(1, 64), metavar="N", help="That send. Default: 1.")
@click.option("--connections", "max_connections", type=click.IntRange(1), metavar="N", help="Of HTTP. Default: 512.")
@click.option("--max-in-flight", type=click.IntRange(1), metavar="N", help="One beyond fails unsent. Default: 4096.")
@click.option("--requests", type=click.IntRange(1), metavar="N", help="Distinct ones in each process. Default: 1024.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), metavar="N", help="Of requests and their times. Default: 0.")
@click.option("--marks", type=FILE, metavar="FILE", help="Lines of `UNIX_SECONDS LABEL`; read when the run is over.")
@click.option("--json", "json_file", type=FILE, metavar="FILE", help="Write the result to this file.")
@click.option("--html", "html_file", type=PAGE, metavar="FILE", help="Write a page with plots to this file.")
@click.pass_context
def run(
    ctx: click.Context,
    /,
    rate: float | None,
    sweeps: bool,
    max_rate: float,
    duration_s: float | None,
    warmup_s: float | None,
    marks: Path | None,
    json_file: Path | None,
    html_file: Path | None,
    **given: object,
) -> None:
    """Send requests at a given rate and measure latency from when each was due.

    Open loop: requests don't wait for answers, so a server that stalls meets those that came meanwhile, and their
    latency has the stall in it. The exit code is 1 if the numbers can't be believed, because the generator itself was
    late or out of CPU, or if a sweep found no rate. SIGUSR1 sets a mark in the time line.

    Examples:
      shardrank loadtest run --target http://127.0.0.1:8080 --rate 200
      shardrank loadtest run --target grpc://127.0.0.1:8081 --rate 500 --duration 60 --json run.json --html run.html
      shardrank loadtest run --target http://127.0.0.1:8080 --api oip-http --sweep --slo-ms 20
    """
    from loadtest.load.run import execute

    if rate is None and not sweeps:
        raise click.UsageError("--rate or --sweep is needed")
    code = execute(
        given,
        rate=rate,
        max_rate=max_rate if sweeps else None,
        duration_s=duration_s,
        warmup_s=warmup_s,
        marks=marks,
        json_file=json_file,
        html_file=html_file,
    )
    ctx.exit(code)


@click.command(cls=WithExamples)
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--target", required=True, metavar="URL", help="http://HOST[:PORT] or grpc://HOST:PORT.")
@click.option("--speed", type=float, metavar="N", help="Times the pace at which they came. Default: 1.")
@click.option("--rate", type=float, metavar="R", help="Requests a second, evenly, in place of their own pace.")
@click.option("--model", metavar="NAME", help="Whose requests, if the folder has those of several models.")
@click.option("--requests", type=int, metavar="N", help="The last so many. Default: 10000.")
@click.option("--timeout-ms", type=float, metavar="MS", help="A request is given up after it. Default: 1000.")
@click.option("--tolerance", type=float, metavar="X", help="A score that is further off differs. Default: 0.0001.")
@click.option("--connections", "max_connections", type=int, metavar="N", help="Of HTTP. Default: 512.")
@click.option("--json", "json_file", type=FILE, metavar="FILE", help="Write the result to this file.")
@click.pass_context
def replay(ctx: click.Context, /, json_file: Path | None, **given: object) -> None:
    """Send recorded requests again, and compare their scores with the recorded ones.

    FOLDER is that of `shardrank serve --record`. Open loop, as `run`. Scores are compared where the answer is of the
    version, dense step and deltas that the recorded one was. The exit code is 1 if one differs by more than the
    tolerance, or if nothing was answered.

    Examples:
      shardrank loadtest replay recorded --target http://127.0.0.1:8080
      shardrank loadtest replay recorded --target grpc://127.0.0.1:8081 --speed 10 --json replay.json
      shardrank loadtest replay recorded --target http://127.0.0.1:8080 --rate 200 --requests 5000
    """
    from loadtest.load.replay import ReplayConfig, execute
    from loadtest.load.run import checked

    if given["speed"] is not None and given["rate"] is not None:
        raise click.UsageError("--speed and --rate: one of them, or neither")
    ctx.exit(execute(checked(ReplayConfig, given), json_file))
