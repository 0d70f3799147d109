"""`shardrank loadtest` and its commands, but for the benchmarks themselves.

Heavy imports are made inside commands, so that `--help` is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from serving.cli import LazyGroup, WithExamples
from serving.cli import options as opts
from serving.cli.output import human_bytes, progress_bars
from serving.cli.settings import config_of

if TYPE_CHECKING:
    from loadtest.workloads.catalog import SideSplit

COMMANDS = ("run", "replay", "prepare", "bench")
COMPARISONS = {"peers": "loadtest.peers.run", "compare-cards": "loadtest.compare", "changing": "loadtest.changing"}
BENCHMARKS = {name: f"loadtest.bench.{name}" for name in ("lookup", "serving", "deltas")}
OF_THE_BOOK = dict.fromkeys(("hot-rows", "levers"), "loadtest.bench.book")
APIS = ["grpc", "json", "oip-http", "grpc-packed", "oip-grpc"]
TARGET = "http://HOST[:PORT] or grpc://HOST:PORT."


@click.group(cls=LazyGroup, modules={**dict.fromkeys(COMMANDS, __name__), **COMPARISONS})
def loadtest() -> None:
    """Measure how a server stands a load.

    Examples:
      shardrank loadtest prepare --workload dlrm-v2:0.01 --store models
      shardrank loadtest run --target http://127.0.0.1:8080 --workload dlrm-v2:0.01 --rate 200 --json run.json
    """


same_option = click.option(
    "--varied/--same",
    "varied",
    default=True,
    help="Varied requests, the default, have ragged bags and another `traceparent` and `x-request-id` each time; "
    "the same ones have bags of one length and heads that are alike.",
)


def side_split_option(default: SideSplit) -> opts.Option:
    """Declare `--workload`: which inputs of the benchmarks' model come once a request."""
    text = "product: 20 of the 26 features and 10 of the 13 floats come once a request; candidates: none."
    kind = click.Choice(("product", "candidates"))
    return opts.option("--workload", text, kind, default, name="side_split")


workload_option = opts.option(
    "--workload NAME",
    "A published model (`shardrank plan` has all), with :SCALE for a share of its rows, such as dlrm-v2:0.01; or "
    "bench-mlp[:HOTNESS] or bench-dlrm[:HOTNESS], the benchmarks' one table of a million rows, such as bench-mlp:20.",
    default="dlrm-v2:0.001",
)
request_options = opts.together(
    opts.option("--ids uniform|zipf:S", "Which rows are asked for. Default: uniform, zipf:1.05 for Merlin's models."),
    opts.option(
        "--candidates N|LEAST-MOST:MEAN",
        "Candidates of a request, such as 100 or 100-700:270. Default: 50-500:200, with --same 100-700:270.",
    ),
    same_option,
)
"""What its requests are like."""
json_option = opts.option("--json", "Write the result to this file.", opts.WRITABLE_FILE, name="json_file")


@click.command(cls=WithExamples)
@opts.option("--target URL", TARGET, required=True)
@opts.option("--rate R", "Requests a second, whatever the server does. With --sweep the first one; default: 50.", float)
@opts.switch("--sweep", "Search the highest rate that keeps p99 within --slo-ms.", name="sweeps")
@opts.option("--max-rate R", "A sweep goes no further.", opts.FiniteRange(1, 200_000), 100_000)
@opts.option("--duration S", "Default: 10.", float, name="duration_s")
@opts.option("--warmup S", "Before it; not counted. Default: 2.", float, name="warmup_s")
@workload_option
@opts.option("--model NAME", "In place of --workload: a served model; the server says what its requests are.")
@opts.option(
    "--hotness N|FEATURE=N", "With --model: ids a bag, in the mean, of all or of one. Repeatable.", multiple=True
)
@opts.option(
    "--like FILE", "With --model: draw from what `--record` wrote, or from a JSON request a line.", opts.EXISTING
)
@opts.option(
    "--api",
    "oip: Open Inference Protocol, over HTTP with binary tensors; grpc-packed: features as arrays in the order of "
    "the model's schema. Default: json at http://, grpc at grpc://.",
    click.Choice(APIS),
)
@request_options
@opts.option("--arrivals", "Gaps of requests at a rate. Default: poisson.", click.Choice(["poisson", "constant"]))
@opts.option("--slo-ms MS", "Deadline. Default: 60.", float)
@opts.option("--timeout-ms MS", "A request is given up after it. Default: 1000.", float)
@opts.count("--processes", "That send. Default: 1.")
@opts.count("--requests", "Distinct ones in each process. Default: 1024.")
@opts.option("--connections N", "Of HTTP. Default: 512.", int, name="max_connections")
@opts.count("--max-in-flight", "One beyond fails unsent. Default: 4096.")
@opts.count("--seed", "Of requests and their times. Default: 0.", low=0)
@opts.option("--max-failed-share X", "The exit code is 1 if more of them failed.", opts.FiniteRange(0, 1), 0.01)
@json_option
@click.pass_context
def run(ctx: click.Context, /, **given: Any) -> None:
    """Send requests at a given rate and measure latency from when each was due.

    Open loop: requests don't wait for answers, so a server that stalls meets those that came meanwhile, and their
    latency has the stall in it. The exit code is 1 if the numbers can't be believed, because the generator itself was
    late or out of CPU, if more than --max-failed-share of the requests failed, or if a sweep found no rate.

    Examples:
      shardrank loadtest run --target http://127.0.0.1:8080 --model films --rate 200
      shardrank loadtest run --target grpc://127.0.0.1:8081 --model films --like recorded --rate 500 --json run.json
      shardrank loadtest run --target http://127.0.0.1:8080 --model films --hotness history=50 --ids zipf:1.05 --sweep
    """
    from loadtest.load.run import execute

    if given["model"] and ctx.get_parameter_source("workload") is not ParameterSource.DEFAULT:
        raise click.UsageError("--model and --workload: one of them")
    ctx.exit(execute(**given))


@click.command(cls=WithExamples)
@click.argument("folder", type=opts.EXISTING_FOLDER)
@opts.option("--target URL", TARGET, required=True)
@opts.option("--speed N", "Times the pace at which they came. Default: 1.", float)
@opts.option("--rate R", "Requests a second, evenly, in place of their own pace.", float)
@opts.option("--model NAME", "Whose requests, if the folder has those of several models.")
@opts.option("--requests N", "The last so many. Default: 10000.", int)
@opts.option("--timeout-ms MS", "A request is given up after it. Default: 1000.", float)
@opts.option("--tolerance X", "A score that is further off differs. Default: by the model's number format.", float)
@opts.option("--connections N", "Of HTTP. Default: 512.", int, name="max_connections")
@json_option
@click.pass_context
def replay(ctx: click.Context, /, json_file: Path | None, **given: object) -> None:
    """Send recorded requests again, and compare their scores with the recorded ones.

    FOLDER is that of `--record` of `serve` or `up`, which record no replays. Open loop, as `run`.
    Scores are compared where the answer is of the version, dense step and deltas that the recorded one was. The exit
    code is 1 if one differs by more than the tolerance, or if nothing was answered.

    Examples:
      shardrank loadtest replay recorded --target http://127.0.0.1:8080
      shardrank loadtest replay recorded --target grpc://127.0.0.1:8081 --speed 10 --json replay.json
      shardrank loadtest replay recorded --target http://127.0.0.1:8080 --rate 200 --requests 5000
    """
    from loadtest.load.replay import ReplayConfig, execute

    if given["speed"] is not None and given["rate"] is not None:
        raise click.UsageError("--speed and --rate: one of them, or neither")
    ctx.exit(execute(config_of(ReplayConfig, given), json_file))


@click.command(cls=WithExamples)
@workload_option
@opts.out_store_option
@opts.count("--seed", "Of the rows and weights.", 0, 2**32 - 1, 0)
def prepare(workload: str, store: Path, **given: Any) -> None:
    """Write a workload's model into a store, to be served and load tested.

    Rows and weights are random: answers mean nothing, but cost what a trained model's do. The whole of dlrm-v2 has
    28 GB of rows, merlin-small 9 GB, merlin-tiny 1.7 GB; all go with the scale. Where ids are not uniform, rows have
    access counts. Memory is bounded, and an export that was interrupted goes on when it is run again.

    Examples:
      shardrank loadtest prepare --workload dlrm-v2:0.01 --store models
      shardrank serve --store models --model dlrm-v2
      shardrank loadtest run --target http://127.0.0.1:8080 --workload dlrm-v2:0.01
    """
    from loader.snapshot.publishing import rows_bytes_of
    from loadtest.workloads.catalog import open_workload
    from loadtest.workloads.prepare import write_random_snapshot

    opened = open_workload(workload)
    spec, counts = opened.spec, opened.access_counts()
    with progress_bars() as bars:
        folder = write_random_snapshot(spec, store, access_counts=counts, progress=bars, **given)
    click.echo(f"wrote {folder} ({human_bytes(rows_bytes_of(spec))} of rows); serve it with")
    click.echo(f"  shardrank serve --store {store} --model {spec.model}")


@click.group(cls=LazyGroup, modules=BENCHMARKS | OF_THE_BOOK)
def bench() -> None:
    """Compare parts of this project, side by side on this machine, in rounds.

    Examples:
      shardrank loadtest bench lookup --quick
      shardrank loadtest bench serving --against ../before --json against.json
      shardrank loadtest bench hot-rows --book
    """
