"""Prometheus metrics of a serving process. docs/api.md lists them.

With the variable PROMETHEUS_MULTIPROC_DIR set (several worker processes on one port) counts are kept in files of that
folder, and whichever worker answers `/metrics` adds them up.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from serving.errors import HistogramLayoutError
from serving.observe.statistics import Outcome
from serving.observe.times import AFTER_BATCH, BEFORE_BATCH, IN_BATCH, BatchTimes, Call

MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
KEEP_UP_S = 0.5
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_KEPT = 256
CALL_STAGES = (*BEFORE_BATCH, *AFTER_BATCH, "total")
BATCH_STAGES = (*IN_BATCH, "lookup")
# On cards a lookup is not told apart further.
CARD_STAGES = ("merge", "lookup", "rank", "answer")
_SIZES = ("requests", "candidates")

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
        on_answered: told each call of a batch that was answered, and the seconds from its begin to its encoded answer;
            None unless the process is profiled.
    """

    def __init__(self, collectors: Sequence[Collector] = ()) -> None:
        self._collectors = tuple(collectors)
        self.on_answered: Callable[[Call, float], None] | None = None
        _check_library()
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
        # Looking a child up by its labels takes longer than counting, so those that requests need are kept.
        self._children: dict[tuple[str, ...], Counter] = {}
        self._histogram_children: dict[tuple[tuple[str, ...], str, str], tuple[Histogram, ...]] = {}
        # Observations that are not in their histograms yet. Made one by one, between work that needs the processor's
        # caches, each costs three times what it costs after another one. Thread-safe: both ends of a deque are.
        self._kept: deque[tuple[tuple[Histogram, ...], tuple[float, ...]]] = deque()

    def call_ended(self, call: Call, status: str, outcome: Outcome | None, now: float) -> None:
        """Count a call and observe its stages.

        Args:
            call: as it ended; its model must be one that is served, or "".
            status: `ok`, or the kind of its error.
            outcome: what it counts as for its version.
            now: monotonic seconds.
        """
        labels = (call.api, call.method, call.model, status)
        answered = self._children.get(labels)
        if answered is None:
            answered = self._children[labels] = self.requests.labels(*labels)
        answered.inc()
        if status != "ok":
            self.errors.labels(call.api, call.method, status).inc()
        stages: tuple[str, ...] = ("total",)
        seconds: tuple[float, ...] = (now - call.began,)
        if call.batch is not None and call.encoded:
            stages, seconds = CALL_STAGES, (*call.around_batch(), *seconds)
            if self.on_answered is not None:
                self.on_answered(call, call.encoded - call.began)
        key = (stages, call.model, call.method)
        self._kept.append((self._histogram_children.get(key) or self._histograms(*key), seconds))
        if outcome is not None:
            of_version = (call.model, str(call.version), outcome)
            child = self._children.get(of_version)
            if child is None:
                child = self._children[of_version] = self._version_requests.labels(*of_version)
            child.inc()
        if len(self._kept) >= MAX_KEPT:
            self._make_observations()

    def batch_ended(self, model: str, times: BatchTimes, method: str) -> None:
        """Observe the size and the stages of a batch."""
        stages: tuple[str, ...] = CARD_STAGES
        seconds: tuple[float, ...] = (times.merge_s, times.lookup_s, times.rank_s, times.answer_s)
        if times.lookup is not None:
            stages, seconds = BATCH_STAGES, (*times.seconds(), times.lookup_s)
        key = (stages, model, method)
        self._kept.append((self._histogram_children.get(key) or self._histograms(*key), seconds))
        if times.num_candidates:
            sizes = self._histogram_children.get((_SIZES, model, "")) or self._sizes(model)
            self._kept.append((sizes, (times.num_requests, times.num_candidates)))
        if len(self._kept) >= MAX_KEPT:
            self._make_observations()

    def failed(self, api: str, method: str, kind: str) -> None:
        """Count an error of what is no call, such as a connection."""
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

    def forget_version(self, model: str, version: int) -> None:
        """Drops what is told of one version. With several workers on one port their files keep it."""
        if MULTIPROCESS_VARIABLE in os.environ:
            return
        for outcome in get_args(Outcome):
            self._children.pop((model, str(version), outcome), None)
            self._version_requests.remove(model, str(version), outcome)
        self._fallbacks.remove(model, str(version))

    def _histograms(self, stages: tuple[str, ...], model: str, method: str) -> tuple[Histogram, ...]:
        children = tuple(self._stages.labels(model, stage, method) for stage in stages)
        return self._histogram_children.setdefault((stages, model, method), children)

    def _sizes(self, model: str) -> tuple[Histogram, ...]:
        children = (self._batch_requests.labels(model), self._batch_candidates.labels(model))
        return self._histogram_children.setdefault((_SIZES, model, ""), children)

    def _make_observations(self) -> None:
        """Put what is kept into the histograms: whoever reads one calls it before."""
        by_histogram: defaultdict[Histogram, list[float]] = defaultdict(list)
        try:
            while True:
                histograms, values = self._kept.popleft()
                for histogram, value in zip(histograms, values, strict=True):
                    by_histogram[histogram].append(value)
        except IndexError:
            for histogram, own in by_histogram.items():
                observe_all(histogram, own)

    async def keep_up(self) -> None:
        """Has this process's numbers where other workers look for them, until it is cancelled."""
        while True:
            await asyncio.sleep(KEEP_UP_S)
            self._make_observations()

    def render(self) -> bytes:
        """The exposition text."""
        self._make_observations()
        if MULTIPROCESS_VARIABLE not in os.environ:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        for collector in self._collectors:
            registry.register(collector)
        return generate_latest(registry)


def observe_all(histogram: Histogram, values: list[float]) -> None:
    """As `histogram.observe` of each value, which the library has no public way for: it looks for each one's bucket.

    Args:
        histogram: one without label names, or a child.
        values: none of them NaN.
    """
    buckets = np.searchsorted(histogram._upper_bounds, values)
    counts = np.bincount(buckets).tolist()
    for bucket, count in enumerate(counts):
        if count:
            histogram._buckets[bucket].inc(count)
    histogram._sum.inc(sum(values))


def _check_library() -> None:
    # In files that processes share, what is made for a look would stay and be told.
    if MULTIPROCESS_VARIABLE in os.environ:
        return
    try:
        together, one_by_one = _told_after(observe_all), _told_after(_observe_each)
    except (AttributeError, IndexError, TypeError) as error:
        raise HistogramLayoutError(f"a Histogram of prometheus_client has other fields: {error}") from error
    if together != one_by_one:
        raise HistogramLayoutError(
            f"a Histogram of prometheus_client tells {together}; observed one by one, {one_by_one}"
        )


def _told_after(observe: Callable[[Histogram, list[float]], None]) -> dict[str, float]:
    histogram = Histogram("checked", "Made for a look.", buckets=(1.0, 2.0), registry=None)
    observe(histogram, [0.5, 1.0, 1.5, 4.0])
    samples = [sample for metric in histogram.collect() for sample in metric.samples]
    return {f"{one.name}{one.labels}": one.value for one in samples if not one.name.endswith("_created")}


def _observe_each(histogram: Histogram, values: list[float]) -> None:
    for value in values:
        histogram.observe(value)
