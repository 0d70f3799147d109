"""`shardrank shard-node`: one node's share of a snapshot's rows, behind the wire protocol."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from serving.cli.examples import WithExamples
from serving.cli.options import (
    Sharding,
    ShardNumber,
    cards_option,
    memory_budget_option,
    replicate_option,
    sharding_option,
    snapshot_options,
    verify_option,
)
from serving.cli.snapshots import SnapshotChoice

if TYPE_CHECKING:
    from shard_node.address import Address
    from shard_node.node import ShardNode
    from shard_node.server import ServerLimits

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 5.0
"""How long SIGTERM lets requests in flight end."""


@click.command("shard-node", cls=WithExamples)
@snapshot_options
@click.option(
    "--shard",
    "shard",
    type=ShardNumber(),
    required=True,
    metavar="I/N",
    help="Which shard of how many this node serves, counted from 0.",
)
@click.option(
    "--listen",
    multiple=True,
    required=True,
    metavar="ADDRESS",
    help="host:port, or unix:/path of a socket. May be given several times.",
)
@cards_option(1)
@sharding_option
@replicate_option
@memory_budget_option
@click.option(
    "--threads", type=click.IntRange(1, 256), default=1, show_default=True, metavar="N", help="Threads that pool rows."
)
@verify_option
def shard_node(
    store: Path | None,
    model: str | None,
    version: int | None,
    snapshot: Path | None,
    shard: tuple[int, int],
    listen: tuple[str, ...],
    cards: int,
    sharding: Sharding,
    replicate_bytes: int,
    memory_budget_gb: float | None,
    threads: int,
    verify: bool,
) -> None:
    """Serve one shard of a snapshot's rows to routers.

    All nodes and `shardrank serve` must be given the same --sharding, --replicate-bytes and number of shards; a
    node that does not fit is refused, not asked. The protocol has no password: listen on a private network or a
    Unix socket. SIGTERM ends the requests in flight and exits 0.

    Examples:
      shardrank shard-node --store models --model films --shard 0/2 --listen unix:/run/shardrank/0.sock
      shardrank shard-node --store models --model films --shard 1/2 --listen 10.0.0.7:7000 --cards 4
      shardrank shard-node --snapshot models/films/3 --shard 0/1 --listen 127.0.0.1:7000 --memory-budget-gb 2
    """
    from shard_node.address import Address

    addresses = [Address.parse(text) for text in listen]
    folder = SnapshotChoice(store, model, version, snapshot).folder()
    node = _load(folder, shard, cards, sharding, replicate_bytes, memory_budget_gb, verify)
    _serve(node, addresses, threads)


def _load(
    folder: Path,
    shard: tuple[int, int],
    cards: int,
    sharding: Sharding,
    replicate_bytes: int,
    memory_budget_gb: float | None,
    verify: bool,
) -> ShardNode:
    """A node with its rows in memory and live. Raises as `Snapshot.open`, `Plan.make` and `load_tables`."""
    from loader.reader import Snapshot
    from router.plan import Plan
    from shard_node.loading import load_tables
    from shard_node.node import ShardNode

    index, count = shard
    snapshot = Snapshot.open(folder, verify=verify)
    plan = Plan.make(snapshot.spec, count, sharding, cards, replicate_bytes)
    budget_bytes = None if memory_budget_gb is None else int(memory_budget_gb * 1e9)
    tables = load_tables(snapshot, plan.partition(index), plan.digest, memory_budget_bytes=budget_bytes)
    node = ShardNode(plan.identity(index))
    node.stage(snapshot.spec.model, snapshot.version, tables)
    node.flip(snapshot.spec.model, snapshot.version)
    for use in node.info().memory:
        logger.info("card %d: %d bytes of rows in tier %s", use.card, use.size_bytes, use.tier)
    return node


def _limits(node: ShardNode, threads: int) -> ServerLimits:
    """The server's limits: where rows may have to be read from disk, the event loop never pools by itself."""
    from shard_node.server import ServerLimits

    if any(use.tier == "mapped" for use in node.info().memory):
        return ServerLimits(threads=threads, max_inline_bytes=0)
    return ServerLimits(threads=threads)


def _serve(node: ShardNode, addresses: Sequence[Address], threads: int) -> None:
    """Answers routers until SIGTERM or SIGINT; then ends what is in flight, for a bounded time."""
    import asyncio

    import uvloop

    from serving.fleet.signals import StopRequestedError, run_until_signalled
    from shard_node.server import NodeServer

    async def program() -> None:
        server = NodeServer(node, _limits(node, threads))
        try:
            await server.start(addresses)
            for address in server.addresses:
                click.echo(f"shard {node.identity.shard_index}/{node.identity.num_shards} listens on {address}")
            await asyncio.Event().wait()
        finally:
            await server.drain(DRAIN_TIMEOUT_S)
            await server.close()

    try:
        run_until_signalled(program, loop_factory=uvloop.new_event_loop)
    except StopRequestedError as stop:
        logger.info("stopped by %s", stop)
    finally:
        node.close()
