"""`shardrank up`: a whole fleet on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from serving.cli.devices import device_arguments, device_options, num_replicas
from serving.cli.examples import WithExamples
from serving.cli.options import (
    FiniteRange,
    cards_option,
    front_options,
    memory_budget_option,
    port_options,
    ranking_options,
    registry_option,
    replicate_option,
    sharding_option,
    verify_option,
)
from serving.cli.protection import Protection, protection_arguments, tls_options, tokens_option, warn_if_open

if TYPE_CHECKING:
    from serving.fleet.local_fleet import Beginning, FleetConfig


@click.command(cls=WithExamples)
@click.option(
    "--store",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="The folder that holds <model>/<version>/ snapshots.",
)
@click.option(
    "--model", "models", multiple=True, metavar="NAME", help="What to serve. Repeatable; default: all of the store."
)
@click.option(
    "--version",
    type=click.IntRange(min=1),
    metavar="N",
    help="What the one model begins with. Default: the version that was live last; the first time, the store's latest.",
)
@click.option(
    "--snapshot",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="A snapshot's own folder, in place of --store, --model and --version.",
)
@registry_option
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
@device_options
@click.option(
    "--max-memory-gb",
    type=FiniteRange(min=0),
    metavar="GB",
    help="RAM for the rows of all versions together, on each shard node, in 10^9 bytes. A version beyond it is refused "
    "before it is loaded. Default: what is available.",
)
@port_options(8080, 8081)
@tls_options("Let in only clients with a certificate of these CAs, over HTTP and gRPC.")
@tokens_option
@front_options
@ranking_options
@verify_option
@click.pass_context
def up(ctx: click.Context, /, **options: Any) -> None:
    """Run a whole fleet on this machine.

    Runs until Ctrl-C. Starts a coordinator, shards × replicas shard nodes on private Unix sockets and the serving
    processes, waits until each says that it is ready, and restarts whichever dies. What is live is kept in the
    registry, by default the folder .registry in the store: a version that was rolled out is live again after a restart.
    Logs of the children are in the folder that is printed. Each of them checks the files' SHA-256 whenever it loads
    them, unless --no-verify is given. SIGTERM or Ctrl-C ends serving processes, then the others, and exits 0; no
    process is left behind.

    Examples:
      shardrank up --store models
      shardrank up --store models --model films --version 3 --shards 2 --replicas 2 --cards 2 --workers 2
      shardrank up --snapshot models/films/3 --http-port 0 --grpc-port 0
      shardrank up --store models --host 0.0.0.0 --tls-cert api.crt --tls-key api.key --tokens tokens.json
    """
    from serving.cli.limits import limit_arguments, with_proxies
    from serving.fleet.local_fleet import FleetConfig

    protection = Protection.of(options)
    warn_if_open(options["host"], protection)
    max_memory_gb, replicas = options["max_memory_gb"], options["ranking_replicas"]
    # Refuses what needs rows in the serving process itself.
    num_replicas(replicas, None)
    node_arguments = () if max_memory_gb is None else ("--max-memory-gb", str(max_memory_gb))
    same = (
        *("registry", "shards", "replicas", "cards", "workers", "sharding", "replicate_bytes", "memory_budget_gb"),
        *("verify", "host", "http_port", "grpc_port"),
    )
    settings = _what(options["store"], options["models"], options["version"], options["snapshot"]) | {
        **{name: options[name] for name in same},
        "shard_node_arguments": (*node_arguments, *device_arguments(options)),
        "log_level": _root_parameter(ctx, "log_level"),
        "serve_arguments": (
            *(() if replicas is None else ("--ranking-replicas", str(replicas))),
            *("--dtype", options["dtype"]),
            *limit_arguments(options["limits_file"], with_proxies(options)),
            *(() if options["admin_port"] is None else ("--admin-port", str(options["admin_port"]))),
            *protection_arguments(options),
        ),
    }
    _run(FleetConfig.model_validate(settings), protection.scheme)


def _what(store: Path | None, models: tuple[str, ...], version: int | None, snapshot: Path | None) -> dict[str, Any]:
    """`store`, `models` and `versions` of the fleet. Raises click.UsageError or SnapshotError."""
    if snapshot is not None:
        if store is not None or models or version is not None:
            raise click.UsageError("--snapshot names the folder itself: leave out --store, --model and --version.")
        from loader.reader import Snapshot

        # Only the manifest and the headers: each child checks the files that it loads.
        opened = Snapshot.open(snapshot.resolve(), verify=False)
        name = opened.spec.model
        return {"store": opened.path.parent.parent, "models": (name,), "versions": {name: opened.version}}
    if store is None:
        raise click.UsageError("Name a store: --store FOLDER [--model NAME ...], or --snapshot FOLDER.")
    from loader.store import Store

    Store(store).check_exists()
    models = models or tuple(Store(store).models())
    if version is None:
        return {"store": store, "models": models}
    if len(models) != 1:
        raise click.UsageError(f"--version is of one model, but there are several: {list(models)}")
    return {"store": store, "models": models, "versions": {models[0]: version}}


def _root_parameter(ctx: click.Context, name: str) -> object:
    return ctx.find_root().params.get(name, "info")


def _run(config: FleetConfig, scheme: str) -> None:
    from serving.fleet.local_fleet import running_fleet
    from serving.fleet.process import StopRequestedError, run_until_signalled

    def on_ready(name: str) -> None:
        click.echo(f"{name} is ready")

    async def program() -> None:
        async with running_fleet(config, on_ready, on_begin=_tell) as fleet:
            click.echo(f"logs: {fleet.supervisor.run_directory}")
            click.echo(f"registry: {fleet.registry.name}")
            click.echo(f"HTTP: {scheme}://{fleet.host}:{fleet.http_port}/docs")
            click.echo(f"gRPC: {fleet.host}:{fleet.grpc_port}")
            await asyncio.Event().wait()

    try:
        run_until_signalled(program)
    except StopRequestedError:
        click.echo("stopped")


def _tell(beginnings: Sequence[Beginning]) -> None:
    from serving.cli.placement import placement_line

    for one in beginnings:
        if len(beginnings) > 1:
            click.echo(f"{one.model} version {one.version}:")
        click.echo(placement_line(one.plan))
        if one.latest != one.version:
            click.echo(
                f"{one.model}: version {one.version} is live, the store's latest is {one.latest}; "
                "see shardrank publish and shardrank rollout start"
            )
