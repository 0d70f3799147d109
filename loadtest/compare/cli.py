"""`shardrank loadtest compare-cards`."""

from __future__ import annotations

from typing import Any

import click

from loadtest.report.cli import PAGE
from loadtest.workloads.cli import request_options, workload_options
from serving.cli import WithExamples
from serving.cli import options as opts

APIS = ["grpc", "json", "oip-http", "grpc-packed", "oip-grpc"]
server_options = opts.together(
    opts.count("--workers", "Serving processes of each server. In arms without shards each holds all rows.", default=1),
    opts.choice("--dtype", ["auto", "float32", "bfloat16"], "Number format of the dense model."),
    opts.choice("--wire-dtype", ["auto", "float32", "float16"], "Number format of sums that shards send."),
    opts.sharding_option,
    opts.memory_budget_option,
    opts.device_options,
    opts.count(
        "--replicate-bytes",
        "Tables of at most this many bytes are held whole by every shard. 0 divides all, so that small tables don't "
        "hide what dividing costs; the default of `shardrank up` is 1048576.",
        low=0,
        default=0,
    ),
)


@click.command(cls=WithExamples)
@opts.numbers("--cards N,...", "In the serving process; each number is an arm, the first the baseline.", 1, 64, "1,2,4")
@opts.numbers("--shards N,...", "Arms of so many shard processes, with the first of --cards each.", 1, 64)
@opts.option(
    "--transport unix,tcp",
    "Between the serving process and the shards, an arm for each: Unix sockets, TCP over loopback. Default: unix.",
    lambda text: tuple(text.split(",")),
    name="transports",
)
@opts.count("--rounds", "Of every arm.", default=6)
@workload_options
@request_options
@opts.option("--store", "Serve the workload's model from here, written if missing. Default: a temporary folder.",
             opts.FOLDER)  # fmt: skip
@opts.option("--rate R", "Requests a second while latency is measured, whatever the servers do.", float, 50.0)
@opts.count("--in-flight", "Requests that are always out while throughput, CPU and bytes of a request are measured.",
            default=32)  # fmt: skip
@opts.numbers(
    "--shares PERCENT,...",
    "Offer every arm these shares of what the slowest arm answers in a rehearsal. '' to leave that out.",
    1, 100, "30,60,80",
)  # fmt: skip
@opts.option("--cold S", "Measured from a server's start.", float, 2.0, name="cold_s")
@opts.option("--warmup S", "Of each measure after that; not counted.", float, 2.0, name="warmup_s")
@opts.option("--duration S", "Of each of these measures, after the warm-up.", float, 10.0, name="duration_s")
@opts.choice("--api", APIS, "oip: Open Inference Protocol, over HTTP with binary tensors.")
@opts.choice("--arrivals", ["poisson", "constant"], "Gaps between requests at a rate.")
@opts.option("--slo-ms MS", "Deadline of each run. Default: 60.", float)
@opts.option("--timeout-ms MS", "A request is given up after it. Default: 1000.", float)
@opts.count("--processes", "That send. Default: 1.")
@opts.count("--requests", "Distinct ones in each process. Default: 1024.")
@opts.count("--seed", "Of rows, requests, their times and the bootstrap.", low=0, default=0)
@server_options
@opts.option("--json", "Write the comparison to this file.", opts.FILE, name="json_file")
@opts.option("--html", "Write a page with plots to this file.", PAGE, name="html_file")
@click.pass_context
def compare_cards(ctx: click.Context, /, **given: Any) -> None:
    """Measure what rows on several cards, or in shard processes, cost against rows in the serving process.

    The same model, requests, times and memory budgets for each arm, as ratios to the first number of cards. In every
    round each arm's server is started anew and asked: cold and warm at --rate; one request after the other; as fast as
    it answers, for the processor time and the bytes of a request; and at --shares of the slowest arm's capacity. Arms
    take turns. --card-memory-gb and --hot-gb are of each card; the shards of an arm divide --memory-budget-gb and
    --pinned-memory-gb evenly. In the first round all must give the same scores. The exit code is 1 if a run can't be
    believed.

    Examples:
      shardrank loadtest compare-cards --cards 1,2,4,8 --shards 1,2,4 --transport unix,tcp --html many.html
      shardrank loadtest compare-cards --cards 1,2,4 --workload dlrm-v2:0.001 --rate 50 --html cards.html
      shardrank loadtest compare-cards --cards 1,2 --device cuda --rate 500 --in-flight 64 --json cards.json
      shardrank loadtest compare-cards --cards 1 --shards 2 --rounds 10 --shares 60 --workers 2
    """
    from loadtest.compare.run import execute

    ctx.exit(execute(**given))
