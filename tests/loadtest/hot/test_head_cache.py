"""The textbook's cache: what is drawn is what its closed form expects, and nothing is computed from quoted figures."""

from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner

from loadtest.hot import head_cache
from loadtest.hot.head_cache import QUOTED, closed_form, draw_ids, main, simulated


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_drawn_hit_rates_are_within_their_standard_errors_of_the_closed_form(seed):
    for one in simulated(seed):
        assert abs(one.hit_rate - one.closed_form) <= 4 * one.standard_error
        assert one.moved_bytes == pytest.approx((65_536 * 40 - one.hits) * 512)
        assert one.moved_ms == pytest.approx(one.moved_bytes / 1e8)


def test_the_closed_form_is_a_sum_over_rows():
    weights = np.arange(1, 5001) ** -1.1
    assert closed_form(0, 10_000) == 0
    assert closed_form(5000, 10_000) == pytest.approx(0.85 + 0.075)
    assert closed_form(3, 10_000) == pytest.approx(0.85 * weights[:3].sum() / weights.sum() + 0.15 * 3 / 10_000)


def test_the_same_seed_draws_the_same_ids_of_the_table():
    first, second, other = (draw_ids(np.random.default_rng(seed), 10_000, 6000) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()
    assert first.min() == 0
    assert 5000 < first.max() < 6000


def test_quoted_hit_rates_stand_beside_what_is_drawn_and_change_none_of_it(monkeypatch):
    before = [one.model_copy(update={"quoted": None}) for one in simulated(0)]
    monkeypatch.setattr(head_cache, "QUOTED", dict.fromkeys(QUOTED, 0.1))
    assert [one.model_copy(update={"quoted": None}) for one in simulated(0)] == before
    output = CliRunner().invoke(main, ["--seed", "0"]).output
    assert all(f"{one.hit_rate:.5f}" in output for one in before)
