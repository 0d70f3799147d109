"""Ids and numbers of candidates: against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.errors import ConfigError
from loadtest.workloads.workload import (
    MLPERF_CANDIDATES,
    CandidateCounts,
    RowScatter,
    Uniform,
    Zipf,
    parse_candidates,
    parse_ids,
)

DRAWS = 200_000
MAX_ROWS = 2**32 - 1
DISTRIBUTIONS = [Uniform(), Zipf(0.5), Zipf(1.0), Zipf(1.05), Zipf(3.0)]


def drawn(ids, num_rows: int, count: int = DRAWS, seed: int = 0) -> np.ndarray:
    return ids.ranks(np.random.default_rng(seed), np.full(count, num_rows))


def shares(ranks: np.ndarray, num_rows: int) -> np.ndarray:
    return np.bincount(ranks, minlength=num_rows) / ranks.size


@pytest.mark.parametrize("exponent", [0.3, 1.0, 1.05, 2.0])
@pytest.mark.parametrize("num_rows", [1, 2, 50, 3000])
def test_zipf_ranks_have_the_probabilities_of_the_law(exponent, num_rows):
    expected = np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent
    expected /= expected.sum()
    found = shares(drawn(Zipf(exponent), num_rows), num_rows)
    # Five standard deviations of each share, and a little for those of which hardly one is expected.
    allowed = 5 * np.sqrt(expected * (1 - expected) / DRAWS) + 5 / DRAWS
    assert (np.abs(found - expected) <= allowed).all()


def test_zipf_over_4_billion_rows_has_the_share_of_the_first():
    ranks = drawn(Zipf(1.05), MAX_ROWS)
    # The sum of the law by its integral from 1000 on.
    k = np.arange(1, 1000, dtype=np.float64)
    total = (k**-1.05).sum() + (999.5**-0.05 - (MAX_ROWS + 0.5) ** -0.05) / 0.05
    assert np.mean(ranks == 0) == pytest.approx(1 / total, abs=0.002)
    assert ranks.max() > MAX_ROWS // 2


def test_uniform_ranks_are_all_as_likely():
    found = shares(drawn(Uniform(), 100), 100)
    assert np.abs(found - 0.01).max() < 5 * np.sqrt(0.01 / DRAWS)


@pytest.mark.parametrize("ids", DISTRIBUTIONS, ids=lambda one: one.name)
@given(num_rows=st.lists(st.integers(1, MAX_ROWS), min_size=1, max_size=50), seed=st.integers(0, 2**32 - 1))
def test_ranks_are_below_the_rows_of_their_own_table(ids, num_rows, seed):
    limits = np.array(num_rows, np.int64)
    ranks = ids.ranks(np.random.default_rng(seed), limits)
    assert ranks.dtype == np.int64
    assert ranks.shape == limits.shape
    assert ((ranks >= 0) & (ranks < limits)).all()


@given(num_rows=st.integers(1, 2000))
def test_every_row_has_exactly_one_rank(num_rows):
    scatter = RowScatter(np.array([num_rows]))
    rows = scatter.rows(np.arange(num_rows), np.zeros(num_rows, np.int32))
    assert sorted(rows.tolist()) == list(range(num_rows))


def test_the_most_popular_rows_lie_all_over_the_largest_table():
    scatter = RowScatter(np.array([7, MAX_ROWS]))
    ranks = np.append(np.arange(1000), MAX_ROWS - 1)
    rows = scatter.rows(ranks, np.ones(ranks.size, np.int32))
    # By plain integers of any size.
    multiplier, offset = int(scatter.multipliers[1]), int(scatter.offsets[1])
    assert rows.tolist() == [(rank * multiplier + offset) % MAX_ROWS for rank in ranks.tolist()]
    # 1000 rows evenly spread have gaps of a thousandth of the table.
    assert np.diff(np.sort(rows)).min() > MAX_ROWS / 1000 / 3


NAMES = {parse_ids: "uniform zipf:1.05 zipf:2", parse_candidates: "1 100 100-700:270 1-3:2"}
# The first one of each is empty.
UNKNOWN = {
    parse_ids: " zipf zipf: zipf:0 zipf:-1 zipf:nan zipf:11 Uniform zipf:1e5",
    parse_candidates: " 0 -1 x 1.5 700-100:270 100-700 100-700:100 100-700:701 0-10:5 5-5:5 ٣ 999999999",
}


@pytest.mark.parametrize(("parse", "text"), [(parse, text) for parse in NAMES for text in NAMES[parse].split()])
def test_a_distribution_is_named_as_it_is_read(parse, text):
    assert parse(text).name == text
    assert parse_ids("zipf(1.1)").name == "zipf:1.1"


@pytest.mark.parametrize(("parse", "text"), [(parse, text) for parse in UNKNOWN for text in UNKNOWN[parse].split(" ")])
def test_an_unknown_distribution_is_refused(parse, text):
    with pytest.raises(ConfigError, match="ids: " if parse is parse_ids else "candidates: "):
        parse(text)


def counts(candidates, number: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.array([candidates.draw(rng) for _ in range(number)])


def test_mlperf_has_100_to_700_candidates_with_a_mean_of_270():
    """Fewer are more likely, by a constant ratio."""
    found = counts(MLPERF_CANDIDATES, 100_000)
    assert found.min() == 100
    assert 690 <= found.max() <= 700
    # The standard deviation is about 145.
    assert found.mean() == pytest.approx(270, abs=5 * 145 / 100_000**0.5)
    hundreds = np.bincount(found - 100, minlength=601)[:600].reshape(6, 100).sum(axis=1)
    ratios = hundreds[1:] / hundreds[:-1]
    assert (ratios < 0.7).all()
    assert np.ptp(ratios) < 0.1


@given(least=st.integers(1, 1000), span=st.integers(2, 2000), share=st.floats(0.02, 0.98))
def test_the_mean_is_the_one_asked_for(least, span, share):
    candidates = CandidateCounts(least, least + span, least + share * span)
    # P(number > least + i), summed, is the mean's distance from the least.
    assert least + (1 - candidates._cumulated).sum() == pytest.approx(candidates.mean, rel=1e-6)
