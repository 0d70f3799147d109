"""`shardrank serve`: HTTP and gRPC in front of shard nodes, or of rows in this very process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from serving.cli.devices import (
    DEVICE_FLAGS,
    device_arguments,
    device_options,
    num_replicas,
    open_card_set,
)
from serving.cli.examples import WithExamples
from serving.cli.options import (
    Assignment,
    FiniteRange,
    cards_option,
    front_options,
    member_options,
    memory_budget_option,
    port_options,
    ranking_options,
    replicate_option,
    sharding_option,
    verify_option,
)
from serving.cli.protection import (
    Protection,
    node_tls_options,
    protection_arguments,
    tls_options,
    tokens_option,
    warn_if_open,
)
from serving.cli.snapshots import SnapshotChoice

if TYPE_CHECKING:
    from serving.limits import RequestLimits
    from serving.server import Listening, ServerConfig
    from serving.versions.loading import ModelSource
    from shard_node.tls import TlsClientConfig

logger = logging.getLogger(__name__)

REGISTRY_VARIABLE = "SHARDRANK_REGISTRY"
"""How workers are told the registry: everybody on the machine can read a process' flags, and it may have a password."""

_REGISTERED_ONLY = frozenset({"local", "node_id", "advertise", "max_staleness", "max_memory_gb", "stage_cpu_share"})
_LOCAL_ONLY = frozenset({"cards", "sharding", "replicate_bytes", "memory_budget_gb", "max_memory_gb", *DEVICE_FLAGS})


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
@click.option(
    "--max-memory-gb",
    type=FiniteRange(min=0),
    metavar="GB",
    help="With --local: RAM for the rows of all versions together, in 10^9 bytes. A version beyond it is refused "
    "before it is loaded. Default: what is available.",
)
@click.option(
    "--stage-cpu-share",
    type=FiniteRange(0.01, 1),
    default=0.5,
    show_default=True,
    metavar="SHARE",
    help="With --registry: of one core, for loading a version beside the live one.",
)
@port_options(8080, 8081)
@tls_options(
    "Let in only clients with a certificate of these CAs, over HTTP and gRPC. They also are the default of --node-ca."
)
@node_tls_options
@tokens_option
@front_options
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    metavar="N",
    help="Serving processes that share the ports. Those that hold rows hold all of them each.",
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
    from serving.cli.limits import limit_arguments, read_limits, with_proxies

    is_registered = _is_registered(ctx)
    limits = read_limits(options["limits_file"], with_proxies(options))
    arguments = limit_arguments(options["limits_file"], with_proxies(options)) + protection_arguments(options)
    if options["admin_port"] is not None:
        arguments += ["--admin-port", str(options["admin_port"])]
    protection = Protection.of(options)
    server_config = _server_config(options, protection)
    if options["probe_port"] is None:
        # Of several workers the supervisor says it, once.
        warn_if_open(options["host"], protection)
    say = partial(_say, protection.scheme)
    if is_registered:
        from serving.cli.registered_serving import run_registered, worker_arguments, worker_node_ids

        if options["workers"] > 1:
            profiles = _worker_profiles(options["profile"], options["workers"])
            same, names = worker_arguments(options) + arguments, worker_node_ids(options)
            workers = [[*same, "--node-id", one, *own] for one, own in zip(names, profiles, strict=True)]
            _run_workers(ctx, workers, protection.scheme, {REGISTRY_VARIABLE: options["registry"]})
        else:
            run_registered(options, limits, server_config, protection.node_tls, say)
        return
    folder = _static_folder(ctx)
    if options["workers"] > 1:
        from loader.reader import Snapshot

        # Only the manifest and the headers: each worker checks the files, at its start and at every restart.
        Snapshot.open(folder, verify=False)
        same = _worker_arguments(options, folder) + arguments
        profiles = _worker_profiles(options["profile"], options["workers"])
        _run_workers(ctx, [[*same, *own] for own in profiles], protection.scheme)
        return
    source = _source(options, folder, protection.node_tls)
    _run(source, limits, server_config, options["probe_port"], options["profile"], say)


def _source(options: dict[str, Any], folder: Path, node_tls: TlsClientConfig | None) -> ModelSource:
    """Raises as `open_card_set`, and AddressError."""
    from serving.versions.loading import ModelSource

    budget_gb = options["memory_budget_gb"]
    shards, card_set = _addresses(options["shards"]), None
    if not shards:
        card_set = open_card_set(options)
    same = ("cards", "sharding", "replicate_bytes", "verify", "dtype")
    may_wait = bool(shards) or budget_gb is not None
    replicas = num_replicas(options["ranking_replicas"], card_set, may_wait=may_wait)
    return ModelSource.model_validate(
        {name: options[name] for name in same}
        | {"snapshot": folder, "shards": shards, "node_tls": node_tls, "num_replicas": replicas}
        | {"memory_budget_bytes": None if budget_gb is None else int(budget_gb * 1e9), "card_set": card_set}
    )


def _is_registered(ctx: click.Context) -> bool:
    """Whether the process belongs to a fleet. Raises UsageError for flags of another form."""
    given = {name for name in ctx.params if _is_given(ctx, name)}
    static = sorted(given & {"version", "snapshot", "shards"})
    if ctx.params["registry"] is None or (static and "registry" not in given):
        if wrong := sorted(given & _REGISTERED_ONLY):
            raise click.UsageError(f"{_flags(wrong)}: only with --registry.")
        return False
    if static:
        raise click.UsageError(f"{_flags(static)}: not with --registry, which says what is served and where rows are.")
    if ctx.params["store"] is None:
        raise click.UsageError("--registry needs --store.")
    if not ctx.params["local"] and (wrong := sorted(given & _LOCAL_ONLY)):
        raise click.UsageError(f"{_flags(wrong)}: with --registry only for --local rows; shard nodes have their own.")
    return True


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE


def _flags(names: Sequence[str]) -> str:
    return ", ".join("--shard" if name == "shards" else f"--{name.replace('_', '-')}" for name in names)


def _static_folder(ctx: click.Context) -> Path:
    """The snapshot's folder. Raises UsageError and SnapshotNotFoundError."""
    options = ctx.params
    models = options["models"]
    if len(models) > 1:
        raise click.UsageError("Several --model need --registry.")
    if options["shards"]:
        wrong = [name for name in ("memory_budget_gb", *DEVICE_FLAGS) if _is_given(ctx, name)]
        if wrong:
            verb = "is" if len(wrong) == 1 else "are"
            raise click.UsageError(f"{_flags(wrong)} {verb} for rows in this process; shard nodes have their own.")
    model = models[0] if models else None
    return SnapshotChoice(options["store"], model, options["version"], options["snapshot"]).folder().resolve()


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


def _addresses(shards: tuple[str, ...]) -> tuple[tuple[Any, ...], ...]:
    """Raises AddressError, naming the address."""
    from shard_node.address import Address

    return tuple(tuple(Address.parse(text) for text in replicas.split(",")) for replicas in shards)


def _run(
    source: ModelSource,
    limits: RequestLimits,
    config: ServerConfig,
    probe_port: int | None,
    profile: Path | None,
    say: Callable[[Listening], None],
) -> None:
    from serving.fleet.local_fleet import held_ports
    from serving.observe.profile import profiled
    from serving.rank.service import RankingService
    from serving.server import serve_until_signalled
    from serving.versions.loading import load_when_possible

    # A snapshot's folder is <store>/<model>/<version>; loading refuses any other.
    service = RankingService(limits, expected_models=[source.snapshot.parent.name])
    if probe_port is None:
        # A worker's ports are held by its supervisor; one that stands alone must not share those of another server.
        with held_ports(config.host, config.http_port, config.grpc_port, workers=0):
            pass
    with profiled(profile, service.metrics):
        serve_until_signalled(service, config, lambda: load_when_possible(source, service), say, probe_port)


def _worker_profiles(profile: Path | None, workers: int) -> tuple[tuple[str, ...], ...]:
    """The flags of each worker for a profile of its own: counts of several processes can't share a file."""
    if profile is None:
        return ((),) * workers
    path = profile.absolute()
    return tuple(("--profile", str(path.with_stem(f"{path.stem}-{worker}"))) for worker in range(workers))


def _worker_arguments(options: dict[str, Any], folder: Path) -> list[str]:
    """The flags of one worker, but ports and limits."""
    arguments = ["--snapshot", str(folder), "--verify" if options["verify"] else "--no-verify"]
    for shard in options["shards"]:
        arguments += ["--shard", shard]
    names = ("cards", "sharding", "replicate_bytes", "memory_budget_gb", "ranking_replicas", "dtype")
    for name in (*names, "shutdown_delay_s"):
        if options[name] is not None:
            arguments += [f"--{name.replace('_', '-')}", str(options[name])]
    return arguments if options["shards"] else arguments + device_arguments(options)


def _run_workers(
    ctx: click.Context, workers: list[list[str]], scheme: str, environment: dict[str, str] | None = None
) -> None:
    from serving.fleet.local_fleet import held_ports, worker_specs
    from serving.fleet.process import StopRequestedError, run_until_signalled
    from serving.fleet.supervisor import SupervisionConfig, supervised

    host, log_level = ctx.params["host"], ctx.find_root().params["log_level"]

    async def program() -> None:
        with held_ports(host, ctx.params["http_port"], ctx.params["grpc_port"], len(workers)) as ports:
            async with supervised(SupervisionConfig()) as supervisor:
                folder = supervisor.run_directory
                await supervisor.start(worker_specs(folder, ports, workers, log_level, environment or {}))
                click.echo(f"logs: {folder}")
                click.echo(f"HTTP: {scheme}://{host}:{ports.http}/docs")
                click.echo(f"gRPC: {host}:{ports.grpc}")
                await asyncio.Event().wait()

    try:
        run_until_signalled(program)
    except StopRequestedError as stop:
        logger.info("stopped by %s", stop)
