"""One plot: a frame with two axes, and what is drawn in it. Colours and fonts are the style sheet's.

Series are drawn with the classes `s1` to `s6`, which also differ by dash, so that no plot is told by colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadtest.report.markup import Content, Element, append, coordinate, element
from loadtest.report.numbers import compact
from loadtest.report.scales import Scale

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
    """An empty picture; `label` is what it shows, for those who can't see it."""
    return element("svg", viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label)


def written_at(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> Element:
    """A line of text."""
    return element("text", text, x=x, y=y, class_=kind or None, text_anchor=None if anchor == "start" else anchor)


class Panel:
    """A frame with axes. Values are given in the axes' units, and held within the frame."""

    def __init__(self, parent: Element, box: Box, x: Scale, y: Scale) -> None:
        """Adds a group for it to the picture."""
        self.box, self.x, self.y = box, x, y
        self.group = element("g", class_="panel")
        parent.append(self.group)

    def across(self, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Where values of the x axis stand."""
        return self.box.left + self.box.width * self.x.place(values)

    def up(self, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Where values of the y axis stand."""
        return self.box.bottom - self.box.height * self.y.place(values)

    def axes(self, y_label: str, x_label: str = "", x_names: bool = True) -> None:
        """The grid, ticks and names; without `x_names` the panel below has those of x."""
        box = self.box
        grid = element("g", class_="grid")
        names = element("g", class_="ticks")
        for tick in self.y.ticks():
            at = float(self.up(tick.value))
            grid.append(element("line", x1=box.left, x2=box.right, y1=at, y2=at))
            names.append(element("text", tick.label, x=box.left - 6, y=at + 4, text_anchor="end", class_="y"))
        last = -1e9
        for tick in self.x.ticks():
            at = float(self.across(tick.value))
            grid.append(element("line", x1=at, x2=at, y1=box.top, y2=box.bottom))
            if x_names and at - last >= LETTER * (len(tick.label) + 1):
                names.append(element("text", tick.label, x=at, y=box.bottom + 16, text_anchor="middle", class_="x"))
                last = at
        self.add(grid, names)
        self.add(written_at(box.left - 44, box.top - 12, y_label, "axis"))
        if x_label:
            self.add(written_at(box.right, box.bottom + 32, x_label, "axis", "end"))

    def add(self, *contents: Content) -> None:
        """Adds elements over those that are there."""
        for content in contents:
            append(self.group, content)

    def line(self, x: npt.ArrayLike, y: npt.ArrayLike, series: str) -> None:
        """A line through points; where y is NaN it has a gap."""
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
        """Points, each with a text that shows while the pointer is over it."""
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
        """Bars between edges; one that is not 0 is at least one unit high, so that it can be seen.

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
            width = max(x[index + 1] - x[index] - gap, 0.5)
            title = element("title", titles[index])
            self.add(
                element(
                    "rect", title, x=x[index], y=bottom[index] - height, width=width, height=height,
                    class_=f"bar {series}",
                )
            )  # fmt: skip

    def vertical(self, at: float, kind: str, title: str = "") -> float:
        """A line from top to bottom; returns where it stands."""
        x = float(self.across(at))
        self.add(
            element(
                "line", *([element("title", title)] if title else []),
                x1=x, x2=x, y1=self.box.top, y2=self.box.bottom, class_=kind,
            )
        )  # fmt: skip
        return x

    def horizontal(self, at: float, kind: str, label: str, *, left: bool = True) -> None:
        """A line from left to right, with its name above one of its ends."""
        y = float(self.up(at))
        self.add(element("line", x1=self.box.left, x2=self.box.right, y1=y, y2=y, class_=kind))
        x = self.box.left + 6 if left else self.box.right - 4
        self.add(written_at(x, y - 4, label, f"label {kind}", "start" if left else "end"))

    def shade(self, low: float, high: float, label: str) -> None:
        """A part of the x axis set apart."""
        left, right = float(self.across(low)), float(self.across(high))
        if right > left:
            self.add(
                element("rect", x=left, y=self.box.top, width=right - left, height=self.box.height, class_="apart")
            )
            if right - left > LETTER * len(label) + 8:
                self.add(written_at(left + 4, self.box.top + 12, label, "label"))


def deadline(panel: Panel, slo_ms: float, *, left: bool = True) -> None:
    """A line at the deadline of goodput, its name at the end where there is more room."""
    panel.horizontal(slo_ms, "deadline", f"deadline {compact(slo_ms)} ms", left=left)


def legend(
    parent: Element, left: float, top: float, names: Sequence[tuple[str, str]], right: float = WIDTH - 8
) -> None:
    """The series' names with their strokes, in a row, or in several if they would pass `right`.

    Args:
        parent: the picture.
        left: where each row begins.
        top: base line of the first row's text.
        names: `(series, name)`, or `(bar series, name)` for bars.
        right: no row goes further.
    """
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
