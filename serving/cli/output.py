"""What commands print: tables, progress bars, sizes, times."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table

    from loader.progress import Progress

PIPE_COLUMNS = 140
MAX_ROWS = 16
_COLUMN_WIDTH = 11


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document on stdout."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


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


def print_document(document: Mapping[str, Any], name: str = "") -> None:
    """Print what `--json` prints as text, by the same names; `name` is that of the document, if it has one.

    The fields of an object are a line, an object in it is the next one; a list of objects is a table. What is empty is
    left out.
    """
    nested = {
        key: value for key, value in document.items() if value and (_is_list(value) or isinstance(value, Mapping))
    }
    if line := _line({key: value for key, value in document.items() if key not in nested}):
        click.echo(f"{name}: {line}" if name else line)
    for key, value in nested.items():
        label = f"{name}.{key}" if name else key
        if _is_list(value):
            _print_list(label, value)
        else:
            print_document(value, label)


def _print_list(name: str, objects: Sequence[Mapping[str, Any]]) -> None:
    """Print objects as a table, or a line each if there are too many fields; of many those with the most bytes.

    Lists of objects in them follow, each as one list, whose objects begin with the first field of the one they are of.
    """
    keys = {key: None for fields in objects for key, value in fields.items() if not _is_empty(value)}
    inner = {key for fields in objects for key, value in fields.items() if value and _is_list(value)}
    columns, shown = [key for key in keys if key not in inner], objects
    if len(objects) > MAX_ROWS:
        size = next((key for key in columns if "bytes" in key), None)
        shown = (objects if size is None else sorted(objects, key=lambda fields: -fields[size]))[:MAX_ROWS]
    title = f"{name}, {len(shown)} of {len(objects)}" if len(shown) < len(objects) else name
    console = stdout_console()
    if len(columns) * _COLUMN_WIDTH > console.width:
        for fields in shown:
            click.echo(f"{title}: {_line({key: fields.get(key) for key in columns})}")
    else:
        texts = {key for key in columns for fields in shown if not isinstance(fields.get(key), int | float | None)}
        heads = [("" if key in texts else "#") + key.replace("_", " ") for key in columns]
        console.print(table_of(title, heads, [[text_of(key, fields.get(key)) for key in columns] for fields in shown]))
    for key in sorted(inner):
        parent = name.rpartition(".")[2]
        named = [
            {parent: next(iter(fields.values()))} | dict(child) for fields in objects for child in fields.get(key) or ()
        ]
        _print_list(f"{name}.{key}", named)


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)


def _is_empty(value: object) -> bool:
    return value is None or (not value and not isinstance(value, int | float))


def _line(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {text_of(key, value)}" for key, value in fields.items() if not _is_empty(value))


def text_of(name: str, value: Any) -> str:
    """Write a value of a document: a number as its name says, such as `_bytes`, `_share` and `_at`."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case Mapping():
            return _line(value)
        case list() | tuple():
            cut = [f"... ({len(value)})"] if len(value) > MAX_ROWS else []
            return ", ".join([*(text_of(name, item) for item in value[:MAX_ROWS]), *cut])
        case int() | float() if "bytes" in name:
            return human_bytes(value)
        case float() if name == "at" or name.endswith("_at"):
            return f"{datetime.fromtimestamp(value, tz=UTC):%Y-%m-%d %H:%M:%S} UTC"
        case float() if name.endswith(("share", "rate")):
            return f"{value:.2%}"
        case float() if name.endswith("_us"):
            return f"{value:.1f}"
        case float():
            return f"{value:.4g}" if abs(value) < 1000 else human_count(value)
        case int():
            return str(value) if value < 1_000_000 else human_count(value)
    return str(value)[:12] if name in ("identity", "digest") else str(value)


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
