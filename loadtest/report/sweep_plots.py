"""The plots of a sweep: latency and answers against the rate."""

from __future__ import annotations

import math

import numpy as np

from loadtest.load.result import LoadResult, SweepResult
from loadtest.report.markup import Element
from loadtest.report.numbers import rate, significant
from loadtest.report.panel import FRAME, HEIGHT, WIDTH, Panel, deadline, legend, picture, written_at
from loadtest.report.scales import Linear, Log

SERIES = (("s1", "p99", "p99_ms"), ("s2", "p50", "p50_ms"), ("s6", "p99.9", "p999_ms"))


def by_rate(sweep: SweepResult) -> list[tuple[int, LoadResult]]:
    """The steps with their numbers, from the lowest rate to the highest."""
    return sorted(enumerate(sweep.steps), key=lambda one: (one[1].rate, one[0]))


def latency_plot(sweep: SweepResult) -> Element:
    """p50, p99 and p99.9 of all requests that were due, against the rate at which they were."""
    steps = [step for _, step in by_rate(sweep)]
    rates = [step.rate for step in steps]
    values = {field: [_or_nan(getattr(step.latency_of_due, field)) for step in steps] for _, _, field in SERIES}
    drawn = picture(WIDTH, HEIGHT, "Latency against rate")
    y = Log.around(np.concatenate([*map(np.array, values.values()), [sweep.slo_ms]]))
    panel = Panel(drawn, FRAME, Linear.around(rates, 6), y)
    panel.axes("ms", "requests a second")
    _highest_rate(panel, sweep)
    deadline(panel, sweep.slo_ms)
    for series, name, field in reversed(SERIES):
        panel.line(rates, values[field], series)
        for step, value in zip(steps, values[field], strict=True):
            _step_point(panel, step, value, series, name)
    legend(drawn, 54, 16, [(series, name) for series, name, _ in SERIES])
    return drawn


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _step_point(panel: Panel, step: LoadResult, value: float, series: str, name: str) -> None:
    at = f"{rate(step.rate)}/s"
    kind = "" if step.valid else "hollow"
    note = "" if step.valid else "; not valid: the generator was the bottleneck"
    if math.isnan(value):
        # Crosses of several percentiles stand beside each other.
        aside = 9.0 * ([one for one, _, _ in SERIES].index(series) - 1)
        # More requests failed than this percentile leaves out: it has no time, and stands at the top as a cross.
        panel.add(
            written_at(float(panel.across(step.rate)) + aside, panel.box.top + 5, "×", f"cross {series}", "middle"),
        )
    else:
        panel.dots([step.rate], [value], series, [f"{at}: {name} {significant(value)} ms{note}"], kind)


def _highest_rate(panel: Panel, sweep: SweepResult) -> None:
    if sweep.highest_rate is None:
        return
    label = f"{rate(sweep.highest_rate)}/s"
    at = panel.vertical(sweep.highest_rate, "highest", f"highest rate that kept the deadline: {label}")
    panel.add(written_at(at, panel.box.top - 6, label, "label highest", "middle"))


def throughput_plot(sweep: SweepResult) -> Element:
    """Answers a second, and answers in time, against the rate."""
    steps = [step for _, step in by_rate(sweep)]
    rates = [step.rate for step in steps]
    drawn = picture(WIDTH, HEIGHT, "Answers against rate")
    answers = [max(step.throughput, step.rate) for step in steps]
    panel = Panel(drawn, FRAME, Linear.around(rates, 6), Linear.around([*rates, *answers]))
    panel.axes("answers a second", "requests a second")
    panel.line([0.0, max(rates)], [0.0, max(rates)], "even")
    _highest_rate(panel, sweep)
    for series, name, field in (("s3", "answered", "throughput"), ("s1", "in time", "goodput")):
        values = [getattr(step, field) for step in steps]
        panel.line(rates, values, series)
        titles = [f"{rate(step.rate)}/s: {rate(value)}/s {name}" for step, value in zip(steps, values, strict=True)]
        for step, value, title in zip(steps, values, titles, strict=True):
            panel.dots([step.rate], [value], series, [title], "" if step.valid else "hollow")
    legend(drawn, 54, 16, [("s3", "answered right"), ("s1", "within the deadline"), ("even", "all that were due")])
    return drawn
