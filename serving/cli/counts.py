"""`shardrank counts`: how often rows were looked up, from all processes that count, merged into one file."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import click

from loader.errors import ConfigError, ExportError, cut
from serving.cli import WithExamples
from serving.cli import options as opts
from serving.cli.settings import Options, Protection, check_model, check_registry, config_of, opened_registry
from serving.config import NodeTlsSettings

if TYPE_CHECKING:
    import httpx

    from loader.access_counts import AccessCounts
    from loader.registry.fleet import FleetRegistry
    from loader.snapshot.reader import Snapshot

TOKEN_VARIABLE = "SHARDRANK_TOKEN"
_SCHEMES = ("http://", "https://")
_MAX_ANSWER_BYTES = 1 << 28
"""Of one process: more than the rows that all of its samplers count."""
_MAX_SHOWN = 200


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
@opts.option("--model NAME", "The model. With --registry the default is the only one.")
@opts.count("--version", "The version. The default, but with --shard, is the live one.")
@opts.option(
    "--snapshot",
    "The folder of the version that was counted: rows of tables that it has in parts are told by the table's own "
    "numbers, which stay right in other versions.",
    opts.FOLDER,
)
@opts.option("--out", "The file to write, safetensors.", opts.WRITABLE_FILE, required=True)
@opts.settings_options(NodeTlsSettings, "node_ca", "node_cert", "node_key", "tls_role")
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
      shardrank counts --shard 10.0.0.7:7000 --shard 10.0.0.9:7000 --model films --version 3 --out counts.safetensors
      shardrank counts --server http://127.0.0.1:8080 --model films --out films-counts.safetensors
    """
    from loader.access_counts import write_access_counts
    from loader.snapshot.reader import Snapshot

    if bool(options["shards"] or options["servers"]) == (options["registry"] is not None):
        raise click.UsageError("Name who has counted: either --registry, or --shard and --server.")
    folder = options["snapshot"]
    snapshot = None if folder is None else Snapshot.open(folder, verify=False)
    found, num_processes = asyncio.run(_gathered(options))
    if not any(table.keys.size for table in found.values()):
        raise click.ClickException("no lookup was counted yet: a process counts one batch in some hundred")
    found = found if snapshot is None else join_parts(snapshot, found)
    write_access_counts(options["out"], found)
    for name, table in found.items():
        click.echo(f"{name}: {table.keys.size} rows, about {table.total:.3g} lookups")
    click.echo(f"wrote {options['out']}: what {num_processes} process{'es' * (num_processes > 1)} counted")


def join_parts(snapshot: Snapshot, found: dict[str, AccessCounts]) -> dict[str, AccessCounts]:
    """Return counts by the tables that features see, of those that a version has in parts by popularity.

    Lookups of pruned rows are left out and printed: all of them read one row, so which they were is not known.

    Raises:
        ExportError: they are not of this version.
    """
    import numpy as np

    from loader.access_counts import AccessCounts

    spec = snapshot.spec
    sizes = {table.name: table.num_embeddings for table in spec.stored_tables}
    if (counted := {name: table.limit for name, table in found.items()}) != sizes:
        raise ExportError(f"--snapshot {snapshot.path}: rows by table are {cut(sizes)}, counted were {cut(counted)}")
    joined = dict(found)
    for table in (one for one in spec.divided if one.by == "popularity"):
        classes = snapshot.row_classes(table.name).classes() if table.num_classes > 1 else None
        lookups = np.zeros(table.num_embeddings)
        for number, part in enumerate([joined.pop(name) for name in table.parts]):
            rows = np.arange(table.num_embeddings) if classes is None else np.flatnonzero(classes == number)
            is_known = part.keys < rows.size
            lookups[rows[part.keys[is_known]]] = part.counts[is_known]
            if not is_known.all():
                lost = part.counts[~is_known].sum()
                click.echo(f"{table.name}: about {lost:.3g} more lookups of pruned rows, not known of which")
        joined[table.name] = AccessCounts.from_rows(lookups)
    return joined


async def _gathered(options: Options) -> tuple[dict[str, AccessCounts], int]:
    """Return how often rows were looked up, by table, and how many processes counted it."""
    import ssl
    from urllib.parse import quote

    import httpx

    from loader.access_counts import merged_by_table
    from router.shard_client import ShardClient
    from shard_node.wire.address import Address
    from shard_node.wire.tls import client_context

    async with AsyncExitStack() as stack:
        model, version, timeout_s = options["model"], options["version"], options["timeout_s"]
        shards = [address for given in options["shards"] for address in given.split(",")]
        servers = list(options["servers"])
        if options["registry"] is not None:
            check_registry(options["registry"])
            async with opened_registry(options["registry"]) as fleet:
                model, version, shards, servers = await _of_fleet(fleet, model, version)
        config = Protection.of(config_of(NodeTlsSettings, options)).node_tls
        if model is None or (shards and version is None):
            raise click.UsageError("--server needs --model, and --shard needs --version, too.")
        if wrong := [url for url in servers if not url.startswith(_SCHEMES)]:
            raise click.UsageError(f"--server {wrong[0]}: expected http://host:port or https://host:port.")
        tls = None if config is None else client_context(config)
        clients = [ShardClient(Address.parse(one), connect_timeout_s=timeout_s, tls=tls) for one in shards]
        for client in clients:
            stack.push_async_callback(client.close)
        authority = ssl.create_default_context(cafile=options["server_ca"] and str(options["server_ca"]))
        headers = {} if options["token"] is None else {"Authorization": f"Bearer {options['token']}"}
        http = await stack.enter_async_context(httpx.AsyncClient(verify=authority, headers=headers, timeout=timeout_s))
        path = f"/v1/models/{quote(model, safe='')}/access-counts?version={version or 0}"
        counted = await asyncio.gather(
            *(client.counts(model, version, timeout_s) for client in clients),
            *(_server_counts(http, url.rstrip("/") + path) for url in servers),
        )
        sizes = [{name: table.limit for name, table in by_table.items()} for by_table in counted if by_table]
        if any(size != sizes[0] for size in sizes):
            raise click.ClickException(f"counts of different tables can't be added: {cut(sizes)}")
        return merged_by_table(counted), len(counted)


async def _of_fleet(
    fleet: FleetRegistry, model: str | None, version: int | None
) -> tuple[str, int, list[str], list[str]]:
    """Return a model, its live version if none was named, and the addresses of who has it."""
    wanted = await fleet.wanted()
    if model is None:
        if len(wanted) != 1:
            raise click.UsageError(
                f"Name one of the fleet's models with --model: {', '.join(sorted(wanted)) or 'none'}."
            )
        (model,) = wanted
    await check_model(fleet, model)
    if version is None:
        version = wanted[model].live if model in wanted else None
        if version is None:
            raise click.UsageError(f"--model {model}: the fleet has no live version of it; name one with --version.")
    nodes = await fleet.nodes()
    having = [node for node in nodes if (report := node.report(model, version)) and report.state == "ready"]
    shards = [node.address for node in having if node.kind == "shard"]
    servers = [node.address for node in having if node.kind == "serving"]
    if not shards and not servers:
        loaded = {report.version for node in nodes for report in node.versions if report.model == model}
        raise ConfigError(f"no process of the fleet has version {version} of {model!r} ready; it has {sorted(loaded)}")
    return model, version, shards, [url if url.startswith(_SCHEMES) else f"http://{url}" for url in servers]


async def _server_counts(client: httpx.AsyncClient, url: str) -> dict[str, AccessCounts]:
    """Return what a serving process has counted. Raises NodeUnavailableError, RemoteError."""
    import httpx

    from loader.access_counts import decode_access_counts
    from serving.errors import printable
    from shard_node.errors import NodeUnavailableError, RemoteError

    data = bytearray()
    try:
        async with client.stream("GET", url) as answer:
            async for piece in answer.aiter_bytes():
                data += piece
                if len(data) > _MAX_ANSWER_BYTES:
                    raise RemoteError(f"{url}: the answer has more than {_MAX_ANSWER_BYTES} bytes")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NodeUnavailableError(f"{url}: {str(error) or type(error).__name__}") from error
    if not answer.is_success:
        text = printable(data[: 4 * _MAX_SHOWN].decode(errors="replace"), _MAX_SHOWN)
        raise RemoteError(f"{url}: HTTP status {answer.status_code}: {text}")
    try:
        return decode_access_counts(bytes(data), url)
    except ExportError as error:
        raise RemoteError(f"malformed answer: {error}") from error
