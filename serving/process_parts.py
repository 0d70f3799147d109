"""What serving processes and shard nodes are made of, by their settings: cards, plans, certificates, traces."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterator
from typing import TypeAlias

import click

from loader.registry.fleet import FleetRecord
from loader.snapshot.reader import Snapshot
from router.errors import PlanError
from router.hot_rows import HotRowsConfig
from router.outliers import ReplicaPolicy
from router.plan import Plan
from router.plan_file import PlanFile
from serving.api.tokens import read_tokens
from serving.cli.settings import config_of
from serving.config import ServeConfig, ShardNodeConfig
from serving.fleet.membership import Membership
from serving.observe.recording import RecordingConfig, RequestRecorder
from serving.rank.service import RankingService
from serving.versions.loaded_version import LoadOptions
from serving.versions.warming import Warming
from shard_node.agent.node_agent import NodeActions, NodeConfig
from shard_node.buckets import NodeIdentity, Partition
from shard_node.cuda.card_set import CardOptions, CardSet
from shard_node.node import ShardNode
from shard_node.tracing import TraceConfig
from shard_node.wire.address import Address
from shard_node.wire.tls import TlsClientConfig, TlsConfig, client_context, server_context

logger = logging.getLogger(__name__)

Config: TypeAlias = ServeConfig | ShardNodeConfig


def to_bytes(gigabytes: float | None) -> int | None:
    """Return 10^9 bytes for each gigabyte."""
    return None if gigabytes is None else int(gigabytes * 1e9)


def open_card_set(config: Config) -> CardSet | None:
    """Open the cards, as far as one version may use them; None for the CPU. Raises as `CardSet.open`."""
    limits = CardOptions(
        card_memory_gb=config.card_memory_gb,
        pinned_memory_gb=config.pinned_memory_gb,
        hot_gb=config.hot_gb,
        require_peer_access=config.peer_access == "required",
    )
    return CardSet.open(config.device, config.cards, limits)


def division(config: Config, num_shards: int) -> FleetRecord:
    """Return how rows are divided."""
    return FleetRecord(num_shards=num_shards, sharding=config.sharding, replicate_bytes=config.replicate_bytes)


def read_plan(config: Config, models: Collection[str]) -> PlanFile | None:
    """Return the plan file that was named. Raises PlanError if it can't be read, or is of none of some models."""
    file = None if config.plan_file is None else PlanFile.read(config.plan_file)
    if file is not None and models and file.model not in models:
        allowed = " or ".join(map(repr, sorted(models)))
        raise PlanError(f"{config.plan_file}: model is {file.model!r}, allowed here is {allowed}")
    return file


def plan_of(config: Config, file: PlanFile | None, num_shards: int, snapshot: Snapshot) -> Plan:
    """Return how a version's rows are divided: by a file, if that is of its model. Raises as `Plan.of_snapshot`."""
    return Plan.of_snapshot(snapshot, num_shards, config.sharding, config.cards, config.replicate_bytes, file)


def shard_of(config: Config, index: int, num_shards: int) -> NodeIdentity:
    """Return which shard of how many a process has."""
    return NodeIdentity(shard_index=index, num_shards=num_shards, num_cards=config.cards, sharding=config.sharding)


def node_actions(
    config: Config,
    membership: Membership,
    node: ShardNode,
    node_id: str,
    address: str = "",
    card_set: CardSet | None = None,
    file: PlanFile | None = None,
) -> NodeActions:
    """Return what stages a shard's rows into a node. Raises UsageError for an id that can't be."""
    index, num_shards = node.identity.shard_index, node.identity.num_shards
    rate_mb = config.stage_mb_per_s if isinstance(config, ShardNodeConfig) else None

    def partition_of(snapshot: Snapshot) -> tuple[Partition, str]:
        plan = plan_of(config, file, num_shards, snapshot)
        return plan.partition(index), plan.digest

    node_config = config_of(
        NodeConfig,
        {},
        node_id=node_id,
        address=address,
        store=membership.store,
        replicate_bytes=config.replicate_bytes,
        verify=config.verify,
        memory_cap_bytes=to_bytes(config.max_memory_gb),
        memory_budget_bytes=to_bytes(config.memory_budget_gb),
        stage_cpu_share=membership.stage_cpu_share(config),
        stage_bytes_per_s=None if rate_mb is None else rate_mb * 1e6,
    )
    return NodeActions(node, membership.fleet, partition_of, node_config, card_set=card_set)


def load_options(config: ServeConfig, models: Collection[str], card_set: CardSet | None) -> LoadOptions:
    """Return how versions are loaded and ranked. Raises UsageError for no replica where a row may block the loop."""
    # A disk is waited for, and so are deltas, which are written to rows in this process while it serves.
    may_block = config.has_rows and (config.in_fleet or config.memory_budget_gb is not None)
    if config.ranking_replicas == 0 and (may_block or card_set is not None):
        raise click.UsageError("--ranking-replicas 0 is only for rows in this process's RAM or on shard nodes.")
    replicas = len(card_set.cards.cards) if card_set is not None else int(may_block)
    size_bytes = to_bytes(config.hot_rows_gb)
    recorded = config.warm_from or config.record
    return LoadOptions(
        verify=config.verify,
        num_replicas=replicas if config.ranking_replicas is None else config.ranking_replicas,
        dtype=config.dtype,
        wire_dtype=config.wire_dtype,
        node_tls=node_tls(config),
        plan=read_plan(config, models),
        hot_rows=HotRowsConfig(size_bytes=size_bytes, policy=config.hot_rows) if size_bytes else None,
        replica_policy=ReplicaPolicy.model_validate(config.replica_policy),
        trust_exported=config.trust_exported,
        warming=Warming(folder=recorded, requests=config.warm_requests) if recorded and config.warm_requests else None,
    )


def server_tls(config: Config) -> TlsConfig | None:
    """Return the certificate of a server; None for plain text. Raises TlsConfigError for files that do not fit."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    tls = config_of(
        TlsConfig,
        {},
        "--tls-role: ",
        cert=config.tls_cert,
        key=config.tls_key,
        client_ca=config.tls_client_ca,
        role_uris=config.tls_role,
    )
    server_context(tls)
    return tls


def node_tls(config: ServeConfig) -> TlsClientConfig | None:
    """Return what is shown to shard nodes; None for plain text. Raises TlsConfigError for files that do not fit."""
    ca = config.node_ca or config.tls_client_ca
    if ca is None:
        return None
    cert, key = (config.tls_cert, config.tls_key) if config.node_cert is None else (config.node_cert, config.node_key)
    tls = config_of(TlsClientConfig, {}, "--tls-role: ", ca=ca, cert=cert, key=key, role_uris=config.tls_role)
    client_context(tls)
    return tls


def check_protection(config: ServeConfig) -> None:
    """Log one warning if others than this machine can reach the APIs, and anybody may ask or listen in.

    Raises TlsConfigError or ConfigError for a file that does not fit.
    """
    tls, _ = server_tls(config), node_tls(config)
    if config.tokens is not None:
        read_tokens(config.tokens)
    missing = [] if tls is not None else ["TLS (--tls-cert)"]
    if config.tokens is None and (tls is None or tls.client_ca is None):
        missing.append("tokens (--tokens) or client certificates (--tls-client-ca)")
    # Of several workers the supervisor says it, once.
    if missing and config.probe_port is None and not Address(config.host).is_loopback:
        logger.warning(
            "listens on %s without %s: for a private network only", config.host, " and without ".join(missing)
        )


def trace_config(config: Config, service_name: str) -> TraceConfig | None:
    """Return where traces go; None for nowhere. Raises UsageError, and ConfigError for a variable."""
    share = config.trace_sample_share if isinstance(config, ServeConfig) else None
    named = {"endpoint": config.trace_endpoint, "protocol": config.trace_protocol, "sample_share": share}
    given = {name: value for name, value in named.items() if value is not None}
    traces = config_of(TraceConfig, {}, "traces: ", service_name=service_name, **given)
    if not traces.is_enabled:
        if given:
            raise click.UsageError("trace_protocol and trace_sample_share need --trace-endpoint.")
        return None
    if os.environ.get("OTEL_TRACES_SAMPLER") and isinstance(config, ServeConfig) and share is None:
        raise click.UsageError("OTEL_TRACES_SAMPLER is not read any more: set trace_sample_share, or unset it.")
    traces.resolved()
    return traces


@contextlib.contextmanager
def recording(config: ServeConfig, service: RankingService) -> Iterator[None]:
    """Record what a service answers while the block runs, as far as it was asked for. Raises ConfigError."""
    if config.record is None:
        yield
        return
    max_bytes = config.record_max_mb * 1_000_000
    settings = RecordingConfig(folder=config.record, share=config.record_share, max_bytes=max_bytes)
    with contextlib.closing(RequestRecorder(settings, service.metrics.recorded, clock=service.clock)) as recorder:
        service.on_ranked += (recorder.offer,)
        yield
