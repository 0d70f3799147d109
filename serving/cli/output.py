"""What commands print: tables, progress bars, sizes, times."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table

    from loader.progress import Progress

PIPE_COLUMNS = 140


def print_json(value: BaseModel | dict[str, Any]) -> None:
    """Print one JSON document on stdout."""
    if isinstance(value, dict):
        click.echo(json.dumps(value, indent=2, ensure_ascii=False))
    else:
        click.echo(value.model_dump_json(indent=2))


def table_of(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], **more: Any) -> Table:
    """Make a table; columns whose name starts with `#` go to the right, `more` is of every column.

    A cell that is a `Text` keeps its style.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, min_width=len(title))
    for column in columns:
        table.add_column(column.removeprefix("#"), justify="right" if column.startswith("#") else "left", **more)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in row))
    return table


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table as `table_of` makes it on stdout."""
    stdout_console().print(table_of(title, columns, rows, no_wrap=True))


def stdout_console() -> Console:
    """Return the terminal, or a file or pipe whose lines are not cut at 80 columns."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)


def human_bytes(size_bytes: float) -> str:
    """Write `1.5 MB`; powers of 1000."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def human_count(count: float) -> str:
    """Write `950`, `12.3 k`, `4.56 M`, `1.2 G`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:.0f} {unit}"
    return f"{count:.3g}"


def human_time(seconds: float) -> str:
    """Write `45 s`, `3 min 20 s`, `2 h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    unit, part = ("h", "min") if whole >= 3600 else ("min", "s")
    more, rest = divmod(whole // 60 if unit == "h" else whole, 60)
    return f"{more} {unit} {rest} {part}" if rest else f"{more} {unit}"


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """Show a bar on stderr for every `what` that a `loader.progress.Progress` caller reports, and leave it there."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    text, percentage = TextColumn("{task.description}"), TextColumn("{task.percentage:>3.0f}%")
    bars = Bars(text, BarColumn(), percentage, TimeElapsedColumn(), console=Console(stderr=True))
    tasks: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        if not tasks:
            # Not before: bars that never come would leave an empty line before an error.
            bars.start()
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total)
        bars.update(tasks[what], completed=done, total=total)

    try:
        yield show
    finally:
        if tasks:
            bars.stop()
