"""What shard nodes told of themselves, as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.staleness import staleness_s
from shard_node.node import NodeInfo

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
