"""`shardrank serve`: HTTP and gRPC in front of shard nodes, or of rows in this very process."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    from serving.fleet.workers import WorkersConfig
    from serving.limits import RequestLimits
    from serving.loading import ModelSource
    from serving.server import ServerConfig

logger = logging.getLogger(__name__)


@click.command(cls=WithExamples)
@snapshot_options
@click.option(
    "--shard",
    "shards",
    multiple=True,
    metavar="ADDRESS[,ADDRESS...]",
    help="The replicas of a shard; the first --shard is shard 0, the second shard 1, and so on. Without any, "
    "the rows are loaded into this process.",
)
@cards_option(1)
@sharding_option
@replicate_option
@memory_budget_option
@port_options(8080, 8081)
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    metavar="N",
    help="Serving processes that share the ports. Without --shard each holds all rows.",
)
@ranking_options
@verify_option
@click.option(
    "--shutdown-delay-s",
    type=click.FloatRange(0, 600),
    default=0.5,
    show_default=True,
    metavar="S",
    help="After SIGTERM, how long requests are still taken while /readyz says that the process is not ready.",
)
@click.option(
    "--probe-port",
    type=click.IntRange(0, 65535),
    hidden=True,
    help="A private HTTP port of this one worker, on loopback.",
)
@click.pass_context
def serve(
    ctx: click.Context,
    store: Path | None,
    model: str | None,
    version: int | None,
    snapshot: Path | None,
    shards: tuple[str, ...],
    cards: int,
    sharding: Sharding,
    replicate_bytes: int,
    memory_budget_gb: float | None,
    host: str,
    http_port: int,
    grpc_port: int,
    workers: int,
    ranking_replicas: int,
    dtype: str,
    limit: tuple[tuple[str, str], ...],
    limits_file: Path | None,
    verify: bool,
    shutdown_delay_s: float,
    probe_port: int | None,
) -> None:
    """Serve one version of a model over HTTP and gRPC.

    Without --shard, everything is in this process and nothing is serialised. With --shard, rows are looked up on
    shard nodes, which must have been started with the same --sharding, --replicate-bytes and number of shards. It is
    ready once the version is loaded and gives its golden scores. SIGTERM ends the requests in flight and exits 0.

    Examples:
      shardrank serve --store models --model films
      shardrank serve --store models --model films --shard 10.0.0.7:7000,10.0.0.8:7000 --shard 10.0.0.9:7000
      shardrank serve --snapshot models/films/3 --workers 4 --limit max_candidates=500 --host 0.0.0.0
    """
    from loader.reader import Snapshot
    from serving.cli.limits import limit_arguments, read_limits

    folder = SnapshotChoice(store, model, version, snapshot).folder().resolve()
    if shards and memory_budget_gb is not None:
        raise click.UsageError("--memory-budget-gb is for rows in this process; shard nodes have their own.")
    limits = read_limits(limits_file, limit)
    if workers > 1:
        # Only the manifest and the headers: each worker checks the files, at its start and at every restart.
        Snapshot.open(folder, verify=False)
        arguments = _worker_arguments(ctx.params, folder) + limit_arguments(limits_file, limit)
        _run_workers(_workers_config(ctx, arguments), http_port, grpc_port)
        return
    settings = {
        "snapshot": folder, "shards": _addresses(shards), "cards": cards, "sharding": sharding,
        "replicate_bytes": replicate_bytes, "verify": verify, "num_replicas": ranking_replicas, "dtype": dtype,
        "memory_budget_bytes": None if memory_budget_gb is None else int(memory_budget_gb * 1e9),
    }  # fmt: skip
    from serving.loading import ModelSource
    from serving.server import ServerConfig

    server = ServerConfig(host=host, http_port=http_port, grpc_port=grpc_port, shutdown_delay_s=shutdown_delay_s)
    _run(ModelSource.model_validate(settings), limits, server, probe_port)


def _addresses(shards: tuple[str, ...]) -> tuple[tuple[Any, ...], ...]:
    """Raises AddressError, naming the address."""
    from shard_node.address import Address

    return tuple(tuple(Address.parse(text) for text in replicas.split(",")) for replicas in shards)


def _run(source: ModelSource, limits: RequestLimits, config: ServerConfig, probe_port: int | None) -> None:
    from serving.fleet.ports import SharedPort
    from serving.loading import load_when_possible
    from serving.server import Listening, serve_until_signalled
    from serving.service import RankingService

    # A snapshot's folder is <store>/<model>/<version>; loading refuses any other.
    service = RankingService(limits, expected_models=[source.snapshot.parent.name])

    def say(listening: Listening) -> None:
        click.echo(f"HTTP: http://{listening.host}:{listening.http_port}/docs")
        click.echo(f"gRPC: {listening.host}:{listening.grpc_port}")

    if probe_port is None:
        # A worker's ports are held by its supervisor; one that stands alone must not share those of another server.
        for port in (config.http_port, config.grpc_port):
            SharedPort(config.host, port).close()
    serve_until_signalled(service, config, lambda: load_when_possible(source, service), say, probe_port)


def _worker_arguments(parameters: dict[str, Any], folder: Path) -> list[str]:
    """The flags of one worker, but ports and limits."""
    arguments = ["--snapshot", str(folder), "--verify" if parameters["verify"] else "--no-verify"]
    for shard in parameters["shards"]:
        arguments += ["--shard", shard]
    names = ("cards", "sharding", "replicate_bytes", "memory_budget_gb", "ranking_replicas", "dtype")
    for name in (*names, "shutdown_delay_s"):
        if parameters[name] is not None:
            arguments += [f"--{name.replace('_', '-')}", str(parameters[name])]
    return arguments


def _workers_config(ctx: click.Context, arguments: list[str]) -> WorkersConfig:
    from serving.fleet.workers import WorkersConfig

    own = {"workers": ctx.params["workers"], "host": ctx.params["host"]}
    log_level = ctx.find_root().params["log_level"]
    return WorkersConfig.model_validate({**own, "arguments": tuple(arguments), "log_level": log_level})


def _run_workers(config: WorkersConfig, http_port: int, grpc_port: int) -> None:
    from serving.fleet.local_fleet import supervised
    from serving.fleet.signals import StopRequestedError, run_until_signalled
    from serving.fleet.supervisor import SupervisionConfig
    from serving.fleet.workers import held_ports, start_workers

    async def program() -> None:
        with held_ports(config.host, http_port, grpc_port, config.workers) as ports:
            async with supervised(SupervisionConfig()) as supervisor:
                await start_workers(config, ports, supervisor)
                click.echo(f"logs: {supervisor.run_directory}")
                click.echo(f"HTTP: http://{config.host}:{ports.http}/docs")
                click.echo(f"gRPC: {config.host}:{ports.grpc}")
                await asyncio.Event().wait()

    try:
        run_until_signalled(program)
    except StopRequestedError as stop:
        logger.info("stopped by %s", stop)
