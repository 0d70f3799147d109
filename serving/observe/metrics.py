"""Prometheus metrics of a serving process. docs/api.md lists them.

With the variable PROMETHEUS_MULTIPROC_DIR set (several worker processes on one port) counts are kept in files of that
folder, and whichever worker answers `/metrics` adds them up.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from functools import cache, partial
from typing import Literal, TypeAlias

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from router.hot_keeper import HotStatus
from router.outliers import ReplicaEvents
from serving.observe.calls import AFTER_BATCH, BEFORE_BATCH, IN_BATCH, BatchTimes, Call, Outcome
from shard_node.answer import WIRE_FORMS

MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
KEEP_UP_S = 0.5
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_KEPT = 256
CALL_STAGES = (*BEFORE_BATCH, *AFTER_BATCH, "total")
BATCH_STAGES = (*IN_BATCH, "lookup")
# On cards a lookup is not told apart further.
CARD_STAGES = ("merge", "lookup", "rank", "answer")

_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
_BATCH_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)
_BATCH_CANDIDATES = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096)
Kept: TypeAlias = deque[tuple[tuple[Histogram, ...], tuple[float, ...]]]

_VERSION, _TABLE = ("model", "version"), ("model", "table")
_COUNTERS = {
    "requests": ("Requests answered, with success or not.", ("api", "method", "model", "status")),
    "errors": ("Requests refused or failed, by kind.", ("api", "method", "kind")),
    "buffer_refusals": ("Messages refused because max_buffered_bytes are held, by cause.", ("cause",)),
    "card_batches": (
        "Batches ranked on cards, by how their work was put there: as a graph, or launch by launch.",
        ("model", "how"),
    ),
    "version_requests": ("Requests by the version that answered or failed them; ok or error.", (*_VERSION, "outcome")),
    "trace_spans": ("Spans by what became of them.", ("outcome",)),
    "shard_request_bytes": ("Bytes that shards behind sockets were asked with.", ("model",)),
    "shard_answer_bytes": (
        "Bytes that shards behind sockets answered with: rows as they are stored, int8, float16 or float32 sums.",
        ("model", "form"),
    ),
    "shard_retries": (
        "Lookups that another replica was asked for as well: by the kind of the failure before, or late.",
        ("model", "kind"),
    ),
    "shard_retries_denied": (
        "Lookups that no other replica was asked for because the budget of hedges and retries was spent.",
        ("model", "kind"),
    ),
    "replica_ejections": ("Replicas that were ejected, by why.", ("model", "shard", "reason")),
    "dense_steps_refused": ("Sets of dense weights that must not answer.", _VERSION),
    "int8_inputs": ("Inputs of int8 layers that were looked at, in one of 64 batches.", _VERSION),
    "int8_inputs_beyond": ("How many of these were beyond what golden requests had, and cut off.", _VERSION),
    "recorded_requests": ("Requests chosen to be recorded: written, or dropped.", ("outcome",)),
    "recorded_bytes": ("Bytes of recorded requests that were written.", ()),
    "warmed_requests": ("Requests that versions answered before they were ready, to be warm.", _VERSION),
    "keys": (
        "Keys looked up by feature, in tables that name their rows by such, and whether they were found.",
        (*_VERSION, "table", "feature", "found"),
    ),
    "hot_lookups": ("Rows that were looked up where hot rows are held.", _TABLE),
    "hot_hits": ("How many of these were hot.", _TABLE),
}
# Help, labels, and how the values of several workers become one.
_GAUGES: dict[str, tuple[str, tuple[str, ...], Literal["livesum", "livemax", "livemin"]]] = {
    "requests_in_flight": ("Requests being handled.", (), "livesum"),
    "buffered_bytes": ("Bytes of messages that are held.", (), "livesum"),
    "replicas_ejected": (
        "Replicas that are ejected or not yet let in again, counted by each router.",
        ("model", "shard"),
        "livesum",
    ),
    "dtype_fallback": (
        "1 if the dense model serves in float32 because bfloat16 missed the golden tolerance.",
        _VERSION,
        "livemax",
    ),
    "wire_fallback": (
        "1 if shards answer with float32 sums because int8 and float16 ones missed the golden tolerance.",
        _VERSION,
        "livemax",
    ),
    "dense_step": ("The newest set of dense weights that answers; 0 for the snapshot's own.", _VERSION, "livemin"),
    "dense_step_fallback": ("1 if rows lack what dense steps need, and the snapshot's answer.", _VERSION, "livemax"),
    "hot_rows": ("Rows held.", _VERSION, "livesum"),
    "hot_bytes": ("Bytes of rows held and their index.", _VERSION, "livesum"),
    "hot_sequence": ("Last delta applied to them.", _VERSION, "livemin"),
}
_STAGE_HELP = (
    "Time by stage. Merge, lookup and its parts, rank and answer are counted once per batch, all others once "
    "per request."
)


class ServingMetrics:
    """Counts and times of one service; `state` is read when they are. Thread-safe."""

    def __init__(self, state: Collector | None = None) -> None:
        self._state = state
        # A registry of its own, so that several services in one process don't share names.
        registry = self._registry = CollectorRegistry()
        # Of several workers on one port only one's would be told.
        ProcessCollector(registry=registry)
        if state is not None:
            registry.register(state)
        counters = self._counters = {
            name: Counter(f"shardrank_{name}", text, labels, registry=registry)
            for name, (text, labels) in _COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(f"shardrank_{name}", text, labels, registry=registry, multiprocess_mode=mode)
            for name, (text, labels, mode) in _GAUGES.items()
        }
        histogram = partial(Histogram, registry=registry)
        stages = histogram("shardrank_stage_seconds", _STAGE_HELP, ("model", "stage", "method"), buckets=_SECONDS)
        requests = histogram("shardrank_batch_requests", "Requests in a batch.", ("model",), buckets=_BATCH_REQUESTS)
        candidates = histogram(
            "shardrank_batch_candidates", "Candidates in a batch.", ("model",), buckets=_BATCH_CANDIDATES
        )
        self.buffered_bytes: Callable[[], int] = lambda: 0
        self.num_in_flight: Callable[[], int] = lambda: 0
        # Looking a child up by its labels takes longer than counting, so those that requests need are kept.
        self._counter = cache(lambda name, *labels: counters[name].labels(*labels))
        self._of_stages = cache(
            lambda names, model, method: tuple(stages.labels(model, stage, method) for stage in names)
        )
        self._sizes = cache(lambda model: (requests.labels(model), candidates.labels(model)))
        # By model, in the order of `LookupTimes.wire_bytes`.
        sent, received = counters["shard_request_bytes"], counters["shard_answer_bytes"]
        self._of_wire = cache(
            lambda model: (sent.labels(model), *(received.labels(model, form) for form in WIRE_FORMS))
        )
        # Observations that are not in their histograms yet. Made one by one, between work that needs the processor's
        # caches, each costs three times what it costs after another one. Thread-safe: both ends of a deque are.
        self._kept: Kept = deque()
        self._by = 1

    def uncounted(self) -> ServingMetrics:
        """Return metrics that make the series of what they observe, and count nothing."""
        other = copy(self)
        other._kept, other._by = deque(maxlen=0), 0
        return other

    def call_ended(self, call: Call, status: str, outcome: Outcome | None, now: float) -> None:
        """Count a call that ended now: its status (`ok` or its error's kind), its version's outcome, its times."""
        self._counter("requests", call.api, call.method, call.model, status).inc(self._by)
        if status != "ok":
            self.failed(call.api, call.method, status)
        stages: tuple[str, ...] = ("total",)
        seconds: tuple[float, ...] = (now - call.started_at,)
        if call.batch is not None and call.encoded_at:
            stages, seconds = CALL_STAGES, (*call.around_batch(), *seconds)
        self._kept.append((self._of_stages(stages, call.model, call.method), seconds))
        if outcome is not None:
            self._counter("version_requests", call.model, str(call.version), outcome).inc(self._by)
        if len(self._kept) >= MAX_KEPT:
            self._make_observations()

    def refused(self, api: str, method: str, model: str, kind: str) -> None:
        """Count a call that was refused before it was received, so that no time of it is known."""
        self._counter("requests", api, method, model, kind).inc(self._by)
        self._counter("errors", api, method, kind).inc(self._by)

    def batch_ended(self, model: str, times: BatchTimes, method: str) -> None:
        """Observe the size and the stages of a batch."""
        stages: tuple[str, ...] = CARD_STAGES
        seconds: tuple[float, ...] = (times.merge_s, times.lookup_s, times.rank_s, times.answer_s)
        if times.lookup is not None:
            stages, seconds = BATCH_STAGES, (*times.seconds(), times.lookup_s)
            if times.lookup.wire_bytes[0]:
                for count, size in zip(self._of_wire(model), times.lookup.wire_bytes, strict=True):
                    count.inc(size * self._by)
        self._kept.append((self._of_stages(stages, model, method), seconds))
        if times.num_candidates:
            self._kept.append((self._sizes(model), (times.num_requests, times.num_candidates)))
        if len(self._kept) >= MAX_KEPT:
            self._make_observations()

    def failed(self, api: str, method: str, kind: str) -> None:
        """Count an error, of a call or of what is no call, such as a connection."""
        self._counter("errors", api, method, kind).inc(self._by)

    def replica_events(self, model: str) -> ReplicaEvents:
        """Return what counts hedges, retries and ejections of one of a model's routers."""
        ejected = self._gauges["replicas_ejected"]
        return ReplicaEvents(
            retried=partial(self.count, "shard_retries", model),
            denied=partial(self.count, "shard_retries_denied", model),
            ejected=partial(self.count, "replica_ejections", model),
            ejected_change=lambda shard, more: ejected.labels(model, str(shard)).inc(more),
        )

    def count(self, name: str, *labels: object, by: float = 1) -> None:
        """Count by one of the names of `_COUNTERS`, and its labels."""
        self._counters[name].labels(*labels).inc(by * self._by)

    def set_version(self, name: str, model: str, version: int, value: float) -> None:
        """Set one of the gauges that have a value for each version."""
        self._gauges[name].labels(model, version).set(value)

    def hot_rows(self, status: HotStatus) -> None:
        """Set what a version's tier of hot rows holds, and count what it counted since the last status."""
        values = {"hot_rows": status.rows, "hot_bytes": status.size_bytes, "hot_sequence": status.sequence}
        for name, value in values.items():
            self.set_version(name, status.model, status.version, value)
        for table, lookups, hits in zip(status.tables, status.lookups.tolist(), status.hits.tolist(), strict=True):
            if lookups:
                self.count("hot_lookups", status.model, table, by=lookups)
                self.count("hot_hits", status.model, table, by=hits)

    def recorded(self, outcome: str, requests: int, size_bytes: int) -> None:
        """Count requests that were chosen to be recorded: `written`, with their bytes on disk, or `dropped`."""
        self.count("recorded_requests", outcome, by=requests)
        self._counters["recorded_bytes"].inc(size_bytes)

    def forget_version(self, model: str, version: int) -> None:
        """Drop what is told of one version. With several workers on one port their files keep it."""
        if MULTIPROCESS_VARIABLE in os.environ or not self._by:
            return
        self._counter.cache_clear()
        for metric in (*self._counters.values(), *self._gauges.values()):
            if "version" in metric._labelnames:
                metric.remove_by_labels({"model": model, "version": str(version)})

    def _make_observations(self) -> None:
        make_observations(self._kept)
        self._gauges["buffered_bytes"].set(self.buffered_bytes())
        self._gauges["requests_in_flight"].set(self.num_in_flight())

    async def keep_up(self) -> None:
        """Keep this process's numbers where other workers look for them, until it is cancelled."""
        while True:
            await asyncio.sleep(KEEP_UP_S)
            self._make_observations()

    def render(self) -> bytes:
        """Write the exposition text."""
        self._make_observations()
        if MULTIPROCESS_VARIABLE not in os.environ:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        if self._state is not None:
            registry.register(self._state)
        return generate_latest(registry)


def make_observations(kept: Kept) -> None:
    """Put what is kept, values for as many histograms each, into these; `kept` may be added to meanwhile."""
    by_histogram: defaultdict[Histogram, list[float]] = defaultdict(list)
    # Another thread may pop the last.
    with suppress(IndexError):
        while True:
            for histogram, value in zip(*kept.popleft(), strict=True):
                by_histogram[histogram].append(value)
    for histogram, values in by_histogram.items():
        observe_all(histogram, values)


def observe_all(histogram: Histogram, values: list[float]) -> None:
    """Observe many values at once, none NaN: the library's own way looks for the bucket of one after the other.

    It fills the library's private fields; a test compares them with what the library makes of the same values.
    """
    for bucket, count in enumerate(np.bincount(np.searchsorted(histogram._upper_bounds, values)).tolist()):
        if count:
            histogram._buckets[bucket].inc(count)
    histogram._sum.inc(sum(values))
