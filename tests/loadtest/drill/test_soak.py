"""What a soak says of processes that grow, and of those that do not."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.drill.config import SoakDrillConfig
from loadtest.drill.fleet import ANSWER, TimeSpan, read_processes
from loadtest.drill.soak import MEASURES, MIN_BLOCKS, SoakCourse, fit_slope, soak_figures

NOISE_MB = 2.0


def test_too_few_values_have_no_slope():
    values = np.arange(MIN_BLOCKS, dtype=float)
    assert list(fit_slope(values, 100 + 0.25 * values).values()) == [0.25, 0.25, 0.25]
    assert list(fit_slope(values[1:], values[1:]).values()) == [None, None, None]


@given(st.lists(st.integers(-1000, 1000), min_size=MIN_BLOCKS, max_size=12))
def test_the_slope_is_the_median_of_all_pairs(values):
    slope = fit_slope(np.arange(len(values), dtype=float), np.array(values, float))
    pairs = [(b - a) / (j - i) for (i, a), (j, b) in itertools.combinations(enumerate(values), 2)]
    assert slope["per_min"] == pytest.approx(float(np.median(pairs)))
    assert min(pairs) <= slope["low"] <= slope["per_min"] <= slope["high"] <= max(pairs)


def test_the_interval_has_the_leak_as_often_as_it_says():
    minutes, rng, hits = np.linspace(0, 10, 30), np.random.default_rng(0), 0
    for _ in range(300):
        slope = fit_slope(minutes, 0.4 * minutes + rng.normal(0, NOISE_MB, 30))
        hits += slope["low"] <= 0.4 <= slope["high"]
    assert 0.92 <= hits / 300 <= 0.98


def judged(course: SoakCourse, minutes: int = 20, code: int = 0) -> tuple[dict[str, Any], list[str]]:
    """The figures, and what misses its limit."""
    answers = np.array([(0, 0, 0, 0, code, 0, 0)] * 100, ANSWER)
    figures, limits = soak_figures(SoakDrillConfig(minutes=minutes), course, answers)
    return figures, [limit.name for limit in limits if not limit.ok]


def soaked(leak_mb_per_min: float = 0.0, descriptors: tuple[int, ...] = (30,), minutes: int = 20) -> SoakCourse:
    """A process that is read once a second: it warms up by 100 MB, and has twice its memory in rollouts."""
    rng, course = np.random.default_rng(1), SoakCourse(counts=Counter(rollouts=3, updates=90))
    course.excluded = [TimeSpan(begin, begin + 8.0) for begin in range(1045, 1000 + 60 * minutes, 53)]
    for second in range(60 * minutes):
        now = 1000.0 + second
        memory = 300 - 100 * np.exp(-second / 60) + leak_mb_per_min * second / 60 + rng.normal(0, NOISE_MB)
        if any(span.begin <= now <= span.end for span in course.excluded):
            memory *= 2
        count = descriptors[second * len(descriptors) // (60 * minutes)]
        values = (memory + 50, memory, count + int(rng.random() < 0.2), 6)
        course.samples[now] = {"serve-0": dict(zip(MEASURES, values, strict=True))}
    return course


@pytest.mark.parametrize(
    ("leak", "problems"),
    [(0.0, []), *((leak, ["serve-0 rss_mb a minute", "serve-0 anonymous_mb a minute"]) for leak in (0.4, 1.0))],
)
def test_a_leak_is_found_with_its_size(leak: float, problems: list[str]):
    figures, missed = judged(soaked(leak))
    assert missed == problems
    assert [(trend["process"], trend["what"]) for trend in figures["trends"]] == [
        ("serve-0", what) for what in MEASURES
    ]
    rss, memory, descriptors, threads = figures["trends"]
    assert rss["per_min"] == pytest.approx(memory["per_min"])
    assert memory["low"] <= leak <= memory["high"]
    assert memory["per_min"] == pytest.approx(leak, abs=0.1)
    assert (descriptors["per_min"], threads["per_min"]) == (0.0, 0.0)
    assert figures["measured_min"] == pytest.approx(10, abs=0.5)


@pytest.mark.parametrize(
    ("descriptors", "problems"),
    [
        (tuple(range(30, 54)), ["serve-0 descriptors a minute"]),
        # Those of connections come and go.
        ((30, 33, 30, 33, 30, 33, 30, 33), []),
        (tuple(np.random.default_rng(3).integers(30, 60, 200).tolist()), []),
    ],
)
def test_descriptors_that_stay_open_are_found(descriptors: tuple[int, ...], problems: list[str]):
    assert judged(soaked(descriptors=descriptors))[1] == problems


def test_a_short_soak_does_not_pass():
    assert judged(SoakCourse(counts=Counter(updates=9)))[1] == ["rollouts", "samples"]


def test_a_restarted_process_does_not_pass():
    sample = read_processes({"serve-0": os.getpid()})
    values = sample["serve-0"]
    assert values["rss_mb"] > max(values["anonymous_mb"], values["uss_mb"])
    assert min(values["anonymous_mb"], values["uss_mb"]) > 10
    assert (values["descriptors"] > 2, values["threads"] >= 1) == (True, True)
    course = SoakCourse(restarted={"serve-0"}, samples={1.0: sample, 2.0: sample})
    trends = [f"serve-0 {what} a minute" for what in MEASURES]
    assert judged(course, code=1)[1] == ["failed", "rollouts", "updates", "restarted", *trends]
