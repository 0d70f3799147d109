"""What shard nodes told of themselves and which versions are here, as metrics; and how old rows may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.versions.served_versions import ServedVersions
from shard_node.node import NodeInfo, ServedVersion

_NODE_LABELS = ("model", "version", "shard", "replica")


@dataclass(frozen=True, slots=True)
class ReportedNode:
    """What a node told when it was asked for one model.

    Attributes:
        model: the model. The node may hold others, which are told by those who ask for them.
        replica: which of its shard's replicas the node is: its address, or `local` for rows in this process.
        info: what it told.
    """

    model: str
    replica: str
    info: NodeInfo


class NodeCollector(Collector):
    """Memory, lookups, cards and deltas of the shard nodes, as they last told. Each node counts for itself.

    Args:
        nodes: what they last told.
        wall_clock: seconds since the epoch.
    """

    def __init__(self, nodes: Callable[[], Sequence[ReportedNode]], wall_clock: Callable[[], float]) -> None:
        self._nodes = nodes
        self._wall_clock = wall_clock

    def collect(self) -> Iterable[Metric]:
        """Seven families, labelled by shard and replica."""
        nodes = self._nodes()
        return [*_tables(nodes), *_cards(nodes), *_deltas(nodes, self._wall_clock())]


def _tables(nodes: Sequence[ReportedNode]) -> list[Metric]:
    memory = GaugeMetricFamily(
        "shardrank_memory_bytes", "Bytes of embedding rows by card and tier.", labels=(*_NODE_LABELS, "card", "tier")
    )
    lookups = CounterMetricFamily(
        "shardrank_rows_looked_up", "Rows looked up by table and tier.", labels=(*_NODE_LABELS, "table", "tier")
    )
    for node in nodes:
        where = (str(node.info.identity.shard_index), node.replica)
        for use in node.info.memory:
            if use.model == node.model:
                memory.add_metric([use.model, str(use.version), *where, str(use.card), use.tier], use.size_bytes)
        for count in node.info.lookups:
            if count.model == node.model:
                lookups.add_metric([count.model, str(count.version), *where, count.table, count.tier], count.rows)
    return [memory, lookups]


def _cards(nodes: Sequence[ReportedNode]) -> list[Metric]:
    peer_access = GaugeMetricFamily(
        "shardrank_cards_peer_access",
        "1 if each card of a node reads the memory of every other, 0 if rows are copied or kept on the host instead.",
        labels=_NODE_LABELS,
    )
    bad_values = CounterMetricFamily(
        "shardrank_card_bad_values",
        "Values that kernels found to name no row of their table, or one that is on no card; pooled as zeros.",
        labels=(*_NODE_LABELS, "reason"),
    )
    for node in nodes:
        where = (str(node.info.identity.shard_index), node.replica)
        for one in node.info.cards:
            if one.model == node.model:
                labels = [one.model, str(one.version), *where]
                peer_access.add_metric(labels, float(one.peer_access))
                bad_values.add_metric([*labels, "outside_table"], one.outside_table)
                bad_values.add_metric([*labels, "not_here"], one.not_here)
    return [peer_access, bad_values]


def _deltas(nodes: Sequence[ReportedNode], now: float) -> list[Metric]:
    sequence = GaugeMetricFamily("shardrank_delta_sequence", "The last delta that is applied.", labels=_NODE_LABELS)
    lag = GaugeMetricFamily("shardrank_delta_lag", "Deltas that are published but not applied.", labels=_NODE_LABELS)
    staleness = GaugeMetricFamily(
        "shardrank_delta_staleness_seconds",
        "How old the newest change may be that is not applied.",
        labels=_NODE_LABELS,
    )
    for node in nodes:
        where = (str(node.info.identity.shard_index), node.replica)
        for one in node.info.versions:
            is_following = one.delta_fresh_at is not None or one.delta_sequence > 0
            if one.model != node.model or not is_following:
                continue
            labels = [one.model, str(one.version), *where]
            sequence.add_metric(labels, one.delta_sequence)
            lag.add_metric(labels, one.delta_lag)
            seconds = staleness_s(one, now)
            if seconds is not None:
                staleness.add_metric(labels, seconds)
    return [sequence, lag, staleness]


class VersionCollector(Collector):
    """Live, staged, draining and canary versions as they are now; what has been freed is not told any more.

    Args:
        versions: of the process.
        degraded: why rows are older than they may be, by model.
    """

    def __init__(self, versions: ServedVersions, degraded: Callable[[], Mapping[str, str]]) -> None:
        self._versions = versions
        self._degraded = degraded

    def collect(self) -> Iterable[Metric]:
        """Five families."""
        live = GaugeMetricFamily("shardrank_live_version", "The version that answers requests.", labels=("model",))
        state = GaugeMetricFamily(
            "shardrank_version_state",
            "1 for each version that is here, with its state: live, staged or draining.",
            labels=("model", "version", "state"),
        )
        leases = GaugeMetricFamily(
            "shardrank_version_leases", "Requests that use a version now.", labels=("model", "version")
        )
        canary = GaugeMetricFamily(
            "shardrank_canary_share", "Share of the requests that the canary gets.", labels=("model", "version")
        )
        degraded = GaugeMetricFamily(
            "shardrank_degraded", "1 if rows are older than max_staleness_s allows, else 0.", labels=("model",)
        )
        reasons = self._degraded()
        for one in self._versions.generations.all():
            labels = [one.model, str(one.version)]
            state.add_metric([*labels, one.state], 1.0)
            leases.add_metric(labels, one.leases)
        # All as of one moment: a scrape during a flip must not find a model without a live version.
        for model, version in self._versions.generations.live_versions().items():
            live.add_metric([model], version)
            degraded.add_metric([model], float(model in reasons))
            choice = self._versions.canary(model)
            if choice is not None:
                canary.add_metric([model, str(choice.version)], choice.share)
        return [live, state, leases, canary, degraded]


def staleness_s(told: ServedVersion, now: float) -> float | None:
    """How old the newest change may be that a node has not applied, in seconds; None while it does not know.

    It is 0 at the moment at which a node finds everything applied, and grows until it looks again. So it stays small
    while nothing is published, and grows while the registry can't be reached.

    Args:
        told: one version of a node.
        now: seconds since the epoch.
    """
    return None if told.delta_fresh_at is None else max(0.0, now - told.delta_fresh_at)


def degraded_reason(told: Sequence[ServedVersion], max_staleness_s: float, now: float) -> str:
    """Why a version's rows are older than they may be; "" if they are not.

    Args:
        told: what each node of its shards told of it, at least one.
        max_staleness_s: the limit.
        now: seconds since the epoch.
    """
    version = told[0].version
    ages = [staleness_s(one, now) for one in told]
    known = [age for age in ages if age is not None]
    if len(known) < len(ages):
        return f"{len(ages) - len(known)} of {len(ages)} nodes with version {version} have not looked for deltas"
    if max(known) <= max_staleness_s:
        return ""
    late = sum(age > max_staleness_s for age in known)
    return (
        f"rows of version {version} are {max(known):.1f} s behind on {late} of {len(known)} nodes; "
        f"max_staleness_s = {max_staleness_s:g}"
    )
