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

from serving.cli.group import WithExamples
from serving.cli.options import (
    Assignment,
    FiniteRange,
    cards_option,
    count_option,
    device_options,
    front_options,
    max_memory_option,
    member_options,
    memory_budget_option,
    node_tls_options,
    port_options,
    ranking_options,
    replicate_option,
    sharding_option,
    stage_share_option,
    tls_options,
    tokens_option,
    verify_option,
)
from serving.cli.settings import (
    DEVICE_FLAGS,
    Protection,
    arguments,
    belongs_to_fleet,
    default_name,
    device_arguments,
    flags,
    front_arguments,
    given_flags,
    member_folder,
    node_settings,
    num_replicas,
    open_card_set,
    read_limits,
    run_until_stopped,
    to_bytes,
    warn_if_open,
    with_proxies,
)

if TYPE_CHECKING:
    from loader.registry.fleet import FleetRegistry
    from loader.snapshot.manifest import ModelSpec
    from router.plan import Plan
    from serving.limits import RequestLimits
    from serving.server import Listening, ServerConfig
    from serving.versions.loading import ModelSource
    from serving.versions.serving_node import LocalRows
    from shard_node.cuda.card_set import CardSet
    from shard_node.node import Partition
    from shard_node.wire.tls import TlsClientConfig

REGISTRY_VARIABLE = "SHARDRANK_REGISTRY"
"""How workers are told the registry: everybody on the machine can read a process' flags, and it may have a password."""

_ROWS = ("cards", "sharding", "replicate_bytes", "memory_budget_gb", "max_memory_gb")
_FLEET_ONLY = ("local", "node_id", "advertise", "max_staleness", "max_memory_gb", "stage_cpu_share")
_ANY_HOST = frozenset({"0.0.0.0", "::", ""})


@click.command(cls=WithExamples)
@member_options
@click.option(
    "--shard",
    "shards",
    multiple=True,
    metavar="ADDRESS[,ADDRESS...]",
    help="Without --registry: the replicas of a shard; the first --shard is shard 0, the second shard 1, and so on. "
    "Without any, the rows are loaded into this process.",
)
@click.option(
    "--local",
    is_flag=True,
    help="With --registry: load the rows into this process, swap them and apply row updates here.",
)
@click.option(
    "--node-id",
    metavar="NAME",
    envvar="SHARDRANK_NODE_ID",
    help="With --registry: the process' name, the same after a restart. Default: made of host and port.",
)
@click.option(
    "--advertise",
    metavar="URL",
    envvar="SHARDRANK_ADVERTISE",
    help="With --registry: where this process is reached over HTTP, for people to read. Default: host and port.",
)
@click.option(
    "--max-staleness",
    type=Assignment("MODEL=SECONDS"),
    multiple=True,
    metavar="MODEL=SECONDS",
    help="With --registry: how old the rows of a model may be, compared with its row updates, before /readyz calls it "
    "degraded. Repeatable.",
)
@cards_option(1)
@sharding_option
@replicate_option
@memory_budget_option
@device_options
@max_memory_option("With --local: ")
@stage_share_option
@port_options
@tls_options(
    "Let in only clients with a certificate of these CAs, over HTTP and gRPC. They also are the default of --node-ca."
)
@node_tls_options
@tokens_option
@front_options
@count_option(
    "--workers",
    "Serving processes that share the ports. Those that hold rows hold all of them each.",
    1,
    64,
    default=1,
)
@ranking_options
@verify_option
@click.option(
    "--shutdown-delay-s",
    type=FiniteRange(0, 600),
    default=0.5,
    show_default=True,
    metavar="S",
    help="After SIGTERM, how long requests are still taken while /readyz says that the process is not ready.",
)
@click.option(
    "--profile",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Keep an account of the stages that requests go through, and write it to FILE every 5 s and at the end. With "
    "several --workers each has its own: FILE with -0, -1, ... before its ending.",
)
@click.option(
    "--probe-port",
    type=click.IntRange(0, 65535),
    hidden=True,
    help="A private HTTP port of this one worker, on loopback.",
)
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
    in_fleet = belongs_to_fleet(ctx, _FLEET_ONLY)
    if in_fleet and not options["local"] and (wrong := sorted(given_flags(ctx) & {*_ROWS, *DEVICE_FLAGS})):
        raise click.UsageError(f"{flags(wrong)}: with --registry only for --local rows; shard nodes have their own.")
    limits = read_limits(options["limits_file"], with_proxies(options))
    protection = Protection.of(options)
    config = _server_config(options, protection)
    folder = None if in_fleet else _static_folder(ctx)
    if options["probe_port"] is None:
        # Of several workers the supervisor says it, once.
        warn_if_open(options["host"], protection)
    if options["workers"] > 1:
        if folder is not None:
            from loader.snapshot.reader import Snapshot

            # Only the manifest and the headers: each worker checks the files, at its start and at every restart.
            Snapshot.open(folder, verify=False)
        same = [*worker_arguments(options, folder), *front_arguments(options)]
        own = _own_arguments(options, named=folder is None)
        environment = {REGISTRY_VARIABLE: options["registry"]} if folder is None else {}
        _run_workers(ctx, [[*same, *one] for one in own], protection.scheme, environment)
        return
    say = partial(_say, protection.scheme)
    if folder is None:
        _run_registered(options, limits, config, protection.node_tls, say)
    else:
        _run(_source(options, folder, protection.node_tls), options, limits, config, say)


def _static_folder(ctx: click.Context) -> Path:
    """The snapshot's folder. Raises UsageError and SnapshotNotFoundError."""
    if ctx.params["shards"]:
        given = given_flags(ctx)
        wrong = [name for name in ("memory_budget_gb", *DEVICE_FLAGS) if name in given]
        if wrong:
            verb = "is" if len(wrong) == 1 else "are"
            raise click.UsageError(f"{flags(wrong)} {verb} for rows in this process; shard nodes have their own.")
    return member_folder(ctx.params)


def _server_config(options: dict[str, Any], protection: Protection) -> ServerConfig:
    from serving.server import ServerConfig

    names = ("host", "http_port", "grpc_port", "admin_port", "shutdown_delay_s")
    protected = {"tls": protection.tls, "tokens": protection.tokens}
    return ServerConfig.model_validate({name: options[name] for name in names} | protected)


def _say(scheme: str, listening: Listening) -> None:
    click.echo(f"HTTP: {scheme}://{listening.host}:{listening.http_port}/docs")
    click.echo(f"gRPC: {listening.host}:{listening.grpc_port}")
    if listening.admin_port is not None:
        click.echo(f"probes and metrics: {scheme}://{listening.host}:{listening.admin_port}/metrics")


def _check_ports(options: dict[str, Any]) -> None:
    """Makes sure that a process which stands alone shares no port; a worker's are held by its supervisor."""
    from serving.fleet.local_fleet import held_ports

    if options["probe_port"] is None:
        with held_ports(options["host"], options["http_port"], options["grpc_port"], workers=0):
            pass


def _source(options: dict[str, Any], folder: Path, node_tls: TlsClientConfig | None) -> ModelSource:
    """Raises as `open_card_set`, and AddressError."""
    from serving.versions.loading import ModelSource
    from shard_node.wire.address import Address

    shards = tuple(tuple(map(Address.parse, replicas.split(","))) for replicas in options["shards"])
    budget_bytes = to_bytes(options["memory_budget_gb"])
    card_set = None if shards else open_card_set(options)
    may_wait = bool(shards) or budget_bytes is not None
    replicas = num_replicas(options["ranking_replicas"], card_set, may_wait=may_wait)
    same = ("cards", "sharding", "replicate_bytes", "verify", "dtype")
    return ModelSource.model_validate(
        {name: options[name] for name in same}
        | {"snapshot": folder, "shards": shards, "node_tls": node_tls, "num_replicas": replicas}
        | {"memory_budget_bytes": budget_bytes, "card_set": card_set}
    )


def _run(
    source: ModelSource,
    options: dict[str, Any],
    limits: RequestLimits,
    config: ServerConfig,
    say: Callable[[Listening], None],
) -> None:
    from serving.observe.profile import profiled
    from serving.rank.service import RankingService
    from serving.server import serve_until_signalled
    from serving.versions.loading import load_when_possible

    # A snapshot's folder is <store>/<model>/<version>; loading refuses any other.
    service = RankingService(limits, expected_models=[source.snapshot.parent.name])
    _check_ports(options)
    with profiled(options["profile"], service.metrics):
        load = partial(load_when_possible, source, service)
        serve_until_signalled(service, config, load, say, options["probe_port"])


def _run_registered(
    options: dict[str, Any],
    limits: RequestLimits,
    config: ServerConfig,
    node_tls: TlsClientConfig | None,
    say: Callable[[Listening], None],
) -> None:
    """Serves until SIGTERM or SIGINT; then leaves the fleet, ends what is in flight, and returns.

    Raises:
        RegistryRecordError: the URL is none. A registry that does not answer is waited for.
        ShardNodeError: the devices can't be had.
        ListenError, FleetError: a port can't be bound.
    """
    from loader.progress import BACKGROUND_SWITCH_INTERVAL_S
    from loader.registry.fleet import FleetRegistry
    from loader.registry.opening import open_registry
    from serving.observe.profile import profiled
    from serving.rank.service import RankingService
    from serving.server import serve_until_signalled
    from serving.versions.serving_node import ServingConfig, ServingNode
    from shard_node.agent.agent import AgentConfig

    # A thread that loads holds the interpreter for this long at most while a request waits for it.
    sys.setswitchinterval(BACKGROUND_SWITCH_INTERVAL_S)
    models: tuple[str, ...] = options["models"]
    service = RankingService(
        limits, expected_models=models or None, max_staleness_s=staleness_limits(options["max_staleness"], models)
    )
    fleet = FleetRegistry(open_registry(options["registry"]))
    node_id = options["node_id"] or default_node_id(config.http_port)
    card_set = open_card_set(options) if options["local"] else None
    serving = ServingConfig.model_validate(
        {name: options[name] for name in ("store", "verify", "dtype", "stage_cpu_share")}
        | {
            "node_id": node_id,
            "node_tls": node_tls,
            "num_replicas": num_replicas(options["ranking_replicas"], card_set),
        }
    )
    local = _local_rows(options, fleet, node_id, card_set) if options["local"] else None
    node = ServingNode(fleet, service, serving, AgentConfig(models=models or None), local)

    def on_listening(listening: Listening) -> None:
        node.address = options["advertise"] or advertised(listening, "http" if config.tls is None else "https")

    _check_ports(options)
    with profiled(options["profile"], service.metrics):
        serve_until_signalled(service, config, node.load, say, options["probe_port"], on_listening, node.leave)


def _local_rows(options: dict[str, Any], fleet: FleetRegistry, node_id: str, card_set: CardSet | None) -> LocalRows:
    """Rows in this process: one shard that has them all, whatever a fleet of shard nodes would say."""
    from router.plan import Plan
    from serving.versions.serving_node import LocalRows
    from shard_node.agent.node_agent import NodeActions, NodeConfig
    from shard_node.node import NodeIdentity, ShardNode

    def plan(spec: ModelSpec) -> Plan:
        return Plan.make(spec, 1, options["sharding"], options["cards"], options["replicate_bytes"])

    def partition(spec: ModelSpec) -> tuple[Partition, str]:
        planned = plan(spec)
        return planned.partition(0), planned.digest

    config = NodeConfig.model_validate(node_settings(options) | {"node_id": node_id, "address": ""})
    identity = {"shard_index": 0, "num_shards": 1, "num_cards": options["cards"], "sharding": options["sharding"]}
    node = ShardNode(NodeIdentity.model_validate(identity))
    return LocalRows(node, NodeActions(node, fleet, partition, config, card_set=card_set), plan)


def staleness_limits(pairs: tuple[tuple[str, str], ...], models: tuple[str, ...]) -> dict[str, float]:
    """Return `--max-staleness` by model. Raises UsageError for what is no number above 0, and for another model."""
    limits: dict[str, float] = {}
    for model, text in pairs:
        try:
            limit_s = float(text)
        except ValueError:
            limit_s = 0.0
        if not 0 < limit_s < float("inf"):
            raise click.UsageError(f"--max-staleness {model}={text}: seconds must be a number above 0.")
        if models and model not in models:
            raise click.UsageError(f"--max-staleness {model}={text}: {model} is not among the --model: {list(models)}.")
        limits[model] = limit_s
    return limits


def advertised(listening: Listening, scheme: str = "http") -> str:
    """Return where others reach it over HTTP: every interface stands for this host's name."""
    host = socket.gethostname() if listening.host in _ANY_HOST else listening.host
    return f"{scheme}://[{host}]:{listening.http_port}" if ":" in host else f"{scheme}://{host}:{listening.http_port}"


def worker_arguments(options: dict[str, Any], folder: Path | None) -> list[str]:
    """Return the flags that every worker is given, but ports and limits.

    Args:
        options: of the command.
        folder: of the snapshot; None in a fleet. A worker gets the registry by a variable, see `REGISTRY_VARIABLE`.
    """
    told = ["--verify" if options["verify"] else "--no-verify"]
    told += arguments(options, ["ranking_replicas", "dtype", "shutdown_delay_s"])
    if folder is not None:
        told += ["--snapshot", str(folder)]
        for shard in options["shards"]:
            told += ["--shard", shard]
        told += arguments(options, ["cards", "sharding", "replicate_bytes", "memory_budget_gb"])
        return told if options["shards"] else told + device_arguments(options)
    told += ["--store", str(options["store"].resolve())]
    for model in options["models"]:
        told += ["--model", model]
    for model, limit_s in options["max_staleness"]:
        told += ["--max-staleness", f"{model}={limit_s}"]
    told += arguments(options, ["advertise", "stage_cpu_share"])
    return [*told, "--local", *arguments(options, _ROWS), *device_arguments(options)] if options["local"] else told


def _own_arguments(options: dict[str, Any], *, named: bool) -> list[list[str]]:
    """The flags of each worker alone: its node id in a fleet, and a profile, for counts can't share a file."""
    node_id, profile = options["node_id"] or default_node_id(options["http_port"]), options["profile"]
    own: list[list[str]] = []
    for worker in range(options["workers"]):
        told = ["--node-id", f"{node_id}-{worker}"] if named else []
        if profile is not None:
            told += ["--profile", str(profile.absolute().with_stem(f"{profile.stem}-{worker}"))]
        own.append(told)
    return own


def default_node_id(http_port: int) -> str:
    """Return `serve-<host>-<HTTP port>`; a process that takes any port has its number there, another one next time."""
    return default_name(f"serve-{socket.gethostname()}-{http_port or f'pid{os.getpid()}'}")


def _run_workers(ctx: click.Context, workers: list[list[str]], scheme: str, environment: dict[str, str]) -> None:
    from serving.fleet.local_fleet import held_ports, worker_specs
    from serving.fleet.supervisor import SupervisionConfig, supervised

    host, log_level = ctx.params["host"], ctx.find_root().params["log_level"]

    async def program() -> None:
        with held_ports(host, ctx.params["http_port"], ctx.params["grpc_port"], len(workers)) as ports:
            async with supervised(SupervisionConfig()) as supervisor:
                folder = supervisor.run_directory
                await supervisor.start(worker_specs(folder, ports, workers, log_level, environment))
                click.echo(f"logs: {folder}")
                click.echo(f"HTTP: {scheme}://{host}:{ports.http}/docs")
                click.echo(f"gRPC: {host}:{ports.grpc}")
                await asyncio.Event().wait()

    run_until_stopped(program)
