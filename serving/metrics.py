"""Prometheus metrics of a serving process. docs/api.md lists them.

With the variable PROMETHEUS_MULTIPROC_DIR set (several worker processes on one port) counts are kept in files of that
folder, and whichever worker answers `/metrics` adds them up.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from serving.call import Call
from serving.observations import Observations
from serving.pending import Pending
from serving.stage_account import Served, StageAccount
from serving.stages import BatchTimes
from serving.version_stats import Outcome

MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
KEEP_UP_S = 0.5
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
_BATCH_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)
_BATCH_CANDIDATES = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class ServingMetrics:
    """Counts and times of one service. Thread-safe.

    Args:
        collectors: what is read when the metrics are, such as what the shard nodes tell. With several workers on one
            port it is that of the worker that answers.

    Attributes:
        account: where each request's stages are added up; None unless the process is profiled.
    """

    def __init__(self, collectors: Sequence[Collector] = ()) -> None:
        self._collectors = tuple(collectors)
        self.account: StageAccount | None = None
        # A registry of its own, so that several services in one process don't share names.
        registry = CollectorRegistry()
        self.requests = Counter(
            "shardrank_requests",
            "Requests answered, with success or not.",
            ("api", "method", "model", "status"),
            registry=registry,
        )
        self.errors = Counter(
            "shardrank_errors", "Requests refused or failed, by kind.", ("api", "method", "kind"), registry=registry
        )
        self._stages = Histogram(
            "shardrank_stage_seconds",
            "Time by stage. Merge, lookup and its parts, rank and answer are counted once per batch, all others once "
            "per request.",
            ("model", "stage", "method"),
            buckets=_SECONDS,
            registry=registry,
        )
        self._batch_requests = Histogram(
            "shardrank_batch_requests", "Requests in a batch.", ("model",), buckets=_BATCH_REQUESTS, registry=registry
        )
        self._batch_candidates = Histogram(
            "shardrank_batch_candidates",
            "Candidates in a batch.",
            ("model",),
            buckets=_BATCH_CANDIDATES,
            registry=registry,
        )
        self.in_flight = Gauge(
            "shardrank_requests_in_flight", "Requests being handled.", registry=registry, multiprocess_mode="livesum"
        )
        self._retries = Counter(
            "shardrank_shard_retries",
            "Lookups after whose failure another replica of the shard was asked.",
            ("model", "kind"),
            registry=registry,
        )
        self._card_batches = Counter(
            "shardrank_card_batches",
            "Batches ranked on cards, by how their work was put there: as a graph, or launch by launch.",
            ("model", "how"),
            registry=registry,
        )
        self._fallbacks = Gauge(
            "shardrank_dtype_fallback",
            "1 if the dense model serves in float32 because bfloat16 missed the golden tolerance.",
            ("model", "version"),
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._version_requests = Counter(
            "shardrank_version_requests",
            "Requests by the version that answered or failed them; ok or error.",
            ("model", "version", "outcome"),
            registry=registry,
        )
        for collector in self._collectors:
            registry.register(collector)
        self._registry = registry
        self._observations = Observations()
        self._stage_children: dict[tuple[str, str, str], Histogram] = {}
        # Looking a child up by its labels takes longer than counting: those that every request needs are kept.
        self._answered_children: dict[tuple[str, str, str, str], Counter] = {}
        self._version_children: dict[tuple[str, int, Outcome], Counter] = {}
        self._batch_children: dict[str, tuple[Histogram, Histogram]] = {}

    def stage(self, model: str, stage: str, seconds: float, method: str = "") -> None:
        """Observes one stage of a call of `method`."""
        key = (model, stage, method)
        child = self._stage_children.get(key)
        if child is None:
            child = self._stage_children[key] = self._stages.labels(*key)
        self._observations.add(child, seconds)

    def batch_times(self, model: str, times: BatchTimes, method: str) -> None:
        """Observes the stages of a batch, but for `rank`, which whoever ranks has told."""
        self.stage(model, "merge", times.merge_s, method)
        if (lookup := times.lookup) is not None:
            self.stage(model, "map", lookup.map_s, method)
            self.stage(model, "split", lookup.split_s, method)
            self.stage(model, "shard_wait", lookup.shard_wait_s, method)
            self.stage(model, "add", lookup.add_s, method)
        self.stage(model, "answer", times.answer_s, method)

    def answer_encoded(self, call: Call, pending: Pending, answered: float, encoded: float) -> None:
        """Observes the end of a call: it is told `encode`, and the account all of its stages.

        Args:
            call: of an API whose `received` and `parsed` are set.
            pending: as it was answered.
            answered: when the call went on with the answer, monotonic seconds.
            encoded: when that was bytes, monotonic seconds.
        """
        self.stage(call.model, "encode", encoded - answered, call.method)
        if self.account is not None and pending.batch is not None:
            receive_s, decode_s = call.received - call.began, call.leased - call.received
            hand_back_s = answered - pending.batch.ended
            self.stage(call.model, "receive", receive_s, call.method)
            self.stage(call.model, "decode", decode_s, call.method)
            self.stage(call.model, "hand_back", hand_back_s, call.method)
            before = (receive_s, decode_s, call.parsed - call.leased, pending.queue_s)
            after = (hand_back_s, encoded - answered)
            served = Served(call.api, call.method, call.model)
            self.account.add(served, before, pending.batch, after, encoded - call.began)

    def batch(self, model: str, num_requests: int, num_candidates: int) -> None:
        """Observes the size of a batch."""
        children = self._batch_children.get(model)
        if children is None:
            children = (self._batch_requests.labels(model), self._batch_candidates.labels(model))
            self._batch_children[model] = children
        self._observations.add(children[0], num_requests)
        self._observations.add(children[1], num_candidates)

    def answered(self, api: str, method: str, model: str, status: str) -> None:
        """Counts an answer. `model` must be one that is served, or ""."""
        key = (api, method, model, status)
        child = self._answered_children.get(key)
        if child is None:
            child = self._answered_children[key] = self.requests.labels(*key)
        child.inc()

    def failed(self, api: str, method: str, kind: str) -> None:
        """Counts an error."""
        self.errors.labels(api, method, kind).inc()

    def shard_retry(self, model: str, kind: str) -> None:
        """Counts a shard call that was repeated elsewhere."""
        self._retries.labels(model, kind).inc()

    def card_batch(self, model: str, *, is_graph: bool) -> None:
        """Counts a batch that was ranked on a card."""
        self._card_batches.labels(model, "graph" if is_graph else "launches").inc()

    def dtype_fallback(self, model: str, version: int, *, fell_back: bool) -> None:
        """Says whether a version serves in another dtype than was asked for."""
        self._fallbacks.labels(model, str(version)).set(float(fell_back))

    def version_answered(self, model: str, version: int, outcome: Outcome) -> None:
        """Counts a request for its version."""
        key = (model, version, outcome)
        child = self._version_children.get(key)
        if child is None:
            child = self._version_children[key] = self._version_requests.labels(model, str(version), outcome)
        child.inc()

    def forget_version(self, model: str, version: int) -> None:
        """Drops what is told of one version. With several workers on one port their files keep it."""
        if MULTIPROCESS_VARIABLE in os.environ:
            return
        for outcome in get_args(Outcome):
            self._version_children.pop((model, version, outcome), None)
            self._version_requests.remove(model, str(version), outcome)
        self._fallbacks.remove(model, str(version))

    async def keep_up(self) -> None:
        """Has this process's numbers where other workers look for them, until it is cancelled."""
        while True:
            await asyncio.sleep(KEEP_UP_S)
            self._observations.make()

    def render(self) -> bytes:
        """The exposition text."""
        self._observations.make()
        if MULTIPROCESS_VARIABLE not in os.environ:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        for collector in self._collectors:
            registry.register(collector)
        return generate_latest(registry)
