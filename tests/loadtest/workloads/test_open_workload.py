"""Workloads by name: the models are the published ones, and what is chosen is what is asked."""

from __future__ import annotations

import numpy as np
import pytest

from loader.errors import ConfigError
from loadtest.workloads.catalog import BenchShape, bench_spec, open_workload
from loadtest.workloads.workload import features_of
from router.planning.inputs import CATALOG

DLRM_V2 = CATALOG["dlrm-v2"]["tables"]


def request_of(workload, seed: int = 0):
    request = workload.request(np.random.default_rng(seed))
    return request, {feature.name: feature for feature in features_of(workload.schema, request)}


def test_dlrm_v2_has_214_ids_a_candidate_and_published_tables():
    workload = open_workload("dlrm-v2", candidates="7", varied=False)
    request, features = request_of(workload)
    assert request.bags.num_values == 7 * 214
    assert request.candidate_dense.shape == (7, 13)
    for number, (_, (hotness,), rows, _) in enumerate(DLRM_V2):
        assert features[f"f{number}"].lengths.tolist() == [hotness] * 7
        assert features[f"f{number}"].values.max() < rows
    # Of 40 million rows, uniform ids are hardly ever among the first million.
    assert features["f0"].values.max() > 10**6


def test_merlin_tiny_has_its_tables_and_skewed_ids():
    workload = open_workload("merlin-tiny", candidates="300", varied=False)
    assert len(workload.spec.tables) == 55
    _, features = request_of(workload)
    assert features["f2_10"].lengths.tolist() == [10] * 300
    values, counts = np.unique(features["f2_10"].values, return_counts=True)
    # Of 3000 ids in 25 million rows, Zipf's first has one in about 12.
    assert counts.max() > 100
    # Features of one table share its popular rows.
    assert values[counts.argmax()] in features["f2_1"].values


def test_access_counts_are_those_of_the_ids_that_are_drawn():
    """Of Merlin's smallest model at a thousandth, candidate by candidate; uniform ids have none."""
    workload = open_workload("merlin-tiny:0.001", candidates="400", varied=False)
    counts = workload.access_counts(4000)
    seen = {name: np.zeros(of_table.size, np.int64) for name, of_table in counts.items()}
    rng = np.random.default_rng(0)
    for _ in range(10):
        for feature in features_of(workload.schema, workload.request(rng)):
            np.add.at(seen[f"t{feature.name[1:].partition('_')[0]}"], feature.values, 1)
    for name, of_table in counts.items():
        # Counts below 1 are left out, and each is rounded down.
        assert 0.3 * seen[name].sum() < of_table.sum() <= seen[name].sum()
        common = of_table > 100
        np.testing.assert_allclose(seen[name][common], of_table[common], rtol=0.5)
    # Rank 1 is 2^-1.05 of rank 0.
    first, second = np.sort(workload.access_counts(10**6)["t2"])[::-1][:2].astype(float)
    assert second / first == pytest.approx(2**-1.05, rel=1e-3)
    assert open_workload("dlrm-v2:0.001").access_counts() == {}


def test_requests_are_varied_around_the_published_ones():
    workload = open_workload("dlrm-v2:0.001")
    rng = np.random.default_rng(3)
    requests = [workload.request(rng) for _ in range(200)]
    counts = [request.num_candidates for request in requests]
    assert 50 <= min(counts) < 60
    assert 450 < max(counts) <= 500
    assert np.mean(counts) == pytest.approx(200, rel=0.15)
    lengths: dict[str, list[np.ndarray]] = {}
    for request in requests[:20]:
        for feature in features_of(workload.schema, request):
            lengths.setdefault(feature.name, []).append(feature.lengths)
    for number, (_, (hotness,), _, _) in enumerate(DLRM_V2):
        found = np.concatenate(lengths[f"f{number}"])
        assert found.mean() == pytest.approx(hotness, rel=0.1)
        expected = {0, 1, 2} if hotness == 1 else set(range(1, 2 * hotness))
        assert set(found.tolist()) <= expected
        assert (found.min(), found.max()) == (min(expected), max(expected))


def test_requests_that_do_not_vary_are_the_published_ones():
    workload = open_workload("merlin-tiny:0.001", varied=False)
    rng = np.random.default_rng(3)
    requests = [workload.request(rng) for _ in range(100)]
    assert min(one.num_candidates for one in requests) >= 100
    assert max(one.num_candidates for one in requests) > 500
    for feature in features_of(workload.schema, requests[0]):
        assert len(set(feature.lengths.tolist())) == 1


def test_scale_is_the_share_of_the_rows():
    tables = open_workload("dlrm-v2:0.01").spec.tables
    assert [table.num_embeddings for table in tables] == [max(1, round(0.01 * rows)) for _, _, rows, _ in DLRM_V2]


def test_a_bench_workload_has_the_hotness_of_its_name():
    workload = open_workload("bench-mlp:20")
    assert workload.spec == bench_spec(BenchShape(), "mlp")
    assert workload.name == "bench-mlp:20, ids uniform, candidates 50-500:200, ragged bags"
    _, features = request_of(workload)
    lengths = np.concatenate([feature.lengths for feature in features.values()])
    assert lengths.mean() == pytest.approx(20, rel=0.1)
    request, _ = request_of(open_workload("bench-dlrm", candidates="4", varied=False))
    assert request.bags.num_values == 4 * 26


def test_everything_that_was_chosen_is_in_the_name():
    workload = open_workload("dlrm-v2:0.01", ids="zipf:1.2", candidates="100")
    assert workload.name == "dlrm-v2:0.01, ids zipf:1.2, candidates 100, ragged bags"
    same = open_workload("dlrm-v2:0.01", varied=False)
    assert same.name == "dlrm-v2:0.01, ids uniform, candidates 100-700:270, fixed bags"


UNKNOWN = "dlrm films:x"
NO_SCALE = "dlrm-v2: dlrm-v2:0 dlrm-v2:1.5 dlrm-v2:nan dlrm-v2:-1 merlin-tiny:x"
NOT_HOTNESS = "bench-mlp: bench-mlp:0 bench-mlp:4097 bench-dlrm:1.5"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "workload") for text in ("", *UNKNOWN.split())),
        *((text, "the scale of its rows must be above 0 and at most 1") for text in NO_SCALE.split()),
        *((text, "is not a whole number of ids from 1 to 4096") for text in NOT_HOTNESS.split()),
    ],
)
def test_what_is_no_workload_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        open_workload(text)
