"""What charts are drawn from: histograms, decoded, and percentiles stretched by the nines."""

from __future__ import annotations

import re

import numpy as np
import pytest

from loadtest.errors import HistogramError
from loadtest.load.result import EncodedHistogram, encode_histogram
from loadtest.report.charts import decode_histogram, latency_chart, percentile_chart, percentile_curve, ratio_chart
from loadtest.rounds import Arm, ComparedMeasure, Comparison
from shardrank_testing.load_results import QueueLoad, example_sweep


def encoded(times_us):
    return encode_histogram(np.asarray(times_us) / 1e6)


def texts(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_a_decoded_histogram_has_every_time():
    times, counts = decode_histogram(encoded([250_000, 700, 1_234, 700]))
    assert times == pytest.approx([0.7, 1.234, 250.0], rel=1e-3)
    assert counts.tolist() == [2, 1, 1]


@pytest.mark.parametrize("text", ["", "nonsense", "SElTVA==", "é"])
def test_another_text_is_no_histogram(text):
    with pytest.raises(HistogramError, match="not an HDR histogram"):
        decode_histogram(EncodedHistogram(encoded=text, count=1))


def test_a_histogram_with_another_count_is_refused():
    with pytest.raises(HistogramError, match="holds 2 values, `count` says 3"):
        decode_histogram(encoded([700, 800]).model_copy(update={"count": 3}))


@pytest.mark.parametrize("parts", [1, 3])
def test_a_curve_has_the_percentiles_of_all_its_histograms(parts):
    times_us = np.random.default_rng(1).lognormal(8, 0.5, 6_000).astype(np.int64)
    nines, times = percentile_curve([encoded(part) for part in np.split(times_us, parts)], len(times_us))
    assert (np.diff(nines) >= 0).all()
    assert (np.diff(times) >= 0).all()
    for quantile in (0.5, 0.9, 0.99, 0.999):
        # A step holds up to its end.
        found = times[np.searchsorted(nines, -np.log10(1 - quantile))]
        assert found == pytest.approx(np.quantile(times_us, quantile) / 1000, rel=0.02)


def test_a_curve_ends_where_failures_begin_or_at_the_largest_time():
    answered = [1_000] * 90 + [5_000] * 9
    for due, later in ((132, 33 / 132), (99, 0.5 / 99)):
        nines, times = percentile_curve([encoded(answered)], due)
        assert 10 ** -nines[-1] == pytest.approx(later)
        assert times[-1] == pytest.approx(5.0, rel=1e-3)


def test_percentiles_failures_and_deadline_are_named_in_a_chart():
    run = QueueLoad(duration_s=4, warmup_s=1, refused=0.05).run()
    found = texts(percentile_chart(run))
    assert f"p50 {run.latency_of_due.p50_ms:#.3g} ms " in found
    assert {f"{run.due - run.answered:,} failed", "deadline 25 ms", "50%", "90%", "latency, from when it was due"} <= {
        *found
    }
    assert not [text for text in found if text.startswith("p99 ")]


def test_a_sweep_has_the_highest_rate_and_a_cross_for_each_failed_percentile():
    sweep = example_sweep()
    svg = latency_chart(sweep)
    assert "800/s" in texts(svg)
    failed = sum(getattr(step.latency_of_due, name) is None for step in sweep.steps for name in ("p99_ms", "p999_ms"))
    assert failed > 0
    crosses = set(re.findall(r'<path id="(\w+)" d="M [-\d.]+ [-\d.]+\s+L [-\d.]+ [-\d.]+\s+M', svg))
    assert sum(svg.count(f'href="#{marker}"') for marker in crosses) == failed


def test_ratios_of_a_comparison_are_drawn_with_their_texts():
    measure = ComparedMeasure.from_values("p99", "ms", "lower", [[10.0, 12.0], [8.0, 9.0], [12.0, 12.0]])
    arms = tuple(Arm(name=name) for name in ("1 card", "2 cards", "4 cards"))
    comparison = Comparison(title="t", arms=arms, baseline=0, rounds=2, measures=(measure,), valid=True)
    found = texts(ratio_chart(comparison))
    assert {"p99", "2 cards", "4 cards", "ratio to 1 card", *map(str, measure.ratios[1:])} <= {*found}
