"""Axes: where ticks are and what they are called, and that values stand where the ticks say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.report.chart import linear, linear_around, log_around, percentile_scale

amounts = st.floats(1e-3, 1e6, allow_nan=False)


def labels(scale):
    return list(scale.ticks.values())


def test_a_linear_axis_begins_at_0_and_ends_at_the_step_above_the_highest_value():
    assert labels(linear_around([37.0, 412.0])) == ["0", "100", "200", "300", "400", "500"]
    assert labels(linear_around([1_900.0])) == ["0", "500", "1,000", "1,500", "2,000"]
    assert labels(linear_around([0.7])) == ["0", "0.2", "0.4", "0.6", "0.8"]


def test_an_axis_of_counts_has_whole_steps():
    assert labels(linear_around([5], 2, whole=True)) == ["0", "5"]
    assert labels(linear_around([2], 5, whole=True)) == ["0", "1", "2"]
    assert labels(linear_around([55], 2, whole=True)) == ["0", "50", "100"]
    assert labels(linear_around([48], 2, whole=True)) == ["0", "25", "50"]


def test_a_linear_axis_of_nothing_is_still_an_axis():
    assert labels(linear_around([])) == labels(linear_around([0.0])) == ["0", "0.2", "0.4", "0.6", "0.8", "1"]


def test_a_linear_axis_between_two_values_keeps_them_as_its_ends():
    scale = linear(-1.5, 33.0, 5.0)
    assert (scale.low, scale.high) == (-1.5, 33.0)
    assert labels(scale) == ["0", "5", "10", "15", "20", "25", "30"]


def test_a_log_axis_has_ticks_at_1_2_and_5_times_powers_of_ten():
    assert labels(log_around([0.7, 130.0])) == ["0.5", "1", "2", "5", "10", "20", "50", "100", "200"]


def test_a_log_axis_over_many_decades_has_ticks_at_powers_of_ten():
    assert labels(log_around([0.001, 9_000.0])) == ["0.001", "0.01", "0.1", "1", "10", "100", "1,000", "10,000"]


def test_a_log_axis_over_close_values_has_equal_steps():
    assert labels(log_around([0.36, 1.05])) == [*(f"0.{tenth}" for tenth in range(3, 10)), "1", "1.1"]
    assert labels(log_around([1.0])) == ["0.99", "0.9925", "0.995", "0.9975", "1", "1.0025", "1.005", "1.0075", "1.01"]


def test_equal_ratios_are_equal_lengths_on_a_log_axis():
    scale = log_around([1.0, 100.0])
    assert scale.place([1.0, 10.0, 100.0]) == pytest.approx([0.0, 0.5, 1.0])
    assert scale.place([0.0, -3.0, 1e9]).tolist() == [0.0, 0.0, 1.0]


def test_each_further_nine_is_as_far_as_the_one_before():
    scale = percentile_scale(5_000)
    assert labels(scale) == ["0%", "50%", "90%", "99%", "99.9%", "99.99%"]
    assert scale.place([0.0, 0.9, 0.99, 0.999, 0.9999]) == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    assert scale.place(0.5) == pytest.approx(math.log10(2) / 4)


@pytest.mark.parametrize(("count", "last"), [(0, "90%"), (1, "90%"), (49, "90%"), (50, "99%"), (50_000, "99.999%")])
def test_percentiles_go_as_far_as_there_are_values(count, last):
    assert labels(percentile_scale(count))[-1] == last


def test_rows_have_no_ticks():
    assert linear(0.0, 4.0).ticks == {}
    assert linear(0.0, 4.0).place([0, 1, 4]).tolist() == [0.0, 0.25, 1.0]


@given(st.lists(amounts, min_size=1, max_size=6))
def test_every_axis_holds_its_values_and_its_ticks_in_order(values):
    for scale in (linear_around(values), log_around(values)):
        assert scale.low <= min(values) * (1 + 1e-6)
        assert scale.high >= max(values) * (1 - 1e-6)
        assert scale.high > scale.low >= 0
        ticks = list(scale.ticks)
        assert 2 <= len(ticks) <= 16
        assert (np.diff(scale.place(ticks)) > 0).all()
        assert float(scale.place(scale.low)) == pytest.approx(0.0)
        assert float(scale.place(scale.high)) == pytest.approx(1.0)


@given(st.lists(amounts, min_size=1, max_size=6))
def test_a_tick_is_called_what_it_is(values):
    for scale in (linear_around(values), log_around(values)):
        for value, label in scale.ticks.items():
            assert float(label.replace(",", "")) == pytest.approx(value, rel=1e-6, abs=1e-9)


def test_what_is_not_there_has_no_place():
    for scale in (linear_around([5.0]), log_around([1.0, 5.0])):
        assert math.isnan(float(scale.place(math.nan)))
