"""A shard node: it follows its registry, answers routers, and ends in order on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final

import torch
import uvloop

from loader.errors import ConfigError, RegistryUnavailableError
from loader.memory import settle_heap
from loader.progress import BACKGROUND_SWITCH_INTERVAL_S
from loader.registry.fleet import FleetRecord, FleetRegistry
from loader.snapshot.reader import Snapshot
from router.plan import REPLICATED
from router.plan_file import PlanFile
from serving.cli import settings
from serving.cli.settings import config_of
from serving.config import ShardNodeConfig
from serving.fleet.process import notify_ready, run_until_signalled, until_ready
from serving.fleet.workers import Membership, node_id, reachable_host
from serving.observe.logs import announce
from shard_node.agent.agent import Agent
from shard_node.agent.node_agent import NodeActions, join_fleet, watch_cards
from shard_node.bags import TableLayout
from shard_node.buckets import NodeIdentity, Partition
from shard_node.cuda.card_set import CardSet
from shard_node.engine.cpu import CpuEngine
from shard_node.node import ShardNode
from shard_node.training.row_optimizers import RowOptimizer
from shard_node.training.row_publisher import RowPublisher
from shard_node.training.trainer import Trainer, TrainerConfig
from shard_node.wire.address import Address
from shard_node.wire.requests import ServerLimits
from shard_node.wire.server import NodeServer
from shard_node.wire.tls import TlsConfig, server_context

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S: Final = 5.0
"""How long SIGTERM lets requests in flight end."""
JOIN_RETRY_S: Final = 0.5
DISK_THREADS: Final = 4
"""That pool rows of which some are read from disk."""


def run_shard_node(options: ShardNodeConfig, tls: TlsConfig | None) -> None:
    """Serve a shard of what the registry says, or of the one version that was named, until SIGTERM or SIGINT.

    Raises:
        RolloutError: it divides rows otherwise than its fleet.
        ShardrankError: an address or a device can't be used, or the cards fail; without a registry also if the version
            must not be served.
    """
    sys.setswitchinterval(BACKGROUND_SWITCH_INTERVAL_S)
    # Requests are the parallelism here: an op divided over threads waits for them, spinning, and with several processes
    # on one machine a lookup of 1 ms takes 15 ms and more.
    torch.set_num_threads(1)
    membership = Membership.of(options)
    if options.advertise:
        # What can't be is refused before a card is opened.
        Address.parse(options.advertise)
    settings.check_store(options.store_place)
    traces = settings.trace_config(options, "shardrank-shard-node")
    card_set = settings.open_card_set(options)
    sink = None
    if traces is not None:
        from shard_node.otlp import OtlpSink

        sink = OtlpSink(traces)
    (index, num_shards), division = options.shard, {"num_cards": options.cards, "sharding": options.sharding}
    node = ShardNode(NodeIdentity(shard_index=index, num_shards=num_shards, **division), sink)
    try:
        run_until_signalled(
            partial(serve_shard, options, membership, node, card_set, tls), loop_factory=uvloop.new_event_loop
        )
    finally:
        node.close()


async def serve_shard(
    options: ShardNodeConfig, membership: Membership, node: ShardNode, card_set: CardSet | None, tls: TlsConfig | None
) -> None:
    """Serve until it is cancelled; then leave the fleet and end what is in flight. Raises as `run_shard_node`.

    A node of a fleet is found when it has joined; one without a registry listens once its rows are loaded.
    """
    (index, num_shards), fleet = options.shard, membership.fleet
    is_alone, plan = membership.version is not None, settings.read_plan(options, membership.agent.models or ())
    node.problems = lambda: {"": "it has not joined its fleet yet"}
    async with AsyncExitStack() as stack:
        stack.push_async_callback(fleet.registry.close)
        # Where a lookup may have to wait for a disk or a card, the event loop never pools.
        may_wait = options.memory_budget_gb is not None or card_set is not None
        threads = options.threads or (DISK_THREADS if options.memory_budget_gb is not None else 1)
        limits = config_of(ServerLimits, options, threads=threads, **({"max_inline_bytes": 0} if may_wait else {}))
        listen = partial(_listen, stack, node, options, tls, limits)
        server, trainer, publisher = None if is_alone else await listen(), None, None
        await _join(fleet, config_of(FleetRecord, options, num_shards=num_shards))
        config = settings.node_config(
            options,
            options.node_id or ("shard" if server is None else _node_id(index, server.addresses[0])),
            address="" if server is None else _advertised(options, server),
            store=membership.store,
            stage_cpu_share=1.0 if is_alone else options.stage_cpu_share,
        )
        partition_of = trained_partition if options.train else settings.partition_of
        partition = partial(partition_of, options, plan, index, num_shards)
        actions = NodeActions(node, fleet, partition, config, card_set=card_set)
        agent = Agent(fleet, actions, membership.agent)
        node.problems = partial(actions.problems, agent)
        settle_heap()
        following = asyncio.create_task(agent.run())
        watching = asyncio.create_task(watch_cards(node, None if card_set is None else card_set.cards))
        starting = asyncio.create_task(until_ready(node.problems))
        try:
            await asyncio.wait([following, watching, starting], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                if options.train:
                    node.trainer = trainer = await asyncio.to_thread(open_trainer, options, node)
                    publisher = published_rows(options, trainer, node)
                server = server or await listen()
                notify_ready()
                await asyncio.wait([following, watching], return_when=asyncio.FIRST_COMPLETED)
            for task in (following, watching):
                if task.done():
                    task.result()
        finally:
            watching.cancel()
            starting.cancel()
            # First nobody new is sent here, then those who are here are asked to go, then what they wait for is ended.
            await agent.leave()
            if publisher is not None:
                await asyncio.to_thread(publisher.close)
            if trainer is not None:
                await asyncio.to_thread(trainer.close)
            if server is not None:
                await server.drain(DRAIN_TIMEOUT_S)
            following.cancel()
            await asyncio.wait([following, watching, starting])
            await actions.close()


def trained_partition(
    options: ShardNodeConfig, plan: PlanFile | None, index: int, num_shards: int, snapshot: Snapshot
) -> tuple[Partition, str]:
    """Return as `settings.partition_of`. Raises ConfigError for tables with copies on shards, which would diverge."""
    divided = settings.plan_of(options, plan, num_shards, snapshot)
    tables = zip(TableLayout.of(snapshot.spec).tables, divided.shard_of_bucket, strict=True)
    if copied := [table.name for table, owners in tables if owners[0] == REPLICATED]:
        raise ConfigError(
            f"--train: tables {copied} are copied to every shard, allowed is one copy: --replicate-bytes 0"
        )
    return divided.partition(index), divided.digest


def open_trainer(options: ShardNodeConfig, node: ShardNode) -> Trainer:
    """Train the rows of a node's one version. Raises ConfigError for others than rows in RAM, and as `Trainer`."""
    served = node.generations.all()
    if len(served) != 1 or not isinstance(engine := served[0].payload.engine, CpuEngine):
        names = [f"{generation.model} {generation.version}" for generation in served]
        raise ConfigError(f"--train: {names} are served here, allowed is one version, on --device cpu")
    of = {"model": served[0].model, "version": served[0].version, "shard": list(options.shard)}
    of |= {"manifest": served[0].payload.manifest_identity, "plan": served[0].payload.plan_digest}
    named = {name.removeprefix("train_"): value for name, value in options}
    config = config_of(TrainerConfig, named, optimizer=RowOptimizer(kind=options.train_optimizer, lr=options.train_lr))
    return Trainer(engine, of, config)


def published_rows(options: ShardNodeConfig, trainer: Trainer, node: ShardNode) -> RowPublisher | None:
    """Publish what is trained to a fleet, if its registry is named."""
    if options.publish_registry is None:
        return None
    generation = node.generations.all()[0]
    tables = generation.payload.engine.layout.tables
    return RowPublisher(trainer, options.publish_registry, generation.model, tables, options.publish_rows_s)


async def _listen(
    stack: AsyncExitStack, node: ShardNode, options: ShardNodeConfig, tls: TlsConfig | None, limits: ServerLimits
) -> NodeServer:
    addresses = [Address.parse(text) for text in options.listen]
    admin = None if options.admin_listen is None else Address.parse(options.admin_listen)
    reachable = [str(address) for address in (*addresses, admin) if address is not None and not address.is_loopback]
    if reachable and tls is None:
        logger.warning("listens on %s without TLS (--tls-cert): for a private network only", ", ".join(reachable))
    metrics = None
    if admin is not None:
        from serving.api.node_port import running_node_port  # only who is asked pays for it

        metrics, url = await stack.enter_async_context(running_node_port(node, admin, tls))
        announce(f"metrics: {url}")
    server = NodeServer(node, limits, tls=None if tls is None else server_context(tls), watch=metrics)
    stack.push_async_callback(server.close)
    await server.start(addresses)
    if metrics is not None:
        metrics.of(server, _advertised(options, server))
    for address in server.addresses:
        announce(f"shard {node.identity.shard_index}/{node.identity.num_shards} listens on {address}")
    return server


async def _join(fleet: FleetRegistry, division: FleetRecord) -> None:
    level = logging.WARNING
    while True:
        try:
            await join_fleet(fleet, division)
            if level == logging.DEBUG:
                logger.info("the registry answers")
            return
        except RegistryUnavailableError as error:
            logger.log(level, "waits for the registry: %s", error)
            level = logging.DEBUG
            await asyncio.sleep(JOIN_RETRY_S)


def _node_id(index: int, bound: Address) -> str:
    return node_id(f"shard-{index}", Path(bound.path).stem if bound.is_unix else str(bound.port))


def _advertised(options: ShardNodeConfig, server: NodeServer) -> str:
    """Return where others reach a node: every interface stands for this host's name, a socket for its path."""
    if options.advertise:
        return str(Address.parse(options.advertise))
    bound = server.addresses[0]
    if bound.is_unix:
        return str(Address(path=str(Path(bound.path).absolute())))
    return str(Address(host=reachable_host(bound.host), port=bound.port))
