"""Ratios of what was measured in rounds, with their confidence intervals.

Arms are compared round by round: an arm's ratio to the baseline is the geometric mean of its rounds' ratios, and its
interval is a bootstrap over the rounds, which are what is independent; the requests of one run are not.

A plain percentile interval is too narrow for few rounds. This one is widened for that: Hesterberg, "What teachers
should know about the bootstrap", The American Statistician 69 (2015), "expanded percentile interval". It can't reach
beyond the lowest and highest round: where rounds scatter normally it covers about 75% with three of them, 88% with
four, 92% with five and 94% from six on (simulated). With one round there is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from loadtest.report.comparison import CONFIDENCE, RESAMPLES, Better, Measured, Ratio
from loadtest.report.errors import ComparisonError

# 97.5% quantiles of Student's t for 1 to 30 degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2).
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def measured(
    name: str,
    unit: str,
    better: Better,
    values: Sequence[Sequence[float]],
    *,
    baseline: int = 0,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Measured:
    """Reckons a measure's ratios.

    Args:
        name: of the measure.
        unit: of the values.
        better: which way is good.
        values: `[arms][rounds]`; round i of one arm goes with round i of every other.
        baseline: index of the arm to compare to.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        ComparisonError: if arms have other numbers of rounds, or a value is not above 0 (a percentile that is not
            there, since too many requests failed, can't be compared).
    """
    rounds = {len(one) for one in values}
    if len(rounds) != 1 or rounds == {0}:
        raise ComparisonError(
            f"{name}: arms have {[len(one) for one in values]} rounds; all must have as many, at least 1"
        )
    if not 0 <= baseline < len(values):
        raise ComparisonError(f"baseline: {baseline}; there are {len(values)} arms")
    table = np.asarray(values, np.float64)
    if not (np.isfinite(table).all() and (table > 0).all()):
        raise ComparisonError(f"{name}: {table.tolist()}; ratios need values above 0 in every round")
    logs = np.log(table / table[baseline])
    return Measured(
        name=name,
        unit=unit,
        better=better,
        values=tuple(tuple(map(float, one)) for one in values),
        middle=tuple(np.median(table, axis=1).tolist()),
        ratios=tuple(
            Ratio(value=1.0) if arm == baseline else _ratio(one, resamples, seed) for arm, one in enumerate(logs)
        ),
    )


def _ratio(logs: npt.NDArray[np.float64], resamples: int, seed: int) -> Ratio:
    rounds = len(logs)
    value = math.exp(float(logs.mean()))
    if rounds < 2:
        return Ratio(value=value)
    # The same rounds are drawn for every arm and measure: their ratios come from one set of resampled experiments.
    drawn = np.random.default_rng(seed).integers(0, rounds, (resamples, rounds))
    means = logs[drawn].mean(axis=1)
    tail = _expanded_tail(rounds)
    low, high = np.quantile(means, [tail, 1 - tail])
    # The mean of equal numbers may differ from them in the last bit.
    return Ratio(value=value, low=min(math.exp(low), value), high=max(math.exp(high), value))


def _expanded_tail(rounds: int) -> float:
    freedom = rounds - 1
    quantile = _T_975[freedom - 1] if freedom <= len(_T_975) else NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return NormalDist().cdf(-math.sqrt(rounds / freedom) * quantile)
