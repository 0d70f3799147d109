"""`shardrank demo`."""

from __future__ import annotations

from pathlib import Path

import click

from serving.cli.devices import device_option
from serving.cli.examples import WithExamples
from serving.cli.options import Sharding, cards_option, films_options, port_options, sharding_option


@click.command(cls=WithExamples)
@films_options
@click.option(
    "--store",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Keep the snapshot in this store; without it, it is removed at the end.",
)
@click.option(
    "--shards",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    metavar="N",
    help="Shard nodes; each is a process.",
)
@cards_option(2)
@device_option("cpu")
@sharding_option
@click.option("--local", is_flag=True, help="Everything in this process, nothing serialised between router and rows.")
@port_options(8080, 8081)
@click.option("--once", is_flag=True, help="Stop after the report.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    metavar="FILE",
    help="Also write the report as JSON.",
)
@click.pass_context
def demo(
    ctx: click.Context,
    movielens: Path | None,
    ratings: int,
    epochs: int | None,
    seed: int,
    store: Path | None,
    shards: int,
    cards: int,
    device: str,
    sharding: Sharding,
    local: bool,
    host: str,
    http_port: int,
    grpc_port: int,
    once: bool,
    json_file: Path | None,
) -> None:
    """The whole path from one command: train, export, serve, rank.

    Trains a small ranking model on film ratings (MovieLens 100K with --movielens, else generated ones with planted
    tastes), exports it as an int8 snapshot, starts shard nodes and a serving process, ranks every held-out rating over
    HTTP and gRPC, and reports quality, latency and sizes from the answers. Then it keeps serving until Ctrl-C. Exits
    with 1 if any request failed.

    Examples:
      shardrank demo
      shardrank demo --movielens ml-100k --shards 3 --sharding table
      shardrank demo --local --once --json report.json
      shardrank demo --local --device cuda:0
      shardrank demo --once --ratings 3000 --epochs 1       (quick and poor)
    """
    from serving.cli.output import stdout_console
    from serving.demo.run import DemoConfig, run_demo

    config = DemoConfig(
        movielens=movielens,
        ratings=ratings,
        epochs=epochs,
        seed=seed,
        store=store,
        shards=1 if local else shards,
        cards=cards,
        device=device,
        sharding=sharding,
        local=local,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
    )
    ctx.exit(run_demo(config, stdout_console(), once=once, json_file=json_file))
