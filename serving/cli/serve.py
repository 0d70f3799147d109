"""`shardrank serve` and `shard-node`: the processes that answer, of one snapshot or in a fleet."""

from __future__ import annotations

import click

from serving.cli import settings
from serving.cli.configured import configured
from serving.cli.settings import Protection
from serving.config import ServeConfig, ShardNodeConfig


@configured("serve", ServeConfig)
@click.pass_context
def serve(ctx: click.Context, /, config: ServeConfig) -> None:
    """Serve models over HTTP and gRPC.

    With --registry the process belongs to a fleet: it finds the shard nodes there, serves the versions that the fleet's
    rollouts want live, and swaps them while it answers. It is ready once each model that was wanted at its start, or
    is named with --model, has a live version; loading further ones never changes that. How rows are divided is the
    fleet's to say, unless they are --local.

    Without, it serves one version. With --shard, rows are looked up on shard nodes, which must have been started with
    the same --sharding, --replicate-bytes and number of shards; without, everything is in this process and nothing is
    serialised. It is ready once the version is loaded and gives its golden scores.

    Settings that are seldom changed have no flag: docs/configuration.md names those of the file of --config.

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
    protection = Protection.of(config)
    if config.probe_port is None:
        # Of several workers the supervisor says it, once.
        settings.warn_if_open(config.host, protection)
    if config.workers > 1:
        from serving.fleet.workers import run_workers

        run_workers(config, ctx.find_root().params["log_level"])
        return
    # Only now: a supervisor of workers has no use for a server's modules, which take 1.7 s and 214 MB.
    from serving.server import run_serving

    run_serving(config, protection)


@configured("shard-node", ShardNodeConfig)
def shard_node(config: ShardNodeConfig) -> None:
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
      shardrank shard-node --snapshot models/films/3 --shard 0/1 --listen 127.0.0.1:7000 --config node.toml
    """
    from shard_node.wire.address import Address

    tls = Protection.of(config).tls
    if config.admin_listen is not None and Address.parse(config.admin_listen).is_unix:
        raise click.UsageError(f"--admin-listen {config.admin_listen}: HOST:PORT is needed.")
    from serving.shard_server import run_shard_node

    run_shard_node(config, tls)
