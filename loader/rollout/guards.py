"""Whether a version does worse than the one it replaces. Pure: counts in, a verdict out.

Rates and percentiles of a small sample jump about, so a limit counts as breached only if a version that keeps it would
look this bad less than once in 10,000 times.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from pydantic import Field

from loader.registry.fleet import LATENCY_BOUNDS_MS, Record, VersionStats
from loader.snapshot.tables import Frozen

MAX_FALSE_ALARM = 1e-4
MIN_REQUESTS = 50
_P99 = 0.99


class GuardLimits(Frozen):
    """How much worse than the live version a new one may be.

    Attributes:
        min_requests: with fewer answers than this by either version, only errors are compared, and no canary passes,
            nor with fewer by the new one a bake after the flip; 0: bakes need none, and `MIN_REQUESTS` are compared.
        max_error_rate_increase: of the fraction of requests that fail.
        max_p99_ratio: of its 99th percentile latency to the live one's, to which p99_slack_ms is added.
        max_score_drift: difference of the mean scores, in standard deviations of a live score.
    """

    min_requests: int = Field(default=MIN_REQUESTS, ge=0)
    max_error_rate_increase: float = Field(default=0.01, ge=0, le=1)
    max_p99_ratio: float = Field(default=2.0, ge=1)
    p99_slack_ms: float = Field(default=5.0, ge=0)
    max_score_drift: float = Field(default=0.5, ge=0)


class VersionNumbers(Record):
    """What was compared of one version; None where it has no answers or scores."""

    requests: int
    errors: int
    error_rate: float | None
    p99_ms: float | None
    mean_score: float | None
    score_deviation: float | None

    @classmethod
    def from_stats(cls, stats: VersionStats) -> VersionNumbers:
        """Return rates, percentile and moments of counts. The p99 is the upper bound of its bucket, in milliseconds."""
        mean = deviation = None
        if stats.score_count:
            mean = stats.score_sum / stats.score_count
            deviation = math.sqrt(max(stats.score_square_sum / stats.score_count - mean * mean, 0.0))
        return cls(
            requests=stats.requests,
            errors=stats.errors,
            error_rate=stats.errors / stats.requests if stats.requests else None,
            p99_ms=percentile_ms(stats.latency_counts, _P99),
            mean_score=mean,
            score_deviation=deviation,
        )

    def text(self) -> str:
        """Return the numbers in one line."""
        text = f"{self.requests} requests, {self.errors} errors"
        if self.p99_ms is not None:
            text += f", p99 {self.p99_ms:.1f} ms"
        if self.mean_score is not None:
            text += f", mean score {self.mean_score:.4g} ± {self.score_deviation or 0.0:.4g}"
        return text


class GuardReport(Record):
    """Which limit is breached, or why nothing was compared; no reason if all is well.

    `missing` are requests that a version still needs for `min_requests`; of the live one, that it answered.
    """

    breached: bool
    compared: bool
    missing: int = 0
    reason: str
    live: VersionNumbers
    new: VersionNumbers

    def text(self) -> str:
        """Return the reason and the numbers in one line."""
        return f"{self.reason or 'within the limits'} (live: {self.live.text()}; new: {self.new.text()})"


def compare(live: VersionStats, new: VersionStats, limits: GuardLimits, *, live_answers: bool = True) -> GuardReport:
    """Compare what a new version answered with what the live one did in the same time, or before if not `live_answers`.

    As long as it does, answers that it is short of are missing as well: nothing can be compared without them.
    """
    # Of those that failed there is nothing that the new version's could be compared with.
    fewest = min(live.requests - live.errors, new.requests)
    numbers = {"live": VersionNumbers.from_stats(live), "new": VersionNumbers.from_stats(new)}
    missing = max(0, limits.min_requests - (fewest if live_answers else new.requests))
    needed = limits.min_requests or MIN_REQUESTS
    allowed = min(live.errors / max(live.requests, 1) + limits.max_error_rate_increase, 1.0)
    if fewest < needed:
        reason = f"too little traffic to compare: {needed} requests of each version are needed"
        # Too many errors are so whatever else is not known of the live version.
        fails = new.requests >= needed and _is_above(new.errors, new.requests, allowed)
        reason = f"error rate {new.errors / new.requests:.2%}, and {reason}" if fails else reason
        return GuardReport(breached=fails, compared=False, missing=missing, reason=reason, **numbers)
    reasons = []
    if _is_above(new.errors, new.requests, allowed):
        limit = f"allowed is the live version's plus {limits.max_error_rate_increase:.2%}"
        reasons.append(f"error rate {new.errors / new.requests:.2%}, {limit}")
    live_p99, new_p99 = numbers["live"].p99_ms, numbers["new"].p99_ms
    if live_p99 is not None and new_p99 is not None:
        allowed = live_p99 * limits.max_p99_ratio + limits.p99_slack_ms
        # Only buckets that begin at or above what is allowed are surely slower.
        first = bisect_left(LATENCY_BOUNDS_MS, allowed) + 1
        slower, total = sum(new.latency_counts[first:]), sum(new.latency_counts)
        if _is_above(slower, total, 1 - _P99):
            took_longer = f"({slower} of {total} answers took longer)"
            reasons.append(f"p99 {new_p99:.1f} ms, allowed is {allowed:.1f} ms {took_longer}")
    mean, live_mean = numbers["new"].mean_score, numbers["live"].mean_score
    if mean is not None and live_mean is not None:
        # Scores that are all the same have no deviation but that of their rounding.
        deviation = max(numbers["live"].score_deviation or 0.0, 1e-6 * abs(live_mean), 1e-12)
        if (drift := abs(mean - live_mean) / deviation) > limits.max_score_drift:
            limit = f"allowed is {limits.max_score_drift:g}"
            reasons.append(f"mean score {drift:.2g} standard deviations off the live one's, {limit}")
    return GuardReport(breached=bool(reasons), compared=True, reason="; ".join(reasons), **numbers)


def _is_above(successes: int, trials: int, probability: float) -> bool:
    """Return whether there are more than expected, and too many for chance.

    By Chernoff's bound: of a binomial X, P(X >= n * q) is at most exp(-n * KL(q, p)) for a share q above p.
    """
    if successes <= probability * trials:
        return False
    share = min(1.0, successes / trials)
    parts = ((share, probability), (1 - share, 1 - probability))
    divergence = sum(seen * math.log(seen / expected) if expected else math.inf for seen, expected in parts if seen)
    return math.exp(-trials * divergence) < MAX_FALSE_ALARM


def percentile_ms(latency_counts: Sequence[int], quantile: float) -> float | None:
    """Return the upper bound of the bucket that a quantile of the answers falls into; None without answers.

    Above the last bound it is that bound.
    """
    ends = list(accumulate(latency_counts))
    if not ends or not ends[-1]:
        return None
    return LATENCY_BOUNDS_MS[min(bisect_left(ends, quantile * ends[-1]), len(LATENCY_BOUNDS_MS) - 1)]
