"""Compare arms (numbers of cards, servers, versions) that are measured in interleaved rounds, as ratios to one of them.

An arm's ratio to the baseline is the geometric mean of its rounds' ratios, and its interval is a bootstrap over the
rounds, which are independent; the requests of one run are not. A plain percentile interval is too narrow for few
rounds. This one is widened for that: Hesterberg, "What teachers should know about the bootstrap", The American
Statistician 69 (2015), "expanded percentile interval". It can't reach beyond the lowest and highest round: where rounds
scatter normally it covers about 75% with three, 88% with four, 92% with five and 94% from six on (simulated).

"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Generic, Literal, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator
from rich.console import Console

from loader.errors import ConfigError
from loader.snapshot.tables import Frozen
from loadtest.documents import Machine, line, make_table, ratio_text, significant
from loadtest.load.result import LoadResult

Item = TypeVar("Item")
Round = TypeVar("Round")
Better: TypeAlias = Literal["lower", "higher"]

CONFIDENCE = 0.95
RESAMPLES = 10_000
FORM = "requests are"
# 97.5% quantiles of Student's t for 1 to 30 degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2).
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class Ratio(Frozen):
    """An arm's ratio to the baseline: geometric mean of the rounds, and its interval, which one round has not."""

    value: float = Field(gt=0)
    low: float | None = Field(default=None, gt=0)
    high: float | None = Field(default=None, gt=0)

    @classmethod
    def from_logs(cls, logs: npt.NDArray[np.float64], seed: int) -> Self:
        """Compute the ratio from the logarithm of each round's ratio."""
        rounds, value = len(logs), math.exp(float(logs.mean()))
        if rounds < 2:
            return cls(value=value)
        # The same rounds are drawn for every arm and measure: their ratios come from one set of resampled experiments.
        drawn = np.random.default_rng(seed).integers(0, rounds, (RESAMPLES, rounds))
        # Beyond 30 degrees of freedom Student's distribution is nearly the normal one.
        quantile = _T_975[rounds - 2] if rounds - 2 < len(_T_975) else NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
        tail = NormalDist().cdf(-math.sqrt(rounds / (rounds - 1)) * quantile)
        low, high = np.quantile(logs[drawn].mean(axis=1), [tail, 1 - tail])
        # The mean of equal numbers may differ from them in the last bit.
        return cls(value=value, low=min(math.exp(low), value), high=max(math.exp(high), value))

    def __str__(self) -> str:
        """Write it as `0.61 × [0.58, 0.64]`."""
        interval = (
            "" if self.low is None or self.high is None else f" [{ratio_text(self.low)}, {ratio_text(self.high)}]"
        )
        return f"{ratio_text(self.value)} ×{interval}"


class ComparedMeasure(Frozen):
    """One measure of every arm; `better` is the good direction.

    `values` are `[arms][rounds]`, 0 for none, `middle` their medians, `ratios` `[arms]`; empty where some value is 0.
    """

    name: str = Field(min_length=1)
    unit: str
    better: Better
    values: tuple[tuple[float, ...], ...]
    middle: tuple[float, ...]
    ratios: tuple[Ratio, ...]

    @classmethod
    def from_values(
        cls, name: str, unit: str, better: Better, values: Sequence[Sequence[float]], *, seed: int = 0
    ) -> Self:
        """Compute ratios to the first arm from values `[arms][rounds]`: where all are above 0."""
        table = np.asarray(values, np.float64)
        ratios: tuple[Ratio, ...] = ()
        if (table > 0).all():
            ratios = (Ratio(value=1.0), *(Ratio.from_logs(logs, seed) for logs in np.log(table / table[0])[1:]))
        rows = tuple(map(tuple, table.tolist()))
        middle = tuple(np.median(table, axis=1).tolist())
        return cls(name=name, unit=unit, better=better, values=rows, middle=middle, ratios=ratios)

    def judgement(self, arm: int) -> Literal["better", "worse", ""]:
        """Compare an arm with the baseline: empty unless the interval excludes 1."""
        ratio = self.ratios[arm]
        if ratio.low is None or ratio.high is None or ratio.low <= 1 <= ratio.high:
            return ""
        return "better" if (ratio.value < 1) == (self.better == "lower") else "worse"


class Arm(Frozen):
    """What is compared: a name such as `2 cards`, and its load tests by round, where there are some."""

    name: str = Field(min_length=1)
    runs: tuple[LoadResult, ...] = ()


class Comparison(Frozen):
    """Several arms side by side, in the order of the table; `setup` is what all have alike.

    `resamples` and `seed` are of the bootstrap. `machine` and `versions` are None and empty if not known.
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
        for measure in self.measures:
            shapes = [len(measure.values), len(measure.middle), len(measure.ratios) or arms]
            if shapes != [arms] * 3 or {len(rounds) for rounds in measure.values} != {self.rounds}:
                raise ValueError(
                    f"measures: {measure.name} has values for other than {arms} arms and {self.rounds} rounds"
                )
        return self

    @property
    def others(self) -> list[int]:
        """The arms but the baseline, by index."""
        return [arm for arm in range(len(self.arms)) if arm != self.baseline]


@dataclass(frozen=True, slots=True)
class Measure(Generic[Round]):
    """A row of a comparison, with its value in a round of an arm; None where there is none.

    If not `everywhere`, it has no ratios where some arm has 0 or none, and is left out if all have none.
    """

    name: str
    unit: str
    better: Better
    value: Callable[[Round], float | None]
    everywhere: bool = True


def rotated(items: Sequence[Item], number: int) -> list[Item]:
    """Return the order in which a round, from 0, measures: each item is first in turn."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


def compare_rounds(
    arms: Sequence[tuple[Arm, Sequence[Round]]],
    measures: Sequence[Measure[Round]],
    *,
    title: str,
    setup: Mapping[str, str] | None = None,
    invalid_because: Sequence[str] = (),
    machine: Machine | None = None,
    versions: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Comparison:
    """Compute ratios to the first arm.

    A measure that every arm has, but not in every round, is left out, and the comparison is not valid. Nor is it with a
    reason why not. Raises ConfigError: arms have other numbers of rounds, or there are none.
    """
    counts = {arm.name: len(rounds) for arm, rounds in arms}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise ConfigError(f"arms: {counts} rounds; all must have as many, at least 1")
    compared, reasons = [], list(invalid_because)
    for measure in measures:
        given = [[measure.value(each) for each in rounds] for _, rounds in arms]
        values = [[value or 0.0 for value in of_arm] for of_arm in given]
        if measure.everywhere:
            is_shown = all(0 < value < math.inf for of_arm in values for value in of_arm)
        else:
            is_shown = any(value is not None for of_arm in given for value in of_arm)
        if is_shown:
            compared.append(ComparedMeasure.from_values(measure.name, measure.unit, measure.better, values, seed=seed))
        elif measure.everywhere:
            reasons.append(f"{measure.name} is left out: some rounds have none; too many requests failed")
    return Comparison(
        title=title,
        setup=dict(setup or {}),
        arms=tuple(arm for arm, _ in arms),
        baseline=0,
        rounds=len(arms[0][1]),
        measures=tuple(compared),
        seed=seed,
        valid=not reasons,
        invalid_because=tuple(reasons),
        machine=machine,
        versions=dict(versions or {}),
    )


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Print a row for each measure: medians, and under them the ratios with their intervals.

    As many arms as the console has room for stand side by side, the baseline beside each group of others.
    """
    line(console, comparison.title)
    if FORM in comparison.setup:
        line(console, f"{FORM} {comparison.setup[FORM]}")
    baseline = comparison.arms[comparison.baseline].name
    names = max((len(f"{measure.name}, {measure.unit}") for measure in comparison.measures), default=0)
    width = 3 + max(len("0.123 × [0.123, 0.123]"), *(len(arm.name) for arm in comparison.arms))
    room = max(1, (console.width - names - len(baseline) - 6) // width)
    for begin in range(0, max(1, len(comparison.others)), room):
        group = comparison.others[begin : begin + room]
        arms = [comparison.baseline, *group]
        table = make_table([""], [comparison.arms[arm].name for arm in arms])
        for measure in comparison.measures:
            table.add_row(f"{measure.name}, {measure.unit}", *[significant(measure.middle[arm]) for arm in arms])
            if measure.ratios:
                table.add_row("", "", *[str(measure.ratios[arm]) for arm in group])
        console.print(table)
    medians, sure = "values of one round", "(one round has no confidence interval)"
    if comparison.rounds > 1:
        medians = f"medians of {comparison.rounds} rounds"
        sure = f"with {comparison.confidence:.0%} confidence intervals"
    line(console, f"{medians}, and ratios to {baseline} {sure}")
    for reason in comparison.invalid_because:
        line(console, f"not valid: {reason}")
