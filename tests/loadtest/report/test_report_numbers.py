"""Numbers on the page: as many digits as were measured, and no 0% or 100% that is not one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.report.numbers import compact, percentile_name, rate, ratio, share, significant, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (0.0482, "0.0482"), (0.482, "0.482"), (1, "1.00"), (2.496, "2.50"), (9.994, "9.99"), (9.996, "10.0"),
        (12.34, "12.3"), (99.94, "99.9"), (99.96, "100"), (123.4, "123"), (1234.5, "1,234"), (0.00001, "1.00e-05"),
    ],
)  # fmt: skip
def test_times_have_three_significant_digits(value, text):
    assert significant(value) == text


@given(st.floats(1e-4, 1e7))
def test_a_shown_number_is_within_half_of_its_last_digit(value):
    assert float(significant(value).replace(",", "")) == pytest.approx(value, rel=5.001e-3)


@pytest.mark.parametrize(
    ("value", "text"),
    [(600, "600"), (575.43, "575.4"), (1234.4, "1,234"), (99.93, "99.9"), (99.97, "100"), (0.25, "0.250")],
)
def test_rates_are_whole_or_have_at_least_three_digits(value, text):
    assert rate(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1, "100"), (0.5, "50.00"), (0.98271, "98.27"), (0.99998, "99.9980"), (0.9999987, "99.99987"),
     (0.00001, "0.0010"), (0.0000004, "0.000040"), (1.93, "193")],
)  # fmt: skip
def test_shares_are_percent(value, text):
    assert share(value) == text


@given(st.floats(0, 1, exclude_min=True, exclude_max=True).filter(lambda value: 1e-9 < value < 1 - 1e-9))
def test_no_share_is_rounded_to_nothing_or_to_all(value):
    assert 0 < float(share(value)) < 100


def test_ratios_sizes_ticks_and_percentiles_have_their_forms():
    assert [ratio(value) for value in (0.0612, 0.612, 0.9951, 1.0, 3.456)] == [
        "0.0612",
        "0.612",
        "1.00",
        "1.00",
        "3.46",
    ]
    assert [size(value) for value in (16 << 30, 3 << 20)] == ["16.0 GiB", "3.0 MiB"]
    assert [compact(value) for value in (0, -0.0, 0.25, 2.0, 12_000.0)] == ["0", "0", "0.25", "2", "12,000"]
    assert [percentile_name(value) for value in (0, 0.5, 0.9, 0.999, 0.99999)] == [
        "0%",
        "50%",
        "90%",
        "99.9%",
        "99.999%",
    ]
