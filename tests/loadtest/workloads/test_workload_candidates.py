"""Numbers of candidates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.errors import WorkloadError
from loadtest.workloads.workload import MLPERF_CANDIDATES, CandidateCounts, parse_candidates


def drawn(counts, number: int = 20_000) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.array([counts.draw(rng) for _ in range(number)])


def test_mlperf_s_queries_have_100_to_700_candidates_with_a_mean_of_270():
    found = drawn(MLPERF_CANDIDATES)
    assert found.min() == 100
    assert 690 <= found.max() <= 700
    # The standard deviation is about 145.
    assert found.mean() == pytest.approx(270, abs=5 * 145 / 20_000**0.5)


def test_fewer_candidates_are_more_likely_where_the_mean_is_low_and_the_ratio_is_constant():
    found = np.bincount(drawn(MLPERF_CANDIDATES, 100_000) - 100, minlength=601)[:600].reshape(6, 100).sum(axis=1)
    ratios = found[1:] / found[:-1]
    assert (ratios < 0.7).all()
    assert np.ptp(ratios) < 0.1


@given(least=st.integers(1, 1000), span=st.integers(2, 2000), share=st.floats(0.02, 0.98))
def test_the_mean_is_the_one_asked_for(least, span, share):
    counts = CandidateCounts(least, least + span, least + share * span)
    # P(number > least + i), summed, is the mean's distance from the least.
    assert least + (1 - counts._cumulated).sum() == pytest.approx(counts.mean, rel=1e-6)


def test_a_fixed_number_is_always_the_same():
    assert set(drawn(parse_candidates("100"), 10)) == {100}


@pytest.mark.parametrize("text", ["1", "100", "100-700:270", "1-3:2"])
def test_a_number_is_named_as_it_is_read(text):
    assert parse_candidates(text).name == text


NOT_COUNTS = "0 -1 x 1.5 700-100:270 100-700 100-700:100 100-700:701 0-10:5 5-5:5 ٣ 999999999"


@pytest.mark.parametrize("text", ["", *NOT_COUNTS.split()])
def test_what_is_no_number_of_candidates_is_refused(text):
    with pytest.raises(WorkloadError, match="candidates: "):
        parse_candidates(text)
