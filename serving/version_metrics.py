"""Which versions a serving process holds and what they are to it, as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.versions import ServedVersions


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
        for model, version in self._versions.live_versions().items():
            live.add_metric([model], version)
            degraded.add_metric([model], float(model in reasons))
            choice = self._versions.canary(model)
            if choice is not None:
                canary.add_metric([model, str(choice.version)], choice.share)
        return [live, state, leases, canary, degraded]
