"""Arms that are measured in rounds, in turning order: what each round says, as a comparison and on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.console import Console
from rich.table import Table

from loadtest.load.result import Machine
from loadtest.report.comparison import Arm, Better, Comparison, measured
from loadtest.report.numbers import significant
from loadtest.report.plots import ratio_text
from loadtest.tables import line, make_table

One = TypeVar("One")
Round = TypeVar("Round")

COUNTED = "requests that count in a round"
"""In the setup: of fewer than a thousand, p99.9 is the slowest one."""
FORM = "requests are"
SHARES = "shares of capacity"


def in_turn(ones: Sequence[One], number: int) -> list[One]:
    """Give the order in which a round, from 0, measures: each is first in turn."""
    first = number % len(ones)
    return [*ones[first:], *ones[:first]]


@dataclass(frozen=True, slots=True)
class Measure(Generic[Round]):
    """A row of a comparison.

    Attributes:
        name, unit, better: as in `ComparedMeasure`.
        value: in a round of an arm; None or 0 where there is none.
        everywhere: whether every arm has one. If not, a row with a 0 has no ratios, and one of zeros alone is left out.
    """

    name: str
    unit: str
    better: Better
    value: Callable[[Round], float | None]
    everywhere: bool = True


def compare_rounds(
    arms: Sequence[tuple[Arm, Sequence[Round]]],
    measures: Sequence[Measure[Round]],
    *,
    title: str,
    setup: dict[str, str],
    invalid_because: Sequence[str],
    machine: Machine,
    versions: dict[str, str],
    seed: int = 0,
) -> Comparison:
    """Compute ratios to the first arm.

    A measure that every arm has, but not in every round, is left out, and the comparison is not valid. Nor is it with a
    reason why not.

    Raises:
        ComparisonError: arms have other numbers of rounds, or there are none.
    """
    found, reasons = [], list(invalid_because)
    for one in measures:
        values = [[one.value(each) or 0.0 for each in rounds] for _, rounds in arms]
        has = [value > 0 for of_arm in values for value in of_arm]
        if all(has) or (any(has) and not one.everywhere):
            found.append(measured(one.name, one.unit, one.better, values, seed=seed, everywhere=one.everywhere))
        elif one.everywhere:
            reasons.append(f"{one.name} is left out: some rounds have none; too many requests failed")
    return Comparison(
        title=title,
        setup=setup,
        arms=tuple(arm for arm, _ in arms),
        baseline=0,
        rounds=len(arms[0][1]),
        measures=tuple(found),
        seed=seed,
        valid=not reasons,
        invalid_because=tuple(reasons),
        machine=machine,
        versions=versions,
    )


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Print a row for each measure: medians, and under them the ratios with their intervals.

    As many arms as the console has room for stand side by side, the baseline beside each group of others.
    """
    line(console, comparison.title)
    if FORM in comparison.setup:
        line(console, f"{FORM} {comparison.setup[FORM]}")
    others = [arm for arm in range(len(comparison.arms)) if arm != comparison.baseline]
    alone, *pairs = (
        console.measure(_side_by_side(comparison, [comparison.baseline, *arm])).maximum
        for arm in ([], *([arm] for arm in others))
    )
    widest = max((pair - alone for pair in pairs), default=1)
    beside = max(1, (console.width - alone) // max(1, widest))
    for begin in range(0, max(1, len(others)), beside):
        console.print(_side_by_side(comparison, [comparison.baseline, *others[begin : begin + beside]]))
    base = comparison.arms[comparison.baseline].name
    medians, sure = "values of one round", "(one round has no confidence interval)"
    if comparison.rounds > 1:
        medians = f"medians of {comparison.rounds} rounds"
        sure = f"with {comparison.confidence:.0%} confidence intervals"
    line(console, f"{medians}, and ratios to {base} {sure}")
    if COUNTED in comparison.setup:
        line(console, f"{COUNTED}: {comparison.setup[COUNTED]}; p99.9 of fewer than 1000 is the slowest one")
    if SHARES in comparison.setup:
        line(console, f"{SHARES}: {comparison.setup[SHARES]}")
    for reason in comparison.invalid_because:
        line(console, f"not valid: {reason}")


def _side_by_side(comparison: Comparison, arms: Sequence[int]) -> Table:
    table = make_table([""], [comparison.arms[arm].name for arm in arms])
    for one in comparison.measures:
        table.add_row(f"{one.name}, {one.unit}", *[significant(one.middle[arm]) for arm in arms])
        if one.ratios:
            table.add_row("", *["" if arm == comparison.baseline else ratio_text(one, arm) for arm in arms])
    return table
