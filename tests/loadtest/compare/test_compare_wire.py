"""Bytes between serving process and shards: what is predicted is what sockets carry."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from loader.snapshot.reader import Snapshot
from loadtest.compare.arms import Budgets, CompareConfig, ServedArm
from loadtest.compare.run import compared_snapshot
from loadtest.compare.wire import ASKED, BACK, ServedWire, WirePredictor
from loadtest.load.config import OfferedLoad
from loadtest.workloads.catalog import open_workload
from shard_node.answer import EXACT, HALVES
from shardrank_testing.topologies import Topology, lookup, remote_router

REQUESTS = 24


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("wire_dtype", "replicate_bytes"), [("float32", 0), ("auto", 0), ("auto", 4000)])
def test_predicted_bytes_are_those_that_real_sockets_carry(tmp_path: Path, wire_dtype, replicate_bytes, shards):
    load = OfferedLoad(
        target="grpc://127.0.0.1:1", workload="dlrm-v2:0.0001", candidates="40", requests=REQUESTS, context_features=3
    )
    budgets = Budgets(device="cpu", replicate_bytes=replicate_bytes)
    config = CompareConfig(cards=(1,), shards=(shards,), budgets=budgets, wire_dtype=wire_dtype)
    folder = compared_snapshot(config, load, tmp_path / "store")
    snapshot = Snapshot.open(folder, verify=False)
    workload = open_workload(load.workload, candidates=load.candidates, context_features=load.context_features)
    rng = np.random.default_rng(1)
    requests = [workload.request(rng).bags for _ in range(REQUESTS)]
    topology = Topology(shards=shards, sharding=config.sharding, replicate_bytes=replicate_bytes)
    forms = EXACT if wire_dtype == "float32" else HALVES

    async def carried() -> list[tuple[int, ...]]:
        async with remote_router(snapshot, topology, tmp_path) as router:
            return [(await lookup(router, snapshot, one, forms=forms)).times.wire_bytes() for one in requests]

    asked, *answered = np.mean(asyncio.run(carried()), axis=0)
    served = ServedWire({}, candidates=40.0)
    predicted = WirePredictor(config, load, folder).of(ServedArm(cards=1, shards=shards), served)
    assert predicted[ASKED] == pytest.approx(asked, rel=0.02)
    assert predicted[BACK] == pytest.approx(sum(answered), rel=0.02)


METRICS = """\
# TYPE shardrank_requests counter
shardrank_requests_total{{status="ok"}} {answered}
# TYPE shardrank_batch_requests histogram
shardrank_batch_requests_bucket{{le="+Inf"}} {batches}
shardrank_batch_requests_count {batches}
shardrank_batch_requests_sum {requests}
# TYPE shardrank_batch_candidates histogram
shardrank_batch_candidates_bucket{{le="+Inf"}} {batches}
shardrank_batch_candidates_count {batches}
shardrank_batch_candidates_sum {candidates}
# TYPE shardrank_wire_fallback gauge
shardrank_wire_fallback{{version="1"}} {fallback}
"""


def test_sizes_of_batches_are_what_counters_grew_by():
    before = METRICS.format(answered=10, batches=4, requests=10, candidates=500, fallback=0)
    after = METRICS.format(answered=30, batches=9, requests=35, candidates=3000, fallback=1)
    assert ServedWire.between(before, after) == ServedWire({}, 5, 25 / 20, 100, has_halves=False)
    assert ServedWire.between(before, before) == ServedWire({})
