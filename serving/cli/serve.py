"""`shardrank serve` and `shard-node`: the processes that answer, of one snapshot or in a fleet."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from serving.cli import WithExamples, settings
from serving.cli import options as opts
from serving.cli.settings import Options, Protection, config_of
from serving.fleet.process import notify_once_ready, notify_ready, num_workers, run_until_stopped

if TYPE_CHECKING:
    from loader.registry.fleet import FleetRecord, FleetRegistry
    from serving.api.node_port import NodeMetrics
    from serving.rank.service import RankingService
    from serving.server import Listening, ServerConfig
    from serving.versions.loading import ModelSource
    from shard_node.agent.agent import AgentConfig
    from shard_node.agent.node_agent import NodeConfig
    from shard_node.cuda.card_set import CardSet
    from shard_node.node import ShardNode
    from shard_node.tracing import SpanSink
    from shard_node.wire.address import Address
    from shard_node.wire.server import NodeServer
    from shard_node.wire.tls import TlsClientConfig, TlsConfig

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 5.0
"""How long SIGTERM lets requests in flight at a shard node end."""
_JOIN_RETRY_S = 0.5
_ROWS = ("cards", "sharding", "replicate_bytes", "memory_budget_gb", "max_memory_gb")
_FLEET_ONLY = ("advertise", "node_id", "max_memory_gb", "stage_cpu_share", "stage_mb_per_s", "local", "max_staleness")
_ANY_HOST = frozenset({"0.0.0.0", "::", ""})
_STALENESS = "how far a model's rows may be behind its row updates before /readyz calls it degraded."


@click.command(cls=WithExamples)
@opts.member_options
@opts.option(
    "--shard ADDRESS[,ADDRESS...]",
    "Without --registry: the replicas of a shard; the first --shard is shard 0, the second shard 1, and so on. Without "
    "any, the rows are loaded into this process.",
    multiple=True,
    name="shards",
)
@opts.switch("--local", "With --registry: load the rows into this process, swap them and apply row updates here.")
@opts.name_options("URL", "where this process is reached over HTTP, for people to read. Default: host and port")
@opts.assignments("--max-staleness MODEL=SECONDS", f"With --registry: {_STALENESS}")
@opts.cards_option(1)
@opts.sharding_option
@opts.plan_option
@opts.replicate_option
@opts.memory_budget_option
@opts.device_options
@opts.max_memory_option("With --local: ")
@opts.stage_share_option
@opts.port_options
@opts.tls_options("Let in only clients with a certificate of these CAs. Also the default of --node-ca.")
@opts.node_tls_options
@opts.tokens_option
@opts.front_options
@opts.count("--workers", "Serving processes that share the ports; each holds all rows, if it holds any.", 1, 64, 1)
@opts.ranking_options
@opts.hot_rows_options
@opts.verify_option
@opts.trust_exported_option
@opts.option(
    "--shutdown-delay-s S",
    "After SIGTERM, how long requests are still taken while /readyz says that the process is not ready.",
    opts.FiniteRange(0, 600),
    0.5,
)
@opts.removed_option(
    "--profile FILE", "stage histograms (shardrank_stage_seconds) and `loadtest bench serving` say what it said"
)
@opts.serving_trace_options
@opts.record_options
@opts.option("--probe-port", "A private HTTP port of this one worker, on loopback.", opts.PORT, hidden=True)
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
      shardrank serve --store s3://bucket/models --model films --store-cache /var/cache/shardrank
      shardrank serve --store models --model films --shard 10.0.0.7:7000,10.0.0.8:7000 --shard 10.0.0.9:7000
      shardrank serve --snapshot models/films/3 --workers 4 --limit max_candidates=500 --host 0.0.0.0
      shardrank serve --snapshot models/films/3 --host 0.0.0.0 --tls-cert api.crt --tls-key api.key --tokens tokens.json
    """
    in_fleet, given = settings.belongs_to_fleet(ctx, _FLEET_ONLY), settings.given_flags(ctx)
    if in_fleet and not options["local"] and (wrong := sorted(given & {*_ROWS, *settings.DEVICE_FLAGS})):
        named = settings.flags(wrong)
        raise click.UsageError(f"{named}: with --registry only for --local rows; shard nodes have their own.")
    protection = Protection.of(options)
    if options["shards"] and (wrong := sorted(given & {"memory_budget_gb", *settings.DEVICE_FLAGS})):
        verb = "is" if len(wrong) == 1 else "are"
        raise click.UsageError(f"{settings.flags(wrong)} {verb} for rows in this process; shard nodes have their own.")
    settings.hot_rows(options, all_here=options["local"] if in_fleet else not options["shards"])
    # Workers are given the folder alone, and look for all that belongs in it.
    with_rows = not options["shards"] or options["workers"] > 1
    folder = None if in_fleet else settings.member_folder(options, with_rows=with_rows)
    if options["probe_port"] is None:
        # Of several workers the supervisor says it, once.
        settings.warn_if_open(options["host"], protection)
    if options["workers"] > 1:
        _run_workers(options, folder, ctx.find_root().params["log_level"])
        return
    # Only now: a supervisor of workers has no use for a server's modules, which take 1.7 s and 214 MB.
    from serving.server import ServerConfig

    config = config_of(ServerConfig, options, tls=protection.tls, num_workers=num_workers())
    if folder is None:
        _serve_in_fleet(options, config, protection.node_tls)
    else:
        _serve_snapshot(options, folder, config, protection.node_tls)


def _serve_snapshot(options: Options, folder: Path, config: ServerConfig, node_tls: TlsClientConfig | None) -> None:
    from serving.rank.service import RankingService
    from serving.versions.loading import load_when_possible

    limits = settings.read_limits(options)
    source = _source(options, folder, node_tls)
    # A snapshot's folder is <store>/<model>/<version>; loading refuses any other.
    service = RankingService(limits, expected_models=[folder.parent.name])
    _answer(options, service, config, load=partial(load_when_possible, source, service))


def _answer(options: Options, service: RankingService, config: ServerConfig, **steps: Callable[..., Any]) -> None:
    """Serve until SIGTERM or SIGINT; `steps` are those of `serve_until_signalled`."""
    from serving.fleet.local_fleet import held_ports
    from serving.observe.traces import running_tracer
    from serving.server import serve_until_signalled

    scheme = settings.scheme(options)

    def say(listening: Listening) -> None:
        click.echo(f"HTTP: {scheme}://{listening.host}:{listening.http_port}/docs")
        click.echo(f"gRPC: {listening.host}:{listening.grpc_port}")
        if listening.admin_port is not None:
            admin = f"{scheme}://{listening.host}:{listening.admin_port}"
            click.echo(f"probes and metrics: {admin}/metrics, status page: {admin}/")

    if options["probe_port"] is None:
        # A process that stands alone shares no port; a worker's are held by its supervisor.
        with held_ports(options["host"], options["http_port"], options["grpc_port"], workers=0):
            pass
    traces = settings.trace_config(options, "shardrank-serve")
    with running_tracer(traces, service.metrics) as service.tracer, settings.recording(options, service):
        serve_until_signalled(service, config, on_ready=say, probe_port=options["probe_port"], **steps)


def _source(options: Options, folder: Path, node_tls: TlsClientConfig | None) -> ModelSource:
    """Raise as `open_card_set`, and ConfigError."""
    from serving.versions.loading import ModelSource
    from shard_node.wire.address import Address

    shards = tuple(tuple(map(Address.parse, replicas.split(","))) for replicas in options["shards"])
    budget_bytes = settings.to_bytes(options["memory_budget_gb"])
    card_set = None if shards else settings.open_card_set(options)
    return config_of(
        ModelSource,
        options,
        snapshot=folder,
        rows_here=not shards or isinstance(options["store"], Path | None),
        shards=shards,
        node_tls=node_tls,
        plan=settings.read_plan(options, [folder.parent.name]),
        num_replicas=settings.num_replicas(options["ranking_replicas"], card_set, may_block=budget_bytes is not None),
        memory_budget_bytes=budget_bytes,
        card_set=card_set,
        hot_rows=settings.hot_rows(options, all_here=not shards),
        replica_policy=settings.replica_policy(options),
        warming=settings.warming(options),
    )


def _serve_in_fleet(options: Options, config: ServerConfig, node_tls: TlsClientConfig | None) -> None:
    """Serve until SIGTERM or SIGINT; then leave the fleet. A registry that does not answer is waited for."""
    from loader.progress import BACKGROUND_SWITCH_INTERVAL_S
    from loader.registry import open_registry
    from loader.registry.fleet import FleetRegistry
    from serving.rank.service import RankingService
    from serving.versions.fleet_member import FleetMember, LocalRows, ServingConfig
    from shard_node.agent.agent import AgentConfig
    from shard_node.agent.node_agent import NodeActions
    from shard_node.node import ShardNode

    # A thread that loads holds the interpreter for this long at most while a request waits for it.
    sys.setswitchinterval(BACKGROUND_SWITCH_INTERVAL_S)
    limits, models = settings.read_limits(options), options["models"] or None
    limits_s = settings.staleness_limits(options["max_staleness"], options["models"])
    service = RankingService(limits, expected_models=models, max_staleness_s=limits_s)
    fleet = FleetRegistry(open_registry(options["registry"]))
    card_set = settings.open_card_set(options) if options["local"] else None
    named = {"node_id": options["node_id"] or serving_node_id(config.http_port), "node_tls": node_tls}
    plan = settings.read_plan(options, models or ())
    # Deltas are written to rows in this process while it serves.
    replicas = settings.num_replicas(options["ranking_replicas"], card_set, may_block=options["local"])
    named |= {"replica_policy": settings.replica_policy(options), "warming": settings.warming(options)}
    named["hot_rows"] = settings.hot_rows(options, all_here=options["local"])
    serving = config_of(ServingConfig, options, num_replicas=replicas, plan=plan, **named)
    local = None
    if options["local"]:
        # One shard that has all rows, whatever a fleet of shard nodes would say.
        rows = ShardNode(settings.node_identity(options, 0, 1))
        partition = partial(settings.partition_of, options, plan, 0, 1)
        actions = NodeActions(rows, fleet, partition, settings.node_config(options, serving.node_id), card_set=card_set)
        local = LocalRows(rows, actions, partial(settings.plan_of, options, plan, 1))
    reopen = partial(open_registry, options["registry"])
    node = FleetMember(fleet, service, serving, AgentConfig(models=models), local, reopen)

    def on_listening(listening: Listening) -> None:
        node.address = options["advertise"] or advertised_url(listening, settings.scheme(options))

    _answer(options, service, config, load=node.load, on_listening=on_listening, leave=node.leave, open_registry=reopen)


def advertised_url(listening: Listening, scheme: str = "http") -> str:
    """Return where others reach it over HTTP: every interface stands for this host's name."""
    host = socket.gethostname() if listening.host in _ANY_HOST else listening.host
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{listening.http_port}"


def serving_node_id(http_port: int) -> str:
    """Return `serve-<host>-<HTTP port>`; a process that takes any port has its number there, another one next time."""
    return _node_id(f"serve-{socket.gethostname()}-{http_port or f'pid{os.getpid()}'}")


def _node_id(text: str) -> str:
    return "".join(one if one.isascii() and (one.isalnum() or one in "_.:-") else "_" for one in text)[:200]


def _run_workers(options: Options, folder: Path | None, log_level: str) -> None:
    """Run `--workers` processes of this command until SIGTERM or SIGINT."""
    from loader.snapshot.reader import Snapshot
    from serving.fleet.local_fleet import REGISTRY_VARIABLE, held_ports, worker_specs
    from serving.fleet.supervisor import SupervisionConfig, supervised

    environment = {REGISTRY_VARIABLE: options["registry"]} if folder is None else {}
    if folder is not None:
        # Only the manifest and the headers: each worker checks the files, at its start and at every restart.
        Snapshot.open(folder, verify=False)
    workers = [worker_arguments(options, folder, worker) for worker in range(options["workers"])]
    scheme, addresses = settings.scheme(options), (options["host"], options["http_port"], options["grpc_port"])

    async def program() -> None:
        with held_ports(*addresses, len(workers)) as ports:
            # Workers leave their fleet once they have drained, which may take as long again as the default grace.
            grace_s = SupervisionConfig().stop_grace_s + options["shutdown_delay_s"]
            async with supervised(SupervisionConfig(stop_grace_s=grace_s)) as supervisor:
                await supervisor.start(worker_specs(supervisor.run_directory, ports, workers, log_level, environment))
                click.echo(f"logs: {supervisor.run_directory}")
                click.echo(f"HTTP: {scheme}://{ports.host}:{ports.http}/docs")
                click.echo(f"gRPC: {ports.host}:{ports.grpc}")
                notify_ready()
                await asyncio.Event().wait()

    run_until_stopped(program)


def worker_arguments(options: Options, folder: Path | None, worker: int = 0) -> list[str]:
    """Return the flags of a worker, but ports and the registry, which may have a password.

    Without a snapshot's folder it is one of a fleet. Node ids differ, and so do folders of recorded
    requests: two that write can't share one.
    """
    has_rows = options["local"] if folder is None else not options["shards"]
    names = ["shutdown_delay_s", "plan_file", "warm_from", "warm_requests"]
    passed = ["--verify" if options["verify"] else "--no-verify", *settings.serving_arguments(options)]
    if options["record"] is not None:
        max_mb = max(1, options["record_max_mb"] // options["workers"])
        passed += ["--record", str((options["record"] / str(worker)).absolute()), "--record-max-mb", str(max_mb)]
        names.append("record_share")
    if folder is not None:
        passed += ["--snapshot", str(folder)]
        names += ["shards", *_ROWS[:-1]]
    else:
        node_id, store = options["node_id"] or serving_node_id(options["http_port"]), options["store"]
        passed += ["--node-id", f"{node_id}-{worker}"]
        passed += ["--store", str(store.resolve())] if isinstance(store, Path) else store.arguments
        names += ["models", "max_staleness", "advertise", "stage_cpu_share", *(("local", *_ROWS) if has_rows else ())]
    passed += settings.arguments(options, names)
    return passed + settings.device_arguments(options) if has_rows else passed


@click.command("shard-node", cls=WithExamples)
@opts.member_options
@opts.option(
    "--shard I/N", "Which shard of how many this node serves, counted from 0.", opts.shard_number, required=True
)
@opts.option("--listen ADDRESS", "host:port, or unix:/path of a socket. Repeatable.", multiple=True, required=True)
@opts.name_options("ADDRESS", "where routers reach this node. Default: the first address that it listens on")
@opts.tls_options("CAs of routers: only who shows a certificate of theirs is let in. Needed with --tls-cert.")
@opts.tls_role_option
@opts.cards_option(1)
@opts.sharding_option
@opts.plan_option
@opts.replicate_option
@opts.memory_budget_option
@opts.device_options
@opts.max_memory_option("With --registry: ")
@opts.stage_share_option
@opts.option(
    "--stage-mb-per-s MB",
    "With --registry: read at most this much of a version in a second, in 10^6 bytes.",
    opts.ABOVE_ZERO,
)
@opts.option(
    "--threads",
    "Threads that pool rows. With GPUs each waits for one batch at a time, and a card takes two at once.",
    click.IntRange(1, 256),
    1,
)
@opts.verify_option
@opts.option("--admin-listen HOST:PORT", "For operators: /healthz, /readyz, /metrics; over TLS if --listen has it.")
@opts.trace_options
@click.pass_context
def shard_node(ctx: click.Context, /, **options: Any) -> None:
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
      shardrank shard-node --snapshot models/films/3 --shard 0/1 --listen 127.0.0.1:7000 --memory-budget-gb 2
    """
    from loader.progress import BACKGROUND_SWITCH_INTERVAL_S
    from shard_node.node import ShardNode
    from shard_node.wire.address import Address

    tls = Protection.of(options).tls
    if tls is not None and tls.client_ca is None:
        raise click.UsageError("--tls-cert needs --tls-client-ca: certificates are all that keeps strangers out here.")
    in_fleet = settings.belongs_to_fleet(ctx, _FLEET_ONLY)
    addresses = tuple(Address.parse(text) for text in options["listen"])
    admin = None if options["admin_listen"] is None else Address.parse(options["admin_listen"])
    if admin is not None and admin.is_unix:
        raise click.UsageError(f"--admin-listen {admin}: HOST:PORT is needed.")
    traces, sink = settings.trace_config(options, "shardrank-shard-node"), None
    if traces is not None:
        from shard_node.otlp import OtlpSink

        sink = OtlpSink(traces)
    if not in_fleet:
        _serve_rows(_load(settings.member_folder(options), options, sink), options, addresses, tls, admin)
        return
    # What can't be is refused before a card is opened.
    _node_config(options)
    record, agent = _fleet_configs(options)
    sys.setswitchinterval(BACKGROUND_SWITCH_INTERVAL_S)
    card_set = settings.open_card_set(options)
    node = ShardNode(settings.node_identity(options, *options["shard"]), sink)
    _run_node(node, lambda: _serve_rows_in_fleet(options, record, agent, node, card_set, addresses, tls, admin))


def _load(folder: Path, options: Options, sink: SpanSink | None) -> ShardNode:
    """Load a node's rows and make them live. Raises as `Snapshot.open`, `Plan.make`, `load_tables`, `open_card_set`."""
    from loader.snapshot.reader import Snapshot
    from shard_node.engine.loading import load_tables
    from shard_node.node import ShardNode

    card_set = settings.open_card_set(options)
    snapshot = Snapshot.open(folder, verify=options["verify"])
    index, num_shards = options["shard"]
    file = settings.read_plan(options, [snapshot.spec.model])
    partition, digest = settings.partition_of(options, file, index, num_shards, snapshot)
    budget_bytes = settings.to_bytes(options["memory_budget_gb"])
    tables = load_tables(snapshot, partition, digest, memory_budget_bytes=budget_bytes, card_set=card_set)
    node = ShardNode(settings.node_identity(options, index, num_shards), sink)
    node.generations.stage(snapshot.spec.model, snapshot.version, tables)
    node.generations.flip(snapshot.spec.model, snapshot.version)
    for use in node.info().memory:
        logger.info("card %d: %d bytes of rows in tier %s", use.card, use.size_bytes, use.tier)
    return node


def _run_node(node: ShardNode, program: Callable[[], Awaitable[None]]) -> None:
    """Run the node's program until SIGTERM or SIGINT, then close the node."""
    import torch
    import uvloop

    # Requests are the parallelism here: an op divided over threads waits for them, spinning, and with several
    # processes on one machine a lookup of 1 ms takes 15 ms and more.
    torch.set_num_threads(1)
    try:
        run_until_stopped(program, loop_factory=uvloop.new_event_loop)
    finally:
        node.close()


@asynccontextmanager
async def _listening(
    node: ShardNode,
    options: Options,
    addresses: Sequence[Address],
    tls: TlsConfig | None,
    admin: Address | None,
    *,
    may_wait: bool,
) -> AsyncIterator[NodeServer]:
    """Listen while the block runs. Where a disk or a card may have to be waited for, the event loop never pools."""
    from shard_node.wire.address import Address
    from shard_node.wire.requests import ServerLimits
    from shard_node.wire.server import NodeServer
    from shard_node.wire.tls import server_context

    reachable = [str(address) for address in (*addresses, admin) if address is not None and not address.is_loopback]
    if reachable and tls is None:
        logger.warning("listens on %s without TLS (--tls-cert): for a private network only", ", ".join(reachable))
    limits = config_of(ServerLimits, options, **({"max_inline_bytes": 0} if may_wait else {}))
    metrics: NodeMetrics | None = None
    async with AsyncExitStack() as stack:
        if admin is not None:
            from serving.api.node_port import running_node_port  # only who is asked pays for it

            metrics, url = await stack.enter_async_context(running_node_port(node, admin, tls))
            click.echo(f"metrics: {url}")
        server = NodeServer(node, limits, tls=None if tls is None else server_context(tls), watch=metrics)
        stack.push_async_callback(server.close)
        await server.start(addresses)
        if metrics is not None:
            told = options["advertise"]
            address = Address.parse(told) if told else advertised(server.addresses[0])
            metrics.of(server, str(address))
        for address in server.addresses:
            click.echo(f"shard {node.identity.shard_index}/{node.identity.num_shards} listens on {address}")
        yield server


def _serve_rows(
    node: ShardNode, options: Options, addresses: Sequence[Address], tls: TlsConfig | None, admin: Address | None
) -> None:
    """Answer routers until SIGTERM or SIGINT; then end what is in flight. Raises CardError if the cards fail."""
    from loader.memory import settle_heap
    from shard_node.agent.node_agent import watch_cards

    async def program() -> None:
        may_wait = any(use.tier != "ram" for use in node.info().memory)
        async with _listening(node, options, addresses, tls, admin, may_wait=may_wait) as server:
            settle_heap()
            notify_ready()
            try:
                await watch_cards(node)
            finally:
                await server.drain(DRAIN_TIMEOUT_S)

    _run_node(node, program)


def _node_config(options: Options, bound: Address | None = None) -> NodeConfig:
    """Return what a shard node of a fleet is told; its address, and an id that was not given, need what is `bound`.

    Raises UsageError and ConfigError, naming what can't be.
    """
    from shard_node.wire.address import Address

    rate, node_id = options["stage_mb_per_s"], options["node_id"]
    address = "" if options["advertise"] is None else str(Address.parse(options["advertise"]))
    if bound is not None:
        address = address or str(advertised(bound))
        place = Path(bound.path).stem if bound.is_unix else str(bound.port)
        node_id = node_id or _node_id(f"shard-{options['shard'][0]}-{socket.gethostname()}-{place}")
    return settings.node_config(options, node_id or "shard", address=address, stage_bytes_per_s=rate and rate * 1e6)


def _fleet_configs(options: Options) -> tuple[FleetRecord, AgentConfig]:
    """Return how the fleet divides rows, and the models that the node follows. Raises UsageError."""
    from loader.registry.fleet import FleetRecord
    from shard_node.agent.agent import AgentConfig

    record = config_of(FleetRecord, options, num_shards=options["shard"][1])
    return record, config_of(AgentConfig, {}, models=options["models"] or None)


async def _serve_rows_in_fleet(
    options: Options,
    record: FleetRecord,
    agent_config: AgentConfig,
    node: ShardNode,
    card_set: CardSet | None,
    addresses: Sequence[Address],
    tls: TlsConfig | None,
    admin: Address | None = None,
) -> None:
    """Serve what the fleet wants until it is cancelled; then leave the fleet and end what is in flight.

    Raises RolloutError if it divides rows otherwise than its fleet, and CardError if the cards fail.
    """
    from loader.memory import settle_heap
    from shard_node.agent.agent import Agent
    from shard_node.agent.node_agent import NodeActions, watch_cards

    (index, num_shards), plan = options["shard"], settings.read_plan(options)
    may_wait = options["memory_budget_gb"] is not None or card_set is not None
    node.problems = lambda: {"": "it has not joined its fleet yet"}
    async with (
        settings.opened_registry(options["registry"]) as fleet,
        _listening(node, options, addresses, tls, admin, may_wait=may_wait) as server,
    ):
        await _join(fleet, record)
        config = _node_config(options, server.addresses[0])
        partition = partial(settings.partition_of, options, plan, index, num_shards)
        actions = NodeActions(node, fleet, partition, config, card_set=card_set)
        agent = Agent(fleet, actions, agent_config)
        node.problems = partial(actions.problems, agent)
        settle_heap()
        running = asyncio.create_task(agent.run())
        cards = None if card_set is None else card_set.cards
        beside = asyncio.gather(watch_cards(node, cards), notify_once_ready(node.problems))
        try:
            tasks: list[asyncio.Future[Any]] = [running, beside]
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            beside.cancel()
            # First nobody new is sent here, then those who are here are asked to go, then what they wait for is ended.
            await agent.leave()
            await server.drain(DRAIN_TIMEOUT_S)
            running.cancel()
            await asyncio.wait([running])
            await actions.close()


async def _join(fleet: FleetRegistry, record: FleetRecord) -> None:
    from loader.errors import RegistryUnavailableError
    from shard_node.agent.node_agent import join_fleet

    level = logging.WARNING
    while True:
        try:
            return await join_fleet(fleet, record)
        except RegistryUnavailableError as error:
            logger.log(level, "waits for the registry: %s", error)
            level = logging.DEBUG
            await asyncio.sleep(_JOIN_RETRY_S)


def advertised(bound: Address) -> Address:
    """Return where others reach what is bound: every interface stands for this host's name, a socket for its path."""
    from shard_node.wire.address import Address

    if bound.is_unix:
        return Address(path=str(Path(bound.path).absolute()))
    return Address(host=socket.gethostname(), port=bound.port) if bound.host in _ANY_HOST else bound
