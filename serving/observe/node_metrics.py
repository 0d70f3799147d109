"""Prometheus metrics of a shard node, at a port of its own. docs/api.md lists them.

What serving processes tell of their shard nodes has the same names and labels here, so a query takes the largest of
what all of them say: `max by (model, version, shard, replica, ...)`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from serving.limits import RequestLimits
from serving.observe.metrics import MAX_KEPT, Kept, check_library, make_observations
from serving.observe.watch import NODE_FAMILIES, Sample, collected, node_samples, version_samples
from shard_node.engine.base import CardsUse
from shard_node.errors import CardError
from shard_node.generation import Generation
from shard_node.node import LoadedTables, ShardNode
from shard_node.wire.server import NodeServer

_SECONDS = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)


class NodeMetrics:
    """Counts and times of one shard node. Implements `RequestWatch`; thread-safe.

    Attributes:
        limits, clock, metrics: for the listener that tells them.
        replica: the node's address, as serving processes know it.
    """

    def __init__(self, node: ShardNode, wall_clock: Callable[[], float] = time.time) -> None:
        check_library()
        self.limits, self.clock, self.metrics = RequestLimits(), time.monotonic, self
        self.replica = ""
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_NodeState(node, self, wall_clock))
        self._seconds = Histogram(
            "shardrank_node_request_seconds",
            "Time from a whole request to its answer, an error too.",
            ("model",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._errors = Counter(
            "shardrank_node_errors", "Requests and connections refused or failed, by kind.", ("api", "kind"),
            registry=registry,
        )  # fmt: skip
        self._in_flight = Gauge(
            "shardrank_node_requests_in_flight", "Requests waiting for a thread or in one.", registry=registry
        )
        self._connections = Gauge("shardrank_node_connections", "Connections of routers.", registry=registry)
        self._of_model = cache(lambda model: (self._seconds.labels(model),))
        self._kept: Kept = deque()

    def answered(self, model: str, seconds: float) -> None:
        """As `RequestWatch.answered`."""
        self._kept.append((self._of_model(model), (seconds,)))
        if len(self._kept) >= MAX_KEPT:
            make_observations(self._kept)

    def refused(self, kind: str) -> None:
        """As `RequestWatch.refused`."""
        self._errors.labels("wire", kind).inc()

    def failed(self, api: str, method: str, kind: str) -> None:
        """Count what a connection to these metrics was refused for."""
        del method
        self._errors.labels(api, kind).inc()

    def of(self, server: NodeServer, replica: str) -> None:
        """Tell of a server's requests and connections; `replica` is where routers reach it."""
        self.replica = replica
        self._in_flight.set_function(lambda: server.in_flight)
        self._connections.set_function(lambda: server.num_connections)

    def render(self) -> bytes:
        """Write the exposition text. Of cards that have failed it says that, and what is known without them."""
        make_observations(self._kept)
        return generate_latest(self._registry)


class _NodeState(Collector):
    """What the node holds at this moment."""

    def __init__(self, node: ShardNode, metrics: NodeMetrics, wall_clock: Callable[[], float]) -> None:
        self._node, self._metrics, self._wall_clock = node, metrics, wall_clock

    def collect(self) -> Iterable[Metric]:
        """Collect all families; what has been freed is not told any more."""
        return collected(self._samples(), NODE_FAMILIES)

    def _samples(self) -> Iterator[Sample]:
        failed: list[Generation[LoadedTables]] = []

        def cards_of(one: Generation[LoadedTables]) -> CardsUse | None:
            try:
                return one.payload.engine.cards()
            except CardError:
                failed.append(one)
                return None

        info, now = self._node.info(cards_of), self._wall_clock()
        models, replica, shard = {one.model for one in info.versions}, self._metrics.replica, info.identity.shard_index
        told = (node_samples(model, replica, info, now) for model in models)
        faults = (("cards_failed", (one.model, str(one.version), str(shard), replica), 1.0) for one in failed)
        return chain(version_samples(self._node.generations.all()), *told, faults)
