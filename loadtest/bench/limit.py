"""The limit of serving: the same batches, from raw ids to scores, computed in this process without a server.

Nothing is received, parsed, queued, joined, counted, sorted or encoded: batches are ready in memory. What a server
uses beyond this is what it costs to be one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import uvloop

from loader.memory import settle_heap
from loader.snapshot.reader import Snapshot
from loadtest.bench.harness import Values
from loadtest.bench.tables import make_node, make_router
from loadtest.workloads.catalog import BENCH_REQUESTS, BenchWorkload, bench_requests
from router.feature_schema import FeatureSchema
from router.plan import Plan
from serving.formats.requests import RankRequest
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from serving.models.layers import NumberFormat
from serving.observe.calls import VersionCounter
from serving.observe.metrics import ServingMetrics
from serving.rank.ranking import MergedBatch, Ranking, merge_bags
from serving.versions.served_model import ranking_parts
from shard_node.bags import Float32Array
from shard_node.node import LocalShard

DEADLINE_S = 600.0


class Limit:
    """A model in this process.

    Raises:
        ShardrankError: as loading a snapshot.
    """

    def __init__(self, path: Path, dtype: NumberFormat) -> None:
        snapshot = Snapshot.open(path, verify=False)
        self._model, self._version = snapshot.spec.model, snapshot.version
        plan = Plan.make(snapshot.spec)
        shard = LocalShard(make_node(snapshot, plan))
        self._router = make_router(snapshot, plan, [shard])
        schema = RequestSchema(FeatureSchema.of(snapshot.spec), RequestLimits())
        parts = ranking_parts(snapshot, schema, dtype)
        self._ranking = Ranking(parts, self._router, [shard], ServingMetrics(), VersionCounter())
        # As servers do once they have started.
        settle_heap()

    def compute(self, workload: BenchWorkload, batch_requests: float, seconds: float) -> Values:
        """Score batches for some time; sizes next to the mean, `batch_requests`, are mixed to it."""
        small = int(batch_requests)
        batches = {size: _batches(workload, size) for size in (small, small + 1)}
        return uvloop.run(self._compute(batches, batch_requests, seconds))

    async def _compute(self, batches: dict[int, list[MergedBatch]], batch_requests: float, seconds: float) -> Values:
        requests, times = 0, list[float]()
        # Once before the clock, so that every buffer is there.
        await self._scores(batches[int(batch_requests)][0])
        started_at, cpu_s = time.perf_counter(), time.process_time()
        ended_at = started_at
        for number, size in enumerate(batch_sizes(batch_requests)):
            await self._scores(batches[size][number % len(batches[size])])
            before, ended_at = ended_at, time.perf_counter()
            times.append(ended_at - before)
            requests += size
            if ended_at - started_at >= seconds:
                break
        cpu_s = time.process_time() - cpu_s
        return {
            "CPU of a request": 1e3 * cpu_s / requests,
            "requests": requests / (ended_at - started_at),
            "batch": batch_requests,
            "time of a batch": 1e3 * float(np.median(times)),
        }

    def score(self, workload: BenchWorkload, request: int) -> Float32Array:
        """Score one request of the pool: float32 [candidates]."""
        return uvloop.run(self._scores(_merged([_requests(workload)[request]])))

    async def _scores(self, batch: MergedBatch) -> Float32Array:
        deadline = time.monotonic() + DEADLINE_S
        embeddings = await self._router.lookup(self._model, self._version, batch.bags, deadline)
        scores: Float32Array = self._ranking.score_rows(batch, embeddings)[0]
        return scores


def batch_sizes(mean: float) -> Iterator[int]:
    """Yield sizes without end, each the next whole number below or above `mean`, whose sum keeps closest to it."""
    small, expected, total = int(mean), 0.0, 0
    while True:
        expected += mean
        size = small if total + small >= expected - 0.5 else small + 1
        total += size
        yield size


@lru_cache(maxsize=4)
def _requests(workload: BenchWorkload) -> list[RankRequest]:
    return bench_requests(workload.shape, workload.head, workload.hotness, BENCH_REQUESTS)


@lru_cache(maxsize=8)
def _batches(workload: BenchWorkload, size: int) -> list[MergedBatch]:
    """Every request of the pool once or twice, in batches of `size`."""
    requests = _requests(workload)
    turns = np.arange(-(-len(requests) // size) * size) % len(requests)
    return [_merged([requests[turn] for turn in turns[first : first + size]]) for first in range(0, turns.size, size)]


def _merged(requests: Sequence[RankRequest]) -> MergedBatch:
    counts = np.array([request.num_candidates for request in requests], np.int64)
    return MergedBatch(
        merge_bags([request.bags for request in requests]),
        np.concatenate([[0], np.cumsum(counts)]),
        np.repeat(np.arange(counts.size), counts),
        np.stack([request.context_dense for request in requests]),
        np.concatenate([request.candidate_dense for request in requests]),
    )
