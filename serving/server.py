"""A serving process: HTTP and gRPC over one service, in one event loop, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

import uvloop

from loader.memory import settle_heap
from loader.progress import BACKGROUND_SWITCH_INTERVAL_S
from loader.registry.fleet import FleetRecord
from router.hot_keeper import default_hot_rows
from router.hot_rows import HotRowsConfig
from serving.api.grpc.services import GrpcServer
from serving.api.http import HttpApp, HttpServer, running_admin
from serving.api.tokens import Tokens
from serving.cli import settings
from serving.cli.settings import Protection, config_of
from serving.config import ServeConfig
from serving.dashboard.board import Board
from serving.fleet.process import notify_ready, num_workers, run_until_signalled
from serving.fleet.workers import Listening, Membership, node_id, reachable_host, reserved_ports
from serving.limits import RequestLimits
from serving.observe.access import AccessLog
from serving.observe.traces import running_tracer
from serving.rank.service import RankingService
from serving.versions.fleet_member import FixedShards, FleetMember, LocalRows, ServingConfig
from shard_node.agent.node_agent import NodeActions
from shard_node.buckets import NodeIdentity
from shard_node.engine.memory import total_memory_bytes
from shard_node.node import ShardNode
from shard_node.wire.address import Address
from shard_node.wire.tls import TlsClientConfig, TlsConfig, TlsContext, server_context

logger = logging.getLogger(__name__)

_ALONE = "this process belongs to no fleet (no --registry): it serves what it was started with"
_WORKER_NOTE = (
    "{count} worker processes share this port and one of them answers this page: requests and latencies are those of "
    "process {process} alone; /metrics adds all workers up"
)
DRAIN_TIMEOUT_S: Final = 10.0
"""How long requests in flight may take once a server stops."""


@contextlib.asynccontextmanager
async def running_server(
    service: RankingService, config: ServeConfig, tls: TlsConfig | None = None, drain_timeout_s: float = DRAIN_TIMEOUT_S
) -> AsyncIterator[Listening]:
    """Listen while the block runs, with `tls` or as plain text. Raises ConfigError if a port can't be bound.

    Then it goes on to answer requests for `shutdown_delay_s`, not ready any more and closing each connection with its
    answer, so that balancers and clients turn elsewhere; and waits for those in flight.
    """
    tokens, ssl = _protection(service, config, tls, "http")
    app = HttpApp(service, tokens)
    http = HttpServer(
        service.limits,
        service.clock,
        service.metrics.failed,
        app.application,
        buffers=service.buffers,
        ssl=ssl,
        admit=app.admit,
    )
    grpc = GrpcServer(service, *_protection(service, config, tls, "grpc"))
    watching: asyncio.Future[Any] | None = None
    try:
        http_port = await http.start(config.host, config.http_port)
        grpc_port = grpc.listen(config.host, config.grpc_port, "gRPC")
        # Only now, so that whoever is told that the process is ready can connect.
        await service.watch.refresh()
        logs = [service.access_log.run()] if service.access_log is not None else []
        watching = asyncio.gather(service.watch.run(), service.metrics.keep_up(), *logs)
        logger.info("listening on %s: HTTP %d, gRPC %d", config.host, http_port, grpc_port)
        yield Listening(config.host, http_port, grpc_port)
    finally:
        service.watch.begin_shutdown()
        if watching is not None:
            http.begin_drain()
            await asyncio.sleep(config.shutdown_delay_s)
        await asyncio.gather(http.stop(drain_timeout_s), grpc.stop(drain_timeout_s))
        if watching is not None:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching


def _protection(
    service: RankingService, config: ServeConfig, tls: TlsConfig | None, api: Literal["http", "grpc"]
) -> tuple[Tokens | None, TlsContext | None]:
    """Who is let in at a port, and by which certificates; the metrics count who is not."""
    tokens = None
    if config.tokens is not None:
        tokens = Tokens(config.tokens, note=partial(service.metrics.failed, api, "authorization"))
    return tokens, None if tls is None else server_context(tls, alpn=("http/1.1",) if api == "http" else ("h2",))


async def serve(
    service: RankingService,
    config: ServeConfig,
    load: Callable[[], Awaitable[object]],
    on_ready: Callable[[Listening], None] = lambda listening: None,
    tls: TlsConfig | None = None,
    on_listening: Callable[[Listening], None] = lambda listening: None,
    leave: Callable[[], Awaitable[object]] | None = None,
    page: Callable[[], Board] | None = None,
) -> None:
    """Serve until it is cancelled, or its cards fail; then finish what is in flight and close everything.

    Alone, it listens at once and says that it is not ready until the model is loaded. Beside other workers, at ports
    that it shares with them, it listens only then: requests that reach it earlier would be answered by nobody else.
    Until then `probe_port`, a private HTTP port on loopback without TLS, tells how it is.

    `load` installs the models; `on_listening` and `on_ready` are called with the ports before it and after it; `leave`
    once requests have ended: until then it follows what is wanted, and a rollout waits for it. `page` opens what the
    page at the admin port shows.

    Raises ConfigError if a port can't be bound, CardError once the cards have failed, and as `load`.
    """
    try:
        async with contextlib.AsyncExitStack() as stack:
            if leave is not None:
                stack.push_async_callback(leave)
            admin_port, probe_port = None, config.probe_port
            tokens, ssl = _protection(service, config, tls, "http")
            if config.admin_port is not None:
                admin_port = await stack.enter_async_context(
                    running_admin(service, config.host, config.admin_port, tokens=tokens, ssl=ssl, page=page)
                )
            if probe_port is None:
                listening = await stack.enter_async_context(running_server(service, config, tls))
            else:
                await stack.enter_async_context(running_admin(service, "127.0.0.1", probe_port, tokens=tokens))
                listening = Listening(config.host, config.http_port, config.grpc_port)
            on_listening(replace(listening, admin_port=admin_port))
            await load()
            settle_heap()
            if probe_port is None:
                await service.watch.refresh()
                notify_ready()
            else:
                listening = await stack.enter_async_context(running_server(service, config, tls))
            on_ready(replace(listening, admin_port=admin_port))
            await service.watch.cards_failed()
    finally:
        await asyncio.to_thread(service.close)


def run_serving(options: ServeConfig, protection: Protection) -> None:
    """Serve what the registry says, or the one version that was named, until SIGTERM or SIGINT.

    A registry, and shards, that do not answer yet are waited for.

    Raises:
        ShardrankError: if a port or a device can't be used, or the cards fail; without a registry also if the version
            must not be served.
    """
    # A thread that loads holds the interpreter for this long at most while a request waits for it.
    sys.setswitchinterval(BACKGROUND_SWITCH_INTERVAL_S)
    membership = Membership.of(options)
    service = RankingService(
        RequestLimits.model_validate(options.limits),
        expected_models=membership.agent.models,
        max_staleness_s=options.max_staleness,
    )
    member = fleet_member(options, membership, service, protection.node_tls)
    settings.check_store(options.store_place)
    scheme, note, fixed = options.scheme, "", "" if options.in_fleet else _ALONE
    if (workers := num_workers()) > 1 and not options.in_fleet:
        note = _WORKER_NOTE.format(count=workers, process=os.getpid())

    def on_listening(listening: Listening) -> None:
        host = reachable_host(listening.host)
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{listening.http_port}"
        member.address = options.advertise or url

    if options.probe_port is None:
        # A process that stands alone shares no port; a worker's are held by its supervisor.
        with reserved_ports(options, workers=0):
            pass
    traces = settings.trace_config(options, "shardrank-serve")
    service.access_log = AccessLog() if options.access_log else None
    with running_tracer(traces, service.metrics) as service.tracer, settings.recording(options, service):
        program = partial(
            serve,
            service,
            options,
            member.load,
            lambda listening: listening.announce(scheme),
            protection.tls,
            on_listening,
            member.leave,
            partial(Board, membership.open_registry, note, fixed),
        )
        # A second signal ends the process with status 1: a load that is under way can't be interrupted.
        run_until_signalled(program, lambda: os._exit(1), uvloop.new_event_loop)


def fleet_member(
    options: ServeConfig, membership: Membership, service: RankingService, node_tls: TlsClientConfig | None
) -> FleetMember:
    """Return a serving process that has not begun to load, with rows of its own or over shard nodes."""
    version, fleet = membership.version, membership.fleet
    plan = settings.read_plan(options, membership.agent.models or ())
    card_set = settings.open_card_set(options) if options.has_rows else None
    # A disk is waited for, and so are deltas, which are written to rows in this process while it serves.
    may_block = options.has_rows and (version is None or options.memory_budget_gb is not None)
    hot_rows = None
    if options.hot_rows_gb is None and not options.has_rows:
        hot_rows = default_hot_rows(options.hot_rows, total_memory_bytes(), num_workers())
    elif options.hot_rows_gb:
        hot_rows = HotRowsConfig(size_bytes=int(options.hot_rows_gb * 1e9), policy=options.hot_rows)
    config = config_of(
        ServingConfig,
        options,
        node_id=options.node_id or node_id("serve", str(options.http_port or f"pid{os.getpid()}")),
        store=membership.store,
        # Shard nodes would not know of it.
        falls_back=options.has_rows and options.takes_newest,
        stage_cpu_share=options.stage_cpu_share if version is None else 1.0,
        node_tls=node_tls,
        plan=plan,
        num_replicas=settings.num_replicas(options.ranking_replicas, card_set, may_block=may_block),
        hot_rows=hot_rows,
    )
    local = fixed = None
    if options.has_rows:
        # One shard that has all rows, whatever a fleet of shard nodes would say.
        rows = ShardNode(NodeIdentity(shard_index=0, num_shards=1, num_cards=options.cards, sharding=options.sharding))
        partition = partial(settings.partition_of, options, plan, 0, 1)
        node = settings.node_config(
            options, config.node_id, store=membership.store, stage_cpu_share=config.stage_cpu_share
        )
        actions = NodeActions(rows, fleet, partition, node, card_set=card_set)
        local = LocalRows(rows, actions, partial(settings.plan_of, options, plan, 1))
    elif version is not None:
        shards = [list(map(Address.parse, replicas.split(","))) for replicas in options.shards]
        fixed = FixedShards(shards, config_of(FleetRecord, options, num_shards=len(shards)), version)
    reopen = membership.open_registry if version is None else None
    return FleetMember(fleet, service, config, membership.agent, local, reopen, fixed)
