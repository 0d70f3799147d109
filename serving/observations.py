"""Observations of histograms, kept for a moment and then made together.

Each request and each batch has some; made one by one, between work that needs the processor's caches, each costs three
times what it costs after another one.
"""

from __future__ import annotations

from collections import deque

from prometheus_client import Histogram

MAX_KEPT = 256


class Observations:
    """What was seen and is not in its histogram yet. Thread-safe: both ends of a deque are."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Histogram, float]] = deque()

    def add(self, histogram: Histogram, value: float) -> None:
        """Keeps an observation; of many, makes all."""
        self._kept.append((histogram, value))
        if len(self._kept) >= MAX_KEPT:
            self.make()

    def make(self) -> None:
        """Makes all that are kept: whoever reads a histogram calls it before."""
        try:
            while True:
                histogram, value = self._kept.popleft()
                histogram.observe(value)
        except IndexError:
            return
