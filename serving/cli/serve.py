"""`shardrank serve`: HTTP and gRPC in front of shard nodes or of rows in this very process, alone or in a fleet."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from serving.cli import WithExamples
from serving.cli.options import (
    FILE,
    PORT,
    FiniteRange,
    assignments,
    cards_option,
    count,
    device_options,
    front_options,
    max_memory_option,
    member_options,
    memory_budget_option,
    node_tls_options,
    option,
    port_options,
    ranking_options,
    replicate_option,
    sharding_option,
    stage_share_option,
    switch,
    tls_options,
    tokens_option,
    verify_option,
)
from serving.cli.settings import (
    ANY_HOST,
    DEVICE_FLAGS,
    Options,
    Protection,
    arguments,
    belongs_to_fleet,
    config_of,
    default_name,
    device_arguments,
    flags,
    front_arguments,
    given_flags,
    member_folder,
    node_config,
    node_identity,
    num_replicas,
    open_card_set,
    plan_of,
    read_limits,
    run_until_stopped,
    to_bytes,
    warn_if_open,
)

if TYPE_CHECKING:
    from loader.registry.typed import FleetRegistry
    from loader.snapshot.manifest import ModelSpec
    from serving.rank.service import RankingService
    from serving.server import Listening, ServerConfig
    from serving.versions.loading import ModelSource
    from serving.versions.serving_node import LocalRows
    from shard_node.cuda.card_set import CardSet
    from shard_node.node import Partition
    from shard_node.wire.tls import TlsClientConfig

_ROWS = ("cards", "sharding", "replicate_bytes", "memory_budget_gb", "max_memory_gb")
_FLEET_ONLY = ("local", "node_id", "advertise", "max_staleness", "max_memory_gb", "stage_cpu_share")


@click.command(cls=WithExamples)
@member_options
@option(
    "--shard",
    "Without --registry: the replicas of a shard; the first --shard is shard 0, the second shard 1, and so on. Without "
    "any, the rows are loaded into this process.",
    metavar="ADDRESS[,ADDRESS...]",
    multiple=True,
    name="shards",
)
@switch("--local", "With --registry: load the rows into this process, swap them and apply row updates here.")
@option(
    "--node-id",
    "With --registry: the process' name, the same after a restart. Default: made of host and port.",
    metavar="NAME",
    envvar="SHARDRANK_NODE_ID",
)
@option(
    "--advertise",
    "With --registry: where this process is reached over HTTP, for people to read. Default: host and port.",
    metavar="URL",
    envvar="SHARDRANK_ADVERTISE",
)
@assignments(
    "--max-staleness",
    "MODEL=SECONDS",
    "With --registry: how old the rows of a model may be, compared with its row updates, before /readyz calls it "
    "degraded.",
)
@cards_option(1)
@sharding_option
@replicate_option
@memory_budget_option
@device_options
@max_memory_option("With --local: ")
@stage_share_option
@port_options
@tls_options("Let in only clients with a certificate of these CAs, over HTTP and gRPC. Also the default of --node-ca.")
@node_tls_options
@tokens_option
@front_options
@count("--workers", "Serving processes that share the ports; each holds all rows, if it holds any.", 1, 64, 1)
@ranking_options
@verify_option
@option(
    "--shutdown-delay-s",
    "After SIGTERM, how long requests are still taken while /readyz says that the process is not ready.",
    FiniteRange(0, 600),
    0.5,
    "S",
)
@option(
    "--profile",
    "Keep an account of the stages that requests go through, and write it to FILE every 5 s and at the end. With "
    "several --workers each has its own: FILE with -0, -1, ... before its ending.",
    FILE,
)
@option("--probe-port", "A private HTTP port of this one worker, on loopback.", PORT, hidden=True)
@click.pass_context
def serve(ctx: click.Context, /, **options: Any) -> None:
    """Serve models over HTTP and gRPC.

    With --registry the process belongs to a fleet: it finds the shard nodes there, serves the versions that the fleet's
    rollouts want live, and swaps them while it answers. It is ready once each model that was wanted at its start, or
    is named with --model, has a live version; loading further ones never changes that. How rows are divided is the
    fleet's to say, unless they are --local.

    Without, it serves one version. With --shard, rows are looked up on shard nodes, which must have been started with
    the same --sharding, --replicate-bytes and number of shards; without, everything is in this process and nothing is
    serialised. It is ready once the version is loaded and gives its golden scores.

    SIGTERM ends the requests in flight and exits 0. docs/tls-and-tokens.md is about keeping strangers out.

    Examples:
      shardrank serve --registry redis://10.0.0.9/0 --store models --host 0.0.0.0
      shardrank serve --registry models/.registry --store models --model films --local
      shardrank serve --store models --model films
      shardrank serve --store models --model films --shard 10.0.0.7:7000,10.0.0.8:7000 --shard 10.0.0.9:7000
      shardrank serve --snapshot models/films/3 --workers 4 --limit max_candidates=500 --host 0.0.0.0
      shardrank serve --snapshot models/films/3 --host 0.0.0.0 --tls-cert api.crt --tls-key api.key --tokens tokens.json
    """
    from serving.server import ServerConfig

    in_fleet = belongs_to_fleet(ctx, _FLEET_ONLY)
    if in_fleet and not options["local"] and (wrong := sorted(given_flags(ctx) & {*_ROWS, *DEVICE_FLAGS})):
        raise click.UsageError(f"{flags(wrong)}: with --registry only for --local rows; shard nodes have their own.")
    protection = Protection.of(options)
    config = config_of(ServerConfig, options, tls=protection.tls)
    folder = None if in_fleet else _static_folder(ctx)
    if options["probe_port"] is None:
        # Of several workers the supervisor says it, once.
        warn_if_open(options["host"], protection)
    if options["workers"] > 1:
        _run_workers(ctx, folder, protection.scheme)
    elif folder is None:
        _serve_in_fleet(options, config, protection)
    else:
        _serve_snapshot(options, folder, config, protection)


def _static_folder(ctx: click.Context) -> Path:
    """The snapshot's folder. Raises UsageError and SnapshotNotFoundError."""
    if ctx.params["shards"] and (wrong := sorted(given_flags(ctx) & {"memory_budget_gb", *DEVICE_FLAGS})):
        verb = "is" if len(wrong) == 1 else "are"
        raise click.UsageError(f"{flags(wrong)} {verb} for rows in this process; shard nodes have their own.")
    return member_folder(ctx.params)


def _serve_snapshot(options: Options, folder: Path, config: ServerConfig, protection: Protection) -> None:
    from serving.rank.service import RankingService
    from serving.versions.loading import load_when_possible

    limits = read_limits(options)
    source = _source(options, folder, protection.node_tls)
    # A snapshot's folder is <store>/<model>/<version>; loading refuses any other.
    service = RankingService(limits, expected_models=[folder.parent.name])
    _answer(options, service, config, load=partial(load_when_possible, source, service))


def _answer(options: Options, service: RankingService, config: ServerConfig, **steps: Callable[..., Any]) -> None:
    """Serves until SIGTERM or SIGINT; `steps` are those of `serve_until_signalled`."""
    from serving.fleet.local_fleet import held_ports
    from serving.observe.profile import profiled
    from serving.server import serve_until_signalled

    scheme = "http" if config.tls is None else "https"

    def say(listening: Listening) -> None:
        click.echo(f"HTTP: {scheme}://{listening.host}:{listening.http_port}/docs")
        click.echo(f"gRPC: {listening.host}:{listening.grpc_port}")
        if listening.admin_port is not None:
            click.echo(f"probes and metrics: {scheme}://{listening.host}:{listening.admin_port}/metrics")

    if options["probe_port"] is None:
        # A process that stands alone shares no port; a worker's are held by its supervisor.
        with held_ports(options["host"], options["http_port"], options["grpc_port"], workers=0):
            pass
    with profiled(options["profile"], service.metrics):
        serve_until_signalled(service, config, on_ready=say, probe_port=options["probe_port"], **steps)


def _source(options: Options, folder: Path, node_tls: TlsClientConfig | None) -> ModelSource:
    """Raises as `open_card_set`, and AddressError."""
    from serving.versions.loading import ModelSource
    from shard_node.wire.address import Address

    shards = tuple(tuple(map(Address.parse, replicas.split(","))) for replicas in options["shards"])
    budget_bytes = to_bytes(options["memory_budget_gb"])
    card_set = None if shards else open_card_set(options)
    may_wait = bool(shards) or budget_bytes is not None
    return config_of(
        ModelSource,
        options,
        snapshot=folder,
        shards=shards,
        node_tls=node_tls,
        num_replicas=num_replicas(options["ranking_replicas"], card_set, may_wait=may_wait),
        memory_budget_bytes=budget_bytes,
        card_set=card_set,
    )


def _serve_in_fleet(options: Options, config: ServerConfig, protection: Protection) -> None:
    """Serves until SIGTERM or SIGINT; then leaves the fleet, ends what is in flight, and returns.

    Raises:
        RegistryRecordError: the URL is none. A registry that does not answer is waited for.
        ShardNodeError: the devices can't be had.
        ListenError, FleetError: a port can't be bound.
    """
    from loader.progress import BACKGROUND_SWITCH_INTERVAL_S
    from loader.registry.opening import open_registry
    from loader.registry.typed import FleetRegistry
    from serving.rank.service import RankingService
    from serving.versions.serving_node import ServingConfig, ServingNode
    from shard_node.agent.agent import AgentConfig

    # A thread that loads holds the interpreter for this long at most while a request waits for it.
    sys.setswitchinterval(BACKGROUND_SWITCH_INTERVAL_S)
    models: tuple[str, ...] = options["models"]
    limits_s = staleness_limits(options["max_staleness"], models)
    service = RankingService(read_limits(options), expected_models=models or None, max_staleness_s=limits_s)
    fleet = FleetRegistry(open_registry(options["registry"]))
    node_id = options["node_id"] or default_node_id(config.http_port)
    card_set = open_card_set(options) if options["local"] else None
    replicas = num_replicas(options["ranking_replicas"], card_set)
    serving = config_of(ServingConfig, options, node_id=node_id, node_tls=protection.node_tls, num_replicas=replicas)
    local = _local_rows(options, fleet, node_id, card_set) if options["local"] else None
    node = ServingNode(fleet, service, serving, AgentConfig(models=models or None), local)

    def on_listening(listening: Listening) -> None:
        node.address = options["advertise"] or advertised(listening, protection.scheme)

    _answer(options, service, config, load=node.load, on_listening=on_listening, leave=node.leave)


def _local_rows(options: Options, fleet: FleetRegistry, node_id: str, card_set: CardSet | None) -> LocalRows:
    """Rows in this process: one shard that has them all, whatever a fleet of shard nodes would say."""
    from serving.versions.serving_node import LocalRows
    from shard_node.agent.node_agent import NodeActions
    from shard_node.node import ShardNode

    def partition(spec: ModelSpec) -> tuple[Partition, str]:
        plan = plan_of(options, 1, spec)
        return plan.partition(0), plan.digest

    node = ShardNode(node_identity(options, 0, 1))
    actions = NodeActions(node, fleet, partition, node_config(options, node_id), card_set=card_set)
    return LocalRows(node, actions, partial(plan_of, options, 1))


def staleness_limits(pairs: tuple[tuple[str, str], ...], models: tuple[str, ...]) -> dict[str, float]:
    """Return `--max-staleness` by model. Raises UsageError for what is no number above 0, and for another model."""
    limits: dict[str, float] = {}
    for model, text in pairs:
        try:
            limits[model] = float(text)
        except ValueError:
            limits[model] = 0.0
        if not 0 < limits[model] < float("inf"):
            raise click.UsageError(f"--max-staleness {model}={text}: seconds must be a number above 0.")
        if models and model not in models:
            raise click.UsageError(f"--max-staleness {model}={text}: {model} is not among the --model: {list(models)}.")
    return limits


def advertised(listening: Listening, scheme: str = "http") -> str:
    """Return where others reach it over HTTP: every interface stands for this host's name."""
    host = socket.gethostname() if listening.host in ANY_HOST else listening.host
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{listening.http_port}"


def default_node_id(http_port: int) -> str:
    """Return `serve-<host>-<HTTP port>`; a process that takes any port has its number there, another one next time."""
    return default_name(f"serve-{socket.gethostname()}-{http_port or f'pid{os.getpid()}'}")


def _run_workers(ctx: click.Context, folder: Path | None, scheme: str) -> None:
    """Runs `--workers` processes of this command until SIGTERM or SIGINT."""
    from loader.snapshot.reader import Snapshot
    from serving.fleet.local_fleet import REGISTRY_VARIABLE, held_ports, worker_specs
    from serving.fleet.supervisor import SupervisionConfig, supervised

    options, environment = ctx.params, {}
    if folder is None:
        environment[REGISTRY_VARIABLE] = options["registry"]
    else:
        # Only the manifest and the headers: each worker checks the files, at its start and at every restart.
        Snapshot.open(folder, verify=False)
    told = worker_arguments(options, folder)
    workers = [[*told, *_own_arguments(options, folder, worker)] for worker in range(options["workers"])]

    async def program() -> None:
        with held_ports(options["host"], options["http_port"], options["grpc_port"], len(workers)) as ports:
            async with supervised(SupervisionConfig()) as supervisor:
                log_level = ctx.find_root().params["log_level"]
                await supervisor.start(worker_specs(supervisor.run_directory, ports, workers, log_level, environment))
                click.echo(f"logs: {supervisor.run_directory}")
                click.echo(f"HTTP: {scheme}://{ports.host}:{ports.http}/docs")
                click.echo(f"gRPC: {ports.host}:{ports.grpc}")
                await asyncio.Event().wait()

    run_until_stopped(program)


def worker_arguments(options: Options, folder: Path | None) -> list[str]:
    """Return the flags that every worker is given, but ports and the registry, which may have a password.

    Args:
        options: of the command.
        folder: of the snapshot; None in a fleet.
    """
    told = ["--verify" if options["verify"] else "--no-verify", *front_arguments(options)]
    told += arguments(options, ["ranking_replicas", "dtype", "shutdown_delay_s"])
    if folder is not None:
        told += ["--snapshot", str(folder), *arguments(options, ["shards", *_ROWS[:-1]])]
        return told if options["shards"] else told + device_arguments(options)
    told += ["--store", str(options["store"].resolve())]
    told += arguments(options, ["models", "max_staleness", "advertise", "stage_cpu_share"])
    return [*told, "--local", *arguments(options, _ROWS), *device_arguments(options)] if options["local"] else told


def _own_arguments(options: Options, folder: Path | None, worker: int) -> list[str]:
    """The flags of one worker alone: its node id in a fleet, and a profile, for counts can't share a file."""
    node_id, profile = options["node_id"] or default_node_id(options["http_port"]), options["profile"]
    told = ["--node-id", f"{node_id}-{worker}"] if folder is None else []
    if profile is not None:
        told += ["--profile", str(profile.absolute().with_stem(f"{profile.stem}-{worker}"))]
    return told
