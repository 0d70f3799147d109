"""What each call and each batch leaves: the record of its times, and what a version counts of it.

docs/api.md (Stages) says what each stage is; the stages of a request follow each other without overlap.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any, Literal, TypeAlias

import numpy as np

from loader.errors import OverloadedError, ShardrankError
from loader.registry.fleet import LATENCY_BOUNDS_MS, VersionStats
from router.router import LookupTimes
from serving.formats.requests import Request
from shard_node.bags import Float32Array
from shard_node.generation import Lease
from shard_node.tracing import SpanContext, SpanSink

Outcome: TypeAlias = Literal["ok", "error"]

BEFORE_BATCH = ("receive", "decode", "parse", "queue")
IN_BATCH = ("merge", "map", "split", "shard_wait", "add", "rank", "answer")
AFTER_BATCH = ("hand_back", "encode")
STAGES = BEFORE_BATCH + IN_BATCH + AFTER_BATCH


@dataclass(slots=True, eq=False)
class Traced:
    """The span of a call or batch whose trace is sampled, before its times are all known.

    `links` are of a call its batches, of a batch its sampled calls; `lookup` is the span that calls to shards are
    under.
    """

    sink: SpanSink
    context: SpanContext
    parent: SpanContext | None = None
    links: tuple[SpanContext, ...] = ()
    lookup: SpanContext | None = None


@dataclass(slots=True, eq=False)
class BatchTimes:
    """Where the time of one batch went, in seconds; every request in it has waited for all of it.

    On cards `lookup` is None and `lookup_s` has the mapping and packing of ids. `started_at` and `ended_at` are
    monotonic seconds; a lookup has no candidates.
    """

    num_requests: int = 1
    num_candidates: int = 0
    merge_s: float = 0.0
    lookup: LookupTimes | None = None
    lookup_s: float = 0.0
    rank_s: float = 0.0
    answer_s: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0
    trace: Traced | None = None

    def seconds(self) -> tuple[float, ...]:
        """List them by stage, in the order of `IN_BATCH`."""
        times = self.lookup
        if times is None:
            # On cards ids are mapped and packed by whoever ranks, and no shard is asked.
            return (self.merge_s, 0.0, 0.0, 0.0, 0.0, self.lookup_s + self.rank_s, self.answer_s)
        return self.merge_s, times.map_s, times.split_s, times.shard_wait_s, times.add_s, self.rank_s, self.answer_s


@dataclass(slots=True, eq=False)
class Call:
    """One call of an API, from its head to its response. Times are monotonic seconds, 0 until they are known.

    Attributes:
        api, method: `http`, `grpc`, `oip_http`, `oip_grpc` or `embedded`; `rank`, `lookup` or `model`.
        model: name of the served model, once it is known; never what a client made up.
        version, counter: of what answers it, once that is chosen: at `leased_at`.
        request_id: of its metadata; that of the request itself is in `request`.
        is_pinned: its client named the version, so no guard counts it.
        is_complete: whether it counts towards `max_in_flight`; until then towards `max_receiving`.
        lease: on the version that answers, unset before `leased_at`; released before the answer is passed on.
        request: parsed and checked, unset before `parsed_at`.
        future: gets the answer or the error of a queued request; None of others, and once no client waits, to break
            the cycle with an error's traceback.
        loop: of the future; None for a `concurrent.futures.Future`.
        longest_sequence: ids in the longest bag of a feature that is not pooled.
        fraction: of a full batch.
        is_abandoned: set when no client waits any more; if it has not begun, it is dropped.
    """

    api: str
    method: str
    started_at: float
    request_id: str = ""
    model: str = ""
    version: int = 0
    counter: VersionCounter | None = None
    is_pinned: bool = False
    is_complete: bool = False
    deadline: float = math.inf
    received_at: float = 0.0
    leased_at: float = 0.0
    parsed_at: float = 0.0
    queue_s: float = 0.0
    batch: BatchTimes | None = None
    answered_at: float = 0.0
    encoded_at: float = 0.0
    trace: Traced | None = None
    request: Request = field(init=False, repr=False)
    lease: Lease[Any] = field(init=False, repr=False)
    future: asyncio.Future[Any] | concurrent.futures.Future[Any] | None = None
    loop: asyncio.AbstractEventLoop | None = None
    longest_sequence: int = 0
    fraction: float = 0.0
    is_abandoned: bool = False

    def around_batch(self) -> tuple[float, ...]:
        """List the seconds in each stage of `BEFORE_BATCH` and of `AFTER_BATCH`, of a call that was answered."""
        hand_back_s = self.answered_at - self.batch.ended_at if self.batch is not None else 0.0
        return (
            self.received_at - self.started_at,
            self.leased_at - self.received_at,
            self.parsed_at - self.leased_at,
            self.queue_s,
            hand_back_s,
            self.encoded_at - self.answered_at,
        )


def outcome_of(error: BaseException) -> Outcome | None:
    """Return what a request that failed counts as for its version; None if the version has no part in it."""
    # A client could fail one version alone, with a routing key of its share: what clients cause counts for none.
    # A client that leaves, by closing its connection or by cancelling, is no Exception or has a status below 500.
    # What is shed was not begun. (A version that is shutting down is not shed: while it is leased, only the end of all
    # its replicas can bring that about.) Rows that are too old are the client's doing if its request says how old.
    is_clients = isinstance(error, ShardrankError) and error.kind == "rows_stale" and error.field
    if is_clients or isinstance(error, OverloadedError) or not isinstance(error, Exception):
        return None
    return "error" if not isinstance(error, ShardrankError) or error.http_status >= 500 else None


@dataclass(slots=True)
class InferenceTotals:
    """Sums over rank requests, whatever API they came by; `failed` ones had a version. `last` is monotonic seconds.

    `succeeded_s` is from arrival to answer, of it `queue_s` before a batch; `batches` adds each one's fraction of its
    batch.
    """

    succeeded: int = 0
    succeeded_s: float = 0.0
    queue_s: float = 0.0
    input_s: float = 0.0
    infer_s: float = 0.0
    output_s: float = 0.0
    batches: float = 0.0
    failed: int = 0
    failed_s: float = 0.0
    last: float | None = None


class VersionCounter:
    """Counts of one version in this process; they only grow. Thread-safe.

    `stats`, which compares a canary with the live version, leaves out requests that named their version.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answered, self._failed = ([0] * (len(LATENCY_BOUNDS_MS) + 1) for _ in range(2))
        self._score_count = 0
        self._score_sum = self._score_square_sum = 0.0
        self._keys = self._missing_keys = 0
        self._totals = InferenceTotals()

    def ended(self, call: Call, outcome: Outcome | None, now: float) -> None:
        """Count a call that ended now: `ok` if it was answered, else with what `outcome_of` says."""
        bucket = bisect_left(LATENCY_BOUNDS_MS, 1000.0 * (now - call.leased_at))
        seconds, batch, totals = now - call.started_at, call.batch, self._totals
        with self._lock:
            if outcome is not None and not call.is_pinned:
                (self._failed if outcome == "error" else self._answered)[bucket] += 1
            if call.method != "rank":
                return
            totals.last = now
            if outcome != "ok" or batch is None:
                totals.failed += 1
                totals.failed_s += seconds
                return
            totals.succeeded += 1
            totals.succeeded_s += seconds
            totals.queue_s += call.queue_s
            totals.input_s += batch.merge_s
            totals.infer_s += batch.lookup_s + batch.rank_s
            totals.output_s += batch.answer_s
            totals.batches += 1 / batch.num_requests

    def is_below_median(self, seconds: float) -> bool:
        """Return whether more than half of the answers took longer, as far as buckets tell; false without any."""
        answered = self._answered
        return 2 * sum(answered[: bisect_left(LATENCY_BOUNDS_MS, 1000.0 * seconds) + 1]) < sum(answered)

    def scored(self, scores: Float32Array) -> None:
        """Add the scores of a batch that are answered, float32 [N], all finite."""
        # float32 sums of millions of scores would lose the last ones.
        exact = scores.astype(np.float64)
        total, square = float(exact.sum()), float(exact @ exact)
        with self._lock:
            self._score_count += exact.size
            self._score_sum += total
            self._score_square_sum += square

    def looked_up(self, keys: int, missing: int) -> None:
        """Add keys that were looked up in tables with keys, and how many were missing."""
        with self._lock:
            self._keys += keys
            self._missing_keys += missing

    def stats(self) -> VersionStats:
        """Tell all counts as of one moment."""
        with self._lock:
            latency_counts = tuple(map(add, self._answered, self._failed))
            return VersionStats(
                requests=(requests := sum(latency_counts)),
                errors=sum(self._failed),
                latency_counts=latency_counts if requests else (),
                score_count=self._score_count,
                score_sum=self._score_sum,
                score_square_sum=self._score_square_sum,
                keys=self._keys,
                missing_keys=self._missing_keys,
            )

    def totals(self) -> InferenceTotals:
        """Tell the sums over rank requests as of one moment."""
        with self._lock:
            return replace(self._totals)
