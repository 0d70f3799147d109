"""`shardrank serve` and `shard-node`: the processes that answer, of one snapshot or in a fleet."""

from __future__ import annotations

from typing import Any

import click

from serving.cli import WithExamples, settings
from serving.cli import options as opts
from serving.cli.settings import Protection

_ROWS = ("cards", "sharding", "replicate_bytes", "memory_budget_gb", "max_memory_gb")
_FLEET_ONLY = ("advertise", "node_id", "max_memory_gb", "stage_cpu_share", "stage_mb_per_s", "local", "max_staleness")
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
    if options["probe_port"] is None:
        # Of several workers the supervisor says it, once.
        settings.warn_if_open(options["host"], protection)
    if options["workers"] > 1:
        from serving.fleet.workers import run_workers

        run_workers(options, in_fleet=in_fleet, log_level=ctx.find_root().params["log_level"])
        return
    # Only now: a supervisor of workers has no use for a server's modules, which take 1.7 s and 214 MB.
    from serving.server import run_serving

    run_serving(options, in_fleet=in_fleet, protection=protection)


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
    from shard_node.wire.address import Address

    tls = Protection.of(options).tls
    if tls is not None and tls.client_ca is None:
        raise click.UsageError("--tls-cert needs --tls-client-ca: certificates are all that keeps strangers out here.")
    in_fleet = settings.belongs_to_fleet(ctx, _FLEET_ONLY)
    if options["admin_listen"] is not None and Address.parse(options["admin_listen"]).is_unix:
        raise click.UsageError(f"--admin-listen {options['admin_listen']}: HOST:PORT is needed.")
    from serving.shard_server import run_shard_node

    run_shard_node(options, in_fleet=in_fleet, tls=tls)
