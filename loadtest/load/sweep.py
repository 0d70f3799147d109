"""The highest rate that keeps to a latency."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

from loadtest.load.result import LoadResult, SweepResult

Measure: TypeAlias = Callable[[float], Awaitable[LoadResult]]
Outcome: TypeAlias = Literal["kept", "failed", "invalid"]

MIN_RATE = 1.0
TOLERANCE = 0.05


def outcome_of(result: LoadResult, slo_ms: float) -> Outcome:
    """Whether 99 of 100 requests that were due were answered in time; a run that is not valid does not tell."""
    if not result.valid:
        return "invalid"
    p99_ms = result.latency_of_due.p99_ms
    return "kept" if p99_ms is not None and p99_ms <= slo_ms else "failed"


class _Search:
    """What is known so far."""

    def __init__(self, measure: Measure, slo_ms: float) -> None:
        self.steps: list[LoadResult] = []
        self.kept: float | None = None
        self.failed: float | None = None
        self.invalid: float | None = None
        self._measure = measure
        self._slo_ms = slo_ms

    async def step(self, rate: float) -> bool:
        """Whether the server kept to it. A run that says no is made a second time: a neighbour may have been busy."""
        outcome: Outcome = "failed"
        for _ in range(2):
            result = await self._measure(rate)
            self.steps.append(result)
            outcome = outcome_of(result, self._slo_ms)
            if outcome == "kept":
                self.kept = rate
                return True
        if outcome == "failed":
            self.failed = rate
        else:
            self.invalid = rate
        return False

    @property
    def above(self) -> float | None:
        """The lowest rate above `kept` that it is not known to keep to."""
        return min((rate for rate in (self.failed, self.invalid) if rate is not None), default=None)


async def sweep(
    measure: Measure, slo_ms: float, *, first_rate: float, max_rate: float, tolerance: float = TOLERANCE
) -> SweepResult:
    """Doubles the rate (or quarters it, if the first is too high) until the answer changes, then bisects.

    Args:
        measure: makes a run at a rate.
        slo_ms: p99 over all that were due must be within it.
        first_rate: to begin with, requests a second, at least 1.
        max_rate: not beyond it.
        tolerance: the search ends when the two rates are at most this part of the lower one apart.
    """
    search = _Search(measure, slo_ms)
    rate = min(first_rate, max_rate)
    if await search.step(rate):
        while rate < max_rate:
            rate = min(rate * 2, max_rate)
            if not await search.step(rate):
                break
    else:
        while rate > MIN_RATE:
            rate = max(rate / 4, MIN_RATE)
            if await search.step(rate):
                break
    while search.kept is not None and search.above is not None and search.above > search.kept * (1 + tolerance):
        await search.step(math.sqrt(search.kept * search.above))
    return SweepResult(
        slo_ms=slo_ms,
        steps=tuple(search.steps),
        highest_rate=search.kept,
        lowest_failed_rate=search.failed,
        limited_by=_limited_by(search),
        tolerance=tolerance,
    )


def _limited_by(search: _Search) -> Literal["server", "generator", "max_rate"]:
    if search.above is None:
        return "max_rate"
    return "generator" if search.above == search.invalid else "server"
