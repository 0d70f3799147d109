"""Comparisons: ratios to the baseline round by round, and intervals that are neither too narrow nor chance."""

from __future__ import annotations

import io
import math
from collections import Counter
from statistics import NormalDist

import numpy as np
import pytest
from rich.console import Console

from loader.errors import ConfigError
from loadtest.documents import ratio_text, significant
from loadtest.page import compare_runs
from loadtest.rounds import Arm, ComparedMeasure, Comparison, Measure, compare_rounds, rotated, show_comparison
from shardrank_testing.load_results import QueueLoad


def measure_of(*values):
    return ComparedMeasure.from_values("p99", "ms", "lower", values)


def short(**changes):
    return QueueLoad(**{"duration_s": 3, "warmup_s": 1, "rate": 200.0, **changes}).run()


def test_each_arm_is_measured_once_in_a_round_and_first_in_turn():
    rounds = [rotated(range(3), number) for number in range(6)]
    assert all(sorted(order) == [0, 1, 2] for order in rounds)
    for place in range(3):
        assert Counter(order[place] for order in rounds) == {0: 2, 1: 2, 2: 2}


def test_a_ratio_is_the_geometric_mean_of_the_rounds_ratios():
    found = measure_of([10.0, 20.0, 40.0], [5.0, 20.0, 80.0], [5.0, 5.0, 5.0])
    assert found.middle == (20.0, 20.0, 5.0)
    assert [ratio.value for ratio in found.ratios] == pytest.approx([1, 1, (1 / 2 / 4 / 8) ** (1 / 3)])


def test_changes_of_all_arms_leave_the_ratio_exact():
    machine = np.array([1.0, 1.7, 0.6, 2.2, 1.1])
    found = measure_of(10 * machine, 8 * machine)
    ratio = found.ratios[1]
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.8, 0.8, 0.8))
    assert found.judgement(1) == "better"


@pytest.mark.parametrize(
    ("rounds", "interval"), [([8.0], (None, None)), ([9.0, 10.0, 12.0], (0.9, 1.2)), ([10.0] * 40, (1.0, 1.0))]
)
def test_few_rounds_have_an_interval_from_the_lowest_to_the_highest(rounds, interval):
    found = measure_of([10.0] * len(rounds), rounds)
    assert (found.ratios[1].low, found.ratios[1].high) == pytest.approx(interval)
    assert found.judgement(1) == ""


@pytest.mark.parametrize(("rounds", "quantile"), [(8, 2.365), (400, NormalDist().inv_cdf(0.975))])
def test_intervals_are_nearly_as_wide_as_students(rounds, quantile):
    """Student's is right where rounds scatter normally. A plain percentile interval of 8 has 0.78 of its width."""
    rng = np.random.default_rng(7)
    widths = []
    for _ in range(40):
        logs = rng.normal(math.log(1.25), 0.1, rounds)
        ratio = measure_of(np.ones(rounds), np.exp(logs)).ratios[1]
        widths.append(math.log(ratio.high / ratio.low) / (2 * quantile * logs.std(ddof=1) / math.sqrt(rounds)))
    assert 0.93 <= np.median(widths) <= 1.02
    assert min(widths) > 0.85


def test_measures_that_some_rounds_lack_are_left_out_or_have_no_ratios():
    arms = [(Arm(name="one"), [1.0, 2.0]), (Arm(name="two"), [0.0, 3.0])]
    measures = [
        Measure("p99", "ms", "lower", lambda value: value or None),
        Measure("bytes", "B", "lower", lambda value: value, everywhere=False),
        Measure("nothing", "B", "lower", lambda value: None, everywhere=False),
        Measure("never", "B", "lower", lambda value: 0.0, everywhere=False),
    ]
    found = compare_rounds(arms, measures, title="t", invalid_because=["it was late"])
    rows = [(measure.name, measure.middle, measure.ratios) for measure in found.measures]
    assert rows == [("bytes", (1.5, 1.5), ()), ("never", (0, 0), ())]
    assert not found.valid
    left_out = "p99 is left out: some rounds have none; too many requests failed"
    assert found.invalid_because == ("it was late", left_out)


@pytest.mark.parametrize("arms", [{}, {"one": 1}, {"one": 2, "two": 1}, {"one": 0, "two": 0}])
def test_arms_with_other_numbers_of_rounds_are_refused(arms):
    run = short()
    with pytest.raises(ConfigError, match="arms: "):
        compare_runs("no", {name: [run] * count for name, count in arms.items()})


def test_a_document_with_another_number_of_arms_is_refused():
    document = compare_rounds([(Arm(name="one"), [1.0]), (Arm(name="two"), [2.0])], [], title="t").model_dump()
    with pytest.raises(ValueError, match="baseline: 5; there are 2 arms"):
        Comparison.model_validate(document | {"baseline": 5})


def test_load_tests_are_compared_by_what_was_due_and_in_time():
    arms = {"one": [short(seed=0), short(seed=1)], "two": [short(seed=seed, service_ms=0.5) for seed in (0, 1)]}
    found = compare_runs("one or two", arms)
    assert [measure.name for measure in found.measures] == ["p50", "p99", "p99.9", "answers in time"]
    assert found.measures[1].values[1] == tuple(run.latency_of_due.p99_ms for run in arms["two"])
    assert found.measures[3].values[0] == tuple(run.goodput for run in arms["one"])
    assert (found.valid, found.rounds, found.setup["rate"]) == (True, 2, "200.0")
    assert found.machine == arms["one"][0].machine
    other = compare_runs("rates", {"slow": [short(cpu_share=0.97)], "fast": [short(rate=300.0)]})
    assert "rate" not in other.setup
    assert other.invalid_because == ("slow, round 1: process 1 used 0.97 of a core; at most 0.9 is valid",)


def test_arms_are_printed_in_groups_that_fit_each_with_the_baseline():
    arms = [(Arm(name=f"{cards} cards"), [1.0 * cards, 2.0 * cards]) for cards in (1, 2, 4, 8)]
    measures = [Measure("p99", "ms", "lower", lambda value: value)]
    for width, groups in ((80, [("1", "2", "4"), ("1", "8")]), (200, [("1", "2", "4", "8")])):
        out = io.StringIO()
        show_comparison(Console(file=out, width=width), compare_rounds(arms, measures, title="t"))
        heads = [line.replace("cards", "").split() for line in out.getvalue().splitlines() if "cards  " in line]
        assert [tuple(head) for head in heads] == groups
        assert "4.00 × [4.00, 4.00]" in out.getvalue()


def test_numbers_have_the_digits_that_were_measured():
    assert [significant(value) for value in (0, 0.0482, 9.996, 1234.5)] == ["0", "0.0482", "10.0", "1,234"]
    assert [ratio_text(value) for value in (0.61, 1.0, 12.345)] == ["0.610", "1.00", "12.35"]
