"""The guards breach on what is worse, say nothing of what is as good, and own up to what they can't tell."""

from __future__ import annotations

import math

import numpy as np
import pytest
from pydantic import ValidationError

from loader.registry.fleet import LATENCY_BOUNDS_MS, VersionStats
from loader.rollout.guards import GuardLimits, compare
from shardrank_testing.rollout_fleet import stats

LIMITS = GuardLimits()


def of_latencies(latencies_ms, errors=0):
    buckets = np.searchsorted(LATENCY_BOUNDS_MS, latencies_ms)
    counts = np.bincount(buckets, minlength=len(LATENCY_BOUNDS_MS) + 1)
    return VersionStats(requests=len(latencies_ms), errors=errors, latency_counts=tuple(counts.tolist()))


def errors_that_breach(trials, allowed):
    live = stats(1000, errors=int(1000 * allowed))
    limits = GuardLimits(max_error_rate_increase=0)
    return next(
        (count for count in range(trials + 1) if compare(live, stats(trials, errors=count), limits).breached), None
    )


@pytest.mark.parametrize(("trials", "allowed"), [(50, 0.01), (60, 0.3), (200, 0.02), (1000, 0.1), (50, 0.99)])
def test_a_breach_is_rarer_by_chance_than_once_in_ten_thousand_times(trials, allowed):
    """By the sum of the binomial's terms; and not much rarer."""
    terms = [math.comb(trials, k) * allowed**k * (1 - allowed) ** (trials - k) for k in range(trials + 1)]
    exact = next((count for count in range(trials + 1) if sum(terms[count:]) < 1e-4), None)
    breach = errors_that_breach(trials, allowed)
    assert breach == exact if exact is None else exact <= breach <= 1.1 * exact + 1


def test_with_too_few_requests_nothing_is_compared():
    for live, new in [
        (stats(49), stats(1000, score=5.0)),
        (stats(1000), stats(49, errors=49)),
        # What failed has no score.
        (stats(90, errors=41), stats(90, errors=41)),
    ]:
        verdict = compare(live, new, LIMITS)
        assert (verdict.breached, verdict.compared, verdict.missing) == (False, False, 1)
        # After a flip the old version answers no more: its requests are not waited for.
        flipped = compare(live, new, LIMITS, live_answers=False)
        assert flipped == verdict.model_copy(update={"missing": max(0, 50 - new.requests)})
        assert compare(live, new, GuardLimits(min_requests=0)) == verdict.model_copy(update={"missing": 0})
        assert "too little traffic to compare: 50 requests of each version are needed" in verdict.text()
        assert f"live: {live.requests} requests" in verdict.text()


def test_errors_are_too_many_also_where_the_live_version_has_too_few_requests():
    verdict = compare(stats(49), stats(1000, errors=40), LIMITS)
    assert (verdict.breached, verdict.compared) == (True, False)
    assert verdict.reason.startswith("error rate 4.00%, and too little traffic to compare")
    assert not compare(stats(49), stats(1000, errors=10), LIMITS).breached
    # As of the live version, of which some failed as well.
    assert not compare(stats(49, errors=7), stats(60, errors=9), LIMITS).breached


@pytest.mark.parametrize(
    ("live", "new", "reason"),
    [
        (stats(1000, errors=100), stats(1000, errors=160), "error rate 16.00%, allowed is the live version's plus 1"),
        (stats(1000), stats(50, errors=6), "error rate 12.00%"),
        (stats(1000, bucket=20), stats(100, bucket=60), "p99 438.4 ms, allowed is 8.3 ms (100 of 100 answers"),
        (stats(1000), stats(1000, score=0.56), "mean score 0.6 standard deviations off the live one's, allowed is 0.5"),
        (stats(100, spread=0), stats(100, spread=0, score=0.51), "mean score"),
        # Within the limits.
        (stats(1000, errors=100), stats(1000, errors=110), ""),
        (stats(1000), stats(50, errors=2), ""),
        (stats(1000, bucket=20), stats(1000, bucket=24), ""),
        (stats(1000, bucket=0), stats(1000, bucket=25), ""),
        (stats(1000), stats(1000, score=0.54), ""),
        (stats(100, spread=0), stats(100, spread=0), ""),
    ],
)
def test_a_version_that_is_worse_breaches_with_the_reason(live, new, reason):
    verdict = compare(live, new, LIMITS)
    assert verdict.compared
    assert verdict.breached == (reason != "")
    assert verdict.reason.startswith(reason)


def test_two_samples_of_the_same_service_seldom_differ():
    random = np.random.default_rng(5)
    breaches = 0
    for _ in range(300):
        live = of_latencies(random.lognormal(2.0, 0.8, 2000), errors=int(random.binomial(2000, 0.02)))
        new = of_latencies(random.lognormal(2.0, 0.8, 60), errors=int(random.binomial(60, 0.02)))
        breaches += compare(live, new, LIMITS).breached
    assert breaches == 0


@pytest.mark.parametrize("limit", ["min_requests", "max_p99_ratio", "p99_slack_ms", "max_score_drift"])
def test_limits_out_of_range_are_refused(limit):
    with pytest.raises(ValidationError, match=limit):
        GuardLimits.model_validate({limit: -1})
    with pytest.raises(ValidationError, match="nothing_such"):
        GuardLimits.model_validate({"nothing_such": 1})
