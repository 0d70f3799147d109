"""Compare the same load on several arms (numbers of cards, servers, versions), measured in interleaved rounds.

A round measures every arm once, in a random or turning order, so that what changes with time (the machine's clock, its
neighbours) is in all arms of a round alike. Arms are compared round by round: an arm's ratio to the baseline is the
geometric mean of its rounds' ratios, and its interval is a bootstrap over the rounds, which are what is independent;
the requests of one run are not.

A plain percentile interval is too narrow for few rounds. This one is widened for that: Hesterberg, "What teachers
should know about the bootstrap", The American Statistician 69 (2015), "expanded percentile interval". It can't reach
beyond the lowest and highest round: where rounds scatter normally it covers about 75% with three of them, 88% with
four, 92% with five and 94% from six on (simulated). With one round there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from loader.snapshot.tables import Frozen
from loadtest.errors import ComparisonError
from loadtest.load.result import LoadResult, Machine
from loadtest.workloads.payloads import FORMS

CONFIDENCE = 0.95
RESAMPLES = 10_000

Better: TypeAlias = Literal["lower", "higher"]


class Ratio(Frozen):
    """One arm's measure to the baseline's.

    Attributes:
        value: geometric mean of the rounds' ratios.
        low, high: ends of the confidence interval; None with fewer than two rounds.
    """

    value: float = Field(gt=0)
    low: float | None = Field(default=None, gt=0)
    high: float | None = Field(default=None, gt=0)

    @property
    def certain(self) -> bool:
        """Tell whether the interval has 1 outside: the arms differ."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


class ComparedMeasure(Frozen):
    """One measure on every arm.

    Attributes:
        name: such as `p99, warm`.
        unit: of the values, such as `ms` or `/s`.
        better: which way is good.
        values: `[arms][rounds]`, at least 0.
        middle: of each arm, the median of its rounds.
        ratios: of each arm, to the baseline's; the baseline's own is 1. Empty where some arm has nothing of it.
    """

    name: str = Field(min_length=1)
    unit: str
    better: Better
    values: tuple[tuple[float, ...], ...]
    middle: tuple[float, ...]
    ratios: tuple[Ratio, ...]


class Arm(Frozen):
    """What is compared.

    Attributes:
        name: such as `2 cards`.
        runs: its rounds, where each was a load test; empty if other things were measured.
        cold_runs: likewise, what was measured before them in the same rounds, from a server's start.
    """

    name: str = Field(min_length=1)
    runs: tuple[LoadResult, ...] = ()
    cold_runs: tuple[LoadResult, ...] = ()


class Comparison(Frozen):
    """Several arms side by side.

    Attributes:
        title: what is compared.
        setup: what all arms have alike, by name.
        arms: in the order of the table.
        baseline: index of the arm that the others are compared to.
        rounds: how often every arm was measured.
        measures: in the order of the table.
        confidence: of the intervals.
        resamples, seed: of the bootstrap.
        valid: whether every run was.
        invalid_because: one sentence for each that was not.
        machine, versions: where it ran; None and empty if not known.
    """

    kind: Literal["comparison"] = "comparison"
    format_version: Literal[1] = 1
    title: str = Field(min_length=1)
    setup: dict[str, str] = Field(default_factory=dict)
    arms: tuple[Arm, ...] = Field(min_length=1)
    baseline: int = Field(ge=0)
    rounds: int = Field(ge=1)
    measures: tuple[ComparedMeasure, ...]
    confidence: float = CONFIDENCE
    resamples: int = RESAMPLES
    seed: int = 0
    valid: bool
    invalid_because: tuple[str, ...] = ()
    machine: Machine | None = None
    versions: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _shapes_agree(self) -> Self:
        arms = len(self.arms)
        if self.baseline >= arms:
            raise ValueError(f"baseline: {self.baseline}; there are {arms} arms")
        for one in self.measures:
            shapes = [len(one.values), len(one.middle), len(one.ratios) or arms]
            if shapes != [arms] * 3 or {len(rounds) for rounds in one.values} != {self.rounds}:
                raise ValueError(f"measures: {one.name} has values for other than {arms} arms and {self.rounds} rounds")
        return self


# 97.5% quantiles of Student's t for 1 to 30 degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2).
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def t_975(freedom: int) -> float:
    """Return the quantile; beyond 30 degrees of freedom that of the normal distribution."""
    return _T_975[freedom - 1] if freedom <= len(_T_975) else NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def measured(
    name: str, unit: str, better: Better, values: Sequence[Sequence[float]], *, seed: int = 0, everywhere: bool = True
) -> ComparedMeasure:
    """Compute a measure's ratios to the first arm.

    Values are `[arms][rounds]`; round i of one arm goes with round i of every other. Of a measure that need not be
    `everywhere`, values may be 0; then it has no ratios.

    Raises:
        ComparisonError: if arms have other numbers of rounds, or a value is not above 0 (a percentile that is not
            there, since too many requests failed, can't be compared).
    """
    rounds = {len(one) for one in values}
    if len(rounds) != 1 or rounds == {0}:
        raise ComparisonError(
            f"{name}: arms have {[len(one) for one in values]} rounds; all must have as many, at least 1"
        )
    table = np.asarray(values, np.float64)
    if not (np.isfinite(table).all() and ((table > 0) | ((table == 0) & (not everywhere))).all()):
        raise ComparisonError(f"{name}: {table.tolist()}; ratios need values above 0 in every round")
    ratios: tuple[Ratio, ...] = ()
    if table.all():
        ratios = (Ratio(value=1.0), *(_ratio(one, seed) for one in np.log(table / table[0])[1:]))
    return ComparedMeasure(
        name=name,
        unit=unit,
        better=better,
        values=tuple(tuple(map(float, one)) for one in values),
        middle=tuple(np.median(table, axis=1).tolist()),
        ratios=ratios,
    )


def _ratio(logs: npt.NDArray[np.float64], seed: int) -> Ratio:
    rounds = len(logs)
    value = math.exp(float(logs.mean()))
    if rounds < 2:
        return Ratio(value=value)
    # The same rounds are drawn for every arm and measure: their ratios come from one set of resampled experiments.
    drawn = np.random.default_rng(seed).integers(0, rounds, (RESAMPLES, rounds))
    means = logs[drawn].mean(axis=1)
    tail = _expanded_tail(rounds)
    low, high = np.quantile(means, [tail, 1 - tail])
    # The mean of equal numbers may differ from them in the last bit.
    return Ratio(value=value, low=min(math.exp(low), value), high=max(math.exp(high), value))


def _expanded_tail(rounds: int) -> float:
    freedom = rounds - 1
    quantile = t_975(freedom)
    return NormalDist().cdf(-math.sqrt(rounds / freedom) * quantile)


_MEASURES: tuple[tuple[str, str, Better, Callable[[LoadResult], float | None]], ...] = (
    ("p50", "ms", "lower", lambda run: run.latency_of_due.p50_ms),
    ("p99", "ms", "lower", lambda run: run.latency_of_due.p99_ms),
    ("p99.9", "ms", "lower", lambda run: run.latency_of_due.p999_ms),
    ("answers in time", "/s", "higher", lambda run: run.goodput),
)
_ALIKE = ("target", "model", "workload", "api", "ids", "candidates", "arrivals", "rate", "duration_s", "slo_ms")


def compare_runs(title: str, arms: Mapping[str, Sequence[LoadResult]], *, seed: int = 0) -> Comparison:
    """Compare load tests: p50, p99 and p99.9 of all requests that were due, and answers in time a second.

    The runs of an arm are its rounds; the first arm is the baseline.

    Raises:
        ComparisonError: fewer than two arms, or arms with other numbers of rounds.
    """
    if len(arms) < 2:
        raise ComparisonError(f"arms: {sorted(arms)}; a comparison needs at least 2")
    counts = {name: len(of_arm) for name, of_arm in arms.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise ComparisonError(f"arms: {counts} runs; all must have as many, at least 1")
    runs = [run for of_arm in arms.values() for run in of_arm]
    found, left_out = [], []
    for name, unit, better, value_of in _MEASURES:
        values = [[value_of(run) or 0.0 for run in of_arm] for of_arm in arms.values()]
        if all(value > 0 for of_arm in values for value in of_arm):
            found.append(measured(name, unit, better, values, seed=seed))
        else:
            left_out.append(f"{name} is left out: some runs have none, since too many of their requests failed")
    first = runs[0]
    return Comparison(
        title=title,
        setup=_alike(runs),
        arms=tuple(Arm(name=name, runs=tuple(of_arm)) for name, of_arm in arms.items()),
        baseline=0,
        rounds=len(runs) // len(arms),
        measures=tuple(found),
        seed=seed,
        valid=all(run.valid for run in runs) and not left_out,
        invalid_because=(*_reasons(arms), *left_out),
        machine=first.machine if all(run.machine == first.machine for run in runs) else None,
        versions=dict(set.intersection(*(set(run.versions.items()) for run in runs))),
    )


def _reasons(arms: Mapping[str, Sequence[LoadResult]]) -> list[str]:
    return [
        f"{name}, round {index}: {reason}"
        for name, of_arm in arms.items()
        for index, run in enumerate(of_arm, 1)
        if not run.valid
        for reason in run.invalid_because
    ]


def _alike(runs: Sequence[LoadResult]) -> dict[str, str]:
    """Collect what all runs were asked alike, by field."""
    values = {field: {getattr(run, field) for run in runs} for field in _ALIKE}
    alike = {field: str(found.pop()) for field, found in values.items() if len(found) == 1 and None not in found}
    forms = {FORMS[run.varied] for run in runs}
    return {**alike, "requests are": " or ".join(sorted(forms))}
