"""Compare subjects (numbers of cards, servers, versions), measured in interleaved rounds, as ratios to the first one.

A subject's ratio to the baseline is the geometric mean of its rounds' ratios, and its interval is a bootstrap over the
rounds, which are independent; the requests of one run are not. A plain percentile interval is too narrow for few
rounds. This one is widened for that: Hesterberg, "What teachers should know about the bootstrap", The American
Statistician 69 (2015), "expanded percentile interval". It can't reach beyond the lowest and highest round: where rounds
scatter normally it covers about 75% with three, 88% with four, 92% with five and 94% from six on (simulated).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from rich.console import Console

from loadtest.documents import line, ratio_text, significant
from serving.cli.output import table_of

Item = TypeVar("Item")
Better: TypeAlias = Literal["lower", "higher"]
Values: TypeAlias = Mapping[str, float]
"""A round of a subject: a value for each measure that it has."""

CONFIDENCE = 0.95
RESAMPLES = 10_000
# 97.5% quantiles of Student's t for 1 to 30 degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2).
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class Ratio(NamedTuple):
    """A ratio to the baseline: geometric mean of the rounds, and its interval, which one round has not."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def from_logs(cls, logs: npt.NDArray[np.float64]) -> Self:
        """Compute the ratio from the logarithm of each round's ratio."""
        rounds, value = len(logs), math.exp(float(logs.mean()))
        if rounds < 2:
            return cls(value=value)
        # The same rounds are drawn for every ratio: all come from one set of resampled experiments.
        drawn = np.random.default_rng(0).integers(0, rounds, (RESAMPLES, rounds))
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


class Measure(NamedTuple):
    """A row of a comparison; `better` is the good direction."""

    name: str
    unit: str
    better: Better = "lower"


@dataclass(frozen=True, slots=True)
class ComparedMeasure:
    """One measure of every subject.

    `values` are `[subjects][rounds]`, 0 for none, `middle` their medians, `ratios` `[subjects]`; empty where some value
    is 0.
    """

    measure: Measure
    values: tuple[tuple[float, ...], ...]
    middle: tuple[float, ...]
    ratios: tuple[Ratio, ...]

    @classmethod
    def from_values(cls, measure: Measure, values: Sequence[Sequence[float]]) -> Self:
        """Compute ratios to the first subject from values `[subjects][rounds]`: where all are above 0."""
        table = np.asarray(values, np.float64)
        ratios: tuple[Ratio, ...] = ()
        if (table > 0).all():
            ratios = (Ratio(1.0), *(Ratio.from_logs(logs) for logs in np.log(table / table[0])[1:]))
        return cls(measure, tuple(map(tuple, table.tolist())), tuple(np.median(table, axis=1).tolist()), ratios)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several subjects by name, the baseline first, with the set-up that all have alike; `problems` make it invalid."""

    title: str
    setup: Mapping[str, str]
    subjects: tuple[str, ...]
    rounds: int
    measures: tuple[ComparedMeasure, ...]
    problems: tuple[str, ...] = ()


def rotated(items: Sequence[Item], number: int) -> list[Item]:
    """Return the order in which a round, from 0, measures: each item is first in turn."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


def compare_rounds(
    title: str,
    subjects: Mapping[str, Sequence[Values]],
    measures: Sequence[Measure],
    setup: Mapping[str, str],
    problems: Sequence[str] = (),
) -> Comparison:
    """Compute ratios to the first subject from all rounds of each.

    A measure has no ratios where some subject has 0 or no value, and is left out if all have none.
    """
    compared = []
    for measure in measures:
        values = [[values.get(measure.name) for values in rounds] for rounds in subjects.values()]
        if any(value is not None for of_subject in values for value in of_subject):
            table = [[value or 0.0 for value in of_subject] for of_subject in values]
            compared.append(ComparedMeasure.from_values(measure, table))
    rounds = len(next(iter(subjects.values())))
    return Comparison(title, setup, tuple(subjects), rounds, tuple(compared), tuple(problems))


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Print a row for each measure: medians, and under them the ratios with their intervals.

    As many subjects as the console has room for stand side by side, the baseline beside each group of others.
    """
    line(console, comparison.title)
    subjects, measures = comparison.subjects, comparison.measures
    names = [f"{measure.name}, {measure.unit}" for measure in (compared.measure for compared in measures)]
    width = 3 + max(len("0.123 × [0.123, 0.123]"), *map(len, subjects))
    room = max(1, (console.width - max(map(len, names), default=0) - len(subjects[0]) - 6) // width)
    for begin in range(1, max(2, len(subjects)), room):
        group = range(begin, min(begin + room, len(subjects)))
        rows: list[list[str]] = []
        for name, compared in zip(names, measures, strict=True):
            rows.append([name, *(significant(compared.middle[number]) for number in (0, *group))])
            if compared.ratios:
                rows.append(["", "", *(str(compared.ratios[number]) for number in group)])
        columns = ["", *(f"#{subjects[number]}" for number in (0, *group))]
        console.print(table_of("", columns, rows, no_wrap=True))
    medians, sure = "values of one round", "(one round has no confidence interval)"
    if comparison.rounds > 1:
        medians, sure = f"medians of {comparison.rounds} rounds", f"with {CONFIDENCE:.0%} confidence intervals"
    line(console, f"{medians}, and ratios to {subjects[0]} {sure}")
    for problem in comparison.problems:
        line(console, f"not valid: {problem}")
