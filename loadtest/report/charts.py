"""Draw the charts of a page with matplotlib, as SVG whose colours are the variables of the page's style sheet."""

from __future__ import annotations

import io
import math
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.resources import files
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from hdrh.codec import HdrCookieException, HdrLengthException
from hdrh.histogram import HdrHistogram
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from loadtest.errors import HistogramError
from loadtest.load.result import EncodedHistogram, LoadResult, SweepResult
from loadtest.rounds import Arm, Comparison
from loadtest.tables import plain_text, rate_text, significant

Floats = npt.NDArray[np.float64]
Args = ParamSpec("Args")

MAX_POINTS = 1200
"""Of a time line; longer runs are drawn in windows of several seconds."""
PERCENTILES = {"p50": ("p50_ms", 0.5), "p90": ("p90_ms", 0.9), "p99": ("p99_ms", 0.99), "p99.9": ("p999_ms", 0.999)}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
STYLE_SHEET = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
COLORS = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", STYLE_SHEET.partition("@media")[0]))
"""By variable, of the light scheme: charts are drawn in these."""


def chart(
    width: float = 6.0, height: float = 3.5, rows: int = 1
) -> Callable[[Callable[Concatenate[Any, Args], None]], Callable[Args, Markup]]:
    """Make a function that draws on axes, or on several rows of them, return SVG for an HTML page."""

    def decorate(draw: Callable[Concatenate[Any, Args], None]) -> Callable[Args, Markup]:
        @wraps(draw)
        def drawn(*args: Args.args, **kwargs: Args.kwargs) -> Markup:
            with mpl.rc_context(fname=str(files(__package__).joinpath("report.mplstyle"))), io.StringIO() as out:
                figure = Figure((width, height))
                draw(figure.subplots(rows, sharex=True, height_ratios=range(rows, 0, -1)), *args, **kwargs)
                for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
                    if axis.get_scale() == "log":
                        low, high = axis.get_view_interval()
                        axis.set_major_locator(MaxNLocator(8) if high < 6 * low else LogLocator(subs=(1, 2, 5)))
                        axis.set_major_formatter(FuncFormatter(lambda value, _: plain_text(value)))
                        axis.set_minor_locator(NullLocator())
                figure.legend(loc="outside upper left", ncols=4)
                figure.savefig(out, format="svg", metadata=NO_METADATA)
                svg = out.getvalue()
            # A page has no XML prolog, and no id twice; those of clips and markers are random.
            svg = re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])
            for name, color in COLORS.items():
                svg = svg.replace(color, f"var(--{name})")
            return Markup(svg)

        return drawn

    return decorate


def decode_histogram(encoded: EncodedHistogram) -> tuple[Floats, Floats]:
    """Return times in ms, ascending, and how often each was recorded, float64 [n] each.

    Raises:
        HistogramError: it is no HDR histogram, or has another count than is said beside it.
    """
    try:
        histogram = HdrHistogram.decode(encoded.encoded)
    except (TypeError, ValueError, OverflowError, HdrCookieException, HdrLengthException, zlib.error, struct.error,
            IndexError) as error:  # fmt: skip
        raise HistogramError(f"encoded: not an HDR histogram in V2 form: {error!r}") from error
    counts = np.array(histogram.counts, np.float64)
    if (total := int(counts.sum())) != encoded.count:
        raise HistogramError(f"encoded: holds {total} values, `count` says {encoded.count}")
    filled = np.flatnonzero(counts)
    times_us = [histogram.get_highest_equivalent_value(histogram.get_value_from_index(int(index))) for index in filled]
    return np.array(times_us, np.float64) / 1000, counts[filled]


def percentile_curve(histograms: Sequence[EncodedHistogram], due: int) -> tuple[Floats, Floats]:
    """Return nines, -log10(1 - q) of percentiles q (0 to 1) of so many due requests, and the times in ms up to each.

    What was due and not answered is later than any answer: the curve ends where it begins.
    """
    times, counts = (np.concatenate(parts) for parts in zip(*map(decode_histogram, histograms), strict=True))
    order = np.argsort(times)
    # The largest of n values is drawn at 1 - 1 / (2 n): 1 would be at infinity.
    later = np.maximum(1 - np.cumsum(counts[order]) / due, 0.5 / due)
    return np.array([0, *-np.log10(later)]), np.array([*times[order[:1]], *times[order]])


def _percentile_line(axes: Axes, name: str, histograms: Sequence[EncodedHistogram], due: int) -> None:
    axes.step(*percentile_curve(histograms, due), where="pre", label=name)
    nines = [math.log10(2), *range(1, int(axes.dataLim.x1 + 1e-9) + 1)]
    axes.set_xticks(nines, [f"{100 - 100 / 10**nine:.10g}%" for nine in nines])


def _deadline(axes: Axes, slo_ms: float) -> None:
    axes.axhline(slo_ms, color=COLORS["bad"], linestyle="--", linewidth=1.2)
    text, place = f"deadline {plain_text(slo_ms)} ms", axes.get_yaxis_transform()
    axes.text(1, slo_ms, text, color=COLORS["bad"], transform=place, ha="right", va="bottom")


def _vertical(axes: Axes, at: float, name: str, color: str, style: str = "-") -> None:
    axes.axvline(at, color=color, linestyle=style, linewidth=1.2)
    axes.text(at, 1, name, color=color, transform=axes.get_xaxis_transform(), rotation=40)


@chart()
def percentile_chart(axes: Axes, run: LoadResult) -> None:
    """Draw latency and service time by percentile of all that were due; the lines end where failures begin."""
    axes.set(xlabel="percentile of requests", ylabel="ms", yscale="log")
    _percentile_line(axes, "latency, from when it was due", [run.latency_histogram], run.due)
    _percentile_line(axes, "service time, from when it was sent", [run.service_histogram], run.due)
    for name, (field, quantile) in PERCENTILES.items():
        if (value := getattr(run.latency_of_due, field)) is not None:
            nines = -math.log10(1 - quantile)
            axes.plot(nines, value, "o", color="C0")
            axes.text(nines, value * 1.1, f"{name} {significant(value)} ms ", ha="right")
    if failed := run.due - run.answered:
        _vertical(axes, -math.log10(failed / run.due), f"{failed:,} failed", COLORS["bad"])
    _deadline(axes, run.slo_ms)


@chart()
def histogram_chart(axes: Axes, run: LoadResult) -> None:
    """Draw how many requests were answered in what time, in bars of equal ratio, with percentiles."""
    axes.set(xlabel="latency, ms", ylabel="answers", xscale="log")
    times, counts = decode_histogram(run.latency_histogram)
    # Fewer bars for fewer values, so that what shows is the shape and not the noise.
    bars = int(np.clip(2.5 * np.cbrt(counts.sum()), 12, 72))
    axes.hist(
        times, list(np.geomspace(times[0] * 0.99, times[-1] * 1.01, bars + 1)), weights=counts, label="answered right"
    )
    for name, (field, _) in PERCENTILES.items():
        if (value := getattr(run.latency, field)) is not None:
            _vertical(axes, value, name, COLORS["ink"], ":")
    if run.slo_ms <= times[-1]:
        _vertical(axes, run.slo_ms, "deadline", COLORS["bad"], "--")


def window_s(run: LoadResult) -> int:
    """Return how many seconds of a time line are drawn as one."""
    return max(1, math.ceil(len(run.time_line) / MAX_POINTS))


@chart(12.4, 4.8, rows=3)
def time_line_chart(panels: Sequence[Axes], run: LoadResult) -> None:
    """Draw latency, requests and requests in flight, second by second, with marks through all three."""
    window = window_s(run)

    def windows(field: str) -> Floats:
        """Return a field of every second as float64 [windows, window_s], NaN where there is none."""
        values = np.array([getattr(second, field) for second in run.time_line], np.float64)
        return np.pad(values, (0, -len(values) % window), constant_values=np.nan).reshape(-1, window)

    begins = windows("at_s")[:, 0]
    edges = np.append(begins, max(min(run.time_line[-1].at_s + 1, run.warmup_s + run.duration_s), begins[-1] + 1e-3))
    ok, errors = (np.nansum(windows(field), axis=1) / np.diff(edges) for field in ("ok", "errors"))
    latency, requests, in_flight = panels
    latency.set(ylabel="latency, ms", yscale="log")
    requests.set(ylabel="requests/s")
    in_flight.set(ylabel="in flight", xlabel="seconds since the run began")
    for name in ("p99", "p50"):
        highest = np.fmax.reduce(windows(f"{name}_ms"), axis=1)
        latency.plot((edges[:-1] + edges[1:]) / 2, highest, marker="o" if len(begins) < 100 else "", label=name)
    _deadline(latency, run.slo_ms)
    # Failures are drawn on top of answers: both together are what was due.
    requests.stairs(ok, edges, fill=True, color="C2", alpha=0.7, label="answered right")
    requests.stairs(ok + errors, edges, baseline=ok, fill=True, color="C3", label="failed")
    in_flight.stairs(np.fmax.reduce(windows("in_flight"), axis=1), edges, color="C4", linewidth=1.5)
    for axes in panels:
        axes.axvspan(0, run.warmup_s, color=COLORS["muted"], alpha=0.15, linewidth=0)
        for number, mark in enumerate(run.marks, 1):
            _vertical(axes, mark.at_s, f"{number}" if axes is latency else "", "C5")


def _rate_line(axes: Axes, sweep: SweepResult, name: str, attribute: str) -> None:
    """Draw an attribute of steps against the rate: hollow where a step is not valid, a cross on top for None."""
    steps = sorted(sweep.steps, key=attrgetter("rate"))
    rates, valid = np.array([step.rate for step in steps]), np.array([step.valid for step in steps])
    values = np.array([attrgetter(attribute)(step) for step in steps], np.float64)
    [line] = axes.plot(rates, values, label=name)
    axes.plot(rates[valid], values[valid], "o", color=line.get_color())
    axes.plot(rates[~valid], values[~valid], "o", color=line.get_color(), markerfacecolor=COLORS["tile"])
    failed, top = rates[np.isnan(values)], axes.get_xaxis_transform()
    axes.plot(failed, np.ones(len(failed)), "x", color=line.get_color(), transform=top, clip_on=False)


@chart()
def latency_chart(axes: Axes, sweep: SweepResult) -> None:
    """Draw p50, p99 and p99.9 of all requests that were due, against the rate at which they were."""
    axes.set(xlabel="requests a second", ylabel="ms", yscale="log")
    for name in ("p99.9", "p99", "p50"):
        _rate_line(axes, sweep, name, f"latency_of_due.{PERCENTILES[name][0]}")
    if sweep.highest_rate is not None:
        _vertical(axes, sweep.highest_rate, f"{rate_text(sweep.highest_rate)}/s", COLORS["good"])
    _deadline(axes, sweep.slo_ms)


@chart()
def throughput_chart(axes: Axes, sweep: SweepResult) -> None:
    """Draw answers a second, and answers in time, against the rate."""
    _rate_line(axes, sweep, "within the deadline", "goodput")
    _rate_line(axes, sweep, "answered right", "throughput")
    axes.axline((0, 0), slope=1, color=COLORS["muted"], linestyle=":", linewidth=1, label="all that were due")
    axes.set(xlabel="requests a second", ylabel="answers a second", xlim=(0, None), ylim=(0, None))


@chart()
def curves_chart(axes: Axes, arms: Sequence[Arm]) -> None:
    """Draw latency of all that were due by percentile; all rounds of an arm are taken together."""
    axes.set(xlabel="percentile of requests", ylabel="ms", yscale="log")
    for arm in arms:
        if any(run.answered for run in arm.runs):
            histograms = [run.latency_histogram for run in arm.runs]
            _percentile_line(axes, arm.name, histograms, sum(run.due for run in arm.runs))
            deadline_ms = arm.runs[0].slo_ms
    _deadline(axes, deadline_ms)


def ratio_chart(comparison: Comparison) -> Markup:
    """Draw each measure's ratios to the baseline with their intervals, as high as there are many."""
    measures = [measure for measure in comparison.measures if measure.ratios]
    step = len(comparison.others) + 1

    @chart(12.4, 1 + 0.22 * step * len(measures))
    def draw(axes: Axes) -> None:
        axes.set(xlabel=f"ratio to {comparison.arms[comparison.baseline].name}", xscale="log")
        for place, arm in enumerate(comparison.others):
            for number, measure in enumerate(measures):
                ratio, row = measure.ratios[arm], number * step + place
                ends = [[ratio.value - (ratio.low or ratio.value)], [(ratio.high or ratio.value) - ratio.value]]
                name = comparison.arms[arm].name if number == 0 else None
                axes.errorbar(ratio.value, row, xerr=ends, fmt="o", color=f"C{arm}", label=name)
                color = COLORS[{"better": "good", "worse": "bad", "": "ink"}[measure.judgement(arm)]]
                axes.text(1.01, row, str(ratio), color=color, transform=axes.get_yaxis_transform(), va="center")
        axes.axvline(1, color=COLORS["muted"])
        centers = np.arange(len(measures)) * step + step / 2 - 1
        axes.set_yticks(centers, [measure.name for measure in measures])
        axes.grid(visible=False, axis="y")
        axes.invert_yaxis()

    return draw()


@chart()
def rounds_chart(axes: Axes, comparison: Comparison) -> None:
    """Draw p99, or else the first measure, round by round: what drifts, and what is one round's chance."""
    measures = comparison.measures
    measure = next((measure for measure in measures if measure.name.startswith("p99")), measures[0])
    axes.set(xlabel="round", ylabel=f"{measure.name}, {measure.unit}", yscale="log")
    for arm, values in zip(comparison.arms, measure.values, strict=True):
        axes.plot(range(1, comparison.rounds + 1), values, marker="o", label=arm.name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
