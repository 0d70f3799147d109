from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from loadtest.load.recorder import DIGITS, HIGHEST_US, LatencyHistogram, merged, rank_of

MICROSECONDS = st.lists(st.one_of(st.integers(1, 5000), st.integers(1, HIGHEST_US)), min_size=1, max_size=300)


def sent(histogram: LatencyHistogram) -> LatencyHistogram:
    """As it arrives from another process."""
    form = TypeAdapter(LatencyHistogram)
    return form.validate_python(json.loads(form.dump_json(histogram)))


def filled(times_us, digits: int = DIGITS) -> LatencyHistogram:
    histogram = LatencyHistogram(digits)
    histogram.record(np.array(times_us, np.int64))
    return histogram


@given(times_us=MICROSECONDS, digits=st.sampled_from([2, 3]))
def test_recording_many_is_recording_each_with_the_library(times_us, digits):
    one_by_one = HdrHistogram(1, HIGHEST_US, digits)
    for time_us in times_us:
        assert one_by_one.record_value(time_us)
    decoded = HdrHistogram.decode(filled(times_us, digits).encode().encoded)
    assert list(decoded.counts) == list(one_by_one.counts)[: len(decoded.counts)]
    assert decoded.get_total_count() == len(times_us)


@given(times_us=MICROSECONDS, ranks=st.lists(st.integers(1, 400), min_size=1, max_size=5))
def test_a_rank_is_the_sorted_value_within_its_digits(times_us, ranks):
    histogram = filled(times_us)
    in_order = sorted(times_us)
    for rank, found in zip(ranks, histogram.at_ranks(ranks), strict=True):
        if rank > len(in_order):
            assert found is None
        else:
            true_ms = in_order[rank - 1] / 1000
            assert true_ms <= found <= true_ms * 1.001 + 1e-12
    assert (histogram.min_us, histogram.max_us, histogram.sum_us) == (in_order[0], in_order[-1], sum(times_us))


@given(parts=st.lists(MICROSECONDS, min_size=1, max_size=4))
def test_the_sum_of_the_processes_histograms_is_the_histogram_of_all(parts):
    together = merged([sent(filled(part)) for part in parts])
    whole = filled([time_us for part in parts for time_us in part])
    assert together.percentiles() == whole.percentiles()
    assert together.count == whole.count
    decoded = [HdrHistogram.decode(one.encode().encoded) for one in (together, whole)]
    assert list(decoded[0].counts) == list(decoded[1].counts)


def test_percentiles_are_of_closed_form():
    found = filled(np.arange(1, 1001) * 100).percentiles()
    assert (found.min_ms, found.max_ms) == (0.1, 100.0)
    assert found.mean_ms == pytest.approx(50.05)
    assert found.p50_ms == pytest.approx(50.0, rel=1e-3)
    assert found.p90_ms == pytest.approx(90.0, rel=1e-3)
    assert found.p99_ms == pytest.approx(99.0, rel=1e-3)
    assert found.p999_ms == pytest.approx(99.9, rel=1e-3)


def test_failed_requests_are_later_than_all_answers():
    times_us = np.arange(1, 991) * 1000
    found = filled(times_us).percentiles(out_of=1000)
    # 990 answered of 1000: the 990th is the p99 of all, and the p99.9 failed.
    assert found.p99_ms == pytest.approx(990, rel=1e-3)
    assert found.p50_ms == pytest.approx(500, rel=1e-3)
    assert (found.p999_ms, found.max_ms, found.mean_ms) == (None, None, None)
    assert filled(times_us[:-1]).percentiles(out_of=1000).p99_ms is None


def test_nothing_recorded_has_no_percentiles():
    empty = LatencyHistogram()
    empty.record(np.zeros(0, np.int64))
    assert set(empty.percentiles().model_dump().values()) == {None}
    assert set(empty.percentiles(out_of=5).model_dump().values()) == {None}
    assert merged([sent(empty)]).count == 0


def test_times_out_of_range_count_at_its_ends():
    histogram = filled([-5, 0, 2 * HIGHEST_US])
    assert (histogram.min_us, histogram.max_us, histogram.count) == (1, HIGHEST_US, 3)


@given(share=st.sampled_from([0.5, 0.9, 0.99, 0.999]), total=st.integers(1, 10**7))
def test_the_rank_of_a_share_is_the_least_that_has_it(share, total):
    thousandths = round(share * 1000)
    rank = rank_of(share, total)
    assert rank * 1000 >= thousandths * total
    assert rank == max(1, math.ceil(thousandths * total / 1000))
