from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.drill.load import RECORD, TimeSpan, overlaps
from loadtest.drill.oracle import Kind
from loadtest.drill.swap import (
    MemorySample,
    Swap,
    SwapCourse,
    SwapReport,
    is_stale,
    make_swap_report,
    sample_memory,
    slope_mb_per_swap,
)

FACTS: dict[str, Any] = {
    "rows_mb": 4.0,
    "registry": "directory",
    "shards": 2,
    "replicas": 2,
    "cards": 2,
    "workers": 1,
    "rate": 10.0,
    "strategy": "beside",
    "retries": {},
    "details": (),
}
# Live is 1 until the first swap, at 10 to 14; publishing is at 16 to 17; the second swap is at 20 to 24.
SWAPS = [Swap(TimeSpan(10, 14), 1, 2), Swap(TimeSpan(20, 24), 2, 3)]


def record(intended: float, ms: float, version: int, kind: Kind = Kind.OK, api: int = 0) -> tuple[Any, ...]:
    return (intended, intended, intended + ms / 1e3, version, api, kind)


def answers_of(*records: tuple[Any, ...]) -> np.ndarray:
    return np.array(list(records), RECORD)


def samples(*totals: float) -> list[MemorySample]:
    return [
        MemorySample(swaps, {"a": total / 2, "b": total / 2}, {"a": 1.0, "b": 1.0})
        for swaps, total in enumerate(totals)
    ]


def report_of(*records: tuple[Any, ...], memory: tuple[float, ...] = (100.0, 100.0)) -> SwapReport:
    return make_swap_report(answers_of(*records), SwapCourse(SWAPS, [TimeSpan(16, 17)], samples(*memory)), FACTS)


def steady(count: int = 50, ms: float = 4.0) -> list[tuple[Any, ...]]:
    return [record(5 + 0.01 * n, ms, 1) for n in range(count)]


def during(count: int = 50, ms: float = 4.0, version: int = 2) -> list[tuple[Any, ...]]:
    return [record(12 + 0.01 * n, ms, version) for n in range(count)]


def test_the_report_has_the_keys_that_people_rely_on():
    names = {"swaps", "answers", "failed", "mixed", "wrong", "p99_ms_steady", "p99_ms_during_swap", "ratio_p99"}
    assert {*names, "rss_mb_before", "rss_mb_after"} <= report_of(*steady(), *during()).model_dump().keys()


def test_a_drill_in_which_all_is_well_has_no_problems():
    report = report_of(*steady(ms=4.0), *during(ms=5.0), memory=(100.0, 101.0, 100.0, 101.0))
    assert report.problems == ()
    assert (report.swaps, report.answers, report.failed, report.mixed, report.wrong) == (2, 100, 0, 0, 0)
    assert report.p99_ms_steady == pytest.approx(4.0)
    assert report.p99_ms_during_swap == pytest.approx(5.0)
    assert report.ratio_p99 == pytest.approx(1.25)
    assert (report.rss_mb_before, report.rss_mb_after) == (100.0, 101.0)
    assert report.rss_mb_by_process == {"a": (50.0, 50.5), "b": (50.0, 50.5)}


@pytest.mark.parametrize(
    ("kind", "told"),
    [(Kind.FAILED, "1 answers failed"), (Kind.MIXED, "1 answers are mixed"), (Kind.WRONG, "1 answers are wrong")],
)
def test_one_answer_that_is_not_right_is_a_problem(kind: Kind, told: str):
    report = report_of(*steady(), *during(), record(12, 1, 2, kind, api=3))
    assert report.problems == (told,)
    assert report.by_api["grpc lookup"]["not_ok"] == 1


def test_a_slower_p99_during_swaps_is_a_problem():
    assert report_of(*steady(ms=4.0), *during(ms=6.4)).problems == (
        "p99 during swaps is 1.60 times the steady one, allowed is 1.5",
    )


def test_without_steady_answers_latencies_are_not_compared_in_silence():
    assert report_of(*during()).problems == ("too few answers to compare latencies",)


def test_a_version_that_is_never_freed_is_a_problem():
    report = report_of(*steady(), *during(), memory=tuple(100.0 + 4.0 * swaps for swaps in range(24)))
    assert report.rss_mb_per_swap == pytest.approx(4.0)
    assert report.problems == ("memory grows by 4.00 MB with every swap; one version has 4.00 MB",)


def test_answers_while_versions_are_published_count_for_neither_latency():
    report = report_of(*steady(), *during(), *(record(16.5, 100, 2) for _ in range(50)))
    assert (report.answers_steady, report.answers_during_swap, report.answers_apart) == (50, 50, 50)
    assert report.p99_ms_apart == pytest.approx(100)
    assert report.problems == ()


def test_an_answer_that_a_swap_overlaps_at_either_end_is_of_the_swap():
    answers = answers_of(record(9, 999, 1), record(9, 1000, 1), record(14, 500, 2), record(14.001, 500, 2))
    assert overlaps(answers, [swap.span for swap in SWAPS]).tolist() == [False, True, True, False]
    assert overlaps(answers, []).tolist() == [False] * 4


@pytest.mark.parametrize(
    ("intended", "ms", "version", "stale"),
    [
        (5, 100, 1, False),
        (5, 100, 2, True),  # not live yet
        (12, 100, 1, False),
        (12, 100, 2, False),
        (12, 100, 3, True),
        (15, 100, 1, True),  # not live any more
        (15, 100, 2, False),
        (13, 8000, 1, False),  # out over both swaps
        (13, 8000, 3, False),
        (25, 100, 2, True),
        (25, 100, 3, False),
        (25, 100, 7, True),  # never
        (25, 100, 0, True),
    ],
)
def test_an_answer_of_a_version_that_was_not_live_while_it_was_out_is_stale(
    intended: float, ms: float, version: int, stale: bool
):
    assert is_stale(answers_of(record(intended, ms, version)), SWAPS).tolist() == [stale]


@given(
    st.lists(st.floats(0, 100), min_size=2, max_size=20, unique=True).map(sorted),
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), max_size=20),
)
def test_overlaps_are_those_of_the_definition(bounds: list[float], requests: list[tuple[float, float]]):
    spans = [TimeSpan(bounds[n], bounds[n + 1]) for n in range(0, len(bounds) - 1, 2)]
    answers = np.zeros(len(requests), RECORD)
    answers["intended"] = [begin for begin, _ in requests]
    answers["ended"] = [begin + duration for begin, duration in requests]
    expected = [any(span.begin <= one["ended"] and one["intended"] <= span.end for span in spans) for one in answers]
    assert overlaps(answers, spans).tolist() == expected


def test_memory_is_that_of_the_processes_and_a_slope_needs_some_samples():
    sample = sample_memory(3, {"me": os.getpid()})
    assert sample.after_swaps == 3
    assert sample.rss_mb["me"] > sample.uss_mb["me"] > 1
    assert slope_mb_per_swap(samples(10, 13, 16)) is None
    assert slope_mb_per_swap(samples(*range(10, 70, 3))) == pytest.approx(3.0)
