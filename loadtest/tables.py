"""Tables, lines and numbers as a person reads them: digits that were not measured are left out."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table


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


def ratio_text(value: float) -> str:
    """Write one thing to another: three significant digits, at least two decimals."""
    return f"{value:.2f}" if value >= 0.995 else significant(value)
