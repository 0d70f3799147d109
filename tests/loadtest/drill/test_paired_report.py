"""The figures of `drill warm` and `drill shadow`: which answers count for which kind of time, and the ratio of p99."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loadtest.drill.load import RECORD, TimeSpan
from loadtest.drill.oracle import Kind
from loadtest.drill.paired import due_within, first_of, make_paired_report, pair_rounds
from loadtest.errors import DrillError

FACTS: dict[str, Any] = {
    "registry": "directory",
    "shards": 2,
    "replicas": 2,
    "cards": 2,
    "workers": 1,
    "rate": 10.0,
    "details": (),
    "kinds": ("steady time", "first requests"),
    "requests": {"2": 3},
}


def record(intended: float, version: int, kind: Kind = Kind.OK) -> tuple[Any, ...]:
    return (intended, intended + 0.001, intended + 0.004, version, 0, kind)


def test_the_first_answers_of_a_version_are_those_that_were_due_first() -> None:
    answers = np.array([record(at, version) for at, version in ((3, 2), (1, 1), (4, 1), (2, 2), (5, 2))], RECORD)
    assert first_of(answers, 2, 2)["intended"].tolist() == [2.0, 3.0]
    assert first_of(answers, 3, 2).size == 0
    assert sorted(due_within(answers, TimeSpan(2.0, 4.0))["intended"].tolist()) == [2.0, 3.0]


def test_the_ratio_is_that_of_all_rounds_pooled_and_the_mean_of_rounds_has_an_interval() -> None:
    rng = np.random.default_rng(0)
    rounds = [(rng.exponential(2.0, 500), rng.exponential(3.0, 400)) for _ in range(6)]
    found = pair_rounds(rounds)
    one, other = (np.percentile(np.concatenate(kind), 99) for kind in zip(*rounds, strict=True))
    assert found["ratio_p99"] == pytest.approx(other / one)
    assert (found["answers_base"], found["answers_compared"]) == (3000, 2400)
    logs = [np.log(np.percentile(b, 99) / np.percentile(a, 99)) for a, b in rounds]
    assert found["ratio_p99_by_round"] == pytest.approx(np.exp(np.mean(logs)))
    assert found["ratio_p99_low"] < 1.5 < found["ratio_p99_high"]
    with pytest.raises(DrillError, match="a round without answers"):
        pair_rounds([(np.ones(3), np.empty(0))])


def test_more_than_is_allowed_and_an_answer_that_is_not_right_are_problems() -> None:
    answers = np.array([record(1.0, 1), record(2.0, 2, Kind.MIXED)], RECORD)
    rounds = [(np.full(10, 2.0), np.full(10, 2.3))]
    report = make_paired_report(answers, rounds, FACTS)
    told = "p99 of first requests is 1.150 times that of steady time, allowed is 1.1"
    assert report.problems == ("1 answers are mixed", told)
    assert report.load_lag_p99_ms == pytest.approx(1.0)
    assert make_paired_report(answers[:1], rounds, FACTS, max_ratio_p99=1.2).problems == ()


def test_a_shadow_that_scored_nothing_and_versions_that_were_not_warmed_are_a_problem() -> None:
    answers, rounds = np.array([record(1.0, 1)], RECORD), [(np.full(10, 2.0), np.full(10, 2.0))]
    told = "first requests: no request was scored by a shadow, or warmed with"
    assert make_paired_report(answers, rounds, FACTS, done=0).problems == (told,)
    assert make_paired_report(answers, rounds, FACTS, done=3).problems == ()
