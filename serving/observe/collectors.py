"""What shard nodes told of themselves and which versions are here, as metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.observe.watch import NodeWatch, staleness_s
from serving.versions.served_versions import ServedVersions

Sample: TypeAlias = tuple[str, tuple[str, ...], float]
"""A family's name without its prefix, labels, value."""

_NODE = ("model", "version", "shard", "replica")
_VERSION = ("model", "version")
_GAUGES = {
    "shardrank_memory_bytes": ("Bytes of embedding rows by card and tier.", (*_NODE, "card", "tier")),
    "shardrank_cards_peer_access": (
        "1 if each card of a node reads the memory of every other, 0 if rows are copied or kept on the host instead.",
        _NODE,
    ),
    "shardrank_delta_sequence": ("The last delta that is applied.", _NODE),
    "shardrank_delta_lag": ("Deltas that are published but not applied.", _NODE),
    "shardrank_delta_staleness_seconds": ("How old the newest change may be that is not applied.", _NODE),
    "shardrank_live_version": ("The version that answers requests.", ("model",)),
    "shardrank_version_state": (
        "1 for each version that is here, with its state: live, staged or draining.",
        (*_VERSION, "state"),
    ),
    "shardrank_version_leases": ("Requests that use a version now.", _VERSION),
    "shardrank_canary_share": ("Share of the requests that the canary gets.", _VERSION),
    "shardrank_degraded": ("1 if rows are older than max_staleness_s allows, else 0.", ("model",)),
}
_COUNTERS = {
    "shardrank_rows_looked_up": ("Rows looked up by table and tier.", (*_NODE, "table", "tier")),
    "shardrank_card_bad_values": (
        "Values that kernels found to name no row of their table, or one that is on no card; pooled as zeros.",
        (*_NODE, "reason"),
    ),
}


class StateCollector(Collector):
    """Tells of the shard nodes, as they last told and each for itself, and of the versions that are here now."""

    def __init__(self, watch: NodeWatch, versions: ServedVersions) -> None:
        self._watch = watch
        self._versions = versions

    def collect(self) -> Iterable[Metric]:
        """All families; what has been freed is not told any more."""
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            name: GaugeMetricFamily(name, told, labels=labels) for name, (told, labels) in _GAUGES.items()
        }
        families |= {name: CounterMetricFamily(name, told, labels=labels) for name, (told, labels) in _COUNTERS.items()}
        for samples in (self._of_nodes(), self._of_versions()):
            for name, labels, value in samples:
                families[f"shardrank_{name}"].add_metric(labels, value)
        return families.values()

    def _of_nodes(self) -> Iterator[Sample]:
        now = self._watch.wall_clock()
        for model, replica, info in self._watch.nodes():
            shard = str(info.identity.shard_index)
            for use in info.memory:
                if use.model == model:
                    labels = (model, str(use.version), shard, replica, str(use.card), use.tier)
                    yield "memory_bytes", labels, use.size_bytes
            for count in info.lookups:
                if count.model == model:
                    labels = (model, str(count.version), shard, replica, count.table, count.tier)
                    yield "rows_looked_up", labels, count.rows
            for cards in info.cards:
                if cards.model == model:
                    node = (model, str(cards.version), shard, replica)
                    yield "cards_peer_access", node, float(cards.peer_access)
                    yield "card_bad_values", (*node, "outside_table"), cards.outside_table
                    yield "card_bad_values", (*node, "not_here"), cards.not_here
            for one in info.versions:
                is_following = one.delta_fresh_at is not None or one.delta_sequence > 0
                if one.model == model and is_following:
                    node = (model, str(one.version), shard, replica)
                    yield "delta_sequence", node, one.delta_sequence
                    yield "delta_lag", node, one.delta_lag
                    if (seconds := staleness_s(one, now)) is not None:
                        yield "delta_staleness_seconds", node, seconds

    def _of_versions(self) -> Iterator[Sample]:
        degraded = self._watch.degraded()
        for one in self._versions.generations.all():
            labels = (one.model, str(one.version))
            yield "version_state", (*labels, one.state), 1.0
            yield "version_leases", labels, one.leases
        # All as of one moment: a scrape during a flip must not find a model without a live version.
        for model, version in self._versions.generations.live_versions().items():
            yield "live_version", (model,), version
            yield "degraded", (model,), float(model in degraded)
            if (choice := self._versions.canary(model)) is not None:
                yield "canary_share", (model, str(choice.version)), choice.share
