"""Comparisons: ratios to the baseline round by round, and intervals that are neither too narrow nor chance."""

from __future__ import annotations

import math
from collections import Counter
from statistics import NormalDist

import numpy as np
import pytest

from loadtest.bench.harness import Measure, compare_rounds, rotated, show_comparison

P99 = Measure("p99", "ms")


def measure_of(*values):
    subjects = {str(number): [{"p99": value} for value in rounds] for number, rounds in enumerate(values)}
    return [measures["p99"] for measures in compare_rounds(subjects, [P99]).values()]


def test_each_subject_is_measured_once_in_a_round_and_first_in_turn():
    rounds = [rotated(range(3), number) for number in range(6)]
    assert all(sorted(order) == [0, 1, 2] for order in rounds)
    for place in range(3):
        assert Counter(order[place] for order in rounds) == {0: 2, 1: 2, 2: 2}


def test_a_ratio_is_the_geometric_mean_of_the_rounds_ratios():
    found = measure_of([10.0, 20.0, 40.0], [5.0, 20.0, 80.0], [5.0, 5.0, 5.0])
    assert [subject.median for subject in found] == [20.0, 20.0, 5.0]
    assert [subject.ratio for subject in found] == pytest.approx([1, 1, (1 / 2 / 4 / 8) ** (1 / 3)])


def test_changes_of_all_subjects_leave_the_ratio_exact():
    machine = np.array([1.0, 1.7, 0.6, 2.2, 1.1])
    found = measure_of(10 * machine, 8 * machine)
    assert (found[1].ratio, *found[1].interval) == pytest.approx((0.8, 0.8, 0.8))


@pytest.mark.parametrize(
    ("rounds", "interval"), [([8.0], None), ([9.0, 10.0, 12.0], (0.9, 1.2)), ([10.0] * 40, (1.0, 1.0))]
)
def test_few_rounds_have_an_interval_from_the_lowest_to_the_highest(rounds, interval):
    found = measure_of([10.0] * len(rounds), rounds)
    assert found[1].interval == pytest.approx(interval)


@pytest.mark.parametrize(("rounds", "quantile"), [(8, 2.365), (400, NormalDist().inv_cdf(0.975))])
def test_intervals_are_nearly_as_wide_as_students(rounds, quantile):
    """Student's is right where rounds scatter normally. A plain percentile interval of 8 has 0.78 of its width."""
    rng = np.random.default_rng(7)
    widths = []
    for _ in range(40):
        logs = rng.normal(math.log(1.25), 0.1, rounds)
        low, high = measure_of(np.ones(rounds), np.exp(logs))[1].interval
        widths.append(math.log(high / low) / (2 * quantile * logs.std(ddof=1) / math.sqrt(rounds)))
    assert 0.93 <= np.median(widths) <= 1.02
    assert min(widths) > 0.85


def test_measures_that_some_rounds_lack_are_left_out_or_have_no_ratios():
    subjects = {"one": [{"bytes": 1.0, "never": 0.0}, {"bytes": 2.0}], "two": [{"bytes": 0.0}, {"bytes": 3.0}]}
    known = [Measure(name, "B") for name in ("bytes", "nothing", "never")]
    found = compare_rounds(subjects, known)
    assert found.keys() == subjects.keys()
    for measures in found.values():
        figures = [(name, compared.median, compared.ratio) for name, compared in measures.items()]
        assert figures == [("bytes", 1.5, None), ("never", 0, None)]


def test_subjects_are_printed_by_measure_with_their_ratios(capsys):
    subjects = {f"{cards} cards": [{"p99": 1.0 * cards}, {"p99": 2.0 * cards}] for cards in (1, 2, 4)}
    show_comparison("latency", compare_rounds(subjects, [P99]), ["it was late"])
    out = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in out.splitlines() if "cards  " in line]
    assert rows == [
        "p99, ms 1 cards 1.5",
        "2 cards 3 2.00 × [2.00, 2.00]",
        "4 cards 6 4.00 × [4.00, 4.00]",
    ]
    assert out.startswith("latency\n")
    assert "medians of 2 rounds" in out
    assert out.endswith("not valid: it was late\n")
