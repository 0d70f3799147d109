"""Draw the page's plots: percentiles, histogram and time line of a run, a sweep's rates, a comparison's ratios."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hdrh.codec import HdrCookieException, HdrLengthException
from hdrh.histogram import HdrHistogram

from loadtest.errors import HistogramError
from loadtest.load.result import EncodedHistogram, LoadResult, Mark, Percentiles, SweepResult
from loadtest.report import numbers
from loadtest.report.chart import (
    LETTER,
    Box,
    Floats,
    Panel,
    half_chart,
    legend,
    linear,
    linear_around,
    log_around,
    nice_step,
    percentile_scale,
    picture,
    written_at,
)
from loadtest.report.comparison import ComparedMeasure, Comparison
from loadtest.report.markup import Element, element
from loadtest.report.numbers import compact, count, rate, significant

LONG_WIDTH, LONG_HEIGHT, ROW = 1220.0, 478.0, 20.0
MAX_NAME = 24
US_PER_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of times, ascending.

    Attributes:
        low_ms, high_ms: float64 `[buckets]`, the first and last value that falls into each bucket.
        counts: int64 `[buckets]`, above 0.
    """

    low_ms: Floats
    high_ms: Floats
    counts: npt.NDArray[np.int64]

    @classmethod
    def decode(cls, encoded: EncodedHistogram) -> Histogram:
        """Decode it.

        Raises:
            HistogramError: if it is no HDR histogram, or has another count than is said beside it.
        """
        try:
            found = HdrHistogram.decode(encoded.encoded)
        except (TypeError, ValueError, OverflowError, HdrCookieException, HdrLengthException, zlib.error, struct.error,
                IndexError) as error:  # fmt: skip
            raise HistogramError(f"encoded: not an HDR histogram in V2 form: {error!r}") from error
        counts = np.array(found.counts, np.int64)
        if (total := int(counts.sum())) != encoded.count:
            raise HistogramError(f"encoded: holds {total} values, `count` says {encoded.count}")
        filled = np.flatnonzero(counts)
        low = [found.get_value_from_index(int(index)) for index in filled]
        high = [found.get_highest_equivalent_value(value) for value in low]
        return cls(np.array(low, np.float64) / US_PER_MS, np.array(high, np.float64) / US_PER_MS, counts[filled])

    @property
    def count(self) -> int:
        """Count the values in it."""
        return int(self.counts.sum())

    def curve(self, of: int = 0, points: int = 400) -> tuple[Floats, Floats]:
        """Find percentiles, 0 to 1, and the milliseconds at them, float64 `[n]` each, as far apart as nines are.

        They are percentiles `of` so many values: more than `count` if some have no time, which are later than all that
        have one. The curve ends where they begin.
        """
        total = max(of, self.count)
        if not self.count:
            return np.empty(0), np.empty(0)
        # The largest value stands in the middle of its own share of the axis; at 1 it would stand at infinity.
        rest = 0.5 / total if total == self.count else 1 - self.count / total
        quantiles = 1 - np.geomspace(1.0, rest, points)
        # As a percentile's rank is reckoned in the result itself, see `rank_of`.
        wanted = np.clip(np.ceil(np.round(quantiles * total, 6)), 1, self.count)
        return quantiles, self.high_ms[np.searchsorted(np.cumsum(self.counts), wanted)]

    def bars(self, low_ms: float, high_ms: float, bars: int = 72) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Count in bars of equal ratio; all values must be within the ends.

        Returns float64 `[n + 1]` edges in milliseconds and int64 `[n]` counts; n is less than asked for where bars
        would be narrower than the histogram's own buckets.
        """
        edges = np.geomspace(low_ms, high_ms, bars + 1)
        # Between whole microseconds, so that no value stands on an edge.
        inner = np.unique(np.round(edges[1:-1] * US_PER_MS)) - 0.5
        edges = np.concatenate([[np.floor(low_ms * US_PER_MS) - 0.5], inner, [np.ceil(high_ms * US_PER_MS) + 0.5]])
        edges = np.unique(edges) / US_PER_MS
        counts, _ = np.histogram((self.low_ms + self.high_ms) / 2, edges, weights=self.counts)
        return edges, counts.astype(np.int64)


def merged(histograms: list[Histogram]) -> Histogram:
    """Put all values of several together; a bucket that two have is there twice."""
    low = np.concatenate([one.low_ms for one in histograms])
    high = np.concatenate([one.high_ms for one in histograms])
    counts = np.concatenate([one.counts for one in histograms])
    order = np.argsort(low, kind="stable")
    return Histogram(low[order], high[order], counts[order])


NAMED = (("p50", 0.5, "p50_ms"), ("p90", 0.9, "p90_ms"), ("p99", 0.99, "p99_ms"), ("p99.9", 0.999, "p999_ms"))


def percentile_plot(result: LoadResult) -> Element:
    """Draw latency and service time by percentile, stretched by the nines; failures stand beyond the line's end."""
    latency, service = Histogram.decode(result.latency_histogram), Histogram.decode(result.service_histogram)
    scale = percentile_scale(max(result.due, 1))
    ends = [one.high_ms for one in (latency, service)] + [latency.low_ms, service.low_ms, np.array([result.slo_ms])]
    y = log_around(np.concatenate(ends))
    names = [("s1", "latency, from when it was due"), ("s2", "service time, from when it was sent")]
    drawn, panel = half_chart("Latency by percentile", scale, y, "ms", "percentile of requests", names)
    panel.deadline(result.slo_ms)
    _failures(panel, result)
    # Over all that were due: the lines end where failures begin.
    panel.line(*service.curve(result.due), "s2")
    panel.line(*latency.curve(result.due), "s1")
    _named_points(panel, result.latency_of_due)
    return drawn


def _failures(panel: Panel, result: LoadResult) -> None:
    if result.answered < result.due:
        at = panel.vertical(result.answered / result.due, "failures")
        text = f"{count(result.due - result.answered)} failed"
        left = at + LETTER * len(text) > panel.box.right
        panel.add(written_at(at, panel.box.top - 6, text, "label failures", "end" if left else "start"))


def _named_points(panel: Panel, of: Percentiles) -> None:
    for name, quantile, field in NAMED:
        value = getattr(of, field)
        if value is None or quantile > panel.x.high:
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
    """Draw how many requests were answered in what time; bars of equal ratio."""
    histogram = Histogram.decode(result.latency_histogram)
    x = log_around(np.concatenate([histogram.low_ms, histogram.high_ms]))
    # Fewer bars for fewer values, so that what shows is the shape and not the noise.
    bars = int(np.clip(2.5 * np.cbrt(histogram.count), 12, 72))
    edges, counts = histogram.bars(x.low, x.high, bars)
    y = linear_around(counts, whole=True)
    drawn, panel = half_chart("Histogram of latency", x, y, "answers", "latency, ms")
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


MAX_POINTS = 1200
"""Longer runs are drawn in windows of several seconds."""
LEGEND = (("s1", "p99"), ("s2", "p50"), ("bar s3", "answered right"), ("bar s4", "failed"), ("s5", "in flight"))


@dataclass(frozen=True, slots=True)
class TimeLine:
    """The seconds of a run, at least one, or windows of several.

    Attributes:
        window_s: seconds in each window.
        edges_s: float64 `[n + 1]`.
        p50_ms, p99_ms: the highest of each window's seconds; NaN where nothing was answered.
        due, ok, errors: of a second, the mean of the window.
        in_flight: the highest of the window.
    """

    window_s: int
    edges_s: Floats
    p50_ms: Floats
    p99_ms: Floats
    due: Floats
    ok: Floats
    errors: Floats
    in_flight: Floats

    @classmethod
    def of(cls, result: LoadResult) -> TimeLine:
        """Join seconds where there are more than can be drawn."""
        seconds = result.time_line
        window = max(1, math.ceil(len(seconds) / MAX_POINTS))
        begins = [one.at_s for one in seconds[::window]]
        last = min(seconds[-1].at_s + 1, result.warmup_s + result.duration_s)
        edges = np.array([*begins, max(last, begins[-1] + 1e-3)])

        def windows(field: str) -> Floats:
            """Lay out a field as float64 `[n, window_s]`; NaN is what is not there."""
            values = np.array([getattr(one, field) for one in seconds], np.float64)
            return np.pad(values, (0, -len(values) % window), constant_values=np.nan).reshape(-1, window)

        # The run's last second may be a part of one; counts are of a whole second.
        lengths = np.maximum(np.diff(edges), 1e-3)
        highest = {field: np.fmax.reduce(windows(field), axis=1) for field in ("p50_ms", "p99_ms", "in_flight")}
        means = {field: np.nansum(windows(field), axis=1) / lengths for field in ("due", "ok", "errors")}
        return cls(window, edges, **highest, **means)


def time_line_plot(result: LoadResult) -> Element:
    """Draw latency, requests and requests in flight, second by second, with marks through all three."""
    line = TimeLine.of(result)
    before = min([0.0, *(mark.at_s for mark in result.marks)])
    after = max([float(line.edges_s[-1]), *(mark.at_s for mark in result.marks)])
    x = linear(before, after, nice_step((after - before) / 12))
    drawn = picture(LONG_WIDTH, LONG_HEIGHT, "Time line")
    left, width = 60.0, LONG_WIDTH - 80
    latencies = np.concatenate([line.p50_ms, line.p99_ms, [result.slo_ms]])
    panels = [
        Panel(drawn, Box(left, 60, width, 170), x, log_around(latencies)),
        Panel(drawn, Box(left, 262, width, 90), x, linear_around(np.concatenate([line.due, [result.rate]]), 3)),
        Panel(drawn, Box(left, 384, width, 56), x, linear_around(line.in_flight, 2, whole=True)),
    ]
    for panel, name in zip(panels, ("latency, ms", "requests/s, by when they were due", "in flight"), strict=True):
        panel.axes(name, "seconds since the run began" if panel is panels[-1] else "", panel is panels[-1])
        panel.shade(0.0, result.warmup_s, "warm-up" if panel is panels[0] else "")
    panels[0].deadline(result.slo_ms, left=False)
    middle_s = (line.edges_s[:-1] + line.edges_s[1:]) / 2
    panels[0].line(middle_s, line.p99_ms, "s1")
    panels[0].line(middle_s, line.p50_ms, "s2")
    _requests(panels[1], line)
    panels[2].line(middle_s, line.in_flight, "s5")
    _marks(drawn, panels, result.marks)
    legend(drawn, left, 16, LEGEND, LONG_WIDTH)
    return drawn


def _requests(panel: Panel, line: TimeLine) -> None:
    titles = [
        f"{begin:g} s: {significant(due)}/s due, {significant(ok)}/s answered, {significant(bad)}/s failed"
        for begin, due, ok, bad in zip(line.edges_s[:-1], line.due, line.ok, line.errors, strict=True)
    ]
    gap = 0.6 if len(line.due) <= 200 else 0.0
    panel.bars(line.edges_s, line.ok, "s3", titles, gap=gap)
    # Failures stand on the answers: both together are what was due.
    panel.bars(line.edges_s, line.errors, "s4", titles, over=line.ok, gap=gap)


def _marks(drawn: Element, panels: Sequence[Panel], marks: Sequence[Mark]) -> None:
    rows = [-math.inf, -math.inf, -math.inf]
    for number, mark in enumerate(marks, 1):
        text = f"{number}: {mark.label}, at {mark.at_s:.1f} s"
        for panel in panels:
            at = panel.vertical(mark.at_s, "mark", text)
        name = mark.label if len(mark.label) <= MAX_NAME else f"{mark.label[: MAX_NAME - 1]}…"
        label = f"{number} {name}"
        length = LETTER * len(label) + 8
        begin = min(at + 2, panels[0].box.right - length)
        # In the first row with room. Without one, the line's text is under the pointer, and in the table.
        row = next((index for index, end in enumerate(rows) if end < begin), None)
        if row is not None:
            rows[row] = begin + length
            drawn.append(written_at(begin, panels[0].box.top - 4 - 13 * row, label, "label mark"))


MAX_CURVES = 6
"""As many as there are strokes to tell them by."""


def curves_plot(named: Sequence[tuple[str, Sequence[LoadResult]]], slo_ms: float, label: str) -> Element:
    """Draw latency of all that were due by percentile, at most `MAX_CURVES` lines; a line's runs are taken together."""
    lines = [(name, merged([Histogram.decode(run.latency_histogram) for run in runs]), runs) for name, runs in named]
    scale = percentile_scale(max(sum(run.due for run in runs) for _, runs in named))
    ends = np.concatenate([[slo_ms], *[one.low_ms for _, one, _ in lines], *[one.high_ms for _, one, _ in lines]])
    names = [(f"s{index}", name) for index, (name, _, _) in enumerate(lines, 1)]
    drawn, panel = half_chart(label, scale, log_around(ends), "ms", "percentile of requests", names)
    panel.deadline(slo_ms)
    for index, (_, histogram, runs) in enumerate(lines, 1):
        panel.line(*histogram.curve(sum(run.due for run in runs)), f"s{index}")
    return drawn


SERIES = (("s1", "p99", "p99_ms"), ("s2", "p50", "p50_ms"), ("s6", "p99.9", "p999_ms"))


def by_rate(sweep: SweepResult) -> list[tuple[int, LoadResult]]:
    """Order the steps, with their numbers, from the lowest rate to the highest."""
    return sorted(enumerate(sweep.steps), key=lambda one: (one[1].rate, one[0]))


def latency_plot(sweep: SweepResult) -> Element:
    """Draw p50, p99 and p99.9 of all requests that were due, against the rate at which they were."""
    steps = [step for _, step in by_rate(sweep)]
    rates = [step.rate for step in steps]
    values = {field: np.array([getattr(step.latency_of_due, field) for step in steps], float) for *_, field in SERIES}
    x, y = linear_around(rates, 6), log_around(np.concatenate([*values.values(), [sweep.slo_ms]]))
    names = [(series, name) for series, name, _ in SERIES]
    drawn, panel = half_chart("Latency against rate", x, y, "ms", "requests a second", names)
    _highest_rate(panel, sweep)
    panel.deadline(sweep.slo_ms)
    for place, (series, name, field) in reversed(list(enumerate(SERIES))):
        panel.line(rates, values[field], series)
        for step, value in zip(steps, values[field].tolist(), strict=True):
            if math.isnan(value):
                # More requests failed than this percentile leaves out: it has no time, and stands at the top as a
                # cross. Crosses of several percentiles stand beside each other.
                at = float(panel.across(step.rate)) + 9.0 * (place - 1)
                panel.add(written_at(at, panel.box.top + 5, "×", f"cross {series}", "middle"))
                continue
            note = "" if step.valid else "; not valid: the generator was the bottleneck"
            title = f"{rate(step.rate)}/s: {name} {significant(value)} ms{note}"
            panel.dots([step.rate], [value], series, [title], _kind(step))
    return drawn


def _kind(step: LoadResult) -> str:
    return "" if step.valid else "hollow"


def _highest_rate(panel: Panel, sweep: SweepResult) -> None:
    if sweep.highest_rate is None:
        return
    label = f"{rate(sweep.highest_rate)}/s"
    at = panel.vertical(sweep.highest_rate, "highest", f"highest rate that kept the deadline: {label}")
    panel.add(written_at(at, panel.box.top - 6, label, "label highest", "middle"))


def throughput_plot(sweep: SweepResult) -> Element:
    """Draw answers a second, and answers in time, against the rate."""
    steps = [step for _, step in by_rate(sweep)]
    rates = [step.rate for step in steps]
    x, y = linear_around(rates, 6), linear_around([*rates, *(step.throughput for step in steps)])
    names = [("s3", "answered right"), ("s1", "within the deadline"), ("even", "all that were due")]
    drawn, panel = half_chart("Answers against rate", x, y, "answers a second", "requests a second", names)
    panel.line([0.0, max(rates)], [0.0, max(rates)], "even")
    _highest_rate(panel, sweep)
    for series, name, field in (("s3", "answered", "throughput"), ("s1", "in time", "goodput")):
        panel.line(rates, [getattr(step, field) for step in steps], series)
        for step in steps:
            title = f"{rate(step.rate)}/s: {rate(getattr(step, field))}/s {name}"
            panel.dots([step.rate], [getattr(step, field)], series, [title], _kind(step))
    return drawn


def ratio_plot(comparison: Comparison) -> Element:
    """Draw a row for each measure and arm: its ratio to the baseline, with the interval; 1 is a line."""
    base = comparison.arms[comparison.baseline].name
    others = [index for index in range(len(comparison.arms)) if index != comparison.baseline]
    measures = [one for one in comparison.measures if one.ratios]
    ratios = [one.ratios[arm] for one in measures for arm in others]
    ends = [end for one in ratios for end in (one.value, one.low, one.high) if end is not None]
    longest = max(len(arm.name) for arm in comparison.arms)
    left = min(40 + LETTER * longest, LONG_WIDTH / 3)
    # Each measure's name has a row of its own, above its arms.
    rows = len(measures) * (len(others) + 1) + 0.5
    frame = Box(left, 48.0, LONG_WIDTH - left - 190, ROW * rows)
    drawn = picture(LONG_WIDTH, frame.bottom + 40, "Ratios to the baseline")
    panel = Panel(drawn, frame, log_around(np.array([1.0, *ends])), linear(0.0, rows))
    panel.axes("", f"ratio to {base}")
    panel.vertical(1.0, "one", base)
    y = frame.top
    for one in measures:
        y += ROW
        drawn.append(written_at(10, y, one.name, "strong"))
        for arm in others:
            y += ROW
            _interval(drawn, panel, comparison, one, arm, y - 4)
    legend(drawn, left, 18, [(_series(arm), comparison.arms[arm].name) for arm in others], LONG_WIDTH)
    return drawn


def rounds_plot(comparison: Comparison, one: ComparedMeasure) -> Element:
    """Draw a measure round by round, a line for each arm: what drifts, and what is one round's chance."""
    rounds = list(range(1, comparison.rounds + 1))
    x, y = linear(0.5, comparison.rounds + 0.5, 1.0), log_around(np.array(one.values))
    names = [(_series(index), arm.name) for index, arm in enumerate(comparison.arms)]
    drawn, panel = half_chart(f"{one.name}, round by round", x, y, one.unit, "round", names)
    for arm, values in enumerate(one.values):
        titles = [f"{comparison.arms[arm].name}: {significant(value)} {one.unit}" for value in values]
        panel.line(rounds, values, _series(arm))
        panel.dots(rounds, values, _series(arm), titles)
    return drawn


def _series(arm: int) -> str:
    return f"s{arm % 6 + 1}"


def _interval(drawn: Element, panel: Panel, comparison: Comparison, one: ComparedMeasure, arm: int, y: float) -> None:
    ratio = one.ratios[arm]
    text = ratio_text(one, arm)
    series = _series(arm)
    if ratio.low is not None and ratio.high is not None:
        low, high = panel.across([ratio.low, ratio.high]).tolist()
        drawn.append(element("line", x1=low, x2=high, y1=y, y2=y, class_=f"interval {series}"))
    title = element("title", f"{one.name}, {comparison.arms[arm].name}: {text}")
    drawn.append(element("circle", title, cx=float(panel.across(ratio.value)), cy=y, r="4.5", class_=f"dot {series}"))
    drawn.append(written_at(panel.box.left - 12, y + 4, comparison.arms[arm].name, "", "end"))
    drawn.append(written_at(panel.box.right + 12, y + 4, text, judged(one, arm)))


def ratio_text(one: ComparedMeasure, arm: int) -> str:
    """Write a ratio, such as `0.61 × [0.58, 0.64]`."""
    value, low, high = one.ratios[arm].value, one.ratios[arm].low, one.ratios[arm].high
    interval = "" if low is None or high is None else f" [{numbers.ratio(low)}, {numbers.ratio(high)}]"
    return f"{numbers.ratio(value)} ×{interval}"


def judged(one: ComparedMeasure, arm: int) -> str:
    """Say `better` or `worse` where the interval says that the arms differ, else nothing."""
    ratio = one.ratios[arm]
    if not ratio.certain:
        return ""
    return "better" if (ratio.value < 1) == (one.better == "lower") else "worse"
