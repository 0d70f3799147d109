"""A comparison on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from loadtest.compare.measures import COUNTED, FORM
from loadtest.report import numbers
from loadtest.report.comparison import Comparison
from loadtest.report.plots import ratio_text


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Prints a row for each measure: medians, and under them the ratios with their intervals."""
    _line(console, comparison.title)
    _line(console, f"{FORM} {comparison.setup[FORM]}")
    table = Table(box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    for arm in comparison.arms:
        table.add_column(arm.name, justify="right", no_wrap=True)
    for one in comparison.measures:
        table.add_row(f"{one.name}, {one.unit}", *[numbers.significant(value) for value in one.middle])
        ratios = ["" if arm == comparison.baseline else ratio_text(one, arm) for arm in range(len(comparison.arms))]
        table.add_row("", *ratios)
    console.print(table)
    base = comparison.arms[comparison.baseline].name
    _line(console, f"{_medians(comparison.rounds)}, and ratios to {base} {_sure(comparison)}")
    _line(console, f"{COUNTED}: {comparison.setup[COUNTED]}; p99.9 of fewer than 1000 is the slowest one")
    for reason in comparison.invalid_because:
        _line(console, f"not valid: {reason}")


def _medians(rounds: int) -> str:
    return f"medians of {rounds} rounds" if rounds > 1 else "values of one round"


def _sure(comparison: Comparison) -> str:
    if comparison.rounds < 2:
        return "(one round has no confidence interval)"
    return f"with {comparison.confidence:.0%} confidence intervals"


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
