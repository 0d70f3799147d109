from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.load.open_loop import arrival_times


def times(arrivals: str, rate: float, until_s: float, **options: int) -> np.ndarray:
    chunks = list(arrival_times(arrivals, rate, until_s, **{"seed": 0, **options}))
    assert all(len(chunk) for chunk in chunks)
    return np.concatenate(chunks) if chunks else np.zeros(0)


@given(rate=st.floats(0.5, 5000), until_s=st.floats(0.01, 3), processes=st.integers(1, 5))
def test_constant_arrivals_of_all_processes_are_one_every_1_over_rate(rate, until_s, processes):
    parts = [times("constant", rate, until_s, process=i, processes=processes) for i in range(processes)]
    together = np.sort(np.concatenate(parts))
    expected = np.arange(0, int(until_s * rate) + 2) / rate
    np.testing.assert_array_equal(together, expected[expected < until_s])


def test_an_hour_of_constant_arrivals_does_not_drift():
    last = 0.0
    count = 0
    for chunk in arrival_times("constant", 300, 3600, seed=0):
        last, count = float(chunk[-1]), count + len(chunk)
    assert count == 300 * 3600
    assert last == pytest.approx(3600 - 1 / 300, abs=1e-9)


@pytest.mark.parametrize("processes", [1, 3])
def test_poisson_arrivals_have_the_rate_and_the_gaps_of_a_poisson_process(processes):
    parts = [times("poisson", 1000, 60, seed=4, process=i, processes=processes) for i in range(processes)]
    together = np.sort(np.concatenate(parts))
    # The number in 60 s has mean 60000 and standard deviation sqrt(60000) = 245; the seed is fixed.
    assert abs(len(together) - 60_000) < 5 * 245
    gaps = np.diff(together)
    # An exponential gap is longer than the mean with probability 1/e, and than twice the mean with 1/e^2.
    assert (gaps > 1e-3).mean() == pytest.approx(np.exp(-1), abs=0.01)
    assert (gaps > 2e-3).mean() == pytest.approx(np.exp(-2), abs=0.01)
    per_second = np.bincount(together.astype(int), minlength=60)
    # Counts in equal intervals have their mean as variance.
    assert per_second.var() / per_second.mean() == pytest.approx(1, abs=0.5)


def test_poisson_arrivals_follow_from_seed_and_process():
    one = times("poisson", 500, 5, seed=1)
    np.testing.assert_array_equal(one, times("poisson", 500, 5, seed=1))
    assert not np.array_equal(one[:100], times("poisson", 500, 5, seed=2)[:100])
    first, second = (times("poisson", 500, 5, seed=1, process=i, processes=2) for i in range(2))
    assert not np.array_equal(first[:100], second[:100])
    assert (np.diff(one) > 0).all()
    assert (one < 5).all()
