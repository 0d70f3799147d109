"""Comparisons: ratios to the baseline round by round, and intervals that are neither too narrow nor chance."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from pydantic import ValidationError

from loadtest.errors import ComparisonError
from loadtest.report.comparison import Arm, Comparison, compare_runs, measured
from shardrank_testing.load_results import QueueLoad


def two_arms(base, other, **options):
    return measured("p99", "ms", "lower", [base, other], **options).ratios[1]


def test_a_ratio_is_the_geometric_mean_of_the_rounds_ratios():
    found = measured("p99", "ms", "lower", [[10.0, 20.0, 40.0], [5.0, 20.0, 80.0]])
    assert found.ratios[0].value == 1.0
    assert found.ratios[1].value == pytest.approx(1.0)
    assert found.middle == (20.0, 20.0)
    assert two_arms([10.0, 20.0], [5.0, 5.0]).value == pytest.approx(math.sqrt(0.5 * 0.25))


def test_a_change_of_all_arms_from_round_to_round_leaves_the_ratio_exact():
    machine = np.array([1.0, 1.7, 0.6, 2.2, 1.1])
    found = two_arms(10 * machine, 8 * machine)
    assert (found.value, found.low, found.high) == pytest.approx((0.8, 0.8, 0.8))
    assert found.certain


def test_every_arm_is_compared_to_the_first():
    found = measured("p99", "ms", "lower", [[4.0], [2.0], [6.0]])
    assert [one.value for one in found.ratios] == pytest.approx([1.0, 0.5, 1.5])


def test_a_measure_that_some_arm_has_nothing_of_has_values_and_no_ratios():
    found = measured("bytes", "B", "lower", [[0.0, 0.0], [4.0, 6.0]], everywhere=False)
    assert (found.middle, found.ratios) == ((0.0, 5.0), ())
    assert measured("bytes", "B", "lower", [[2.0], [4.0]], everywhere=False).ratios[1].value == pytest.approx(2)
    with pytest.raises(ComparisonError, match="ratios need values above 0"):
        measured("bytes", "B", "lower", [[-1.0], [4.0]], everywhere=False)


def test_one_round_has_no_interval():
    found = two_arms([10.0], [8.0])
    assert (found.low, found.high, found.certain) == (None, None, False)


def test_with_few_rounds_the_interval_goes_from_the_lowest_to_the_highest_round():
    found = two_arms([1.0, 1.0, 1.0], [0.9, 1.0, 1.2])
    assert (found.low, found.high) == pytest.approx((0.9, 1.2))
    assert not found.certain


def test_with_eight_rounds_the_interval_is_nearly_as_wide_as_students():
    # Student's is right where rounds scatter normally. A plain percentile interval has 0.78 of its width.
    rng = np.random.default_rng(7)
    widths = []
    for _ in range(100):
        logs = rng.normal(math.log(1.25), 0.1, 8)
        found = two_arms(np.ones(8), np.exp(logs))
        widths.append(math.log(found.high / found.low) / (2 * 2.365 * logs.std(ddof=1) / math.sqrt(8)))
    assert 0.93 <= np.median(widths) <= 1.02
    assert min(widths) > 0.85


def test_with_many_rounds_the_interval_is_the_normal_one():
    logs = np.random.default_rng(3).normal(0.1, 0.2, 400)
    found = two_arms(np.ones(400), np.exp(logs))
    half = NormalDist().inv_cdf(0.975) * logs.std(ddof=1) / math.sqrt(400)
    assert math.log(found.low) == pytest.approx(logs.mean() - half, abs=0.003)
    assert math.log(found.high) == pytest.approx(logs.mean() + half, abs=0.003)


def test_the_same_seed_gives_the_same_interval():
    base, other = [1.0, 1.1, 0.9, 1.3, 1.0, 1.2, 1.0], [0.8, 0.9, 0.9, 0.7, 1.0, 0.8, 0.9]
    assert two_arms(base, other, seed=4) == two_arms(base, other, seed=4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0, 2.0], [1.0]], r"p99: arms have \[2, 1\] rounds"),
        ([[], []], r"p99: arms have \[0, 0\] rounds"),
        ([[1.0], [0.0]], "p99: .*above 0"),
        ([[1.0], [math.inf]], "p99: .*above 0"),
    ],
)
def test_what_has_no_ratio_is_refused(values, message):
    with pytest.raises(ComparisonError, match=message):
        measured("p99", "ms", "lower", values)


def short(**changes):
    return QueueLoad(**{"duration_s": 3, "warmup_s": 1, "rate": 200.0, **changes}).run()


def test_load_tests_are_compared_by_what_was_due_and_what_came_in_time():
    arms = {
        "one": [short(seed=0), short(seed=1)],
        "two": [short(seed=0, service_ms=0.5), short(seed=1, service_ms=0.5)],
    }
    found = compare_runs("one or two", arms)
    assert [one.name for one in found.measures] == ["p50", "p99", "p99.9", "answers in time"]
    p99 = found.measures[1]
    assert p99.values[1] == tuple(run.latency_of_due.p99_ms for run in arms["two"])
    assert found.measures[3].values[0] == tuple(run.goodput for run in arms["one"])
    assert p99.ratios[1].value < 1
    assert (found.valid, found.rounds, found.baseline) == (True, 2, 0)
    assert found.setup["rate"] == "200.0"
    assert found.machine == arms["one"][0].machine


def test_what_the_runs_do_not_have_alike_is_not_in_the_setup():
    found = compare_runs("rates", {"slow": [short()], "fast": [short(rate=300.0)]})
    assert "rate" not in found.setup
    assert found.setup["workload"] == "dlrm-v2:0.001"


def test_an_invalid_run_makes_the_comparison_invalid():
    found = compare_runs("busy", {"one": [short()], "two": [short(cpu_share=0.97)]})
    assert not found.valid
    assert found.invalid_because == ("two, round 1: process 1 used 0.97 of a core; at most 0.9 is valid",)


def test_a_percentile_that_failed_is_left_out_and_said():
    found = compare_runs("failing", {"one": [short()], "two": [short(refused=0.05)]})
    assert [one.name for one in found.measures] == ["p50", "answers in time"]
    assert not found.valid
    assert [reason.split()[0] for reason in found.invalid_because] == ["p99", "p99.9"]


@pytest.mark.parametrize("arms", [{}, {"one": 1}, {"one": 2, "two": 1}, {"one": 0, "two": 0}])
def test_arms_that_can_not_be_compared_are_refused(arms):
    run = short()
    with pytest.raises(ComparisonError, match="arms: "):
        compare_runs("no", {name: [run] * count for name, count in arms.items()})


def test_a_comparison_whose_parts_do_not_fit_is_refused():
    one = measured("p99", "ms", "lower", [[1.0, 1.0], [2.0, 2.0]])
    arms = (Arm(name="one"), Arm(name="two"))
    assert Comparison(title="t", arms=arms, baseline=0, rounds=2, measures=(one,), valid=True).rounds == 2
    with pytest.raises(ValidationError, match="baseline: 2; there are 2 arms"):
        Comparison(title="t", arms=arms, baseline=2, rounds=2, measures=(one,), valid=True)
    with pytest.raises(ValidationError, match="p99 has values for other than 2 arms and 3 rounds"):
        Comparison(title="t", arms=arms, baseline=0, rounds=3, measures=(one,), valid=True)
    with pytest.raises(ValidationError, match="p99 has values for other than 1 arms"):
        Comparison(title="t", arms=arms[:1], baseline=0, rounds=2, measures=(one,), valid=True)
