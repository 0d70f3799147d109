"""The time line of one run: latency, requests and requests in flight, with what happened marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadtest.load.result import LoadResult, Mark, Second
from loadtest.report.markup import Element
from loadtest.report.numbers import significant
from loadtest.report.panel import LETTER, Box, Panel, deadline, legend, picture, written_at
from loadtest.report.scales import Linear, Log

LONG_WIDTH, LONG_HEIGHT = 1220.0, 478.0
MAX_POINTS = 1200
"""Longer runs are drawn in windows of several seconds."""
MAX_NAME = 24
LEGEND = (("s1", "p99"), ("s2", "p50"), ("bar s3", "answered right"), ("bar s4", "failed"), ("s5", "in flight"))

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TimeLine:
    """The seconds of a run, or windows of several.

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
        """Joins seconds where there are more than can be drawn."""
        seconds = result.time_line
        window = max(1, math.ceil(len(seconds) / MAX_POINTS))
        end = result.warmup_s + result.duration_s
        begins = [one.at_s for one in seconds[::window]]
        last = min(seconds[-1].at_s + 1, end) if seconds else end
        edges = np.array([*begins, max(last, begins[-1] + 1e-3 if begins else last)])
        # The run's last second may be a part of one; counts are of a whole second.
        lengths = np.maximum(np.diff(edges), 1e-3) if begins else np.empty(0)
        groups = [seconds[first : first + window] for first in range(0, len(seconds), window)]
        return cls(
            window_s=window,
            edges_s=edges,
            p50_ms=_highest(groups, "p50_ms"),
            p99_ms=_highest(groups, "p99_ms"),
            due=_sums(groups, "due") / lengths,
            ok=_sums(groups, "ok") / lengths,
            errors=_sums(groups, "errors") / lengths,
            in_flight=_highest(groups, "in_flight"),
        )

    @property
    def middle_s(self) -> Floats:
        """Of each window."""
        return (self.edges_s[:-1] + self.edges_s[1:]) / 2


def _highest(groups: Sequence[Sequence[Second]], field: str) -> Floats:
    values = [[value for one in group if (value := getattr(one, field)) is not None] for group in groups]
    return np.array([max(group, default=math.nan) for group in values])


def _sums(groups: Sequence[Sequence[Second]], field: str) -> Floats:
    return np.array([sum(getattr(one, field) for one in group) for group in groups], np.float64)


def time_line_plot(result: LoadResult) -> Element:
    """Latency, requests and requests in flight, second by second, with marks through all three."""
    line = TimeLine.of(result)
    before = min([0.0, *(mark.at_s for mark in result.marks)])
    x = Linear.between(before, max([float(line.edges_s[-1]), *(mark.at_s for mark in result.marks)]), 12)
    drawn = picture(LONG_WIDTH, LONG_HEIGHT, "Time line")
    left, width = 60.0, LONG_WIDTH - 80
    latencies = np.concatenate([line.p50_ms, line.p99_ms, [result.slo_ms]])
    panels = [
        Panel(drawn, Box(left, 60, width, 170), x, Log.around(latencies)),
        Panel(drawn, Box(left, 262, width, 90), x, Linear.around(np.concatenate([line.due, [result.rate]]), 3)),
        Panel(drawn, Box(left, 384, width, 56), x, Linear.around(line.in_flight, 2, whole=True)),
    ]
    for panel, name in zip(panels, ("latency, ms", "requests/s, by when they were due", "in flight"), strict=True):
        panel.axes(name, "seconds since the run began" if panel is panels[-1] else "", panel is panels[-1])
        panel.shade(0.0, result.warmup_s, "warm-up" if panel is panels[0] else "")
    deadline(panels[0], result.slo_ms, left=False)
    panels[0].line(line.middle_s, line.p99_ms, "s1")
    panels[0].line(line.middle_s, line.p50_ms, "s2")
    _requests(panels[1], line)
    panels[2].line(line.middle_s, line.in_flight, "s5")
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
