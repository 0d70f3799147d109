"""`shardrank shard-node`: one node's share of a snapshot's rows, behind the wire protocol."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from serving.cli.devices import card_options, device_options, open_card_set
from serving.cli.examples import WithExamples
from serving.cli.options import (
    FiniteRange,
    ShardNumber,
    cards_option,
    member_options,
    memory_budget_option,
    replicate_option,
    sharding_option,
    verify_option,
)
from serving.cli.protection import Protection, tls_options, warn_if_node_is_open
from serving.cli.snapshots import SnapshotChoice

if TYPE_CHECKING:
    from serving.cli.registered_node import RegisteredNodeConfig
    from shard_node.address import Address
    from shard_node.node import ShardNode
    from shard_node.server import ServerLimits
    from shard_node.tls import TlsConfig

logger = logging.getLogger(__name__)

_REGISTERED_ONLY = frozenset({"advertise", "node_id", "max_memory_gb", "stage_cpu_share", "stage_mb_per_s"})


@click.command("shard-node", cls=WithExamples)
@member_options
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
@click.option(
    "--advertise",
    metavar="ADDRESS",
    envvar="SHARDRANK_ADVERTISE",
    help="With --registry: where routers reach this node. Default: the first address that it listens on.",
)
@click.option(
    "--node-id",
    metavar="NAME",
    envvar="SHARDRANK_NODE_ID",
    help="With --registry: the node's name, the same after a restart. Default: made of shard, host and port.",
)
@tls_options("CAs of routers: only who shows a certificate of theirs is let in. Needed with --tls-cert.")
@cards_option(1)
@sharding_option
@replicate_option
@memory_budget_option
@device_options
@click.option(
    "--max-memory-gb",
    type=FiniteRange(min=0),
    metavar="GB",
    help="With --registry: RAM for the rows of all versions together, in 10^9 bytes. A version beyond it is refused "
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
@click.option(
    "--stage-mb-per-s",
    type=FiniteRange(0, min_open=True),
    metavar="MB",
    help="With --registry: read at most this much of a version in a second, in 10^6 bytes.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    metavar="N",
    help="Threads that pool rows. With GPUs each waits for one batch at a time, and a card takes two at once.",
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
    tls = _tls(options)
    if _is_registered(ctx):
        from serving.cli.registered_node import run_registered_node

        config = _registered(options, tls)
        warn_if_node_is_open(config.listen, tls)
        run_registered_node(config)
        return
    from shard_node.address import Address

    models = options["models"]
    if len(models) > 1:
        raise click.UsageError("Several --model need --registry.")
    addresses = [Address.parse(text) for text in options["listen"]]
    model = models[0] if models else None
    folder = SnapshotChoice(options["store"], model, options["version"], options["snapshot"]).folder()
    warn_if_node_is_open(addresses, tls)
    node = _load(folder, options)
    _serve(node, addresses, options["threads"], tls)


def _is_registered(ctx: click.Context) -> bool:
    """Whether the node belongs to a fleet. Raises UsageError for flags of the other form."""
    given = {name for name in ctx.params if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE}
    static = sorted(given & {"version", "snapshot"})
    if ctx.params["registry"] is None or (static and "registry" not in given):
        if "registry" not in given and (wrong := sorted(given & _REGISTERED_ONLY)):
            raise click.UsageError(f"{_flags(wrong)} need --registry.")
        return False
    if static:
        raise click.UsageError(f"{_flags(static)} can't be given with --registry: the registry says what is held.")
    if ctx.params["store"] is None:
        raise click.UsageError("--registry needs --store.")
    return True


def _flags(names: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _tls(options: dict[str, Any]) -> TlsConfig | None:
    """Raises UsageError if nobody would be kept out, and TlsConfigError."""
    tls = Protection.of(options).tls
    if tls is not None and tls.client_ca is None:
        raise click.UsageError("--tls-cert needs --tls-client-ca: certificates are all that keeps strangers out here.")
    return tls


def _registered(options: dict[str, Any], tls: TlsConfig | None) -> RegisteredNodeConfig:
    """Raises AddressError and UsageError, naming what can't be."""
    from pydantic import ValidationError

    from serving.cli.registered_node import RegisteredNodeConfig
    from shard_node.address import Address

    index, count = options["shard"]
    advertise, rate = options["advertise"], options["stage_mb_per_s"]
    same = (
        "registry",
        "store",
        "models",
        "cards",
        "sharding",
        "replicate_bytes",
        "node_id",
        "threads",
        "verify",
        "device",
    )
    settings = {name: options[name] for name in (*same, "stage_cpu_share")} | {
        "shard_index": index,
        "num_shards": count,
        "tls": tls,
        "listen": tuple(Address.parse(text) for text in options["listen"]),
        "advertise": None if advertise is None else Address.parse(advertise),
        "memory_cap_bytes": _bytes(options["max_memory_gb"]),
        "memory_budget_bytes": _bytes(options["memory_budget_gb"]),
        "card_options": card_options(options),
        "stage_bytes_per_s": None if rate is None else rate * 1e6,
    }
    try:
        return RegisteredNodeConfig.model_validate(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise click.UsageError(f"{place}: {first['msg']}, not {first['input']!r}") from error


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * 1e9)


def _load(folder: Path, options: dict[str, Any]) -> ShardNode:
    """A node with its rows loaded and live. Raises as `Snapshot.open`, `Plan.make`, `load_tables`, `open_card_set`."""
    from loader.reader import Snapshot
    from router.plan import Plan
    from shard_node.loading import load_tables
    from shard_node.node import ShardNode

    index, count = options["shard"]
    budget_bytes = _bytes(options["memory_budget_gb"])
    card_set = open_card_set(options)
    snapshot = Snapshot.open(folder, verify=options["verify"])
    plan = Plan.make(snapshot.spec, count, options["sharding"], options["cards"], options["replicate_bytes"])
    tables = load_tables(
        snapshot, plan.partition(index), plan.digest, memory_budget_bytes=budget_bytes, card_set=card_set
    )
    node = ShardNode(plan.identity(index))
    node.stage(snapshot.spec.model, snapshot.version, tables)
    node.flip(snapshot.spec.model, snapshot.version)
    for use in node.info().memory:
        logger.info("card %d: %d bytes of rows in tier %s", use.card, use.size_bytes, use.tier)
    return node


def _limits(node: ShardNode, threads: int) -> ServerLimits:
    """The server's limits: where a disk or a card may have to be waited for, the event loop never pools by itself."""
    from shard_node.server import ServerLimits

    if any(use.tier != "ram" for use in node.info().memory):
        return ServerLimits(threads=threads, max_inline_bytes=0)
    return ServerLimits(threads=threads)


def _serve(node: ShardNode, addresses: Sequence[Address], threads: int, tls: TlsConfig | None) -> None:
    """Answers routers until SIGTERM or SIGINT; then ends what is in flight, for a bounded time.

    Raises:
        CardError: the cards have failed; only a new process can use them.
    """
    import torch
    import uvloop

    from loader.memory import settle_heap
    from serving.cli.registered_node import DRAIN_TIMEOUT_S
    from serving.fleet.process import StopRequestedError, run_until_signalled
    from shard_node.card_watch import watch_cards
    from shard_node.server import NodeServer
    from shard_node.tls import server_context

    # Requests are the parallelism here: an op divided over threads waits for them, spinning, and with several
    # processes on one machine a lookup of 1 ms takes 15 ms and more.
    torch.set_num_threads(1)

    async def program() -> None:
        server = NodeServer(node, _limits(node, threads), tls=None if tls is None else server_context(tls))
        try:
            await server.start(addresses)
            settle_heap()
            for address in server.addresses:
                click.echo(f"shard {node.identity.shard_index}/{node.identity.num_shards} listens on {address}")
            await watch_cards(node)
        finally:
            await server.drain(DRAIN_TIMEOUT_S)
            await server.close()

    try:
        run_until_signalled(program, loop_factory=uvloop.new_event_loop)
    except StopRequestedError as stop:
        logger.info("stopped by %s", stop)
    finally:
        node.close()
