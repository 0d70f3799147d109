"""What commands print: tables, progress bars, sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from pydantic import BaseModel

PIPE_COLUMNS = 140


def print_json(value: BaseModel) -> None:
    """One JSON document on stdout."""
    click.echo(value.model_dump_json(indent=2))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout; columns whose name starts with `#` hold numbers and go to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, min_width=len(title))
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.startswith("#") else "left"
        table.add_column(column.removeprefix("#"), justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    stdout_console().print(table)


def stdout_console() -> Console:
    """The terminal, or a file or pipe whose lines are not cut at 80 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)


def human_bytes(size_bytes: int) -> str:
    """`1.5 MB`; powers of 1000."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


class ProgressBars:
    """A bar for every `what` that a `loader.progress.Progress` caller reports; on stderr."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        """Moves the bar of `what`; makes it first."""
        if not self._tasks:
            # Not before: bars that never come would leave an empty line before an error.
            self._bars.start()
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done, total=total)

    def stop(self) -> None:
        """Leaves the bars as they are."""
        if self._tasks:
            self._bars.stop()


@contextlib.contextmanager
def progress_bars() -> Iterator[ProgressBars]:
    """Shows bars while its block runs, and leaves them on the screen."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    bars = Progress(*columns, console=Console(stderr=True))
    shown = ProgressBars(bars)
    try:
        yield shown
    finally:
        shown.stop()
