"""The parts of the serving benchmark: the closed loop, the limit, and the processes that they run in."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.errors import (
    LoadError,
    WorkloadError,
)
from loadtest.load.workers import Workers
from loadtest.serving_limit import Limit, LimitConfig, LimitProcess, batch_sizes
from loadtest.workloads.catalog import BenchShape, bench_payloads, bench_spec
from loadtest.workloads.prepare import write_random_snapshot
from serving.embedded import Ranker

SHAPE = BenchShape(features=3, embedding_dim=8, rows=200, dense=2, candidates="7")
CANDIDATES = 7


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    store = tmp_path_factory.mktemp("store")
    return {head: write_random_snapshot(bench_spec(SHAPE, head), store) for head in ("mlp", "dlrm")}


def limit_config(snapshot: Path, head: str) -> LimitConfig:
    return LimitConfig(snapshot=snapshot, shape=SHAPE, head=head, dtype="float32")


@pytest.mark.parametrize("varied", [True, False])
@pytest.mark.parametrize("head", ["mlp", "dlrm"])
@pytest.mark.parametrize("hotness", [1, 4])
def test_the_limit_gives_the_scores_of_a_served_model_for_the_same_request(snapshots, head, hotness, varied) -> None:
    shape = SHAPE.model_copy(update={"candidates": "2-9:5", "varied": varied})
    config = replace(limit_config(snapshots[head], head), shape=shape)
    limit, pool = Limit(config), bench_payloads(shape, head, hotness, "json", 5)
    assert len({one.num_candidates for one in pool}) > 1
    with Ranker.open(snapshots[head], dtype="float32") as ranker:
        for number in range(5):
            expected = ranker.rank(json.loads(pool[number].body))["scores"]
            found = asyncio.run(limit.score(hotness, number))
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@given(mean=st.floats(1, 64))
def test_batches_of_two_sizes_keep_to_any_mean(mean: float) -> None:
    sizes = list(itertools.islice(batch_sizes(mean), 200))
    assert set(sizes) <= {int(mean), int(mean) + 1}
    for count, total in enumerate(itertools.accumulate(sizes), start=1):
        assert abs(total - mean * count) <= 1


def test_the_limit_scores_whole_batches_and_tells_what_they_took(snapshots) -> None:
    with Workers() as worker:
        limit = LimitProcess(worker, limit_config(snapshots["mlp"], "mlp"))
        told = limit.compute(hotness=1, batch_requests=2.5, seconds=0.05)
        assert told.requests >= 2
        assert told.seconds >= 0.05
        assert 0 < told.cpu_s <= told.seconds * (os.cpu_count() or 1) + 0.1
        assert told.batch_p50_ms > 0
        assert len(limit.score(hotness=1, request=0)) == CANDIDATES


def test_a_limit_without_its_snapshot_says_so(tmp_path) -> None:
    config = LimitConfig(tmp_path / "none" / "1", SHAPE, "mlp", "float32")
    with Workers() as worker, pytest.raises(LoadError, match="none"):
        LimitProcess(worker, config).score(hotness=1, request=0)


def test_a_pool_that_would_be_cut_short_is_refused_since_the_limit_computes_all_of_it(monkeypatch) -> None:
    monkeypatch.setattr("loadtest.workloads.catalog.MAX_BENCH_BYTES", 2000)
    with pytest.raises(WorkloadError, match="hotness 4: 64 requests of json are more than 2000 bytes"):
        bench_payloads(SHAPE, "mlp", 4, "json")
