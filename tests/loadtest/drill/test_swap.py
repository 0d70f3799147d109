"""What `drill swap` says of answers and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from loadtest.drill.config import SwapDrillConfig
from loadtest.drill.fleet import ANSWER, KINDS, TimeSpan
from loadtest.drill.swap import SwapCourse, is_stale, swap_figures

# Live is 1 until the first swap, at 10 to 14; publishing is at 16 to 17; the second swap is at 20 to 24.
VERSIONS, SWAPS = [1, 2, 3], [TimeSpan(10, 14), TimeSpan(20, 24)]


def record(due: float, ms: float, version: int, code: int = 0) -> tuple[Any, ...]:
    return (due, due, due, due + ms / 1e3, code, version, 0)


def figures_of(*records: tuple[Any, ...], memory: Sequence[float] = (100.0, 101.0)) -> tuple[dict[str, Any], list[str]]:
    """The figures, and what misses its limit. A version has 4 MB."""
    samples = [{name: {"rss_mb": mb / 2, "uss_mb": 1.0} for name in "ab"} for mb in memory]
    course = SwapCourse(VERSIONS, SWAPS, [TimeSpan(16, 17)], samples)
    figures, limits = swap_figures(SwapDrillConfig(), course, 4.0, np.array(list(records), ANSWER))
    return figures, [limit.name for limit in limits if not limit.ok]


STEADY = [record(5 + 0.01 * number, 4, 1) for number in range(50)]
DURING = [record(12 + 0.01 * number, 5, 2) for number in range(50)]


def test_figures_of_a_good_drill():
    figures, missed = figures_of(*STEADY, *DURING)
    assert missed == []
    expected = {"swaps": 2, "answers": 100, "failed": 0, "mixed": 0, "wrong": 0, "p99_ms_steady": 4.0}
    expected |= {
        "p99_ms_during_swap": 5.0,
        "ratio_p99": 1.25,
        "rss_mb_before": 100.0,
        "rss_mb_after": 101.0,
        "uss_mb_after": 2.0,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("records", "memory", "problem"),
    [
        *(([*STEADY, *DURING, record(12, 1, 2, code)], (1, 1), KINDS[code]) for code in (1, 2, 3)),
        ([*STEADY, *DURING, record(25, 1, 2)], (1, 1), "stale"),
        ([*STEADY, *(record(12, 6.4, 2) for _ in range(50))], (1, 1), "ratio_p99"),
        # Too few answers to compare latencies.
        (DURING, (1, 1), "ratio_p99"),
        ([*STEADY, *DURING], tuple(range(100, 196, 4)), "rss_mb_per_swap"),
    ],
)
def test_each_limit_is_kept_by_itself(records: list[tuple[Any, ...]], memory: tuple[float, ...], problem: str):
    assert figures_of(*records, memory=memory)[1] == [problem]


def test_answers_while_versions_are_published_are_excluded():
    figures, missed = figures_of(*STEADY, *DURING, *(record(16.5, 100, 2) for _ in range(50)))
    assert [figures[f"answers_{when}"] for when in ("steady", "during_swap", "apart")] == [50, 50, 50]
    assert figures["p99_ms_apart"] == pytest.approx(100)
    assert missed == []


@pytest.mark.parametrize(
    ("due", "ms", "version", "stale"),
    [
        (5, 100, 1, False),
        (5, 100, 2, True),  # not live yet
        (12, 100, 1, False),
        (12, 100, 2, False),
        (12, 100, 3, True),
        (15, 100, 1, True),  # not live any more
        (15, 100, 2, False),
        (13, 8000, 1, False),  # in flight over both swaps
        (13, 8000, 3, False),
        (25, 100, 2, True),
        (25, 100, 3, False),
        (25, 100, 7, True),  # never
        (25, 100, 0, True),
    ],
)
def test_stale_answers(due: float, ms: float, version: int, stale: bool):
    """Of a version that was not live while the request was in flight."""
    assert is_stale(np.array([record(due, ms, version)], ANSWER), SwapCourse(VERSIONS, SWAPS)).tolist() == [stale]


@pytest.mark.parametrize(("memory", "slope"), [([10, 13, 16], None), (range(10, 70, 3), pytest.approx(3.0))])
def test_memory_that_grows_has_a_slope(memory: Sequence[float], slope: float | None):
    assert figures_of(*STEADY, *DURING, memory=memory)[0]["rss_mb_per_swap"] == slope
