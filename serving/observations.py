"""Observations of histograms, kept for a moment and then made together.

Each request and each batch has some; made one by one, between work that needs the processor's caches, each costs three
times what it costs after another one.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np
from prometheus_client import Histogram

from serving.errors import HistogramLayoutError

MAX_KEPT = 1024
# Of the library: where several worker processes on one port keep their counts.
_SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


class Observations:
    """What was seen and is not in its histogram yet. Thread-safe: both ends of a deque are.

    Raises:
        HistogramLayoutError: if the installed library's histograms are not what `observe_all` takes them for.
    """

    def __init__(self) -> None:
        _check_library()
        self._kept: deque[tuple[Histogram, float]] = deque()

    def add(self, histogram: Histogram, value: float) -> None:
        """Keeps an observation; of many, makes all."""
        self._kept.append((histogram, value))
        if len(self._kept) >= MAX_KEPT:
            self.make()

    def make(self) -> None:
        """Makes all that are kept: whoever reads a histogram calls it before."""
        values: defaultdict[Histogram, list[float]] = defaultdict(list)
        try:
            while True:
                histogram, value = self._kept.popleft()
                values[histogram].append(value)
        except IndexError:
            for histogram, own in values.items():
                observe_all(histogram, own)


def observe_all(histogram: Histogram, values: list[float]) -> None:
    """As `histogram.observe` of each value, which the library has no public way for: it looks for each one's bucket.

    Args:
        histogram: one without label names, or a child.
        values: none of them NaN.
    """
    buckets = np.searchsorted(histogram._upper_bounds, values)
    counts = np.bincount(buckets).tolist()
    for bucket, count in enumerate(counts):
        if count:
            histogram._buckets[bucket].inc(count)
    histogram._sum.inc(sum(values))


def _check_library() -> None:
    # In files that processes share, what is made for a look would stay and be told.
    if _SHARED_FOLDER in os.environ:
        return
    try:
        together, one_by_one = _told_after(observe_all), _told_after(_observe_each)
    except (AttributeError, IndexError, TypeError) as error:
        raise HistogramLayoutError(f"a Histogram of prometheus_client has other fields: {error}") from error
    if together != one_by_one:
        raise HistogramLayoutError(
            f"a Histogram of prometheus_client tells {together}; observed one by one, {one_by_one}"
        )


def _told_after(observe: Callable[[Histogram, list[float]], None]) -> dict[str, float]:
    histogram = Histogram("checked", "Made for a look.", buckets=(1.0, 2.0), registry=None)
    observe(histogram, [0.5, 1.0, 1.5, 4.0])
    samples = [sample for metric in histogram.collect() for sample in metric.samples]
    return {f"{one.name}{one.labels}": one.value for one in samples if not one.name.endswith("_created")}


def _observe_each(histogram: Histogram, values: list[float]) -> None:
    for value in values:
        histogram.observe(value)
