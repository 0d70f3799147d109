"""`shardrank loadtest compare-cards`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from loadtest.report.cli import PAGE
from loadtest.workloads.cli import request_options, workload_options
from serving.cli import WithExamples
from serving.cli.options import FiniteRange, device_options, memory_budget_option, sharding_option

MAX_CARDS = 64
MAX_SHARE = 100
MAX_RATE = 200_000
MAX_S = 3600
MAX_IN_FLIGHT = 4096
FILE = click.Path(path_type=Path, dir_okay=False)

Command = TypeVar("Command", bound=Callable[..., Any])


class Numbers(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases only
    """`1,2,4`: whole numbers from 1 to a largest one."""

    name = "numbers"

    def __init__(self, most: int, *, may_be_empty: bool = False) -> None:
        self._most, self._may_be_empty = most, may_be_empty

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the numbers, in their order."""
        if isinstance(value, tuple):
            return value
        if value == "" and self._may_be_empty:
            return ()
        parts = str(value).split(",")
        if not all(
            part.isascii() and part.isdigit() and len(part) < 4 and 1 <= int(part) <= self._most for part in parts
        ):
            wanted = f"numbers from 1 to {self._most} with commas between, such as 1,2,4"
            self.fail(f"{value!r}: expected {wanted}", param, ctx)
        return tuple(map(int, parts))


class Words(click.ParamType):  # type: ignore[type-arg]  # likewise
    """`unix,tcp`: some of a few words."""

    name = "words"

    def __init__(self, *allowed: str) -> None:
        self._allowed = allowed

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Return the words, in their order."""
        if isinstance(value, tuple):
            return value
        parts = tuple(str(value).split(","))
        if not set(parts) <= set(self._allowed):
            self.fail(f"{value!r}: expected some of {','.join(self._allowed)} with commas between", param, ctx)
        return parts


REMOVED = {
    "--hosts": "use --transport tcp; `shardrank plan` predicts the cost of a network",
    "--delay-ms": "use `shardrank plan --network-us`, which predicts the cost of a round trip",
}
"""Options of earlier releases, with what to use instead."""


def removed_options(command: Command) -> Command:
    """Make a command refuse each of `REMOVED` by its name, with or without a value."""

    def refuse(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        if value is not None:
            name = param.opts[0]
            raise click.UsageError(f"{name} is gone: {REMOVED[name]}", ctx)

    for name in REMOVED:
        option = click.option(name, is_flag=False, flag_value="", hidden=True, expose_value=False, callback=refuse)
        command = option(command)
    return command


@click.command(cls=WithExamples)
@click.option(
    "--cards",
    type=Numbers(MAX_CARDS),
    default="1,2,4",
    show_default=True,
    metavar="N,...",
    help="In the serving process; each number is an arm, and the first is the baseline.",
)
@click.option(
    "--shards",
    type=Numbers(MAX_CARDS),
    metavar="N,...",
    help="Further arms: each of these numbers of shard processes, with the first number of cards each, over each "
    "--transport.",
)
@click.option(
    "--transport",
    "transports",
    type=Words("unix", "tcp"),
    metavar="unix,tcp",
    help="Between the serving process and the shards: Unix sockets, TCP over loopback. Default: unix.",
)
@removed_options
@click.option("--rounds", type=click.IntRange(1, 1000), default=6, show_default=True, metavar="N", help="Of every arm.")
@workload_options
@request_options
@click.option(
    "--store",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Serve the workload's model from here; written if it is not there. Default: a temporary folder.",
)
@click.option(
    "--rate",
    type=FiniteRange(0, MAX_RATE, min_open=True),
    default=50.0,
    show_default=True,
    metavar="R",
    help="Requests a second while latency is measured, whatever the servers do.",
)
@click.option(
    "--in-flight",
    type=click.IntRange(1, MAX_IN_FLIGHT),
    default=32,
    show_default=True,
    metavar="N",
    help="Requests that are always out while throughput, CPU and bytes of a request are measured.",
)
@click.option(
    "--shares",
    type=Numbers(MAX_SHARE, may_be_empty=True),
    default="30,60,80",
    show_default=True,
    metavar="PERCENT,...",
    help="Offer every arm these shares of what the slowest arm answers in a rehearsal. '' to leave that out.",
)
@click.option("--cold", "cold_s", type=FiniteRange(0, MAX_S, min_open=True), default=2.0, show_default=True,
              metavar="S", help="From a server's start.")  # fmt: skip
@click.option("--warmup", "warmup_s", type=FiniteRange(0, MAX_S), default=2.0, show_default=True, metavar="S",
              help="Of each measure after that; not counted.")  # fmt: skip
@click.option("--duration", "duration_s", type=FiniteRange(0, MAX_S, min_open=True), default=10.0, show_default=True,
              metavar="S", help="Of each of these measures, after the warm-up.")  # fmt: skip
@click.option(
    "--api",
    type=click.Choice(["json", "oip-http", "grpc", "grpc-packed", "oip-grpc"]),
    default="grpc",
    show_default=True,
    help="oip: Open Inference Protocol, over HTTP with binary tensors.",
)
@click.option("--arrivals", type=click.Choice(["poisson", "constant"]), default="poisson", show_default=True)
@click.option("--slo-ms", type=FiniteRange(0, 60_000, min_open=True), metavar="MS", help="Of each run. Default: 60.")
@click.option("--timeout-ms", type=FiniteRange(0, 60_000, min_open=True), metavar="MS",
              help="A request is given up after it. Default: 1000.")  # fmt: skip
@click.option("--processes", type=click.IntRange(1, 64), metavar="N", help="That send. Default: 1.")
@click.option("--requests", type=click.IntRange(1), metavar="N", help="Distinct ones in each process. Default: 1024.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, metavar="N",
              help="Of rows, requests, their times and the bootstrap.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True, metavar="N",
              help="Serving processes of each server. In arms without shards each holds all rows.")  # fmt: skip
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", show_default=True,
              help="Number format of the dense model.")  # fmt: skip
@click.option("--wire-dtype", type=click.Choice(["auto", "float32", "float16"]), default="auto", show_default=True,
              help="Number format of sums that shards send.")  # fmt: skip
@sharding_option
@memory_budget_option
@device_options
@click.option("--replicate-bytes", type=click.IntRange(0), default=0, show_default=True, metavar="N",
              help="Tables of at most this many bytes are held whole by every shard. 0 divides all, so that small "
              "tables don't hide what dividing costs; the default of `shardrank up` is 1048576.")  # fmt: skip
@click.option("--json", "json_file", type=FILE, metavar="FILE", help="Write the comparison to this file.")
@click.option("--html", "html_file", type=PAGE, metavar="FILE", help="Write a page with plots to this file.")
@click.pass_context
def compare_cards(
    ctx: click.Context, /, store: Path | None, json_file: Path | None, html_file: Path | None, **given: Any
) -> None:
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
    from loadtest.compare.run import checked_configs, execute

    ctx.exit(execute(*checked_configs(given), store, json_file, html_file))
