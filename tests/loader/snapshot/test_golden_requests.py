"""Golden requests: what fits a spec, and one request cut out of many."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from loader.errors import ExportError
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.tables import fingerprint_strings
from shardrank_testing.snapshots import make_spec, random_golden

SPEC = make_spec()


def test_single_requests_together_make_up_all_requests():
    golden = random_golden(SPEC, seed=3, num_requests=7)
    parts = [golden.request(index) for index in range(7)]
    for part in parts:
        part.check(SPEC)
        assert part.num_requests == 1
    for name, whole in golden.to_tensors().items():
        np.testing.assert_array_equal(np.concatenate([part.to_tensors()[name] for part in parts]), whole)
    with pytest.raises(IndexError, match="golden request 7 of 7"):
        golden.request(7)


def change(field, **features):
    """A function that replaces some features' arrays in one per-feature field."""
    return lambda golden: {field: {**getattr(golden, field), **{k: make(golden) for k, make in features.items()}}}


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        (lambda g: {"num_candidates": g.num_candidates.astype(np.int64)}, "num_candidates"),
        (lambda g: {"num_candidates": np.array([], np.int32)}, "num_candidates"),
        (lambda g: {"num_candidates": np.array([0, 1, 1], np.int32)}, "num_candidates"),
        (lambda g: {"scores": g.scores[:-1]}, "scores: expected float32"),
        (lambda g: {"scores": np.full_like(g.scores, np.nan)}, "scores: holds NaN"),
        (lambda g: {"context_dense": g.context_dense[:, :1]}, r"context_dense: expected float32 \[3, 2\]"),
        (lambda g: {"candidate_dense": g.candidate_dense.astype(np.float64)}, "candidate_dense"),
        (lambda g: {"values": {k: v for k, v in g.values.items() if k != "user"}}, "values: expected the features"),
        (change("lengths", extra=lambda g: np.zeros(3, np.int32)), "lengths: expected the features"),
        (lambda g: {"weights": {}}, "weights: expected the features"),
        (change("lengths", user=lambda g: g.lengths["user"][:-1]), "lengths/user: expected int32"),
        (change("lengths", user=lambda g: np.array([-1, 1, 1], np.int32)), "lengths/user: -1 is negative"),
        (change("values", user=lambda g: np.append(g.values["user"], 0)), "values/user: expected int64"),
        (change("values", user=lambda g: g.values["user"].astype(np.int32)), "values/user: expected int64"),
        (change("values", user=lambda g: g.values["user"] - 10_000), "values/user: .* is negative"),
        (change("values", user=lambda g: g.values["user"] + 1000), "not below num_embeddings 1000"),
        (change("weights", tag=lambda g: g.weights["tag"][:-1]), "weights/tag"),
        (change("weights", tag=lambda g: g.weights["tag"] * np.float32(np.inf)), "weights/tag: holds"),
    ],
)
def test_what_does_not_fit_is_refused_by_field_and_feature(replace, message):
    golden = random_golden(SPEC, seed=4)
    with pytest.raises(ExportError, match=message):
        dataclasses.replace(golden, **replace(golden)).check(SPEC)


def test_unknown_and_missing_tensors_are_refused():
    tensors = random_golden(SPEC, seed=4).to_tensors()
    with pytest.raises(ExportError, match="unknown tensor 'scores/user'"):
        GoldenRequests.from_tensors(tensors | {"scores/user": tensors["scores"]})
    del tensors["scores"]
    with pytest.raises(ExportError, match=r"missing tensors \['scores'\]"):
        GoldenRequests.from_tensors(tensors)


def as_requests(golden):
    """The same as dicts in the API's form; a bag of one candidate's only id as that id."""
    requests = []
    for one in map(golden.request, range(golden.num_requests)):
        context = {"sparse": {}, "weights": {}, "dense": one.context_dense[0].tolist()}
        candidates = {"sparse": {}, "weights": {}, "dense": one.candidate_dense.tolist()}
        for name, lengths in one.lengths.items():
            part, edges = candidates, np.cumsum(lengths)[:-1]
            if SPEC.feature(name).side == "context":
                part, edges = context, []
            for kind, values in (("sparse", one.values), ("weights", one.weights)):
                if name in values:
                    bags = [bag.tolist() for bag in np.split(values[name], edges)]
                    part[kind][name] = bags[0] if part is context else bags
        requests.append({"context": context, "candidates": candidates})
    return requests


def test_golden_requests_are_made_of_requests_as_the_api_takes_them():
    golden = random_golden(SPEC, seed=5, num_requests=4)
    made = GoldenRequests.from_requests(as_requests(golden), golden.scores.tolist(), golden.outputs)
    made.check(SPEC)
    for name, array in golden.to_tensors().items():
        np.testing.assert_array_equal(made.to_tensors()[name], array, err_msg=name)


def test_texts_are_ids_by_their_fingerprints_and_single_ids_need_no_list():
    request = {
        "context": {"sparse": {"word": ["a", "ü"]}},
        "candidates": {"sparse": {"item": [3, 4], "tag": [["x"], []]}},
    }
    golden = GoldenRequests.from_requests([request], [0.5, 0.25])
    np.testing.assert_array_equal(golden.values["word"], fingerprint_strings(["a", "ü"]))
    np.testing.assert_array_equal(golden.values["tag"], fingerprint_strings(["x"]))
    assert (golden.values["item"].tolist(), golden.lengths["tag"].tolist()) == ([3, 4], [1, 0])
    assert (golden.context_dense.shape, golden.candidate_dense.shape) == ((1, 0), (2, 0))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            {"candidates": {"sparse": {"other": [1]}}},
            r"request 1 has sparse of \['other'\], of the first one \['item'\]",
        ),
        ({"candidates": {"sparse": {"item": ["a"]}}}, "golden requests: "),
        ({"candidates": {"sparse": {"item": [2**70]}}}, "golden requests: "),
    ],
)
def test_requests_that_do_not_fit_each_other_are_refused(second, message):
    first = {"candidates": {"sparse": {"item": [1]}}}
    with pytest.raises(ExportError, match=message):
        GoldenRequests.from_requests([first, second], [0.5, 0.5])
