"""Percentile curves of several runs in one plot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadtest.load.result import LoadResult
from loadtest.report.histograms import Histogram, merged
from loadtest.report.markup import Element
from loadtest.report.panel import FRAME, HEIGHT, WIDTH, Panel, deadline, legend, picture
from loadtest.report.scales import Log, Nines

MAX_CURVES = 6
"""As many as there are strokes to tell them by."""


def curves_plot(named: Sequence[tuple[str, Sequence[LoadResult]]], slo_ms: float, label: str) -> Element:
    """Percentiles of latency of several runs in one plot: all that were due, a line each.

    Args:
        named: at most `MAX_CURVES` lines; the runs of each are taken together.
        slo_ms: the deadline.
        label: what is compared.
    """
    lines = [(name, merged([Histogram.decode(run.latency_histogram) for run in runs]), runs) for name, runs in named]
    scale = Nines.of(max(sum(run.due for run in runs) for _, runs in named))
    ends = np.concatenate([[slo_ms], *[one.low_ms for _, one, _ in lines], *[one.high_ms for _, one, _ in lines]])
    drawn = picture(WIDTH, HEIGHT, label)
    panel = Panel(drawn, FRAME, scale, Log.around(ends))
    panel.axes("ms", "percentile of requests")
    deadline(panel, slo_ms)
    for index, (_, histogram, runs) in enumerate(lines, 1):
        panel.line(*histogram.curve(scale, max(sum(run.due for run in runs), histogram.count)), f"s{index}")
    legend(drawn, 54, 16, [(f"s{index}", name) for index, (name, _, _) in enumerate(lines, 1)])
    return drawn
