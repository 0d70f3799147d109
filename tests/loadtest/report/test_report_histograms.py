"""A result's histograms, decoded: the same values that went in, at their percentiles and in bars."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.errors import HistogramError
from loadtest.load.recorder import encode_histogram
from loadtest.load.recorder import percentiles as percentiles_of
from loadtest.load.result import EncodedHistogram
from loadtest.report.plots import Histogram, merged


def decoded(times_us):
    return Histogram.decode(encode_histogram(np.asarray(times_us, np.float64) / 1e6))


def test_a_decoded_histogram_has_every_value_in_a_bucket_that_holds_it():
    found = decoded([700, 700, 1_234, 250_000])
    assert found.counts.tolist() == [2, 1, 1]
    assert found.count == 4
    for low, value, high in zip(found.low_ms, (0.7, 1.234, 250.0), found.high_ms, strict=True):
        assert low <= value <= high
        assert (high - low) / value < 1e-3


@settings(max_examples=20)
@given(st.lists(st.integers(50, 2_000_000), min_size=1, max_size=200))
def test_the_curve_is_the_values_in_order(times_us):
    percentiles, values = decoded(times_us).curve()
    ranks = np.clip(np.ceil(np.round(percentiles * len(times_us), 6)), 1, None).astype(int)
    assert values == pytest.approx(np.sort(times_us)[ranks - 1] / 1000, rel=1e-3, abs=1e-3)
    assert values[-1] == pytest.approx(max(times_us) / 1000, rel=1e-3, abs=1e-3)


def test_the_curve_passes_through_the_results_own_percentiles():
    times_s = np.random.default_rng(1).lognormal(8, 0.5, 5_000) / 1e6
    percentiles, values = Histogram.decode(encode_histogram(times_s)).curve(points=2_000)
    own = percentiles_of(times_s)
    for share, value in ((0.5, own.p50_ms), (0.9, own.p90_ms), (0.99, own.p99_ms)):
        assert np.interp(share, percentiles, values) == pytest.approx(value, rel=5e-3)


def test_the_curve_ends_where_failures_begin():
    percentiles, values = decoded([1_000] * 90 + [5_000] * 9).curve(of=132)
    assert percentiles[-1] == pytest.approx(99 / 132)
    assert values[-1] == pytest.approx(5.0, rel=1e-3)


def test_a_curve_is_of_all_its_values_where_fewer_are_said():
    histogram = decoded([1_000] * 90 + [5_000] * 10)
    for found, expected in zip(histogram.curve(of=7), histogram.curve(), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_an_empty_histogram_has_no_curve():
    percentiles, values = decoded([]).curve()
    assert len(percentiles) == len(values) == 0


@settings(max_examples=20)
@given(st.lists(st.integers(30, 900_000), min_size=1, max_size=300))
def test_bars_hold_every_value_once(times_us):
    low, high = min(times_us) / 1000 * 0.9, max(times_us) / 1000 * 1.1
    edges, counts = decoded(times_us).bars(low, high)
    assert counts.sum() == len(times_us)
    expected, _ = np.histogram(np.asarray(times_us) / 1000, edges)
    # Values of one bucket (0.1% of them) go together.
    assert np.abs(np.cumsum(counts) - np.cumsum(expected)).max() <= sum(
        math.isclose(time / 1000, edge, rel_tol=2e-3) for time in times_us for edge in edges
    )


def test_bars_are_not_narrower_than_a_microsecond():
    edges, counts = decoded([5, 6, 7]).bars(0.005, 0.008)
    assert (np.diff(edges) >= 0.00099).all()
    assert counts.sum() == 3


def test_merged_histograms_have_all_values():
    both = merged([decoded([700, 800]), decoded([800, 90_000])])
    assert both.counts.tolist() == [1, 1, 1, 1]
    assert both.low_ms.tolist() == sorted(both.low_ms)
    assert both.count == 4
    assert (both.low_ms <= both.high_ms).all()


@pytest.mark.parametrize("text", ["", "nonsense", "SElTVA==", "é"])
def test_what_is_no_histogram_is_refused(text):
    with pytest.raises(HistogramError, match="not an HDR histogram"):
        Histogram.decode(EncodedHistogram(encoded=text, count=1))


def test_a_histogram_with_another_count_than_is_said_is_refused():
    encoded = encode_histogram(np.asarray([700, 800]) / 1e6)
    with pytest.raises(HistogramError, match="holds 2 values, `count` says 3"):
        Histogram.decode(encoded.model_copy(update={"count": 3}))
