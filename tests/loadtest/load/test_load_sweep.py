from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.load.result import LoadResult, SweepResult
from loadtest.load.run import MIN_RATE, TOLERANCE, step_duration_s, sweep
from loadtest.load.show import outcome_of
from shardrank_testing.load_results import example_run

SLO_MS = 50.0
RUN = example_run()


def measured(rate: float, *, p99_ms: float | None, valid: bool = True) -> LoadResult:
    due = RUN.latency_of_due.model_copy(update={"p99_ms": p99_ms})
    return RUN.model_copy(update={"rate": rate, "latency_of_due": due, "valid": valid})


def search(answer, *, first_rate: float = 50, max_rate: float = 100_000) -> SweepResult:
    return sweep(answer, SLO_MS, first_rate=first_rate, max_rate=max_rate)


@given(capacity=st.floats(2, 50_000), first_rate=st.floats(1, 5000))
def test_a_server_s_capacity_is_found_within_the_tolerance(capacity, first_rate):
    # The latency of an M/M/1 queue of 1 ms at rest, which is p99 = SLO at that very rate.
    found = search(lambda rate: measured(rate, p99_ms=SLO_MS if rate <= capacity else None), first_rate=first_rate)
    assert found.limited_by == "server"
    assert found.highest_rate <= capacity < found.lowest_failed_rate
    assert found.lowest_failed_rate <= found.highest_rate * (1 + TOLERANCE)


def test_rates_double_until_one_fails_and_then_halve_the_gap():
    found = search(lambda rate: measured(rate, p99_ms=1.0 if rate <= 300 else 99.0), first_rate=100)
    rates = [step.rate for step in found.steps]
    assert rates[:4] == [100, 200, 400, 400]
    assert rates[4] == pytest.approx((200 * 400) ** 0.5)


def test_one_bad_run_is_not_believed():
    rates: list[float] = []

    def answer(rate: float) -> LoadResult:
        rates.append(rate)
        return measured(rate, p99_ms=None if rates == [100] or rate > 1000 else 1.0)

    found = search(answer, first_rate=100)
    assert rates[:3] == [100, 100, 200]
    assert 950 < found.highest_rate <= 1000


def test_where_the_generator_is_the_bottleneck_the_sweep_says_so():
    found = search(lambda rate: measured(rate, p99_ms=1.0, valid=rate <= 3000))
    assert found.limited_by == "generator"
    assert 2850 < found.highest_rate <= 3000
    assert found.lowest_failed_rate is None


def test_a_server_that_fails_below_the_generator_s_limit_is_the_limit():
    found = search(lambda rate: measured(rate, p99_ms=1.0 if rate <= 1000 else None, valid=rate <= 1500))
    assert found.limited_by == "server"
    assert 950 < found.highest_rate <= 1000 < found.lowest_failed_rate


def test_the_search_goes_no_further_than_the_highest_rate():
    found = search(lambda rate: measured(rate, p99_ms=1.0), first_rate=60, max_rate=300)
    assert (found.highest_rate, found.limited_by) == (300, "max_rate")
    assert [step.rate for step in found.steps] == [60, 120, 240, 300]


def test_a_server_that_stands_nothing_has_no_rate():
    found = search(lambda rate: measured(rate, p99_ms=None))
    assert (found.highest_rate, found.lowest_failed_rate, found.limited_by) == (None, MIN_RATE, "server")


def test_failed_requests_count_against_the_deadline():
    assert outcome_of(measured(1, p99_ms=SLO_MS), SLO_MS) == "kept"
    assert outcome_of(measured(1, p99_ms=SLO_MS + 0.1), SLO_MS) == "failed"
    # The answers may be fast, but one request of a hundred failed.
    assert outcome_of(measured(1, p99_ms=None), SLO_MS) == "failed"
    assert outcome_of(measured(1, p99_ms=1.0, valid=False), SLO_MS) == "invalid"


def test_a_step_of_few_requests_takes_longer():
    assert step_duration_s(1000, 10) == 10
    assert step_duration_s(50, 10) == 20
    assert step_duration_s(1, 10) == 60
    assert step_duration_s(1, 90) == 90
