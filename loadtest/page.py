"""Results as one HTML page with everything in it, without a script and with nothing to load.

Charts are drawn by matplotlib, as SVG for a light ground; the page's style sheet inverts them on a dark one.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from loadtest.load.result import LoadResult, Percentiles, SweepResult, outcome_of, tables_of, value_text

PERCENTILES = {1: "min", 2: "p50", 10: "p90", 100: "p99", 1000: "p99.9"}
"""Where each is drawn: 1 / (1 - q)."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.prop_cycle": cycler(linestyle=["-", "--", ":"]) * mpl.rcParamsDefault["axes.prop_cycle"],
    "legend.frameon": False,
}
"""Settings of matplotlib while charts are drawn."""


def new_figure(*heights: float) -> tuple[Figure, list[Axes]]:
    """Make a figure of axes from top to bottom, of these heights in inches."""
    figure = Figure((12.5, sum(heights)))
    figure.subplots(len(heights), height_ratios=heights)
    return figure, figure.axes


def to_svg(figure: Figure) -> Markup:
    """Return a figure, with plain numbers on logarithmic axes and a legend above each."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":
                low, high = axis.get_view_interval()
                axis.set_major_locator(MaxNLocator(8) if high < 6 * low else LogLocator(subs=(1, 2, 5)))
                axis.set_minor_locator(NullLocator())
                if axis.isDefault_majfmt:
                    axis.set_major_formatter("{x:,.10g}")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
    svg = io.StringIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    return Markup(svg.getvalue().partition("<!DOCTYPE")[2].partition(">")[2])


def draw_percentiles(axes: Axes, lines: Mapping[str, Percentiles], slo_ms: float) -> None:
    """Draw percentiles by name; a line ends before those that are None."""
    axes.set(xscale="log", xlabel="percentile", yscale="log", ylabel="ms")
    for name, times in lines.items():
        values = [times.min_ms, times.p50_ms, times.p90_ms, times.p99_ms, times.p999_ms]
        axes.plot(tuple(PERCENTILES), np.array(values, np.float64), "o-", label=name)
    axes.set_xticks(tuple(PERCENTILES), tuple(PERCENTILES.values()))
    draw_deadline(axes, slo_ms)


def draw_deadline(axes: Axes, slo_ms: float) -> None:
    """Draw a line across axes of times in ms."""
    axes.axhline(slo_ms, color="C3", linestyle="--", label=f"deadline {slo_ms:g} ms")


def run_chart(run: LoadResult) -> Markup:
    """Draw the time line, and above it latency by percentile if there are answers."""
    figure, (*of_answers, latency, requests, in_flight) = new_figure(*((3,) if run.answered else ()), 2.5, 2, 1.5)
    for axes in of_answers:
        lines = {
            "service time of answers, from when they were sent": run.service,
            "latency of all that were due": run.latency_of_due,
        }
        draw_percentiles(axes, lines, run.slo_ms)
    second = {
        field: np.array([getattr(second, field) for second in run.time_line], np.float64)
        for field in ("at_s", "p99_ms", "p50_ms", "ok", "errors", "in_flight")
    }
    latency.set(ylabel="latency, ms", yscale="log")
    latency.plot(second["at_s"], second["p99_ms"], ".-", label="p99")
    latency.plot(second["at_s"], second["p50_ms"], ".-", label="p50")
    draw_deadline(latency, run.slo_ms)
    # Failures are drawn on top of answers: both together are what was due.
    requests.set(ylabel="requests in a second")
    stacked, labels = (second["ok"], second["errors"]), ("answered right", "failed")
    requests.stackplot(second["at_s"], *stacked, labels=labels, colors=("C2", "C3"))
    in_flight.set(xlabel="seconds since the run began; warm-up is shaded", ylabel="in flight")
    in_flight.plot(second["at_s"], second["in_flight"])
    for axes in (latency, requests, in_flight):
        axes.axvspan(0, run.warmup_s, alpha=0.15)
        axes.set_xlim(0, run.warmup_s + run.duration_s)
    return to_svg(figure)


def sweep_chart(sweep: SweepResult) -> Markup:
    """Draw latency of all that were due, and answers a second, against the rate at which they were due."""
    figure, (latency, throughput) = new_figure(4, 4)
    steps = sorted(sweep.steps, key=attrgetter("rate"))
    rates = np.array([step.rate for step in steps])

    def draw_line(axes: Axes, name: str, field: str) -> None:
        """Draw a field of steps; a cross on top is None."""
        values = np.array([attrgetter(field)(step) for step in steps], np.float64)
        [line] = axes.plot(rates, values, "o-", label=name)
        for rate in rates[np.isnan(values)]:
            axes.annotate("×", (rate, 0.9), xycoords=("data", "axes fraction"), color=line.get_color())

    latency.set(xlabel="requests a second", ylabel="ms", yscale="log")
    for name, field in (("p99.9", "p999_ms"), ("p99", "p99_ms"), ("p50", "p50_ms")):
        draw_line(latency, name, f"latency_of_due.{field}")
    draw_deadline(latency, sweep.slo_ms)
    draw_line(throughput, "within the deadline", "goodput")
    draw_line(throughput, "answered right", "throughput")
    throughput.plot(rates, rates, color="gray", linestyle=":", label="all that were due")
    throughput.set(xlabel="requests a second", ylabel="answers a second", xlim=(0, None), ylim=(0, None))
    return to_svg(figure)


def html(result: LoadResult | SweepResult) -> str:
    """Write the page as text."""
    loader = PackageLoader("loadtest", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["text"] = value_text
    functions = run_chart, sweep_chart, tables_of, outcome_of
    environment.globals |= {function.__name__: function for function in functions}
    with mpl.rc_context(STYLE):
        return environment.get_template("page.html").render(result=result).lstrip()
