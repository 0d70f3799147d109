"""Tables, lines and numbers as a person reads them: digits that were not measured are left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from loader.snapshot.tables import Frozen

One = TypeVar("One")
Number = Callable[[Sequence[One]], str]
"""A cell of a table, from all rounds."""


class Spread(Frozen):
    """Of a number over the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Sum up one or more values."""
        found = list(values)
        return cls(median=float(np.median(found)), least=min(found), most=max(found))

    def shown(self, digits: int) -> str:
        """Write it as `1.20 (1.10–1.30)`."""
        return f"{self.median:.{digits}f} ({self.least:.{digits}f}–{self.most:.{digits}f})"


def grouped(ones: Iterable[One], *fields: str) -> dict[tuple[Any, ...], list[One]]:
    """Gather the rounds in which these fields are the same."""
    found: dict[tuple[Any, ...], list[One]] = {}
    for one in ones:
        found.setdefault(tuple(getattr(one, field) for field in fields), []).append(one)
    return found


def median_of(field: str, digits: int) -> Number[Any]:
    """Show the median of a field."""
    return lambda ones: f"{np.median([getattr(one, field) for one in ones]):.{digits}f}"


def grouped_table(
    title: str,
    ones: Sequence[One],
    fields: Mapping[str, str],
    spread: tuple[str, str, str],
    aim: Callable[[One], float],
    numbers: Mapping[str, Number[One]],
) -> Table:
    """Make a table with a row for each group of rounds.

    Args:
        title: over it.
        ones: the rounds.
        fields: that groups are made by, by the column's name.
        spread: the column, the field and the unit of what is aimed at.
        aim: what that may be in a group, from any of its rounds.
        numbers: of a group, by the column's name.
    """
    column, field, unit = spread
    table = make_table((*fields, f"{column} (least–most)", "aim"), numbers, title=title)
    for key, of_key in grouped(ones, *fields.values()).items():
        found, most = Spread.of(getattr(one, field) for one in of_key), aim(of_key[0])
        value, range_ = found.shown(2).split(" ", 1)
        colour = "green" if found.median <= most else "red"
        cells = (*map(str, key), f"[{colour}]{value}{unit}[/] {range_}", f"≤ {most:.2f}{unit}")
        table.add_row(*cells, *(number(of_key) for number in numbers.values()))
    return table


def make_table(words: Iterable[str], numbers: Iterable[str], *, title: str | None = None) -> Table:
    """Make a table without rows: columns of words, then those of numbers. Without a title it has no lines between."""
    table = Table(title=title) if title else Table(box=box.SIMPLE)
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=not title)
    table.show_header = any(column.header for column in table.columns)
    return table


def line(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def significant(value: float) -> str:
    """Write at least three significant digits, and all of those before the point: 0.482, 12.3, 1,234."""
    return f"{value:,.0f}" if value == 0 or abs(value) >= 99.95 else f"{value:#.3g}"


def rate_text(value: float) -> str:
    """Write requests a second: as it is if whole, else four significant digits."""
    if value == int(value) or value >= 999.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 99.995 else significant(value)


def plain_text(value: float) -> str:
    """Write a number that was set, not measured: no more digits than it has, thousands separated."""
    return f"{value:,.10f}".rstrip("0").rstrip(".")


def percent_text(value: float) -> str:
    """Write a fraction in percent, without the sign: two decimals, or two digits of what is missing to 0 or 100."""
    rest = min(value, 1 - value)
    if rest <= 0:
        return plain_text(round(100 * value, 1))
    return f"{100 * value:.{2 if rest >= 1e-4 else min(12, -1 - math.floor(math.log10(rest)))}f}"


def ratio_text(value: float) -> str:
    """Write one thing to another: three significant digits, at least two decimals."""
    return f"{value:.2f}" if value >= 0.995 else significant(value)
