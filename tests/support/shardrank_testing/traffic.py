"""Traffic of a played fleet: what its serving processes would have counted, drawn from a generator with a seed."""

from __future__ import annotations

import numpy as np

from loader.registry.fleet import LATENCY_BOUNDS_MS, HotReport, VersionStats
from shardrank_testing.rollout_fleet import PlayedFleet, PlayedNode

_MB = 10**6


class PlayedTraffic:
    """Gives every node what it would tell after some seconds under load: counts, deltas, memory."""

    def __init__(self, fleet: PlayedFleet, requests_per_s: float = 420.0, seed: int = 0) -> None:
        self._fleet = fleet
        self._rate = requests_per_s
        self._random = np.random.default_rng(seed)
        self._counts: dict[tuple[str, int], np.ndarray] = {}
        self._hot: dict[tuple[str, int], tuple[int, int]] = {}
        self._seconds = 0.0

    def pass_time(self, seconds: float, last_delta: int) -> None:
        """Answer requests for so long; all nodes but the last one have applied all deltas."""
        self._seconds += seconds
        swell = 1 + 0.15 * np.sin(self._seconds / 90)
        for node in self._fleet.serving():
            share = 0.05 if node.canary is not None else 0.0
            for version, part in ((node.live, 1 - share), (node.canary, share)):
                if version is not None and node.alive:
                    self._answer(node, version, seconds * self._rate * swell * part / len(self._fleet.serving()))
        for place, node in enumerate(self._fleet.shard_nodes()):
            node.delta_sequence = dict.fromkeys(node.held, max(0, last_delta - (place == 2)))
            size = (312 + 5 * place) * _MB
            tiers = {"ram": size, "mapped": 2 * size}
            node.told = {version: {"memory_tiers": tiers, "memory_bytes": size, "leases": 2} for version in node.held}
            node.machine = {"memory_total_bytes": 64_000 * _MB, "memory_available_bytes": (41_000 - 700 * place) * _MB}

    def _answer(self, node: PlayedNode, version: int, requests: float) -> None:
        count = self._random.poisson(requests)
        faster = 0.82 if version % 2 == 0 else 1.0
        latencies_ms = faster * self._random.lognormal(np.log(3.1), 0.42, count)
        buckets = np.searchsorted(LATENCY_BOUNDS_MS, latencies_ms)
        key = (node.node_id, version)
        counts = self._counts.get(key, np.zeros(len(LATENCY_BOUNDS_MS) + 1, np.int64))
        counts = self._counts[key] = counts + np.bincount(buckets, minlength=counts.size)
        lookups, hits = self._hot.get(key, (0, 0))
        lookups += 400 * count
        hits += self._random.binomial(400 * count, min(0.62, 0.3 + self._seconds / 1500))
        self._hot[key] = (lookups, hits)
        total = int(counts.sum())
        node.stats[version] = VersionStats(
            requests=total,
            latency_counts=tuple(counts.tolist()),
            score_count=100 * total,
            score_sum=31.4 * total,
            score_square_sum=14.2 * total,
        )
        hot = HotReport(rows=180_000, size_bytes=25 * _MB, lookups=lookups, hits=hits)
        node.told[version] = {"hot": hot, "leases": int(self._random.integers(1, 5))}
        node.golden[version] = 2.4e-5
        node.machine = {"memory_total_bytes": 32_000 * _MB, "memory_available_bytes": 21_400 * _MB}
