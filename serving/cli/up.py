"""`shardrank up`: a whole fleet on this machine from one snapshot."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from serving.cli.examples import WithExamples
from serving.cli.options import (
    Sharding,
    cards_option,
    memory_budget_option,
    port_options,
    ranking_options,
    replicate_option,
    sharding_option,
    snapshot_options,
    verify_option,
)
from serving.cli.snapshots import SnapshotChoice

if TYPE_CHECKING:
    from serving.fleet.config import FleetConfig


@click.command(cls=WithExamples)
@snapshot_options
@click.option("--shards", type=click.IntRange(1, 64), default=2, show_default=True, metavar="N", help="Shards.")
@click.option(
    "--replicas", type=click.IntRange(1, 16), default=1, show_default=True, metavar="N", help="Nodes of each shard."
)
@cards_option(1)
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    metavar="N",
    help="Serving processes on one HTTP and one gRPC port.",
)
@sharding_option
@replicate_option
@memory_budget_option
@port_options(8080, 8081)
@ranking_options
@verify_option
@click.pass_context
def up(
    ctx: click.Context,
    store: Path | None,
    model: str | None,
    version: int | None,
    snapshot: Path | None,
    shards: int,
    replicas: int,
    cards: int,
    workers: int,
    sharding: Sharding,
    replicate_bytes: int,
    memory_budget_gb: float | None,
    host: str,
    http_port: int,
    grpc_port: int,
    ranking_replicas: int,
    dtype: str,
    limit: tuple[tuple[str, str], ...],
    limits_file: Path | None,
    verify: bool,
) -> None:
    """Run a whole fleet on this machine from one snapshot.

    Runs until Ctrl-C. Starts shards × replicas shard nodes on private Unix sockets and the serving processes, waits
    until each says that it is ready, and restarts whichever dies. Logs of the children are in the folder that is
    printed. Each of them checks the files' SHA-256 whenever it starts, unless --no-verify is given.
    SIGTERM or Ctrl-C ends serving processes, then shard nodes, and exits 0; no process is left behind.

    Examples:
      shardrank up --store models
      shardrank up --store models --model films --version 3 --shards 2 --replicas 2 --cards 2 --workers 2
      shardrank up --snapshot models/films/3 --http-port 0 --grpc-port 0
    """
    from loader.reader import Snapshot
    from router.plan import Plan
    from serving.cli.limits import limit_arguments
    from serving.cli.placement import placement_line
    from serving.fleet.config import FleetConfig

    folder = SnapshotChoice(store, model, version, snapshot).folder()
    # Only the manifest and the headers: each child checks the files that it loads, at its start and at every restart.
    opened = Snapshot.open(folder, verify=False)
    click.echo(placement_line(Plan.make(opened.spec, shards, sharding, cards, replicate_bytes)))
    settings = {
        "snapshot": folder.resolve(), "model": opened.spec.model, "version": opened.version,
        "shards": shards, "replicas": replicas, "cards": cards, "workers": workers,
        "sharding": sharding, "replicate_bytes": replicate_bytes, "memory_budget_gb": memory_budget_gb,
        "verify": verify, "host": host, "http_port": http_port, "grpc_port": grpc_port,
        "log_level": _root_parameter(ctx, "log_level"),
        "serve_arguments": (
            *("--ranking-replicas", str(ranking_replicas), "--dtype", dtype),
            *limit_arguments(limits_file, limit),
        ),
    }  # fmt: skip
    _run(FleetConfig.model_validate(settings))


def _root_parameter(ctx: click.Context, name: str) -> object:
    return ctx.find_root().params.get(name, "info")


def _run(config: FleetConfig) -> None:
    from serving.fleet.local_fleet import running_fleet
    from serving.fleet.signals import StopRequestedError, run_until_signalled

    def on_ready(name: str) -> None:
        click.echo(f"{name} is ready")

    async def program() -> None:
        async with running_fleet(config, on_ready) as fleet:
            click.echo(f"logs: {fleet.supervisor.run_directory}")
            click.echo(f"HTTP: http://{fleet.host}:{fleet.http_port}/docs")
            click.echo(f"gRPC: {fleet.host}:{fleet.grpc_port}")
            await asyncio.Event().wait()

    try:
        run_until_signalled(program)
    except StopRequestedError:
        click.echo("stopped")
