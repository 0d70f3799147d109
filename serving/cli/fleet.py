"""`shardrank demo`, `up`, `coordinator`, `dashboard`, `token`: a fleet on this machine, and what is run around one."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from serving.cli import LOGGED, GroupWithExamples, WithExamples, settings
from serving.cli import options as opts
from serving.cli.configured import configured
from serving.cli.settings import Protection, config_of, opened_registry
from serving.config import DivisionSettings, FrontSettings, RowSettings, ServeConfig, ShardNodeConfig, TlsSettings
from serving.fleet.config import CoordinatorSettings, FleetConfig
from serving.fleet.process import run_until_signalled
from serving.observe.logs import announce

if TYPE_CHECKING:
    from serving.fleet.local_fleet import Beginning

_SCOPES = (
    "rank: rank, lookup, infer, and describe. describe: models' descriptions, metadata and statistics. admin: "
    "everything, metrics too."
)


@click.command(cls=WithExamples)
@opts.films_options
@opts.option("--store", "Keep the snapshot in this store; without it, it is removed at the end.", opts.FOLDER)
@opts.count("--shards", "Shard nodes; each is a process.", 1, 64, 2)
@opts.setting_option(DivisionSettings, "cards", default=2)
@opts.setting_option(RowSettings, "device", default="cpu")
@opts.settings_options(DivisionSettings, "sharding", "plan_file")
@opts.settings_options(FrontSettings, "hot_rows_gb", "hot_rows", "host", "http_port", "grpc_port")
@opts.switch("--online", "Train while it serves, in order of time, and show what fresh rows are worth.")
@opts.option("--ratings-per-s X", "With --online: how many ratings come.", opts.ABOVE_ZERO, 1000.0)
@opts.switch("--once", "Stop after the report.")
@opts.option("--json", "Also write the report as JSON.", opts.WRITABLE_FILE, name="json_file")
@click.pass_context
def demo(ctx: click.Context, /, online: bool, once: bool, json_file: Path | None, **options: Any) -> None:
    """Go the whole path from one command: train, export, serve, rank.

    Trains a small ranking model on film ratings (MovieLens 100K with --movielens, else generated ones with planted
    tastes), exports it as an int8 snapshot, starts shard nodes and a serving process, ranks every held-out rating over
    HTTP and gRPC, and reports quality, latency and sizes from the answers. Then it keeps serving until Ctrl-C. Exits
    with 1 if any request failed.

    With --online, a fifth of the ratings is learned first, and what that comes to is served twice: by one model that
    workers go on with, and by one that stays. All other ratings are scored by both before they are learned; the status
    page shows both AUCs.

    Examples:
      shardrank demo
      shardrank demo --movielens ml-100k --shards 3 --sharding table
      shardrank demo --once --json report.json
      shardrank demo --once --ratings 3000 --epochs 1       (quick and poor)
      shardrank demo --online --ratings ml-latest-small/ratings.csv
    """
    if not online and isinstance(options["ratings"], Path):
        raise click.UsageError("--ratings: a file only with --online")
    if online:
        from serving.online_demo import run_online_demo as run
    else:
        from serving.demo import run_demo as run

    logged = {name: ctx.meta[name] for name in LOGGED if name in ctx.meta}
    fleet = config_of(FleetConfig, options, store=None, **logged)
    ctx.exit(run(options, fleet, once=once, json_file=json_file))


@configured("up", FleetConfig)
def up(config: FleetConfig) -> None:
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
    settings.warn_if_open(config.host, Protection.of(config))
    config = config_of(FleetConfig, config, "", (), **_versions(config))
    run_until_signalled(partial(_run, config))
    announce("stopped")


def _versions(config: FleetConfig) -> dict[str, Any]:
    """Return `store`, `models` and `versions` of the fleet. Raises click.UsageError or SnapshotError."""
    from loader.snapshot.reader import Snapshot
    from loader.stores import open_store

    store, models, version = config.store_place, config.models, config.version
    if config.snapshot is not None:
        folder = settings.snapshot_folder(store, next(iter(models), None), version, config.snapshot)
        # Only the manifest and the headers: each child checks the files that it loads.
        snapshot = Snapshot.open(folder.resolve(), verify=False)
        name = snapshot.spec.model
        return {"store": snapshot.path.parent.parent, "models": (name,), "versions": {name: snapshot.version}}
    if store is None:
        raise click.UsageError("Name a store: --store FOLDER|URL [--model NAME ...], or --snapshot FOLDER.")
    opened = open_store(store)
    opened.check_exists()
    if version is None:
        return {}
    models = models or tuple(opened.models())
    if len(models) != 1:
        raise click.UsageError(f"--version is of one model, but there are several: {list(models)}")
    return {"versions": {models[0]: version}}


async def _run(config: FleetConfig) -> None:
    from serving.fleet.local_fleet import running_fleet

    async with running_fleet(config, lambda name: announce(f"{name} is ready"), on_begin=_tell) as fleet:
        announce(f"logs: {fleet.supervisor.log_directory}")
        announce(f"registry: {fleet.registry.name}")
        fleet.ports.announce(config.scheme)
        await asyncio.Event().wait()


def _tell(beginnings: Sequence[Beginning]) -> None:
    for one in beginnings:
        announce(f"{one.model} version {one.version}: {one.plan.num_shards} shards, plan {one.plan.digest[:12]}")
        if one.latest != one.version:
            announce(
                f"{one.model}: version {one.version} is live, the store's latest is {one.latest}; "
                "see shardrank publish and shardrank rollout start"
            )


@configured("coordinator", CoordinatorSettings)
def coordinator(config: CoordinatorSettings) -> None:
    """Carry out the rollouts of a fleet.

    Runs until SIGTERM or Ctrl-C. Of several, one works and the others stand by; if it dies, the next goes on at the
    step that is on record. It is in nobody's way: without one, requests are answered and rollouts wait.

    Examples:
      shardrank coordinator --store models
      shardrank coordinator --registry redis://10.0.0.9:6379/0 --step-timeout 5m
    """
    from loader.rollout.coordinator import Coordinator

    settings.check_store(config.store_place)
    name = config.owner or f"{socket.gethostname()}:{os.getpid()}"

    async def program() -> None:
        async with opened_registry(settings.registry_url(config.registry, config.store_place)) as fleet:
            announce(f"coordinator {name} works with registry {fleet.name}")
            await Coordinator(fleet, name, time.time, asyncio.sleep, config).run()

    run_until_signalled(program)


@click.command(cls=WithExamples)
@opts.fleet_options
@opts.option("--port", "0 takes a free one.", opts.PORT, 8090)
@opts.settings_options(FrontSettings, "host", *TlsSettings.names(), "tokens")
def dashboard(url: str, **options: Any) -> None:
    """Show a fleet on a page: versions, rollouts, nodes, latencies, and what changed last.

    Runs until SIGTERM or Ctrl-C, and changes nothing but for its one button: rolling a model back, as `shardrank
    rollback` does. That takes a token of scope admin; without --tokens everybody may look and nobody may roll back.
    With --admin-port, serving processes have the same page.

    Examples:
      shardrank dashboard --store models
      shardrank dashboard --registry redis://10.0.0.9:6379/0 --port 8090 --tokens tokens.json
    """
    from loader.registry import open_registry
    from serving.api.http import running_admin
    from serving.api.tokens import Tokens
    from serving.dashboard.board import Board
    from serving.rank.service import RankingService
    from shard_node.wire.tls import server_context

    settings.check_registry(url)
    config = config_of(FrontSettings, options)
    protection = Protection.of(config)
    settings.warn_if_open(config.host, protection)
    ssl = None if protection.tls is None else server_context(protection.tls, alpn=("http/1.1",))
    tokens = None if protection.tokens is None else Tokens(protection.tokens)
    page = partial(Board, partial(open_registry, url))

    async def program() -> None:
        # A service that serves nothing: it has the limits and metrics of the port.
        admin = running_admin(RankingService(), config.host, options["port"], tokens=tokens, ssl=ssl, page=page)
        async with admin as port:
            announce(f"dashboard: {config.scheme}://{config.host}:{port}/")
            await asyncio.Event().wait()

    run_until_signalled(program)


@click.group(cls=GroupWithExamples)
def token() -> None:
    """Make tokens that clients of `shardrank serve --tokens FILE` show.

    Examples:
      shardrank token new --name shop --scope rank --tokens tokens.json
    """


@token.command()
@opts.option("--name NAME", "Whose it is: letters, digits, and _ . -", required=True)
@opts.option("--scope", _SCOPES, click.Choice(["rank", "describe", "admin"]), required=True)
@opts.option("--tokens", "The file that it is added to, made with mode 0600. Without, its entry is printed.", opts.FILE)
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


@configured("serve", ServeConfig)
def serve(config: ServeConfig) -> None:
    """Serve models over HTTP and gRPC.

    With --registry the process belongs to a fleet: it finds the shard nodes there, serves the versions that the fleet's
    rollouts want live, and swaps them while it answers. It is ready once each model that was wanted at its start, or
    is named with --model, has a live version; loading further ones never changes that. How rows are divided is the
    fleet's to say, unless they are --local.

    Without, it serves one version. With --shard, rows are looked up on shard nodes, which must have been started with
    the same --sharding, --replicate-bytes and number of shards; without, everything is in this process and nothing is
    serialised. It is ready once the version is loaded and gives its golden scores.

    Settings that are seldom changed have no flag: docs/configuration.md names those of the file of --config.

    SIGTERM ends the requests in flight and exits 0. docs/tls-and-tokens.md is about keeping strangers out.

    Examples:
      shardrank serve --registry redis://10.0.0.9/0 --store models --host 0.0.0.0
      shardrank serve --registry models/.registry --store models --model films --local
      shardrank serve --store models --model films
      shardrank serve --store s3://bucket/models --model films --store-cache /var/cache/shardrank
      shardrank serve --store models --model films --shard 10.0.0.7:7000,10.0.0.8:7000 --shard 10.0.0.9:7000
      shardrank serve --snapshot models/films/3 --workers 4 --limit max_candidates=500 --host 0.0.0.0
      shardrank serve --snapshot models/films/3 --host 0.0.0.0 --tls-cert api.crt --tls-key api.key --tokens tokens.json
    """
    protection = Protection.of(config)
    if config.probe_port is None:
        # Of several workers the supervisor says it, once.
        settings.warn_if_open(config.host, protection)
    if config.workers > 1:
        from serving.fleet.workers import run_workers

        run_workers(config)
        return
    # Only now: a supervisor of workers has no use for a server's modules, which take 1.7 s and 214 MB.
    from serving.server import run_serving

    run_serving(config, protection)


@configured("shard-node", ShardNodeConfig)
def shard_node(config: ShardNodeConfig) -> None:
    """Serve one shard of rows to routers.

    With --registry the node belongs to a fleet: it holds the versions that the fleet's rollouts want of it, swaps them
    while it serves, applies row updates, and is found by serving processes. Without, it serves one snapshot, and
    `shardrank serve` must be told its address.

    All nodes and `shardrank serve` must be given the same --sharding, --replicate-bytes and number of shards; a
    node that does not fit is refused, not asked. TCP addresses speak TLS with certificates on both sides if
    --tls-cert, --tls-key and --tls-client-ca are given; without, listen on a private network or a Unix socket. SIGTERM
    ends the requests in flight and exits 0.

    Examples:
      shardrank shard-node --registry redis://10.0.0.9/0 --store models --shard 0/2 --listen 0.0.0.0:7000
      shardrank shard-node --store models --model films --shard 0/2 --listen unix:/run/shardrank/0.sock
      shardrank shard-node --store models --model films --shard 1/2 --listen 10.0.0.7:7000 --cards 4
      shardrank shard-node --store m --shard 0/1 --listen 10.0.0.7:7000 --tls-cert crt --tls-key key --tls-client-ca ca
      shardrank shard-node --snapshot models/films/3 --shard 0/1 --listen 127.0.0.1:7000 --config node.toml
    """
    from shard_node.wire.address import Address

    tls = Protection.of(config).tls
    if config.admin_listen is not None and Address.parse(config.admin_listen).is_unix:
        raise click.UsageError(f"--admin-listen {config.admin_listen}: HOST:PORT is needed.")
    from serving.shard_server import run_shard_node

    run_shard_node(config, tls)
