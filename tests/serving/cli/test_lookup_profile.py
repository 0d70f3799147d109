"""Profiles: what a batch asks of each table, from told hotness, golden requests, counts."""

from __future__ import annotations

import numpy as np
import pytest

from loader.golden import GoldenRequests
from serving.cli.capacity import LookupProfile
from serving.errors import LookupProfileError
from shard_node.cuda.cost_model import BagLoad
from shard_node.table_layout import TableLayout
from shardrank_testing.snapshots import make_spec


def loads_by_name(profile, requests, candidates):
    spec = make_spec()
    layout = TableLayout.of(spec)
    loads = profile.loads(spec, layout, requests, candidates)
    return {table.name: load for table, load in zip(layout.tables, loads, strict=True)}


def test_context_features_are_looked_up_once_a_request_and_others_once_a_candidate():
    profile = LookupProfile(hotness={"film": 2, "history": 30, "genre": 1.5})
    loads = loads_by_name(profile, requests=3, candidates=100)
    assert loads["user"] == BagLoad(3, 3, 1)
    # `film` is pooled, once a candidate; each id of `history`, once a request, is a row of its own.
    assert loads["film"] == BagLoad(2 * 100 + 30 * 3, 100 + 30 * 3, 2)
    assert loads["genre"] == BagLoad(150, 100, 1.5)
    assert loads["tag"] == BagLoad(100 + 3, 100 + 3, 1)


def test_golden_requests_tell_the_hotness_and_the_longest_bag():
    lengths = {"film": np.array([1, 4, 0, 3], np.int32), "history": np.array([20, 30], np.int32)}
    golden = GoldenRequests(
        num_candidates=np.array([1, 3], np.int32),
        values={name: np.zeros(one.sum(), np.int64) for name, one in lengths.items()},
        lengths=lengths,
        context_dense=np.zeros((2, 0), np.float32),
        candidate_dense=np.zeros((4, 0), np.float32),
        scores=np.zeros(4, np.float32),
    )
    profile = LookupProfile.of_requests(golden)
    assert [profile.ids_of(name) for name in ("film", "history", "genre")] == [2, 25, 1]
    assert profile.longest == {"film": 4, "history": 30}


def test_told_hotness_comes_before_what_was_found():
    told = LookupProfile({"film": 3, "user": 1}, {"film": 9}).with_hotness(make_spec(), {"film": 40})
    assert (told.ids_of("film"), told.ids_of("user"), told.longest["film"]) == (40, 1, 40)


@pytest.mark.parametrize(
    ("told", "problem"),
    [({"nobody": 1}, "no such feature"), ({"film": -1}, "allowed is 0"), ({"film": float("nan")}, "allowed is 0")],
)
def test_hotness_that_can_not_be_is_refused(told, problem):
    with pytest.raises(LookupProfileError, match=problem):
        LookupProfile().with_hotness(make_spec(), told)


def test_a_told_skew_replaces_counts_and_is_checked():
    profile = LookupProfile(counts={"film": np.ones(777, np.uint32)}).with_zipf(1.05)
    assert (profile.zipf, profile.counts) == (1.05, {})
    for zipf in (-0.1, 9.0, float("nan")):
        with pytest.raises(LookupProfileError, match=r"allowed is 0\.\.8"):
            profile.with_zipf(zipf)
