"""`shardrank counts`: how often rows were looked up, from all processes that count, merged into one file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import click

from serving.cli import WithExamples
from serving.cli import options as opts
from serving.cli.settings import Options, Protection, opened_registry

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from loader.registry.fleet import FleetRegistry
    from loader.snapshot.reader import Snapshot
    from shard_node.access_counts import CountedPart
    from shard_node.wire.client import ShardClient
    from shard_node.wire.messages import CountsRequest

Ask: TypeAlias = "Callable[[CountsRequest], Awaitable[Sequence[CountedPart]]]"
"""Asks one process: what each place in it that answers lookups has counted."""


class Counted(NamedTuple):
    """Rows of a table that were looked up, uint32 [n] and ascending, how often each, float32 [n], by estimate."""

    rows: npt.NDArray[np.uint32]
    lookups: npt.NDArray[np.float32]
    num_embeddings: int


TOKEN_VARIABLE = "SHARDRANK_TOKEN"
_SCHEMES = ("http://", "https://")


@click.command(cls=WithExamples)
@opts.option(
    "--shard ADDRESS[,ADDRESS...]",
    "Shard nodes to ask: all shards, and all replicas of each, since each counts what it answers. Repeatable.",
    multiple=True,
    name="shards",
)
@opts.option(
    "--server URL",
    "A serving process with rows in its own memory, such as http://10.0.0.5:8080. Repeatable.",
    multiple=True,
    name="servers",
)
@opts.registry_option
@opts.switch("--no-servers", "With --registry: ask shard nodes alone, not the serving processes.")
@opts.option("--model NAME", "The model; default: the only one.")
@opts.count("--version", "The version; default: the live one.")
@opts.option(
    "--snapshot",
    "The folder of the version that was counted: rows of tables that it has in parts are told by the table's own "
    "numbers, which stay right in other versions.",
    opts.EXISTING_FOLDER,
)
@opts.option("--out", "The file to write, safetensors.", opts.WRITABLE_FILE, required=True)
@opts.option("--node-ca", "Speak TLS to shard nodes at TCP addresses, with certificates of these CAs.", opts.FILE)
@opts.option("--node-cert", "Certificate to show to shard nodes.", opts.FILE)
@opts.option("--node-key", "Private key of --node-cert.", opts.FILE)
@opts.tls_role_option
@opts.option("--server-ca", "CAs of serving processes at https://. Default: the system's.", opts.EXISTING_FILE)
@opts.option(
    "--token TOKEN", "For serving processes: one with the right `admin`.", envvar=TOKEN_VARIABLE, show_envvar=True
)
@opts.option("--timeout-s S", "For each answer.", opts.FiniteRange(0.1, 600), 10.0)
def counts(**options: Any) -> None:
    """Write how often each row was looked up, for `export --counts` and `plan --counts`.

    Every process counts a sample of the lookups that it answers. All of a fleet are asked, and what they counted is
    added: by shards, by replicas, and by serving processes with rows of their own, which shard nodes never hear of. Of
    tables too large for a counter for each row these are estimates. A process that does not answer is an error.

    Of a table that is divided or pruned, processes count rows of its parts: name its version's folder with --snapshot.

    Examples:
      shardrank counts --registry redis://10.0.0.9/0 --model films --out films-counts.safetensors
      shardrank counts --shard 10.0.0.7:7000,10.0.0.8:7000 --shard 10.0.0.9:7000 --out films-counts.safetensors
      shardrank counts --server http://127.0.0.1:8080 --model films --out films-counts.safetensors
    """
    from loader.snapshot.per_row import write_access_counts

    is_named = bool(options["shards"] or options["servers"])
    if is_named == (options["registry"] is not None):
        raise click.UsageError("Name who has counted: either --registry, or --shard and --server.")
    found, num_processes = asyncio.run(_gathered(options))
    if not any(one.rows.size for one in found.values()):
        raise click.ClickException("no lookup was counted yet: a process counts one batch in some hundred")
    if options["snapshot"] is not None:
        from loader.snapshot.reader import Snapshot

        found = of_tables(Snapshot.open(options["snapshot"], verify=False), found)
    write_access_counts(
        options["out"],
        {table: (one.rows, one.lookups) for table, one in found.items()},
        {table: one.num_embeddings for table, one in found.items()},
    )
    for table, one in found.items():
        click.echo(f"{table}: {one.rows.size} rows, about {one.lookups.sum(dtype=float):.3g} lookups")
    click.echo(f"wrote {options['out']}: what {num_processes} process{'es' * (num_processes > 1)} counted")


def of_tables(snapshot: Snapshot, found: dict[str, Counted]) -> dict[str, Counted]:
    """Return counts by the tables that features see, of those that a version has in parts by popularity.

    Lookups of pruned rows are left out and told: all of them read one row, so which they were is not known.

    Raises:
        ExportError: they are not of this version.
    """
    import numpy as np

    from loader.errors import ExportError, cut

    spec = snapshot.spec
    sizes = {table.name: table.num_embeddings for table in spec.stored_tables}
    if (told := {name: one.num_embeddings for name, one in found.items()}) != sizes:
        raise ExportError(f"--snapshot {snapshot.path}: rows by table are {cut(sizes)}, counted were {cut(told)}")
    named = dict(found)
    for table in (one for one in spec.divided if one.by == "popularity"):
        counted = [named.pop(part) for part in table.parts]
        classes = snapshot.row_classes(table.name).classes() if table.num_classes > 1 else None
        lookups = np.zeros(table.num_embeddings, np.float32)
        for number, part in enumerate(counted):
            own = np.arange(table.num_embeddings) if classes is None else np.flatnonzero(classes == number)
            is_own = part.rows < own.size
            lookups[own[part.rows[is_own]]] = part.lookups[is_own]
            if not is_own.all():
                lost = part.lookups[~is_own].sum(dtype=float)
                click.echo(f"{table.name}: about {lost:.3g} more lookups of pruned rows, not known of which")
        rows = np.flatnonzero(lookups)
        named[table.name] = Counted(rows.astype(np.uint32), lookups[rows], table.num_embeddings)
    return named


async def merged_counts(ask: Sequence[Ask], model: str, version: int) -> dict[str, Counted]:
    """Add what processes have counted, a part of a table's rows after the other.

    Returns:
        By stored table.

    Raises:
        ShardrankError: one of them does not answer, or has other tables than the others.
    """
    import numpy as np

    from shard_node.access_counts import MAX_PART_ROWS, merged_lookups
    from shard_node.wire.messages import CountsRequest

    found: dict[str, Counted] = {}
    table, num_tables = 0, 1
    while table < num_tables:
        rows, lookups = [np.empty(0, np.uint32)], [np.empty(0, np.float32)]
        first_row, num_rows, name = 0, 1, ""
        while first_row < num_rows:
            request = CountsRequest(model, version, table, first_row, MAX_PART_ROWS)
            answers = await asyncio.gather(*(one(request) for one in ask))
            parts = [part for answer in answers for part in answer]
            if not parts:
                return found
            merged = merged_lookups(parts)
            at = np.flatnonzero(merged)
            rows.append((first_row + at).astype(np.uint32))
            lookups.append(merged[at].astype(np.float32))
            first_row += merged.size
            name, num_rows, num_tables = parts[0].table, parts[0].num_embeddings, parts[0].num_tables
        found[name] = Counted(np.concatenate(rows), np.concatenate(lookups), num_rows)
        table += 1
    return found


async def _gathered(options: Options) -> tuple[dict[str, Counted], int]:
    """Return what was counted, and by how many processes."""
    async with AsyncExitStack() as stack:
        model, version = options["model"], options["version"]
        shards = [address for given in options["shards"] for address in given.split(",")]
        servers = list(options["servers"])
        if options["registry"] is not None:
            async with opened_registry(options["registry"]) as fleet:
                model, version, shards, servers = await _of_fleet(fleet, model, version, not options["no_servers"])
        clients = await stack.enter_async_context(_connected(shards, options))
        if clients and (model is None or version is None):
            model, version = await _live(clients[0], model, version)
        if model is None:
            raise click.UsageError("--server needs --model.")
        ask: list[Ask] = [partial(_ask_node, client, options["timeout_s"]) for client in clients]
        ask += [_server(url, options) for url in servers]
        return await merged_counts(ask, model, version or 0), len(ask)


async def _of_fleet(
    fleet: FleetRegistry, model: str | None, version: int | None, with_servers: bool
) -> tuple[str, int, list[str], list[str]]:
    """Return a model, its live version if none was named, and the addresses of who has it."""
    wanted = await fleet.wanted()
    if model is None:
        if len(wanted) != 1:
            raise click.UsageError(
                f"Name one of the fleet's models with --model: {', '.join(sorted(wanted)) or 'none'}."
            )
        (model,) = wanted
    if version is None:
        version = wanted[model].live if model in wanted else None
        if version is None:
            raise click.UsageError(f"--model {model}: the fleet has no live version of it; name one with --version.")
    having = [
        node for node in await fleet.nodes() if (report := node.report(model, version)) and report.state == "ready"
    ]
    shards = [node.address for node in having if node.kind == "shard"]
    servers = [node.address for node in having if node.kind == "serving"] if with_servers else []
    if not shards and not servers:
        raise click.UsageError(f"--registry: no process of the fleet has version {version} of {model!r}.")
    return model, version, shards, [url if url.startswith(_SCHEMES) else f"http://{url}" for url in servers]


@asynccontextmanager
async def _connected(addresses: Sequence[str], options: Options) -> AsyncIterator[list[ShardClient]]:
    from shard_node.wire.address import Address
    from shard_node.wire.client import ShardClient
    from shard_node.wire.tls import client_context

    config = Protection.of(options).node_tls
    tls = None if config is None else client_context(config)
    clients = [
        ShardClient(Address.parse(address), connect_timeout_s=options["timeout_s"], tls=tls) for address in addresses
    ]
    try:
        yield clients
    finally:
        for client in clients:
            await client.close()


async def _live(client: ShardClient, model: str | None, version: int | None) -> tuple[str, int]:
    """Return the model, and its live version unless one is named, that a node tells of."""
    told = await client.info()
    live = {one.model: one.version for one in told.versions if one.state == "live"}
    if model is None:
        if len(live) != 1:
            raise click.UsageError(
                f"Name the model with --model; {client.address} has {', '.join(sorted(live)) or 'none'}."
            )
        (model,) = live
    if version is None and model not in live:
        raise click.UsageError(f"--model {model}: {client.address} has no live version of it.")
    return model, live[model] if version is None else version


async def _ask_node(client: ShardClient, timeout_s: float, request: CountsRequest) -> list[CountedPart]:
    return [await client.counts(request, time.monotonic() + timeout_s)]


def _server(url: str, options: Options) -> Ask:
    """Return who asks a serving process."""
    import ssl

    from serving.api.access_counts import ask_counts

    if not url.startswith(_SCHEMES):
        raise click.UsageError(f"--server {url}: expected http://host:port or https://host:port.")
    ca = options["server_ca"]
    tls = None if ca is None else ssl.create_default_context(cafile=str(ca))

    async def ask(request: CountsRequest) -> list[CountedPart]:
        return await asyncio.to_thread(ask_counts, url, request, options["timeout_s"], options["token"], tls)

    return ask
