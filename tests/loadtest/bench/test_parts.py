"""The arithmetic of benchmarks: what they compare is what they say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import uvloop

from loader.errors import ConfigError
from loadtest.bench.serving import Limit, requests_of
from loadtest.servers import SERVED_PACKAGES, checked_checkout
from loadtest.workloads.catalog import BenchShape, BenchWorkload, bench_payloads, bench_spec
from loadtest.workloads.prepare import write_random_snapshot
from serving.embedded import Ranker
from serving.rank.ranking import merge

SHAPE = BenchShape(features=3, embedding_dim=8, rows=200, dense=2, candidates="2-9:5")


@pytest.mark.parametrize("varied", [True, False])
@pytest.mark.parametrize(("head", "hotness"), [("mlp", 1), ("dlrm", 4)])
def test_limit_gives_the_scores_of_a_served_model(tmp_path: Path, head, hotness, varied) -> None:
    shape = SHAPE.model_copy(update={"varied": varied})
    path = write_random_snapshot(bench_spec(shape, head), tmp_path)
    workload = BenchWorkload(shape=shape, head=head, hotness=hotness)
    limit, pool = Limit(path, "float32"), bench_payloads(workload, "json", 5)
    assert len({payload.num_candidates for payload in pool}) > 1
    with Ranker.open(path, dtype="float32") as ranker:
        for payload, request in zip(pool, requests_of(workload), strict=False):
            scores = uvloop.run(limit.scores(merge([request])))
            np.testing.assert_allclose(
                scores, ranker.rank(path.parent.name, **json.loads(payload.body)).scores, rtol=0, atol=1e-6
            )
    computed = uvloop.run(limit.compute(workload, 2.5, 0.05))
    assert computed["batch"] == pytest.approx(2.5, abs=0.3)
    assert 0 < computed["CPU of a request"] <= 1e3 / computed["requests"] * 1.2
    assert computed["time of a batch"] > 0


def test_requests_of_a_limit_are_never_fewer(monkeypatch) -> None:
    monkeypatch.setattr("loadtest.workloads.catalog.MAX_BENCH_BYTES", 2000)
    with pytest.raises(ConfigError, match="hotness 4: 64 requests of json are more than 2000 bytes"):
        bench_payloads(BenchWorkload(shape=SHAPE, head="mlp", hotness=4), "json")


def test_another_checkout_is_a_folder_with_its_packages(tmp_path: Path) -> None:
    repository, empty = tmp_path / "repository", tmp_path / "empty"
    for package in SERVED_PACKAGES:
        (repository / package).mkdir(parents=True)
        (repository / package / "__init__.py").touch()
    empty.mkdir()
    assert checked_checkout(repository) == repository
    with pytest.raises(ConfigError, match="it has no loader"):
        checked_checkout(empty)
