"""The plots of one run: percentiles, histogram and time line."""

from __future__ import annotations

import math

import numpy as np

from loadtest.load.result import LoadResult, Percentiles
from loadtest.report.histograms import Histogram
from loadtest.report.markup import Element
from loadtest.report.numbers import compact, count, significant
from loadtest.report.panel import FRAME, HEIGHT, LETTER, WIDTH, Panel, deadline, legend, picture, written_at
from loadtest.report.scales import Linear, Log, Nines

NAMED = (("p50", 0.5, "p50_ms"), ("p90", 0.9, "p90_ms"), ("p99", 0.99, "p99_ms"), ("p99.9", 0.999, "p999_ms"))


def percentile_plot(result: LoadResult) -> Element:
    """Latency and service time by percentile, its axis stretched by the nines; failures stand beyond the line's end."""
    latency, service = Histogram.decode(result.latency_histogram), Histogram.decode(result.service_histogram)
    scale = Nines.of(max(result.due, 1))
    ends = [one.high_ms for one in (latency, service)] + [latency.low_ms, service.low_ms, np.array([result.slo_ms])]
    drawn = picture(WIDTH, HEIGHT, "Latency by percentile")
    panel = Panel(drawn, FRAME, scale, Log.around(np.concatenate(ends)))
    panel.axes("ms", "percentile of requests")
    deadline(panel, result.slo_ms)
    _failures(panel, result)
    # Over all that were due: the lines end where failures begin.
    panel.line(*service.curve(scale, result.due), "s2")
    panel.line(*latency.curve(scale, result.due), "s1")
    _named_points(panel, result.latency_of_due, scale)
    legend(drawn, 54, 16, [("s1", "latency, from when it was due"), ("s2", "service time, from when it was sent")])
    return drawn


def _failures(panel: Panel, result: LoadResult) -> None:
    if result.answered < result.due:
        at = panel.vertical(result.answered / result.due, "failures")
        text = f"{count(result.due - result.answered)} failed"
        left = at + LETTER * len(text) > panel.box.right
        panel.add(written_at(at, panel.box.top - 6, text, "label failures", "end" if left else "start"))


def _named_points(panel: Panel, of: Percentiles, scale: Nines) -> None:
    for name, quantile, field in NAMED:
        value = getattr(of, field)
        if value is None or quantile > scale.high:
            continue
        text = f"{name} {significant(value)} ms"
        panel.dots([quantile], [value], "s1", [text])
        x, y = float(panel.across(quantile)), float(panel.up(value))
        # Where the line, which rises, does not pass: above on the left, or below on the right if there is no room.
        if x - 6 - LETTER * len(text) > panel.box.left:
            panel.add(written_at(x - 6, max(y - 8, panel.box.top + 12), text, "label", "end"))
        else:
            panel.add(written_at(x + 7, min(y + 16, panel.box.bottom - 4), text, "label"))


def histogram_plot(result: LoadResult) -> Element:
    """How many requests were answered in what time; bars of equal ratio."""
    histogram = Histogram.decode(result.latency_histogram)
    x = Log.around(np.concatenate([histogram.low_ms, histogram.high_ms]))
    # Fewer bars for fewer values, so that what shows is the shape and not the noise.
    bars = int(np.clip(2.5 * np.cbrt(histogram.count), 12, 72))
    edges, counts = histogram.bars(x.low, x.high, bars)
    drawn = picture(WIDTH, HEIGHT, "Histogram of latency")
    panel = Panel(drawn, FRAME, x, Linear.around(counts, whole=True))
    panel.axes("answers", "latency, ms")
    titles = [
        f"{significant(low)} to {significant(high)} ms: {count(number)}"
        for low, high, number in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    panel.bars(edges, counts, "s1", titles)
    if x.low < result.slo_ms < x.high:
        panel.vertical(result.slo_ms, "deadline", f"deadline {compact(result.slo_ms)} ms")
    right = -math.inf
    row = 0
    for name, _, field in NAMED:
        if (value := getattr(result.latency, field)) is None:
            continue
        at = panel.vertical(value, "percentile", f"{name} {significant(value)} ms")
        # Names that would touch stand in rows.
        half = LETTER * len(name) / 2
        row = row + 1 if at - half < right else 0
        drawn.append(written_at(at, panel.box.top - 6 - 12 * (row % 3), name, "label", "middle"))
        right = at + half + 4
    return drawn
