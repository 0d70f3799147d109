"""Draw one chart as SVG: scales with their ticks, a frame with two axes, and what is drawn in it.

Colours and fonts are the style sheet's. Series are drawn with the classes `s1` to `s6`, which also differ by dash, so
that no chart is told by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadtest.report.markup import Content, Element, append, coordinate, element
from loadtest.report.numbers import compact, percentile_name

Floats = npt.NDArray[np.float64]
_CLOSE = 4.0
_LEAST = 1e-300
"""Stands for 0 where there is no logarithm."""


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from `low` to `high`, with a name for each value that has a tick; `bend` makes equal steps of lengths."""

    low: float
    high: float
    ticks: dict[float, str]
    bend: Callable[[Floats], Floats] = np.asarray

    def place(self, values: npt.ArrayLike) -> Floats:
        """Find where values stand: 0 at the low end, 1 at the high one; NaN stays, others are held within."""
        low, high = self.bend(np.array([self.low, self.high]))
        places: Floats = (self.bend(np.asarray(values, np.float64)) - low) / (high - low)
        return np.clip(places, 0.0, 1.0)


def _finite(values: npt.ArrayLike) -> Floats:
    array = np.asarray(values, np.float64).ravel()
    return array[np.isfinite(array)]


def nice_step(least: float) -> float:
    """Find the first of 1, 2, 2.5, 5 and 10 times a power of ten that is at least so much."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))


def _named(values: Iterable[float]) -> dict[float, str]:
    return {value: compact(value) for value in values}


def _multiples(step: float, low: float, high: float) -> dict[float, str]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return _named(index * step for index in range(first, last + 1))


def linear(low: float, high: float, step: float | None = None) -> Scale:
    """Make an axis with ticks at the multiples of a step; without one it has none."""
    return Scale(low, high, {} if step is None else _multiples(step, low, high))


def linear_around(values: npt.ArrayLike, steps: int = 5, *, whole: bool = False) -> Scale:
    """Reach from 0 to the first step at or above all values, in about as many steps as asked for.

    Args:
        values: none may be below 0.
        steps: more or less, of 1, 2, 2.5 or 5 times a power of ten.
        whole: whether steps are whole numbers, as counts are.
    """
    highest = max(_finite(values).max(initial=0.0), 0.0) or 1.0
    step = nice_step(highest / steps)
    if whole and not step.is_integer():
        step = float(math.ceil(step)) if step < 1 else 5.0
    return linear(0.0, step * math.ceil(highest / step - 1e-9), step)


def _log(values: Floats) -> Floats:
    return np.log(np.maximum(values, _LEAST))


def log_around(values: npt.ArrayLike) -> Scale:
    """Make a logarithmic axis around all values above 0; what is 0 or below stands at its low end.

    It reaches from one of 1, 2, 5, 10, ... to another, with ticks at powers of ten, and at 2 and 5 times each where
    there is room. Where the highest value is at most 4 times the lowest, it has equal steps instead.
    """
    array = _finite(values)
    array = array[array > 0]
    if not len(array):
        return _decades(1.0, 10.0)
    low, high = float(array.min()), float(array.max())
    if high > _CLOSE * low:
        below = [one for one in _around_power(low) if one <= low * (1 + 1e-9)]
        return _decades(max(below), min(one for one in _around_power(high) if one >= high * (1 - 1e-9)))
    if high <= low * 1.001:
        low, high = low * 0.99, high * 1.01
    # The step is at most a quarter of the span, so at most three quarters of `low`: 0 is not reached.
    step = nice_step((high - low) / 8)
    low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
    return Scale(low, high, _multiples(step, low, high), _log)


def _decades(low: float, high: float) -> Scale:
    powers = range(math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9) + 1)
    factors: Sequence[int] = (1, 2, 5) if len(powers) <= 5 else (1,)
    values = (_of_ten(factor, power) for power in powers for factor in factors)
    return Scale(low, high, _named(one for one in values if low * (1 - 1e-9) <= one <= high * (1 + 1e-9)), _log)


def _around_power(value: float) -> list[float]:
    return [_of_ten(factor, math.floor(math.log10(value))) for factor in (0.5, 1, 2, 5, 10, 20)]


def _of_ten(factor: float, power: int) -> float:
    # 10.0 ** -1 times 2 is exact to the digit that repr shows; 10 ** -3 times 5 is not, a division is.
    return factor * 10.0**power if power >= 0 else factor / 10.0**-power


def percentile_scale(count: int) -> Scale:
    """Reach as far as `count` values have percentiles: the largest one of n stands at 1 - 1 / (2 n).

    0, 90%, 99% and 99.9% stand at equal distances: a percentile q (0 to 1) at log10(1 / (1 - q)), as in the plots of
    HdrHistogram.
    """
    nines = max(1.0, math.log10(2.0 * max(count, 1)))
    ticks = [0.0, 0.5, *(1.0 - 10.0**-number for number in range(1, math.floor(nines + 1e-9) + 1))]
    named = {value: percentile_name(value) for value in ticks}
    return Scale(0.0, 1.0 - math.pow(10.0, -nines), named, lambda values: -np.log10(np.maximum(1.0 - values, _LEAST)))


LETTER = 6.3
"""Mean width of a letter of the plots' text, in user units."""


@dataclass(frozen=True, slots=True)
class Box:
    """A panel's frame, in user units from the picture's top left corner."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """Of the frame."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """Of the frame."""
        return self.top + self.height


WIDTH, HEIGHT = 600.0, 350.0
FRAME = Box(54.0, 52.0, WIDTH - 74, HEIGHT - 96)
"""A plot of half the page's width, and its one panel with room for a legend above and names around it."""


def picture(width: float, height: float, label: str) -> Element:
    """Begin an empty picture; `label` is what it shows, for those who can't see it."""
    return element("svg", viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label)


def written_at(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> Element:
    """Write a line of text."""
    return element("text", text, x=x, y=y, class_=kind or None, text_anchor=None if anchor == "start" else anchor)


class Panel:
    """A frame with axes. Values are given in the axes' units, and held within the frame."""

    def __init__(self, parent: Element, box: Box, x: Scale, y: Scale) -> None:
        """Add a group for it to the picture."""
        self.box, self.x, self.y = box, x, y
        self.group = element("g", class_="panel")
        parent.append(self.group)

    def across(self, values: npt.ArrayLike) -> Floats:
        """Place values of the x axis."""
        return self.box.left + self.box.width * self.x.place(values)

    def up(self, values: npt.ArrayLike) -> Floats:
        """Place values of the y axis."""
        return self.box.bottom - self.box.height * self.y.place(values)

    def axes(self, y_label: str, x_label: str = "", x_names: bool = True) -> None:
        """Draw the grid, ticks and names; without `x_names` the panel below has those of x."""
        box = self.box
        grid = element("g", class_="grid")
        names = element("g", class_="ticks")
        for value, name in self.y.ticks.items():
            at = float(self.up(value))
            grid.append(element("line", x1=box.left, x2=box.right, y1=at, y2=at))
            names.append(element("text", name, x=box.left - 6, y=at + 4, text_anchor="end", class_="y"))
        last = -1e9
        for value, name in self.x.ticks.items():
            at = float(self.across(value))
            grid.append(element("line", x1=at, x2=at, y1=box.top, y2=box.bottom))
            if x_names and at - last >= LETTER * (len(name) + 1):
                names.append(element("text", name, x=at, y=box.bottom + 16, text_anchor="middle", class_="x"))
                last = at
        self.add(grid, names)
        self.add(written_at(box.left - 44, box.top - 12, y_label, "axis"))
        if x_label:
            self.add(written_at(box.right, box.bottom + 32, x_label, "axis", "end"))

    def add(self, *contents: Content) -> None:
        """Add elements over those that are there."""
        for content in contents:
            append(self.group, content)

    def line(self, x: npt.ArrayLike, y: npt.ArrayLike, series: str) -> None:
        """Draw a line through points; where y is NaN it has a gap."""
        across, up = self.across(x), self.up(y)
        there = np.flatnonzero(np.isfinite(across) & np.isfinite(up))
        parts: list[str] = []
        for run in np.split(there, np.flatnonzero(np.diff(there) > 1) + 1):
            points = [f"{coordinate(across[index])} {coordinate(up[index])}" for index in run.tolist()]
            # A lone point is a line of no length, which round ends make a dot.
            parts += [f"M{'L'.join(points)}{'h0' if len(points) == 1 else ''}"] if points else []
        if parts:
            self.add(element("path", d="".join(parts), class_=f"line {series}"))

    def dots(self, x: Sequence[float], y: Sequence[float], series: str, titles: Sequence[str], kind: str = "") -> None:
        """Draw points, each with a text that shows while the pointer is over it."""
        places = zip(self.across(x).tolist(), self.up(y).tolist(), titles, strict=True)
        for horizontal, vertical, title in places:
            dot = element("circle", element("title", title), cx=horizontal, cy=vertical, r="3.5")
            dot.set("class", f"dot {series} {kind}".strip())
            self.add(dot)

    def bars(
        self,
        edges: npt.ArrayLike,
        heights: npt.ArrayLike,
        series: str,
        titles: Sequence[str],
        *,
        over: npt.ArrayLike = 0.0,
        gap: float = 0.6,
    ) -> None:
        """Draw bars between edges; one that is not 0 is at least one unit high, so that it can be seen.

        Args:
            edges: `[n + 1]`, on the x axis.
            heights: `[n]`, on the y axis.
            series: class.
            titles: `[n]`, shown while the pointer is over a bar.
            over: `[n]`, where bars begin: on top of what stands there already.
            gap: between bars, in user units.
        """
        x = self.across(edges).tolist()
        values = np.asarray(heights, np.float64)
        below = np.broadcast_to(np.asarray(over, np.float64), values.shape)
        bottom, top = self.up(below).tolist(), self.up(below + values).tolist()
        for index in np.flatnonzero(values > 0).tolist():
            height = max(bottom[index] - top[index], 1.0)
            place = {"x": x[index], "y": bottom[index] - height, "width": max(x[index + 1] - x[index] - gap, 0.5)}
            self.add(element("rect", element("title", titles[index]), **place, height=height, class_=f"bar {series}"))

    def vertical(self, at: float, kind: str, title: str = "") -> float:
        """Draw a line from top to bottom; returns where it stands."""
        x = float(self.across(at))
        titles = [element("title", title)] if title else []
        self.add(element("line", *titles, x1=x, x2=x, y1=self.box.top, y2=self.box.bottom, class_=kind))
        return x

    def deadline(self, slo_ms: float, *, left: bool = True) -> None:
        """Draw a line at the deadline of goodput, its name at the end where there is more room."""
        y = float(self.up(slo_ms))
        self.add(element("line", x1=self.box.left, x2=self.box.right, y1=y, y2=y, class_="deadline"))
        x, anchor = (self.box.left + 6, "start") if left else (self.box.right - 4, "end")
        self.add(written_at(x, y - 4, f"deadline {compact(slo_ms)} ms", "label deadline", anchor))

    def shade(self, low: float, high: float, label: str) -> None:
        """Set a part of the x axis apart."""
        left, right = float(self.across(low)), float(self.across(high))
        if right > left:
            self.add(
                element("rect", x=left, y=self.box.top, width=right - left, height=self.box.height, class_="apart")
            )
            if right - left > LETTER * len(label) + 8:
                self.add(written_at(left + 4, self.box.top + 12, label, "label"))


Names = Sequence[tuple[str, str]]
"""Of a legend: `(series, name)`, or `(bar series, name)` for bars."""


def half_chart(label: str, x: Scale, y: Scale, y_name: str, x_name: str, names: Names = ()) -> tuple[Element, Panel]:
    """Begin a chart of half the page's width: the picture, its one panel with axes, and a legend if there are names."""
    drawn = picture(WIDTH, HEIGHT, label)
    panel = Panel(drawn, FRAME, x, y)
    panel.axes(y_name, x_name)
    if names:
        legend(drawn, FRAME.left, 16, names)
    return drawn, panel


def legend(parent: Element, left: float, top: float, names: Names, right: float = WIDTH - 8) -> None:
    """Write the series' names with their strokes, in a row, or in several if they would pass `right`."""
    group = element("g", class_="legend")
    at = left
    for series, name in names:
        length = 25 + LETTER * len(name)
        if at > left and at + length > right:
            at, top = left, top + 14
        if series.startswith("bar "):
            group.append(element("rect", x=at + 4, y=top - 9, width=12, height=10, class_=series))
        else:
            group.append(element("line", x1=at, x2=at + 20, y1=top - 4, y2=top - 4, class_=f"line {series}"))
        group.append(written_at(at + 25, top, name))
        at += length + 18
    parent.append(group)
