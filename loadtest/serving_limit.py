"""The limit of serving: the same batches, from raw ids to scores, computed in a process without a server.

Nothing is received, parsed, queued, joined, counted, sorted or encoded: batches lie ready in memory. What a server
takes beyond this is what it costs to be one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch

from loader.memory import settle_heap
from loader.snapshot.reader import Snapshot
from loadtest.bench_lookup import make_node, make_router
from loadtest.load.generator import READY_TIMEOUT_S
from loadtest.load.workers import Workers, event_loop
from loadtest.workloads.catalog import BENCH_REQUESTS, BenchShape, Head, bench_requests
from loadtest.workloads.workload import WorkloadRequest
from router.feature_schema import FeatureSchema
from router.plan import Plan
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


@dataclass(frozen=True, slots=True)
class LimitConfig:
    """Which model is computed: of a snapshot's folder, with the benchmark's requests."""

    snapshot: Path
    shape: BenchShape
    head: Head
    dtype: NumberFormat


@dataclass(frozen=True, slots=True)
class Computed:
    """What batches took.

    Attributes:
        requests: scored.
        cpu_s: processor time of the process meanwhile.
        seconds: of the clock.
        batch_p50_ms: of a batch.
    """

    requests: int
    cpu_s: float
    seconds: float
    batch_p50_ms: float


class Limit:
    """A model in this process, and the requests of the benchmark.

    Raises:
        ShardrankError: as loading a snapshot.
    """

    def __init__(self, config: LimitConfig) -> None:
        snapshot = Snapshot.open(config.snapshot, verify=False)
        self._model, self._version = snapshot.spec.model, snapshot.version
        plan = Plan.make(snapshot.spec)
        node = make_node(snapshot, plan)
        schema = RequestSchema(FeatureSchema.of(snapshot.spec), RequestLimits())
        parts = ranking_parts(snapshot, schema, config.dtype)
        shard = LocalShard(node)
        self._router = make_router(snapshot, plan, shard)
        self._ranking = Ranking(parts, self._router, [shard], ServingMetrics(), VersionCounter())
        draw = partial(bench_requests, config.shape, config.head, count=BENCH_REQUESTS)
        self._requests = lru_cache(maxsize=4)(draw)
        self._batches = lru_cache(maxsize=8)(self._make_batches)

    async def compute(self, hotness: int, batch_requests: float, seconds: float) -> Computed:
        """Score batches in turn, until the time is over."""
        small = int(batch_requests)
        batches = {size: self._batches(hotness, size) for size in (small, small + 1)}
        done, taken_s = 0, []
        # Once before the clock, so that every buffer is there.
        await self._scores(batches[small][0])
        began, cpu_began = time.perf_counter(), time.process_time()
        ends = began
        for number, size in enumerate(batch_sizes(batch_requests)):
            await self._scores(batches[size][number % len(batches[size])])
            begun, ends = ends, time.perf_counter()
            taken_s.append(ends - begun)
            done += size
            if ends - began >= seconds:
                break
        return Computed(
            requests=done,
            cpu_s=time.process_time() - cpu_began,
            seconds=ends - began,
            batch_p50_ms=float(np.median(taken_s)) * 1e3,
        )

    async def score(self, hotness: int, request: int) -> Float32Array:
        """Score one request of the pool: float32 [candidates]."""
        return await self._scores(_merged([self._requests(hotness)[request]]))

    async def _scores(self, batch: MergedBatch) -> Float32Array:
        deadline = time.monotonic() + DEADLINE_S
        embeddings = await self._router.lookup(self._model, self._version, batch.bags, deadline)
        scores: Float32Array = self._ranking.score_rows(batch, embeddings)[0]
        return scores

    def _make_batches(self, hotness: int, size: int) -> list[MergedBatch]:
        """Every request of the pool once or twice, in batches of `size`."""
        requests = self._requests(hotness)
        count = -(-len(requests) // size)
        turns = np.arange(count * size) % len(requests)
        return [
            _merged([requests[turn] for turn in turns[first : first + size]]) for first in range(0, turns.size, size)
        ]


def batch_sizes(mean: float) -> Iterator[int]:
    """Give sizes without end, each the next whole number below or above `mean`, whose sum keeps closest to it."""
    small, wanted, given = int(mean), 0.0, 0
    while True:
        wanted += mean
        size = small if given + small >= wanted - 0.5 else small + 1
        given += size
        yield size


def _merged(requests: list[WorkloadRequest]) -> MergedBatch:
    counts = np.array([request.num_candidates for request in requests], np.int64)
    return MergedBatch(
        merge_bags([request.bags for request in requests]),
        np.concatenate([[0], np.cumsum(counts)]),
        np.repeat(np.arange(counts.size), counts),
        np.stack([request.context_dense for request in requests]),
        np.concatenate([request.candidate_dense for request in requests]),
    )


@lru_cache(maxsize=1)
def _open(config: LimitConfig) -> Limit:
    # As each ranking replica of a server, and with its memory settled like a server's.
    torch.set_num_threads(1)
    limit = Limit(config)
    settle_heap()
    return limit


def _compute(config: LimitConfig, hotness: int, batch_requests: float, seconds: float) -> Computed:
    return event_loop().run(_open(config).compute(hotness, batch_requests, seconds))


def _score(config: LimitConfig, hotness: int, request: int) -> list[float]:
    scores: list[float] = event_loop().run(_open(config).score(hotness, request)).tolist()
    return scores


@dataclass(frozen=True, slots=True)
class LimitProcess:
    """The limit in a process of its own. Methods raise as `Workers.call`."""

    worker: Workers
    config: LimitConfig

    def compute(self, hotness: int, batch_requests: float, seconds: float) -> Computed:
        """Score batches for some time; sizes next to the mean, `batch_requests`, are mixed to it."""
        asked = self.config, hotness, batch_requests, seconds
        return self.worker.call(_compute, [asked], seconds + READY_TIMEOUT_S)[0]

    def score(self, hotness: int, request: int) -> Float32Array:
        """Score one request of the pool: float32 [candidates]."""
        return np.array(self.worker.call(_score, [(self.config, hotness, request)], READY_TIMEOUT_S)[0], np.float32)
