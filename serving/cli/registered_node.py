"""A shard node of a fleet: it holds what the registry wants of it, and says so there."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from pydantic import Field

from loader.errors import RegistryUnavailableError
from loader.manifest import Frozen, Name
from loader.progress import BACKGROUND_SWITCH_INTERVAL_S
from loader.registry.records import FleetRecord, NodeId
from serving.cli.options import Sharding
from shard_node.address import Address
from shard_node.cuda.card_set import CardOptions, CardSet
from shard_node.tls import TlsConfig, server_context

if TYPE_CHECKING:
    from loader.manifest import ModelSpec
    from loader.registry.typed import FleetRegistry
    from shard_node.agent import Agent
    from shard_node.node import Partition, ShardNode
    from shard_node.node_agent import NodeActions, NodeConfig
    from shard_node.stager import PlanOf

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 5.0
"""How long SIGTERM lets requests in flight end."""
_JOIN_RETRY_S = 0.5
_ANY_HOST = frozenset({"0.0.0.0", "::"})


class RegisteredNodeConfig(Frozen):
    """A shard node as its command line says it.

    Attributes:
        registry: URL of the fleet's registry.
        store: the folder that holds `<model>/<version>/` snapshots.
        models: only these; empty for all that the registry names.
        shard_index, num_shards, cards, sharding, replicate_bytes: which rows.
        listen: where it listens.
        advertise: where routers reach it; None for the first address that it listens on.
        node_id: stable over restarts; None for one made of shard, host and port.
        threads: that pool.
        verify: compare SHA-256 of row files.
        device: where rows lie, as `--device` has it.
        card_options: what a version may take of the cards, if that is not the CPU.
        tls: what routers at TCP addresses must speak; None for plain text.
        memory_cap_bytes, memory_budget_bytes, stage_cpu_share, stage_bytes_per_s: as of `NodeConfig`.
    """

    registry: str
    store: Path
    models: tuple[Name, ...]
    shard_index: int = Field(ge=0)
    num_shards: int = Field(ge=1, le=1024)
    cards: int = Field(ge=1)
    sharding: Sharding
    replicate_bytes: int = Field(ge=0)
    listen: tuple[Address, ...] = Field(min_length=1)
    advertise: Address | None
    node_id: NodeId | None
    threads: int = Field(ge=1)
    verify: bool
    device: str = "cpu"
    card_options: CardOptions = CardOptions()
    tls: TlsConfig | None = None
    memory_cap_bytes: int | None
    memory_budget_bytes: int | None
    stage_cpu_share: float
    stage_bytes_per_s: float | None


def run_registered_node(config: RegisteredNodeConfig) -> None:
    """Serves until SIGTERM or SIGINT; then leaves the fleet, ends what is in flight, and returns.

    Raises:
        FleetMismatchError: it divides rows otherwise than its fleet.
        AddressError: it can't listen.
        TlsConfigError: a file of `tls` can't be read or does not fit.
        ShardNodeError: the devices can't be had.
        RegistryError: the URL is none, or a record can't be read. A registry that does not answer is waited for.
        CardError: the cards have failed; only a new process can use them.
    """
    import torch
    import uvloop

    from serving.fleet.process import StopRequestedError, run_until_signalled
    from shard_node.node import NodeIdentity, ShardNode

    torch.set_num_threads(1)  # as in the static form
    sys.setswitchinterval(BACKGROUND_SWITCH_INTERVAL_S)
    identity = NodeIdentity(
        shard_index=config.shard_index,
        num_shards=config.num_shards,
        num_cards=config.cards,
        sharding=config.sharding,
    )
    card_set = CardSet.open(config.device, config.cards, config.card_options)
    node = ShardNode(identity)
    try:
        run_until_signalled(lambda: _program(config, node, card_set), loop_factory=uvloop.new_event_loop)
    except StopRequestedError as stop:
        logger.info("stopped by %s", stop)
    finally:
        node.close()


async def _program(config: RegisteredNodeConfig, node: ShardNode, card_set: CardSet | None) -> None:
    from loader.memory import settle_heap
    from loader.registry.opening import open_registry
    from loader.registry.typed import FleetRegistry
    from shard_node.agent import Agent, AgentConfig
    from shard_node.card_watch import watch_cards
    from shard_node.node_agent import NodeActions
    from shard_node.server import NodeServer, ServerLimits

    # Where a disk or a card may have to be waited for, the event loop never pools by itself.
    mapped = {} if config.memory_budget_bytes is None and card_set is None else {"max_inline_bytes": 0}
    registry = open_registry(config.registry)
    tls = None if config.tls is None else server_context(config.tls)
    server = NodeServer(node, ServerLimits(threads=config.threads, **mapped), tls=tls)
    try:
        await server.start(config.listen)
        for address in server.addresses:
            click.echo(f"shard {config.shard_index}/{config.num_shards} listens on {address}")
        fleet = FleetRegistry(registry)
        await _join(fleet, config)
        node_config = _node_config(config, server.addresses)
        actions = NodeActions(node, fleet, _plan_of(config), node_config, card_set=card_set)
        agent = Agent(fleet, actions, AgentConfig(models=config.models or None))
        settle_heap()
        cards = None if card_set is None else card_set.cards
        await _serve(watch_cards(node, cards), agent, actions, server.drain)
    finally:
        await server.close()
        await registry.close()


async def _serve(
    watch: Coroutine[Any, Any, NoReturn],
    agent: Agent,
    actions: NodeActions,
    drain: Callable[[float], Awaitable[bool]],
) -> None:
    running, watching = asyncio.create_task(agent.run()), asyncio.create_task(watch)
    try:
        ended, _ = await asyncio.wait([running, watching], return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        watching.cancel()
        # First nobody new is sent here, then those who are here are asked to go, then what they wait for is ended.
        await agent.leave()
        await drain(DRAIN_TIMEOUT_S)
        running.cancel()
        await asyncio.wait([running])
        await actions.close()


async def _join(fleet: FleetRegistry, config: RegisteredNodeConfig) -> None:
    from shard_node.node_agent import join_fleet

    record = FleetRecord(num_shards=config.num_shards, sharding=config.sharding, replicate_bytes=config.replicate_bytes)
    told = False
    while True:
        try:
            await join_fleet(fleet, record)
        except RegistryUnavailableError as error:
            if not told:
                logger.warning("waits for the registry: %s", error)
            told = True
            await asyncio.sleep(_JOIN_RETRY_S)
        else:
            return


def _plan_of(config: RegisteredNodeConfig) -> PlanOf:
    from router.plan import Plan

    def plan_of(spec: ModelSpec) -> tuple[Partition, str]:
        plan = Plan.make(spec, config.num_shards, config.sharding, config.cards, config.replicate_bytes)
        return plan.partition(config.shard_index), plan.digest

    return plan_of


def _node_config(config: RegisteredNodeConfig, bound: Sequence[Address]) -> NodeConfig:
    from shard_node.node_agent import NodeConfig

    address = config.advertise or advertised(bound[0])
    return NodeConfig(
        node_id=config.node_id or default_node_id(config.shard_index, bound[0]),
        address=str(address),
        store=config.store,
        replicate_bytes=config.replicate_bytes,
        verify=config.verify,
        memory_cap_bytes=config.memory_cap_bytes,
        memory_budget_bytes=config.memory_budget_bytes,
        stage_cpu_share=config.stage_cpu_share,
        stage_bytes_per_s=config.stage_bytes_per_s,
    )


def advertised(bound: Address) -> Address:
    """Where others reach what is bound: every interface stands for this host's name, a socket for its whole path."""
    if bound.is_unix:
        return Address(path=str(Path(bound.path).absolute()))
    return Address(host=socket.gethostname(), port=bound.port) if bound.host in _ANY_HOST else bound


def default_node_id(shard_index: int, bound: Address) -> str:
    """`shard-<index>-<host>-<port or name of the socket>`."""
    place = Path(bound.path).stem if bound.is_unix else str(bound.port)
    text = f"shard-{shard_index}-{socket.gethostname()}-{place}"
    return "".join(one if one.isascii() and (one.isalnum() or one in "_.:-") else "_" for one in text)[:200]
