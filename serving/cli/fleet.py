"""`shardrank up`, `coordinator` and `token`: what an operator runs around serving processes and shard nodes."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from serving.cli.group import GroupWithExamples, WithExamples
from serving.cli.options import (
    FILE,
    Duration,
    cards_option,
    count_option,
    device_options,
    fleet_options,
    folder_option,
    front_options,
    max_memory_option,
    memory_budget_option,
    opened_registry,
    port_options,
    ranking_options,
    registry_option,
    registry_url,
    replicate_option,
    sharding_option,
    store_option,
    tls_options,
    tokens_option,
    validated,
    verify_option,
)
from serving.cli.settings import (
    Protection,
    arguments,
    device_arguments,
    front_arguments,
    num_replicas,
    run_until_stopped,
    warn_if_open,
)

if TYPE_CHECKING:
    from router.plan import Plan
    from serving.fleet.local_fleet import Beginning, FleetConfig

_QUOTED_TABLES = 8


@click.command(cls=WithExamples)
@store_option
@click.option(
    "--model", "models", multiple=True, metavar="NAME", help="What to serve. Repeatable; default: all of the store."
)
@count_option(
    "--version",
    "What the one model begins with. Default: the version that was live last; the first time, the store's latest.",
)
@folder_option("--snapshot", "A snapshot's own folder, in place of --store, --model and --version.")
@registry_option
@count_option("--shards", "Shards.", 1, 64, default=2)
@count_option("--replicas", "Nodes of each shard.", 1, 16, default=1)
@cards_option(1)
@count_option("--workers", "Serving processes on one HTTP and one gRPC port.", 1, 64, default=1)
@sharding_option
@replicate_option
@memory_budget_option
@device_options
@max_memory_option("", ", on each shard node")
@port_options
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
    from serving.fleet.local_fleet import FleetConfig

    protection = Protection.of(options)
    warn_if_open(options["host"], protection)
    # Refuses what needs rows in the serving process itself.
    num_replicas(options["ranking_replicas"], None)
    same = (
        *("registry", "shards", "replicas", "cards", "workers", "sharding", "replicate_bytes", "memory_budget_gb"),
        *("verify", "host", "http_port", "grpc_port"),
    )
    config = FleetConfig.model_validate(
        _what(options["store"], options["models"], options["version"], options["snapshot"])
        | {name: options[name] for name in same}
        | {
            "shard_node_arguments": (*arguments(options, ["max_memory_gb"]), *device_arguments(options)),
            "serve_arguments": (*arguments(options, ["ranking_replicas", "dtype"]), *front_arguments(options)),
            "log_level": ctx.find_root().params.get("log_level", "info"),
        }
    )
    _run(config, protection.scheme)


def _what(store: Path | None, models: tuple[str, ...], version: int | None, snapshot: Path | None) -> dict[str, Any]:
    """`store`, `models` and `versions` of the fleet. Raises click.UsageError or SnapshotError."""
    if snapshot is not None:
        if store is not None or models or version is not None:
            raise click.UsageError("--snapshot names the folder itself: leave out --store, --model and --version.")
        from loader.snapshot.reader import Snapshot

        # Only the manifest and the headers: each child checks the files that it loads.
        opened = Snapshot.open(snapshot.resolve(), verify=False)
        name = opened.spec.model
        return {"store": opened.path.parent.parent, "models": (name,), "versions": {name: opened.version}}
    if store is None:
        raise click.UsageError("Name a store: --store FOLDER [--model NAME ...], or --snapshot FOLDER.")
    from loader.snapshot.store import Store

    Store(store).check_exists()
    models = models or tuple(Store(store).models())
    if version is None:
        return {"store": store, "models": models}
    if len(models) != 1:
        raise click.UsageError(f"--version is of one model, but there are several: {list(models)}")
    return {"store": store, "models": models, "versions": {models[0]: version}}


def _run(config: FleetConfig, scheme: str) -> None:
    from serving.fleet.local_fleet import running_fleet
    from serving.fleet.process import StopRequestedError, run_until_signalled

    async def program() -> None:
        async with running_fleet(config, lambda name: click.echo(f"{name} is ready"), on_begin=_tell) as fleet:
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
    for one in beginnings:
        if len(beginnings) > 1:
            click.echo(f"{one.model} version {one.version}:")
        click.echo(placement_line(one.plan))
        if one.latest != one.version:
            click.echo(
                f"{one.model}: version {one.version} is live, the store's latest is {one.latest}; "
                "see shardrank publish and shardrank rollout start"
            )


def placement_line(plan: Plan) -> str:
    """Say which tables every shard holds: `on every shard: genre, city; split over 2 shards: user, film`."""
    from router.plan import REPLICATED

    if plan.num_shards == 1:
        return f"one shard holds every table: {_quoted([table.name for table in plan.layout.tables])}"
    whole: list[str] = []
    rest: list[str] = []
    for table, owners in zip(plan.layout.tables, plan.shard_of_bucket, strict=True):
        (whole if owners[0] == REPLICATED else rest).append(table.name)
    how = "whole on one shard each" if plan.sharding == "table" else f"split over {plan.num_shards} shards"
    return f"on every shard: {_quoted(whole)}; {how}: {_quoted(rest)}"


def _quoted(names: list[str]) -> str:
    shown = ", ".join(names[:_QUOTED_TABLES]) or "none"
    return f"{shown} and {len(names) - _QUOTED_TABLES} more" if len(names) > _QUOTED_TABLES else shown


@click.command(cls=WithExamples)
@fleet_options
@click.option(
    "--stage-timeout",
    "stage_timeout_s",
    type=Duration(),
    metavar="TIME",
    help="How long nodes may take to stage a version before the rollout is rolled back. Default: 1h.",
)
@click.option(
    "--step-timeout",
    "step_timeout_s",
    type=Duration(),
    metavar="TIME",
    help="How long every other step may take. Default: 2m.",
)
@click.option("--owner", hidden=True, help="In whose name the lock is held; its own by default.")
@click.option("--step-delay", "step_delay_s", type=Duration(), hidden=True, help="Pause before each step, for drills.")
def coordinator(registry: str | None, store: Path | None, owner: str | None, **times: float | None) -> None:
    """Carry out the rollouts of a fleet.

    Runs until SIGTERM or Ctrl-C. Of several, one works and the others stand by; if it dies, the next goes on at the
    step that is on record. It is in nobody's way: without one, requests are answered and rollouts wait.

    Examples:
      shardrank coordinator --store models
      shardrank coordinator --registry redis://10.0.0.9:6379/0 --step-timeout 5m
    """
    from loader.rollout.coordinator import Coordinator, CoordinatorConfig

    config = validated(CoordinatorConfig, {name: value for name, value in times.items() if value is not None})
    url, name = registry_url(registry, store), owner or f"{socket.gethostname()}:{os.getpid()}"

    async def program() -> None:
        async with opened_registry(url) as fleet:
            click.echo(f"coordinator {name} works with registry {fleet.name}")
            await Coordinator(fleet, name, time.time, asyncio.sleep, config).run()

    run_until_stopped(program)


@click.group(cls=GroupWithExamples)
def token() -> None:
    """Make tokens that clients of `shardrank serve --tokens FILE` show.

    Examples:
      shardrank token new --name shop --scope rank --tokens tokens.json
    """


@token.command()
@click.option("--name", required=True, metavar="NAME", help="Whose it is: letters, digits, and _ . -")
@click.option(
    "--scope",
    type=click.Choice(["rank", "describe", "admin"]),
    required=True,
    help="rank: rank, lookup, infer, and describe. describe: models' descriptions, metadata and statistics. "
    "admin: everything, metrics too.",
)
@click.option(
    "--tokens",
    type=FILE,
    metavar="FILE",
    help="The file that it is added to, made with mode 0600 if it is not there. Without, its entry is printed.",
)
def new(name: str, scope: Literal["rank", "describe", "admin"], tokens: Path | None) -> None:
    """Make a random token of 256 bits and print it, this once: the file has only its SHA-256.

    Servers that use the file take the token a second later. To take one away, remove its entry.

    Examples:
      shardrank token new --name shop --scope rank --tokens tokens.json
      shardrank token new --name prometheus --scope admin
    """
    from pydantic import ValidationError

    from serving.api.tokens import add_token, new_token

    try:
        made, entry = new_token(name, scope)
    except ValidationError:
        raise click.UsageError(f"--name {name!r}: allowed are 1 to 64 letters, digits, and _ . -") from None
    if tokens is not None:
        add_token(tokens, entry)
    click.echo(made)
    if tokens is None:
        click.echo(entry.model_dump_json())
