"""`shardrank loadtest`, and its commands `run` and `replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from loadtest.report.cli import PAGE
from loadtest.workloads.cli import request_options, workload_options
from serving.cli import LazyGroup, WithExamples
from serving.cli import options as opts

COMMANDS = {
    "run": "loadtest.load.cli",
    "replay": "loadtest.load.cli",
    "prepare": "loadtest.workloads.cli",
    "report": "loadtest.report.cli",
    "peers": "loadtest.peers.cli",
    "compare-cards": "loadtest.compare.cli",
    "bench": "loadtest.bench",
}


@click.group(cls=LazyGroup, modules=COMMANDS)
def loadtest() -> None:
    """Measure how a server stands a load.

    Examples:
      shardrank loadtest prepare --workload dlrm-v2:0.01 --store models
      shardrank loadtest run --target http://127.0.0.1:8080 --workload dlrm-v2:0.01 --rate 200 --html run.html
    """


TARGET = "http://HOST[:PORT] or grpc://HOST:PORT."


@click.command(cls=WithExamples)
@opts.option("--target URL", TARGET, required=True)
@opts.option("--rate R", "Requests a second, whatever the server does. With --sweep the first one; default: 50.", float)
@opts.switch("--sweep", "Search the highest rate that keeps p99 within --slo-ms.", name="sweeps")
@opts.option("--max-rate R", "A sweep goes no further.", opts.FiniteRange(1, 200_000), 100_000)
@opts.option("--duration S", "Default: 10.", float, name="duration_s")
@opts.option("--warmup S", "Before it; not counted. Default: 2.", float, name="warmup_s")
@workload_options
@opts.option("--model NAME", "Default: the workload's own name.")
@opts.option(
    "--api",
    "oip: Open Inference Protocol, over HTTP with binary tensors; grpc-packed: features as arrays in the order of "
    "the model's schema. Default: json at http://, grpc at grpc://.",
    click.Choice(["json", "oip-http", "grpc", "grpc-packed", "oip-grpc"]),
)
@request_options
@opts.option("--arrivals", "Default: poisson.", click.Choice(["poisson", "constant"]))
@opts.option("--slo-ms MS", "Deadline. Default: 60.", float)
@opts.option("--timeout-ms MS", "A request is given up after it. Default: 1000.", float)
@opts.count("--processes", "That send. Default: 1.")
@opts.option("--connections N", "Of HTTP. Default: 512.", int, name="max_connections")
@opts.count("--max-in-flight", "One beyond fails unsent. Default: 4096.")
@opts.count("--requests", "Distinct ones in each process. Default: 1024.")
@opts.count("--seed", "Of requests and their times. Default: 0.", low=0)
@opts.option("--marks", "Lines of `UNIX_SECONDS LABEL`; read when the run is over.", opts.FILE)
@opts.option("--json", "Write the result to this file.", opts.FILE, name="json_file")
@opts.option("--html", "Write a page with plots to this file.", PAGE, name="html_file")
@click.pass_context
def run(ctx: click.Context, /, **given: Any) -> None:
    """Send requests at a given rate and measure latency from when each was due.

    Open loop: requests don't wait for answers, so a server that stalls meets those that came meanwhile, and their
    latency has the stall in it. The exit code is 1 if the numbers can't be believed, because the generator itself was
    late or out of CPU, or if a sweep found no rate.

    Examples:
      shardrank loadtest run --target http://127.0.0.1:8080 --rate 200
      shardrank loadtest run --target grpc://127.0.0.1:8081 --rate 500 --duration 60 --json run.json --html run.html
      shardrank loadtest run --target http://127.0.0.1:8080 --api oip-http --sweep --slo-ms 20
    """
    from loadtest.load.run import execute

    ctx.exit(execute(**given))


@click.command(cls=WithExamples)
@click.argument("folder", type=opts.EXISTING_FOLDER)
@opts.option("--target URL", TARGET, required=True)
@opts.option("--speed N", "Times the pace at which they came. Default: 1.", float)
@opts.option("--rate R", "Requests a second, evenly, in place of their own pace.", float)
@opts.option("--model NAME", "Whose requests, if the folder has those of several models.")
@opts.option("--requests N", "The last so many. Default: 10000.", int)
@opts.option("--timeout-ms MS", "A request is given up after it. Default: 1000.", float)
@opts.option("--tolerance X", "A score that is further off differs. Default: 0.0001.", float)
@opts.option("--connections N", "Of HTTP. Default: 512.", int, name="max_connections")
@opts.option("--json", "Write the result to this file.", opts.FILE, name="json_file")
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
