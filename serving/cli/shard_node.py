"""`shardrank shard-node`: one node's share of the rows behind the wire protocol, of one snapshot or in a fleet."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from serving.cli import WithExamples
from serving.cli.options import (
    FiniteRange,
    cards_option,
    count,
    device_options,
    max_memory_option,
    member_options,
    memory_budget_option,
    option,
    replicate_option,
    shard_number,
    sharding_option,
    stage_share_option,
    tls_options,
    verify_option,
)
from serving.cli.settings import (
    ANY_HOST,
    Options,
    Protection,
    belongs_to_fleet,
    config_of,
    default_name,
    member_folder,
    node_config,
    node_identity,
    open_card_set,
    opened_registry,
    plan_of,
    run_until_stopped,
    to_bytes,
    warn_if_node_is_open,
)

if TYPE_CHECKING:
    from loader.registry.records import FleetRecord
    from loader.registry.typed import FleetRegistry
    from loader.snapshot.manifest import ModelSpec
    from shard_node.agent.agent import AgentConfig
    from shard_node.agent.node_agent import NodeConfig
    from shard_node.cuda.card_set import CardSet
    from shard_node.node import Partition, ShardNode
    from shard_node.wire.address import Address
    from shard_node.wire.server import NodeServer
    from shard_node.wire.tls import TlsConfig

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 5.0
"""How long SIGTERM lets requests in flight end."""
_JOIN_RETRY_S = 0.5
_FLEET_ONLY = ("advertise", "node_id", "max_memory_gb", "stage_cpu_share", "stage_mb_per_s")


@click.command("shard-node", cls=WithExamples)
@member_options
@option(
    "--shard", "Which shard of how many this node serves, counted from 0.", shard_number, metavar="I/N", required=True
)
@option(
    "--listen",
    "host:port, or unix:/path of a socket. May be given several times.",
    metavar="ADDRESS",
    multiple=True,
    required=True,
)
@option(
    "--advertise",
    "With --registry: where routers reach this node. Default: the first address that it listens on.",
    metavar="ADDRESS",
    envvar="SHARDRANK_ADVERTISE",
)
@option(
    "--node-id",
    "With --registry: the node's name, the same after a restart. Default: made of shard, host and port.",
    metavar="NAME",
    envvar="SHARDRANK_NODE_ID",
)
@tls_options("CAs of routers: only who shows a certificate of theirs is let in. Needed with --tls-cert.")
@cards_option(1)
@sharding_option
@replicate_option
@memory_budget_option
@device_options
@max_memory_option("With --registry: ")
@stage_share_option
@option(
    "--stage-mb-per-s",
    "With --registry: read at most this much of a version in a second, in 10^6 bytes.",
    FiniteRange(0, min_open=True),
    metavar="MB",
)
@count(
    "--threads",
    "Threads that pool rows. With GPUs each waits for one batch at a time, and a card takes two at once.",
    1,
    256,
    1,
)
@verify_option
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
    in_fleet = belongs_to_fleet(ctx, _FLEET_ONLY)
    addresses = tuple(Address.parse(text) for text in options["listen"])
    if not in_fleet:
        folder = member_folder(options)
        warn_if_node_is_open(addresses, tls)
        _serve(_load(folder, options), addresses, options["threads"], tls)
        return
    member = FleetMember.of(options)
    warn_if_node_is_open(addresses, tls)
    sys.setswitchinterval(BACKGROUND_SWITCH_INTERVAL_S)
    card_set = open_card_set(options)
    node = ShardNode(node_identity(options, *options["shard"]))
    _run_node(node, lambda: _serve_in_fleet(member, node, card_set, addresses, tls))


def _load(folder: Path, options: Options) -> ShardNode:
    """A node with its rows loaded and live. Raises as `Snapshot.open`, `Plan.make`, `load_tables`, `open_card_set`."""
    from loader.snapshot.reader import Snapshot
    from shard_node.engine.loading import load_tables
    from shard_node.node import ShardNode

    index, num_shards = options["shard"]
    card_set = open_card_set(options)
    snapshot = Snapshot.open(folder, verify=options["verify"])
    plan = plan_of(options, num_shards, snapshot.spec)
    tables = load_tables(
        snapshot,
        plan.partition(index),
        plan.digest,
        memory_budget_bytes=to_bytes(options["memory_budget_gb"]),
        card_set=card_set,
    )
    node = ShardNode(plan.identity(index))
    node.stage(snapshot.spec.model, snapshot.version, tables)
    node.flip(snapshot.spec.model, snapshot.version)
    for use in node.info().memory:
        logger.info("card %d: %d bytes of rows in tier %s", use.card, use.size_bytes, use.tier)
    return node


def _run_node(node: ShardNode, program: Callable[[], Awaitable[None]]) -> None:
    """Runs the node's program until SIGTERM or SIGINT, then closes the node."""
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
    node: ShardNode, addresses: Sequence[Address], threads: int, tls: TlsConfig | None, *, may_wait: bool
) -> AsyncIterator[NodeServer]:
    """Listens while the block runs. Where a disk or a card may have to be waited for, the event loop never pools."""
    from shard_node.wire.server import NodeServer, ServerLimits
    from shard_node.wire.tls import server_context

    limits = ServerLimits(threads=threads, max_inline_bytes=0) if may_wait else ServerLimits(threads=threads)
    server = NodeServer(node, limits, tls=None if tls is None else server_context(tls))
    try:
        await server.start(addresses)
        for address in server.addresses:
            click.echo(f"shard {node.identity.shard_index}/{node.identity.num_shards} listens on {address}")
        yield server
    finally:
        await server.close()


def _serve(node: ShardNode, addresses: Sequence[Address], threads: int, tls: TlsConfig | None) -> None:
    """Answers routers until SIGTERM or SIGINT; then ends what is in flight, for a bounded time.

    Raises:
        CardError: the cards have failed; only a new process can use them.
    """
    from loader.memory import settle_heap
    from shard_node.agent.card_watch import watch_cards

    async def program() -> None:
        async with _listening(node, addresses, threads, tls, may_wait=_may_wait(node)) as server:
            settle_heap()
            try:
                await watch_cards(node)
            finally:
                await server.drain(DRAIN_TIMEOUT_S)

    _run_node(node, program)


def _may_wait(node: ShardNode) -> bool:
    """Tells whether a disk or a card may have to be waited for."""
    return any(use.tier != "ram" for use in node.info().memory)


@dataclass(frozen=True, slots=True)
class FleetMember:
    """A shard node of a fleet as its command line says it.

    Attributes:
        options: of the command.
        record: how its fleet has to divide rows.
        node: whose address and, unless it was given, node id are set once it listens.
        agent: which models it holds.
        advertise: None for the first address that it listens on.
    """

    options: Options
    record: FleetRecord
    node: NodeConfig
    agent: AgentConfig
    advertise: Address | None

    @classmethod
    def of(cls, options: Options) -> FleetMember:
        """Check the options. Raises AddressError and UsageError, naming what can't be."""
        from loader.registry.records import FleetRecord
        from shard_node.agent.agent import AgentConfig
        from shard_node.wire.address import Address

        rate, advertise = options["stage_mb_per_s"], options["advertise"]
        return cls(
            options,
            record=config_of(FleetRecord, options, num_shards=options["shard"][1]),
            node=node_config(options, options["node_id"] or "shard", stage_bytes_per_s=rate and rate * 1e6),
            agent=config_of(AgentConfig, {}, models=options["models"] or None),
            advertise=None if advertise is None else Address.parse(advertise),
        )

    def listening_on(self, bound: Address) -> NodeConfig:
        """Return the node's config with its address and id."""
        address = self.advertise or advertised(bound)
        node_id = self.options["node_id"] or default_node_id(self.options["shard"][0], bound)
        return self.node.model_copy(update={"address": str(address), "node_id": node_id})

    def partition(self, spec: ModelSpec) -> tuple[Partition, str]:
        """Return which rows of a model are this node's, and the digest of the plan that says so."""
        index, num_shards = self.options["shard"]
        plan = plan_of(self.options, num_shards, spec)
        return plan.partition(index), plan.digest


async def _serve_in_fleet(
    member: FleetMember,
    node: ShardNode,
    card_set: CardSet | None,
    addresses: Sequence[Address],
    tls: TlsConfig | None,
) -> None:
    """Serves what the fleet wants until it is cancelled; then leaves the fleet and ends what is in flight.

    Raises:
        FleetMismatchError: it divides rows otherwise than its fleet.
        AddressError: it can't listen.
        RegistryError: the URL is none, or a record can't be read. A registry that does not answer is waited for.
        CardError: the cards have failed; only a new process can use them.
    """
    from loader.memory import settle_heap
    from shard_node.agent.agent import Agent
    from shard_node.agent.card_watch import watch_cards
    from shard_node.agent.node_agent import NodeActions

    may_wait = member.node.memory_budget_bytes is not None or card_set is not None
    async with (
        opened_registry(member.options["registry"]) as fleet,
        _listening(node, addresses, member.options["threads"], tls, may_wait=may_wait) as server,
    ):
        await _join(fleet, member.record)
        config = member.listening_on(server.addresses[0])
        actions = NodeActions(node, fleet, member.partition, config, card_set=card_set)
        agent = Agent(fleet, actions, member.agent)
        settle_heap()
        running = asyncio.create_task(agent.run())
        watching = asyncio.create_task(watch_cards(node, None if card_set is None else card_set.cards))
        try:
            ended, _ = await asyncio.wait([running, watching], return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            watching.cancel()
            # First nobody new is sent here, then those who are here are asked to go, then what they wait for is ended.
            await agent.leave()
            await server.drain(DRAIN_TIMEOUT_S)
            running.cancel()
            await asyncio.wait([running])
            await actions.close()


async def _join(fleet: FleetRegistry, record: FleetRecord) -> None:
    from loader.errors import RegistryUnavailableError
    from shard_node.agent.node_agent import join_fleet

    told = False
    while True:
        try:
            return await join_fleet(fleet, record)
        except RegistryUnavailableError as error:
            if not told:
                logger.warning("waits for the registry: %s", error)
            told = True
            await asyncio.sleep(_JOIN_RETRY_S)


def advertised(bound: Address) -> Address:
    """Return where others reach what is bound: every interface stands for this host's name, a socket for its path."""
    from shard_node.wire.address import Address

    if bound.is_unix:
        return Address(path=str(Path(bound.path).absolute()))
    return Address(host=socket.gethostname(), port=bound.port) if bound.host in ANY_HOST else bound


def default_node_id(shard_index: int, bound: Address) -> str:
    """Return `shard-<index>-<host>-<port or name of the socket>`."""
    place = Path(bound.path).stem if bound.is_unix else str(bound.port)
    return default_name(f"shard-{shard_index}-{socket.gethostname()}-{place}")
