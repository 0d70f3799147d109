"""The plots of a comparison: ratios with their confidence intervals, and every round's values."""

from __future__ import annotations

import numpy as np

from loadtest.report import numbers
from loadtest.report.comparison import Comparison, Measured
from loadtest.report.markup import Element, element
from loadtest.report.panel import FRAME, HEIGHT, LETTER, Box, Panel, legend, picture, written_at
from loadtest.report.panel import WIDTH as PLOT_WIDTH
from loadtest.report.scales import Linear, Log, Rows

ROW = 20.0
WIDTH = 1220.0


def ratio_plot(comparison: Comparison) -> Element:
    """A row for each measure and arm: its ratio to the baseline, with the interval; 1 is a line."""
    base = comparison.arms[comparison.baseline].name
    others = [index for index in range(len(comparison.arms)) if index != comparison.baseline]
    ratios = [one.ratios[arm] for one in comparison.measures for arm in others]
    ends = [end for one in ratios for end in (one.value, one.low, one.high) if end is not None]
    longest = max(len(arm.name) for arm in comparison.arms)
    left = min(40 + LETTER * longest, WIDTH / 3)
    # Each measure's name has a row of its own, above its arms.
    rows = len(comparison.measures) * (len(others) + 1) + 0.5
    frame = Box(left, 48.0, WIDTH - left - 190, ROW * rows)
    drawn = picture(WIDTH, frame.bottom + 40, "Ratios to the baseline")
    panel = Panel(drawn, frame, Log.around(np.array([1.0, *ends])), Rows(rows))
    panel.axes("", f"ratio to {base}")
    panel.vertical(1.0, "one", base)
    y = frame.top
    for one in comparison.measures:
        y += ROW
        drawn.append(written_at(10, y, one.name, "strong"))
        for arm in others:
            y += ROW
            _interval(drawn, panel, comparison, one, arm, y - 4)
    legend(drawn, left, 18, [(_series(arm), comparison.arms[arm].name) for arm in others], WIDTH)
    return drawn


def rounds_plot(comparison: Comparison, one: Measured) -> Element:
    """A measure round by round, a line for each arm: what drifts, and what is one round's chance."""
    drawn = picture(PLOT_WIDTH, HEIGHT, f"{one.name}, round by round")
    rounds = list(range(1, comparison.rounds + 1))
    panel = Panel(drawn, FRAME, Linear(0.5, comparison.rounds + 0.5, 1.0), Log.around(np.array(one.values)))
    panel.axes(one.unit, "round")
    for arm, values in enumerate(one.values):
        name = comparison.arms[arm].name
        panel.line(rounds, values, _series(arm))
        panel.dots(
            rounds, values, _series(arm), [f"{name}: {numbers.significant(value)} {one.unit}" for value in values]
        )
    legend(drawn, FRAME.left, 16, [(_series(index), arm.name) for index, arm in enumerate(comparison.arms)])
    return drawn


def _series(arm: int) -> str:
    return f"s{arm % 6 + 1}"


def _interval(drawn: Element, panel: Panel, comparison: Comparison, one: Measured, arm: int, y: float) -> None:
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


def ratio_text(one: Measured, arm: int) -> str:
    """Such as `0.61 × [0.58, 0.64]`."""
    ratio = one.ratios[arm]
    interval = "" if ratio.low is None or ratio.high is None else (
        f" [{numbers.ratio(ratio.low)}, {numbers.ratio(ratio.high)}]"
    )  # fmt: skip
    return f"{numbers.ratio(ratio.value)} ×{interval}"


def judged(one: Measured, arm: int) -> str:
    """`better` or `worse` where the interval says that the arms differ, else nothing."""
    ratio = one.ratios[arm]
    if not ratio.certain:
        return ""
    return "better" if (ratio.value < 1) == (one.better == "lower") else "worse"
